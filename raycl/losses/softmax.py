"""Tiled softmax losses: one pass over row blocks and column blocks, without the full matrix of logits.

Columns can be local, gathered, from a queue, or from other workers of a ring; each set is a
:class:`ColumnBlock`. Each :class:`SoftmaxRows` sums 2**(logit - shift) over its column blocks.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor

from raycl.losses.false_negatives import Mask
from raycl.losses.tiled import (
    BLOCK_ROWS,
    LOG2_E,
    mask_diagonals,
    product,
    spans,
    tile_size,
    zero_denormals,
)


class RowGroup(NamedTuple):
    """Rows whose excluded columns lie on diagonals of the logits."""

    rows: slice
    # Columns that are not negatives of the first row: its positives, or the row itself.
    excluded: tuple[int, ...]

    @property
    def diagonals(self) -> list[int]:
        """Return the diagonals of the logits (column - row) that are not negatives."""
        return [column - self.rows.start for column in self.excluded]

    @property
    def blocks(self) -> list[slice]:
        """Return the blocks of rows that are processed together."""
        return list(spans(self.rows.start, self.rows.stop, BLOCK_ROWS))


def row_blocks(groups: Sequence[RowGroup]) -> list[slice]:
    """Return the blocks of all groups of rows."""
    return [block for group in groups for block in group.blocks]


class Softmax(NamedTuple):
    """The loss of each row, and the weights of its gradient; the positive is kept apart for precision."""

    loss: Tensor  # natural
    positive_weight: Tensor  # the gradient of the loss with respect to the logits of positives, times -1
    logsumexp: Tensor  # base 2; the gradient with respect to a negative's logit is 2**(logit - logsumexp)


def concatenated(blocks: Sequence[Softmax]) -> Softmax:
    """Return the rows of all blocks."""
    return blocks[0] if len(blocks) == 1 else Softmax(*map(torch.cat, zip(*blocks, strict=True)))


class RowLoss(Protocol):
    """The loss of a block of rows, given the logits of their positives and the sum over their negatives."""

    def __call__(self, positive: Tensor, shift: Tensor, total: Tensor, block: slice) -> Softmax:
        """Return the loss of each row of the block and its weights.

        Args:
            positive: base-2 logits of the positives, [block] or [block, num_positives].
            shift: [block]; the sum of 2**logit over the negatives of a row is total * 2**shift.
            total: [block], 0 for a row without negatives.
            block: the slice of rows.
        """
        ...


def cross_entropy(positive: Tensor, shift: Tensor, total: Tensor, block: slice) -> Softmax:
    """Return -log p(positive)."""
    excess = (shift - positive + total.log2()) / LOG2_E
    loss = torch.logaddexp(excess, torch.zeros_like(excess))
    return Softmax(loss, excess.sigmoid(), positive + loss * LOG2_E)


def weighted(row_loss: RowLoss, weight: Tensor | None) -> RowLoss:
    """Return a row loss times the weight of each row, [num_rows]; the row loss itself without weights."""
    return row_loss if weight is None else partial(_weighted, row_loss=row_loss, weight=weight)


def _weighted(
    positive: Tensor, shift: Tensor, total: Tensor, block: slice, *, row_loss: RowLoss, weight: Tensor
) -> Softmax:
    loss, positive_weight, logsumexp = row_loss(positive, shift, total, block)
    own = weight[block]
    of_positives = own if positive_weight.ndim == 1 else own[:, None]
    return Softmax(own * loss, of_positives * positive_weight, logsumexp - own.log2())


def subtract_positives(
    weight: Tensor, rows: Tensor, positives: Tensor, at_rows: Tensor | None, at_positives: Tensor | None
) -> None:
    """Subtract the gradients of ``weight`` [num_rows] * logits of rows and their positives from buffers, unscaled."""
    for gradient, others in ((at_rows, positives), (at_positives, rows)):
        if gradient is not None:
            gradient.addcmul_(weight[:, None], others, value=-1)


def first_shift(bound: Tensor | None, rows: Tensor) -> Tensor:
    """Return the shift of each row before its first candidate, [num_rows]."""
    return rows.new_full((len(rows),), -1e30) if bound is None else bound.expand(len(rows))


@final
class ColumnBlock:
    """Columns that are candidates of all rows, cut into spans that fit the cache."""

    def __init__(
        self,
        columns: Tensor,
        *,
        mask: Mask | None = None,
        first: int = 0,
        bias: Tensor | None = None,
        in_batch: bool = True,
        gradient: Tensor | None = None,
    ) -> None:
        """Cut columns [num_columns, dim], possibly in half precision.

        Args:
            columns: the candidates.
            mask: mask of false negatives.
            first: the index of the first column in the mask.
            bias: [num_columns], added to the base-2 logits, at most 0.
            in_batch: whether the columns are negatives; otherwise they are only positives.
            gradient: [num_columns, dim], the buffer of the unscaled gradient of the columns; None if
                this pass does not compute it.
        """
        self.columns, self.bias = columns, bias
        self.pieces = list(spans(0, len(columns) if in_batch else 0, 2 * tile_size(columns)))
        self.gradient = gradient
        self._mask, self._first = mask, first
        self._buffer: Tensor | None = None

    def tiles(
        self, query: Tensor, rows: slice, *, diagonals: Sequence[int] = (), bias: Tensor | None = None
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the index of each span, its columns, and their logits (+ bias per column).

        query [rows, dim] is scaled; the caller may overwrite the logits. Logits of false negatives and
        on the diagonals are -inf.
        """
        for k, piece in enumerate(self.pieces):
            columns = self.columns[piece].to(query.dtype)
            tile = product(query, columns, None if bias is None else bias[piece])
            mask_diagonals(tile, rows, piece, diagonals)
            if self._mask is not None:
                self._mask.apply_(tile, rows, slice(self._first + piece.start, self._first + piece.stop))
            yield k, columns, tile

    def buffer(self, tile: Tensor, k: int) -> Tensor:
        """Return the buffer for the weights of the k-th tile: the tile itself unless they are used again."""
        if self.gradient is None:
            return tile
        if self._buffer is None:
            # Allocated once: the allocator would return the memory of a block to the kernel after each use.
            widest = max(piece.stop - piece.start for piece in self.pieces)
            self._buffer = tile.new_empty(len(self.pieces), len(tile), widest)
        return self._buffer[k, : tile.shape[0], : tile.shape[1]]


