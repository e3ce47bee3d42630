"""Messages through shared memory against the same messages through gloo."""

import contextlib
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from raycl.batchnorm import synchronize
from raycl.distributed import all_sum, average_, gather, gather_detached, use_shared_memory
from raycl.distributed.ddp import average_gradients
from raycl.distributed.shared_memory import MAX_BYTES, SharedMemory
from raycl.distributed.step_timer import StepTimer, counted
from raycl.errors import RayclError
from tests.workers.processes import run_workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is used on Linux only")


def _messages(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    shapes = [(1, 5), (3, 2, 2), (7,), (1, MAX_BYTES // 8), (2, MAX_BYTES // 8 + 1), (0, 4)]
    types = [torch.float32, torch.float64, torch.bfloat16, torch.int64]
    made = [torch.randn(shape).mul(100).to(dtype) for shape in shapes for dtype in types]
    return [*made, torch.randn(6, 4).T, torch.randn(4, 2) > 0]


def _exchange(rank: int, num_workers: int) -> tuple[bool, list[torch.Tensor], list[torch.Tensor]]:
    messages = _messages(rank)
    by_gloo = [gather_detached(each) for each in messages]
    with use_shared_memory() as is_shared:
        through_memory = [gather_detached(each) for each in messages]
    return is_shared, through_memory, by_gloo


@pytest.mark.parametrize("num_workers", [2, 4])
def test_rows_through_memory_equal_rows_through_gloo(num_workers: int) -> None:
    for is_shared, through_memory, by_gloo in run_workers(_exchange, num_workers):
        assert is_shared
        for ours, theirs in zip(through_memory, by_gloo, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


def _values(rank: int) -> list[torch.Tensor]:
    value = torch.arange(6, dtype=torch.float64).view(2, 3) * (rank + 1)
    return [value, value.T, value[0, 1], value.long(), value.to(torch.bfloat16), value > 6]


def _sums(rank: int, num_workers: int) -> tuple[bool, list[torch.Tensor], list[torch.Tensor]]:
    values = _values(rank)
    with use_shared_memory() as is_shared:
        return is_shared, [all_sum(each) for each in values], values


@pytest.mark.parametrize("num_workers", [2, 3])
def test_sums_are_exact_and_keep_the_value_unchanged(num_workers: int) -> None:
    parts = zip(*map(_values, range(num_workers)), strict=True)
    wholes = [torch.stack(each).double().sum(0).to(each[0].dtype) for each in parts]
    for rank, (is_shared, sums, values) in enumerate(run_workers(_sums, num_workers)):
        assert is_shared
        for ours, whole in zip(sums, wholes, strict=True):
            assert ours.dtype == whole.dtype
            assert torch.equal(ours, whole)
        for value, before in zip(values, _values(rank), strict=True):
            assert torch.equal(value, before)


def _to_average(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    alone = torch.randn(MAX_BYTES // 4 - 1)  # too large to share a message
    return [
        torch.randn(3, 4),
        torch.randn(5),
        alone,
        torch.randn(MAX_BYTES // 4 - 3, 1),
        torch.randn(6, MAX_BYTES // 16).T,  # too large for the memory, and not contiguous
        torch.randn(4, 3, dtype=torch.float64).T,  # the only tensor of its dtype, and not contiguous
        torch.randn(()),
        torch.randn(7, 2, dtype=torch.float64)[:, 0],  # the only tensor of its dtype; with gaps
        torch.randn(MAX_BYTES // 4 + 1, 2)[:, 0],  # too large for the memory; with gaps
    ]


def _averages(rank: int, num_workers: int, share: bool) -> list[torch.Tensor]:
    tensors = _to_average(rank)
    with use_shared_memory() if share else contextlib.nullcontext(False) as is_shared:
        assert is_shared == share
        average_(tensors)
    return tensors


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("share", [True, False])
def test_averages_replace_values_by_the_means_over_all_workers(num_workers: int, share: bool) -> None:
    means = [torch.stack(each).mean(0) for each in zip(*map(_to_average, range(num_workers)), strict=True)]
    for averages in run_workers(_averages, num_workers, share):
        for ours, mean in zip(averages, means, strict=True):
            torch.testing.assert_close(ours, mean, rtol=1e-6, atol=1e-7)


def test_a_single_worker_spends_no_time_in_messages() -> None:
    account = StepTimer()
    with counted(account):
        assert all_sum(torch.tensor(3.0)) == 3
        average_([torch.ones(4)])
    assert "messages" not in account.seconds()


def _many_rounds(rank: int, num_workers: int) -> int:
    """Return the number of wrong messages among many, most of them short, at varying speeds."""
    num_wrong = 0
    with use_shared_memory():
        for number in range(3_000):
            if number % 100 == rank:
                time.sleep(0.002)  # the workers are late in turn
            size = 1 + number % 7 * 300
            rows = gather_detached(torch.full((1, size), number * 10.0 + rank))
            expected = number * 10.0 + torch.arange(num_workers).float().unsqueeze(1)
            num_wrong += not torch.equal(rows, expected.expand(-1, size))
            if number % 10 == 0:  # the longest message, read while it is summed
                value = torch.full((MAX_BYTES // 4,), number + float(rank))
                total = number * num_workers + num_workers * (num_workers - 1) / 2
                num_wrong += not bool((all_sum(value) == total).all())
                average_([value])
                num_wrong += not torch.allclose(value, torch.tensor(total / num_workers))
    return num_wrong


@pytest.mark.parametrize("num_workers", [2, 3])
def test_no_message_is_overwritten_before_it_is_read(num_workers: int) -> None:
    assert run_workers(_many_rounds, num_workers) == [0] * num_workers


def _batchnorm_pass(rank: int, num_workers: int, share: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = synchronize(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8)))
    images = torch.randn(4 * num_workers, 3, 6, 6).chunk(num_workers)[rank]
    with use_shared_memory() if share else contextlib.nullcontext():
        output = gather(layers(images))
        output.square().mean().backward()
    return [output.detach(), *(each.grad for each in layers.parameters() if each.grad is not None)]


def test_batchnorm_and_gradients_do_not_change_with_shared_memory() -> None:
    for ours, theirs in zip(
        run_workers(_batchnorm_pass, 2, True), run_workers(_batchnorm_pass, 2, False), strict=True
    ):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def _gradients(rank: int, num_workers: int, share: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Linear(600, 700), nn.Tanh(), nn.Linear(700, 3))  # 1.7 MB: several pieces
    rows = torch.randn(4 * num_workers, 600).chunk(num_workers)[rank]
    with use_shared_memory() if share else contextlib.nullcontext():
        parallel = average_gradients(tower, torch.device("cpu"))
        for _ in range(2):  # the second step uses the bucket views of the first
            tower.zero_grad()
            parallel(rows).square().mean().backward()
    return [each.grad.clone() for each in tower.parameters() if each.grad is not None]


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("share", [True, False])
def test_gradients_equal_the_whole_batch(num_workers: int, share: bool) -> None:
    (whole,) = run_workers(_gradients_alone, 1, num_workers)
    for ours in run_workers(_gradients, num_workers, share):
        for one, other in zip(ours, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def _gradients_alone(rank: int, num_workers: int, num_parts: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Linear(600, 700), nn.Tanh(), nn.Linear(700, 3))
    tower(torch.randn(4 * num_parts, 600)).square().mean().backward()
    return [each.grad for each in tower.parameters() if each.grad is not None]


def _unequal(rank: int, num_workers: int) -> str:
    with use_shared_memory(), pytest.raises(RayclError) as caught:
        gather_detached(torch.zeros(1, 3 + rank))
    return str(caught.value)


def test_unequal_rows_are_an_error_on_every_worker() -> None:
    for text in run_workers(_unequal, 2):
        assert "all workers must send rows of the same shape and type" in text


def _without_a_greeting(rank: int, num_workers: int) -> tuple[bool, torch.Tensor]:
    # As if the second worker ran in a container with separate shared memory.
    greet = (lambda _: None) if rank == 1 else SharedMemory.greet
    with patch.object(SharedMemory, "greet", greet), use_shared_memory() as is_shared:
        return is_shared, gather_detached(torch.tensor([rank]))


def test_workers_without_common_memory_fall_back_to_gloo() -> None:
    for is_shared, rows in run_workers(_without_a_greeting, 2):
        assert not is_shared
        assert rows.tolist() == [0, 1]


def test_the_memory_is_unlinked_once_all_workers_have_attached() -> None:
    before = set(Path("/dev/shm").glob("raycl-*"))
    assert all(is_shared for is_shared, *_ in run_workers(_exchange, 2))
    assert set(Path("/dev/shm").glob("raycl-*")) <= before


def test_a_single_worker_has_no_shared_memory() -> None:
    with use_shared_memory() as is_shared:
        assert not is_shared
