"""The walk of the hinge loss: each tile of similarities is visited once, for rows and columns."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor

from raycl.losses.known_pairs import KnownColumns
from raycl.losses.pair_ids import PairIds
from raycl.losses.tiled import STRIP_ROWS, Gradients, mask_diagonals, product, spans, tile_size


class Pairs(NamedTuple):
    """Where this worker's pairs stand, and what they are compared with."""

    rows: slice  # of the queries
    columns: slice  # of the keys: the positives of those queries, in their order
    in_batch: bool  # whether the queries meet the other keys
    bidirectional: bool  # whether the keys meet the other queries

    @property
    def part(self) -> float:
        """What a pair counts in each direction: the mean over pairs, then over directions."""
        return 1 / ((self.rows.stop - self.rows.start) * (2 if self.bidirectional else 1))


@final
class Candidates:
    """Rows that queries meet, cut into pieces that fit the cache."""

    def __init__(
        self,
        columns: Tensor,
        bounds: Sequence[int],
        *,
        gradient: Tensor | None,
        known: Callable[..., KnownColumns] | None = None,
    ) -> None:
        """Take columns [num_columns, dim], possibly in half precision.

        gradient [num_columns, dim]: where theirs goes, if it is wanted; known(pieces=...): what makes
        a pair with the queries, if anything may.
        """
        self.columns, self.gradient = columns, gradient
        self.pieces = _cut(bounds, 2 * tile_size(columns))
        self.widest = max((piece.stop - piece.start for piece in self.pieces), default=0)
        self.known = None if known is None else known(pieces=self.pieces)


class Tile(NamedTuple):
    """Some queries against a piece of candidates; pairs are counted from this worker's first."""

    similarity: Tensor  # [num_rows, num_columns], -inf where the candidate is no negative
    strip: Tensor  # [num_rows, dim]
    rows: slice  # where the strip stands among the queries
    row_pairs: slice | None  # whose queries these are; None for other workers'
    block: Candidates
    piece: Tensor  # [num_columns, dim], in working precision
    columns: slice  # where the piece stands in its block
    column_pairs: slice | None  # whose keys these are; None unless they meet these queries


