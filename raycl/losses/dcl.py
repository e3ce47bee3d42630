"""Decoupled contrastive learning, DCL and DCLW (Yeh et al., 2022)."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Self, final

import torch
from torch import Tensor

from raycl.distributed import exceeds_gather_limit, gather_detached
from raycl.loss_specs import LossSettings
from raycl.losses.checks import check_pair
from raycl.losses.example_ids import ExampleIds
from raycl.losses.nt_xent import ring_softmax_of_views, softmax_of_views
from raycl.losses.objective import StoreBatch, gathered
from raycl.losses.softmax import RowLoss, Softmax
from raycl.losses.tiled import LOG2_E, working_precision

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
    everyone = None
    if gathered_a is not None and gathered_b is not None:
        check_pair("the gathered views", gathered_a, gathered_b)
        everyone = _similarity(gathered_a, gathered_b)
    return softmax_of_views(
        view_a,
        view_b,
        temperature=temperature,
        row_loss=_row_loss(_similarity(view_a, view_b), everyone, sigma),
        gathered_a=gathered_a,
        gathered_b=gathered_b,
        offset=offset,
        sample_id=sample_id,
        gathered_sample_id=gathered_sample_id,
    )


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
    similarity = _similarity(view_a, view_b)
    row_loss = _row_loss(similarity, gather_detached(similarity), sigma)
    return ring_softmax_of_views(view_a, view_b, sample_id, temperature=temperature, row_loss=row_loss)


def _similarity(view_a: Tensor, view_b: Tensor) -> Tensor:
    """Return the similarity of the views of each sample, without gradient, [num_samples]."""
    return (working_precision(view_a.detach()) * working_precision(view_b.detach())).sum(1)


def _row_loss(own: Tensor, everyone: Tensor | None, sigma: float | None) -> RowLoss:
    """Return the loss of the rows of both views, given the similarities of this worker's and all samples."""
    weight = torch.ones_like(own)
    if sigma is not None:
        everyone = own if everyone is None else everyone
        log_mean = (everyone / sigma).logsumexp(0) - math.log(len(everyone))
        weight = 2 - (own / sigma - log_mean).exp()
    return partial(_decoupled, weight=weight.repeat(2))


def _decoupled(
    positive: Tensor | None, shift: Tensor, total: Tensor, block: slice, *, weight: Tensor
) -> Softmax:
    """Return the logsumexp over the negatives, 0 without any, minus weight [num_rows] * the positive's logit."""
    assert positive is not None, "each view has a positive"
    logsumexp = torch.where(total == 0, 0.0, shift + total.log2())
    return Softmax((logsumexp - weight[block] * positive) / LOG2_E, weight[block], logsumexp)


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
