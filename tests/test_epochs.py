"""Epochs announce their predecessor and successor to the sampler."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import pyarrow as pa
import pytest
import torch

import raycl
from raycl.augment.images import ImageAugmentation
from raycl.data.images import ImageFormat
from raycl.data.in_memory import Batch, InMemoryDataset
from raycl.data.sampler import BatchShard, InMemorySampler
from raycl.training.stages import Position, StagePlan, stage_plans
from raycl.training.transforms import ImageTransform
from raycl.training.views import Epochs, ViewMaker, Views

NUM_ROWS, SIZE, BATCH_SIZE = 22, 8, 4  # five batches per epoch
SHARE = BatchShard(batch_size=BATCH_SIZE)


@dataclass
class RecordingSampler:
    """A sampler that records its calls: epoch, start, ``continues`` and ``has_next``."""

    shuffled: InMemorySampler
    calls: list[tuple[int, int, bool, bool]] = field(default_factory=list)

    def epoch_batches(
        self,
        share: BatchShard,
        *,
        epoch: int,
        start: int = 0,
        continues: bool = False,
        has_next: bool = False,
    ) -> Iterator[Batch]:
        self.calls.append((epoch, start, continues, has_next))
        return self.shuffled.epoch_batches(share, epoch=epoch, start=start)


@pytest.fixture
def sampler() -> RecordingSampler:
    pixels = [bytes([row]) * (SIZE * SIZE) for row in range(NUM_ROWS)]
    columns = {
        "image.pixels": pa.array(pixels, pa.binary(SIZE * SIZE)),
        "image.aspect": pa.array(np.ones(NUM_ROWS), pa.float32()),
        "sample_id": pa.array(np.arange(NUM_ROWS), pa.int64()),
        "label": pa.array(np.zeros(NUM_ROWS), pa.int64()),
    }
    rows = InMemoryDataset([pa.table(columns)], {"image": ImageFormat(size=SIZE, channels=1)})
    return RecordingSampler(InMemorySampler(rows=rows, seed=3))


@pytest.fixture
def epochs(sampler: RecordingSampler) -> Epochs:
    augmentation = ImageAugmentation(size=SIZE, channels=1, mean=(0.5,), std=(0.5,))
    drawing = ImageTransform(augmentations=(augmentation, augmentation), seed=0)
    return Epochs(sampler, ViewMaker(transform=drawing, num_views=2, num_full=2, device=torch.device("cpu")))  # type: ignore[arg-type]


def plan_of(**length: int) -> StagePlan:
    return plans_of(**{f"stages.0.{name}": value for name, value in length.items()})[0]


def plans_of(**settings: object) -> list[StagePlan]:
    stages = {"stages.0.batch_size": BATCH_SIZE, "stages.0.epochs": None}
    return stage_plans(raycl.override(raycl.recipe("simclr"), stages | settings), num_train=[NUM_ROWS])


def ids_of(epochs: Epochs, position: Position, plan: StagePlan) -> list[list[int]]:
    return [views.ids.tolist() for views in views_of(epochs, position, plan)]


def views_of(epochs: Epochs, position: Position, plan: StagePlan) -> Iterator[Views]:
    """Return the views of the epoch at this position, like the trainer."""
    return epochs.views(
        SHARE,
        epoch=position.epoch,
        start=position.epoch_step,
        has_next=plan.has_epoch_after(position),
        image_size=plan.stage.image_size,
    )


def after_an_epoch(position: Position, num_steps: int) -> Position:
    for _ in range(num_steps):
        position = position.next_step(batch_size=BATCH_SIZE)
    return position.next_epoch()


def test_each_epoch_continues_the_previous_one_and_the_last_one_has_no_next(
    epochs: Epochs, sampler: RecordingSampler
) -> None:
    position, plan, drawn = Position(), plan_of(epochs=3), []
    for _ in range(3):
        drawn.append(ids_of(epochs, position, plan))
        position = after_an_epoch(position, 5)
    assert sampler.calls == [(0, 0, False, True), (1, 0, True, True), (2, 0, True, False)]
    assert drawn == [
        [batch.sample_id.tolist() for batch in sampler.shuffled.epoch_batches(SHARE, epoch=epoch)]
        for epoch in range(3)
    ]


@pytest.mark.parametrize(("steps", "has_next"), [(4, False), (5, False), (6, True)])
def test_a_stage_limited_by_steps_announces_only_epochs_that_it_reaches(
    epochs: Epochs, sampler: RecordingSampler, steps: int, has_next: bool
) -> None:
    ids_of(epochs, Position(), plan_of(steps=steps))
    assert sampler.calls == [(0, 0, False, has_next)]


def test_a_resumed_epoch_runs_its_remaining_steps(epochs: Epochs, sampler: RecordingSampler) -> None:
    resumed = Position(step=3, samples=12, epoch_step=3, stage_step=3)
    uninterrupted = ids_of(epochs, Position(), plan_of(steps=5))
    assert ids_of(epochs, resumed, plan_of(steps=5)) == uninterrupted[3:]
    ids_of(epochs, resumed, plan_of(steps=6))
    assert sampler.calls[1:] == [(0, 3, False, False), (0, 3, False, True)]


def test_only_the_next_epoch_after_a_complete_one_continues_it(
    epochs: Epochs, sampler: RecordingSampler
) -> None:
    plan, first = plan_of(epochs=9), Position()
    views = views_of(epochs, first, plan)
    next(views)
    views.close()  # as when a stage ends
    second = after_an_epoch(first, 1)
    ids_of(epochs, second, plan)
    ids_of(epochs, second, plan)  # as after a rollback
    third = after_an_epoch(second, 5)
    ids_of(epochs, replace(third, epoch_step=2, stage_step=third.stage_step + 2), plan)
    ids_of(epochs, after_an_epoch(third, 5), plan)
    assert [(epoch, continues) for epoch, _, continues, _ in sampler.calls] == [
        (0, False),
        (1, False),
        (1, False),
        (2, False),
        (3, True),
    ]


def test_a_restarted_epoch_does_not_continue_the_previous_one_again(
    epochs: Epochs, sampler: RecordingSampler
) -> None:
    plan, first = plan_of(epochs=9), Position()
    ids_of(epochs, first, plan)
    second = after_an_epoch(first, 5)
    views = views_of(epochs, second, plan)
    next(views)
    views.close()  # as when the run returns to the start of the epoch
    ids_of(epochs, second, plan)
    assert [continues for _, _, continues, _ in sampler.calls] == [False, True, False]


def test_a_later_stage_restarts_and_counts_its_own_epochs_and_steps(
    epochs: Epochs, sampler: RecordingSampler
) -> None:
    second_stage = {"stages.1.batch_size": BATCH_SIZE, "stages.1.epochs": 2, "stages.1.steps": None}
    first, second = plans_of(**{"stages.0.steps": 10}, **second_stage)
    position = Position()
    for plan in (first, first, second, second):
        if plan is second and position.stage == 0:
            position = position.next_stage()
        ids_of(epochs, position, plan)
        position = after_an_epoch(position, 5)
    others = [(epoch, has_next) for epoch, _, _, has_next in sampler.calls]
    assert others == [(0, True), (1, False), (2, True), (3, False)]
    of_steps = second.stage.model_copy(update={"epochs": None, "steps": 6})
    ids_of(epochs, Position(step=20, epoch=4, stage=2), replace(second, stage=of_steps))
    assert sampler.calls[-1][-1] is True


def test_plain_returns_the_first_epoch_without_augmentation_with_its_ids(epochs: Epochs) -> None:
    batches = list(epochs.plain(SHARE))
    assert len(batches) == 5
    for images, sample_id in batches:
        assert torch.allclose(images[:, 0, 0, 0], (sample_id / 255 - 0.5) / 0.5, atol=1e-6)


def test_a_stage_draws_its_views_at_its_image_size_and_the_next_one_at_its_own(epochs: Epochs) -> None:
    position = Position()
    plans = plans_of(**{"stages.0.steps": 2, "stages.0.image_size": 12, "stages.1.image_size": None})
    shapes = []
    for plan in plans:
        shapes += [views.view_a.shape[2:] for views in islice(views_of(epochs, position, plan), 2)]
        position = position.next_step(batch_size=BATCH_SIZE).next_step(batch_size=BATCH_SIZE).next_stage()
    assert shapes == [(12, 12)] * 2 + [(SIZE, SIZE)] * 2