@final
class MarginWalk:
    """Visit the similarities, and take in what they push apart.

    queries [num_queries, dim]; keys [num_keys, dim]; negatives [num_negatives, dim], candidates of
    this worker's queries, possibly in half precision. Queries of other workers meet this worker's
    keys only. Ids, where given, mask what makes a pair with the query that meets it.
    Holds one tile, of at most 256 rows on a CPU.
    """

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        negatives: Tensor,
        *,
        pairs: Pairs,
        ids: PairIds | None = None,
        with_gradient: bool,
    ) -> None:
        self.pairs, self.queries = pairs, queries
        own, mine = pairs.rows, pairs.columns
        self._strips = _cut((0, own.start, own.stop, len(queries)), STRIP_ROWS)
        self._gradient, key_tower, of_negatives = (
            torch.zeros_like(each) if with_gradient and each.requires_grad else None
            for each in (queries, keys, negatives)
        )
        to_batch, to_own_keys, to_others = self._known(ids)
        bounds = (0, mine.start, mine.stop, len(keys)) if pairs.in_batch else ()
        self.batch = Candidates(keys, bounds, gradient=key_tower, known=to_batch)
        self.others = Candidates(negatives, (0, len(negatives)), gradient=of_negatives, known=to_others)
        # The part of the batch that queries of other workers meet.
        self._own_keys = Candidates(
            keys[mine],
            (0, mine.stop - mine.start) if pairs.bidirectional else (),
            gradient=None if key_tower is None else key_tower[mine],
            known=to_own_keys,
        )
        self.wants_gradient = any(gradient is not None for gradient in self.gradients)

    @property
    def gradients(self) -> Gradients:
        """Of queries, keys and negatives; None where none is wanted."""
        return self._gradient, self.batch.gradient, self.others.gradient

    def positives(self) -> Tensor:
        """Return the similarity of each pair of this worker, [num_pairs]."""
        return (self.queries[self.pairs.rows] * self.batch.columns[self.pairs.columns]).sum(1)

    def tiles(self) -> Iterator[Tile]:
        """Yield the tiles in which a pair of this worker meets negatives, in order of their place."""
        for rows in self._strips:
            row_pairs = _within(rows, self.pairs.rows)
            for block in (self._own_keys,) if row_pairs is None else (self.batch, self.others):
                for k in range(len(block.pieces)):
                    yield self._meet(rows, row_pairs, block, k)

    def push(self, tile: Tile, weights: Tensor) -> None:
        """Add the gradient of the sum of weights * similarities, both [num_rows, num_columns]."""
        if self._gradient is not None:
            self._gradient[tile.rows] += product(weights, tile.piece.T)
        if tile.block.gradient is not None:
            tile.block.gradient[tile.columns] += product(weights.T, tile.strip.T)

    def push_at(
        self, rows: slice | Tensor, block: Candidates, columns: slice | Tensor, weights: Tensor
    ) -> None:
        """Add the gradient of the sum of weights * the similarities of these rows with these columns."""
        if self._gradient is not None:
            _add_rows(self._gradient, rows, weights[:, None] * block.columns[columns])
        if block.gradient is not None:
            _add_rows(block.gradient, columns, weights[:, None] * self.queries[rows])

    def _known(self, ids: PairIds | None) -> tuple[Callable[..., KnownColumns] | None, ...]:
        """Say what own queries know of all keys, other workers' queries of own keys, and own queries of negatives."""
        if ids is None:
            return None, None, None
        know = partial(KnownColumns, (ids.queries, ids.keys))
        strips = [(rows, _within(rows, self.pairs.rows)) for rows in self._strips]
        from_own = partial(know, ids.queries[ids.own], strips=[pairs for _, pairs in strips if pairs])
        to_batch = to_own_keys = None
        if self.pairs.in_batch and not ids.are_distinct:
            to_batch = partial(from_own, ids.keys, positives=ids.own)
            if others := [rows for rows, pairs in strips if pairs is None]:
                own_keys = ids.keys[ids.own]
                to_own_keys = partial(know, ids.queries, own_keys, positives=slice(None), strips=others)
        return to_batch, to_own_keys, None if ids.negatives is None else partial(from_own, ids.negatives)

    def _meet(self, rows: slice, row_pairs: slice | None, block: Candidates, k: int) -> Tile:
        strip, columns = self.queries[rows], block.pieces[k]
        piece = block.columns[columns].to(strip.dtype)
        similarity = product(strip, piece)
        if block is self.batch:
            positive = self.pairs.columns.start - self.pairs.rows.start
            mask_diagonals(similarity, rows, columns, (positive,))
        if block.known is not None:
            block.known.mask(similarity, rows if row_pairs is None else row_pairs, k)
        column_pairs = self._column_pairs(block, columns)
        return Tile(similarity, strip, rows, row_pairs, block, piece, columns, column_pairs)

    def _column_pairs(self, block: Candidates, columns: slice) -> slice | None:
        """Say whose keys these are, where the queries they meet are their candidates."""
        if block is self._own_keys:
            return columns
        is_met = self.pairs.bidirectional and block is self.batch
        return _within(columns, self.pairs.columns) if is_met else None


def _add_rows(total: Tensor, places: slice | Tensor, rows: Tensor) -> None:
    """Add rows [num_rows, dim] to total at their places, in the same order in every run."""
    if isinstance(places, slice):
        total[places] += rows
    # On CUDA index_add_ adds in no fixed order, but index_put_ sorts first; on a CPU it is the reverse.
    elif total.is_cuda:
        total.index_put_((places,), rows, accumulate=True)
    else:
        total.index_add_(0, places, rows)


def _cut(bounds: Sequence[int], size: int) -> list[slice]:
    """Cut what lies between the bounds into pieces of at most ``size``, none across a bound."""
    return [piece for start, stop in itertools.pairwise(bounds) for piece in spans(start, stop, size)]


def _within(span: slice, whole: slice) -> slice | None:
    """Count a span from where ``whole`` starts; None where it lies outside."""
    if not whole.start <= span.start < whole.stop:
        return None
    return slice(span.start - whole.start, span.stop - whole.start)
