"""Rows that classify their positives in one direction, beside the logits that serve both."""

import math
from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from raycl.losses.known_pairs import KnownPairs
from raycl.losses.rectangle import Kept
from raycl.losses.tiled import Softmax, finish, flush, product, spans, tile_size


@final
class Candidates:
    """Columns that rows meet strip by strip, cut into pieces that fit the cache."""

    def __init__(
        self, columns: Tensor, bias: Tensor, *, known: KnownPairs | None, gradient: Tensor | None = None
    ) -> None:
        """Take columns [num_columns, dim], possibly in half precision, and the bias [num_columns] of their logits.

        known: pairs that are no negatives; gradient [num_columns, dim]: where that of the columns goes.
        """
        self.columns, self.gradient = columns, gradient
        self._bias, self._known = bias, known
        self._pieces = list(spans(0, len(columns), 2 * tile_size(columns)))

    def tiles(self, query: Tensor, span: slice) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield where each piece stands, its columns, and their logits + bias, the reader's to overwrite.

        query [span, dim], scaled; the logits [span, piece] of known pairs are -inf.
        """
        mask = None if self._known is None else self._known.mask(span)
        for piece in self._pieces:
            columns = self.columns[piece].to(query.dtype)
            tile = product(query, columns, self._bias[piece])
            if mask is not None:
                tile.masked_fill_(mask[:, piece], -math.inf)
            yield piece, columns, tile


@final
class Direction:
    """This worker's rows in one direction: sums of 2**(logit - shift) over the negatives met so far."""

    def __init__(
        self,
        rows: Tensor,
        positive: Tensor,
        others: Sequence[Candidates],
        *,
        scale: Tensor,
        bound: Tensor | None,
        gradient: Tensor | None,
    ) -> None:
        """Take rows [num_rows, dim], the logits [num_rows] of their positives, and who serves them alone.

        bound: above every logit and part of each bias, or None where the shift must follow the
        logits; gradient [num_rows, dim]: where that of the rows goes, yet to be scaled.
        """
        self.rows, self.gradient = rows, gradient
        self._positive, self._others, self._scale, self._follows = positive, others, scale, bound is None
        self._shift = positive.clone() if bound is None else bound.repeat(len(rows))
        self.total = torch.zeros_like(positive)

    def add(self, tile: Tensor, span: slice) -> None:
        """Take in logits [span, num_columns], in place, for their sum alone."""
        self._follow(tile, span)
        self.total[span] += tile.exp2_().sum(1)

    def meet_others(self, span: slice) -> None:
        """Let the rows of a strip, which have met all else, meet the candidates that serve them alone."""
        query, kept = self.rows[span] * self._scale, []
        pull = None if self.gradient is None else torch.zeros_like(query)
        for block in self._others:
            for piece, columns, tile in block.tiles(query, span):
                if self._follows:
                    ratio = self._follow(tile, span)
                    pull = None if pull is None else pull.mul_(ratio[:, None])
                weights = tile.exp2_()
                self.total[span] += weights.sum(1)
                if pull is not None:
                    pull += product(weights, columns.T)
                if block.gradient is not None:
                    kept.append(Kept(block.gradient[piece], weights, self._shift[span].clone()))
        self._share_out(span, pull, kept)

    def finish(self) -> Softmax:
        """Return what all candidates together say of each row."""
        return finish(self._positive, self._shift, self.total)

    def _share_out(self, span: slice, pull: Tensor | None, kept: Sequence[Kept]) -> None:
        """Add the gradients of a strip, now that the sums of its rows are known."""
        shift = self._shift[span]
        logsumexp = finish(self._positive[span], shift, self.total[span]).logsumexp
        if self.gradient is not None and pull is not None:
            self.gradient[span] += pull * (shift - logsumexp).exp2_()[:, None]
        for gradient, weights, shift_then in kept:
            share = (shift_then - logsumexp).exp2_()
            gradient += product(weights.T, (share[:, None] * self.rows[span]).T)

    def _follow(self, tile: Tensor, span: slice) -> Tensor:
        """Raise the shift to the greatest logit so far, and take it off the tile [span, num_columns].

        Return what is left of earlier weights, [span].
        """
        peak = torch.maximum(self._shift[span], tile.amax(1))
        ratio = (self._shift[span] - peak).exp2_()
        self.total[span] *= ratio
        self._shift[span] = peak
        flush(tile.sub_(peak[:, None]))
        return ratio
