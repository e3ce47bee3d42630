"""Losses of any number of views of each sample (Poly-View Contrastive Learning: Shidani et al., 2024)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from raycl.errors import ConfigError
from raycl.loss_specs import join_names
from raycl.losses.objective import StoreBatch
from raycl.losses.softmax import Softmax
from raycl.losses.tiled import LOG2_E
from raycl.losses.views import ViewBatch, ViewsObjective, softmax_of_views

MEANS = ("geometric", "arithmetic")


def poly_view(
    views: Sequence[Tensor],
    *,
    temperature: float | Tensor,
    mean: str = "geometric",
    gathered_views: Sequence[Tensor] | None = None,
    offset: int = 0,
    sample_id: Tensor | None = None,
    gathered_sample_id: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Classify each other view of a row's sample among all views of other samples (Shidani et al., 2024).

    With m views of each of n samples, a row has m - 1 positives, the other views of its sample. For each of them,
    p is the softmax of its logit over itself and the m * (n - 1) views of other samples; the other positives are
    no candidates. The loss of a row is -log of the ``mean`` of p over the row's positives: of the ``geometric``
    mean, which is the mean of -log p, or of the ``arithmetic`` one, which asks less of a positive that is far from
    the row. The loss is the **mean** over the m * local_batch rows. Two views give NT-Xent for both. The
    [batch, batch] matrix is never materialized.

    Args:
        views: two or more views, this worker's embeddings [local_batch, dim] each, usually of unit length; row i is
            of the same sample in all. Half precision is computed in float32.
        temperature: above 0; a 0-d tensor that requires grad is learned, with an exact gradient.
        mean: ``geometric`` or ``arithmetic``.
        gathered_views: the same views of all workers, [batch, dim] each, gathered with gradient. The average of the
            gradients over workers (as in DDP) is the gradient of the whole batch.
        offset: the index of this worker's first row in the gathered rows.
        sample_id: [local_batch] int64; rows with equal ids are the same sample, not negatives.
        gathered_sample_id: [batch] int64, ids of the gathered rows.
        weight: [local_batch], the weight of each sample's rows in the mean; of mean 1 over all workers for a
            weighted mean. No gradient.

    Returns:
        A scalar, float32 (float64 for float64 embeddings). It can be differentiated once.

    Raises:
        ConfigError: There is a single view, shapes do not match, the temperature is not above 0, or the mean is unknown.
    """
    if len(views) < 2:
        raise ConfigError(f"poly_view compares the views of each sample, got {len(views)}; pass two or more")
    if mean not in MEANS:
        raise ConfigError(f"{mean!r} is not a mean of poly_view; choose {join_names(MEANS)}")
    if gathered_views is not None and len(gathered_views) != len(views):
        raise ConfigError(
            f"got {len(gathered_views)} gathered_views for {len(views)} views; gather each of them"
        )
    gathered = [None] * len(views) if gathered_views is None else gathered_views
    return PolyView(temperature=temperature, view_mean=mean, num_views=len(views)).checked_loss(
        views,
        sample_id,
        {f"gathered_views[{number}]": each for number, each in enumerate(gathered)},
        gathered_sample_id,
        offset,
        weight,
    )


def mean_over_positives(
    positive: Tensor, shift: Tensor, total: Tensor, block: slice, *, arithmetic: bool
) -> Softmax:
    """Return -log of the mean of p over several positives of each row, whose logits are [block, num_positives]."""
    positive = positive.view(len(shift), -1)
    excess = ((shift + total.log2())[:, None] - positive) / LOG2_E
    loss = torch.logaddexp(excess, torch.zeros_like(excess))  # -log p
    # The weights of the gradients of -log p, which sum to 1.
    log_share = torch.full_like(loss, -math.log(loss.shape[1]))
    mean = loss.mean(1)
    if arithmetic:
        log_share = (-loss).log_softmax(1)
        mean = math.log(loss.shape[1]) - (-loss).logsumexp(1)
    logsumexp = -(log_share - positive / LOG2_E - loss).logsumexp(1) * LOG2_E
    return Softmax(mean, log_share.exp() * excess.sigmoid(), logsumexp)


@final
@dataclass(frozen=True, kw_only=True)
class PolyView(ViewsObjective):
    """Each view against all views of other samples of the global batch; the other views are positives."""

    view_mean: str = "geometric"
    num_views: int = 2

    def loss(self, batch: ViewBatch) -> Tensor:
        """Return the loss of checked views."""
        row_loss = partial(mean_over_positives, arithmetic=self.view_mean == "arithmetic")
        return softmax_of_views(batch, temperature=self.temperature, row_loss=row_loss)

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the logarithm of the number of candidates."""
        return math.log(self.num_views * (batch_size - 1) + 1)
