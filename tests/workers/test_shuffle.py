"""Shuffled BatchNorm on several workers against one process with the same groups."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raycl.batchnorm import encode_shuffled, split_batchnorm
from raycl.batchnorm.shuffled import permutation
from raycl.models.momentum import MomentumEncoder
from raycl.models.towers import build_projection_head
from tests.workers.processes import run_workers

BATCH = 16
NUM_GROUPS = 4
SEED = 3


def _images(dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(BATCH, 3, 6, 6, generator=generator, dtype=torch.float64).mul(255).to(dtype)


def _own(rows: Tensor, rank: int, num_workers: int) -> Tensor:
    return rows.chunk(num_workers)[rank]


def _encode_rowwise(rank: int, num_workers: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)).double()
    own = _own(_images(dtype), rank, num_workers)

    def encode(rows: Tensor) -> Tensor:
        assert rows.dtype == dtype and len(rows) == len(own)
        return net(rows.double() / 255)

    keys, plain = encode_shuffled(encode, own, seed=SEED, step=7), encode(own)
    gradients = [
        torch.cat([g.flatten() for g in torch.autograd.grad(each.cos().sum() * (rank + 1), net.parameters())])
        for each in (keys, plain)
    ]
    return keys.detach(), plain.detach(), *gradients  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_without_batchnorm_shuffling_changes_nothing(num_workers: int, dtype: torch.dtype) -> None:
    answers = run_workers(_encode_rowwise, num_workers, dtype)
    for keys, plain, *_ in answers:
        # Matrix products may round a row differently at another position.
        torch.testing.assert_close(keys, plain, rtol=1e-13, atol=1e-13)
    # A row's gradient returns to the worker that encoded it: the sum over all workers is the same.
    ours, expected = (sum(answer[part] for answer in answers) for part in (2, 3))
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


def _normalize_shuffled(rank: int, num_workers: int) -> tuple[Tensor, Tensor]:
    layer = nn.BatchNorm2d(3).double()
    own = _own(_images(), rank, num_workers)
    return encode_shuffled(lambda rows: layer(rows).flatten(1), own, seed=SEED, step=2), layer.running_mean  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_statistics_cover_the_shuffled_shares(num_workers: int) -> None:
    images, expected, means = _images(), torch.empty(BATCH, 108, dtype=torch.float64), []
    for part in permutation(BATCH, seed=SEED, step=2).chunk(num_workers):
        share = images[part].transpose(0, 1).flatten(1)  # [channels, values]
        mean, std = share.mean(1), (share.var(1, unbiased=False) + 1e-5).sqrt()
        expected[part] = ((images[part] - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)).flatten(1)
        means.append(0.1 * mean)
    answers = run_workers(_normalize_shuffled, num_workers)
    torch.testing.assert_close(torch.cat([keys for keys, _ in answers]), expected)
    torch.testing.assert_close([mean for _, mean in answers], means)


def test_shuffling_separates_neighboring_rows() -> None:
    (alone,) = run_workers(_normalize_shuffled, 1)
    together = torch.cat([keys for keys, _ in run_workers(_normalize_shuffled, 2)])
    assert (alone[0] - together).abs().max() > 1e-3


def _tower() -> nn.Sequential:
    torch.manual_seed(0)
    encoder = [
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    ]
    return nn.Sequential(*encoder, build_projection_head(32, num_layers=2, hidden_dim=None, dim=12)).double()


def _train(rank: int, num_workers: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the keys of the last step, and the weights of tower and momentum encoder."""
    tower = split_batchnorm(_tower(), BATCH // NUM_GROUPS)
    momentum_encoder = MomentumEncoder(tower)
    parallel: Any = DistributedDataParallel(tower) if num_workers > 1 else tower
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.5)
    negatives = F.normalize(torch.linspace(-1, 1, 20 * 12, dtype=torch.float64).sin().view(20, 12), dim=1)
    keys = torch.empty(0)
    for step in range(3):
        view_a, view_b = (_own(_images(seed=2 * step + i) / 255, rank, num_workers) for i in (0, 1))
        keys = F.normalize(encode_shuffled(momentum_encoder, view_b, seed=SEED, step=step), dim=1)
        query = F.normalize(parallel(view_a), dim=1)
        logits = torch.cat([(query * keys).sum(1, keepdim=True), query @ negatives.T], dim=1) / 0.2
        optimizer.zero_grad()
        F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.int64)).backward()
        optimizer.step()
        momentum_encoder.update(tower, 0.5)
    weights = [[each.detach() for each in module.parameters()] for module in (tower, momentum_encoder)]
    return [keys], *weights  # pyright: ignore[reportReturnType]


@pytest.fixture(scope="module")
def one_worker() -> Any:
    return run_workers(_train, 1)[0]


@pytest.mark.parametrize("num_workers", [2, 4])
def test_equal_groups_train_equally_on_any_number_of_workers(num_workers: int, one_worker: Any) -> None:
    answers = run_workers(_train, num_workers)
    keys = torch.cat([answer[0][0] for answer in answers])
    torch.testing.assert_close(keys, one_worker[0][0], rtol=1e-8, atol=1e-10)
    start = [each.detach() for each in _tower().parameters()]
    for _, weights, followed in answers:
        torch.testing.assert_close(weights, one_worker[1], rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(followed, one_worker[2], rtol=1e-8, atol=1e-10)
    assert max((a - b).abs().max() for a, b in zip(start, one_worker[2], strict=True)) > 1e-2
