"""NT-Xent, the loss of SimCLR (Chen et al., 2020)."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import final

import torch
from torch import Tensor

from raycl.errors import ConfigError
from raycl.losses.checks import check_offset, check_pair, check_sample_id, checked_ids, checked_temperature
from raycl.losses.rectangle import Ids, Side, evaluate_rectangle
from raycl.losses.tiled import (
    LOG2_E,
    SAFE_SPREAD,
    Gradients,
    Softmax,
    finish,
    flush,
    fused,
    has_duplicates,
    mask_diagonals,
    mask_same,
    product,
    spans,
    temperature_gradient,
    tile_size,
    working_precision,
)


def nt_xent(
    view_a: Tensor,
    view_b: Tensor,
    *,
    temperature: float | Tensor,
    gathered_a: Tensor | None = None,
    gathered_b: Tensor | None = None,
    offset: int = 0,
    sample_id: Tensor | None = None,
    gathered_sample_id: Tensor | None = None,
) -> Tensor:
    """Classify each row's other view among all other rows (SimCLR: Chen et al., 2020).

    Every one of the 2 * local_batch rows has 2 * batch - 1 candidates: all rows of both views
    but itself. The loss is the **mean** over the 2 * local_batch rows (SimCLR's own code adds
    the means of the two halves, which is twice that). No [batch, batch] matrix is ever held.

    Args:
        view_a: [local_batch, dim], this worker's embeddings of one view; unit rows are usual,
            other lengths are right too. Half precision is computed in float32.
        view_b: [local_batch, dim], row i the positive of view_a's row i.
        temperature: above 0; a 0-d tensor that requires grad is learned, its gradient exact.
        gathered_a: [batch, dim], view_a of all workers, gathered with gradient; averaged over
            workers (as DDP does) the gradients are then those of the whole batch.
        gathered_b: [batch, dim], the same of view_b.
        offset: where this worker's rows begin in the gathered ones.
        sample_id: [local_batch] int64; a candidate with the row's id that is neither the row
            nor its positive is a false negative and is masked. Distinct ids cost one sort.
        gathered_sample_id: [batch] int64, the ids of the gathered rows.

    Returns:
        A scalar, float32 (float64 for float64 embeddings). It can be differentiated once.

    Raises:
        ConfigError: shapes do not agree, or the temperature is not above 0.
    """
    check_pair("the two views", view_a, view_b)
    check_sample_id(sample_id, view_a)
    rows = working_precision(torch.cat([view_a, view_b]))
    degrees = checked_temperature(temperature, rows)
    if gathered_a is None and gathered_b is None:
        ids = None if sample_id is None or not has_duplicates(sample_id) else sample_id.repeat(2)
        return fused(partial(_evaluate_square, ids=ids), rows, degrees)
    columns = _checked_columns(view_a, gathered_a, gathered_b, offset).to(rows)
    ids = _doubled_ids(sample_id, gathered_sample_id, len(columns) // 2)
    sides = _sides(len(rows) // 2, len(columns) // 2, offset)
    no_others = rows.new_empty(0, rows.shape[1])
    return fused(partial(evaluate_rectangle, sides=sides, ids=ids), rows, columns, no_others, degrees)


def _sides(local_batch: int, batch: int, offset: int) -> tuple[Side, Side]:
    """Say where the rows of each view find themselves and their positives."""
    return (
        Side(slice(0, local_batch), positive=batch + offset, own=offset),
        Side(slice(local_batch, 2 * local_batch), positive=offset, own=batch + offset),
    )


def _evaluate_square(
    rows: Tensor, temperature: Tensor, *, ids: Tensor | None, with_gradient: bool
) -> tuple[Tensor, Gradients]:
    """Return the loss of rows [2 * batch, dim] against themselves, and its gradients.

    The logits are symmetric, so half of the tiles tell everything: one walk for the
    logsumexp of each row, one for the gradients, which need it of row and column.
    """
    walk = _SquareWalk(rows, temperature, ids)
    softmax = walk.take_loss()
    loss = softmax.loss.mean()
    if not with_gradient:
        return loss, ()
    gradient = walk.take_gradient(softmax).div_(temperature * len(rows))
    # Half, for each similarity counts in the gradient of both of its rows.
    return loss, (gradient, temperature_gradient(rows, gradient, temperature, share=0.5))


@final
class _SquareWalk:
    """Visit the tiles on and above the diagonal of the logits of rows with themselves."""

    def __init__(self, rows: Tensor, temperature: Tensor, ids: Tensor | None) -> None:
        self._rows, self._ids = rows, ids
        self._scale = LOG2_E / temperature
        batch = len(rows) // 2
        self._spans = list(spans(0, len(rows), tile_size(rows)))
        # Made once: the allocator gives big blocks back to the kernel, and page faults cost more
        # than the arithmetic on them.
        self._other = rows.new_empty(self._spans[0].stop, self._spans[0].stop)
        self._diagonals = (0, batch, -batch)  # oneself, and the positives
        # |logit| <= bound (Cauchy-Schwarz). One shift for all rows is the fast way, but at a
        # low temperature whole rows would underflow: there each row takes its true maximum.
        self._bound = torch.linalg.vector_norm(rows, dim=1).amax().square() * self._scale
        self._bounded = bool(2 * self._bound <= SAFE_SPREAD)

    def take_loss(self) -> Softmax:
        """Walk once for the sum over each row's negatives."""
        view_a, view_b = self._rows.chunk(2)
        positive = ((view_a * view_b).sum(1) * self._scale).repeat(2)
        shift = self._bound.expand_as(positive) if self._bounded else positive.clone()
        total = torch.zeros_like(positive)
        for across, down in self._halves():
            tile = self._logits(across, down)
            if self._bounded:
                tile.sub_(self._bound).exp2_()
                total[across] += tile.sum(1)
                if across != down:
                    total[down] += tile.sum(0)
            else:
                _add_sums(tile, shift[across], total[across])
                if across != down:
                    _add_sums(tile.T, shift[down], total[down])
        return finish(positive, shift, total)

    def take_gradient(self, softmax: Softmax) -> Tensor:
        """Walk again for the gradient at the rows, yet to be scaled."""
        # Blocks of [dim, num_rows]: contiguous, and what the products read and write fastest.
        rows = {span.start: self._rows[span].T.contiguous() for span in self._spans}
        gradient = {start: torch.zeros_like(block) for start, block in rows.items()}
        for across, down in self._halves():
            weights = self._weights(across, down, softmax.logsumexp)
            gradient[across.start] += product(rows[down.start], weights)
            if across != down:
                gradient[down.start] += product(rows[across.start], weights.T)
        total = torch.cat(list(gradient.values()), 1).T
        pull = softmax.missing.view(2, -1).sum(0)[:, None]  # a pair's, the same for both views
        for part, other_view in zip(total.chunk(2), reversed(self._rows.chunk(2)), strict=True):
            part.addcmul_(pull, other_view, value=-1)
        return total

    def _weights(self, across: slice, down: slice, logsumexp: Tensor) -> Tensor:
        """Return p(column | row) + p(row | column), the pull of each negative pair."""
        tile = self._logits(across, down)
        other = self._other[: tile.shape[0], : tile.shape[1]]
        if self._bounded:
            share = (self._bound - logsumexp).exp2_()
            torch.add(share[across, None], share[down], out=other)
            return tile.sub_(self._bound).exp2_().mul_(other)
        flush(torch.sub(tile, logsumexp[down], out=other))
        return flush(tile.sub_(logsumexp[across, None])).exp2_().add_(other.exp2_())

    def _logits(self, across: slice, down: slice) -> Tensor:
        tile = product(self._rows[across] * self._scale, self._rows[down])
        mask_diagonals(tile, across, down, self._diagonals)
        if self._ids is not None:
            mask_same(tile, self._ids[across], self._ids[down])
        return tile

    def _halves(self) -> Iterator[tuple[slice, slice]]:
        return itertools.combinations_with_replacement(self._spans, 2)


