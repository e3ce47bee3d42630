"""The hinge loss of several workers, gathered and averaged by DDP, equals that of one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

from raycl.distributed import gather, gather_detached
from raycl.losses import hinge
from tests.workers.processes import run_workers

BATCH = 24


class TwoTowers(nn.Module):
    """A tower for each side, in float64, so that only the mathematics differs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of_queries = nn.Linear(7, 5).double()
        self.of_keys = nn.Linear(7, 5).double()

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(self.of_queries(rows), dim=1), normalize(self.of_keys(rows), dim=1)


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
    loss.backward()
    mean = gather_detached(loss[None]).mean()
    return mean, [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


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
