"""A pretended GPU: host memory that counts as a CUDA device's, on machines and builds that have none.

Inside ``pretend_gpu()`` a tensor created on or moved to "cuda" has real values and real gradients, but its
storage is marked as device memory. ``tensor.device`` says "cuda:0". An operation on tensors of both devices raises as
CUDA does, and so does an operation without a kernel for CUDA. The trace counts launches, waits of the host for the device, and
copies from pageable memory, each by the line of raycl that caused it. Streams and events are followed: a tensor
that another stream writes must be waited for, and one that another stream reads must be recorded there.

Not simulated: dtypes and layouts unsupported by a kernel (except integer products), and the DDP reducer.
"""

import collections
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import raycl

aten = torch.ops.aten
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_PACKAGE = str(Path(raycl.__file__).parent) + "/"


class DeviceError(RuntimeError):
    """An operation that fails on a GPU or silently gives wrong values there."""


@dataclass(eq=False)
class Stream:
    """A sequence of operations; ``device`` and ``priority`` as in torch."""

    device: Any = None
    priority: int = 0
    trace: "Trace | None" = field(default_factory=lambda: _trace[-1] if _trace else None)
    launched: int = 0
    finished: int = 0  # as known to the host
    follows: "dict[Stream, int]" = field(default_factory=dict)  # earlier operations of other streams

    def wait_stream(self, other: "Stream") -> None:
        self._follow(other, other.launched, other.follows)

    def wait_event(self, event: "Event") -> None:
        if event.stream is not None:
            self._follow(event.stream, event.at, event.follows)

    def synchronize(self) -> None:
        trace().wait("synchronize", self)

    def finish(self, at: int, follows: "dict[Stream, int]") -> None:
        self.finished = max(self.finished, at)
        for other, its_at in follows.items():
            other.finished = max(other.finished, its_at)

    def _follow(self, other: "Stream", at: int, follows: "dict[Stream, int]") -> None:
        for each, its_at in [(other, at), *follows.items()]:
            if each is not self:
                self.follows[each] = max(self.follows.get(each, 0), its_at)


@dataclass(eq=False)
class Event:
    """A place in a stream."""

    stream: Stream | None = None
    at: int = 0
    follows: dict[Stream, int] = field(default_factory=dict)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream, self.at, self.follows = None, 0, {}

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or trace().stream
        self.at, self.follows = self.stream.launched, dict(self.stream.follows)

    def query(self) -> bool:
        return self.stream is None or self.stream.finished >= self.at

    def synchronize(self) -> None:
        """Wait; costs nothing if the host has already waited for a later operation."""
        if self.stream is not None and not self.query():
            trace().wait("event", self.stream, at=self.at, follows=self.follows)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or trace().stream).wait_event(self)

    def elapsed_time(self, _: "Event") -> float:
        return 1.0


@dataclass(eq=False)
class Memory:
    """The state of a storage: its device, and the last operation on it."""

    on_device: bool = False
    pinned: bool = False
    home: Stream | None = None  # the stream of the allocation
    recorded: set[Stream] = field(default_factory=set)  # other streams that prevent its reuse
    written: tuple[Stream, int] | None = None
    copied: tuple[Stream, int] | None = None  # a copy from host memory that may still be running


def memory_of(tensor: Tensor) -> Memory:
    """Return the state of a tensor's storage, host memory by default."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return Memory()
    found = getattr(storage, "_memory", None)
    if found is None:
        found = storage._memory = Memory()
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries; torch's own function takes far longer."""
    found: list[Tensor] = []
    _add_tensors((value,), found)
    return found


def _add_tensors(values: Any, found: list[Tensor]) -> None:
    for each in values:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            _add_tensors(each, found)
        elif isinstance(each, dict):
            _add_tensors(each.values(), found)


def is_on_device(tensor: Tensor) -> bool:
    """Whether a tensor lies on the pretended GPU."""
    return memory_of(tensor).on_device


