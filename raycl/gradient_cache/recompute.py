"""Make a second forward pass equal to the first: random state, autocast, running statistics."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raycl.errors import ReplayError

# Relative to an embedding's greatest value. The same kernels on the same rows give the same numbers,
# on a GPU up to the order of a few sums; another random draw differs by far more. In bfloat16 a GPU
# may choose other kernels with a graph than without, and each layer rounds by up to half an epsilon.
_TOLERANCE, _EPSILONS = 1e-3, 4
_SAMPLED_ROWS, _SAMPLED_COLUMNS = 4, 64  # about; another random draw changes nearly all of them


@final
class RandomState:
    """A snapshot of the random state of the host, and of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._host_state = torch.get_rng_state()
        self._device_state = None if self._device is None else torch.cuda.get_rng_state(self._device)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomState) or not torch.equal(self._host_state, other._host_state):
            return False
        if self._device_state is None or other._device_state is None:
            return self._device_state is other._device_state
        return torch.equal(self._device_state, other._device_state)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore this state for a while, then continue from the present one."""
        with torch.random.fork_rng([] if self._device is None else [self._device]):
            torch.set_rng_state(self._host_state)
            if self._device is not None and self._device_state is not None:
                torch.cuda.set_rng_state(self._device_state, self._device)
            yield


def current_autocast(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a function that enters the present autocast again."""
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return partial(torch.autocast, device.type, dtype=dtype, enabled=enabled)


@final
class RunningStatistics:
    """The running statistics of a network's BatchNorms, updated once by a batch of several chunks.

    The update is linear in a chunk's statistics. So the mean of the updates by each chunk alone is the
    update by the mean of their statistics.
    """

    def __init__(self, network: nn.Module) -> None:
        layers = [layer for layer in network.modules() if isinstance(layer, _BatchNorm) and layer.training]
        self._buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
        self._before = [buffer.clone() for buffer in self._buffers]
        self._sums = [torch.zeros_like(buffer) for buffer in self._buffers]
        self._num_rows = 0

    @torch.no_grad()
    def record(self, *, num_rows: int) -> None:
        """Record the update by a chunk of ``num_rows`` rows, and undo it."""
        self._num_rows += num_rows
        for buffer, total in zip(self._buffers, self._sums, strict=True):
            total.add_(buffer, alpha=num_rows)
        self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the statistics as they were before the first chunk."""
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(before)

    @torch.no_grad()
    def update(self) -> None:
        """Apply the mean update over the rows of all chunks; the number of batches grows by one."""
        for buffer, total in zip(self._buffers, self._sums, strict=True):
            # Each chunk counted one batch, and the mean of equal integers is exact.
            buffer.copy_(total / self._num_rows if total.is_floating_point() else total // self._num_rows)


@final
class RecomputeCheck:
    """Compare values of two forward passes, all in one read from the device."""

    def __init__(self) -> None:
        self._pairs: list[_Pair] = []

    def add(self, now: Tensor, before: Tensor, describe: Callable[[], str]) -> None:
        """Add two tensors of one shape; autocast decides their tolerance, ``describe`` names them in an error."""
        device = now.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else now.dtype
        tolerance = max(_TOLERANCE, _EPSILONS * torch.finfo(dtype).eps)
        self._pairs.append(_Pair(now.detach(), before, tolerance, describe))

    def check(self) -> None:
        """Raise ``ReplayError`` unless both tensors of each pair are equal within their tolerance."""
        if not self._pairs:
            return
        pairs, self._pairs = self._pairs, []
        before = [pair.before for pair in pairs]
        differences = torch._foreach_norm(torch._foreach_sub([pair.now for pair in pairs], before), math.inf)
        allowed = torch._foreach_mul(
            torch._foreach_norm(before, math.inf), [pair.tolerance for pair in pairs]
        )
        if not bool((torch.stack(differences) <= torch.stack(allowed)).all()):
            # A NaN makes the norm NaN, but two equal NaNs are fine.
            for pair in pairs:
                pair.check()


@final
@dataclass(frozen=True)
class _Pair:
    now: Tensor
    before: Tensor
    tolerance: float
    describe: Callable[[], str]

    def check(self) -> None:
        """Raise ``ReplayError`` unless the values are equal; NaN equals NaN."""
        atol = self.tolerance * float(self.before.nan_to_num(posinf=0.0, neginf=0.0).abs().amax())
        if not torch.allclose(self.now, self.before, rtol=0.0, atol=atol, equal_nan=True):
            difference = float((self.now - self.before).abs().amax())
            raise ReplayError(
                f"{self.describe()} gave other values in the second forward pass, by up to {difference:.2g}, so the "
                "gradient would be wrong; draw from torch's own random state and keep no state between calls, or "
                "train without chunk_size"
            )


def sample(value: Tensor) -> Tensor:
    """Return a few values of rows [n, ...], for a check that needs little memory."""
    rows = value.detach()[:: max(1, len(value) // _SAMPLED_ROWS)]
    columns = rows.reshape(len(rows), -1)
    return columns[:, :: max(1, columns.shape[1] // _SAMPLED_COLUMNS)].clone()


def first_nondeterministic_layer(
    network: nn.Module, rows: tuple[Tensor, ...], state: RandomState
) -> str | None:
    """Return the name of the first layer whose output differs between two equal passes."""
    first, second = (_outputs(network, rows, state) for _ in range(2))
    for (name, output), (_, other) in zip(first, second, strict=False):
        if not torch.equal(output, other):
            return name
    return None


def _outputs(network: nn.Module, rows: tuple[Tensor, ...], state: RandomState) -> list[tuple[str, Tensor]]:
    """Return the outputs of all layers by name, in the order of the calls."""
    found: list[tuple[str, Tensor]] = []

    def note(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            found.append((name, output.clone()))

    layers = [(name, layer) for name, layer in network.named_modules() if not any(layer.children())]
    handles = [layer.register_forward_hook(partial(note, name)) for name, layer in layers]
    statistics = RunningStatistics(network)
    try:
        with torch.no_grad(), state.restored():
            network(*rows)
    finally:
        statistics.restore()
        for handle in handles:
            handle.remove()
    return found
