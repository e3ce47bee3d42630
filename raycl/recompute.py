"""What makes a second forward pass equal to the first: random state, autocast, running statistics."""

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

# Of an embedding's greatest value. The same kernels on the same rows give the same numbers, on a
# GPU but for the order of a few sums; what is drawn anew differs by far more. In bfloat16 a GPU may
# choose other kernels with a graph than without, and each layer rounds by up to half an epsilon.
_TOLERANCE, _EPSILONS = 1e-3, 4
_SAMPLED_ROWS, _SAMPLED_COLUMNS = 4, 64  # about; what draws anew changes nearly all of them


@final
class RandomState:
    """The random state of the host, and of an accelerator, as it was when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._of_host = torch.get_rng_state()
        self._of_device = None if self._device is None else torch.cuda.get_rng_state(self._device)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw within as after this was made, and afterwards as if nothing had been drawn within."""
        with torch.random.fork_rng([] if self._device is None else [self._device]):
            torch.set_rng_state(self._of_host)
            if self._device is not None and self._of_device is not None:
                torch.cuda.set_rng_state(self._of_device, self._device)
            yield


def autocast_as_now(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return what enters, later on, the autocast that is in force now."""
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return partial(torch.autocast, device.type, dtype=dtype, enabled=enabled)


@final
class RunningStatistics:
    """The running statistics of a network's BatchNorms, moved once by a batch of several chunks.

    A chunk moves them part of the way from where they were to its own, so the mean over the chunks
    of where each alone would have moved them is where their mean moves them.
    """

    def __init__(self, network: nn.Module) -> None:
        layers = [layer for layer in network.modules() if isinstance(layer, _BatchNorm) and layer.training]
        self._buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
        self._before = [buffer.clone() for buffer in self._buffers]
        self._sums = [torch.zeros_like(buffer) for buffer in self._buffers]
        self._num_rows = 0

    @torch.no_grad()
    def take(self, *, num_rows: int) -> None:
        """Note where a chunk of so many rows moved them, and put them back."""
        self._num_rows += num_rows
        for buffer, total in zip(self._buffers, self._sums, strict=True):
            total.add_(buffer, alpha=num_rows)
        self.put_back()

    @torch.no_grad()
    def put_back(self) -> None:
        """Put them where they were when this was made."""
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(before)

    @torch.no_grad()
    def move(self) -> None:
        """Move them to the mean over the rows of all chunks; counts of batches grow by one."""
        for buffer, total in zip(self._buffers, self._sums, strict=True):
            # Each chunk counted one batch: the mean of equal integers is exact.
            buffer.copy_(total / self._num_rows if total.is_floating_point() else total // self._num_rows)


@final
class Replays:
    """Numbers of a second forward pass beside those of the first, compared together: a device is read once."""

    def __init__(self) -> None:
        self._pairs: list[_Pair] = []

    def add(self, now: Tensor, before: Tensor, describe: Callable[[], str]) -> None:
        """Add a pair of one shape. An autocast in force says how exact it is; ``describe`` says whose it is."""
        device = now.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else now.dtype
        tolerance = max(_TOLERANCE, _EPSILONS * torch.finfo(dtype).eps)
        self._pairs.append(_Pair(now.detach(), before, tolerance, describe))

    def check(self) -> None:
        """Raise ``ReplayError`` unless both tensors of each pair hold the same numbers."""
        if not self._pairs:
            return
        pairs, self._pairs = self._pairs, []
        before = [pair.before for pair in pairs]
        differences = torch._foreach_norm(torch._foreach_sub([pair.now for pair in pairs], before), math.inf)
        allowed = torch._foreach_mul(
            torch._foreach_norm(before, math.inf), [pair.tolerance for pair in pairs]
        )
        if not bool((torch.stack(differences) <= torch.stack(allowed)).all()):
            # The norm of what holds a NaN is NaN.
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
        """Raise ``ReplayError`` unless the numbers are the same, or were no numbers before either."""
        atol = self.tolerance * float(self.before.nan_to_num(posinf=0.0, neginf=0.0).abs().amax())
        if not torch.allclose(self.now, self.before, rtol=0.0, atol=atol, equal_nan=True):
            difference = float((self.now - self.before).abs().amax())
            raise ReplayError(
                f"{self.describe()} came out otherwise when it was embedded again, by up to {difference:.2g}: the "
                "gradient would be wrong; draw from torch's own random state and keep no state between calls, or "
                "train without chunk_size"
            )


def sample(value: Tensor) -> Tensor:
    """Return a few of the numbers of rows [n, ...], for :class:`Replays` where all would take too much memory."""
    rows = value.detach()[:: max(1, len(value) // _SAMPLED_ROWS)]
    columns = rows.reshape(len(rows), -1)
    return columns[:, :: max(1, columns.shape[1] // _SAMPLED_COLUMNS)].clone()


def first_nondeterministic_layer(
    network: nn.Module, rows: tuple[Tensor, ...], state: RandomState
) -> str | None:
    """Return the name of the first layer that answers otherwise when all is done once more."""
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
        with torch.no_grad(), state.again():
            network(*rows)
    finally:
        statistics.put_back()
        for handle in handles:
            handle.remove()
    return found
