"""Devices and memory formats of networks, and asynchronous copies between the host and a device."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, chain
from typing import Any, final

import torch
from torch import Tensor, nn

_ALIGNMENT = 16  # bytes; enough for any dtype


def device_of(network: nn.Module) -> torch.device:
    """Return the device of a network's first parameter or buffer; without both, the CPU."""
    tensors = chain(network.parameters(), network.buffers())
    return next((each.device for each in tensors), torch.device("cpu"))


def use_channels_last(network: nn.Module) -> None:
    """Store 4-D weights with channels last, which is faster; a network of 3-D convolutions stays as it is."""
    if all(each.ndim != 5 for each in chain(network.parameters(), network.buffers())):
        network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


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


@final
class StateDownload:
    """A copy of a network's state to the host, beside the steps that follow; they may change the state at once.

    The current stream packs the tensors, and ``stream`` copies them in one transfer. State on the host is not copied.
    """

    def __init__(self, state: Mapping[str, Tensor], stream: torch.cuda.Stream | None) -> None:
        """``stream`` is a side stream of the device, None for state on the host."""
        # Large items first: so each begins at a multiple of its size.
        self._state = dict(sorted(state.items(), key=lambda item: -item[1].element_size()))
        self._stream, self._done = stream, None
        if stream is None:
            return
        packed = torch.cat([each.detach().reshape(-1).view(torch.uint8) for each in self._state.values()])
        stream.wait_stream(torch.cuda.current_stream(packed.device))
        packed.record_stream(stream)
        with torch.cuda.stream(stream):
            self._arriving = packed.to("cpu", non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(stream)

    def has_arrived(self) -> bool:
        """Whether the copy is complete; never waits."""
        return self._done is None or self._done.query()

    def arrived(self) -> dict[str, Tensor]:
        """Return the state; wait until the copy is complete."""
        if self._done is None:
            return self._state
        self._done.synchronize()
        starts = accumulate((each.nbytes for each in self._state.values()), initial=0)
        named = zip(self._state.items(), starts, strict=False)
        return {name: _part(self._arriving, start, each) for (name, each), start in named}


def _key(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _part(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)
