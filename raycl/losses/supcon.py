"""SupCon, the supervised contrastive loss (Khosla et al., 2020)."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Self, final

import torch
from torch import Tensor

from raycl.distributed import exceeds_gather_limit, gather_detached, visit_all
from raycl.loss_specs import LossSettings
from raycl.losses.checks import (
    check_companion,
    check_offset,
    check_pair,
    check_sample_id,
    checked_ids,
    checked_temperature,
)
from raycl.losses.example_ids import ExampleIds
from raycl.losses.false_negatives import count_same
from raycl.losses.nt_xent import gathered_views
from raycl.losses.objective import StoreBatch, gathered
from raycl.losses.ring import evaluate_ring, subtract_positives
from raycl.losses.softmax import RowGroup, evaluate_softmax
from raycl.losses.tiled import (
    LOG2_E,
    Gradients,
    add_rows,
    fused,
    gradient_buffers,
    longest,
    read_bound,
    scaled_gradients,
    working_precision,
)


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

    Returns:
        A scalar, float32 (float64 for float64 embeddings). It can be differentiated once.

    Raises:
        ConfigError: Shapes do not match, or the temperature is not above 0.
    """
    rows, temperature = _checked_rows(view_a, view_b, label, temperature)
    columns, labels = rows, label
    if gathered_a is None and gathered_b is None:
        check_companion("gathered_label", gathered_label, "gathered_a", None)
        check_offset(offset, len(view_a), len(view_a))
    else:
        columns = gathered_views(view_a, gathered_a, gathered_b, offset).to(rows)
        ids = checked_ids(("label", label), ("gathered_label", gathered_label), len(columns) // 2)
        assert ids is not None, "the label is given"
        labels = ids[1]
    evaluate = partial(_evaluate, labels=(label, labels), offset=offset)
    return fused(evaluate, rows, columns, temperature)


def ring_supcon(view_a: Tensor, view_b: Tensor, label: Tensor, *, temperature: float | Tensor) -> Tensor:
    """SupCon over the views of all workers, which pass around a ring instead of being gathered.

    Has the same value, gradients and errors as :func:`supcon` with gathered views; ``label`` are this
    worker's labels. Collective in the forward pass only: every worker must scale the loss equally.
    """
    rows, temperature = _checked_rows(view_a, view_b, label, temperature)
    return fused(partial(_evaluate_by_ring, labels=(label, gather_detached(label))), rows, temperature)


def _checked_rows(
    view_a: Tensor, view_b: Tensor, label: Tensor, temperature: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return both views, [2 * local_batch, dim], and the temperature."""
    check_pair("the two views", view_a, view_b)
    check_sample_id(label, view_a, "label")
    rows = working_precision(torch.cat([view_a, view_b]))
    return rows, checked_temperature(temperature, rows)


def _groups(local_batch: int, batch: int, offset: int) -> tuple[RowGroup, RowGroup]:
    """Return the rows of each view, which exclude themselves as candidates, among 2 * batch columns."""
    return (
        RowGroup(slice(0, local_batch), positive=None, excluded=(offset,)),
        RowGroup(slice(local_batch, 2 * local_batch), positive=None, excluded=(batch + offset,)),
    )


def _evaluate(
    rows: Tensor,
    columns: Tensor,
    temperature: Tensor,
    *,
    labels: tuple[Tensor, Tensor],
    offset: int,
    with_gradient: bool,
) -> tuple[Tensor, Gradients]:
    """Return the loss of rows [2 * local_batch, dim] against columns [2 * batch, dim], and its gradients.

    The mean of -log p is a logsumexp over candidates minus the mean logit of the positives.
    """
    local_batch, batch = len(rows) // 2, len(columns) // 2
    row_label, column_label = (each.repeat(2) for each in labels)
    bound = read_bound(rows, longest(columns, rows.dtype), temperature)
    at_rows, at_columns = gradient_buffers(
        rows, columns, temperature=temperature, with_gradient=with_gradient
    )
    groups = _groups(local_batch, batch, offset)
    loss = evaluate_softmax(
        rows,
        columns,
        rows[:0],
        groups=groups,
        scale=LOG2_E / temperature,
        bound=bound,
        gradients=(at_rows, at_columns, None),
    )
    weight = _weights(row_label, column_label, rows)
    positives = weight * (_class_sums(row_label, columns, column_label) - rows)
    loss = loss - (rows * positives).sum() / (temperature * len(rows))
    if at_rows is not None:
        at_rows -= positives
    if at_columns is not None:
        weighted = weight * rows
        at_columns -= _class_sums(column_label, weighted, row_label)
        for view, part in enumerate(weighted.chunk(2)):
            first = view * batch + offset
            at_columns[first : first + local_batch] += part
    return loss, scaled_gradients(rows, (at_rows, at_columns), temperature, len(rows))


def _evaluate_by_ring(
    rows: Tensor, temperature: Tensor, *, labels: tuple[Tensor, Tensor], with_gradient: bool
) -> tuple[Tensor, Gradients]:
    """Return the loss of both views against the views of all workers, and one gradient for both roles."""
    local_batch = len(rows) // 2
    row_label, column_label = (each.repeat(2) for each in labels)
    found = evaluate_ring(
        rows,
        rows,
        rows[:0],
        temperature,
        groups=_groups(local_batch, local_batch, 0),
        masks=(None, None),
        with_gradient=with_gradient,
    )
    positives = -rows

    def meet(worker: int, visiting: Tensor) -> None:
        theirs = labels[1][worker * local_batch : (worker + 1) * local_batch].repeat(2)
        positives.add_(_class_sums(row_label, visiting, theirs))

    visit_all(meet, rows)
    positives *= _weights(row_label, column_label, rows)
    return subtract_positives(found, rows, positives, temperature)


def _weights(row_label: Tensor, column_label: Tensor, rows: Tensor) -> Tensor:
    """Return one over the number of positives of each row, [num_rows, 1]."""
    return 1 / (count_same(row_label, column_label) - 1).to(rows)[:, None]


def _class_sums(label: Tensor, columns: Tensor, column_label: Tensor) -> Tensor:
    """Return the sum of the columns with each label, [num_labels, dim]."""
    ordered = column_label.sort().values
    totals = torch.zeros_like(columns)
    add_rows(totals, torch.searchsorted(ordered, column_label), columns)
    place = torch.searchsorted(ordered, label).clamp(max=len(ordered) - 1)
    return torch.where((ordered[place] == label)[:, None], totals[place], 0.0)


@final
@dataclass(frozen=True, kw_only=True)
class SupCon:
    """Each view against all other views of the global batch; the views of its class are positives."""

    temperature: float | Tensor

    @classmethod
    def build(cls, settings: LossSettings) -> Self:
        """Return the loss with these settings."""
        return cls(temperature=settings.temperature)

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: ExampleIds) -> Tensor:
        """Return the loss; SupCon uses no store."""
        assert key is not None, "the configuration gives SupCon two views"
        assert ids.label is not None, "the configuration gives SupCon labels"
        if exceeds_gather_limit(query, key):
            return ring_supcon(query, key, ids.label, temperature=self.temperature)
        everyone = gathered(query, key, label=ids.label)
        return supcon(query, key, ids.label, temperature=self.temperature, **everyone)

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the logarithm of the number of candidates."""
        return math.log(2 * batch_size - 1)
