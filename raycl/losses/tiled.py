"""The primitives of the tiled losses: value and gradients in one pass over tiles of the logits.

The gradient of a softmax loss at its embeddings needs each row's logsumexp and nothing else.
So the forward computes the gradients too, tile by tile, and the backward only scales them.
Logits are in base 2: torch's ``exp2`` is several times faster than ``exp`` on some CPUs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from raycl.errors import ConfigError
from raycl.losses.false_negatives import FalseNegativeMask

LOG2_E = math.log2(math.e)
# 2**-x is still far from underflow in float32, which ends at 2**-126.
SAFE_SPREAD = 115.0
BLOCK_ROWS = 256  # rows that meet all columns; with a piece of the columns they fill the cache

Gradients = tuple[Tensor | None, ...]
Evaluate = Callable[..., tuple[Tensor, Gradients]]


class _Fused(torch.autograd.Function):
    """Save the gradients that the forward computed."""

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
    """Return the value of ``evaluate``; compute its gradients at once, and only if an input requires one.

    ``evaluate(*inputs, with_gradient=...)`` returns a scalar and one gradient per input.
    """
    with torch.autocast(inputs[0].device.type, enabled=False):
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            return _Fused.apply(evaluate, *inputs)  # pyright: ignore[reportReturnType]
        return evaluate(*inputs, with_gradient=False)[0]


def working_precision(tensor: Tensor) -> Tensor:
    """Return the tensor in at least float32: half precision cannot hold logits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def gradient_buffers(
    rows: Tensor, *columns: Tensor, temperature: Tensor | None = None, with_gradient: bool
) -> list[Tensor | None]:
    """Return zeros for the gradients of rows and columns, None where none is required.

    The temperature's gradient is computed from the rows'.
    """
    wanted = [rows.requires_grad or (temperature is not None and temperature.requires_grad)]
    wanted += [each.requires_grad for each in columns]
    return [
        torch.zeros_like(each) if with_gradient and is_wanted else None
        for each, is_wanted in zip((rows, *columns), wanted, strict=True)
    ]


def read_together(*tensors: Tensor) -> list[list[float]]:
    """Copy tensors to the host, flattened, in one read: each read makes the host wait for the device."""
    values = torch.cat([each.detach().flatten().double() for each in tensors]).tolist()
    sizes = [each.numel() for each in tensors]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return [values[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def read_sizes(*masks: FalseNegativeMask | None) -> None:
    """Read from the device what the masks need on the host, at once."""
    given = [mask for mask in masks if mask is not None]
    if given:
        for mask, sizes in zip(given, read_together(*(mask.sizes for mask in given)), strict=True):
            mask.set_sizes(sizes)


def read_bound(
    rows: Tensor,
    longest_column: Tensor,
    temperature: Tensor,
    *masks: FalseNegativeMask | None,
    spread: float | Tensor = 0.0,
) -> Tensor | None:
    """Return a bound of |logit| in base 2 (Cauchy-Schwarz), or None if it is too large to be a safe shift.

    A shift known before the logits saves a pass over them. At a low temperature whole rows would
    underflow; there the shift follows the logits. ``spread`` is how far biases lower the logits further.
    The only read from the device of a softmax loss: checks the temperature and reads the masks' sizes too.
    """
    return read_bound_and(rows, longest_column, temperature, *masks, spread=spread)[0]


def read_bound_and(
    rows: Tensor,
    longest_column: Tensor,
    temperature: Tensor,
    *masks: FalseNegativeMask | None,
    spread: float | Tensor = 0.0,
    flag: Tensor | None = None,
) -> tuple[Tensor | None, bool]:
    """Return the bound of :func:`read_bound`, and a flag that is on the device, by the same read."""
    bound = longest_column * longest(rows, rows.dtype) * (LOG2_E / temperature)
    given = [mask for mask in masks if mask is not None]
    flag = rows.new_zeros(()) if flag is None else flag
    (value,), (span,), (is_set,), *sizes = read_together(
        temperature, 2 * bound + spread, flag, *(mask.sizes for mask in given)
    )
    check_temperature(value)
    for mask, its_sizes in zip(given, sizes, strict=True):
        mask.set_sizes(its_sizes)
    return (bound if span <= SAFE_SPREAD else None), bool(is_set)


def check_temperature(temperature: float) -> None:
    """Refuse a temperature that is not above 0."""
    if temperature <= 0:
        raise ConfigError(
            f"the temperature is not above 0: it is {temperature:g}; "
            "usual values lie between 0.01 and 1 (learn its logarithm, which cannot cross 0)"
        )


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left @ right.T (+ bias per column), [num_left, num_right]."""
    # torch sends float32 products to MKL, which runs at less than half speed on AMD; this
    # operator (the one torch.compile emits) goes to oneDNN. Same error: 2e-7 relative.
    if left.device.type == "cpu" and left.dtype == torch.float32 and _HAS_ONEDNN:
        return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return F.linear(left, right, bias)


_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def longest(rows: Tensor, precision: torch.dtype) -> Tensor:
    """Return the length of the longest row, 0 without rows; half precision is converted piece by piece."""
    pieces = [
        torch.linalg.vector_norm(rows[span].to(precision), dim=1).amax() for span in spans(0, len(rows), 4096)
    ]
    return torch.stack([rows.new_zeros((), dtype=precision), *pieces]).amax()


def tile_size(tensor: Tensor) -> int:
    """Return the rows of a square tile that fits the cache, or fills the GPU."""
    return 512 if tensor.device.type == "cpu" else 2048


def spans(start: int, stop: int, size: int) -> Iterator[slice]:
    """Cut start:stop into pieces of at most ``size``."""
    return (slice(at, min(at + size, stop)) for at in range(start, stop, size))


def mask_diagonals(tile: Tensor, rows: slice, columns: slice, diagonals: Sequence[int]) -> None:
    """Set, in place, the entries with column - row in ``diagonals`` (whole-matrix counts) to -inf."""
    for diagonal in diagonals:
        tile.diagonal(diagonal + rows.start - columns.start).fill_(-math.inf)


def temperature_gradient(
    rows: Tensor, gradient: Tensor, temperature: Tensor, share: float = 1.0
) -> Tensor | None:
    """Return the temperature's gradient from the rows' gradient: a logit is similarity / temperature."""
    if not temperature.requires_grad:
        return None
    return (gradient * rows).sum() * (-share / temperature)


def scaled_gradients(rows: Tensor, gradients: Gradients, temperature: Tensor, num_terms: int) -> Gradients:
    """Divide the gradients, in place, by temperature x ``num_terms``; add the temperature's.

    The first gradient is the rows', from which the temperature's is computed.
    """
    for gradient in gradients:
        if gradient is not None:
            gradient.div_(temperature * num_terms)
    own = gradients[0]
    return (*gradients, None if own is None else temperature_gradient(rows, own, temperature))


def zero_denormals(logits: Tensor) -> Tensor:
    """Set, in place, logits to -inf if 2**logit is denormal: arithmetic on those takes 50 times as long."""
    return torch.threshold_(logits, -SAFE_SPREAD, -math.inf)
