"""Softmax over rows and over columns of the same logits, for local NT-Xent, and for CLIP locally and by ring.

Each logit is used for its row and its column, and its weight needs both logsumexps. The tiles are
therefore computed twice: first for the sums, then for the gradients.
"""

import itertools
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from raycl.losses.false_negatives import Mask
from raycl.losses.softmax import RowLoss, Softmax, cross_entropy, first_shift
from raycl.losses.tiled import mask_diagonals, product, zero_denormals

#: The shift and the total of each row: the sum of 2**logit over its negatives is total * 2**shift.
Sums = tuple[Tensor, Tensor]


@final
class MutualSoftmax:
    """Tiles of the logits of rows and columns, or of rows and themselves.

    Logits of rows and themselves are symmetric: only tiles on and above the diagonal are computed.
    """

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor | None,
        *,
        scale: Tensor,
        bound: Tensor | None,
        diagonals: tuple[int, ...],
        spans: tuple[list[slice], list[slice]],
        mask: Mask | None,
        first: int = 0,
    ) -> None:
        """Create tiles of rows [num_rows, dim] and columns [num_columns, dim].

        Args:
            rows: the rows.
            columns: the columns; None to use the rows.
            scale: log2(e) / temperature.
            bound: above every logit, or None if the shift of each row must follow its logits.
            diagonals: diagonals of the logits that are not negatives.
            spans: slices of rows and columns that form the tiles.
            mask: mask of false negatives.
            first: the index of the first column in the mask.
        """
        self._rows, self._columns = rows, rows if columns is None else columns
        self._is_symmetric = columns is None
        self._scale, self._bound, self._diagonals, self._spans = scale, bound, diagonals, spans
        self._mask, self._first = mask, first
        # Allocated once: the allocator returns large blocks to the kernel, and page faults cost more
        # than the computation.
        self._buffer = rows.new_empty(spans[0][0].stop, spans[1][0].stop)

    def sums(
        self, positive: Tensor, row_loss: RowLoss = cross_entropy, column_loss: RowLoss = cross_entropy
    ) -> tuple[Softmax, Softmax]:
        """Return the softmax of rows and of columns, given the base-2 logits of the positives, [num_rows, ...].

        ``column_loss`` is the loss of the columns if they are not the rows.
        """
        of_rows = of_columns = first_sums(self._bound, self._rows)
        if not self._is_symmetric:
            of_columns = first_sums(self._bound, self._columns)
        self.add_sums(of_rows, of_columns)
        everything = slice(0, len(positive))
        softmax = row_loss(positive, *of_rows, everything)
        return softmax, softmax if self._is_symmetric else column_loss(positive, *of_columns, everything)

    def add_sums(self, of_rows: Sums, of_columns: Sums) -> None:
        """Add the negatives of each row and of each column to their sums, in place."""
        for across, down in self._tiles():
            tile = self._logits(across, down)
            twice = not self._is_symmetric or across != down
            if self._bound is None:
                _add_sums(tile, of_rows, across)
                if twice:
                    _add_sums(tile.T, of_columns, down)
            else:
                tile.sub_(self._bound).exp2_()
                of_rows[1][across] += tile.sum(1)
                if twice:
                    of_columns[1][down] += tile.sum(0)

    def gradients(
        self, of_rows: Tensor, of_columns: Tensor, *, wanted: tuple[bool, bool]
    ) -> list[Tensor | None]:
        """Return the unscaled gradients of rows and of columns from their negatives, given all logsumexps.

        If the columns are the rows, the first is the complete gradient.
        """
        # Contiguous blocks of [dim, num_rows]: the fastest layout for the products.
        rows = {span.start: self._rows[span].T.contiguous() for span in self._spans[0]}
        columns = (
            rows
            if self._is_symmetric
            else {span.start: self._columns[span].T.contiguous() for span in self._spans[1]}
        )
        to_rows = {start: torch.zeros_like(block) for start, block in rows.items()}
        to_columns = (
            to_rows
            if self._is_symmetric
            else {start: torch.zeros_like(block) for start, block in columns.items()}
        )
        for across, down, weights in self.weights(of_rows, of_columns):
            if wanted[0]:
                to_rows[across.start] += product(columns[down.start], weights)
            if wanted[1] and (not self._is_symmetric or across != down):
                to_columns[down.start] += product(rows[across.start], weights.T)
        return [
            torch.cat(list(found.values()), 1).T if is_wanted else None
            for found, is_wanted in zip((to_rows, to_columns), wanted, strict=True)
        ]

    def weights(self, of_rows: Tensor, of_columns: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield p(column | row) + p(row | column) of the negatives in each tile, given all logsumexps."""
        for across, down in self._tiles():
            tile = self._logits(across, down)
            other = self._buffer[: tile.shape[0], : tile.shape[1]]
            if self._bound is not None:
                shares = (self._bound - of_rows[across]).exp2_(), (self._bound - of_columns[down]).exp2_()
                torch.add(shares[0][:, None], shares[1], out=other)
                tile.sub_(self._bound).exp2_().mul_(other)
            else:
                zero_denormals(torch.sub(tile, of_columns[down], out=other))
                zero_denormals(tile.sub_(of_rows[across, None])).exp2_().add_(other.exp2_())
            yield across, down, tile

    def _logits(self, across: slice, down: slice) -> Tensor:
        tile = product(self._rows[across] * self._scale, self._columns[down])
        mask_diagonals(tile, across, down, self._diagonals)
        if self._mask is not None:
            self._mask.apply_(tile, across, slice(self._first + down.start, self._first + down.stop))
        return tile

    def _tiles(self) -> Iterator[tuple[slice, slice]]:
        if self._is_symmetric:
            return itertools.combinations_with_replacement(self._spans[0], 2)
        return itertools.product(*self._spans)


def first_sums(bound: Tensor | None, rows: Tensor) -> Sums:
    """Return the sums of each row before its first logit."""
    shift = first_shift(bound, rows)
    return shift, torch.zeros_like(shift)


def _add_sums(tile: Tensor, sums: Sums, span: slice) -> None:
    """Add the sum of 2**logits of each row to total * 2**shift, and raise the shift to the maximum."""
    shift, total = (each[span] for each in sums)
    peak = torch.maximum(shift, tile.amax(1))
    total.mul_((shift - peak).exp2_()).add_(zero_denormals(tile - peak[:, None]).exp2_().sum(1))
    shift.copy_(peak)
