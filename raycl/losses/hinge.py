"""Hinge loss: every positive should be more similar than the negatives by a margin."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor

from raycl.distributed import gather, gather_detached, num_workers, rank
from raycl.errors import ConfigError
from raycl.loss_specs import LossSettings
from raycl.losses.checks import (
    check_columns,
    check_gathered,
    check_offset,
    check_pair,
    checked_pair_ids,
)
from raycl.losses.example_ids import Ids
from raycl.losses.false_negatives import FalseNegativeMask
from raycl.losses.info_nce import query_mask
from raycl.losses.nce import add_proximal_term
from raycl.losses.objective import StoreBatch, positive_of
from raycl.losses.tiled import (
    BLOCK_ROWS,
    Gradients,
    fused,
    gradient_buffers,
    mask_diagonals,
    product,
    read_sizes,
    spans,
    tile_size,
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

    **False negatives.** A query and a key are masked, in both directions, if their ids form a pair
    anywhere in the batch, as in ``clip``. This covers other pairs with the same key, other pairs with
    the same query, and candidates (including ``negatives``) that are the key of another pair of the
    same query. Positives without a pair in the batch are unknown here: exclude them from
    ``negatives``. Without ``query_id`` all queries are distinct, without ``key_id`` all keys.

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
            ``gathered_key``, even if the queries themselves are not gathered. With
            ``in_batch=False`` keys are not gathered; gathered ids then identify the pairs of other
            workers.
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
    _check_margin(margin)
    check_pair("query and key", query, key)
    both_ways = _checked_directions(bidirectional, in_batch=in_batch, has_negatives=negatives is not None)
    _check_gathered(gathered_query, gathered_key, in_batch=in_batch, bidirectional=both_ways)
    queries = query if gathered_query is None else check_gathered("query", query, gathered_query)
    keys = key if gathered_key is None else check_gathered("key", key, gathered_key)
    _check_same_length(queries, keys, bidirectional=both_ways)
    others = query.new_empty(0, query.shape[1]) if negatives is None else negatives
    check_columns("the negatives", others, query)
    own = slice(offset, offset + len(key))
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
    alone = slice(0, len(query))
    pairs = _Pairs(
        rows=alone if gathered_query is None else own,
        columns=own if in_batch else alone,
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


def _check_margin(margin: float) -> None:
    if not (math.isfinite(margin) and margin > 0):
        raise ConfigError(
            f"the margin must be a finite number above 0, got {margin:g}; "
            "usual values for unit rows are between 0.1 and 0.5"
        )


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


def _check_gathered(
    gathered_query: Tensor | None, gathered_key: Tensor | None, *, in_batch: bool, bidirectional: bool
) -> None:
    """Raise if gathered rows are unused, or if only one of two required sides is gathered."""
    for name, rows, is_used in (
        ("gathered_query", gathered_query, bidirectional),
        ("gathered_key", gathered_key, in_batch),
    ):
        if rows is not None and not is_used:
            raise ConfigError(
                f"the gathered rows are unused: got {name} {list(rows.shape)} with "
                f"{in_batch=} and {bidirectional=}; remove {name}"
            )
    if bidirectional and (gathered_query is None) != (gathered_key is None):
        missing = "gathered_query" if gathered_query is None else "gathered_key"
        raise ConfigError(
            f"only one side is gathered: {missing} is None while bidirectional is True; "
            "gather both or neither, or pass bidirectional=False"
        )


def _check_same_length(queries: Tensor, keys: Tensor, *, bidirectional: bool) -> None:
    if bidirectional and len(queries) != len(keys):
        raise ConfigError(
            f"the gathered rows do not form pairs: got {len(queries)} queries and {len(keys)} keys; "
            "gather the rows of every worker for both"
        )


class _Pairs(NamedTuple):
    """The positions of this worker's pairs, and the kinds of their candidates."""

    rows: slice  # of the queries
    columns: slice  # of the keys, the positives of these queries in the same order
    in_batch: bool  # whether the other keys are candidates of the queries
    bidirectional: bool  # whether the other queries are candidates of the keys
    ids: tuple[Tensor, Tensor] | None  # query ids and key ids of all pairs
    own_ids: slice  # this worker's pairs in ``ids``
    negative_id: Tensor | None

    @property
    def weight(self) -> float:
        """The weight of a pair in each direction: the mean over pairs, then over directions."""
        return 1 / ((self.rows.stop - self.rows.start) * (2 if self.bidirectional else 1))


class _Columns(NamedTuple):
    """Candidates, cut into tiles that fit the cache."""

    columns: Tensor  # [num_columns, dim], possibly in half precision
    pieces: list[slice]
    gradient: Tensor | None  # [num_columns, dim], if required
    mask: FalseNegativeMask | None
    first: int = 0  # index of the first column in the mask


