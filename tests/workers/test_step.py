"""The whole step on several workers equals the step of one process on the whole batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raycl.batchnorm import synchronize
from raycl.losses import nt_xent
from raycl.models.heads import build_projection_head
from raycl.models.towers import Tower
from raycl.training.step import Views, gathered_nt_xent, train_step
from tests.workers.processes import run_workers

BATCH = 16


def build_tower() -> Tower:
    torch.manual_seed(0)
    encoder = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )
    return Tower(encoder, build_projection_head(32, num_layers=2, hidden_dim=None, dim=12)).double()


class DoubleTower(nn.Module):
    """A tower in float64 with a learned temperature, so that only the mathematics differs."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = build_tower()
        self.log_temperature = nn.Parameter(torch.tensor(-1.5, dtype=torch.float64))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.tower.projection_head(self.tower.encoder(images))
        return nn.functional.normalize(rows, dim=1), self.log_temperature.exp()


def make_views() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    view_a = torch.rand(BATCH, 3, 6, 6, generator=generator, dtype=torch.float64)
    view_b = view_a + 0.1 * torch.rand(BATCH, 3, 6, 6, generator=generator, dtype=torch.float64)
    # Two samples share an id on different workers: they are false negatives to each other.
    sample_id = torch.arange(BATCH)
    sample_id[BATCH - 1] = 0
    return view_a, view_b, sample_id


def gradients_of_a_worker(rank: int, num_workers: int) -> list[Tensor]:
    module = DoubleTower()
    synchronize(module)
    parallel = DistributedDataParallel(module) if num_workers > 1 else module
    rows = slice(rank * BATCH // num_workers, (rank + 1) * BATCH // num_workers)
    view_a, view_b, sample_id = (each[rows] for each in make_views())
    embedding, temperature = parallel(torch.cat([view_a, view_b]))
    gathered_nt_xent(embedding, sample_id, temperature=temperature).backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.fixture(scope="module")
def whole_batch() -> list[Tensor]:
    module = DoubleTower()
    view_a, view_b, sample_id = make_views()
    embedding, temperature = module(torch.cat([view_a, view_b]))
    nt_xent(*embedding.chunk(2), temperature=temperature, sample_id=sample_id).backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_workers_give_the_gradient_of_the_whole_batch_for_towers_and_temperature(
    num_workers: int, whole_batch: list[Tensor]
) -> None:
    for gradients in run_workers(gradients_of_a_worker, num_workers):
        assert len(gradients) == len(whole_batch)
        for ours, expected in zip(gradients, whole_batch, strict=True):
            assert (ours - expected).norm() <= 1e-5 * expected.norm() + 1e-12


def loss_and_weights_after_steps(rank: int, num_workers: int) -> tuple[list[float], list[Tensor]]:
    tower: Any = build_tower().float()
    synchronize(tower)
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.0, momentum=0.9)
    parallel = DistributedDataParallel(tower) if num_workers > 1 else tower
    rows = slice(rank * BATCH // num_workers, (rank + 1) * BATCH // num_workers)
    view_a, view_b, sample_id = (each[rows] for each in make_views())
    views = Views(view_a=view_a.float(), view_b=view_b.float(), sample_id=sample_id)
    settings: dict[str, Any] = {"temperature": 0.2, "learning_rate": 0.05, "precision": "float32"}
    losses = [train_step(parallel, optimizer, views, **settings) for _ in range(3)]
    return losses, [parameter.detach() for parameter in tower.parameters()]


def test_two_workers_report_the_loss_of_one_and_reach_its_weights() -> None:
    alone = run_workers(loss_and_weights_after_steps, 1)[0]
    together = run_workers(loss_and_weights_after_steps, 2)
    assert alone[0] == sorted(alone[0], reverse=True)
    for losses, weights in together:
        assert losses == pytest.approx(alone[0], rel=1e-5)
        for ours, expected in zip(weights, alone[1], strict=True):
            assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-6)
