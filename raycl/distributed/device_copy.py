"""Asynchronous copies between the host and a device."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; enough for any dtype


def upload(tensors: Sequence[Tensor | None], device: torch.device) -> list[Any]:
    """Copy host tensors to a device in one transfer, in the current stream; on the CPU return them unchanged.

    A tensor that is passed twice is copied once; None stays None. The results share one storage.
    """
    if device.type == "cpu":
        return list(tensors)
    once = {_key(each): each.contiguous() for each in tensors if each is not None}
    sizes = [-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in once.values()]
    starts = list(accumulate(sizes, initial=0))
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for each, start in zip(once.values(), starts, strict=False):
        _part(buffer, start, each).copy_(each)
    arriving = buffer.to(device, non_blocking=True)
    arrived = {
        key: _part(arriving, start, each) for (key, each), start in zip(once.items(), starts, strict=False)
    }
    return [None if each is None else arrived[_key(each)] for each in tensors]


@cache
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers as a cached float32 tensor on a device."""
    return torch.tensor(values, dtype=torch.float32, device=device)


@final
class Download:
    """Asynchronous copies of tensors to the host, in the current stream; host tensors are not copied."""

    def __init__(self, *tensors: Tensor) -> None:
        self._arriving = [each.detach().to("cpu", non_blocking=True) for each in tensors]
        self._done = torch.cuda.Event() if any(each.is_cuda for each in tensors) else None
        if self._done is not None:
            self._done.record()

    def arrived(self) -> list[Tensor]:
        """Return the tensors; wait until the copies are complete."""
        if self._done is not None:
            self._done.synchronize()
        return self._arriving


def _key(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _part(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)
