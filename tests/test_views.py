"""The views of a batch: new in each epoch, two per sample, and independent of the position in the batch."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raycl.config.overrides import override
from raycl.data.images import Pixels
from raycl.data.in_memory import Batch
from raycl.data.texts import TokenLists, Tokens
from raycl.recipes import recipe
from raycl.training.transforms import ImageTransform, build_transform
from raycl.training.views import ViewMaker, Views
from tests.images import photograph
from tests.pretend_gpu import CPU
from tests.pretended_steps import SMALL, Case, Worker, batch

CASES = {
    "images": Case("simclr", SMALL | {"augment.blur": 0.5}),
    "texts": Case("esimcse", {"text_augment.repetition": 0.5}),
    "images with captions": Case("clip", SMALL | {"augment.jitter": 0.8, "projection_head.dim": 32}),
}


@pytest.fixture(params=CASES)
def worker(request: pytest.FixtureRequest) -> Worker:
    case = CASES[request.param]
    small = {"text_encoder.kwargs": {"dim": 32, "hidden_dim": 32}} if case.recipe == "clip" else {}
    return Worker(replace(case, settings=case.settings | small), device=CPU)


def views_of(maker: ViewMaker, rows: Batch) -> tuple[Tensor, Tensor]:
    views = next(maker.views(iter([rows])))
    assert views.view_b is not None
    return views.view_a, views.view_b


def differ(one: Tensor, other: Tensor) -> Tensor:
    """Return which rows differ; texts may differ in length."""
    if one.ndim == 2:
        length = max(one.shape[1], other.shape[1])
        one, other = (torch.nn.functional.pad(each, (0, length - each.shape[1])) for each in (one, other))
    return (one != other).flatten(1).any(1)


def test_every_epoch_has_different_views(worker: Worker) -> None:
    rows = batch(worker.config, 0)
    first, second = (views_of(worker.maker, replace(rows, epoch=epoch)) for epoch in (0, 1))
    assert differ(first[0], second[0]).float().mean() > 0.5
    again = views_of(worker.maker, rows)
    assert not any(differ(one, other).any() for one, other in zip(first, again, strict=True))


def test_the_two_views_of_a_sample_are_different(worker: Worker) -> None:
    view_a, view_b = views_of(worker.maker, batch(worker.config, 0))
    if worker.config.data.kind != "image_text":  # there the second view is the caption
        assert differ(view_a, view_b).float().mean() > 0.5


def test_a_view_does_not_depend_on_its_position_in_the_batch(worker: Worker) -> None:
    rows = batch(worker.config, 0)
    order = np.random.default_rng(0).permutation(len(rows))
    plain, permuted = views_of(worker.maker, rows), views_of(worker.maker, reordered(rows, order))
    for one, other in zip(plain, permuted, strict=True):
        torch.testing.assert_close(one[torch.from_numpy(order)], other)


def test_views_of_a_stage_equal_those_of_a_run_at_its_image_size(worker: Worker) -> None:
    rows, config = batch(worker.config, 0), worker.config
    views = next(worker.maker.views(iter([rows]), image_size=20))
    assert views.view_b is not None
    tokenizer = None if worker.vocabulary is None else worker.vocabulary.tokenizer
    if config.data.kind != "text":  # texts have no size: the other run is the same one
        config = override(
            config, {"data.image_size": 20, "data.decode_size": config.data.resolved_decode_size}
        )
        assert views.view_a.shape[2:] == (20, 20)
    maker = ViewMaker.of(config, build_transform(config, tokenizer), CPU)
    for one, other in zip((views.view_a, views.view_b), views_of(maker, rows), strict=True):
        assert torch.equal(one, other)


def test_a_view_shows_the_same_crop_in_the_same_colors_at_every_size() -> None:
    photographs = np.stack([photograph()[top : top + 96, 200:296] for top in range(0, 320, 40)])
    transform = ImageTransform.of(override(recipe("simclr", image_size=64), {"augment.blur": 0.0}))
    rows = Batch(
        contents={"image": Pixels(photographs, np.ones(len(photographs), np.float32))},
        sample_id=np.arange(len(photographs)),
        label=np.zeros(len(photographs), np.int64),
        epoch=0,
    )
    large, other = (transform.view(rows, number).on(CPU) for number in (0, 1))
    small = transform.with_image_size(16).view(rows, 0).on(CPU)
    shrunk, other = (torch.nn.functional.avg_pool2d(each, 4) for each in (large, other))
    distance = (small - shrunk).square().mean((1, 2, 3)).sqrt()
    assert (distance < 0.3 * (small - other).square().mean((1, 2, 3)).sqrt()).all()


def test_a_snapshot_shows_two_views_though_a_memory_bank_needs_one() -> None:
    bank = Worker(Case("instance_discrimination", SMALL), device=CPU)
    rows, transform = batch(bank.config, 0), bank.maker.transform
    assert isinstance(transform, ImageTransform)
    assert bank.maker.num_views == 1
    first, second = (transform.view(rows, number).on(CPU) for number in (0, 1))
    assert differ(first, second).all()
    of_two = replace(transform, augmentations=transform.augmentations * 2)
    assert torch.equal(second, of_two.view(rows, 1).on(CPU))


MANY = {"augment.views": [{"count": 3}, {"count": 4, "size": 16, "crop_scale": [0.05, 0.14]}]}


def all_views(views: Views) -> list[Tensor]:
    assert views.view_b is not None
    return [views.view_a, views.view_b, *views.further, *views.crops]


@pytest.fixture
def many() -> Worker:
    return Worker(Case("simclr", SMALL | MANY), device=CPU)


def test_further_views_leave_the_first_two_as_they_are(many: Worker) -> None:
    rows = batch(many.config, 0)
    two = Worker(Case("simclr", SMALL), device=CPU)
    views = next(many.maker.views(iter([rows])))
    for one, other in zip(views_of(two.maker, rows), all_views(views)[:2], strict=True):
        assert torch.equal(one, other)


def test_every_view_of_a_sample_has_its_size_and_its_own_draws(many: Worker) -> None:
    views = next(many.maker.views(iter([batch(many.config, 0)])))
    assert [len(views.further), len(views.crops)] == [1, 4]
    assert [each.shape[-1] for each in all_views(views)] == [32, 32, 32, 16, 16, 16, 16]
    for size in (32, 16):
        of_size = [each for each in all_views(views) if each.shape[-1] == size]
        for one, other in combinations(of_size, 2):
            assert differ(one, other).all()


def test_small_crops_show_a_part_of_the_size_in_their_crop_scale(many: Worker) -> None:
    rows = batch(many.config, 0)
    transform = many.maker.transform
    assert isinstance(transform, ImageTransform)
    area = 32 * 32
    for number in range(7):
        drawn = transform.view(rows, number).tensors[1]
        share = drawn[:, 2] * drawn[:, 3] / area
        low, high = (0.05, 0.14) if number >= 3 else (0.08, 1.0)
        # Sides are rounded to whole pixels, of 7 at least.
        assert (share > 0.8 * low).all() and (share < 1.2 * high).all()


@pytest.mark.parametrize("num_workers", [2, 4])
def test_any_number_of_workers_draws_the_same_views(many: Worker, num_workers: int) -> None:
    rows = batch(many.config, 0)
    whole = next(many.maker.views(iter([rows])))
    parts = [
        next(many.maker.views(iter([reordered(rows, part)])))
        for part in np.array_split(np.arange(len(rows)), num_workers)
    ]
    for alone, *together in zip(all_views(whole), *map(all_views, parts), strict=True):
        assert torch.equal(alone, torch.cat(together))


def test_views_of_a_stage_keep_the_ratio_of_their_sizes(many: Worker) -> None:
    rows = batch(many.config, 0)
    views = next(many.maker.views(iter([rows]), image_size=20))
    assert [each.shape[-1] for each in all_views(views)] == [20, 20, 20, 10, 10, 10, 10]
    stage = many.stage.model_copy(update={"image_size": 20})
    assert many.config.views_by_size(stage) == {20: 3, 10: 4}


def reordered(rows: Batch, order: np.ndarray) -> Batch:
    contents = {role: _reordered(content, order) for role, content in rows.contents.items()}
    return replace(rows, contents=contents, sample_id=rows.sample_id[order], label=rows.label[order])


def _reordered(content: Any, order: np.ndarray) -> Any:
    if isinstance(content, Pixels):
        return Pixels(content.images[order], content.aspect[order])
    tokens = content.tokens
    texts = np.split(tokens.values, np.cumsum(tokens.lengths)[:-1])
    shuffled = Tokens(
        np.concatenate([texts[place] for place in order]), tokens.lengths[order], tokens.text_id[order]
    )
    return TokenLists(shuffled, content.counts[order])
