"""The fused core of the losses: value and gradients in one walk over tiles of the logits.

The gradient of a softmax loss at its embeddings needs each row's logsumexp and nothing else.
So the forward takes the gradients too, tile by tile, and the backward is a multiplication.
Logits are kept in base 2: torch's ``exp2`` is several times faster than ``exp`` on some CPUs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LOG2_E = math.log2(math.e)
# Where 2**-x is still far from underflow in float32 (which ends at 2**-126).
SAFE_SPREAD = 115.0
STRIP_ROWS = 256  # of rows that meet all columns: with a piece of them, as much as the cache holds

Gradients = tuple[Tensor | None, ...]
Evaluate = Callable[..., tuple[Tensor, Gradients]]


class _Fused(torch.autograd.Function):
    """Save the gradients that the forward found."""

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
    """Return ``evaluate``'s value; take its gradients at once, and only where they are wanted.

    ``evaluate(*inputs, with_gradient=...)`` returns a scalar and one gradient per input.
    """
    with torch.autocast(inputs[0].device.type, enabled=False):
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            return _Fused.apply(evaluate, *inputs)  # pyright: ignore[reportReturnType]
        return evaluate(*inputs, with_gradient=False)[0]


def working_precision(tensor: Tensor) -> Tensor:
    """Return the tensor in at least float32: half precision cannot hold logits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def has_duplicates(ids: Tensor) -> bool:
    """Say whether an id occurs twice: a mask costs a pass over each tile, so ask first."""
    ordered = ids.sort().values
    return bool((ordered[1:] == ordered[:-1]).any())


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left @ right.T (+ bias per column), [num_left, num_right]."""
    # torch sends float32 products to MKL, which runs at less than half speed on AMD; this
    # operator (the one torch.compile emits) goes to oneDNN. Same error: 2e-7 relative.
    if left.device.type == "cpu" and left.dtype == torch.float32 and _HAS_ONEDNN:
        return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return F.linear(left, right, bias)


_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def longest(rows: Tensor, precision: torch.dtype) -> Tensor:
    """Return the length of the longest row, 0 if there is none; half precision piece by piece."""
    pieces = [
        torch.linalg.vector_norm(rows[span].to(precision), dim=1).amax() for span in spans(0, len(rows), 4096)
    ]
    return torch.stack([rows.new_zeros((), dtype=precision), *pieces]).amax()


def tile_size(tensor: Tensor) -> int:
    """Return the rows of a square tile: it should fit the cache, or fill the GPU."""
    return 512 if tensor.device.type == "cpu" else 2048


def spans(start: int, stop: int, size: int) -> Iterator[slice]:
    """Cut start:stop into pieces of at most ``size``."""
    return (slice(at, min(at + size, stop)) for at in range(start, stop, size))


def mask_diagonals(tile: Tensor, rows: slice, columns: slice, diagonals: Sequence[int]) -> None:
    """Rule out, in place, the entries with column - row in ``diagonals`` (whole-matrix counts)."""
    for diagonal in diagonals:
        tile.diagonal(diagonal + rows.start - columns.start).fill_(-math.inf)


def mask_same(tile: Tensor, row_ids: Tensor, column_ids: Tensor) -> None:
    """Rule out, in place, the candidates that carry their row's id."""
    tile.masked_fill_(row_ids[:, None] == column_ids, -math.inf)


class Softmax(NamedTuple):
    """What the negatives' sum says of each row; the positive was never rounded into it."""

    loss: Tensor  # -log p(positive), natural
    missing: Tensor  # 1 - p(positive)
    logsumexp: Tensor  # over positive and negatives, base 2


def finish(positive: Tensor, shift: Tensor, total: Tensor) -> Softmax:
    """Join positives (base-2 logits) with their negatives, whose sum is total * 2**shift."""
    excess = (shift - positive + total.log2()) / LOG2_E
    loss = torch.logaddexp(excess, torch.zeros_like(excess))
    return Softmax(loss, excess.sigmoid(), positive + loss * LOG2_E)


def temperature_gradient(
    rows: Tensor, gradient: Tensor, temperature: Tensor, share: float = 1.0
) -> Tensor | None:
    """Read the temperature's gradient off the rows': a logit is similarity / temperature."""
    if not temperature.requires_grad:
        return None
    return (gradient * rows).sum() * (-share / temperature)


def flush(logits: Tensor) -> Tensor:
    """Rule out, in place, whose 2**logit would be no normal number: arithmetic on those takes 50 times as long."""
    return torch.threshold_(logits, -SAFE_SPREAD, -math.inf)