class KeptWeights(NamedTuple):
    """The weights 2**(logit - shift) of a tile, for the gradient of its columns."""

    gradient: Tensor
    weights: Tensor
    shift: Tensor


@final
class SoftmaxRows:
    """A block of rows, and the sum of 2**(logit - shift) over the negatives so far."""

    def __init__(
        self,
        rows: Tensor,
        block: slice,
        *,
        scale: Tensor,
        bound: Tensor | None,
        gradient: Tensor | None,
        diagonals: Sequence[int],
    ) -> None:
        """Initialize the sums of a block of rows.

        Args:
            rows: [num_rows, dim], all rows.
            block: the slice of rows.
            scale: log2(e) / temperature.
            bound: above every logit without bias, or None if the shift must follow the logits.
            gradient: [num_rows, dim], zeros, the buffer of the unscaled gradient of the rows.
            diagonals: diagonals (column - row) that are not negatives, in the block with the positives.
        """
        self.rows = rows[block]
        self._block, self._diagonals, self._scale, self._bound = block, diagonals, scale, bound
        self._shift = first_shift(bound, self.rows)
        self._total = torch.zeros_like(self._shift)
        self._grad = None if gradient is None else gradient[block]

    def add(self, columns: ColumnBlock, *, holds_positives: bool = False) -> list[KeptWeights]:
        """Add a block of columns; return the weights that the gradient of the columns needs."""
        kept, bias = [], columns.bias
        if self._bound is not None:
            bias = -self._bound.repeat(len(columns.columns)) if bias is None else bias - self._bound
        diagonals = self._diagonals if holds_positives else ()
        query = self.rows * self._scale
        for k, piece, tile in columns.tiles(query, self._block, diagonals=diagonals, bias=bias):
            if self._bound is None:
                self._raise_shift(tile)
            weights = torch.exp2(tile, out=columns.buffer(tile, k))
            self._total += weights.sum(1)
            if self._grad is not None:
                self._grad += product(weights, piece.T)
            if columns.gradient is not None:
                kept.append(KeptWeights(columns.gradient[columns.pieces[k]], weights, self._shift))
        return kept

    def finish(self, positive: Tensor, row_loss: RowLoss) -> Softmax:
        """Return the loss of each row after all blocks; scale the gradient of the rows.

        ``positive`` are the base-2 logits of the positives of all rows, [num_rows, ...].
        """
        softmax = row_loss(positive[self._block], self._shift, self._total, self._block)
        if self._grad is not None:
            self._grad *= (self._shift - softmax.logsumexp).exp2_()[:, None]
        return softmax

    def add_column_gradients(self, kept: Sequence[KeptWeights], softmax: Softmax) -> None:
        """Add the gradients of the columns, after ``finish``."""
        for gradient, weights, shift in kept:
            share = (shift - softmax.logsumexp).exp2_()[:, None]
            gradient += product(weights.T, (share * self.rows).T)

    def _raise_shift(self, tile: Tensor) -> None:
        """Raise the shift to the largest logit so far, and subtract it from the tile."""
        peak = torch.maximum(self._shift, tile.amax(1))
        ratio = (self._shift - peak).exp2_()
        self._total *= ratio
        if self._grad is not None:
            self._grad *= ratio[:, None]
        self._shift = peak
        zero_denormals(tile.sub_(peak[:, None]))


