"""The views of a batch: new in each epoch, two per sample, and independent of the position in the batch."""

from dataclasses import replace
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
from raycl.training.views import ViewMaker
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
