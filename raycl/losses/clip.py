"""Symmetric cross-entropy of pairs, for CLIP (Radford et al., 2021) and two towers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from raycl.distributed import exceeds_gather_limit, rank
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
from raycl.losses.false_negatives import key_mask, query_mask
from raycl.losses.guide import Guide
from raycl.losses.info_nce import ring_info_nce
from raycl.losses.logq import checked_log_frequency, logit_biases, refined_row_loss
from raycl.losses.mutual import MutualSoftmax
from raycl.losses.objective import StoreBatch, gathered
from raycl.losses.ring import evaluate_mutual_ring, gather_ring_ids
from raycl.losses.softmax import (
    RowGroup,
    RowLoss,
    cross_entropy,
    evaluate_softmax,
    subtract_positives,
    weighted,
)
from raycl.losses.tiled import (
    BLOCK_ROWS,
    LOG2_E,
    Gradients,
    fused,
    gradient_buffers,
    longest,
    read_bound,
    scaled_gradients,
    spans,
    tile_size,
    working_precision,
)


def clip(
    query: Tensor,
    key: Tensor,
    *,
    temperature: float | Tensor,
    gathered_query: Tensor | None = None,
    gathered_key: Tensor | None = None,
    offset: int = 0,
    query_id: Tensor | None = None,
    gathered_query_id: Tensor | None = None,
    key_id: Tensor | None = None,
    gathered_key_id: Tensor | None = None,
    negatives: Tensor | None = None,
    negative_id: Tensor | None = None,
    key_log_frequency: Tensor | None = None,
    gathered_key_log_frequency: Tensor | None = None,
    negative_log_frequency: Tensor | None = None,
    refines_logq: bool = False,
    weight: Tensor | None = None,
    guide: Guide | None = None,
    row_losses: tuple[RowLoss, RowLoss] = (cross_entropy, cross_entropy),
) -> Tensor:
    """Classify each query's key among keys and each key's query among queries (Radford et al., 2021).

    The candidates of a query are the keys of the batch and ``negatives``. The candidates of a key are
    the queries of the batch. The loss is the **mean** over the local_batch pairs and then over the two
    directions. The [batch, batch] matrix is never materialized.

    **False negatives.** A query and a key are masked, in both directions, if their ids form a pair
    anywhere in the batch. This covers other pairs with the same key, other pairs with the same query,
    and candidates (including ``negatives``) that are the key of another pair of the same query.
    Positives without a pair in the batch are unknown here: exclude them from ``negatives``. Without
    ``query_id`` all queries are distinct, without ``key_id`` all keys. If a pair is one sample with one
    id, such as an image with its caption, pass the id as both.

    Args:
        query: [local_batch, dim], this worker's embeddings, usually of unit length; other lengths
            are supported. Half precision is computed in float32.
        key: [local_batch, dim], row i the positive of query i.
        temperature: above 0; a 0-d tensor that requires grad is learned, with an exact gradient.
        gathered_query: [batch, dim], the queries of all workers, gathered with gradient; replaces
            ``query``. Requires ``gathered_key``.
        gathered_key: [batch, dim], the keys of all workers, gathered with gradient; replaces
            ``key``. The average of the gradients over workers (as in DDP) is the gradient of the
            whole batch.
        offset: the index of this worker's first row in the gathered rows.
        query_id: [local_batch] int64; equal ids mean the same query.
        gathered_query_id: [batch] int64, ids of the gathered queries.
        key_id: [local_batch] int64; equal ids mean the same key (document, item, caption).
        gathered_key_id: [batch] int64, ids of the gathered keys.
        negatives: [num_negatives, dim], additional candidates of every query, but not of keys:
            explicit negatives gathered from all workers, or rows of a queue. Half precision is
            supported, and so are 0 rows.
        negative_id: [num_negatives] int64, ids of the negatives, in the id space of the keys.
        key_log_frequency: [local_batch], log Q: the natural logarithm of the sampling frequency of a
            key as a candidate. It is subtracted from the logits of **all** queries with the key,
            including its own query, but not from the logits of the key's candidates
            (Yi et al., 2019). Only differences matter; no gradient.
        gathered_key_log_frequency: [batch], log Q of the gathered keys.
        negative_log_frequency: [num_negatives], log Q of the negatives.
        refines_logq: whether log Q, now of frequencies between 0 and 1, corrects the negatives of a query alone,
            as in Khrylchenko et al. (2025); see :func:`raycl.losses.logq.refined_logq`.
        weight: [local_batch], the weight of each pair in the mean; of mean 1 over all workers for a
            weighted mean. No gradient.
        guide: embeddings of another encoder, of all pairs and negatives. It masks, in both directions, the
            candidates that it finds nearer than the positive (Solatorio, 2024); excludes ``refines_logq``.
        row_losses: the losses of queries and of keys, see :class:`raycl.losses.softmax.RowLoss`;
            ``refines_logq`` replaces the loss of queries.

    Returns:
        A scalar, float32 (float64 for float64 embeddings). It can be differentiated once, with
        respect to query and key (or the gathered rows), temperature and negatives. Gradients are
        computed only for inputs that require them.

    Raises:
        ConfigError: Shapes or arguments do not match, or the temperature is not above 0.
    """
    check_pair("query and key", query, key)
    if refines_logq and key_log_frequency is None:
        raise ConfigError("refines_logq needs log frequencies: key_log_frequency is None; pass both")
    if refines_logq and guide is not None:
        raise ConfigError(
            "refines_logq counts negatives, and a guide masks some of them; pass one of the two"
        )
    queries, keys = checked_gathered(gathered_query=(query, gathered_query), gathered_key=(key, gathered_key))
    check_offset(offset, len(query), len(keys))
    others = query.new_empty(0, query.shape[1]) if negatives is None else negatives
    check_columns("the negatives", others, query)
    own = slice(offset, offset + len(query))
    batch = None if gathered_key is None else len(keys)
    num_negatives = None if negatives is None else len(others)
    if guide is not None:
        guide.check(len(keys), len(others))
    ids = checked_pair_ids(
        sample_id=None,
        query_id=(query_id, gathered_query_id),
        key_id=(key_id, gathered_key_id),
        negative_id=negative_id,
        own=own,
        batch=batch,
        in_batch=True,
        num_negatives=num_negatives,
    )
    frequencies = checked_log_frequency(
        key_log_frequency,
        gathered_key_log_frequency,
        negative_log_frequency,
        local_batch=len(query),
        batch=batch,
        num_negatives=num_negatives,
    )
    rows = working_precision(queries)
    biases = None if frequencies is None else logit_biases(*frequencies, rows)
    weight = checked_weight(weight, query)
    is_local = gathered_key is None and len(others) == 0 and not others.requires_grad and biases is None
    if is_local and guide is None:  # a guide's masks of the two directions differ
        evaluate = partial(_evaluate_local, pair_ids=ids, weight=weight, row_losses=row_losses)
        return fused(evaluate, rows, keys.to(rows), checked_temperature(temperature, rows))
    evaluate = partial(
        _evaluate,
        own=own,
        pair_ids=ids,
        negative_id=negative_id,
        biases=biases,
        refined=key_log_frequency if refines_logq else None,
        weight=weight,
        guide=guide,
        row_losses=row_losses,
    )
    # A half-precision queue that requires no gradient is converted tile by tile.
    others = others.to(rows) if others.requires_grad else others
    return fused(evaluate, rows, keys.to(rows), others, checked_temperature(temperature, rows))


def _evaluate_local(
    queries: Tensor,
    keys: Tensor,
    temperature: Tensor,
    *,
    pair_ids: tuple[Tensor, Tensor] | None,
    weight: Tensor | None,
    row_losses: tuple[RowLoss, RowLoss],
    with_gradient: bool,
) -> tuple[Tensor, Gradients]:
    """Return the loss between queries and keys [batch, dim]; both directions share one product per tile."""
    batch = len(queries)
    cuts = list(spans(0, batch, BLOCK_ROWS)), list(spans(0, batch, 2 * tile_size(keys)))
    mask = query_mask(pair_ids, slice(0, batch), None, cuts[0], in_batch=True)
    longest_query, longest_key = (longest(each, queries.dtype) for each in (queries, keys))
    bound, _ = read_bound(longest_query, longest_key, temperature, mask)
    scale = LOG2_E / temperature
    mutual = MutualSoftmax(queries, keys, scale=scale, bound=bound, diagonals=(0,), spans=cuts, mask=mask)
    positive = (queries * scale * keys).sum(1)
    of_queries, of_keys = mutual.sums(positive, *(weighted(each, weight) for each in row_losses))
    loss = (of_queries.loss + of_keys.loss).mean() / 2
    wanted = queries.requires_grad or temperature.requires_grad, keys.requires_grad
    if not with_gradient or not any(wanted):
        return loss, (None, None, None)
    gradients = mutual.gradients(of_queries.logsumexp, of_keys.logsumexp, wanted=wanted)
    subtract_positives(of_queries.positive_weight + of_keys.positive_weight, queries, keys, *gradients)
    return loss, scaled_gradients(queries, tuple(gradients), temperature, 2 * batch)


def _evaluate(
    queries: Tensor,
    keys: Tensor,
    negatives: Tensor,
    temperature: Tensor,
    *,
    own: slice,
    pair_ids: tuple[Tensor, Tensor] | None,
    negative_id: Tensor | None,
    biases: tuple[Tensor, Tensor] | None,
    refined: Tensor | None,
    weight: Tensor | None,
    guide: Guide | None,
    row_losses: tuple[RowLoss, RowLoss],
    with_gradient: bool,
) -> tuple[Tensor, Gradients]:
    """Return the loss of the local pairs against all workers' pairs and negatives, in one pass per direction.

    ``refined`` is log Q of the local keys for the refined correction.
    """
    group = RowGroup(slice(0, own.stop - own.start), excluded=(own.start,))
    to_keys = query_mask(pair_ids, own, negative_id, group.blocks, in_batch=True)
    to_queries = key_mask(pair_ids, own, group.blocks)
    loss_of_queries, loss_of_keys = row_losses
    if refined is not None:
        num_candidates = len(keys) + len(negatives)
        loss_of_queries = refined_row_loss(
            refined, to_keys, num_candidates=num_candidates, dtype=queries.dtype
        )
    if guide is not None:
        to_keys, to_queries = guide.mask(to_keys, own), guide.swapped().mask(to_queries, own)
    longest_query, *of_candidates = (longest(each, queries.dtype) for each in (queries, keys, negatives))
    spread = 0.0 if biases is None else -torch.cat(biases).amin()
    bound, _ = read_bound(
        longest_query, torch.maximum(*of_candidates), temperature, to_keys, to_queries, spread=spread
    )
    gradients = gradient_buffers(
        queries, keys, negatives, temperature=temperature, with_gradient=with_gradient
    )
    at_queries, at_keys, at_negatives = gradients
    directions = (
        (queries, keys, negatives, to_keys, biases, loss_of_queries, (at_queries, at_keys, at_negatives)),
        (keys, queries, negatives[:0], to_queries, None, loss_of_keys, (at_keys, at_queries, None)),
    )
    scale, own_queries, own_keys = LOG2_E / temperature, queries[own], keys[own]
    positive = (own_queries * scale * own_keys).sum(1)
    loss, positive_weight = queries.new_zeros(()), torch.zeros_like(positive)
    for rows, columns, others, mask, of_columns, loss_of, (at_rows, at_columns, at_others) in directions:
        at_own = None if at_rows is None else torch.zeros_like(rows[own])
        softmax = evaluate_softmax(
            rows[own],
            columns,
            others,
            positive=positive if of_columns is None else positive + of_columns[0][own],
            groups=(group,),
            scale=scale,
            bound=bound,
            mask=mask,
            biases=of_columns,
            row_loss=weighted(loss_of, weight),
            gradients=(at_own, at_columns, at_others),
        )
        loss, positive_weight = loss + softmax.loss.mean(), positive_weight + softmax.positive_weight
        if at_rows is not None and at_own is not None:
            at_rows[own] += at_own
    of_own = (None if each is None else each[own] for each in (at_queries, at_keys))
    subtract_positives(positive_weight, own_queries, own_keys, *of_own)
    # Every logit belongs to a query, so the gradient of the queries gives the gradient of the temperature.
    return loss / 2, scaled_gradients(queries, tuple(gradients), temperature, 2 * (own.stop - own.start))


def ring_clip(
    query: Tensor,
    key: Tensor,
    query_id: Tensor,
    key_id: Tensor,
    *,
    temperature: float | Tensor,
    weight: Tensor | None = None,
    row_losses: tuple[RowLoss, RowLoss] = (cross_entropy, cross_entropy),
) -> Tensor:
    """CLIP's loss over the pairs of all workers, which pass around a ring instead of being gathered.

    Has the same value, gradients and errors as :func:`clip` with gathered rows; the ids are this worker's. A
    worker's gradient of the temperature differs, since it covers this worker's queries; its mean over workers is
    the same. Collective in the forward pass only: every worker must scale the loss equally.
    """
    check_pair("query and key", query, key)
    local = len(query)
    rows, weight = working_precision(query), checked_weight(weight, query)
    temperature = checked_temperature(temperature, rows)
    blocks = list(spans(0, local, BLOCK_ROWS))
    ids = gather_ring_ids(query_id, key_id, local=local)
    mask = query_mask(ids, slice(rank() * local, (rank() + 1) * local), None, blocks, in_batch=True)

    def evaluate(*inputs: Tensor, with_gradient: bool) -> tuple[Tensor, Gradients]:
        (of_queries, of_keys), gradients = evaluate_mutual_ring(
            *inputs,
            blocks=blocks,
            mask=mask,
            losses=(weighted(row_losses[0], weight), weighted(row_losses[1], weight)),
            with_gradient=with_gradient,
        )
        loss = (of_queries.loss + of_keys.loss).mean() / 2
        return loss, scaled_gradients(inputs[0], gradients, inputs[2], 2 * local)

    return fused(evaluate, rows, key.to(rows), temperature)


@final
@dataclass(frozen=True, kw_only=True)
class Clip:
    """Cross-entropy in both directions: queries against keys and other negatives, keys against queries.

    ``log_frequency`` maps the names [n] of keys to log Q for the log-Q correction, if it is enabled, in its
    refined form with ``refines_logq``. ``row_losses`` replace the cross-entropy of queries and of keys.
    """

    temperature: float | Tensor
    log_frequency: Callable[[Tensor], Tensor] | None = None
    refines_logq: bool = False
    row_losses: tuple[RowLoss, RowLoss] = (cross_entropy, cross_entropy)

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: ExampleIds) -> Tensor:
        """Return the loss."""
        assert key is not None, "the configuration gives the symmetric cross-entropy a key for each query"
        own: dict[str, Any] = {"query_id": ids.query, "key_id": ids.key}
        others: dict[str, Any] = {}
        if stored.negatives is not None and stored.negative_id is not None:
            others = {"negatives": stored.negatives, "negative_id": stored.negative_id}
        if self.log_frequency is not None:
            own["key_log_frequency"] = self.log_frequency(ids.stored_key)
            if others and stored.negative_name is not None:
                others["negative_log_frequency"] = self.log_frequency(stored.negative_name)
        shared: dict[str, Any] = {"temperature": self.temperature, "weight": ids.weight}
        guide, (of_query, of_key) = stored.guide, self.row_losses
        if exceeds_gather_limit(query, key):
            if not others and self.log_frequency is None and guide is None:
                return ring_clip(query, key, **own, **shared, row_losses=self.row_losses)
            to_keys = ring_info_nce(
                query,
                key,
                **own,
                **others,
                **shared,
                refines_logq=self.refines_logq,
                guide=guide,
                row_loss=of_query,
            )
            guide = None if guide is None else guide.swapped()
            to_queries = ring_info_nce(key, query, ids.key, ids.query, **shared, guide=guide, row_loss=of_key)
            return (to_keys + to_queries) / 2
        own |= gathered(query=query, key=key, **own)
        shared |= {"refines_logq": self.refines_logq, "guide": guide, "row_losses": self.row_losses}
        return clip(query, key, **own, **others, **shared)

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the mean of the logarithms of the numbers of candidates; None if it depends on their frequencies."""
        if self.log_frequency is not None:
            return None
        num_stored = 0 if stored.negatives is None else len(stored.negatives)
        return (math.log(batch_size + num_stored) + math.log(batch_size)) / 2
