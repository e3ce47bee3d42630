"""Rows that meet their candidates block by block against rows that meet all of them at once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from raycl.losses import info_nce, rectangle
from raycl.losses.blocks import BlockWalk, add_column_gradient, subtract_positives
from raycl.losses.rectangle import Block, Side, scaled_gradients
from raycl.losses.tiled import LOG2_E, Softmax, longest
from tests.embeddings import make_rows, make_views
from tests.gradients import assert_close, leaves, tolerance_at

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_WORKERS, LOCAL = 3, 11
TEMPERATURES = (0.2, 0.01)


@pytest.fixture(params=("small tiles", "one tile"))
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "small tiles":
        monkeypatch.setattr(rectangle, "STRIP_ROWS", 4)
        monkeypatch.setattr(rectangle, "tile_size", lambda _: 2)
        monkeypatch.setattr("raycl.losses.blocks.STRIP_ROWS", 3)


class Workers:
    """Queries, keys and ids of some workers, each of which meets the blocks of all."""

    def __init__(self, dtype: torch.dtype, temperature: float, *, distinct: bool = False) -> None:
        views = make_views(NUM_WORKERS * LOCAL, 6)
        self.query, self.key, self.temperature = leaves(*views, torch.tensor(temperature), dtype=dtype)
        # Repeated by other workers, and within the last one.
        self.ids = torch.arange(NUM_WORKERS * LOCAL) % (10**9 if distinct else 2 * LOCAL + 3)
        self.sides = (Side(slice(0, LOCAL), positive=0, own=None),)

    def own(self, rank: int) -> slice:
        return slice(rank * LOCAL, (rank + 1) * LOCAL)

    def ring(self, rank: int) -> list[int]:
        return [(rank - step) % NUM_WORKERS for step in range(NUM_WORKERS)]

    def block(self, rows: Tensor, rank: int, other: int) -> Block:
        return Block(rows[self.own(other)].detach(), (self.ids[self.own(rank)], self.ids[self.own(other)]))

    def walk(self, rank: int, others: tuple[Block, ...] = ()) -> tuple[BlockWalk, Softmax]:
        own, key = self.own(rank), self.key.detach()
        length = torch.stack([longest(rows, key.dtype) for rows in (key, *(each.columns for each in others))])
        walk = BlockWalk(
            self.query.detach()[own],
            key[own],
            self.sides,
            scale=LOG2_E / self.temperature.detach(),
            longest_column=length.amax(),
            wants_gradient=True,
        )
        for block in others:
            walk.meet(block)
        for other in self.ring(rank):
            walk.meet(self.block(self.key, rank, other), holds_positives=other == rank)
        return walk, walk.finish()

    def scaled(self, rank: int, *gradients: Tensor | None) -> list[Tensor]:
        scaled = scaled_gradients(self.query.detach()[self.own(rank)], gradients, self.temperature)
        return [each.detach() for each in scaled if each is not None]

    def whole_loss(self, rank: int, **arguments: Any) -> Tensor:
        own = self.own(rank)
        return info_nce(
            self.query[own],
            self.key[own],
            temperature=self.temperature,
            gathered_key=self.key,
            offset=own.start,
            sample_id=self.ids[own],
            gathered_sample_id=self.ids,
            **arguments,
        )


def tolerance_of(dtype: torch.dtype, temperature: float) -> float:
    return 1e-10 if dtype == torch.float64 else tolerance_at(temperature)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("distinct", (False, True))
def test_blocks_together_give_loss_and_gradients_of_all_candidates_at_once(
    distinct: bool, temperature: float, dtype: torch.dtype
) -> None:
    workers = Workers(dtype, temperature, distinct=distinct)
    negatives, negative_id = make_rows(19, 6).to(dtype), torch.arange(19) * 2
    for rank in range(NUM_WORKERS):
        own = workers.own(rank)
        walk, softmax = workers.walk(rank, (Block(negatives, (workers.ids[own], negative_id)),))
        loss = workers.whole_loss(rank, negatives=negatives, negative_id=negative_id)
        at_query, at_temperature = torch.autograd.grad(loss, [workers.query, workers.temperature])
        ours = [softmax.loss.mean(), *workers.scaled(rank, walk.gradient)]
        assert_close(ours, [loss, at_query[own], at_temperature], tolerance_of(dtype, temperature))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_visiting_rows_give_the_gradient_that_all_losses_ask_of_a_column(
    temperature: float, dtype: torch.dtype
) -> None:
    workers = Workers(dtype, temperature)
    softmax = [workers.walk(rank)[1] for rank in range(NUM_WORKERS)]
    losses = torch.stack([workers.whole_loss(rank) for rank in range(NUM_WORKERS)])
    (true,) = torch.autograd.grad(losses.sum(), workers.key)
    scale = LOG2_E / workers.temperature.detach()
    for rank in range(NUM_WORKERS):
        query, key = workers.query.detach()[workers.own(rank)], workers.key.detach()[workers.own(rank)]
        gradient = torch.zeros_like(key)
        for other in workers.ring(rank):
            block, diagonals = workers.block(workers.query, rank, other), (0,) if other == rank else ()
            theirs = softmax[other].logsumexp
            add_column_gradient(gradient, key, block, theirs, scale=scale, diagonals=diagonals)
        subtract_positives(gradient, query, softmax[rank].missing, workers.sides)
        ours, *_ = workers.scaled(rank, gradient)
        assert_close([ours], [true[workers.own(rank)]], tolerance_of(dtype, temperature))


@pytest.mark.parametrize("order", (1, -1))
def test_a_block_that_beats_all_before_it_is_weighed_right(order: int) -> None:
    """At a low temperature the shift follows the greatest logit, here from block to block."""
    workers = Workers(torch.float64, 0.005)
    nearer = torch.linspace(0.0, 1.0, 60, dtype=torch.float64)[:, None] * workers.query.detach()[:1]
    nearer = nearer + 0.05 * make_rows(60, 6).double()
    _, softmax = workers.walk(0, tuple(Block(each) for each in nearer.split(20)[::order]))
    ids = {"negatives": nearer, "negative_id": torch.full((60,), -1)}
    assert_close([softmax.loss.mean()], [workers.whole_loss(0, **ids)], 1e-12)


def test_rows_without_any_negative_have_no_loss_and_no_gradient() -> None:
    workers = Workers(torch.float32, 0.1)
    workers.ids = torch.zeros_like(workers.ids)
    walk, softmax = workers.walk(1)
    assert walk.gradient is not None
    for each in (softmax.loss, softmax.missing, walk.gradient):
        assert torch.equal(each, torch.zeros_like(each))
    gradient = torch.zeros(LOCAL, 6)
    block = workers.block(workers.query, 1, 2)
    add_column_gradient(
        gradient, workers.key.detach()[:LOCAL], block, softmax.logsumexp, scale=torch.tensor(10.0)
    )
    assert not gradient.any()


def test_a_half_precision_block_is_met_as_its_rows_in_full_precision() -> None:
    workers = Workers(torch.float32, 0.1)
    half = make_rows(30, 6).bfloat16()
    walks = [workers.walk(0, (Block(rows),)) for rows in (half, half.float())]
    assert torch.equal(walks[0][1].loss, walks[1][1].loss)


def test_logits_near_the_bound_do_not_overflow_where_only_the_other_blocks_are_long() -> None:
    workers = Workers(torch.float32, 0.5)
    _, softmax = workers.walk(0, (Block(300.0 * make_rows(20, 6)),))
    assert softmax.loss.isfinite().all()