def evaluate_softmax(
    rows: Tensor,
    columns: Tensor,
    negatives: Tensor,
    *,
    positive: Tensor,
    groups: Sequence[RowGroup],
    scale: Tensor,
    bound: Tensor | None,
    mask: Mask | None = None,
    biases: tuple[Tensor, Tensor] | None = None,
    in_batch: bool = True,
    row_loss: RowLoss = cross_entropy,
    gradients: Sequence[Tensor | None],
) -> Softmax:
    """Compare each row's positive with its other candidates; return the loss of each row.

    The caller subtracts the gradients of the positives, such as by :func:`subtract_positives`.

    Memory: one block of logits, 256 x the candidates that require a gradient.

    Args:
        rows: [num_rows, dim].
        columns: [num_columns, dim], candidates of all rows if ``in_batch``, else only positives.
        negatives: [num_negatives, dim], candidates of all rows, possibly in half precision.
        positive: base-2 logits of the positives, with their biases, [num_rows] or [num_rows, num_positives].
        groups: positions of the columns that are not negatives.
        scale: log2(e) / temperature.
        bound: see :func:`raycl.losses.tiled.read_bound`.
        mask: false negatives among columns (if ``in_batch``) and then negatives.
        biases: biases of columns and negatives, added to the base-2 logits.
        in_batch: whether the columns are negatives too.
        row_loss: the loss of each row; by default it classifies the positive.
        gradients: buffers that the unscaled gradients of rows, columns and negatives are added to, or None.
    """
    to_rows, to_columns, to_negatives = gradients
    column_bias, negative_bias = biases or (None, None)
    batch = ColumnBlock(columns, mask=mask, bias=column_bias, in_batch=in_batch, gradient=to_columns)
    first = len(columns) if in_batch else 0
    others = ColumnBlock(negatives, mask=mask, first=first, bias=negative_bias, gradient=to_negatives)
    found = []
    for group in groups:
        for block in group.blocks:
            strip = SoftmaxRows(
                rows, block, scale=scale, bound=bound, gradient=to_rows, diagonals=group.diagonals
            )
            kept = strip.add(batch, holds_positives=True) + strip.add(others)
            softmax = strip.finish(positive, row_loss)
            strip.add_column_gradients(kept, softmax)
            found.append(softmax)
    return concatenated(found)