class _Tile(NamedTuple):
    """Some queries against some candidates; indices of pairs start at this worker's first pair."""

    similarity: Tensor  # [num_rows, num_columns], -inf where the candidate is not a negative
    rows: slice  # of the queries
    row_pairs: slice | None  # pairs of these queries; None for queries of other workers
    block: _Columns
    columns: slice  # of the block
    column_pairs: slice | None  # pairs of these keys; None unless these queries are their candidates


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
    """Return the mean violation over pairs and its gradients, with memory for two tiles of similarities.

    queries [num_queries, dim]; keys [num_keys, dim]; negatives [num_negatives, dim], candidates of
    this worker's queries. Queries of other workers are only candidates of this worker's keys.
    """
    tiles = _Tiles(queries, keys, negatives, pairs=pairs, with_gradient=with_gradient)
    limit = margin - tiles.positives()
    rule = _HardestNegative(tiles, limit) if hardest else _MeanOfNegatives(tiles, limit)
    for tile in tiles:
        rule.add(tile)
    return rule.finish(), tiles.gradients


@final
class _Tiles:
    """Tiles of similarities between this worker's pairs and their candidates; each is computed once."""

    def __init__(
        self, queries: Tensor, keys: Tensor, negatives: Tensor, *, pairs: _Pairs, with_gradient: bool
    ) -> None:
        self.pairs, self.queries = pairs, queries
        own, mine = pairs.rows, pairs.columns
        self._blocks = _cut((0, own.start, own.stop, len(queries)), BLOCK_ROWS)
        self.gradients = tuple(gradient_buffers(queries, keys, negatives, with_gradient=with_gradient))
        self.wants_gradient = any(gradient is not None for gradient in self.gradients)
        self.to_keys, self.to_queries, to_own_keys = self._masks()
        _, at_keys, at_negatives = self.gradients
        size = 2 * tile_size(queries)
        pieces = _cut((0, mine.start, mine.stop, len(keys)), size) if pairs.in_batch else []
        self.batch = _Columns(keys, pieces, at_keys, self.to_keys)
        self.others = _Columns(
            negatives,
            list(spans(0, len(negatives), size)),
            at_negatives,
            self.to_keys,
            len(keys) if pairs.in_batch else 0,
        )
        # The keys of this worker, whose candidates include queries of other workers.
        own_pieces = list(spans(0, mine.stop - mine.start, size)) if pairs.bidirectional else []
        at_own = None if at_keys is None else at_keys[mine]
        self._own_keys = _Columns(keys[mine], own_pieces, at_own, to_own_keys)

    def positives(self) -> Tensor:
        """Return the similarity of each pair of this worker, [num_pairs]."""
        return (self.queries[self.pairs.rows] * self.batch.columns[self.pairs.columns]).sum(1)

    def __iter__(self) -> Iterator[_Tile]:
        """Yield the tiles in order of their position."""
        for rows in self._blocks:
            row_pairs = _within(rows, self.pairs.rows)
            for block in (self._own_keys,) if row_pairs is None else (self.batch, self.others):
                for piece in block.pieces:
                    yield self._tile(rows, row_pairs, block, piece)

    def num_negatives(self) -> tuple[Tensor, Tensor]:
        """Return the number of negatives of each pair's query and of each pair's key, [num_pairs] each."""
        pairs, num_keys = self.pairs, len(self.batch.columns) if self.pairs.in_batch else 0
        each = torch.ones(pairs.rows.stop - pairs.rows.start, dtype=torch.int64, device=self.queries.device)
        of_queries = each * (num_keys + len(self.others.columns))
        # The positive also matches if it is a candidate.
        of_queries = of_queries - (
            each * pairs.in_batch if self.to_keys is None else self.to_keys.num_matches
        )
        of_keys = each * num_keys - (each if self.to_queries is None else self.to_queries.num_matches)
        return of_queries, of_keys

    def push(self, tile: _Tile, weights: Tensor) -> None:
        """Add the gradient of sum(weights * similarities), both [num_rows, num_columns]."""
        gradient, piece = self.gradients[0], tile.block.columns[tile.columns].to(self.queries)
        if gradient is not None:
            gradient[tile.rows] += product(weights, piece.T)
        if tile.block.gradient is not None:
            tile.block.gradient[tile.columns] += product(weights.T, self.queries[tile.rows].T)

    def push_at(
        self, rows: slice | Tensor, block: _Columns, columns: slice | Tensor, weights: Tensor
    ) -> None:
        """Add the gradient of the weighted similarities of these rows with these columns."""
        if self.gradients[0] is not None:
            _add_rows(self.gradients[0], rows, weights[:, None] * block.columns[columns])
        if block.gradient is not None:
            _add_rows(block.gradient, columns, weights[:, None] * self.queries[rows])

    def _masks(self) -> tuple[FalseNegativeMask | None, ...]:
        """Return the masks of local queries x candidates, local keys x queries, other queries x local keys."""
        pairs = self.pairs
        in_pairs = [(rows, _within(rows, pairs.rows)) for rows in self._blocks]
        own_blocks = [own for _, own in in_pairs if own is not None]
        to_keys = query_mask(pairs.ids, pairs.own_ids, pairs.negative_id, own_blocks, in_batch=pairs.in_batch)
        to_queries = to_own_keys = None
        if pairs.ids is not None and pairs.bidirectional:
            query_id, key_id = pairs.ids
            own_key_id = key_id[pairs.own_ids]
            to_queries = FalseNegativeMask((key_id, query_id), own_key_id, query_id, row_blocks=[])
            if other_blocks := [rows for rows, own in in_pairs if own is None]:
                to_own_keys = FalseNegativeMask(pairs.ids, query_id, own_key_id, row_blocks=other_blocks)
        read_sizes(to_keys, to_own_keys)
        return to_keys, to_queries, to_own_keys

    def _tile(self, rows: slice, row_pairs: slice | None, block: _Columns, columns: slice) -> _Tile:
        similarity = product(self.queries[rows], block.columns[columns].to(self.queries))
        if block is self.batch:
            positive = self.pairs.columns.start - self.pairs.rows.start
            mask_diagonals(similarity, rows, columns, (positive,))
        if block.mask is not None:
            within = slice(block.first + columns.start, block.first + columns.stop)
            block.mask.apply_(similarity, rows if row_pairs is None else row_pairs, within)
        return _Tile(similarity, rows, row_pairs, block, columns, self._column_pairs(block, columns))

    def _column_pairs(self, block: _Columns, columns: slice) -> slice | None:
        if block is self._own_keys:
            return columns
        is_candidate = self.pairs.bidirectional and block is self.batch
        return _within(columns, self.pairs.columns) if is_candidate else None


