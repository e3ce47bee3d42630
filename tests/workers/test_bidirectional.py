"""The symmetric cross-entropy of several workers, gathered and averaged by DDP, equals the plain one of all."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

from raycl.distributed import gather, gather_detached, gather_uneven
from raycl.losses import clip
from tests.plain_losses import plain_bidirectional
from tests.workers.clicks import make_clicks, mean_and_gradients, part_of
from tests.workers.processes import run_workers


class TwoTowers(nn.Module):
    """A tower for each side and a learned temperature, in float64, so that only the mathematics differs."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of_queries = nn.Linear(7, 5).double()
        self.key_tower = nn.Linear(7, 5).double()
        self.log_temperature = nn.Parameter(torch.tensor(temperature, dtype=torch.float64).log())

    def forward(self, query: Tensor, key: Tensor, negative: Tensor) -> tuple[Tensor, ...]:
        keys = (normalize(self.key_tower(rows), dim=1) for rows in (key, negative))
        return normalize(self.of_queries(query), dim=1), *keys, self.log_temperature.exp()


def loss_and_gradients(rank: int, num_workers: int, temperature: float) -> tuple[Tensor, list[Tensor]]:
    module = TwoTowers(temperature)
    parallel = DistributedDataParallel(module) if num_workers > 1 else module
    mine = part_of(make_clicks(), rank, num_workers)
    query, key, negative, degrees = parallel(mine.query, mine.key, mine.negative)
    negatives, negative_id, negative_log_frequency = gather_uneven(
        negative, mine.negative_id, mine.negative_log_frequency
    )
    companions: dict[str, Any] = {}
    for name in ("query_id", "key_id", "key_log_frequency"):
        own = getattr(mine, name)
        companions |= {name: own, f"gathered_{name}": gather_detached(own)}
    loss = clip(
        query,
        key,
        temperature=degrees,
        gathered_query=gather(query),
        gathered_key=gather(key),
        offset=rank * len(query),
        negatives=negatives,
        negative_id=negative_id,
        negative_log_frequency=negative_log_frequency,
        **companions,
    )
    return mean_and_gradients(loss, module)


@pytest.mark.parametrize("temperature", (0.2, 0.01))
@pytest.mark.parametrize("num_workers", (1, 2, 4))
def test_workers_give_loss_and_gradient_of_the_whole_batch(num_workers: int, temperature: float) -> None:
    clicks, module = make_clicks(), TwoTowers(temperature)
    query, key, negative, degrees = module(clicks.query, clicks.key, clicks.negative)
    companions = clicks._asdict()
    for name in ("query", "key", "negative"):
        del companions[name]
    whole = plain_bidirectional(query, key, degrees, negative, **companions)
    whole.backward()
    expected = [parameter.grad for parameter in module.parameters()]
    assert all(gradient is not None and gradient.norm() > 1e-3 for gradient in expected)
    if num_workers == 1:
        results = [loss_and_gradients(0, 1, temperature)]
    else:
        results = run_workers(loss_and_gradients, num_workers, temperature)
    for loss, gradients in results:
        torch.testing.assert_close(loss, whole.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-9)
