"""Hinge loss: every positive should be more similar than the negatives by a margin."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor

from raycl.errors import ConfigError
from raycl.losses.checks import check_columns, check_offset, check_pair, checked_gathered, checked_pair_ids
from raycl.losses.example_ids import ExampleIds
from raycl.losses.false_negatives import FalseNegativeMask, key_mask, query_mask
from raycl.losses.objective import StoreBatch, add_proximal_term, gathered, positive_of
from raycl.losses.softmax import ColumnBlock
from raycl.losses.tiled import (
    BLOCK_ROWS,
    Gradients,
    add_rows,
    fused,
    gradient_buffers,
    product,
    read_scalars,
    spans,
    working_precision,
)


def hinge(
    query: Tensor,
    key: Tensor,
    *,
    margin: float,
    hardest: bool = False,
    bidirectional: bool | None = None,
    in_batch: bool = True,
    gathered_query: Tensor | None = None,
    gathered_key: Tensor | None = None,
    offset: int = 0,
    sample_id: Tensor | None = None,
    gathered_sample_id: Tensor | None = None,
    query_id: Tensor | None = None,
    gathered_query_id: Tensor | None = None,
    key_id: Tensor | None = None,
    gathered_key_id: Tensor | None = None,
    negatives: Tensor | None = None,
    negative_id: Tensor | None = None,
) -> Tensor:
    """Rank each query's own key above its other candidates, by a margin (Kiros et al., 2014).

    The violation of a candidate n of query i is max(0, margin + query i . n - query i . key i); its
    gradient at 0 is 0. The candidates are the other keys of the batch (unless ``in_batch`` is False)
    and ``negatives``. The loss of a query is the **mean** violation of its unmasked negatives (Kiros
    et al. use the sum), or the violation of its ``hardest`` negative (VSE++: Faghri et al., 2018).
    Without negatives it is 0. The loss is the **mean** over the local_batch queries.

    ``bidirectional`` also ranks each key's own query above the other queries of the batch. The loss is
    then **half** the sum of both means (VSE++ uses the sum, which is twice as large). The
    [batch, batch] matrix is never materialized.

    **False negatives** are masked in both directions, as in ``clip``.

    Args:
        query: [local_batch, dim], this worker's embeddings, usually of unit length; other lengths
            are supported. Half precision is computed in float32.
        key: [local_batch, dim], row i the positive of query i.
        margin: above 0, in units of the dot product, which differs by at most 2 for unit rows.
        hardest: use only the most similar negative; the first of equally similar ones, where keys
            precede ``negatives``.
        bidirectional: by default the value of ``in_batch``.
        in_batch: whether the other pairs of the batch are negatives.
        gathered_query: [batch, dim], the queries of all workers, gathered with gradient; replaces
            ``query``. Pass it with ``gathered_key`` if bidirectional, otherwise not at all.
        gathered_key: [batch, dim], the keys of all workers, gathered with gradient; replaces
            ``key``. The average of the gradients over workers (as in DDP) is the gradient of the
            whole batch.
        offset: the index of this worker's first row in the gathered rows and gathered ids.
        sample_id: [local_batch] int64, shorthand for equal ``query_id`` and ``key_id``, if a pair is
            one sample, such as two views. Distinct ids need no mask.
        gathered_sample_id: [batch] int64, ids of the gathered rows.
        query_id: [local_batch] int64; equal ids mean the same query.
        gathered_query_id: [batch] int64, ids of the queries of all workers. Required with
            ``gathered_key``, even if the queries themselves are not gathered; see ``info_nce``.
        key_id: [local_batch] int64; equal ids mean the same key (document, item, caption).
        gathered_key_id: [batch] int64, ids of the keys of all workers; see ``gathered_query_id``.
        negatives: [num_negatives, dim], additional candidates of every query, but not of keys:
            explicit negatives gathered from all workers, or rows of a queue or bank. Half precision
            is supported, and so are 0 rows.
        negative_id: [num_negatives] int64, ids of the negatives, in the id space of the keys.

    Returns:
        A scalar, float32 (float64 for float64 embeddings). It can be differentiated once, with
        respect to query and key (or the gathered rows) and negatives. Gradients are computed only
        for inputs that require them.

    Raises:
        ConfigError: Shapes or arguments do not match, or the margin is not above 0.
    """
    if not (math.isfinite(margin) and margin > 0):
        raise ConfigError(
            f"the margin must be a finite number above 0, got {margin:g}; "
            "usual values for unit rows are between 0.1 and 0.5"
        )
    check_pair("query and key", query, key)
    both_ways = _checked_directions(bidirectional, in_batch=in_batch, has_negatives=negatives is not None)
    queries, keys = _checked_batch(
        query, key, gathered_query, gathered_key, in_batch=in_batch, bidirectional=both_ways
    )
    others = query.new_empty(0, query.shape[1]) if negatives is None else negatives
    check_columns("the negatives", others, query)
    own, alone = slice(offset, offset + len(key)), slice(0, len(query))
    if in_batch:
        check_offset(offset, len(key), len(keys))
    ids = checked_pair_ids(
        sample_id=(sample_id, gathered_sample_id),
        query_id=(query_id, gathered_query_id),
        key_id=(key_id, gathered_key_id),
        negative_id=negative_id,
        own=own,
        batch=None if gathered_key is None else len(keys),
        in_batch=in_batch,
        num_negatives=None if negatives is None else len(others),
    )
    pairs = _Pairs(
        queries=alone if gathered_query is None else own,
        keys=own if in_batch else alone,
        in_batch=in_batch,
        bidirectional=both_ways,
        ids=ids,
        own_ids=own,
        negative_id=negative_id,
    )
    rows = working_precision(queries)
    evaluate = partial(_evaluate, pairs=pairs, margin=margin, hardest=hardest)
    # A half-precision queue that requires no gradient is converted tile by tile.
    others = others.to(rows) if others.requires_grad else others
    return fused(evaluate, rows, keys.to(rows), others)


def _checked_directions(bidirectional: bool | None, *, in_batch: bool, has_negatives: bool) -> bool:
    """Return whether keys are also compared with queries."""
    if not in_batch and not has_negatives:
        raise ConfigError(
            "the queries have no negatives: in_batch is False and negatives is None; "
            "pass negatives ([0, dim] while a queue is empty)"
        )
    if bidirectional and not in_batch:
        raise ConfigError(
            "the keys have no negatives: bidirectional is True and in_batch is False; "
            "remove bidirectional or in_batch=False"
        )
    return in_batch if bidirectional is None else bidirectional


def _checked_batch(
    query: Tensor,
    key: Tensor,
    gathered_query: Tensor | None,
    gathered_key: Tensor | None,
    *,
    in_batch: bool,
    bidirectional: bool,
) -> list[Tensor]:
    """Return the queries and keys to compare; raise if gathered rows are unused or do not match."""
    for name, rows, is_used in (
        ("gathered_query", gathered_query, bidirectional),
        ("gathered_key", gathered_key, in_batch),
    ):
        if rows is not None and not is_used:
            raise ConfigError(
                f"the gathered rows are unused: got {name} {list(rows.shape)} with "
                f"{in_batch=} and {bidirectional=}; remove {name}"
            )
    if bidirectional:
        return checked_gathered(gathered_query=(query, gathered_query), gathered_key=(key, gathered_key))
    return [query, *checked_gathered(gathered_key=(key, gathered_key))]


class _Pairs(NamedTuple):
    """The positions of this worker's pairs, and the kinds of their candidates."""

    queries: slice  # of all queries
    keys: slice  # of all keys
    in_batch: bool  # whether the other keys are candidates of the queries
    bidirectional: bool  # whether the other queries are candidates of the keys
    ids: tuple[Tensor, Tensor] | None  # query ids and key ids of all pairs
    own_ids: slice  # this worker's pairs in ``ids``
    negative_id: Tensor | None