class Trace:
    """Waits, launches and copies, by the innermost line of raycl."""

    def __init__(self) -> None:
        self.main = self.stream = Stream(trace=self)
        # Device of memory allocated by C++: the GPU, the host, or (None) the device of the other arguments.
        self.places: list[bool | None] = [None]
        self.clear()

    def clear(self) -> None:
        """Count from 0 again."""
        self.waits: collections.Counter[tuple[str, str]] = collections.Counter()
        self.launches: collections.Counter[tuple[str, str]] = collections.Counter()
        self.pageable: collections.Counter[str] = collections.Counter()

    @property
    def counts(self) -> tuple[int, int, int]:
        """Waits, copies from pageable memory, launches."""
        return self.waits.total(), self.pageable.total(), self.launches.total()

    def wait(
        self,
        why: str,
        stream: Stream | None = None,
        *,
        at: int | None = None,
        follows: dict[Stream, int] | None = None,
    ) -> None:
        stream = stream or self.stream
        stream.finish(stream.launched if at is None else at, stream.follows if follows is None else follows)
        self.waits[_line(), why] += 1

    def launch(self, what: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Record an operation of the current stream, and raise on a race."""
        stream = self.stream
        for each in reads:
            self._check_order(each)
        stream.launched += 1
        self.launches[_line(), what] += 1
        for each in writes:
            memory = memory_of(each)
            memory.home = memory.home or stream
            memory.written = (stream, stream.launched)

    def check_host(self, tensors: list[Tensor], *, writes: bool) -> None:
        """Raise if memory is read before its copy has arrived, or changed during a copy."""
        for each in tensors:
            memory = memory_of(each)
            for what, last in (("has not arrived", memory.written), ("is still copied", memory.copied)):
                is_running = last is not None and last[0].finished < last[1]
                if is_running and (writes or what == "has not arrived"):
                    raise DeviceError(f"the host uses pinned memory that {what} at {_line()}")

    def _check_order(self, tensor: Tensor) -> None:
        memory = memory_of(tensor)
        if memory.written is None or not memory.on_device:
            return
        other, at = memory.written
        if other.trace is not self:
            return  # a constant created on an earlier pretended device
        if other is not self.stream and max(self.stream.follows.get(other, 0), other.finished) < at:
            raise DeviceError(f"a stream reads what another one may still write at {_line()}")
        if memory.home is not None and memory.home is not self.stream and self.stream not in memory.recorded:
            raise DeviceError(f"a stream reads another one's memory without record_stream at {_line()}")


_trace: list[Trace] = []


def trace() -> Trace:
    """Return the trace of the active pretended device."""
    return _trace[-1]


def _line() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE):
            return f"{name.removeprefix(_PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return "tests"


def mark(tensor: Tensor, *, on_device: bool, pinned: bool = False) -> Tensor:
    """Mark the storage of a new tensor as this kind of memory."""
    memory = memory_of(tensor)
    memory.on_device, memory.pinned = on_device, pinned
    return tensor


def transfer(target: Tensor, source: Tensor, *, non_blocking: bool) -> None:
    """Record a copy between devices."""
    if not source.numel():
        return
    now, to_device = trace(), is_on_device(target)
    on_host = memory_of(source if to_device else target)
    if to_device:
        now.check_host([source], writes=False)
    now.launch("copy", [] if to_device else [source], [target] if to_device else [])
    last = (now.stream, now.stream.launched)
    if not non_blocking:
        now.wait("copy to device" if to_device else "copy to host")
    elif to_device and on_host.pinned:
        on_host.copied = last
    elif to_device:
        now.pageable[_line()] += 1  # staged: does not wait for the device, but is slow
    elif on_host.pinned:
        on_host.written = last
    else:
        now.wait("copy to pageable memory")


# Operations with a result shape that depends on values.
_SHAPED_BY_VALUES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.unique_dim_consecutive.default,
    aten._unique.default,
    aten._unique2.default,
}
_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
_WITHOUT_KERNEL = {
    aten.alias.default,
    aten.detach.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.lift_fresh.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.resize_.default,
    aten.set_.source_Storage_storage_offset,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
}
_INDEXING = {
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.mv.default}
# These do not accept a scalar in host memory.
_WITHOUT_NUMBERS = {
    aten.cat.default,
    aten.stack.default,
    aten.embedding.default,
    aten.index_select.default,
    aten.gather.default,
}


class _Operations(TorchDispatchMode):
    """Every operation, below autograd."""

    def __init__(self, now: Trace) -> None:
        super().__init__()
        self._trace = now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Autograd comes here with the mode of functions active, which would take each look at a tensor below.
        with torch._C.DisableTorchFunction():
            return self._operate(func, args, dict(kwargs or {}))

    def _operate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        on_device = any(map(is_on_device, tensors))
        writes = func._schema.is_mutable
        if "device" in kwargs and kwargs["device"] is not None:
            # C++ passes the actual device of its arguments; only Python requests CUDA.
            requested, place = torch.device(kwargs["device"]).type == "cuda", self._trace.places[-1]
            to_device = requested or (on_device if place is None else place)
            kwargs["device"] = CPU
        else:
            to_device = on_device
        pinned = bool(kwargs.pop("pin_memory", None))
        if func is aten.copy_.default and is_on_device(args[0]) != is_on_device(args[1]):
            transfer(args[0], args[1], non_blocking=len(args) > 2 and bool(args[2]))
            return func(*args, **kwargs)
        if not on_device:
            self._trace.check_host(tensors[:1] if writes else tensors, writes=writes)
        elif func in _INDEXING:
            self._check_indices(func, args)
        elif func is not aten._to_copy.default:
            self._check_devices(func, tensors)
        if on_device:
            self._wait_for(func, args, kwargs)
        kernel: Callable[..., Any] = _DEVICE_KERNELS.get(func, func)
        out = kernel(*args, **kwargs)
        self._place(func, tensors, out, on_device=to_device, pinned=pinned)
        return out

    def _check_devices(self, func: Any, tensors: list[Tensor]) -> None:
        name = func.name()
        if "_foreach" in name or "_fused" in name:
            return  # lists of each type
        on_host = [each for each in tensors if not is_on_device(each)]
        if any(each.ndim for each in on_host) or (on_host and func in _WITHOUT_NUMBERS):
            came = [(list(each.shape), "cuda" if is_on_device(each) else "cpu") for each in tensors]
            raise DeviceError(f"{name}: tensors on two devices, {came}, at {_line()}")
        if func in _PRODUCTS and not tensors[0].is_floating_point():
            raise DeviceError(f"{name}: CUDA multiplies no matrices of {tensors[0].dtype}, at {_line()}")

    def _check_indices(self, func: Any, args: Any) -> None:
        base = is_on_device(args[0])
        for index in args[1]:
            if index is None:
                continue
            if is_on_device(index) and not base:
                raise DeviceError(
                    f"{func.name()}: indices on the device of a tensor on the host, at {_line()}"
                )
            if index.dtype in (torch.bool, torch.uint8):
                self._trace.wait("shape by values")
            elif not is_on_device(index):
                self._trace.wait("copy to device")
        if len(args) > 2 and args[2].ndim and is_on_device(args[2]) != base:
            raise DeviceError(f"{func.name()}: values on another device, at {_line()}")

    def _wait_for(self, func: Any, args: Any, kwargs: Any) -> None:
        if func in _READS:
            self._trace.wait("read")
        elif func in _SHAPED_BY_VALUES or (
            func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        ):
            self._trace.wait("shape by values")
        if func is aten.native_batch_norm_backward.default and args[5] is None:
            raise DeviceError(f"{func.name()}: CUDA needs the saved mean, at {_line()}")

    def _place(self, func: Any, tensors: list[Tensor], out: Any, *, on_device: bool, pinned: bool) -> None:
        """Mark new memory, and count a launch if the operation has work to do."""
        outs = [each for each in tensors_in(out) if each.layout == torch.strided]
        held = {each.untyped_storage()._cdata for each in tensors if each.layout == torch.strided}
        new = [each for each in outs if each.untyped_storage()._cdata not in held]
        for each in new:
            mark(each, on_device=on_device, pinned=pinned)
            if on_device:
                memory_of(each).home = self._trace.stream
        changed = [each for each in tensors[:1] if func._schema.is_mutable and is_on_device(each)]
        if "_foreach" in func.name() or "_fused" in func.name():
            changed = [each for each in tensors if is_on_device(each)] if func._schema.is_mutable else []
        written = changed + (new if on_device else [])
        if any(each.numel() for each in written) and func not in _WITHOUT_KERNEL:
            self._trace.launch(func.name(), tensors, written)


_T = Tensor
_MOVES = (_T.to, _T.cuda, _T.cpu)
_MADE_OF_DATA = (torch.tensor, torch.as_tensor, _T.new_tensor)
_TO_HOST_DATA = (_T.numpy, _T.__array__, _T.tolist)


class _Functions(TorchFunctionMode):
    """Calls from Python: the device of a tensor, moves, and new tensors."""

    def __init__(self, now: Trace) -> None:
        super().__init__()
        self._trace = now

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _ANSWERS:
            return _ANSWERS[func](*args, **kwargs)
        if func in _MOVES:
            return self._move(func, args, kwargs)
        if func in _MADE_OF_DATA:
            return self._make(func, args, kwargs)
        if func in _TO_HOST_DATA:
            self._read(func, args[0])
        if func in (_T.backward, torch.autograd.backward):
            return self._go_back(args, kwargs)
        if func.__name__ == "__get__":
            return func(*args)  # an attribute, which allocates no memory
        tensors = tensors_in((args, kwargs))
        if kwargs.get("device") is not None:
            place = torch.device(kwargs["device"]).type == "cuda"
        else:
            place = None if any(map(is_on_device, tensors)) else False
        self._trace.places.append(place)  # as _within, which takes longer
        try:
            out = func(*args, **kwargs)
        finally:
            self._trace.places.pop()
        if func is _T.__deepcopy__:
            mark(out, on_device=is_on_device(args[0]))
        return out

    @contextlib.contextmanager
    def _within(self, place: bool | None) -> Iterator[None]:
        self._trace.places.append(place)
        try:
            yield
        finally:
            self._trace.places.pop()

    def _read(self, func: Any, tensor: Tensor) -> None:
        if not is_on_device(tensor):
            self._trace.check_host([tensor], writes=False)
        elif func is _T.tolist:
            self._trace.wait("read")
        else:
            raise DeviceError(f"numpy has no tensors of cuda:0; copy to the host first, at {_line()}")

    def _move(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        tensor, rest = args[0], args[1:]
        if func is not _T.to:
            rest = (CUDA if func is _T.cuda else CPU, *rest[1:])
        if rest and isinstance(rest[0], Tensor):
            rest = (CUDA if is_on_device(rest[0]) else CPU, rest[0].dtype, *rest[1:])
        copies = kwargs.pop("copy", False)
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*rest, **kwargs)
        was = is_on_device(tensor)
        to_device = was if device is None else torch.device(device).type == "cuda"
        settings = {} if memory_format is None else {"memory_format": memory_format}
        if to_device == was:
            with self._within(was):
                return _T.to(tensor, dtype or tensor.dtype, copy=copies, **settings)

        def move(source: Tensor) -> Tensor:
            with _disable_current_modes():
                target = torch.empty_like(source, dtype=dtype or source.dtype, **settings).copy_(source)
            mark(target, on_device=to_device, pinned=non_blocking and not to_device)
            transfer(target, source, non_blocking=non_blocking)
            return target

        if torch.is_grad_enabled() and tensor.requires_grad:
            return _Moved.apply(tensor, move, non_blocking)  # type: ignore[return-value]
        return move(tensor.detach())

    def _make(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Create a tensor from Python numbers, which are on the host."""
        value = args[-1] if func is _T.new_tensor else args[0]
        device = kwargs.pop("device", None)
        if func is torch.as_tensor and isinstance(value, Tensor):
            return value.to(device or value.device, kwargs.get("dtype") or value.dtype)
        for _ in filter(is_on_device, tensors_in(value)):
            self._trace.wait("read")
        to_device = func is _T.new_tensor and is_on_device(args[0])
        if device is not None:
            to_device = torch.device(device).type == "cuda"
        if func is _T.new_tensor:
            kwargs.setdefault("dtype", args[0].dtype)
        with _disable_current_modes():
            out = (torch.as_tensor if func is torch.as_tensor else torch.tensor)(value, **kwargs)
        if to_device:
            out = out.clone()
            mark(out, on_device=True)
            transfer(out, torch.empty_like(out, device=CPU), non_blocking=False)
        return out

    def _go_back(self, args: Any, kwargs: Any) -> None:
        """Run autograd with this mode active, for its Python functions."""
        tensors = args[0] if isinstance(args[0], list | tuple) else (args[0],)
        given = kwargs.get(
            "gradient", kwargs.get("grad_tensors", args[1] if len(args) > 1 else [None] * len(tensors))
        )
        given = given if isinstance(given, list | tuple) else (given,)
        gradients = []
        for each, gradient in zip(tensors, given, strict=True):
            if gradient is None:
                gradient = mark(torch.ones_like(each), on_device=is_on_device(each))
            if is_on_device(gradient) != is_on_device(each):
                raise DeviceError(f"a gradient lies on another device than its tensor, at {_line()}")
            gradients.append(gradient)
        with self, self._within(None):
            torch.autograd.Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
                tuple(tensors),
                tuple(gradients),
                bool(kwargs.get("retain_graph")),
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )


