"""How large the runs of a figure are: what two cores finish, and what the field takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from raycl.config import RunConfig
from raycl.errors import ConfigError

ScaleName = Literal["cpu", "gpu"]


@final
@dataclass(frozen=True, kw_only=True)
class Scale:
    """Settings of all figures; ``num_train`` images are drawn from the training set, None takes all.

    ``text`` says of them what no setting of a run can alter.
    """

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
        text="cut for two cores: 10,000 training images drawn at random, or all where there are fewer",
    ),
    "gpu": Scale(
        image_size=32,
        num_train=None,
        overrides={**_JUDGED_AFTERWARDS, "precision": "bfloat16", "augment.crop_scale": [0.2, 1.0]},
        text="all training images",
    ),
}


def describe_runs(scale: ScaleName, configs: Sequence[RunConfig]) -> str:
    """Return what is true of all these runs: images, encoder and batch where they are the same; and their lengths."""
    told = [
        {f"{config.data.image_size} pixels" for config in configs},
        {_encoder(config) for config in configs},
        {f"batches of {stage.batch_size:,}" for config in configs for stage in config.stages},
    ]
    same = [facts.pop() for facts in told if len(facts) == 1]
    return ", ".join([SCALES[scale].text, *same, " or ".join(dict.fromkeys(map(_length, configs)))])


def _encoder(config: RunConfig) -> str:
    encoder = config.encoder
    return f"{encoder.name} of width {encoder.width:g} (stem: {encoder.stem})"


def _length(config: RunConfig) -> str:
    counts = {unit: sum(getattr(stage, unit) or 0 for stage in config.stages) for unit in ("epochs", "steps")}
    return " and ".join(f"{count:,} {unit}" for unit, count in counts.items() if count)


def find_scale(name: str) -> ScaleName:
    """Return the scale of this name; raises ``ConfigError`` naming those that there are."""
    for known in SCALES:
        if known == name:
            return known
    raise ConfigError(f"unknown --scale {name!r}; there are {', '.join(SCALES)}")
