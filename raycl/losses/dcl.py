"""Decoupled contrastive learning, DCL and DCLW (Yeh et al., 2022)."""

import math
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from raycl.distributed import gather_detached
from raycl.errors import ConfigError
from raycl.losses.objective import StoreBatch
from raycl.losses.softmax import Softmax
from raycl.losses.tiled import LOG2_E, working_precision
from raycl.losses.views import ViewBatch, ViewsObjective, softmax_of_views


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
    weight: Tensor | None = None,
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
        weight: [local_batch], the weight of each sample's rows in the mean; of mean 1 over all workers for a
            weighted mean. No gradient.

    Returns:
        A scalar, float32 (float64 for float64 embeddings). It can be differentiated once.

    Raises:
        ConfigError: Shapes do not match, or the temperature or sigma is not above 0.
    """
    if sigma is not None and not sigma > 0:
        raise ConfigError(f"sigma must be above 0, or None for DCL, got {sigma}; the paper has 0.5")
    return Dcl(temperature=temperature, sigma=sigma).checked_loss(
        (view_a, view_b),
        sample_id,
        {"gathered_a": gathered_a, "gathered_b": gathered_b},
        gathered_sample_id,
        offset,
        weight,
    )


def _weights(batch: ViewBatch, sigma: float) -> Tensor:
    """Return the weight of each sample's positives, [local_batch]; collective with a ring."""
    own = of_all = _similarity(*batch.views)
    if batch.gathered is not None:
        views = batch.gathered.views
        of_all = gather_detached(own) if views is None else _similarity(*views)
    log_mean = (of_all / sigma).logsumexp(0) - math.log(len(of_all))
    return 2 - (own / sigma - log_mean).exp()


def _similarity(view_a: Tensor, view_b: Tensor) -> Tensor:
    """Return the similarity of the views of each sample, without gradient, [num_samples]."""
    return (working_precision(view_a.detach()) * working_precision(view_b.detach())).sum(1)


def decoupled(
    positive: Tensor, shift: Tensor, total: Tensor, block: slice, *, weight: Tensor | None = None
) -> Softmax:
    """Return the logsumexp over the candidates, 0 without any, minus the logit of the positive.

    ``weight`` [num_rows] multiplies the logits of the positives.
    """
    of_positive = torch.ones_like(positive) if weight is None else weight[block]
    logsumexp = torch.where(total == 0, 0.0, shift + total.log2())
    return Softmax((logsumexp - of_positive * positive) / LOG2_E, of_positive, logsumexp)


@final
@dataclass(frozen=True, kw_only=True)
class Dcl(ViewsObjective):
    """Each view against the views of all other samples of the global batch; DCLW with a ``sigma``."""

    sigma: float | None = None

    def loss(self, batch: ViewBatch) -> Tensor:
        """Return the loss of checked views."""
        of_positives = None if self.sigma is None else _weights(batch, self.sigma).repeat(2)
        row_loss = partial(decoupled, weight=of_positives)
        return softmax_of_views(batch, temperature=self.temperature, row_loss=row_loss)

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the logarithm of the number of negatives."""
        return math.log(2 * batch_size - 2)
