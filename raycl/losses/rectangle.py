"""Rows classified among columns: the walk of every loss whose logits are not symmetric."""

from typing import NamedTuple, final

import torch
from torch import Tensor

from raycl.losses.false_negatives import FalseNegatives
from raycl.losses.tiled import (
    LOG2_E,
    SAFE_SPREAD,
    STRIP_ROWS,
    Gradients,
    finish,
    longest,
    mask_diagonals,
    product,
    spans,
    temperature_gradient,
    tile_size,
)

Ids = tuple[Tensor, Tensor]  # of rows, of columns


class Side(NamedTuple):
    """Rows whose positives, and own copies, lie on one diagonal of the logits."""

    rows: slice
    positive: int  # column of the first row's positive
    own: int | None  # column of the first row itself; None where it is no candidate

    @property
    def diagonals(self) -> list[int]:
        """Where the logits (column - row) hold no negatives."""
        columns = [column for column in (self.positive, self.own) if column is not None]
        return [column - self.rows.start for column in columns]


def evaluate_rectangle(
    rows: Tensor,
    columns: Tensor,
    negatives: Tensor,
    temperature: Tensor,
    *,
    sides: tuple[Side, ...],
    in_batch: bool = True,
    ids: Ids | None = None,
    negative_ids: Ids | None = None,
    with_gradient: bool,
) -> tuple[Tensor, Gradients]:
    """Classify each row's positive among its candidates; the mean over rows, and its gradients.

    rows [num_rows, dim]; columns [num_columns, dim], each a candidate of all rows if ``in_batch``,
    else only of the row whose positive it is; negatives [num_negatives, dim], candidates of all
    rows, possibly in half precision. Ids, where given, mask false negatives.
    Holds one strip of logits, 256 x the candidates that want a gradient.
    """
    batch = _Block(
        columns, ids, like=rows, is_met=in_batch, wants_gradient=with_gradient and columns.requires_grad
    )
    others = _Block(
        negatives, negative_ids, like=rows, wants_gradient=with_gradient and negatives.requires_grad
    )
    wants_rows = with_gradient and (rows.requires_grad or temperature.requires_grad)
    walk = _RectangleWalk(rows, batch, others, LOG2_E / temperature, wants_gradient=wants_rows)
    loss = torch.cat(
        [
            walk.visit(side, span)
            for side in sides
            for span in spans(side.rows.start, side.rows.stop, STRIP_ROWS)
        ]
    ).mean()
    gradients = [walk.gradient, batch.gradient, others.gradient]
    for gradient in gradients:
        if gradient is not None:
            gradient.div_(temperature * len(rows))
    degrees = None
    if walk.gradient is not None:
        degrees = temperature_gradient(rows, walk.gradient, temperature)
    return loss, (*gradients, degrees)


@final
class _Block:
    """Candidates that all rows meet (or only their own rows do), cut into pieces that fit the cache."""

    def __init__(
        self, columns: Tensor, ids: Ids | None, *, like: Tensor, wants_gradient: bool, is_met: bool = True
    ) -> None:
        self.columns = columns
        self.pieces = list(spans(0, len(columns) if is_met else 0, 2 * tile_size(columns)))
        self.widest = max((piece.stop - piece.start for piece in self.pieces), default=0)
        self.gradient = torch.zeros_like(columns) if wants_gradient else None
        self._false_negatives = None if ids is None else FalseNegatives(*ids, self.pieces)
        # Made once: the allocator would give a strip back to the kernel after each visit.
        height = min(STRIP_ROWS, len(like)) if wants_gradient else 0
        self._strip = like.new_empty(len(self.pieces), height, self.widest)

    def mask(self, tile: Tensor, rows: slice, k: int) -> None:
        """Rule out the false negatives of the k-th tile."""
        if self._false_negatives is not None:
            self._false_negatives.mask(tile, rows, k)

    def room(self, tile: Tensor, k: int) -> Tensor:
        """Return where the weights of the k-th tile go: the strip, if they are needed again."""
        return tile if self.gradient is None else self._strip[k, : tile.shape[0], : tile.shape[1]]