@final
class _MeanOfNegatives:
    """The mean violation of the negatives of each pair."""

    def __init__(self, tiles: _Tiles, limit: Tensor) -> None:
        self._tiles, self._limit = tiles, limit
        weight = tiles.pairs.weight
        self._shares = [weight / count.clamp(min=1).to(limit) for count in tiles.num_negatives()]
        self._total, self._pushed = torch.zeros_like(limit), torch.zeros_like(limit)
        # Allocated once: the allocator would return the memory of a tile to the kernel after each use.
        widest = max((piece.stop - piece.start for piece in tiles.batch.pieces), default=0)
        self._buffer = limit.new_empty(BLOCK_ROWS if tiles.pairs.bidirectional else 0, widest)

    def add(self, tile: _Tile) -> None:
        """Add the violations of both directions, and their gradients."""
        weights, similarity = None, tile.similarity
        if tile.column_pairs is not None and tile.row_pairs is not None:
            similarity = self._buffer[: similarity.shape[0], : similarity.shape[1]].copy_(similarity)
        if tile.row_pairs is not None:
            weights = self._weigh(tile.similarity, tile.row_pairs, self._shares[0])
        if tile.column_pairs is not None:
            of_columns = self._weigh(similarity.T, tile.column_pairs, self._shares[1]).T
            weights = of_columns if weights is None else weights.add_(of_columns)
        if self._tiles.wants_gradient and weights is not None:
            self._tiles.push(tile, weights)

    def finish(self) -> Tensor:
        """Return the loss; add the gradients of the positives."""
        pairs = self._tiles.pairs
        self._tiles.push_at(pairs.rows, self._tiles.batch, pairs.columns, -self._pushed)
        return self._total.sum()

    def _weigh(self, similarity: Tensor, pairs: slice, shares: Tensor) -> Tensor:
        """Replace similarities [num_pairs, num_candidates] with their weights, in place."""
        share = shares[pairs]
        excess = similarity.add_(self._limit[pairs, None]).clamp_(min=0)
        self._total[pairs] += share * excess.sum(1)
        if self._tiles.wants_gradient:
            excess.sign_().mul_(share[:, None])
            self._pushed[pairs] += excess.sum(1)
        return excess


