"""Losses of every recipe with one worker and with several: equal for the same global batch size."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raycl
from raycl.recipes import RECIPES
from raycl.records import read_metrics
from raycl.storage import Place
from tests.images import write_digits
from tests.pairs import BAG, TRANSFORMER, write_captioned, write_pairs, write_texts
from tests.settings import override_active

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.drill]

NUM_ROWS = 360
COMMON: dict[str, Any] = {
    "cpus_per_worker": 0.5,
    "stages.0.epochs": 3,
    "stages.0.batch_size": 32,
    "evaluation.num_test": 40,
    "log_every_steps": 1,
}
# Each worker draws its own dropout, so it is disabled.
IMAGES = {
    "data.channels": 1,
    "evaluation.k": 20,
    "encoder.name": "tests.cluster.networks:small",
    "encoder.kwargs": {"channels": 1, "dropout": 0.0},
}
QUEUE = {"negatives.capacity": 128}
TEXTS = {"text.vocabulary_size": 400}
CAPTIONS = TEXTS | IMAGES | {"text_encoder.kwargs": BAG, "projection_head.dim": 16}
OWN: dict[str, dict[str, Any]] = {
    "simclr": IMAGES,
    # At the temperatures of these recipes, rounding grows beyond 1e-4 within 22 and 16 steps.
    "dcl": IMAGES | {"stages.0.temperature": 0.2},
    # Read without prefetching: prefetched rows depend on timing.
    "sogclr": IMAGES | {"bank.max_staleness": 0},
    "supcon": IMAGES | {"stages.0.temperature": 0.2, "data.samples_per_class": 4},
    "moco_v1": IMAGES | QUEUE,
    "moco_v2": IMAGES | QUEUE,
    "moco_v3": IMAGES,
    # At the recipe's learning rate, rounding grows until another row of the queue is the nearest, after 13 steps.
    "nnclr": IMAGES | QUEUE | {"stages.0.learning_rate": 0.012},
    "instance_discrimination": IMAGES
    | {"negatives.num_negatives": 64, "batchnorm": "synchronized", "bank.max_staleness": 0},
    "simcse": TEXTS | {"encoder.kwargs": TRANSFORMER, "projection_head.dim": 16},
    "esimcse": TEXTS | QUEUE | {"encoder.kwargs": TRANSFORMER, "projection_head.dim": 16},
    "two_tower": TEXTS | {"encoder.kwargs": BAG, "projection_head.dim": 16},
    "clip": CAPTIONS,
    "siglip": CAPTIONS,
}
WRITTEN: dict[str, Callable[[Path, int], Path]] = {
    "simcse": write_texts,
    "esimcse": write_texts,
    "two_tower": write_pairs,
    "clip": write_captioned,
    "siglip": write_captioned,
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_do_not_depend_on_the_number_of_workers(recipe: str, tmp_path: Path) -> None:
    data = WRITTEN.get(recipe, write_digits)(tmp_path / "data.parquet", NUM_ROWS)

    def losses(workers: int) -> list[float]:
        config = override_active(
            raycl.recipe(recipe, image_size=16), {**COMMON, **OWN[recipe], "workers": workers}
        )
        output = tmp_path / f"{workers}"
        raycl.train(config, data=str(data), output=str(output), quiet=True)
        return [line["loss"] for line in read_metrics(Place(str(output))) if "loss" in line]

    alone = losses(1)
    assert len(alone) >= 3 * (NUM_ROWS - 80) // 32
    assert alone[-1] != alone[0]
    for workers in (2, 4):
        several = losses(workers)
        # The loss against an empty queue is 0.
        apart = max(abs(few - one) / max(one, 1.0) for few, one in zip(several, alone, strict=True))
        print(
            f"{recipe}: 1 and {workers} workers, losses of {len(alone)} steps differ by {apart:.1e} at most"
        )
        assert several == pytest.approx(alone, rel=1e-4, abs=1e-4)