class _Moved(torch.autograd.Function):
    """A copy to the other device that returns the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, move: Callable[[Tensor], Tensor], non_blocking: bool) -> Tensor:
        ctx.home, ctx.dtype = (CUDA if is_on_device(tensor) else CPU), tensor.dtype
        return move(tensor.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return gradient.to(ctx.home, ctx.dtype), None, None


def _pin(tensor: Tensor, *_: Any) -> Tensor:
    if is_on_device(tensor):
        raise DeviceError(f"cannot pin 'torch.cuda.Tensor' at {_line()}")
    return mark(tensor.clone(), on_device=False, pinned=True)


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _T.device.__get__: lambda tensor: CUDA if is_on_device(tensor) else CPU,
    _T.is_cuda.__get__: is_on_device,
    _T.is_cpu.__get__: lambda tensor: not is_on_device(tensor),
    _T.get_device: lambda tensor: 0 if is_on_device(tensor) else -1,
    _T.is_pinned: lambda tensor, *_: memory_of(tensor).pinned,
    _T.pin_memory: _pin,
}


# CUDA-only kernels of synchronized BatchNorm.


def _channels(vector: Tensor, like: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (like.ndim - 2))


def _over_rows(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x.float(), _over_rows(x), correction=0)
    return mean, (variance + eps).rsqrt()


def _check_grid(x: Tensor) -> None:
    if not x.numel():
        raise DeviceError(f"invalid configuration argument: no blocks to launch at {_line()}")


def _check_dtype(what: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise DeviceError(f"{what} are {dtype}, came {tensor.dtype}, at {_line()}")


def _batch_norm_gather_stats(
    x: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    dtype = x.dtype if running_mean is None else running_mean.dtype
    _check_dtype("batch_norm_gather_stats_with_counts: counts", counts, dtype)
    # Workers one at a time, like the kernel, to get the same result for an empty one.
    total, mean, sum_squares = counts.new_zeros(()), torch.zeros_like(means[0]), torch.zeros_like(means[0])
    for count, its_mean, its_invstd in zip(counts, means, invstds, strict=True):
        factor = 1 / (total + count)
        sum_squares = (
            sum_squares + (its_invstd**-2 - eps) * count + (mean - its_mean) ** 2 * total * count * factor
        )
        mean = total * factor * mean + count * factor * its_mean
        total = total + count
    if running_mean is not None and running_variance is not None:
        running_mean.lerp_(mean.to(running_mean), momentum)
        running_variance.lerp_((sum_squares / (total - 1)).to(running_variance), momentum)
    return mean, (sum_squares / total + eps).rsqrt()


def _batch_norm_elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    _check_grid(x)
    out = (x.float() - _channels(mean, x)) * _channels(invstd, x)
    if weight is not None and bias is not None:
        out = out * _channels(weight, x) + _channels(bias, x)
    return out.to(x.dtype, memory_format=torch.preserve_format)


def _batch_norm_backward_reduce(
    gradient: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    level = gradient.float().sum(_over_rows(x))
    slope = (gradient.float() * (x.float() - _channels(mean, x))).sum(_over_rows(x))
    return level, slope, slope * invstd, level.clone()


def _batch_norm_backward_elemt(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    level: Tensor,
    slope: Tensor,
    counts: Tensor,
) -> Tensor:
    _check_grid(x)
    _check_dtype("batch_norm_backward_elemt: counts", counts, torch.int32)
    if weight is not None:
        _check_dtype("batch_norm_backward_elemt: weights", weight, mean.dtype)
    scale = invstd if weight is None else invstd * weight
    steep = invstd**2 * slope / counts.sum()
    centered = gradient.float() - _channels(level / counts.sum(), x)
    return ((centered - (x.float() - _channels(mean, x)) * _channels(steep, x)) * _channels(scale, x)).to(
        x.dtype
    )


_DEVICE_KERNELS: dict[Any, Callable[..., Any]] = {
    aten.batch_norm_stats.default: _batch_norm_stats,
    aten.batch_norm_gather_stats_with_counts.default: _batch_norm_gather_stats,
    aten.batch_norm_elemt.default: _batch_norm_elemt,
    aten.batch_norm_backward_reduce.default: _batch_norm_backward_reduce,
    aten.batch_norm_backward_elemt.default: _batch_norm_backward_elemt,
}


def _record_stream(tensor: Tensor, stream: Stream) -> None:
    memory_of(tensor).recorded.add(stream)


@contextlib.contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    now = trace()
    before = now.stream
    now.stream = stream or before
    try:
        yield
    finally:
        now.stream = before


@contextlib.contextmanager
def pretend_gpu() -> Iterator[Trace]:
    """Treat "cuda" as host memory marked as device memory; yield the trace of its operations."""
    now = Trace()
    autocast, is_enabled, dtype_of = (
        torch.autocast.__init__,
        torch.is_autocast_enabled,
        torch.get_autocast_dtype,
    )

    def enter_autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast(self, "cpu", *args, **kwargs)

    patches = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "Stream": Stream,
        "Event": Event,
        "stream": _stream,
        "current_stream": lambda *_: trace().stream,
        "default_stream": lambda *_: trace().main,
        "synchronize": lambda *_: trace().wait("synchronize"),
    }
    with contextlib.ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", value))
        stack.enter_context(mock.patch.object(torch.autocast, "__init__", enter_autocast))
        stack.enter_context(mock.patch("torch.is_autocast_enabled", lambda *_: is_enabled("cpu")))
        stack.enter_context(mock.patch("torch.get_autocast_dtype", lambda *_: dtype_of("cpu")))
        # Its arguments are checked before any mode.
        stack.enter_context(mock.patch.object(_T, "record_stream", _record_stream))
        # The optimizers check for the capture of a CUDA graph.
        capture = mock.Mock(is_capturing=lambda: False)
        stack.enter_context(mock.patch("torch.accelerator.current_stream", lambda *_: capture))
        _trace.append(now)
        stack.callback(_trace.pop)
        stack.enter_context(_Functions(now))
        stack.enter_context(_Operations(now))
        yield now
