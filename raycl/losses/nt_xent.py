"""NT-Xent, the loss of SimCLR (Chen et al., 2020)."""

import math
from dataclasses import dataclass
from typing import final

from torch import Tensor

from raycl.losses.objective import StoreBatch
from raycl.losses.views import ViewBatch, ViewsObjective, softmax_of_views


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
    weight: Tensor | None = None,
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
        weight: [local_batch], the weight of each sample's rows in the mean; of mean 1 over all workers for a
            weighted mean. No gradient.

    Returns:
        A scalar, float32 (float64 for float64 embeddings). It can be differentiated once.

    Raises:
        ConfigError: Shapes do not match, or the temperature is not above 0.
    """
    return NtXent(temperature=temperature).checked_loss(
        (view_a, view_b),
        sample_id,
        {"gathered_a": gathered_a, "gathered_b": gathered_b},
        gathered_sample_id,
        offset,
        weight,
    )


@final
@dataclass(frozen=True, kw_only=True)
class NtXent(ViewsObjective):
    """Each view against all other views of the global batch."""

    def loss(self, batch: ViewBatch) -> Tensor:
        """Return the loss of checked views."""
        return softmax_of_views(batch, temperature=self.temperature)

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the logarithm of the number of candidates."""
        return math.log(2 * batch_size - 1)