@final
class _HardestNegative:
    """The violation of the hardest negative of each pair."""

    def __init__(self, tiles: _Tiles, limit: Tensor) -> None:
        self._tiles = tiles
        self._rows, self._columns = _Nearest(limit), _Nearest(limit)

    def add(self, tile: _Tile) -> None:
        """Compare the similarities of both directions."""
        if tile.row_pairs is not None:
            before = len(self._tiles.batch.columns) if tile.block is self._tiles.others else 0
            self._rows.add(tile.similarity, tile.row_pairs, before + tile.columns.start)
        if tile.column_pairs is not None:
            self._columns.add(tile.similarity.T, tile.column_pairs, tile.rows.start)

    def finish(self) -> Tensor:
        """Return the loss; add the gradients of the hardest negatives and the positives."""
        tiles, pairs = self._tiles, self._tiles.pairs
        violations = self._rows.violation(), self._columns.violation()
        of_rows, of_columns = (pairs.weight * violation.sign() for violation in violations)
        # The hardest candidate of a query is a key or one of the negatives.
        index, num_keys = self._rows.index, len(tiles.batch.columns)
        tiles.push_at(pairs.rows, tiles.batch, index.clamp(max=num_keys - 1), of_rows * (index < num_keys))
        if len(tiles.others.columns):
            place = (index - num_keys).clamp(min=0)
            tiles.push_at(pairs.rows, tiles.others, place, of_rows * (index >= num_keys))
        if pairs.bidirectional:
            tiles.push_at(self._columns.index, tiles.batch, pairs.columns, of_columns)
        tiles.push_at(pairs.rows, tiles.batch, pairs.columns, -(of_rows + of_columns))
        return pairs.weight * torch.cat(violations).sum()


@final
class _Nearest:
    """The most similar negative of each pair so far, in one direction; the first one on ties."""

    def __init__(self, limit: Tensor) -> None:
        self._limit, self._best = limit, torch.full_like(limit, -math.inf)
        self.index = torch.zeros_like(limit, dtype=torch.int64)

    def add(self, similarity: Tensor, pairs: slice, first: int) -> None:
        """Update with similarities [num_pairs, num_candidates]; the first candidate has index ``first``."""
        best, index = similarity.max(1)
        so_far = self._best[pairs]
        self.index[pairs] = torch.where(best > so_far, index + first, self.index[pairs])
        self._best[pairs] = torch.maximum(best, so_far)  # torch.where would lose NaN

    def violation(self) -> Tensor:
        """Return the violation of the margin, [num_pairs]."""
        return (self._best + self._limit).clamp_(min=0)


def _add_rows(total: Tensor, places: slice | Tensor, rows: Tensor) -> None:
    """Add rows [num_rows, dim] to total at these places, deterministically."""
    if isinstance(places, slice):
        total[places] += rows
    # index_put_ is deterministic on CUDA, index_add_ on the CPU.
    elif total.is_cuda:
        total.index_put_((places,), rows, accumulate=True)
    else:
        total.index_add_(0, places, rows)


def _cut(bounds: Sequence[int], size: int) -> list[slice]:
    """Cut the ranges between the bounds into slices of at most ``size``; no slice crosses a bound."""
    return [piece for start, stop in itertools.pairwise(bounds) for piece in spans(start, stop, size)]


def _within(span: slice, whole: slice) -> slice | None:
    """Return the span relative to the start of ``whole``, or None if it lies outside."""
    if not whole.start <= span.start < whole.stop:
        return None
    return slice(span.start - whole.start, span.stop - whole.start)


@final
@dataclass(frozen=True, kw_only=True)
class Hinge:
    """Margin loss of each query's positive against gathered and stored negatives."""

    margin: float
    hardest: bool
    in_batch: bool
    bidirectional: bool
    proximal_weight: float = 0.0

    @classmethod
    def build(cls, settings: LossSettings) -> Self:
        """Return the loss with these settings."""
        return cls(
            margin=settings.margin,
            hardest=settings.hardest,
            in_batch=settings.in_batch,
            bidirectional=settings.learns_keys and settings.in_batch,
            proximal_weight=settings.proximal_weight,
        )

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: Ids) -> Tensor:
        """Return the loss."""
        key = positive_of(key, stored)
        gathered: dict[str, Any] = {}
        if num_workers() > 1:
            # Gather ids even without in-batch negatives: a stored row may be the key of another worker's pair.
            gathered = {
                "gathered_query": gather(query) if self.bidirectional else None,
                "gathered_key": gather(key) if self.in_batch else None,
                "offset": rank() * len(query),
                "gathered_query_id": gather_detached(ids.query),
                "gathered_key_id": gather_detached(ids.key),
            }
        loss = hinge(
            query,
            key,
            margin=self.margin,
            hardest=self.hardest,
            in_batch=self.in_batch,
            bidirectional=self.bidirectional,
            query_id=ids.query,
            key_id=ids.key,
            negatives=stored.negatives,
            negative_id=stored.negative_id,
            **gathered,
        )
        return add_proximal_term(loss, query, stored, self.proximal_weight)

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the margin."""
        return self.margin