def _evaluate(
    queries: Tensor,
    keys: Tensor,
    negatives: Tensor,
    *,
    pairs: _Pairs,
    margin: float,
    hardest: bool,
    with_gradient: bool,
) -> tuple[Tensor, Gradients]:
    """Return the mean violation over pairs and its gradients, with memory for a few tiles of similarities."""
    gradients = gradient_buffers(queries, keys, negatives, with_gradient=with_gradient)
    at_queries, at_keys, at_negatives = gradients
    query, key = queries[pairs.queries], keys[pairs.keys]
    at_query = None if at_queries is None else at_queries[pairs.queries]
    at_key = None if at_keys is None else at_keys[pairs.keys]
    blocks = list(spans(0, len(query), BLOCK_ROWS))
    # Without other workers, each tile of similarities serves both directions.
    is_shared = pairs.bidirectional and len(query) == len(queries)
    to_keys, to_queries = _masks(pairs, blocks, is_shared=is_shared)
    num_keys = len(keys) if pairs.in_batch else 0
    # The positive also matches if it is a candidate.
    num_matches = int(pairs.in_batch) if to_keys is None else to_keys.num_matches
    limit = margin - (query * key).sum(1)
    weight = 1 / (len(query) * (2 if pairs.bidirectional else 1))
    rule = _HardestNegative if hardest else _MeanOfNegatives
    of_queries = rule(limit, num_keys + len(negatives) - num_matches, weight)
    columns = [
        ColumnBlock(keys, mask=to_keys, in_batch=pairs.in_batch, gradient=at_keys),
        ColumnBlock(negatives, mask=to_keys, first=num_keys, gradient=at_negatives),
    ]
    sides = [_Side(query, at_query, columns, of_queries)]
    if pairs.bidirectional:
        of_keys = rule(limit, num_keys - (1 if to_queries is None else to_queries.num_matches), weight)
        sides.append(
            _Side(key, at_key, [ColumnBlock(queries, mask=to_queries, gradient=at_queries)], of_keys)
        )
    diagonal = pairs.keys.start
    sides[0].compare(blocks, diagonal, other=sides[1].rule if is_shared else None)
    if pairs.bidirectional and not is_shared:
        sides[1].compare(blocks, diagonal)
    loss, positive_weight = limit.new_zeros(()), torch.zeros_like(limit)
    for side in sides:
        side_loss, side_weight = side.rule.finish(side)
        loss, positive_weight = loss + side_loss, positive_weight + side_weight
    if at_query is not None:
        at_query -= positive_weight[:, None] * key
    if at_key is not None:
        at_key -= positive_weight[:, None] * query
    return loss, tuple(gradients)


