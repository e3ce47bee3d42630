"""What negatives violate: all of them on average, or the hardest of each pair."""

import math
from functools import partial
from typing import final

import torch
from torch import Tensor

from raycl.losses.known_pairs import count_known
from raycl.losses.margins import MarginWalk, Pairs, Tile
from raycl.losses.pair_ids import PairIds
from raycl.losses.tiled import STRIP_ROWS, Gradients


def evaluate_margins(
    queries: Tensor,
    keys: Tensor,
    negatives: Tensor,
    *,
    pairs: Pairs,
    margin: float,
    hardest: bool,
    ids: PairIds | None = None,
    with_gradient: bool,
) -> tuple[Tensor, Gradients]:
    """Return by how much negatives violate the margin, the mean over pairs, and its gradients.

    Shapes and ids are those of :class:`MarginWalk`. Holds two tiles of similarities.
    """
    walk = MarginWalk(queries, keys, negatives, pairs=pairs, ids=ids, with_gradient=with_gradient)
    limit = margin - walk.positives()
    if hardest:
        judge = _HardestOne(walk, limit)
    else:
        judge = _EveryOne(walk, limit, *_num_negatives(walk, ids))
    for tile in walk.tiles():
        judge.take(tile)
    return judge.finish(), walk.gradients


@final
class _EveryOne:
    """The mean over the negatives of each pair."""

    def __init__(self, walk: MarginWalk, limit: Tensor, of_queries: Tensor, key_tower: Tensor) -> None:
        self._walk = walk
        self._rows, self._columns = (
            _Violations(limit, walk.pairs.part / count.clamp(min=1).to(limit), walk.wants_gradient)
            for count in (of_queries, key_tower)
        )
        # Made once: the allocator would give a tile back to the kernel after each visit.
        self._room = limit.new_empty(STRIP_ROWS if walk.pairs.bidirectional else 0, walk.batch.widest)

    def take(self, tile: Tile) -> None:
        """Take in the violations of both directions, and their gradients."""
        weights, similarity = None, tile.similarity
        if tile.column_pairs is not None and tile.row_pairs is not None:
            similarity = self._room[: similarity.shape[0], : similarity.shape[1]].copy_(similarity)
        if tile.row_pairs is not None:
            weights = self._rows.take(tile.similarity, tile.row_pairs)
        if tile.column_pairs is not None:
            of_columns = self._columns.take(similarity.T, tile.column_pairs).T
            weights = of_columns if weights is None else weights.add_(of_columns)
        if self._walk.wants_gradient and weights is not None:
            self._walk.push(tile, weights)

    def finish(self) -> Tensor:
        """Return the loss; pull the positives."""
        pairs = self._walk.pairs
        pull = self._rows.weight + self._columns.weight
        self._walk.push_at(pairs.rows, self._walk.batch, pairs.columns, -pull)
        return (self._rows.total + self._columns.total).sum()


@final
class _Violations:
    """What all negatives of each pair violate, in one direction."""

    def __init__(self, limit: Tensor, share: Tensor, wants_gradient: bool) -> None:
        self._limit, self._share, self._wants_gradient = limit, share, wants_gradient
        self.total, self.weight = torch.zeros_like(limit), torch.zeros_like(limit)

    def take(self, similarity: Tensor, pairs: slice) -> Tensor:
        """Take in [num_pairs, num_candidates]; turn it into the weight of each similarity, in place."""
        share = self._share[pairs]
        excess = similarity.add_(self._limit[pairs, None]).clamp_(min=0)
        self.total[pairs] += share * excess.sum(1)
        if self._wants_gradient:
            excess.sign_().mul_(share[:, None])
            self.weight[pairs] += excess.sum(1)
        return excess


@final
class _HardestOne:
    """The hardest negative of each pair."""

    def __init__(self, walk: MarginWalk, limit: Tensor) -> None:
        self._walk = walk
        self._rows, self._columns = _Nearest(limit), _Nearest(limit)

    def take(self, tile: Tile) -> None:
        """Take in the similarities of both directions."""
        if tile.row_pairs is not None:
            before = len(self._walk.batch.columns) if tile.block is self._walk.others else 0
            self._rows.take(tile.similarity, tile.row_pairs, before + tile.columns.start)
        if tile.column_pairs is not None:
            self._columns.take(tile.similarity.T, tile.column_pairs, tile.rows.start)

    def finish(self) -> Tensor:
        """Return the loss; push the hardest negatives away and pull the positives."""
        walk = self._walk
        violations = self._rows.violation(), self._columns.violation()
        of_rows, of_columns = (walk.pairs.part * violation.sign() for violation in violations)
        self._push_candidates(of_rows)
        if walk.pairs.bidirectional:
            walk.push_at(self._columns.index, walk.batch, walk.pairs.columns, of_columns)
        walk.push_at(walk.pairs.rows, walk.batch, walk.pairs.columns, -(of_rows + of_columns))
        return walk.pairs.part * torch.cat(violations).sum()

    def _push_candidates(self, weights: Tensor) -> None:
        """Push the hardest candidate of each query, which is a key or one of the others."""
        walk, index = self._walk, self._rows.index
        push = partial(walk.push_at, walk.pairs.rows)
        num_keys = len(walk.batch.columns)
        push(walk.batch, index.clamp(max=num_keys - 1), weights * (index < num_keys))
        if len(walk.others.columns):
            push(walk.others, (index - num_keys).clamp(min=0), weights * (index >= num_keys))


@final
class _Nearest:
    """The most similar negative of each pair so far, in one direction; of equal ones the first."""

    def __init__(self, limit: Tensor) -> None:
        self._limit, self._best = limit, torch.full_like(limit, -math.inf)
        self.index = torch.zeros_like(limit, dtype=torch.int64)

    def take(self, similarity: Tensor, pairs: slice, first: int) -> None:
        """Take in [num_pairs, num_candidates], whose first candidate has the index ``first``."""
        best, index = similarity.max(1)
        so_far = self._best[pairs]
        self.index[pairs] = torch.where(best > so_far, index + first, self.index[pairs])
        self._best[pairs] = torch.maximum(best, so_far)  # not by where: NaN must stay

    def violation(self) -> Tensor:
        """Return by how much it violates the margin, [num_pairs]."""
        return (self._best + self._limit).clamp_(min=0)


def _num_negatives(walk: MarginWalk, ids: PairIds | None) -> tuple[Tensor, Tensor]:
    """Return how many negatives each pair's query has, and how many its key has, [num_pairs]."""
    rows, _, in_batch, bidirectional = walk.pairs
    every = torch.ones(rows.stop - rows.start, dtype=torch.int64, device=walk.queries.device)
    key_tower = every * (len(walk.batch.columns) - 1 if in_batch else 0)
    of_queries = key_tower + len(walk.others.columns)
    if ids is None:
        return of_queries, key_tower
    pairs, own_queries, own_keys = (ids.queries, ids.keys), ids.queries[ids.own], ids.keys[ids.own]
    if walk.batch.known is not None:
        # The positive is known too, and no negative already.
        of_queries = of_queries - (count_known(pairs, own_queries, ids.keys) - 1)
        if bidirectional:
            # Counted anew: a key may belong to more queries than a query has keys.
            key_tower = key_tower - (count_known((ids.keys, ids.queries), own_keys, ids.queries) - 1)
    if ids.negatives is not None:
        of_queries = of_queries - count_known(pairs, own_queries, ids.negatives)
    return of_queries, key_tower
