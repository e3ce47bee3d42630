"""Decoupled contrastive learning, DCL and DCLW (Yeh et al., 2022)."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Self, final

import torch
from torch import Tensor

from raycl.distributed import exceeds_gather_limit, gather_detached
from raycl.loss_specs import LossSettings
from raycl.losses.checks import check_pair, check_sample_id, checked_ids, checked_temperature
from raycl.losses.example_ids import ExampleIds
from raycl.losses.false_negatives import FalseNegativeMask
from raycl.losses.nt_xent import gathered_views, ring_mask
from raycl.losses.objective import StoreBatch, gathered
from raycl.losses.ring import evaluate_ring, subtract_positives
from raycl.losses.softmax import RowGroup, evaluate_softmax, row_blocks
from raycl.losses.tiled import (
    LOG2_E,
    Gradients,
    fused,
    gradient_buffers,
    longest,
    read_bound,
    scaled_gradients,
    working_precision,
)

SIGMA = 0.5  # of DCLW, as in the paper


def dcl(
    view_a: Tensor,
    view_b: Tensor,
    *,
    temperature: float | Tensor,
    sigma: float | None = None,
    gathered_a: Tensor | None = None,
    gathered_b: Tensor | None = None,
    offset: int = 0,
    sample_id: Tensor | None = None,
    gathered_sample_id: Tensor | None = None,
) -> Tensor:
    """Compare the two views of each sample with the views of all other samples (Yeh et al., 2022, equation 6).

    As NT-Xent without the positive in the denominator. The loss of a row is -w * logit(positive) plus the
    logsumexp of the logits of its negatives, which are both views of all other samples; without negatives
    the second term is 0. The loss is the **mean** over the 2 * local_batch rows. The [batch, batch] matrix
    is never materialized.

    Args:
        view_a: [local_batch, dim], this worker's embeddings of one view, usually of unit length. Half
            precision is computed in float32.
        view_b: [local_batch, dim], row i the positive of view_a's row i.
        temperature: above 0; a 0-d tensor that requires grad is learned, with an exact gradient.
        sigma: None for DCL, where w is 1. For DCLW, w = 2 - exp(s / sigma) / mean(exp(s / sigma)), with the
            similarity s of a sample's views and the mean over the samples of all workers; without gradient.
        gathered_a: [batch, dim], view_a of all workers, gathered with gradient. The average of the
            gradients over workers (as in DDP) is the gradient of the whole batch.
        gathered_b: [batch, dim], view_b of all workers, gathered with gradient.
        offset: the index of this worker's first row in the gathered rows.
        sample_id: [local_batch] int64; rows with equal ids are the same sample, not negatives.
        gathered_sample_id: [batch] int64, ids of the gathered rows.

    Returns:
        A scalar, float32 (float64 for float64 embeddings). It can be differentiated once.

    Raises:
        ConfigError: Shapes do not match, or the temperature is not above 0.
    """
    check_pair("the two views", view_a, view_b)
    check_sample_id(sample_id, view_a)
    rows = working_precision(torch.cat([view_a, view_b]))
    temperature = checked_temperature(temperature, rows)
    columns, ids = rows, None if sample_id is None else (sample_id, sample_id)
    if gathered_a is not None or gathered_b is not None:
        columns = gathered_views(view_a, gathered_a, gathered_b, offset).to(rows)
        ids = checked_ids(
            ("sample_id", sample_id), ("gathered_sample_id", gathered_sample_id), len(columns) // 2
        )
    return fused(partial(_evaluate, offset=offset, ids=ids, sigma=sigma), rows, columns, temperature)


def ring_dcl(
    view_a: Tensor,
    view_b: Tensor,
    sample_id: Tensor,
    *,
    temperature: float | Tensor,
    sigma: float | None = None,
) -> Tensor:
    """DCL over the views of all workers, which pass around a ring instead of being gathered.

    Has the same value, gradients and errors as :func:`dcl` with gathered views; ``sample_id`` are this
    worker's ids. Collective in the forward pass only: every worker must scale the loss equally.
    """
    check_pair("the two views", view_a, view_b)
    check_sample_id(sample_id, view_a)
    rows = working_precision(torch.cat([view_a, view_b]))
    groups = _groups(len(view_a), len(view_a), 0)
    evaluate = partial(
        _evaluate_by_ring, groups=groups, mask=ring_mask(sample_id, row_blocks(groups)), sigma=sigma
    )
    return fused(evaluate, rows, checked_temperature(temperature, rows))


def _groups(local_batch: int, batch: int, offset: int) -> tuple[RowGroup, RowGroup]:
    """Return the rows of each view, which have both views of their sample as no candidates."""
    excluded = (offset, batch + offset)
    return (
        RowGroup(slice(0, local_batch), positive=None, excluded=excluded),
        RowGroup(slice(local_batch, 2 * local_batch), positive=None, excluded=excluded),
    )


def _evaluate(
    rows: Tensor,
    columns: Tensor,
    temperature: Tensor,
    *,
    offset: int,
    ids: tuple[Tensor, Tensor] | None,
    sigma: float | None,
    with_gradient: bool,
) -> tuple[Tensor, Gradients]:
    """Return the loss of rows [2 * local_batch, dim] against columns [2 * batch, dim], and its gradients."""
    local_batch, batch, mask = len(rows) // 2, len(columns) // 2, None
    groups = _groups(local_batch, batch, offset)
    if ids is not None:
        own_id, column_id = (each.repeat(2) for each in ids)
        blocks = row_blocks(groups)
        mask = FalseNegativeMask((column_id, column_id), own_id, column_id, row_blocks=blocks, num_own=2)
    bound = read_bound(rows, longest(columns, rows.dtype), temperature, mask)
    at_rows, at_columns = gradient_buffers(
        rows, columns, temperature=temperature, with_gradient=with_gradient
    )
    loss = evaluate_softmax(
        rows,
        columns,
        rows[:0],
        groups=groups,
        scale=LOG2_E / temperature,
        bound=bound,
        mask=mask,
        gradients=(at_rows, at_columns, None),
    )
    own = slice(offset, offset + local_batch)
    weight = _weights((columns[:batch] * columns[batch:]).sum(1), sigma)[own].repeat(2)[:, None]
    positives = weight * torch.cat([columns[batch:][own], columns[:batch][own]])
    loss = loss - (rows * positives).sum() / (temperature * len(rows))
    if at_rows is not None:
        at_rows -= positives
    if at_columns is not None:
        pull_a, pull_b = (weight * rows).chunk(2)
        at_columns[batch:][own] -= pull_a
        at_columns[:batch][own] -= pull_b
    return loss, scaled_gradients(rows, (at_rows, at_columns), temperature, len(rows))


def _evaluate_by_ring(
    rows: Tensor,
    temperature: Tensor,
    *,
    groups: tuple[RowGroup, RowGroup],
    mask: FalseNegativeMask,
    sigma: float | None,
    with_gradient: bool,
) -> tuple[Tensor, Gradients]:
    """Return the loss of both views against the views of all workers, and one gradient for both roles."""
    found = evaluate_ring(
        rows, rows, rows[:0], temperature, groups=groups, masks=(mask, mask), with_gradient=with_gradient
    )
    view_a, view_b = rows.chunk(2)
    similarity = (view_a * view_b).sum(1)
    weight = _weights(gather_detached(similarity), sigma, own=similarity).repeat(2)[:, None]
    return subtract_positives(found, rows, weight * torch.cat([view_b, view_a]), temperature)


def _weights(similarity: Tensor, sigma: float | None, *, own: Tensor | None = None) -> Tensor:
    """Return the weight of each positive, given the similarities of the views of all samples."""
    own = similarity if own is None else own
    if sigma is None:
        return torch.ones_like(own)
    log_mean = (similarity / sigma).logsumexp(0) - math.log(len(similarity))
    return 2 - (own / sigma - log_mean).exp()


@final
@dataclass(frozen=True, kw_only=True)
class Dcl:
    """Each view against the views of all other samples of the global batch; DCLW with a ``sigma``."""

    temperature: float | Tensor
    sigma: float | None = None

    @classmethod
    def build(cls, settings: LossSettings) -> Self:
        """Return DCL with these settings."""
        return cls(temperature=settings.temperature)

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: ExampleIds) -> Tensor:
        """Return the loss; DCL uses no store."""
        assert key is not None, "the configuration gives DCL two views"
        if exceeds_gather_limit(query, key):
            return ring_dcl(query, key, ids.query, temperature=self.temperature, sigma=self.sigma)
        everyone = gathered(query, key, sample_id=ids.query)
        return dcl(
            query, key, temperature=self.temperature, sigma=self.sigma, sample_id=ids.query, **everyone
        )

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the logarithm of the number of negatives."""
        return math.log(2 * batch_size - 2)


@final
class Dclw:
    """DCL with weighted positives."""

    @staticmethod
    def build(settings: LossSettings) -> Dcl:
        """Return DCLW with these settings."""
        return Dcl(temperature=settings.temperature, sigma=SIGMA)
