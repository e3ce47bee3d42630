"""Candidates that make a pair with a row somewhere in the batch, and so are no negatives of it."""

import itertools
import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from raycl.losses.tiled import STRIP_ROWS, spans


@final
class KnownPairs:
    """Know which columns make a pair with which rows: mostly few, so they are listed by strip.

    Row id r and column id c make a pair if any of the given pairs is (r, c). So a row's masked
    columns are those with its own positive's id, those whose own row has its id, and those with the
    id of any other positive of its id.
    """

    def __init__(
        self,
        pairs: tuple[Tensor, Tensor],
        row_ids: Tensor,
        column_ids: Tensor,
        *,
        holds_positives: bool = False,
        strips: Sequence[slice] | None = None,
    ) -> None:
        """Take pairs of ids [num_pairs], row_ids [num_rows], column_ids [num_columns], all int64.

        holds_positives: whether row i and column i are a pair, which needs no mask. strips: the rows
        that will be asked for together; by default all of them, 256 at a time.
        """
        left, right, is_new = _sorted(*pairs)
        ordered, self._by_id = column_ids.sort()
        # Columns of an id stand together there, and pairs of a row's id among the sorted ones.
        self._first_column, num_columns = _find(ordered, right)
        self._num_columns = num_columns * is_new
        self._first_pair, self._num_pairs = _find(left, row_ids)
        before = _before(self._num_columns)
        self.num_known = before[self._first_pair + self._num_pairs] - before[self._first_pair]
        totals = torch.stack([self._num_pairs, self.num_known, self.num_known - int(holds_positives)])
        # Asked once: a question at each strip would halt an accelerator.
        strips = list(spans(0, len(row_ids), STRIP_ROWS)) if strips is None else strips
        sums = torch.stack([totals[:, strip].sum(1) for strip in strips]).tolist() if strips else []
        self._totals = dict(zip([strip.start for strip in strips], sums, strict=True))

    def mask(self, strip: slice) -> Tensor | None:
        """Return which columns are no negatives of the rows of a strip, [strip, num_columns]; None if none is."""
        num_pairs, num_places, num_masked = self._totals[strip.start]
        if num_masked == 0:
            return None
        row, pair = _expand(self._first_pair[strip], self._num_pairs[strip], num_pairs)
        which, place = _expand(self._first_column[pair], self._num_columns[pair], num_places)
        mask = torch.zeros(strip.stop - strip.start, len(self._by_id), dtype=torch.bool, device=row.device)
        mask.view(-1).index_fill_(0, row[which] * mask.shape[1] + self._by_id[place], True)
        return mask


@final
class KnownColumns:
    """Know which columns make a pair with some row: mostly few, so only they are looked at.

    Pairs and ids are those of :class:`KnownPairs`. ``strips`` are the rows that a walk over tiles
    visits together; ``pieces`` cut the columns, in order and without gaps, as it does.
    """

    def __init__(
        self,
        pairs: tuple[Tensor, Tensor],
        row_ids: Tensor,
        column_ids: Tensor,
        *,
        strips: Sequence[slice],
        pieces: Sequence[slice],
        positives: slice | None = None,
    ) -> None:
        """Take ids and cuts; positives: the columns whose own rows are among the rows, a pair that needs no mask."""
        num_rows = count_known((pairs[1], pairs[0]), column_ids, row_ids)
        if positives is not None:
            num_rows[positives] -= 1
        is_known, self._pieces = num_rows > 0, pieces
        # Asked once, as the sums of the strips are.
        counts = torch.stack([is_known[piece].sum() for piece in pieces]).tolist() if pieces else []
        bounds = list(itertools.accumulate(counts, initial=0))
        self._parts = [slice(*bound) for bound in itertools.pairwise(bounds)]
        if bounds[-1]:
            self._columns = is_known.argsort(descending=True, stable=True)[: bounds[-1]]
            self._known = KnownPairs(pairs, row_ids, column_ids[self._columns], strips=strips)
        self._strip: tuple[slice, Tensor | None] = slice(0), None

    def mask(self, tile: Tensor, strip: slice, piece: int) -> None:
        """Rule out, in place, the known pairs of a tile: a strip of rows against one piece of the columns."""
        part = self._parts[piece]
        if part.start == part.stop:
            return
        # A strip meets its pieces one after another: its mask is made once.
        if self._strip[0] != strip:
            self._strip = strip, self._known.mask(strip)
        mask = self._strip[1]
        if mask is not None:
            within = self._columns[part] - self._pieces[piece].start
            columns = tile.index_select(1, within).masked_fill_(mask[:, part], -math.inf)
            tile.index_copy_(1, within, columns)


def count_known(pairs: tuple[Tensor, Tensor], row_ids: Tensor, column_ids: Tensor) -> Tensor:
    """Return how many columns each row makes a pair with, [num_rows]; see :class:`KnownPairs`."""
    return KnownPairs(pairs, row_ids, column_ids, strips=()).num_known


def _sorted(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs in order of the left, and which of them is no copy of the one before."""
    order = right.argsort()
    order = order[left[order].argsort(stable=True)]
    left, right = left[order], right[order]
    is_new = torch.ones_like(left, dtype=torch.bool)
    is_new[1:] = (left[1:] != left[:-1]) | (right[1:] != right[:-1])
    return left, right, is_new


def _find(ordered: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each value begins in ``ordered``, and how often it is there."""
    first = torch.searchsorted(ordered, values)
    return first, torch.searchsorted(ordered, values, right=True) - first


def _before(counts: Tensor) -> Tensor:
    """Return how many come before each, and before the end, [len(counts) + 1]."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _expand(first: Tensor, counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Write ranges out: the number of the range, and the place in it, of each of ``total`` places."""
    owner = torch.repeat_interleave(counts, output_size=total)
    within = torch.arange(total, device=counts.device) - _before(counts)[owner]
    return owner, first[owner] + within
