"""The fused core of the losses: value and gradients in one walk over tiles of the logits.

The gradient of a softmax loss at its embeddings needs each row's logsumexp and nothing else.
So the forward takes the gradients too, tile by tile, and the backward is a multiplication.
Logits are kept in base 2: torch's ``exp2`` is several times faster than ``exp`` on some CPUs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LOG2_E = math.log2(math.e)

Gradients = tuple[Tensor | None, ...]
Evaluate = Callable[..., tuple[Tensor, Gradients]]


class Side(NamedTuple):
    """Rows whose positives, and own copies, lie on one diagonal of the logits."""

    rows: slice
    positive: int  # column of the first row's positive
    own: int | None  # column of the first row itself; None where it is no candidate


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


def evaluate_rectangle(
    rows: Tensor,
    columns: Tensor,
    temperature: Tensor,
    *,
    sides: tuple[Side, ...],
    ids: tuple[Tensor, Tensor] | None = None,
    with_gradient: bool,
) -> tuple[Tensor, Gradients]:
    """Classify each row's positive among the columns; the mean over rows, and its gradients.

    rows [num_rows, dim], columns [num_columns, dim]. ``ids`` of rows and columns, where given,
    mask false negatives.
    Holds one strip of logits, 256 x num_columns.
    """
    walk = _RectangleWalk(rows, columns, LOG2_E / temperature, ids)
    visit = walk.take_gradient if with_gradient else walk.take_loss
    loss = torch.cat(
        [visit(side, span) for side in sides for span in spans(side.rows.start, side.rows.stop, _STRIP_ROWS)]
    ).mean()
    if not with_gradient:
        return loss, ()
    factor = 1 / (temperature * len(rows))
    row_gradient = walk.row_gradient.mul_(factor)
    column_gradient = walk.column_gradient.mul_(factor).T
    degrees = temperature_gradient(rows, row_gradient, temperature)
    return loss, (row_gradient, column_gradient, degrees)


_STRIP_ROWS = 256


@final
class _RectangleWalk:
    """Visit strips of rows; each strip meets all columns, so one visit is enough."""

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor,
        scale: Tensor,
        ids: tuple[Tensor, Tensor] | None,
    ) -> None:
        self._rows, self._columns, self._scale, self._ids = rows, columns, scale, ids
        self._pieces = list(spans(0, len(columns), 2 * tile_size(columns)))
        # Made once: the allocator would give a strip back to the kernel after each visit.
        height, width = min(_STRIP_ROWS, len(rows)), self._pieces[0].stop
        self._strip = rows.new_empty(len(self._pieces), height, width)
        self.row_gradient = torch.zeros_like(rows)
        self.column_gradient = torch.zeros_like(columns.T)  # [dim, num_columns]: faster to add to

    def take_loss(self, side: Side, span: slice) -> Tensor:
        """Return the loss of each row of the span."""
        return self._visit(side, span)[1].loss

    def take_gradient(self, side: Side, span: slice) -> Tensor:
        """Return the loss of each row of the span; add its gradients, yet to be scaled."""
        tiles, softmax, shift = self._visit(side, span)
        rows, match = self._rows[span], self._match(side, span)
        share = (shift - softmax.logsumexp).exp2_()[:, None]
        pull = softmax.missing[:, None]
        push = (share * rows).T
        row_gradient = -pull * self._columns[match]
        for tile, piece in zip(tiles, self._pieces, strict=True):
            row_gradient += share * product(tile, self._columns[piece].T)
            self.column_gradient[:, piece] += product(push, tile.T)
        self.column_gradient[:, match] -= (pull * rows).T
        self.row_gradient[span] = row_gradient
        return softmax.loss

    def _visit(self, side: Side, span: slice) -> tuple[list[Tensor], Softmax, Tensor]:
        """Fill the strip with 2**(logits - shift), where shift is each row's maximum."""
        query = self._rows[span] * self._scale
        positive = (query * self._columns[self._match(side, span)]).sum(1)
        tiles = [self._logits(query, side, span, k) for k in range(len(self._pieces))]
        shift = torch.stack([positive, *(tile.amax(1) for tile in tiles)]).amax(0)
        total = torch.zeros_like(shift)
        for tile in tiles:
            total += tile.sub_(shift[:, None]).exp2_().sum(1)
        return tiles, finish(positive, shift, total), shift

    def _logits(self, query: Tensor, side: Side, span: slice, k: int) -> Tensor:
        piece = self._pieces[k]
        tile = self._strip[k, : len(query), : piece.stop - piece.start]
        tile.copy_(product(query, self._columns[piece]))
        at = [column for column in (side.positive, side.own) if column is not None]
        mask_diagonals(tile, span, piece, [column - side.rows.start for column in at])
        if self._ids is not None:
            mask_same(tile, self._ids[0][span], self._ids[1][piece])
        return tile

    def _match(self, side: Side, span: slice) -> slice:
        """Return the columns that hold the span's positives."""
        shift = side.positive - side.rows.start
        return slice(span.start + shift, span.stop + shift)