@final
class _Sums:
    """What a strip of rows draws from its negatives, in multiples of 2**shift."""

    def __init__(self, shift: Tensor, query: Tensor, *, follows: bool, wants_pull: bool) -> None:
        self.shift = shift
        self.total = torch.zeros_like(shift)
        self.pull = torch.zeros_like(query)
        self._follows, self._wants_pull = follows, wants_pull

    def add(self, tile: Tensor, columns: Tensor, room: Tensor) -> Tensor:
        """Take in the logits of a tile; return their weights 2**(logits - shift), in ``room``."""
        if self._follows:
            self._follow(tile)
        weights = torch.exp2(tile, out=room)
        self.total += weights.sum(1)
        if self._wants_pull:
            self.pull += product(weights, columns.T)
        return weights

    def _follow(self, tile: Tensor) -> None:
        """Raise the shift to the greatest logit so far, and take it off the tile."""
        peak = torch.maximum(self.shift, tile.amax(1))
        ratio = (self.shift - peak).exp2_()
        self.total *= ratio
        self.pull *= ratio[:, None]
        self.shift = peak
        tile.sub_(peak[:, None])


@final
class _RectangleWalk:
    """Visit strips of rows; each strip meets all candidates, so one visit is enough."""

    def __init__(
        self, rows: Tensor, batch: _Block, others: _Block, scale: Tensor, *, wants_gradient: bool
    ) -> None:
        self._rows, self._batch, self._others, self._scale = rows, batch, others, scale
        self.gradient = torch.zeros_like(rows) if wants_gradient else None
        # |logit| <= bound (Cauchy-Schwarz). A shift known before the logits costs no pass over
        # them; at a low temperature whole rows would underflow: there it follows the logits.
        length = torch.maximum(*(longest(block.columns, rows.dtype) for block in (batch, others)))
        self._bound = length * longest(rows, rows.dtype) * scale
        self._bounded = bool(2 * self._bound <= SAFE_SPREAD)
        self._bias = -self._bound.repeat(max(batch.widest, others.widest)) if self._bounded else None

    def visit(self, side: Side, span: slice) -> Tensor:
        """Return the loss of each row of the span; add its gradients, yet to be scaled."""
        match = slice(*(side.positive - side.rows.start + at for at in (span.start, span.stop)))
        rows, positives = self._rows[span], self._batch.columns[match]
        query = rows * self._scale
        positive = (query * positives).sum(1)
        shift = self._bound.expand_as(positive) if self._bounded else positive
        sums = _Sums(shift, query, follows=not self._bounded, wants_pull=self.gradient is not None)
        kept = self._meet_all(query, side, span, sums)
        softmax = finish(positive, sums.shift, sums.total)
        missing = softmax.missing[:, None]
        if self.gradient is not None:
            share = (sums.shift - softmax.logsumexp).exp2_()[:, None]
            self.gradient[span] = share * sums.pull - missing * positives
        if self._batch.gradient is not None:
            self._batch.gradient[match] -= missing * rows
        for gradient, weights, shift in kept:
            share = (shift - softmax.logsumexp).exp2_()[:, None]
            gradient += product(weights.T, (share * rows).T)
        return softmax.loss

    def _meet_all(
        self, query: Tensor, side: Side, span: slice, sums: "_Sums"
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Fill the sums; return what the candidates' gradients need: (gradient, weights, shift)."""
        kept = []
        for block in (self._batch, self._others):
            for k, piece in enumerate(block.pieces):
                columns = block.columns[piece].to(query.dtype)
                tile = product(query, columns, None if self._bias is None else self._bias[: len(columns)])
                if block is self._batch:
                    mask_diagonals(tile, span, piece, side.diagonals)
                block.mask(tile, span, k)
                weights = sums.add(tile, columns, block.room(tile, k))
                if block.gradient is not None:
                    kept.append((block.gradient[piece], weights, sums.shift))
        return kept