def _add_sums(tile: Tensor, shift: Tensor, total: Tensor) -> None:
    """Add each row's sum of 2**logits to total * 2**shift; the shift follows the maximum."""
    peak = torch.maximum(shift, tile.amax(1))
    total.mul_((shift - peak).exp2_()).add_(flush(tile - peak[:, None]).exp2_().sum(1))
    shift.copy_(peak)


def _checked_columns(
    view: Tensor, gathered_a: Tensor | None, gathered_b: Tensor | None, offset: int
) -> Tensor:
    """Return the candidates, [2 * batch, dim]."""
    if gathered_a is None or gathered_b is None:
        missing = "gathered_a" if gathered_a is None else "gathered_b"
        raise ConfigError(f"only one view is gathered: {missing} is None; gather both or neither")
    if gathered_a.shape != gathered_b.shape or gathered_a.shape[1:] != view.shape[1:]:
        raise ConfigError(
            "the gathered views are not [batch, dim] of one shape: they came as "
            f"{list(gathered_a.shape)} and {list(gathered_b.shape)} for rows of "
            f"{list(view.shape)}; gather every worker's rows of each view"
        )
    check_offset(offset, len(view), len(gathered_a))
    return torch.cat([gathered_a, gathered_b])


def _doubled_ids(sample_id: Tensor | None, gathered_sample_id: Tensor | None, batch: int) -> Ids | None:
    """Return ids of rows and columns, or None where there is nothing to mask."""
    ids = checked_ids(("sample_id", sample_id), ("gathered_sample_id", gathered_sample_id), batch)
    if ids is None or not has_duplicates(ids[1]):
        return None
    return ids[0].repeat(2), ids[1].repeat(2)
