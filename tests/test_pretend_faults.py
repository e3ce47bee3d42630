"""Planted faults that only a GPU would reveal: the pretend GPU detects every one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from raycl.augment import color
from raycl.batchnorm import kernels, shuffled
from raycl.distributed import device_copy
from raycl.distributed.device_copy import Download
from raycl.losses import mutual, views
from raycl.losses.objective import StoreBatch
from raycl.models.towers import LearnedTemperature
from raycl.training import stores
from tests import pretend_gpu
from tests.pretended_steps import CASES, count
from tests.test_pretend_gpu import COUNTED_WITH, COUNTS

Plant = Callable[[pytest.MonkeyPatch], None]


def replacing(place: Any, name: str, value: Any) -> Plant:
    return lambda monkeypatch: monkeypatch.setattr(place, name, value)


def sums_of_the_cpu(grad: Tensor, x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    found = torch.ops.aten.native_batch_norm_backward.default(
        grad, x, None, mean, variance, None, None, False, eps, [False, True, True]
    )
    return torch.stack(found[1:])


def update_at_once(self: Any, *, step: int) -> None:
    keys, ids = Download(*self._keys)._arriving
    self._store.push(keys.numpy(), ids.numpy(), step)


def update_by_waiting(self: Any, *, step: int) -> None:
    self._on_device.write(*self._keys, first=self._queue.sequence)
    keys, ids = (each.cpu() for each in self._keys)
    self._store.push(keys.numpy(), ids.numpy(), step)


def one_pinned_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    made, empty = {}, torch.empty

    def again(*size: int, pin_memory: bool = False, **settings: Any) -> Tensor:
        if not pin_memory:
            return empty(*size, **settings)
        if size not in made:
            made[size] = empty(*size, pin_memory=True, **settings)
        return made[size]

    monkeypatch.setattr(torch, "empty", again)


def no_pinned_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **settings: empty(*size, **settings))


def fetch_host_ids(self: Any, num_rows: int) -> Any:
    return StoreBatch(negatives=self._rows[:num_rows], negative_id=self._ids[:num_rows].cpu())


def gather_strided(rows: Tensor) -> Tensor:
    stacked = rows.new_empty(2 * len(rows), *rows.shape[1:])
    torch.distributed.all_gather_into_tensor(stacked, rows)
    return stacked


def gather_from_host(rows: Tensor) -> Tensor:
    return gather_strided(rows.cpu()).to(rows.device)


def before_the_loss(use: Callable[[Tensor], Any]) -> Plant:
    """Read the ids of the queries before the loss."""

    def for_batch(self: StoreBatch, ids: Any, explicit: Any) -> StoreBatch:
        use(ids.query)
        return original(self, ids, explicit)

    original = StoreBatch.for_batch
    return replacing(StoreBatch, "for_batch", for_batch)


def elemt_by_wide_counts(*given: Tensor) -> Tensor:
    return torch.ops.aten.batch_norm_backward_elemt(*given[:-1], given[-1].long())


def mask_from_host(tile: Tensor, rows: slice, columns: slice, diagonals: Any) -> None:
    tile.masked_fill_(torch.eye(*tile.shape, dtype=torch.bool), float("-inf"))


def nothing(*_: Any, **__: Any) -> None:
    return None


FAULTS: dict[str, tuple[str, int, Plant, str]] = {
    "a temperature stays on the host": (
        "simclr learned temperature", 2, replacing(LearnedTemperature, "to", lambda self, _: self), "NCCL sends no",
    ),
    "BatchNorm goes back by the kernel of the CPU": (
        "simclr chunks", 1, replacing(kernels, "gradient_sums", sums_of_the_cpu), "saved mean",
    ),
    "the step does not wait for the copy of its batch": (
        "simclr", 1, replacing(pretend_gpu.Stream, "wait_stream", nothing), "may still write",
    ),
    "the memory of a batch may be given to another stream": (
        "simclr", 1, replacing(pretend_gpu, "_record_stream", nothing), "record_stream",
    ),
    "keys are read before they have arrived": (
        "moco_v2", 1, replacing(stores.QueueStore, "update", update_at_once), "has not arrived",
    ),
    "keys are waited for after the update": (
        "moco_v2", 1, replacing(stores.QueueStore, "update", update_by_waiting), "waits",
    ),
    "a pinned buffer is filled anew while it is copied": (
        "simclr", 1, one_pinned_buffer,
        "is still copied",
    ),
    "a batch goes up from pageable memory": (
        "simclr", 1, no_pinned_buffer, "pageable copies",
    ),
    "constants are copied for each view": (
        "simclr", 1, replacing(color, "constant", device_copy.constant.__wrapped__), "waits",
    ),
    "ids of a queue lie on the host": (
        "moco_v2", 1, replacing(stores._DeviceCopy, "fetch", fetch_host_ids), "device",
    ),
    "rows are gathered from the host": (
        "simclr", 2, replacing(views, "gather_detached", gather_from_host), "NCCL sends no",
    ),
    "rows with gaps are gathered": (
        "moco_v2", 2, replacing(shuffled, "gather_detached", gather_strided), "contiguous",
    ),
    "a number is read": ("simclr", 1, before_the_loss(lambda ids: ids.max().item()), "waits"),
    "something is launched": ("simclr", 1, before_the_loss(lambda ids: ids + 1), "launches"),
    "integers are multiplied": ("simclr", 1, before_the_loss(lambda ids: ids[:, None] @ ids[None]), "multiplies no"),
    "counts have another type": (
        "simclr", 2, replacing(torch, "batch_norm_backward_elemt", elemt_by_wide_counts), "int32",
    ),
    "a mask is made on the host": (
        "simclr", 1, replacing(mutual, "mask_diagonals", mask_from_host),
        "two devices",
    ),
}  # fmt: skip


def find_fault(name: str, workers: int) -> str:
    """Return the error of a case, or the ceiling that it exceeds."""
    try:
        found = count(CASES[name], workers)
    except pretend_gpu.DeviceError as error:
        return str(error)
    most = COUNTS[f"{name}|{workers}"]
    kinds = ("waits", "pageable copies", "launches")
    return " ".join(
        kind
        for part in most
        for kind, came, limit in zip(kinds, getattr(found, part).counts, most[part], strict=True)
        if came > limit
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, workers, plant, expected = FAULTS[fault]
    if expected == "launches" and not torch.__version__.startswith(COUNTED_WITH):
        pytest.skip(f"launches are compared with torch {COUNTED_WITH} alone")
    plant(monkeypatch)
    assert expected in find_fault(name, workers)
