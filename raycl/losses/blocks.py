"""Rows classified among candidates that come block after block, so that nobody holds them all."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from raycl.losses.rectangle import Block, Side, Strip, bound_logits
from raycl.losses.tiled import STRIP_ROWS, Softmax, flush, product, spans


@final
class BlockWalk:
    """Rows that meet one block after another, and what they draw from all of them."""

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor,
        sides: tuple[Side, ...],
        *,
        scale: Tensor,
        longest_column: Tensor,
        wants_gradient: bool,
    ) -> None:
        """Take rows [num_rows, dim], all of them on some side, and the block that holds their positives.

        scale: log2(e) / temperature; longest_column: no candidate of any block is longer.
        """
        self.gradient = torch.zeros_like(rows) if wants_gradient else None
        bound = bound_logits(rows, longest_column, scale)
        self._strips = [
            Strip(rows, columns, side, span, scale=scale, bound=bound, gradient=self.gradient)
            for side in sides
            for span in side.strips
        ]

    def meet(self, block: Block, *, holds_positives: bool = False) -> None:
        """Let all rows meet a block."""
        for strip in self._strips:
            strip.meet(block, holds_positives=holds_positives)

    def finish(self) -> Softmax:
        """Return what all blocks together say of each row; leave the rows' gradient, yet to be scaled."""
        parts = [strip.finish() for strip in self._strips]
        return Softmax(*(torch.cat(each) for each in zip(*parts, strict=True)))


def add_column_gradient(
    gradient: Tensor,
    columns: Tensor,
    rows: Block,
    logsumexp: Tensor,
    *,
    scale: Tensor,
    diagonals: Sequence[int] = (),
) -> None:
    """Add what a block of rows asks of the columns as its negatives: their rows, by softmax weight.

    gradient, columns [num_columns, dim]; the block holds rows [num_rows, dim], logsumexp [num_rows]
    is theirs over **all** of their candidates, in base 2. Diagonals (row - column) hold no negatives.
    """
    for span in spans(0, len(columns), STRIP_ROWS):
        query = columns[span] * scale
        # No logit exceeds its row's logsumexp: nothing here can overflow.
        for _, theirs, tile in rows.tiles(query, span, diagonals=diagonals, bias=-logsumexp):
            gradient[span] += product(flush(tile).exp2_(), theirs.T)


def subtract_positives(gradient: Tensor, rows: Tensor, missing: Tensor, sides: tuple[Side, ...]) -> None:
    """Take off what rows [num_rows, dim] ask of their positives; missing [num_rows] is 1 - p(positive)."""
    for side in sides:
        match = slice(side.positive, side.positive + side.rows.stop - side.rows.start)
        gradient[match] -= missing[side.rows, None] * rows[side.rows]