def _masks(
    pairs: _Pairs, blocks: list[slice], *, is_shared: bool
) -> tuple[FalseNegativeMask | None, FalseNegativeMask | None]:
    """Return the masks of this worker's queries among the candidates, and of its keys among the queries."""
    to_keys = query_mask(pairs.ids, pairs.own_ids, pairs.negative_id, blocks, in_batch=pairs.in_batch)
    to_queries = None
    if pairs.bidirectional:
        to_queries = key_mask(pairs.ids, pairs.own_ids, [] if is_shared else blocks)
    read_scalars(masks=(to_keys, to_queries))
    return to_keys, to_queries


class _Side(NamedTuple):
    """This worker's queries or keys, and their candidates."""

    rows: Tensor  # [num_pairs, dim]
    gradient: Tensor | None  # of the rows
    columns: Sequence[ColumnBlock]  # the first has the positives
    rule: "_MeanOfNegatives | _HardestNegative"

    def compare(
        self,
        blocks: Sequence[slice],
        diagonal: int,
        other: "_MeanOfNegatives | _HardestNegative | None" = None,
    ) -> None:
        """Add the similarities of rows and candidates to the rule, and of the other side to ``other``."""
        widest = max((piece.stop for piece in self.columns[0].pieces[:1]), default=0)
        # Allocated once: the allocator would return the memory of a tile to the kernel after each use.
        buffer = self.rows.new_empty(BLOCK_ROWS if other is not None and other.overwrites else 0, widest)
        for block in blocks:
            first = 0
            for candidates in self.columns:
                diagonals = (diagonal,) if candidates is self.columns[0] else ()
                for k, piece, tile in candidates.tiles(self.rows[block], block, diagonals=diagonals):
                    span, weights = candidates.pieces[k], None
                    if other is not None and candidates is self.columns[0]:
                        copy = tile
                        if other.overwrites:
                            copy = buffer[: tile.shape[0], : tile.shape[1]].copy_(tile)
                        weights = other.add(copy.T, span, block.start)
                    own = self.rule.add(tile, block, first + span.start)
                    if own is not None:
                        self._push(
                            own if weights is None else own.add_(weights.T), block, candidates, k, piece
                        )
                first += len(candidates.columns)

    def _push(self, weights: Tensor, block: slice, candidates: ColumnBlock, k: int, piece: Tensor) -> None:
        """Add the gradient of sum(weights * similarities), both [block, piece]."""
        if self.gradient is not None:
            self.gradient[block] += product(weights, piece.T)
        if candidates.gradient is not None:
            candidates.gradient[candidates.pieces[k]] += product(weights.T, self.rows[block].T)


