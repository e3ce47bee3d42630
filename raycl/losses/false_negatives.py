"""Masks of false negatives: candidates that are positives of the row."""

import math
from collections.abc import Sequence
from typing import Protocol, final

import torch
from torch import Tensor


class Mask(Protocol):
    """A mask of candidates. The host reads ``sizes`` from the device with other values of the loss, if it has any."""

    sizes: Tensor

    def set_sizes(self, sizes: Sequence[float]) -> None:
        """Set the flattened values of ``sizes``."""
        ...

    def apply_(self, tile: Tensor, rows: slice, columns: slice) -> None:
        """Set the logits of masked candidates in a tile [rows, columns] to -inf."""
        ...


@final
class FalseNegativeMask:
    """Mask the candidates whose id forms a pair with the row's id anywhere in the batch.

    A row and a column match if a pair of the batch has both of their ids. The matches of a query are
    all candidates with the id of its key or of any other key of the same query. Pairs are sorted once;
    the mask is built for one block of rows at a time.
    """

    def __init__(
        self,
        pairs: tuple[Tensor, Tensor],
        row_ids: Tensor,
        column_ids: Tensor,
        *,
        row_blocks: Sequence[slice],
        num_own: int = 0,
    ) -> None:
        """Sort the ids.

        Args:
            pairs: row ids and column ids of all pairs, int64 [num_pairs] each.
            row_ids: [num_rows] int64.
            column_ids: [num_columns] int64.
            row_blocks: the blocks of rows that :meth:`apply_` is called with.
            num_own: number of matching columns per row that need no mask: its positive and itself.
        """
        left, right, is_new = _sort_pairs(*pairs)
        ordered, self._by_id = column_ids.sort()
        # Sorting makes columns with equal ids adjacent, and likewise the pairs of a row's id.
        self._first_column, num_columns = _find(ordered, right)
        self._num_columns = num_columns * is_new
        self._first_pair, self._num_pairs = _find(left, row_ids)
        before = _count_before(self._num_columns)
        self.num_matches = before[self._first_pair + self._num_pairs] - before[self._first_pair]
        totals = torch.stack([self._num_pairs, self.num_matches, self.num_matches - num_own])
        self._row_blocks = list(row_blocks)
        #: Sizes of each block, [num_blocks, 3], which the host passes to :meth:`set_sizes`.
        sums = [totals[:, rows].sum(1) for rows in row_blocks]
        self.sizes = torch.stack(sums) if sums else totals.new_empty(0, 3)
        self._sizes: dict[int, Sequence[float]] = {}
        self._mask: tuple[slice, Tensor] | None = None

    def set_sizes(self, sizes: Sequence[float]) -> None:
        """Set the flattened values of :attr:`sizes`, which the loss reads from the device with other values."""
        starts = [block.start for block in self._row_blocks]
        self._sizes = {start: sizes[3 * k : 3 * k + 3] for k, start in enumerate(starts)}

    def apply_(self, tile: Tensor, rows: slice, columns: slice) -> None:
        """Set the logits of false negatives in a tile [rows, columns] to -inf; the rows must be one of the blocks.

        Columns after the last id are never masked.
        """
        num_pairs, num_places, num_masked = map(int, self._sizes[rows.start])
        if num_masked <= 0 or columns.start >= len(self._by_id):
            return
        # Tiles of the same block of rows share one mask.
        if self._mask is None or self._mask[0] != rows:
            self._mask = rows, self._build(rows, num_pairs, num_places)
        tile.masked_fill_(self._mask[1][:, columns], -math.inf)

    def _build(self, rows: slice, num_pairs: int, num_places: int) -> Tensor:
        row, pair = _expand(self._first_pair[rows], self._num_pairs[rows], num_pairs)
        which, place = _expand(self._first_column[pair], self._num_columns[pair], num_places)
        mask = torch.zeros(rows.stop - rows.start, len(self._by_id), dtype=torch.bool, device=row.device)
        mask.view(-1).index_fill_(0, row[which] * mask.shape[1] + self._by_id[place], True)
        return mask


def query_mask(
    pair_ids: tuple[Tensor, Tensor] | None,
    own: slice,
    negative_id: Tensor | None,
    row_blocks: Sequence[slice],
    *,
    in_batch: bool,
) -> FalseNegativeMask | None:
    """Return the mask of this worker's queries against all keys (if ``in_batch``) and the negatives."""
    column_ids = [] if pair_ids is None or not in_batch else [pair_ids[1]]
    column_ids += [] if negative_id is None else [negative_id]
    if pair_ids is None or not column_ids:
        return None
    return FalseNegativeMask(
        pair_ids,
        pair_ids[0][own],
        column_ids[0] if len(column_ids) == 1 else torch.cat(column_ids),
        row_blocks=row_blocks,
        num_own=int(in_batch),
    )


def key_mask(
    pair_ids: tuple[Tensor, Tensor] | None, own: slice, row_blocks: Sequence[slice]
) -> FalseNegativeMask | None:
    """Return the mask of this worker's keys against all queries."""
    swapped = None if pair_ids is None else (pair_ids[1], pair_ids[0])
    return query_mask(swapped, own, None, row_blocks, in_batch=True)


def mask_same(tile: Tensor, row_ids: Tensor, column_ids: Tensor) -> None:
    """Set the logits of candidates with the row's id to -inf, in place."""
    tile.masked_fill_(row_ids[:, None] == column_ids, -math.inf)


def count_same(row_ids: Tensor, column_ids: Tensor) -> Tensor:
    """Return the number of columns with the id of each row, [num_rows]."""
    return _find(column_ids.sort().values, row_ids)[1]


def _sort_pairs(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs sorted by left id, and whether each differs from the previous pair."""
    order = right.argsort()
    order = order[left[order].argsort(stable=True)]
    left, right = left[order], right[order]
    is_new = torch.ones_like(left, dtype=torch.bool)
    is_new[1:] = (left[1:] != left[:-1]) | (right[1:] != right[:-1])
    return left, right, is_new


def _find(ordered: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index of each value in ``ordered``, and its number of occurrences."""
    values = values.contiguous()
    first = torch.searchsorted(ordered, values)
    return first, torch.searchsorted(ordered, values, right=True) - first


def _count_before(counts: Tensor) -> Tensor:
    """Return the exclusive cumulative sum followed by the total, [num_counts + 1]."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _expand(first: Tensor, counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the range number and the index of each of the ``total`` elements of the ranges."""
    owner = torch.repeat_interleave(counts, output_size=total)
    within = torch.arange(total, device=counts.device) - _count_before(counts)[owner]
    return owner, first[owner] + within
