"""SupCon, the supervised contrastive loss (Khosla et al., 2020)."""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor

from raycl.distributed import visit_all
from raycl.losses.dcl import decoupled
from raycl.losses.objective import StoreBatch
from raycl.losses.tiled import add_rows
from raycl.losses.views import Layout, ViewBatch, ViewsObjective, softmax_of_views


def supcon(
    view_a: Tensor,
    view_b: Tensor,
    label: Tensor,
    *,
    temperature: float | Tensor,
    gathered_a: Tensor | None = None,
    gathered_b: Tensor | None = None,
    gathered_label: Tensor | None = None,
    offset: int = 0,
    weight: Tensor | None = None,
) -> Tensor:
    """Classify the rows of each row's class among all other rows (Khosla et al., 2020, equation 2).

    The positives of a row are its other view and both views of all samples with its label. The loss of a
    row is the mean of -log p over its positives, where p is the softmax over all rows except itself. The
    loss is the **mean** over the 2 * local_batch rows. If all labels differ, it is NT-Xent. The
    [batch, batch] matrix is never materialized.

    Args:
        view_a: [local_batch, dim], this worker's embeddings of one view. Half precision is computed in
            float32.
        view_b: [local_batch, dim], the other view of the same samples.
        label: [local_batch] int64, the class of each sample; an unlabeled sample needs a label of its own.
        temperature: above 0; a 0-d tensor that requires grad is learned, with an exact gradient.
        gathered_a: [batch, dim], view_a of all workers, gathered with gradient. The average of the
            gradients over workers (as in DDP) is the gradient of the whole batch.
        gathered_b: [batch, dim], view_b of all workers, gathered with gradient.
        gathered_label: [batch] int64, labels of the gathered rows.
        offset: the index of this worker's first row in the gathered rows.
        weight: [local_batch], the weight of each sample's rows in the mean; of mean 1 over all workers for a
            weighted mean. No gradient.

    Returns:
        A scalar, float32 (float64 for float64 embeddings). It can be differentiated once.

    Raises:
        ConfigError: Shapes do not match, or the temperature is not above 0.
    """
    return SupCon(temperature=temperature).checked_loss(
        (view_a, view_b),
        label,
        {"gathered_a": gathered_a, "gathered_b": gathered_b},
        gathered_label,
        offset,
        weight,
    )


@final
class _ClassMeans:
    """The mean of the positives of each row: all other views of its class."""

    exclude_samples: ClassVar[bool] = False

    def __init__(self, rows: Tensor, columns: Tensor | None, layout: Layout, *, batch: ViewBatch) -> None:
        """Sum the views of each class of this worker; collective if the columns pass around a ring."""
        _, label, gathered, weight = batch
        assert label is not None, "labels are required"
        self._rows, self._layout = rows.unflatten(0, (layout.num_views, -1)), layout
        labels, first, size = label, 0, len(label)
        if gathered is not None and gathered.ids is not None:
            labels, first = gathered.ids, gathered.offset
        ordered = label.sort().values
        place = torch.searchsorted(ordered, labels).clamp(max=size - 1)
        # The place of the class of each sample; the last one is for classes of other workers.
        self._places = torch.where(ordered[place] == labels, place, size)
        self._own = self._places[first : first + size]
        totals, weighted_totals = rows.new_zeros(2, size + 1, rows.shape[1])

        def add(worker: int, visiting: Tensor, weight: Tensor | None = None) -> None:
            views = visiting.unflatten(0, (layout.num_views, -1)).sum(0)
            places = self._places[worker * size :][: len(views)]
            add_rows(totals, places, views)
            if weight is not None:
                add_rows(weighted_totals, places, weight[:, None] * views)

        if columns is None:
            visit_all(add, rows, *(() if weight is None else (weight,)))
        else:
            add(0, columns)
        counts = rows.new_zeros(size + 1, 1)
        add_rows(counts, self._places, rows.new_ones(len(labels), 1))
        self._share = 1 / (layout.num_views * counts[self._own] - 1)  # of each positive in the mean
        self._means = (self._share * (totals[self._own] - self._rows)).flatten(0, 1)
        # The gradients of columns that are the rows of all workers, if they are known.
        self._at_columns = None
        if weight is None and (columns is None or columns is rows):
            self._at_columns = self._means
        elif weight is not None and columns is None:
            of_others = weighted_totals[self._own] - weight[:, None] * self._rows
            self._at_columns = (self._share * of_others).flatten(0, 1)

    def logits(self, scale: Tensor) -> Tensor:
        """Return the base-2 mean logits of the positives, [num_rows]."""
        return (self._rows.flatten(0, 1) * self._means).sum(1) * scale

    def subtract(self, weight: Tensor, at_rows: Tensor | None, at_columns: Tensor | None) -> None:
        """Subtract the gradients of ``weight`` * mean logits from buffers, unscaled."""
        if at_rows is not None:
            at_rows.addcmul_(weight[:, None], self._means, value=-1)
        if at_columns is None:
            return
        if self._at_columns is not None:
            at_columns -= self._at_columns
            return
        shares = weight.view(self._layout.num_views, -1, 1) * self._share * self._rows
        totals = self._rows.new_zeros(len(self._own) + 1, shares.shape[2])
        add_rows(totals, self._own, shares.sum(0))
        at_columns.unflatten(0, (self._layout.num_views, -1)).sub_(totals[self._places])
        self._layout.own(at_columns).add_(shares)


@final
@dataclass(frozen=True, kw_only=True)
class SupCon(ViewsObjective):
    """Each view against all other views of the global batch; the views of its class are positives."""

    id_name: ClassVar[str] = "label"

    def loss(self, batch: ViewBatch) -> Tensor:
        """Return the loss of checked views."""
        # The mean of -log p over positives is the logsumexp over candidates minus the mean logit of the positives.
        return softmax_of_views(
            batch._replace(ids=None),
            temperature=self.temperature,
            row_loss=decoupled,
            positives=partial(_ClassMeans, batch=batch),
        )

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the logarithm of the number of candidates."""
        return math.log(2 * batch_size - 1)
