"""How large the runs of a figure are: what two cores finish, and what the field takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

from raycl.errors import ConfigError

ScaleName = Literal["cpu", "gpu"]


@final
@dataclass(frozen=True, kw_only=True)
class Scale:
    """Settings of all figures; ``num_train`` images are drawn from the training set, None takes all."""

    image_size: int
    num_train: int | None
    overrides: Mapping[str, Any]
    text: str


# Every image of the test set judges, and no image of the training set is held out, unless a figure
# shows how kNN grows in the course of a run.
_JUDGED_AFTERWARDS = {"evaluation.every_epochs": 0}

SCALES: dict[ScaleName, Scale] = {
    "cpu": Scale(
        image_size=24,
        num_train=10_000,
        overrides={
            **_JUDGED_AFTERWARDS,
            "precision": "bfloat16",
            "encoder.name": "resnet10",
            "encoder.stem": "half",
            "encoder.width": 0.5,
            "augment.crop_scale": [0.2, 1.0],
        },
        text=(
            "cut for two cores: 10,000 training images drawn at random, 24 pixels, a ResNet-10 of half width "
            "whose stem halves the image, a few epochs"
        ),
    ),
    "gpu": Scale(
        image_size=32,
        num_train=None,
        overrides={**_JUDGED_AFTERWARDS, "precision": "bfloat16", "augment.crop_scale": [0.2, 1.0]},
        text="the recipes as they are: all training images at 32 pixels, ResNet-18, 200 epochs",
    ),
}


def find_scale(name: str) -> ScaleName:
    """Return the scale of this name; raises ``ConfigError`` naming those that there are."""
    for known in SCALES:
        if known == name:
            return known
    raise ConfigError(f"unknown --scale {name!r}; there are {', '.join(SCALES)}")