@final
class _MeanOfNegatives:
    """The mean violation of the negatives of each row."""

    overwrites = True

    def __init__(self, limit: Tensor, num_negatives: Tensor | int, weight: float) -> None:
        """``limit`` [num_rows] is the margin minus the similarity of the positive."""
        self._limit = limit
        self._share = weight / torch.zeros_like(limit).add(num_negatives).clamp(min=1)
        self._loss, self._positive_weight = torch.zeros_like(limit), torch.zeros_like(limit)

    def add(self, similarity: Tensor, rows: slice, first: int) -> Tensor:
        """Replace similarities [rows, candidates] by their weights, in place."""
        share = self._share[rows]
        excess = similarity.add_(self._limit[rows, None]).clamp_(min=0)
        self._loss[rows] += share * excess.sum(1)
        excess.sign_().mul_(share[:, None])
        self._positive_weight[rows] += excess.sum(1)
        return excess

    def finish(self, side: _Side) -> tuple[Tensor, Tensor]:
        """Return the loss, and the weight of each positive, [num_rows]."""
        return self._loss.sum(), self._positive_weight


@final
class _HardestNegative:
    """The violation of the most similar negative of each row; the first one on ties."""

    overwrites = False

    def __init__(self, limit: Tensor, num_negatives: Tensor | int, weight: float) -> None:
        """``limit`` [num_rows] is the margin minus the similarity of the positive."""
        self._limit, self._weight = limit, weight
        self._best = torch.full_like(limit, -math.inf)
        self._index = torch.zeros_like(limit, dtype=torch.int64)

    def add(self, similarity: Tensor, rows: slice, first: int) -> None:
        """Update with similarities [rows, candidates]; the first candidate has index ``first``."""
        best, index = similarity.max(1)
        so_far = self._best[rows]
        self._index[rows] = torch.where(best > so_far, index + first, self._index[rows])
        self._best[rows] = torch.maximum(best, so_far)  # torch.where would lose NaN

    def finish(self, side: _Side) -> tuple[Tensor, Tensor]:
        """Return the loss, and the weight of each positive; add the gradients of the hardest negatives."""
        violation = (self._best + self._limit).clamp_(min=0)
        weights, first = self._weight * violation.sign(), 0
        for candidates in side.columns:
            columns = candidates.columns
            place = self._index - first
            is_here = (place >= 0) & (place < len(columns))
            place, share = place.clamp(0, max(len(columns) - 1, 0)), (weights * is_here)[:, None]
            if len(columns) and side.gradient is not None:
                side.gradient.add_(share * columns[place])
            if len(columns) and candidates.gradient is not None:
                add_rows(candidates.gradient, place, share * side.rows)
            first += len(columns)
        return self._weight * violation.sum(), weights


@final
@dataclass(frozen=True, kw_only=True)
class Hinge:
    """Margin loss of each query's positive against gathered and stored negatives.

    ``learns_keys`` says whether keys have a gradient.
    """

    margin: float = 0.2
    hardest: bool = False
    in_batch: bool = True
    learns_keys: bool = True
    proximal_weight: float = 0.0

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: ExampleIds) -> Tensor:
        """Return the loss."""
        key = positive_of(key, stored)
        own_ids = {"query_id": ids.query, "key_id": ids.key}
        bidirectional = self.learns_keys and self.in_batch
        # Ids are gathered even without in-batch negatives: a stored row may be the key of another worker's pair.
        everyone = gathered(
            query=query if bidirectional else None, key=key if self.in_batch else None, **own_ids
        )
        loss = hinge(
            query,
            key,
            margin=self.margin,
            hardest=self.hardest,
            in_batch=self.in_batch,
            bidirectional=bidirectional,
            negatives=stored.negatives,
            negative_id=stored.negative_id,
            **own_ids,
            **everyone,
        )
        return add_proximal_term(loss, query, stored, self.proximal_weight)

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the margin."""
        return self.margin
