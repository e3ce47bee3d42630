"""Rows classified among columns: the walk of every loss whose logits are not symmetric."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor

from raycl.losses.false_negatives import FalseNegatives
from raycl.losses.known_pairs import KnownColumns
from raycl.losses.pair_ids import PairIds
from raycl.losses.tiled import (
    LOG2_E,
    SAFE_SPREAD,
    STRIP_ROWS,
    Gradients,
    Softmax,
    finish,
    flush,
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

    @property
    def strips(self) -> Iterator[slice]:
        """Cut the rows into strips that meet the columns together."""
        return spans(self.rows.start, self.rows.stop, STRIP_ROWS)


def evaluate_rectangle(
    rows: Tensor,
    columns: Tensor,
    negatives: Tensor,
    temperature: Tensor,
    *,
    sides: tuple[Side, ...],
    in_batch: bool = True,
    ids: Ids | None = None,
    pair_ids: PairIds | None = None,
    with_gradient: bool,
) -> tuple[Tensor, Gradients]:
    """Classify each row's positive among its candidates; the mean over rows, and its gradients.

    rows [num_rows, dim]; columns [num_columns, dim], each a candidate of all rows if ``in_batch``,
    else only of the row whose positive it is; negatives [num_negatives, dim], candidates of all
    rows, possibly in half precision. Ids, where given, mask the columns that carry their row's id;
    pair_ids, of the rows of one side, all that makes a pair with its row.
    Holds one strip of logits, 256 x the candidates that want a gradient.
    """
    to_columns, to_negatives = (
        rows if with_gradient and each.requires_grad else None for each in (columns, negatives)
    )
    of_batch, of_others = _known(pair_ids, sides[0], in_batch=in_batch)
    batch = Block(columns, ids, known=of_batch, is_met=in_batch, gradient_from=to_columns)
    others = Block(negatives, known=of_others, gradient_from=to_negatives)
    wants_rows = with_gradient and (rows.requires_grad or temperature.requires_grad)
    walk = _RectangleWalk(rows, batch, others, LOG2_E / temperature, wants_gradient=wants_rows)
    loss = torch.cat([walk.visit(side, span) for side in sides for span in side.strips]).mean()
    return loss, scaled_gradients(rows, (walk.gradient, batch.gradient, others.gradient), temperature)


def _known(
    ids: PairIds | None, side: Side, *, in_batch: bool
) -> tuple[Callable[..., KnownColumns] | None, ...]:
    """Say what the rows of a side know of the batch and of the negatives."""
    if ids is None:
        return None, None
    know = partial(KnownColumns, (ids.queries, ids.keys), ids.queries[ids.own], strips=list(side.strips))
    of_batch = partial(know, ids.keys, positives=ids.own) if in_batch and not ids.are_distinct else None
    return of_batch, None if ids.negatives is None else partial(know, ids.negatives)


@final
class Block:
    """Candidates that all rows meet (or only their own rows do), cut into pieces that fit the cache."""

    def __init__(
        self,
        columns: Tensor,
        ids: Ids | None = None,
        *,
        known: Callable[..., KnownColumns] | None = None,
        is_met: bool = True,
        gradient_from: Tensor | None = None,
    ) -> None:
        """Take columns [num_columns, dim], possibly in half precision.

        Ids, where given, mask false negatives; so does known(pieces=...), in their place.
        ``gradient_from`` are the rows whose weights are kept for the gradient at the columns; None
        where it is not wanted, or not from here.
        """
        self.columns = columns
        self.pieces = list(spans(0, len(columns) if is_met else 0, 2 * tile_size(columns)))
        self.gradient = None if gradient_from is None else torch.zeros_like(columns)
        self._false_negatives = None if ids is None else FalseNegatives(*ids, self.pieces)
        if known is not None:
            self._false_negatives = known(pieces=self.pieces)
        # Made once: the allocator would give a strip back to the kernel after each visit.
        self._room = None if gradient_from is None else self._make_room(gradient_from)

    def tiles(
        self, query: Tensor, span: slice, *, diagonals: Sequence[int], bias: Tensor | None
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the number of each piece, its columns, and their logits (+ bias per column).

        query [span, dim], scaled; the logits [span, piece] are the reader's to overwrite, those of
        false negatives and on the diagonals are -inf.
        """
        for k, piece in enumerate(self.pieces):
            columns = self.columns[piece].to(query.dtype)
            tile = product(query, columns, None if bias is None else bias[piece])
            mask_diagonals(tile, span, piece, diagonals)
            if self._false_negatives is not None:
                self._false_negatives.mask(tile, span, k)
            yield k, columns, tile

    def room(self, tile: Tensor, k: int) -> Tensor:
        """Return where the weights of the k-th tile go: aside, if they are needed again."""
        return tile if self._room is None else self._room[k, : tile.shape[0], : tile.shape[1]]

    def _make_room(self, rows: Tensor) -> Tensor:
        widest = max((piece.stop - piece.start for piece in self.pieces), default=0)
        return rows.new_empty(len(self.pieces), min(STRIP_ROWS, len(rows)), widest)


