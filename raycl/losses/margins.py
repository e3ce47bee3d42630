"""The walk of the hinge loss: each tile of similarities is visited once, for rows and columns."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from raycl.losses.false_negatives import FalseNegatives
from raycl.losses.rectangle import Ids
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
        self, columns: Tensor, bounds: Sequence[int], ids: Ids | None, *, wants_gradient: bool
    ) -> None:
        self.columns = columns
        self.pieces = _cut(bounds, 2 * tile_size(columns))
        self.widest = max((piece.stop - piece.start for piece in self.pieces), default=0)
        self.false_negatives = None if ids is None else FalseNegatives(*ids, self.pieces)
        self.gradient = torch.zeros_like(columns) if wants_gradient and columns.requires_grad else None


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
    keys only. Ids (of all queries, of the candidates), where given, mask false negatives.
    Holds one tile, of at most 256 rows on a CPU.
    """

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        negatives: Tensor,
        *,
        pairs: Pairs,
        ids: Ids | None = None,
        negative_ids: Ids | None = None,
        with_gradient: bool,
    ) -> None:
        self.pairs, self.queries = pairs, queries
        bounds = (0, pairs.columns.start, pairs.columns.stop, len(keys)) if pairs.in_batch else ()
        self.batch = Candidates(keys, bounds, ids, wants_gradient=with_gradient)
        self.others = Candidates(negatives, (0, len(negatives)), negative_ids, wants_gradient=with_gradient)
        wants_rows = with_gradient and queries.requires_grad
        self._gradient = torch.zeros_like(queries) if wants_rows else None
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
        own = self.pairs.rows
        for rows in _cut((0, own.start, own.stop, len(self.queries)), STRIP_ROWS):
            for block in (self.batch, self.others):
                for k in range(len(block.pieces)):
                    row_pairs, column_pairs = self._pairs_in(rows, block, k)
                    if row_pairs is not None or column_pairs is not None:
                        yield self._meet(rows, row_pairs, block, k, column_pairs)

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

    def _pairs_in(self, rows: slice, block: Candidates, k: int) -> tuple[slice | None, slice | None]:
        row_pairs = _within(rows, self.pairs.rows)
        if block is self.others or not self.pairs.bidirectional:
            return row_pairs, None
        return row_pairs, _within(block.pieces[k], self.pairs.columns)

    def _meet(
        self, rows: slice, row_pairs: slice | None, block: Candidates, k: int, column_pairs: slice | None
    ) -> Tile:
        strip, columns = self.queries[rows], block.pieces[k]
        piece = block.columns[columns].to(strip.dtype)
        similarity = product(strip, piece)
        if block is self.batch:
            positive = self.pairs.columns.start - self.pairs.rows.start
            mask_diagonals(similarity, rows, columns, (positive,))
        if block.false_negatives is not None:
            block.false_negatives.mask(similarity, rows, k)
        return Tile(similarity, strip, rows, row_pairs, block, piece, columns, column_pairs)


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
