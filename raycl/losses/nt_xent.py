"""NT-Xent, the loss of SimCLR (Chen et al., 2020)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self, final

import torch
from torch import Tensor

from raycl.distributed import exceeds_gather_limit, gather_detached, num_workers
from raycl.errors import ConfigError
from raycl.loss_specs import LossSettings
from raycl.losses.checks import check_offset, check_pair, check_sample_id, checked_ids, checked_temperature
from raycl.losses.example_ids import ExampleIds
from raycl.losses.false_negatives import FalseNegativeMask
from raycl.losses.mutual import MutualSoftmax
from raycl.losses.objective import StoreBatch, gathered
from raycl.losses.ring import evaluate_ring
from raycl.losses.softmax import RowGroup, RowLoss, cross_entropy, evaluate_softmax, row_blocks
from raycl.losses.tiled import (
    LOG2_E,
    Gradients,
    fused,
    gradient_buffers,
    longest,
    read_bound,
    scaled_gradients,
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

    Each of the 2 * local_batch rows has 2 * batch - 1 candidates: all rows of both views except
    itself. The loss is the **mean** over the 2 * local_batch rows (SimCLR's code adds the means of
    the two halves, which is twice as large). The [batch, batch] matrix is never materialized.

    Args:
        view_a: [local_batch, dim], this worker's embeddings of one view, usually of unit
            length; other lengths are supported. Half precision is computed in float32.
        view_b: [local_batch, dim], row i the positive of view_a's row i.
        temperature: above 0; a 0-d tensor that requires grad is learned, with an exact gradient.
        gathered_a: [batch, dim], view_a of all workers, gathered with gradient. The average of the
            gradients over workers (as in DDP) is the gradient of the whole batch.
        gathered_b: [batch, dim], view_b of all workers, gathered with gradient.
        offset: the index of this worker's first row in the gathered rows.
        sample_id: [local_batch] int64; a candidate with the row's id that is neither the row
            nor its positive is a false negative and is masked. Distinct ids need no mask.
        gathered_sample_id: [batch] int64, ids of the gathered rows.

    Returns:
        A scalar, float32 (float64 for float64 embeddings). It can be differentiated once.

    Raises:
        ConfigError: Shapes do not match, or the temperature is not above 0.
    """
    return softmax_of_views(
        view_a,
        view_b,
        temperature=temperature,
        gathered_a=gathered_a,
        gathered_b=gathered_b,
        offset=offset,
        sample_id=sample_id,
        gathered_sample_id=gathered_sample_id,
    )


def ring_nt_xent(view_a: Tensor, view_b: Tensor, sample_id: Tensor, *, temperature: float | Tensor) -> Tensor:
    """NT-Xent over the views of all workers, which pass around a ring instead of being gathered.

    Has the same value, gradients and errors as :func:`nt_xent` with gathered views; ``sample_id`` are
    this worker's ids. Collective in the forward pass only: every worker must scale the loss equally.
    """
    return ring_softmax_of_views(view_a, view_b, sample_id, temperature=temperature)