class Kept(NamedTuple):
    """The weights 2**(logit - shift) of a tile, for the gradient at its columns."""

    gradient: Tensor
    weights: Tensor
    shift: Tensor


@final
class Strip:
    """Some rows of a side, and what they draw from the negatives met so far: sums of 2**(logit - shift)."""

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor,
        side: Side,
        span: slice,
        *,
        scale: Tensor,
        bound: Tensor | None,
        gradient: Tensor | None,
    ) -> None:
        """Take the span of rows [num_rows, dim]; columns hold their positives.

        bound: above every logit, or None where the shift must follow the logits. gradient
        [num_rows, dim], zeros: where that of the rows goes, yet to be scaled, if it is wanted.
        """
        self.match = slice(*(side.positive - side.rows.start + at for at in (span.start, span.stop)))
        self.rows, self._positives = rows[span], columns[self.match]
        self._span, self._diagonals, self._scale, self._bound = span, side.diagonals, scale, bound
        self._positive = (self.rows * scale * self._positives).sum(1)
        self._shift = self._positive if bound is None else bound.expand_as(self._positive)
        self._total = torch.zeros_like(self._positive)
        self._pull = None if gradient is None else gradient[span]

    def meet(self, block: Block, *, holds_positives: bool = False) -> list[Kept]:
        """Take in a block; return what the gradient at its columns needs."""
        kept = []
        bias = None if self._bound is None else -self._bound.repeat(len(block.columns))
        diagonals = self._diagonals if holds_positives else ()
        for k, columns, tile in block.tiles(
            self.rows * self._scale, self._span, diagonals=diagonals, bias=bias
        ):
            if self._bound is None:
                self._follow(tile)
            weights = torch.exp2(tile, out=block.room(tile, k))
            self._total += weights.sum(1)
            if self._pull is not None:
                self._pull += product(weights, columns.T)
            if block.gradient is not None:
                kept.append(Kept(block.gradient[block.pieces[k]], weights, self._shift))
        return kept

    def finish(self) -> Softmax:
        """Return each row's loss, after all blocks; leave the rows' gradient where it was asked for."""
        softmax = finish(self._positive, self._shift, self._total)
        if self._pull is not None:
            self._pull *= (self._shift - softmax.logsumexp).exp2_()[:, None]
            self._pull -= softmax.missing[:, None] * self._positives
        return softmax

    def _follow(self, tile: Tensor) -> None:
        """Raise the shift to the greatest logit so far, and take it off the tile."""
        peak = torch.maximum(self._shift, tile.amax(1))
        ratio = (self._shift - peak).exp2_()
        self._total *= ratio
        if self._pull is not None:
            self._pull *= ratio[:, None]
        self._shift = peak
        flush(tile.sub_(peak[:, None]))


def bound_logits(rows: Tensor, longest_column: Tensor, scale: Tensor) -> Tensor | None:
    """Return what no |logit| exceeds (Cauchy-Schwarz), or None where it would be no safe shift.

    A shift known before the logits costs no pass over them; at a low temperature whole rows would
    underflow: there it follows the logits.
    """
    bound = longest_column * longest(rows, rows.dtype) * scale
    return bound if bool(2 * bound <= SAFE_SPREAD) else None


def scaled_gradients(rows: Tensor, gradients: Gradients, temperature: Tensor) -> Gradients:
    """Scale, in place, the gradients to those of a mean over rows; add the temperature's.

    The first gradient is that at the rows, from which the temperature's is read.
    """
    for gradient in gradients:
        if gradient is not None:
            gradient.div_(temperature * len(rows))
    own = gradients[0]
    return (*gradients, None if own is None else temperature_gradient(rows, own, temperature))


@final
class _RectangleWalk:
    """Visit strips of rows; each strip meets all candidates, so one visit is enough."""

    def __init__(
        self, rows: Tensor, batch: Block, others: Block, scale: Tensor, *, wants_gradient: bool
    ) -> None:
        self._rows, self._batch, self._others, self._scale = rows, batch, others, scale
        self.gradient = torch.zeros_like(rows) if wants_gradient else None
        length = torch.maximum(*(longest(block.columns, rows.dtype) for block in (batch, others)))
        self._bound = bound_logits(rows, length, scale)

    def visit(self, side: Side, span: slice) -> Tensor:
        """Return the loss of each row of the span; add its gradients, yet to be scaled."""
        strip = Strip(
            self._rows,
            self._batch.columns,
            side,
            span,
            scale=self._scale,
            bound=self._bound,
            gradient=self.gradient,
        )
        kept = strip.meet(self._batch, holds_positives=True) + strip.meet(self._others)
        softmax = strip.finish()
        if self._batch.gradient is not None:
            self._batch.gradient[strip.match] -= softmax.missing[:, None] * strip.rows
        for gradient, weights, shift in kept:
            share = (shift - softmax.logsumexp).exp2_()[:, None]
            gradient += product(weights.T, (share * strip.rows).T)
        return softmax.loss
