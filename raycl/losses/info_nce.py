"""InfoNCE (van den Oord et al., 2018), with negatives as in MoCo (He et al., 2020)."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from raycl.distributed import exceeds_gather_limit, gather_detached, num_workers, rank
from raycl.errors import ConfigError
from raycl.losses.checks import (
    check_columns,
    check_offset,
    check_pair,
    checked_gathered,
    checked_pair_ids,
    checked_temperature,
    checked_weight,
)
from raycl.losses.example_ids import ExampleIds
from raycl.losses.false_negatives import Mask, query_mask
from raycl.losses.guide import Guide
from raycl.losses.logq import logit_biases, refined_row_loss
from raycl.losses.objective import StoreBatch, add_proximal_term, gathered, positive_of
from raycl.losses.ring import evaluate_ring, gather_ring_ids
from raycl.losses.softmax import (
    RowGroup,
    RowLoss,
    cross_entropy,
    evaluate_softmax,
    subtract_positives,
    weighted,
)
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


def info_nce(
    query: Tensor,
    key: Tensor,
    *,
    temperature: float | Tensor,
    in_batch: bool = True,
    gathered_key: Tensor | None = None,
    offset: int = 0,
    sample_id: Tensor | None = None,
    gathered_sample_id: Tensor | None = None,
    query_id: Tensor | None = None,
    gathered_query_id: Tensor | None = None,
    key_id: Tensor | None = None,
    gathered_key_id: Tensor | None = None,
    negatives: Tensor | None = None,
    negative_id: Tensor | None = None,
    weight: Tensor | None = None,
    guide: Guide | None = None,
) -> Tensor:
    """Classify each query's own key among its candidates (van den Oord et al., 2018).

    The candidates are the own key, the other keys of the batch (unless ``in_batch`` is False, as
    in MoCo: He et al., 2020) and ``negatives``. The loss is the **mean** over the local_batch
    queries. At most 256 rows of the logits are held at a time.

    **False negatives.** A candidate is masked if its id forms a pair with the query's id anywhere in
    the batch; see ``clip``.

    Args:
        query: [local_batch, dim], this worker's embeddings, usually of unit length; other lengths
            are supported. Half precision is computed in float32.
        key: [local_batch, dim], row i the positive of query i.
        temperature: above 0; a 0-d tensor that requires grad is learned, with an exact gradient.
        in_batch: whether the keys of the other queries are negatives.
        gathered_key: [batch, dim], the keys of all workers, gathered with gradient; replaces
            ``key``. The average of the gradients over workers (as in DDP) is the gradient of the
            whole batch.
        offset: the index of this worker's first key in the gathered keys and gathered ids.
        sample_id: [local_batch] int64, shorthand for equal ``query_id`` and ``key_id``, if a pair is
            one sample, such as two views. Distinct ids need no mask.
        gathered_sample_id: [batch] int64, ids of the gathered keys.
        query_id: [local_batch] int64; equal ids mean the same query. By default all are distinct.
        gathered_query_id: [batch] int64, ids of the queries of all workers. Required with
            ``gathered_key``. With ``in_batch=False`` keys are not gathered; gathered ids then
            identify the pairs of other workers.
        key_id: [local_batch] int64; equal ids mean the same key. By default all are distinct.
        gathered_key_id: [batch] int64, ids of the keys of all workers; see ``gathered_query_id``.
        negatives: [num_negatives, dim], additional candidates of every query: rows of a queue or
            bank. Half precision is supported, and so are 0 rows: without negatives the loss is 0.
        negative_id: [num_negatives] int64, ids of the negatives, in the id space of the keys.
        weight: [local_batch], the weight of each query in the mean; of mean 1 over all workers for a
            weighted mean. No gradient.
        guide: embeddings of another encoder, of all pairs and negatives. It masks the candidates that it
            finds nearer to the query than the positive (Solatorio, 2024).

    Returns:
        A scalar, float32 (float64 for float64 embeddings). It can be differentiated once, with
        respect to query, key, temperature and negatives. Gradients are computed only for inputs
        that require them.

    Raises:
        ConfigError: Shapes or arguments do not match, or the temperature is not above 0.
    """
    check_pair("query and key", query, key)
    columns = _checked_columns(query, key, gathered_key, offset, in_batch=in_batch, negatives=negatives)
    others = query.new_empty(0, query.shape[1]) if negatives is None else negatives
    check_columns("the negatives", others, query)
    own = slice(offset, offset + len(key))
    if guide is not None:
        # Without in-batch negatives, keys are not gathered, but the guide's rows may be.
        guide.check(len(columns) if in_batch else len(guide.query), len(others))
    ids = checked_pair_ids(
        sample_id=(sample_id, gathered_sample_id),
        query_id=(query_id, gathered_query_id),
        key_id=(key_id, gathered_key_id),
        negative_id=negative_id,
        own=own,
        batch=None if gathered_key is None else len(columns),
        in_batch=in_batch,
        num_negatives=None if negatives is None else len(others),
    )
    rows = working_precision(query)
    evaluate = partial(
        evaluate_info_nce,
        own=own,
        in_batch=in_batch,
        pair_ids=ids,
        negative_id=negative_id,
        guide=guide,
        row_loss=weighted(cross_entropy, checked_weight(weight, query)),
    )
    # A half-precision queue that requires no gradient is converted tile by tile.
    others = others.to(rows) if others.requires_grad else others
    return fused(evaluate, rows, columns.to(rows), others, checked_temperature(temperature, rows))


def ring_info_nce(
    query: Tensor,
    key: Tensor,
    query_id: Tensor,
    key_id: Tensor,
    *,
    temperature: float | Tensor,
    negatives: Tensor | None = None,
    negative_id: Tensor | None = None,
    key_log_frequency: Tensor | None = None,
    negative_log_frequency: Tensor | None = None,
    refines_logq: bool = False,
    weight: Tensor | None = None,
    guide: Guide | None = None,
    row_loss: RowLoss = cross_entropy,
) -> Tensor:
    """InfoNCE over the keys of all workers, which pass around a ring instead of being gathered.

    Has the same value, gradients and errors as :func:`info_nce` with gathered keys; the ids are this
    worker's, and the guide has the rows of all workers. ``negatives`` are not sent. Log frequencies correct
    the logits as in :func:`raycl.losses.clip`; then ``negatives`` are equal on all workers. ``row_loss`` replaces the
    cross-entropy. Collective in the forward pass only: every worker must scale the loss equally.
    """
    check_pair("query and key", query, key)
    others = query.new_empty(0, query.shape[1]) if negatives is None else negatives
    check_columns("the negatives", others, query)
    local, batch = len(query), num_workers() * len(query)
    own = slice(rank() * local, (rank() + 1) * local)
    rows = working_precision(query)
    temperature = checked_temperature(temperature, rows)
    group = RowGroup(slice(0, local), excluded=(0,))
    num_negatives = None if negatives is None else len(others)
    ids = gather_ring_ids(query_id, key_id, local=local, negative_id=negative_id, num_negatives=num_negatives)
    known = query_mask(ids, own, negative_id, group.blocks, in_batch=True)
    mask: Mask | None = known
    biases = None
    if key_log_frequency is not None:
        biases = logit_biases(gather_detached(key_log_frequency), negative_log_frequency, rows)
        if refines_logq:
            row_loss = refined_row_loss(
                key_log_frequency, known, num_candidates=batch + len(others), dtype=rows.dtype
            )
    if guide is not None:
        guide.check(batch, len(others))
        mask = guide.mask(known, own)

    def evaluate(*inputs: Tensor, with_gradient: bool) -> tuple[Tensor, Gradients]:
        queries, keys, _, temperature = inputs
        positive = (queries * (LOG2_E / temperature) * keys).sum(1)
        softmax, gradients = evaluate_ring(
            *inputs,
            positive=positive if biases is None else positive + biases[0][own],
            groups=(group,),
            mask=mask,
            biases=biases,
            row_loss=weighted(row_loss, checked_weight(weight, query)),
            with_gradient=with_gradient,
        )
        subtract_positives(softmax.positive_weight, queries, keys, *gradients[:2])
        return softmax.loss.mean(), scaled_gradients(queries, gradients, temperature, local)

    others = others.to(rows) if others.requires_grad else others
    return fused(evaluate, rows, key.to(rows), others, temperature)


def evaluate_info_nce(
    rows: Tensor,
    columns: Tensor,
    negatives: Tensor,
    temperature: Tensor,
    *,
    own: slice,
    in_batch: bool,
    pair_ids: tuple[Tensor, Tensor] | None,
    negative_id: Tensor | None,
    guide: Guide | None,
    row_loss: RowLoss,
    with_gradient: bool,
) -> tuple[Tensor, Gradients]:
    """Return the mean loss over rows [num_rows, dim] with positives ``columns[own]``, and its gradients."""
    matched = own if in_batch else slice(0, len(rows))  # the columns of the positives
    group = RowGroup(slice(0, len(rows)), excluded=(matched.start,))
    mask = query_mask(pair_ids, own, negative_id, group.blocks, in_batch=in_batch)
    if guide is not None:
        mask = guide.mask(mask, own, in_batch=in_batch)
    length = torch.maximum(*(longest(each, rows.dtype) for each in (columns, negatives)))
    bound, _ = read_bound(longest(rows, rows.dtype), length, temperature, mask)
    gradients = gradient_buffers(
        rows, columns, negatives, temperature=temperature, with_gradient=with_gradient
    )
    scale = LOG2_E / temperature
    softmax = evaluate_softmax(
        rows,
        columns,
        negatives,
        positive=(rows * scale * columns[matched]).sum(1),
        groups=(group,),
        scale=scale,
        bound=bound,
        mask=mask,
        in_batch=in_batch,
        row_loss=row_loss,
        gradients=gradients,
    )
    at_rows, at_columns, _ = gradients
    at_positives = None if at_columns is None else at_columns[matched]
    subtract_positives(softmax.positive_weight, rows, columns[matched], at_rows, at_positives)
    return softmax.loss.mean(), scaled_gradients(rows, tuple(gradients), temperature, len(rows))


def _checked_columns(
    query: Tensor,
    key: Tensor,
    gathered_key: Tensor | None,
    offset: int,
    *,
    in_batch: bool,
    negatives: Tensor | None,
) -> Tensor:
    """Return the keys that the queries are compared with, including their own."""
    if not in_batch and negatives is None:
        raise ConfigError(
            "the queries have no negatives: in_batch is False and negatives is None; "
            "pass negatives ([0, dim] while a queue is empty)"
        )
    if not in_batch and gathered_key is not None:
        raise ConfigError(
            f"the gathered keys are unused: got gathered_key {list(gathered_key.shape)} with in_batch=False; "
            "remove gathered_key"
        )
    (columns,) = checked_gathered(gathered_key=(key, gathered_key))
    if in_batch:
        check_offset(offset, len(query), len(columns))
    return columns


@final
@dataclass(frozen=True, kw_only=True)
class InfoNce:
    """Cross-entropy of each query's key, or own slot, against gathered and stored negatives.

    ``pairs`` means that queries and keys differ in kind and have separate ids.
    """

    temperature: float | Tensor
    in_batch: bool = True
    pairs: bool = False
    proximal_weight: float = 0.0

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: ExampleIds) -> Tensor:
        """Return the loss."""
        loss = self._cross_entropy(query, positive_of(key, stored), stored, ids)
        return add_proximal_term(loss, query, stored, self.proximal_weight, ids.weight)

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the logarithm of the number of candidates."""
        num_stored = 0 if stored.negatives is None else len(stored.negatives)
        return math.log(num_stored + (batch_size if self.in_batch else 1))

    def _cross_entropy(self, query: Tensor, key: Tensor, stored: StoreBatch, ids: ExampleIds) -> Tensor:
        settings: dict[str, Any] = {
            "temperature": self.temperature,
            "negatives": stored.negatives,
            "negative_id": stored.negative_id,
            "weight": ids.weight,
            "guide": stored.guide,
        }
        key_id = ids.key if self.pairs else ids.query
        if self.in_batch and exceeds_gather_limit(key):
            return ring_info_nce(query, key, ids.query, key_id, **settings)
        # A single id for both sides is cheaper to compare.
        own_ids = {"query_id": ids.query, "key_id": key_id} if self.pairs else {"sample_id": ids.query}
        settings |= {"in_batch": self.in_batch, **own_ids}
        if self.in_batch or self.pairs:
            settings |= gathered(key=key if self.in_batch else None, **own_ids)
        return info_nce(query, key, **settings)
