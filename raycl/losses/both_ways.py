"""Queries classified among keys and keys among queries: the walk of the symmetric cross-entropy.

The logits of this worker's queries with its own keys serve both directions, but a weight needs the
logsumexp of its row and of its column: they are visited twice, first for the sums. Every other
candidate serves one direction: there a strip of rows meets all of them before it is left, once.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor

from raycl.losses.directions import Candidates, Direction
from raycl.losses.known_pairs import KnownPairs
from raycl.losses.rectangle import Ids
from raycl.losses.tiled import (
    LOG2_E,
    SAFE_SPREAD,
    STRIP_ROWS,
    Gradients,
    flush,
    longest,
    mask_diagonals,
    product,
    spans,
    temperature_gradient,
)


class Crowd(NamedTuple):
    """The queries of all workers, their keys, or negatives, and what goes with them."""

    rows: Tensor  # [num_rows, dim]
    discount: Tensor  # [num_rows], taken off their logits as candidates; in base 2, at least 0
    ids: Tensor | None  # [num_rows]; equal ids are the same query, or the same key
    gradient: Tensor | None  # [num_rows, dim]; where theirs goes, if it is wanted

    def part(self, span: slice) -> "Crowd":
        """Return some of the rows."""
        ids, gradient = (None if each is None else each[span] for each in (self.ids, self.gradient))
        return Crowd(self.rows[span], self.discount[span], ids, gradient)


def evaluate_both_ways(
    queries: Tensor,
    keys: Tensor,
    negatives: Tensor,
    temperature: Tensor,
    *,
    own: slice,
    discounts: tuple[Tensor, Tensor, Tensor],
    ids: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    with_gradient: bool,
) -> tuple[Tensor, Gradients]:
    """Return the loss of own pairs, the mean over both directions, and its gradients.

    queries, keys [batch, dim], row i of each a pair; negatives [num_negatives, dim], candidates of
    own queries, possibly in half precision. Discounts and ids are those of queries, keys and
    negatives: see :class:`Crowd`. Holds two tiles of logits, and one strip: 256 x the candidates
    that want a gradient and serve one direction only.
    """
    rows = (queries, keys, negatives)
    wanted = (queries.requires_grad or temperature.requires_grad, keys.requires_grad, negatives.requires_grad)
    gradients = [
        torch.zeros_like(each) if with_gradient and is_wanted else None
        for each, is_wanted in zip(rows, wanted, strict=True)
    ]
    crowds = map(Crowd, rows, discounts, ids, gradients)
    loss = _Walk(*crowds, own=own, scale=LOG2_E / temperature).finish()
    for gradient in gradients:
        if gradient is not None:
            gradient.div_(temperature * 2 * (own.stop - own.start))
    # Every logit is that of one query: what is read off theirs is the whole gradient.
    degrees = None if gradients[0] is None else temperature_gradient(queries, gradients[0], temperature)
    return loss, (*gradients, degrees)


@final
class _Walk:
    """Visit all logits of this worker's queries and of its keys."""

    def __init__(self, queries: Crowd, keys: Crowd, negatives: Crowd, *, own: slice, scale: Tensor) -> None:
        self._scale, self._bound = scale, _bound_logits(queries, keys, negatives, scale)
        self._queries, self._keys = queries.part(own), keys.part(own)
        before, after = slice(0, own.start), slice(own.stop, None)
        forth = None if queries.ids is None or keys.ids is None else (queries.ids, keys.ids)
        back = None if forth is None else (forth[1], forth[0])
        to_keys = (keys.part(before), keys.part(after), negatives)
        to_queries = (queries.part(before), queries.part(after))
        self._to_keys = self._direction(self._queries, self._keys, to_keys, forth)
        self._to_queries = self._direction(self._keys, self._queries, to_queries, back)
        # Two directions, two discounts: they come on top of the logits that both share.
        shared = self._keys._replace(discount=torch.zeros_like(self._keys.discount), gradient=None)
        self._block = self._candidates(self._queries, shared, forth, holds_positives=True)

    def finish(self) -> Tensor:
        """Return the loss; leave the gradients, yet to be scaled."""
        self._add_sums()
        for direction in (self._to_keys, self._to_queries):
            for span in self._strips:
                direction.meet_others(span)
        of_queries, key_tower = self._to_keys.finish(), self._to_queries.finish()
        if self._queries.gradient is not None or self._keys.gradient is not None:
            self._add_gradients(of_queries.logsumexp, key_tower.logsumexp)
            pull = (of_queries.missing + key_tower.missing)[:, None]
            for mine, theirs in ((self._queries, self._keys), (self._keys, self._queries)):
                if mine.gradient is not None:
                    mine.gradient.addcmul_(pull, theirs.rows, value=-1)
        return (of_queries.loss + key_tower.loss).mean() / 2

    def _add_sums(self) -> None:
        """Let own queries and own keys meet, for the sums of both."""
        discount = self._keys.discount
        factor = (-discount).exp2()
        for span, piece, tile in self._tiles():
            if self._bound is None:
                self._to_keys.add(tile - discount[piece], span)
                self._to_queries.add(tile.T, piece)
            else:
                weights = tile.exp2_()
                self._to_keys.total[span] += weights @ factor[piece]
                self._to_queries.total[piece] += weights.sum(0)

    def _add_gradients(self, of_queries: Tensor, key_tower: Tensor) -> None:
        """Let them meet again, now that the logsumexp [num_pairs] of both is known."""
        queries, keys = self._queries, self._keys
        weigh = _weigh_apart if self._bound is None else partial(_weigh_at_once, self._bound)
        for span, piece, tile in self._tiles():
            weights = weigh(tile, of_queries[span], key_tower[piece], keys.discount[piece])
            if queries.gradient is not None:
                queries.gradient[span] += product(weights, keys.rows[piece].T)
            if keys.gradient is not None:
                keys.gradient[piece] += product(weights.T, queries.rows[span].T)

    def _tiles(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield the logits of own queries with own keys, less the bound; -inf where no negative is."""
        for span in self._strips:
            for piece, _, tile in self._block.tiles(self._queries.rows[span] * self._scale, span):
                mask_diagonals(tile, span, piece, (0,))
                yield span, piece, tile

    @property
    def _strips(self) -> Iterator[slice]:
        return spans(0, len(self._queries.rows), STRIP_ROWS)

    def _direction(
        self, rows: Crowd, positives: Crowd, others: Sequence[Crowd], pairs: Ids | None
    ) -> Direction:
        return Direction(
            rows.rows,
            (rows.rows * self._scale * positives.rows).sum(1) - positives.discount,
            [self._candidates(rows, each, pairs) for each in others if len(each.rows)],
            scale=self._scale,
            bound=self._bound,
            gradient=rows.gradient,
        )

    def _candidates(
        self, rows: Crowd, columns: Crowd, pairs: Ids | None, *, holds_positives: bool = False
    ) -> Candidates:
        known = None
        if pairs is not None and rows.ids is not None and columns.ids is not None:
            known = KnownPairs(pairs, rows.ids, columns.ids, holds_positives=holds_positives)
        bias = -columns.discount if self._bound is None else -columns.discount - self._bound
        return Candidates(columns.rows, bias, known=known, gradient=columns.gradient)


def _weigh_at_once(
    bound: Tensor, tile: Tensor, of_rows: Tensor, of_columns: Tensor, discount: Tensor
) -> Tensor:
    """Return p(column | row) + p(row | column), from logits - bound and the logsumexp of both."""
    of_rows, of_columns = (bound - of_rows).exp2_(), (bound - of_columns).exp2_()
    return tile.exp2_().mul_(torch.addr(of_columns, of_rows, (-discount).exp2_()))


def _weigh_apart(tile: Tensor, of_rows: Tensor, of_columns: Tensor, discount: Tensor) -> Tensor:
    """Return the same from the logits, where logits - bound would underflow."""
    forth = (tile - discount).sub_(of_rows[:, None])
    return flush(tile.sub_(of_columns)).exp2_().add_(flush(forth).exp2_())


def _bound_logits(queries: Crowd, keys: Crowd, negatives: Crowd, scale: Tensor) -> Tensor | None:
    """Return what no |logit| exceeds before discounts, or None where it would be no safe shift.

    See ``bound_logits`` of the rectangle; discounts lower the logits further.
    """
    precision = queries.rows.dtype
    of_queries, *of_candidates = (longest(each.rows, precision) for each in (queries, keys, negatives))
    bound = of_queries * torch.stack(of_candidates).amax() * scale
    lowest = torch.cat([keys.discount, negatives.discount]).amax()
    return bound if bool(2 * bound + lowest <= SAFE_SPREAD) else None
