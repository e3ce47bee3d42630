"""Primitives of the tiled losses: value and gradients in one pass over tiles of the logits.

The gradient of a softmax loss needs only the logsumexp of each row. The forward therefore computes
the gradients tile by tile, and the backward only scales them. Logits are in base 2, since ``exp2``
of torch is several times faster than ``exp`` on some CPUs.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from raycl.errors import ConfigError
from raycl.losses.false_negatives import Mask

LOG2_E = math.log2(math.e)
# 2**-x is well above the underflow of float32 at 2**-126.
SAFE_SPREAD = 115.0
BLOCK_ROWS = 256  # rows processed together; with a tile of columns they fill the cache

Gradients = tuple[Tensor | None, ...]
Evaluate = Callable[..., tuple[Tensor, Gradients]]


class _Fused(torch.autograd.Function):
    """Autograd function whose forward computes and saves the gradients."""

    @staticmethod
    def forward(ctx: Any, evaluate: Evaluate, *inputs: Tensor) -> Tensor:
        value, gradients = evaluate(*inputs, with_gradient=True)
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        return None, *(None if saved is None else saved * grad for saved in ctx.saved_tensors)


def fused(evaluate: Evaluate, *inputs: Tensor) -> Tensor:
    """Return the value of ``evaluate``; compute gradients in the same pass, if an input requires one.

    ``evaluate(*inputs, with_gradient=...)`` returns a scalar and one gradient per input.
    """
    with torch.autocast(inputs[0].device.type, enabled=False):
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            return _Fused.apply(evaluate, *inputs)  # pyright: ignore[reportReturnType]
        return evaluate(*inputs, with_gradient=False)[0]


def working_precision(tensor: Tensor) -> Tensor:
    """Return the tensor in at least float32: half precision is too coarse for logits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def gradient_buffers(
    rows: Tensor, *columns: Tensor, temperature: Tensor | None = None, with_gradient: bool
) -> list[Tensor | None]:
    """Return zeros for the gradients of rows and columns, or None if not required.

    The gradient of the temperature is computed from the gradient of the rows.
    """
    wanted = [rows.requires_grad or (temperature is not None and temperature.requires_grad)]
    wanted += [each.requires_grad for each in columns]
    return [
        torch.zeros_like(each) if with_gradient and is_wanted else None
        for each, is_wanted in zip((rows, *columns), wanted, strict=True)
    ]


def read_scalars(*scalars: Tensor, masks: Sequence[Mask | None] = ()) -> list[float]:
    """Read scalars, and the sizes of the masks, from the device in one transfer: each transfer waits for it."""
    given = list(dict.fromkeys(mask for mask in masks if mask is not None))
    parts = [*scalars, *(mask.sizes for mask in given)]
    if not parts:
        return []
    values = torch.cat([each.detach().flatten().double() for each in parts]).tolist()
    at = len(scalars)
    for mask in given:
        mask.set_sizes(values[at : at + mask.sizes.numel()])
        at += mask.sizes.numel()
    return values[: len(scalars)]


def read_bound(
    longest_row: Tensor,
    longest_column: Tensor,
    temperature: Tensor,
    *masks: Mask | None,
    spread: float | Tensor = 0.0,
    flags: Iterable[Tensor] = (),
) -> tuple[Tensor | None, list[bool]]:
    """Return a bound of |logit| in base 2 (Cauchy-Schwarz), or None if it is too large for a safe shift.

    A shift known before the logits saves a pass over them. At a low temperature rows would underflow,
    so the shift must follow the logits. ``spread`` is the largest reduction of a logit by a bias.
    This is the only device read of a softmax loss; it also checks the temperature, reads mask sizes, and
    returns which of ``flags``, scalars on the device, are set.
    """
    bound = longest_column * longest_row * (LOG2_E / temperature)
    value, span, *are_set = read_scalars(temperature, 2 * bound + spread, *flags, masks=masks)
    check_temperature(value)
    return (bound if span <= SAFE_SPREAD else None), [each > 0 for each in are_set]


def check_temperature(temperature: float) -> None:
    """Raise unless the temperature is above 0."""
    if temperature <= 0:
        raise ConfigError(
            f"the temperature must be above 0, got {temperature:g}; "
            "usual values are between 0.01 and 1 (if learned, learn its logarithm)"
        )


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left @ right.T (+ bias per column), [num_left, num_right]."""
    # torch uses MKL for float32 products, which runs at less than half speed on AMD. This operator,
    # which torch.compile emits, uses oneDNN. Both have a relative error of 2e-7.
    if left.device.type == "cpu" and left.dtype == torch.float32 and _HAS_ONEDNN:
        return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return F.linear(left, right, bias)


_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def longest(rows: Tensor, precision: torch.dtype) -> Tensor:
    """Return the length of the longest row, 0 without rows; half precision is converted in blocks."""
    pieces = [
        torch.linalg.vector_norm(rows[span].to(precision), dim=1).amax() for span in spans(0, len(rows), 4096)
    ]
    return torch.stack([rows.new_zeros((), dtype=precision), *pieces]).amax()


def tile_size(tensor: Tensor) -> int:
    """Return the side of a square tile that fits the CPU cache or fills the GPU."""
    return 512 if tensor.device.type == "cpu" else 2048


def spans(start: int, stop: int, size: int) -> Iterator[slice]:
    """Cut start:stop into slices of at most ``size``."""
    return (slice(at, min(at + size, stop)) for at in range(start, stop, size))


def add_rows(total: Tensor, places: Tensor, rows: Tensor) -> None:
    """Add rows [num_rows, dim] to total at these places, deterministically."""
    # index_put_ is deterministic on CUDA, index_add_ on the CPU.
    if total.is_cuda:
        total.index_put_((places,), rows, accumulate=True)
    else:
        total.index_add_(0, places, rows)


def mask_diagonals(tile: Tensor, rows: slice, columns: slice, diagonals: Sequence[int]) -> None:
    """Set entries with column - row in ``diagonals`` (indices of the full matrix) to -inf, in place."""
    for diagonal in diagonals:
        tile.diagonal(diagonal + rows.start - columns.start).fill_(-math.inf)


def temperature_gradient(
    rows: Tensor, gradient: Tensor, temperature: Tensor, share: float = 1.0
) -> Tensor | None:
    """Return the gradient of the temperature, computed from the gradient of the rows."""
    if not temperature.requires_grad:
        return None
    return (gradient * rows).sum() * (-share / temperature)


def scaled_gradients(
    rows: Tensor, gradients: Gradients, temperature: Tensor, num_terms: int, *, share: float = 1.0
) -> Gradients:
    """Divide the gradients by temperature * ``num_terms``, in place; append the gradient of the temperature.

    It is ``share`` of the one computed from the first gradient, which belongs to the rows.
    """
    for gradient in gradients:
        if gradient is not None:
            gradient.div_(temperature * num_terms)
    own = gradients[0]
    return (*gradients, None if own is None else temperature_gradient(rows, own, temperature, share))


def zero_denormals(logits: Tensor) -> Tensor:
    """Set logits to -inf if 2**logit is denormal, in place: denormal arithmetic is 50 times slower."""
    return torch.threshold_(logits, -SAFE_SPREAD, -math.inf)
