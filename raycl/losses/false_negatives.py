"""Candidates that are the query's own sample, and so no negatives."""

import itertools
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from raycl.losses.tiled import mask_same


@final
class FalseNegatives:
    """Know which columns carry the id of some row: mostly few, so only they are compared.

    row_ids [num_rows] and column_ids [num_columns] are int64; ``pieces`` cut the columns, in
    order and without gaps, as the walk over tiles does.
    """

    def __init__(self, row_ids: Tensor, column_ids: Tensor, pieces: Sequence[slice]) -> None:
        self._row_ids, self._column_ids, self._pieces = row_ids, column_ids, pieces
        self._suspects = torch.isin(column_ids, row_ids).nonzero()[:, 0]
        starts = torch.tensor([piece.start for piece in pieces], dtype=torch.int64, device=row_ids.device)
        # Asked once: a question at each tile would halt an accelerator.
        bounds = [*torch.searchsorted(self._suspects, starts).tolist(), len(self._suspects)]
        self._suspects_of = [self._suspects[begin:end] for begin, end in itertools.pairwise(bounds)]

    def mask(self, tile: Tensor, rows: slice, piece: int) -> None:
        """Rule out, in place, the false negatives of a tile: rows against one piece of the columns."""
        columns = self._suspects_of[piece]
        if len(columns) == 0:
            return
        within = columns - self._pieces[piece].start
        part = tile.index_select(1, within)
        mask_same(part, self._row_ids[rows], self._column_ids[columns])
        tile.index_copy_(1, within, part)

    def count(self) -> Tensor:
        """Return how many columns are false negatives of each row, [num_rows]."""
        return (self._row_ids[:, None] == self._column_ids[self._suspects]).sum(1)
