"""SigLIP, the pairwise sigmoid loss (Zhai et al., 2023)."""

from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from raycl.distributed import (
    exceeds_gather_limit,
    gather_detached,
    rank,
    visit_all,
)
from raycl.errors import ConfigError
from raycl.losses.checks import (
    check_offset,
    check_pair,
    checked_gathered,
    checked_pair_ids,
    checked_temperature,
    checked_weight,
)
from raycl.losses.example_ids import ExampleIds
from raycl.losses.false_negatives import query_mask
from raycl.losses.objective import StoreBatch, gathered
from raycl.losses.ring import gather_ring_ids
from raycl.losses.softmax import ColumnBlock
from raycl.losses.tiled import (
    BLOCK_ROWS,
    Gradients,
    check_temperature,
    fused,
    gradient_buffers,
    product,
    read_scalars,
    scaled_gradients,
    spans,
    working_precision,
)


def siglip(
    query: Tensor,
    key: Tensor,
    *,
    temperature: float | Tensor,
    bias: float | Tensor,
    gathered_key: Tensor | None = None,
    offset: int = 0,
    query_id: Tensor | None = None,
    gathered_query_id: Tensor | None = None,
    key_id: Tensor | None = None,
    gathered_key_id: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Classify each combination of a query and a key as a pair or not (SigLIP: Zhai et al., 2023).

    With logit = query . key / temperature + bias, the loss of a query is -log sigmoid(logit) of its own
    key, plus -log sigmoid(-logit) of every other key of the batch. The loss is the **mean** over the
    local_batch queries. False negatives are masked as in ``clip``. The [batch, batch] matrix is never
    materialized.

    Args:
        query: [local_batch, dim], this worker's embeddings. Half precision is computed in float32.
        key: [local_batch, dim], row i the positive of query i.
        temperature: above 0; a 0-d tensor that requires grad is learned (initially 0.1 in the paper).
        bias: a 0-d tensor that requires grad is learned (initially -10 in the paper).
        gathered_key: [batch, dim], the keys of all workers, gathered with gradient.
        offset: the index of this worker's first key in the gathered keys.
        query_id: [local_batch] int64; equal ids mean the same query.
        gathered_query_id: [batch] int64, ids of the queries of all workers.
        key_id: [local_batch] int64; equal ids mean the same key.
        gathered_key_id: [batch] int64, ids of the keys of all workers.
        weight: [local_batch], the weight of each query in the mean; of mean 1 over all workers for a weighted
            mean. No gradient.

    Returns:
        A scalar, float32 (float64 for float64 embeddings). It can be differentiated once.

    Raises:
        ConfigError: Shapes or arguments do not match, or the temperature is not above 0.
    """
    check_pair("query and key", query, key)
    (columns,) = checked_gathered(gathered_key=(key, gathered_key))
    check_offset(offset, len(query), len(columns))
    own = slice(offset, offset + len(query))
    ids = checked_pair_ids(
        sample_id=None,
        query_id=(query_id, gathered_query_id),
        key_id=(key_id, gathered_key_id),
        negative_id=None,
        own=own,
        batch=None if gathered_key is None else len(columns),
        in_batch=True,
        num_negatives=None,
    )
    rows = working_precision(query)
    return fused(
        partial(_evaluate, own=own, pair_ids=ids, weight=checked_weight(weight, query), by_ring=False),
        rows,
        columns.to(rows),
        checked_temperature(temperature, rows),
        _scalar(bias, rows),
    )


def ring_siglip(
    query: Tensor,
    key: Tensor,
    query_id: Tensor,
    key_id: Tensor,
    *,
    temperature: float | Tensor,
    bias: float | Tensor,
    weight: Tensor | None = None,
) -> Tensor:
    """SigLIP over the keys of all workers, which pass around a ring instead of being gathered.

    Has the same value, gradients, arguments and errors as :func:`siglip` with gathered keys. Collective
    in the forward pass only.
    """
    check_pair("query and key", query, key)
    rows, weight = working_precision(query), checked_weight(weight, query)
    scalars = checked_temperature(temperature, rows), _scalar(bias, rows)
    own = slice(rank() * len(query), (rank() + 1) * len(query))
    ids = gather_ring_ids(query_id, key_id, local=len(query))
    evaluate = partial(_evaluate, own=own, pair_ids=ids, weight=weight, by_ring=True)
    return fused(evaluate, rows, key.to(rows), *scalars)


def _scalar(value: float | Tensor, rows: Tensor) -> Tensor:
    if isinstance(value, Tensor) and value.ndim:
        raise ConfigError(
            f"the bias must be a number or a 0-d tensor, got a tensor of shape {list(value.shape)}"
        )
    return value.to(rows) if isinstance(value, Tensor) else rows.new_full((), value)


def _evaluate(
    rows: Tensor,
    columns: Tensor,
    temperature: Tensor,
    bias: Tensor,
    *,
    own: slice,
    pair_ids: tuple[Tensor, Tensor] | None,
    weight: Tensor | None,
    by_ring: bool,
    with_gradient: bool,
) -> tuple[Tensor, Gradients]:
    """Return the loss of rows [local_batch, dim] and its gradients; columns are gathered, or local with a ring."""
    blocks = list(spans(0, len(rows), BLOCK_ROWS))
    mask = query_mask(pair_ids, own, None, blocks, in_batch=True)
    needs_columns = columns.new_full((1,), with_gradient and columns.requires_grad)
    if by_ring:  # gradients of columns are sent: all workers take part if one needs them
        needs_columns = gather_detached(needs_columns).amax()
    value, is_needed = read_scalars(temperature, needs_columns, masks=(mask,))
    check_temperature(value)
    (at_rows,) = gradient_buffers(rows, temperature=temperature, with_gradient=with_gradient)
    weight = rows.new_ones(len(rows)) if weight is None else weight
    of_row, total = rows.new_zeros(2, len(rows))  # loss and derivative at the logits of a row's negatives

    def visit(worker: int, keys: Tensor) -> Tensor | None:
        first, at_keys = worker * len(rows), torch.zeros_like(keys) if is_needed else None
        candidates = ColumnBlock(keys, mask=mask, first=first)
        for block in blocks:
            query, own_weight = rows[block] / temperature, weight[block, None]
            for k, piece, tile in candidates.tiles(query, block, diagonals=(own.start - first,)):
                tile += bias
                of_row[block] -= F.logsigmoid(-tile).sum(1)
                weights = tile.sigmoid_()
                total[block] += weights.sum(1)
                if at_rows is not None:
                    at_rows[block] += own_weight * product(weights, piece.T)
                if at_keys is not None:
                    at_keys[candidates.pieces[k]] += product(weights.T, (own_weight * rows[block]).T)
        return at_keys

    at_columns = visit_all(visit, columns) if by_ring else visit(0, columns)
    match = slice(0, len(rows)) if by_ring else own
    positive = (rows * columns[match]).sum(1) / temperature + bias
    at_positive = -weight * (-positive).sigmoid()
    loss, at_bias = weight @ (of_row - F.logsigmoid(positive)), weight @ total + at_positive.sum()
    if at_rows is not None:
        at_rows += at_positive[:, None] * columns[match]
    if at_columns is not None:
        at_columns[match] += at_positive[:, None] * rows
    gradients = scaled_gradients(rows, (at_rows, at_columns), temperature, len(rows))
    return loss / len(rows), (*gradients, at_bias / len(rows) if bias.requires_grad else None)


@final
@dataclass(frozen=True, kw_only=True)
class SigLip:
    """SigLIP over the pairs of all workers."""

    temperature: float | Tensor
    bias: float | Tensor = 0.0

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: ExampleIds) -> Tensor:
        """Return the loss."""
        assert key is not None, "the configuration provides a key for each query"
        scalars: dict[str, Any] = {"temperature": self.temperature, "bias": self.bias, "weight": ids.weight}
        if exceeds_gather_limit(key):
            return ring_siglip(query, key, ids.query, ids.key, **scalars)
        own_ids = {"query_id": ids.query, "key_id": ids.key}
        return siglip(query, key, **scalars, **own_ids, **gathered(key=key, **own_ids))

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return None: the loss of collapsed embeddings depends on the learned temperature and bias."""
        return None
