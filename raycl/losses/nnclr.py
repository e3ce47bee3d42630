"""The loss of NNCLR (Dwibedi et al., 2021): the nearest neighbor of a projection takes its place."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from raycl.losses.checks import check_columns, check_pair
from raycl.losses.example_ids import ExampleIds
from raycl.losses.info_nce import InfoNce, info_nce
from raycl.losses.objective import StoreBatch
from raycl.losses.tiled import BLOCK_ROWS, product, spans, tile_size, working_precision


def nnclr(
    prediction: Tensor,
    projection: Tensor,
    support: Tensor,
    *,
    temperature: float | Tensor,
    gathered_prediction: Tensor | None = None,
    offset: int = 0,
    sample_id: Tensor | None = None,
    gathered_sample_id: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Classify each prediction among the batch's by its sample's neighbor (Dwibedi et al., 2021, equation 3).

    With the neighbor n_i of projection i and predictions p, the loss is the **mean** over i of
    -log(exp(n_i p_i / temperature) / sum over k of exp(n_i p_k / temperature)). The paper adds the two
    directions of a pair of views, each with half the weight; call this once per direction. The neighbor may
    be an older row of the sample itself.

    Args:
        prediction: [local_batch, dim], the predictions of one view, usually of unit length.
        projection: [local_batch, dim], row i the projection of another view of prediction i; it gets no
            gradient.
        support: [num_rows, dim], the support set, such as the rows of a queue; half precision is supported.
            Without rows, a projection is its own neighbor.
        temperature: above 0; a 0-d tensor that requires grad is learned, with an exact gradient.
        gathered_prediction: [batch, dim], the predictions of all workers, gathered with gradient.
        offset: the index of this worker's first prediction in the gathered predictions.
        sample_id: [local_batch] int64; predictions of other rows with the same id are masked.
        gathered_sample_id: [batch] int64, ids of the gathered predictions.
        weight: [local_batch], the weight of each sample in the mean; of mean 1 over all workers for a
            weighted mean. No gradient.

    Returns:
        A scalar, float32 (float64 for float64 embeddings). It can be differentiated once, with respect to
        the predictions and the temperature.

    Raises:
        ConfigError: Shapes or arguments do not match, or the temperature is not above 0.
    """
    check_pair("prediction and projection", prediction, projection)
    check_columns("the support set", support, projection)
    return info_nce(
        nearest_rows(projection, support),
        prediction,
        temperature=temperature,
        gathered_key=gathered_prediction,
        offset=offset,
        sample_id=sample_id,
        gathered_sample_id=gathered_sample_id,
        weight=weight,
    )


@torch.no_grad()
def nearest_rows(rows: Tensor, support: Tensor) -> Tensor:
    """Return the row of ``support`` [num_rows, dim] of the highest cosine for each row [n, dim], without gradient.

    Exact; among equal ones, the first. The cosines of 256 rows and a tile of the support set are held at a time.
    Rows [n, dim] themselves are returned for an empty support set.
    """
    rows = working_precision(rows.detach())
    if len(support) == 0:
        return rows
    with torch.autocast(rows.device.type, enabled=False):
        found = [_nearest(rows[block], support) for block in spans(0, len(rows), BLOCK_ROWS)]
    return support[torch.cat(found)].to(rows.dtype)


def _nearest(rows: Tensor, support: Tensor) -> Tensor:
    best = rows.new_full((len(rows),), -torch.inf)
    place = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    for piece in spans(0, len(support), 2 * tile_size(rows)):
        columns = support[piece].to(rows.dtype)
        lengths = torch.linalg.vector_norm(columns, dim=1).clamp(min=1e-12)
        peak, at = (product(rows, columns) / lengths).max(dim=1)
        is_nearer = peak > best
        best = torch.where(is_nearer, peak, best)
        place = torch.where(is_nearer, at + piece.start, place)
    return place


@final
@dataclass(frozen=True, kw_only=True)
class Nnclr:
    """The neighbor of each key in the queue against the predictions of the global batch, which are the queries."""

    temperature: float | Tensor

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: ExampleIds) -> Tensor:
        """Return the loss."""
        assert key is not None and stored.negatives is not None, (
            "the configuration requires views and a queue"
        )
        classify = InfoNce(temperature=self.temperature, in_batch=True)
        return classify(nearest_rows(key, stored.negatives), query, StoreBatch(), ids)

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the logarithm of the number of predictions."""
        return math.log(batch_size)
