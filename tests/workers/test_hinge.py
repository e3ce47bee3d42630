"""The hinge loss of several workers, gathered and averaged by DDP, equals that of one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

from raycl.distributed import gather, gather_detached, gather_uneven
from raycl.losses import hinge
from tests.plain_losses import WAYS, plain_hinge
from tests.workers.clicks import BATCH, make_clicks, mean_and_gradients, part_of
from tests.workers.processes import run_workers


class TwoTowers(nn.Module):
    """A tower for each side, in float64, so that only the mathematics differs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of_queries = nn.Linear(7, 5).double()
        self.key_tower = nn.Linear(7, 5).double()

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(self.of_queries(rows), dim=1), normalize(self.key_tower(rows), dim=1)


def make_samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    # Two samples share an id on different workers: they are false negatives to each other.
    sample_id = torch.arange(BATCH)
    sample_id[BATCH - 1] = 0
    return torch.randn(BATCH, 7, generator=generator, dtype=torch.float64), sample_id


def loss_and_gradients(rank: int, num_workers: int, ways: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    module = TwoTowers()
    parallel = DistributedDataParallel(module) if num_workers > 1 else module
    local = BATCH // num_workers
    rows, sample_id = (each[rank * local : (rank + 1) * local] for each in make_samples())
    query, key = parallel(rows)
    loss = hinge(
        query,
        key,
        margin=0.3,
        gathered_query=gather(query) if ways["bidirectional"] else None,
        gathered_key=gather(key),
        offset=rank * local,
        sample_id=sample_id,
        gathered_sample_id=gather_detached(sample_id),
        **ways,
    )
    return mean_and_gradients(loss, module)


@pytest.mark.parametrize("hardest", (False, True))
@pytest.mark.parametrize("bidirectional", (False, True))
def test_two_workers_give_loss_and_gradient_of_the_whole_batch(hardest: bool, bidirectional: bool) -> None:
    ways = {"hardest": hardest, "bidirectional": bidirectional}
    (samples, sample_id), module = make_samples(), TwoTowers()
    whole = hinge(*module(samples), margin=0.3, sample_id=sample_id, **ways)
    whole.backward()
    expected = [parameter.grad for parameter in module.parameters()]
    assert all(gradient is not None and gradient.norm() > 1e-3 for gradient in expected)
    for loss, gradients in run_workers(loss_and_gradients, 2, ways):
        torch.testing.assert_close(loss, whole.detach())
        torch.testing.assert_close(gradients, expected)


def make_queue() -> tuple[Tensor, Tensor]:
    """Return keys of earlier steps, the same on all workers; some of them are clicked in this batch."""
    generator = torch.Generator().manual_seed(2)
    rows = normalize(torch.randn(40, 5, generator=generator, dtype=torch.float64), dim=1)
    return rows, torch.arange(40) % 31


class ClickTowers(TwoTowers):
    """The two towers, each with the rows of its side."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, query: Tensor, key: Tensor, negative: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys = (normalize(self.key_tower(rows), dim=1) for rows in (key, negative))
        return normalize(self.of_queries(query), dim=1), *keys


def loss_and_gradients_of_clicks(
    rank: int, num_workers: int, ways: dict[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    module = ClickTowers()
    parallel = DistributedDataParallel(module) if num_workers > 1 else module
    mine = part_of(make_clicks(), rank, num_workers)
    query, key, negative = parallel(mine.query, mine.key, mine.negative)
    in_batch, bidirectional = ways.get("in_batch", True), ways.get("bidirectional", False)
    (negatives, negative_id), (queue, queue_id) = gather_uneven(negative, mine.negative_id), make_queue()
    loss = hinge(
        query,
        key,
        margin=0.3,
        gathered_query=gather(query) if bidirectional else None,
        gathered_key=gather(key) if in_batch else None,
        offset=rank * len(query),
        query_id=mine.query_id,
        gathered_query_id=gather_detached(mine.query_id),
        key_id=mine.key_id,
        gathered_key_id=gather_detached(mine.key_id),
        negatives=torch.cat([negatives, queue]),
        negative_id=torch.cat([negative_id, queue_id]),
        **ways,
    )
    return mean_and_gradients(loss, module)


@pytest.mark.parametrize("ways", [*WAYS, {"in_batch": False}, {"in_batch": False, "hardest": True}])
@pytest.mark.parametrize("num_workers", (1, 2, 4))
def test_clicks_with_negatives_in_uneven_numbers_give_the_loss_of_the_whole_batch(
    num_workers: int, ways: dict[str, Any]
) -> None:
    """The hardest of the batch, of explicit negatives and of a queue, but none that any worker's clicks know."""
    clicks, module, (queue, queue_id) = make_clicks(), ClickTowers(), make_queue()
    query, key, negative = module(clicks.query, clicks.key, clicks.negative)
    settings = {"margin": 0.3, "bidirectional": False, **ways}
    everything = query, key, torch.cat([negative, queue])
    ids = {
        "pair_ids": (clicks.query_id, clicks.key_id),
        "negative_id": torch.cat([clicks.negative_id, queue_id]),
    }
    whole = plain_hinge(*everything, **ids, **settings)
    whole.backward()
    expected = [parameter.grad for parameter in module.parameters()]
    assert all(gradient is not None and gradient.norm() > 1e-3 for gradient in expected)
    assert (whole - plain_hinge(*everything, **settings)).abs() > 1e-5
    if num_workers == 1:
        results = [loss_and_gradients_of_clicks(0, 1, ways)]
    else:
        results = run_workers(loss_and_gradients_of_clicks, num_workers, ways)
    for loss, gradients in results:
        torch.testing.assert_close(loss, whole.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-10)
