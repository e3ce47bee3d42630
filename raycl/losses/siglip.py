"""SigLIP, the pairwise sigmoid loss (Zhai et al., 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

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
from raycl.losses.false_negatives import key_mask, query_mask
from raycl.losses.objective import StoreBatch, gathered
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
    rows = working_precision(query)
    own = slice(rank() * len(query), (rank() + 1) * len(query))
    ids = gather_detached(query_id), gather_detached(key_id)
    return fused(
        partial(_evaluate, own=own, pair_ids=ids, weight=checked_weight(weight, query), by_ring=True),
        rows,
        key.to(rows),
        checked_temperature(temperature, rows),
        _scalar(bias, rows),
    )


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
    back = key_mask(pair_ids, own, blocks) if by_ring else None
    check_temperature(*read_scalars(temperature, masks=(mask, back)))
    at_rows, at_columns = gradient_buffers(
        rows, columns, temperature=temperature, with_gradient=with_gradient
    )
    negatives = partial(_add_negatives, temperature=temperature, bias=bias, blocks=blocks)
    match = slice(0, len(rows)) if by_ring else own
    positive = (rows * columns[match]).sum(1) / temperature + bias
    weight = rows.new_ones(len(rows)) if weight is None else weight
    loss, at_positive = -(weight * F.logsigmoid(positive)).sum(), -weight * (-positive).sigmoid()
    at_bias = at_positive.sum()
    if by_ring:
        sums = [loss, at_bias]

        def visit(worker: int, keys: Tensor, queries: Tensor, theirs: Tensor) -> None:
            first, diagonals = worker * len(rows), (0,) if worker == rank() else ()
            candidates = ColumnBlock(keys, mask=mask, first=first)
            found = negatives(rows, candidates, diagonals, weight=weight, gradient=at_rows)
            sums[0], sums[1] = sums[0] + found[0], sums[1] + found[1]
            if at_columns is not None:
                candidates = ColumnBlock(queries, mask=back, first=first)
                negatives(columns, candidates, diagonals, column_weight=theirs, gradient=at_columns)

        visit_all(visit, columns, rows, weight)
        loss, at_bias = sums
    else:
        candidates = ColumnBlock(columns, mask=mask, gradient=at_columns)
        found = negatives(rows, candidates, (own.start,), weight=weight, gradient=at_rows)
        loss, at_bias = loss + found[0], at_bias + found[1]
    if at_rows is not None:
        at_rows += at_positive[:, None] * columns[match]
    if at_columns is not None:
        at_columns[match] += at_positive[:, None] * rows
    gradients = scaled_gradients(rows, (at_rows, at_columns), temperature, len(rows))
    return loss / len(rows), (*gradients, at_bias / len(rows) if bias.requires_grad else None)


def _add_negatives(
    rows: Tensor,
    candidates: ColumnBlock,
    diagonals: Sequence[int],
    *,
    temperature: Tensor,
    bias: Tensor,
    blocks: Sequence[slice],
    weight: Tensor | None = None,
    column_weight: Tensor | None = None,
    gradient: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of all negatives, and the summed derivative with respect to the logits.

    Adds the unscaled gradients of rows, to ``gradient``, and of columns. ``diagonals`` (column - row) are those of
    the positives. The loss of a row is multiplied by its ``weight`` [num_rows]. With ``column_weight`` the rows are
    keys, and only their gradient is computed: the loss is that of the queries.
    """
    loss, total = rows.new_zeros(()), rows.new_zeros(())
    weight = rows.new_ones(len(rows)) if weight is None else weight
    values = candidates.columns if column_weight is None else column_weight[:, None] * candidates.columns
    for block in blocks:
        query, own = rows[block] / temperature, weight[block]
        for k, _, tile in candidates.tiles(query, block, diagonals=diagonals):
            piece = candidates.pieces[k]
            tile += bias
            if column_weight is None:
                loss = loss - own @ F.logsigmoid(-tile).sum(1)
            weights = tile.sigmoid_()
            if column_weight is None:
                total = total + own @ weights.sum(1)
            if gradient is not None:
                gradient[block] += own[:, None] * product(weights, values[piece].T)
            if candidates.gradient is not None:
                candidates.gradient[piece] += product(weights.T, (own[:, None] * rows[block]).T)
    return loss, total


@final
@dataclass(frozen=True, kw_only=True)
class SigLip:
    """SigLIP over the pairs of all workers."""

    temperature: float | Tensor
    bias: float | Tensor

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
