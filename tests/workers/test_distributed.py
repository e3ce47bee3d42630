"""The exactness of training on several workers: gloo processes against one process."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raycl import optim
from raycl.data.split import Holdout
from raycl.distributed import (
    all_agree,
    all_sum,
    check_equal,
    gather,
    gather_detached,
    gather_uneven,
    num_workers,
    rank,
)
from raycl.distributed.ddp import average_buffers
from raycl.errors import RayclError
from raycl.models.whitening import Whitening
from raycl.optim import build_optimizer, set_learning_rate
from raycl.recipes import recipe
from raycl.training.loop import Trainer
from tests.workers.processes import run_workers

Gather = Callable[[Tensor], Tensor]

_GLOBAL_BATCH = 8


class _Tower(nn.Module):
    """Two layers and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        self.log_temperature = nn.Parameter(torch.tensor(-1.0))

    def forward(self, view_a: Tensor, view_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key = F.normalize(self.layers(torch.cat([view_a, view_b])), dim=1).chunk(2)
        return query, key, self.log_temperature.exp()


def _softmax_loss(query: Tensor, keys: Tensor, temperature: Tensor, offset: int) -> Tensor:
    positive = torch.arange(len(query)) + offset
    return F.cross_entropy(query @ keys.T / temperature, positive)


def _tower_and_views() -> tuple[_Tower, Tensor, Tensor]:
    torch.manual_seed(0)
    tower = _Tower()
    view_a = torch.randn(_GLOBAL_BATCH, 6)
    return tower, view_a, view_a + 0.5 * torch.randn(_GLOBAL_BATCH, 6)


def _gradients(tower: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in tower.named_parameters()}  # pyright: ignore[reportReturnType]


def _gradients_of_the_whole_batch() -> dict[str, Tensor]:
    tower, view_a, view_b = _tower_and_views()
    query, key, temperature = tower(view_a, view_b)
    _softmax_loss(query, key, temperature, offset=0).backward()
    return _gradients(tower)


def _gradients_of_one_worker(rank: int, num_workers: int, gather: Gather) -> dict[str, Tensor]:
    tower, *views = _tower_and_views()
    parallel = DistributedDataParallel(tower)
    query, key, temperature = parallel(*(view.chunk(num_workers)[rank] for view in views))
    _softmax_loss(query, gather(key), temperature, offset=rank * len(query)).backward()
    return _gradients(tower)


def _largest_relative_error(ours: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    return max(((ours[name] - true[name]).norm() / true[name].norm()).item() for name in true)


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_workers_give_the_gradient_of_one_process_on_the_whole_batch(num_workers: int) -> None:
    true = _gradients_of_the_whole_batch()
    for ours in run_workers(_gradients_of_one_worker, num_workers, gather):
        assert _largest_relative_error(ours, true) < 1e-5


def test_keys_gathered_without_gradient_give_a_different_gradient() -> None:
    ours, *_ = run_workers(_gradients_of_one_worker, 2, gather_detached)
    assert _largest_relative_error(ours, _gradients_of_the_whole_batch()) > 0.01


def _gather_scattered(rank: int, num_workers: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # A transposed tensor: neither rows nor their gradient are contiguous in memory.
    rows = torch.arange(6).view(2, 3).T.to(dtype).add(10 * rank).requires_grad_()
    stacked = gather(rows)
    (stacked * (rank + 1)).sum().backward()
    assert rows.grad is not None
    return stacked.detach(), rows.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gather_stacks_by_rank_and_sums_the_gradients(dtype: torch.dtype) -> None:
    rows = torch.arange(6).view(2, 3).T.to(dtype)
    for stacked, grad in run_workers(_gather_scattered, 2, dtype):
        assert torch.equal(stacked, torch.cat([rows, rows + 10]))
        assert torch.equal(grad, torch.full((3, 2), 1 + 2, dtype=dtype))


def _gather_detached(rank: int, num_workers: int) -> tuple[Tensor, Tensor]:
    ids = gather_detached(torch.tensor([2**62 + rank, -rank]))
    rows = torch.full((2, 3), float(rank), requires_grad=True)
    return ids, gather_detached(rows)


def test_gather_detached_keeps_large_integers_and_has_no_gradient() -> None:
    for ids, rows in run_workers(_gather_detached, 2):
        assert ids.tolist() == [2**62, 0, 2**62 + 1, -1]
        assert ids.dtype == torch.int64
        assert not rows.requires_grad
        assert rows[:, 0].tolist() == [0, 0, 1, 1]


def _sum_ranks(rank: int, num_workers: int) -> tuple[Tensor, Tensor]:
    value = torch.tensor([rank, 1.0], requires_grad=True)
    return value.detach(), all_sum(value)


def test_all_sum_adds_over_workers_and_keeps_its_argument_unchanged() -> None:
    for index, (value, total) in enumerate(run_workers(_sum_ranks, 4)):
        assert value.tolist() == [index, 1]
        assert total.tolist() == [0 + 1 + 2 + 3, 4]
        assert not total.requires_grad


def _vote(rank: int, num_workers: int) -> list[bool]:
    return [all_agree(rank >= 0), all_agree(rank == 0), all_agree(False)]


def test_all_agree_is_true_only_if_every_worker_agrees() -> None:
    assert run_workers(_vote, 2) == [[True, False, False]] * 2


def _check_rank(rank: int, num_workers: int, step: int) -> None:
    check_equal(8 + step * rank, "the local batch")


def test_check_equal_names_the_value_of_each_rank() -> None:
    assert run_workers(_check_rank, 2, 0) == [None, None]
    with pytest.raises(RayclError, match=r"the local batch .* \(rank 0: 8, rank 1: 11\)"):
        run_workers(_check_rank, 2, 3)


def _train_on_other_rows(rank: int, num_workers: int) -> None:
    rows = SimpleNamespace(where=lambda keep: range(8 + rank))
    job: Any = SimpleNamespace(
        config=recipe("simclr"), holdout=Holdout(seed=0), load_rows=lambda: (rows, [rows]), num_train=(8,)
    )
    Trainer(job, None, torch.device("cpu"), threading.Event())


def test_workers_with_different_numbers_of_rows_are_refused() -> None:
    with pytest.raises(RayclError, match=r"the number of training rows .* \(rank 0: 8, rank 1: 9\)"):
        run_workers(_train_on_other_rows, 2)


def _place(index: int, count: int) -> tuple[int, int]:
    return rank(), num_workers()


def test_rank_and_num_workers_match_the_group() -> None:
    assert run_workers(_place, 2) == [(0, 2), (1, 2)]


def test_every_operation_is_the_identity_without_a_group() -> None:
    rows = torch.randn(3, 2, requires_grad=True)
    assert (rank(), num_workers()) == (0, 1)
    gather(rows).sum().backward()
    assert rows.grad is not None and rows.grad.eq(1).all()
    assert torch.equal(gather_detached(rows), rows)
    assert not gather_detached(rows).requires_grad
    assert torch.equal(all_sum(rows), rows)
    assert all_agree(True) and not all_agree(False)
    check_equal(3, "anything")


def _fail_on_one(rank: int, num_workers: int) -> None:
    if rank == 1:
        raise KeyError("broken on purpose")
    gather_detached(torch.ones(1))  # waits for the other worker


def test_an_error_of_one_worker_is_raised_while_the_other_waits() -> None:
    with pytest.raises(KeyError, match="broken on purpose") as caught:
        run_workers(_fail_on_one, 2)
    assert "in worker 1" in caught.value.__notes__[0]


UNEVEN = (3, 0, 4)  # rows of each worker


def _uneven(number: int, _: int) -> tuple[Tensor, Tensor]:
    rows = (torch.arange(2 * UNEVEN[number]).view(-1, 2) + 100.0 * number).requires_grad_()
    stacked = gather_uneven(rows, UNEVEN)
    # Every worker weights every row differently.
    (stacked * (number + 1) * torch.arange(1, len(stacked) + 1)[:, None]).sum().backward()
    assert rows.grad is not None
    return stacked.detach(), rows.grad


def test_uneven_rows_are_stacked_without_padding_and_get_summed_gradients() -> None:
    found = run_workers(_uneven, len(UNEVEN))
    rows = torch.cat([torch.arange(2 * size).view(-1, 2) + 100.0 * at for at, size in enumerate(UNEVEN)])
    asked = torch.arange(1, len(rows) + 1)[:, None].expand(-1, 2) * (1.0 + 2.0 + 3.0)
    for (stacked, gradient), expected in zip(found, asked.split(UNEVEN), strict=True):
        assert torch.equal(stacked, rows)
        assert torch.equal(gradient, expected)


def _move_by_muon(number: int, _: int, rounding: float) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Unflatten(1, (5, 1, 1)), nn.Conv2d(5, 3, 1)
    )
    optimizer = build_optimizer("muon", net)
    set_learning_rate(optimizer, 0.1)
    orthogonalized = optim._orthogonalized
    with patch.object(optim, "_orthogonalized", lambda rows: orthogonalized(rows) * (1 + number * rounding)):
        for step in range(3):
            optimizer.zero_grad()
            net(torch.arange(12.0).view(2, 6) - step).square().sum().backward()
            optimizer.step()
    return [each.detach() for each in net.parameters()]


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_muon_divides_its_matrices_and_keeps_the_weights_of_all_workers_equal(workers: int) -> None:
    (alone,) = run_workers(_move_by_muon, 1, 0.0)
    for found in run_workers(_move_by_muon, workers, 0.0):
        for ours, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    # Workers whose processors compute differently.
    first, *others = run_workers(_move_by_muon, workers, 0.01)
    for other in others:
        assert all(ours.equal(expected) for ours, expected in zip(other, first, strict=True))
    assert not first[0].allclose(alone[0], rtol=1e-3)


def _run_the_loop_of_the_guide(rank: int, num_workers: int, code: str) -> list[Tensor]:
    torch.manual_seed(0)
    tower = nn.Linear(4, 3)
    a, b = torch.randn(2, 8, 4).tensor_split(num_workers, dim=1)[rank]
    names: dict[str, Any] = {"tower": tower, "view_a": a, "view_b": b}
    exec(code, names)
    gradients = [each.grad for each in tower.parameters() if each.grad is not None]
    return [names["loss"].detach(), *gradients]


def test_the_training_loop_of_the_guide_is_that_of_the_whole_batch() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "recipes.md").read_text()
    (code,) = [each for each in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "info_nce(" in each]
    ((loss, *gradients),) = run_workers(_run_the_loop_of_the_guide, 1, code)
    both = run_workers(_run_the_loop_of_the_guide, 2, code)
    torch.testing.assert_close(sum(each[0] for each in both) / 2, loss)
    for _, *found in both:
        torch.testing.assert_close(found, gradients)


# Whitening


def whiten(rank: int, num_workers: int) -> Tensor:
    """Return the layer of all workers, each of which sees its part of each batch."""
    rows = torch.randn(400, 6, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 7) + 2
    whitening = Whitening(6, shrinkage=0.5)
    for batch in rows.split(40):
        whitening.update(batch.chunk(num_workers)[rank])
    average_buffers(whitening)
    return whitening.layer().weight.detach()


@pytest.mark.parametrize("number", [2, 4])
def test_workers_whiten_by_the_moments_of_all_rows(number: int) -> None:
    (expected,) = run_workers(whiten, 1)
    for found in run_workers(whiten, number):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
