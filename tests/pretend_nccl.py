"""Simulated NCCL workers: one is real, and the others repeat its messages with other ids."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.pretend_gpu import DeviceError, is_on_device


@contextlib.contextmanager
def pretend_nccl(num_workers: int, *, id_distance: int, rank: int = 0) -> Iterator[None]:
    """Act as the worker of this rank; integers in matrices differ by ``id_distance`` between workers.

    Use it inside ``pretend_gpu``: like NCCL, it refuses messages of host tensors.
    """
    if num_workers == 1:
        yield
        return

    def as_other(own: Tensor, worker: int) -> Tensor:
        holds_ids = own.dtype == torch.int64 and own.numel() > 2
        return own + id_distance * (worker - rank) if holds_ids else own

    def all_reduce(tensor: Tensor, *_: Any, **__: Any) -> None:
        _check(tensor)
        tensor.mul_(num_workers)

    def all_gather(out: Tensor, own: Tensor, *_: Any, **__: Any) -> None:
        _check(out, own)
        parts = out.view(num_workers, -1)  # torch's own layers use other shapes
        for worker in range(num_workers):
            parts[worker].copy_(as_other(own, worker).flatten())

    def reduce_scatter(out: Tensor, whole: Tensor, *_: Any, **__: Any) -> None:
        _check(out, whole)
        torch.sum(whole.view(num_workers, *out.shape), 0, out=out)

    def exchange(messages: list[Any]) -> list[Any]:
        _check(*(each.tensor for each in messages))
        sent = [each.tensor for each in messages if each.op is dist.isend]
        received = [each.tensor for each in messages if each.op is dist.irecv]
        for source, target in zip(sent, received, strict=True):
            target.copy_(as_other(source, rank + 1))
        return []

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_workers)
    replaced = {
        "get_backend": lambda *_: "nccl",
        "all_reduce": all_reduce,
        "all_gather_into_tensor": all_gather,
        "all_gather_single": all_gather,
        "reduce_scatter_tensor": reduce_scatter,
        "all_to_all_single": _all_to_all,
        "batch_isend_irecv": exchange,
        "P2POp": lambda op, tensor, peer: mock.Mock(op=op, tensor=tensor),
    }
    try:
        with contextlib.ExitStack() as stack:
            for name, value in replaced.items():
                stack.enter_context(mock.patch(f"torch.distributed.{name}", value, create=True))
            yield
    finally:
        dist.destroy_process_group()


def _all_to_all(out: Tensor, own: Tensor, received: list[int], *_: Any, **__: Any) -> mock.Mock:
    """Receive the rows that this worker sends, as often as needed."""
    _check(out, own)
    out.copy_(own[torch.arange(sum(received), device=own.device) % len(own)])
    return mock.Mock()


def _check(*tensors: Tensor) -> None:
    for each in tensors:
        if not is_on_device(each):
            raise DeviceError(f"NCCL sends no tensors of the host, came {list(each.shape)}")
        if not each.is_contiguous():
            raise DeviceError(f"NCCL sends contiguous tensors, came strides {each.stride()}")