def softmax_of_views(
    view_a: Tensor,
    view_b: Tensor,
    *,
    temperature: float | Tensor,
    row_loss: RowLoss = cross_entropy,
    gathered_a: Tensor | None = None,
    gathered_b: Tensor | None = None,
    offset: int = 0,
    sample_id: Tensor | None = None,
    gathered_sample_id: Tensor | None = None,
) -> Tensor:
    """Return the mean of ``row_loss`` over both views, with the arguments and errors of :func:`nt_xent`."""
    check_pair("the two views", view_a, view_b)
    check_sample_id(sample_id, view_a)
    rows = working_precision(torch.cat([view_a, view_b]))
    temperature = checked_temperature(temperature, rows)
    if gathered_a is None and gathered_b is None:
        return fused(partial(_evaluate_local, sample_id=sample_id, row_loss=row_loss), rows, temperature)
    columns = gathered_views(view_a, gathered_a, gathered_b, offset).to(rows)
    ids = checked_ids(("sample_id", sample_id), ("gathered_sample_id", gathered_sample_id), len(columns) // 2)
    groups = two_views(len(view_a), len(columns) // 2, offset)
    return fused(
        partial(_evaluate_gathered, groups=groups, ids=ids, row_loss=row_loss), rows, columns, temperature
    )


def ring_softmax_of_views(
    view_a: Tensor,
    view_b: Tensor,
    sample_id: Tensor,
    *,
    temperature: float | Tensor,
    row_loss: RowLoss = cross_entropy,
) -> Tensor:
    """Return the mean of ``row_loss`` over both views, as :func:`ring_nt_xent`."""
    check_pair("the two views", view_a, view_b)
    check_sample_id(sample_id, view_a)
    rows = working_precision(torch.cat([view_a, view_b]))
    temperature = checked_temperature(temperature, rows)
    groups = two_views(len(view_a), len(view_a), 0)
    mask = ring_mask(sample_id, row_blocks(groups))
    return fused(partial(_evaluate_by_ring, groups=groups, mask=mask, row_loss=row_loss), rows, temperature)


def ring_mask(sample_id: Tensor, blocks: Sequence[slice]) -> FalseNegativeMask:
    """Return the mask of both views of this worker among both views of each worker; collective."""
    all_ids = gather_detached(sample_id)
    column_ids = all_ids.view(num_workers(), -1).repeat(1, 2).flatten()
    return FalseNegativeMask(
        (all_ids, all_ids), sample_id.repeat(2), column_ids, row_blocks=blocks, num_own=2
    )


def two_views(local_batch: int, batch: int, offset: int) -> tuple[RowGroup, RowGroup]:
    """Return the columns of the rows of each view and of their positives, among 2 * batch columns."""
    return (
        RowGroup(slice(0, local_batch), positive=batch + offset, excluded=(offset,)),
        RowGroup(slice(local_batch, 2 * local_batch), positive=offset, excluded=(batch + offset,)),
    )


def _evaluate_local(
    rows: Tensor, temperature: Tensor, *, sample_id: Tensor | None, row_loss: RowLoss, with_gradient: bool
) -> tuple[Tensor, Gradients]:
    """Return the loss of rows [2 * batch, dim] against themselves, and its gradients."""
    batch = len(rows) // 2
    cuts, mask = list(spans(0, len(rows), tile_size(rows))), None
    if sample_id is not None:
        ids = sample_id.repeat(2)
        mask = FalseNegativeMask((ids, ids), ids, ids, row_blocks=cuts, num_own=2)
    bound = read_bound(rows, longest(rows, rows.dtype), temperature, mask)
    scale = LOG2_E / temperature
    diagonals = (0, batch, -batch)  # the rows themselves, and the positives
    mutual = MutualSoftmax(
        rows, None, scale=scale, bound=bound, diagonals=diagonals, spans=(cuts, cuts), mask=mask
    )
    view_a, view_b = rows.chunk(2)
    softmax, _ = mutual.sums(((view_a * view_b).sum(1) * scale).repeat(2), row_loss)
    loss = softmax.loss.mean()
    if not with_gradient:
        return loss, ()
    gradient, _ = mutual.gradients(softmax, softmax, wanted=(True, True))
    assert gradient is not None, "requested above"
    grad = softmax.positive_weight.view(2, -1).sum(0)[:, None]  # per pair, equal for both views
    for part, other_view in zip(gradient.chunk(2), (view_b, view_a), strict=True):
        part.addcmul_(grad, other_view, value=-1)
    gradient.div_(temperature * len(rows))
    # Half, because each similarity contributes to the gradients of both of its rows.
    return loss, (gradient, temperature_gradient(rows, gradient, temperature, share=0.5))


def _evaluate_gathered(
    rows: Tensor,
    columns: Tensor,
    temperature: Tensor,
    *,
    groups: tuple[RowGroup, RowGroup],
    ids: tuple[Tensor, Tensor] | None,
    row_loss: RowLoss,
    with_gradient: bool,
) -> tuple[Tensor, Gradients]:
    """Return the loss of rows [2 * local_batch, dim] against columns [2 * batch, dim], and its gradients."""
    mask = None
    if ids is not None:
        own, gathered = (each.repeat(2) for each in ids)
        mask = FalseNegativeMask(
            (gathered, gathered), own, gathered, row_blocks=row_blocks(groups), num_own=2
        )
    bound = read_bound(rows, longest(columns, rows.dtype), temperature, mask)
    gradients = gradient_buffers(rows, columns, temperature=temperature, with_gradient=with_gradient)
    loss = evaluate_softmax(
        rows,
        columns,
        rows[:0],
        groups=groups,
        scale=LOG2_E / temperature,
        bound=bound,
        mask=mask,
        row_loss=row_loss,
        gradients=(*gradients, None),
    )
    return loss, scaled_gradients(rows, tuple(gradients), temperature, len(rows))


def _evaluate_by_ring(
    rows: Tensor,
    temperature: Tensor,
    *,
    groups: tuple[RowGroup, RowGroup],
    mask: FalseNegativeMask,
    row_loss: RowLoss,
    with_gradient: bool,
) -> tuple[Tensor, Gradients]:
    """Return the loss of both views against the views of all workers, and one gradient for both roles."""
    loss, (as_rows, as_columns, _, at_temperature) = evaluate_ring(
        rows,
        rows,
        rows[:0],
        temperature,
        groups=groups,
        masks=(mask, mask),
        row_loss=row_loss,
        with_gradient=with_gradient,
    )
    if as_rows is not None and as_columns is not None:
        as_rows += as_columns
    return loss, (as_rows, at_temperature)


def gathered_views(view: Tensor, gathered_a: Tensor | None, gathered_b: Tensor | None, offset: int) -> Tensor:
    """Return the views of all workers, [2 * batch, dim]; raise unless they match this worker's."""
    if gathered_a is None or gathered_b is None:
        missing = "gathered_a" if gathered_a is None else "gathered_b"
        raise ConfigError(f"only one view is gathered: {missing} is None; gather both or neither")
    if gathered_a.shape != gathered_b.shape or gathered_a.shape[1:] != view.shape[1:]:
        raise ConfigError(
            "the gathered views must be [batch, dim] of the same shape, got "
            f"{list(gathered_a.shape)} and {list(gathered_b.shape)} for rows of "
            f"{list(view.shape)}; gather the rows of every worker for both"
        )
    check_offset(offset, len(view), len(gathered_a))
    return torch.cat([gathered_a, gathered_b])


@final
@dataclass(frozen=True, kw_only=True)
class NtXent:
    """Each view against all other views of the global batch."""

    temperature: float | Tensor

    @classmethod
    def build(cls, settings: LossSettings) -> Self:
        """Return the loss with these settings."""
        return cls(temperature=settings.temperature)

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: ExampleIds) -> Tensor:
        """Return the loss; NT-Xent uses no store."""
        assert key is not None, "the configuration gives NT-Xent two views"
        if exceeds_gather_limit(query, key):
            return ring_nt_xent(query, key, ids.query, temperature=self.temperature)
        everyone = gathered(query, key, sample_id=ids.query)
        return nt_xent(query, key, temperature=self.temperature, sample_id=ids.query, **everyone)

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the logarithm of the number of candidates."""
        return math.log(2 * batch_size - 1)
