"""The symmetric cross-entropy of pairs: CLIP (Radford et al., 2021) and two towers."""

from functools import partial

import torch
from torch import Tensor

from raycl.errors import ConfigError
from raycl.losses.both_ways import evaluate_both_ways
from raycl.losses.checks import (
    check_columns,
    check_offset,
    check_pair,
    check_passes_gradient,
    checked_temperature,
)
from raycl.losses.tiled import LOG2_E, fused, working_precision


def bidirectional_cross_entropy(
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
) -> Tensor:
    """Classify each query's key among keys and each key's query among queries (Radford et al., 2021).

    A query's candidates are the keys of the batch and ``negatives``; a key's are the queries of the
    batch. The loss is the **mean** over the local_batch pairs and then over the two directions. No
    [batch, batch] matrix is ever held.

    **What is no negative.** A query and a key whose ids make a pair anywhere in the batch are
    masked, in both directions: another pair with the same key, another pair with the same query, and
    any candidate, of ``negatives`` too, that is some other pair's key of the same query. Positives of
    which the batch has no pair are not known here: leave them out of ``negatives``. Without
    ``query_id`` every query counts as a different one, without ``key_id`` every key. Samples with one
    id, such as an image with its caption, pass it as both.

    Args:
        query: [local_batch, dim], this worker's embeddings; unit rows are usual, other lengths
            are right too. Half precision is computed in float32.
        key: [local_batch, dim], row i the positive of query i.
        temperature: above 0; a 0-d tensor that requires grad is learned, its gradient exact.
        gathered_query: [batch, dim], the queries of all workers, gathered with gradient; ``query``
            is then read from here. Goes with ``gathered_key``.
        gathered_key: [batch, dim], the keys of all workers, gathered with gradient; ``key`` is
            then read from here. Averaged over workers (as DDP does) the gradients are those of
            the whole batch.
        offset: where this worker's rows begin in the gathered ones.
        query_id: [local_batch] int64; equal ids are the same query.
        gathered_query_id: [batch] int64, the ids of the gathered queries.
        key_id: [local_batch] int64; equal ids are the same key (document, item, caption).
        gathered_key_id: [batch] int64, the ids of the gathered keys.
        negatives: [num_negatives, dim], further candidates of every query, of no key: explicit
            negatives, gathered from all workers, or a queue's rows, in half precision too. There
            may be none yet.
        negative_id: [num_negatives] int64, the ids of the negatives, which are keys too.
        key_log_frequency: [local_batch], log Q: the natural logarithm of how often a key is drawn
            as a candidate, taken off its logits with **all** queries, its own among them, but
            not with the key's own candidates (Yi et al., 2019). Only differences matter; no gradient.
        gathered_key_log_frequency: [batch], that of the gathered keys.
        negative_log_frequency: [num_negatives], that of the negatives.

    Returns:
        A scalar, float32 (float64 for float64 embeddings). It can be differentiated once, at
        query, key (or the gathered ones), temperature and negatives; what requires no gradient
        costs none.

    Raises:
        ConfigError: shapes or arguments do not agree, or the temperature is not above 0.
    """
    check_pair("query and key", query, key)
    queries, keys = _checked_batch(query, key, gathered_query, gathered_key)
    check_offset(offset, len(query), len(keys))
    others = query.new_empty(0, query.shape[1]) if negatives is None else negatives
    check_columns("the negatives", others, query)
    of_batch = partial(
        _of_batch, local_batch=len(query), batch=len(keys), is_gathered=gathered_key is not None
    )
    all_query_id = of_batch("query_id", query_id, gathered_query_id)
    all_key_id = of_batch("key_id", key_id, gathered_key_id)
    _check_of_negatives("negative_id", negative_id, "key_id", all_key_id, negatives=negatives)
    log_frequency = of_batch("key_log_frequency", key_log_frequency, gathered_key_log_frequency)
    _check_of_negatives(
        "negative_log_frequency",
        negative_log_frequency,
        "key_log_frequency",
        log_frequency,
        negatives=negatives,
    )
    rows = working_precision(queries)
    evaluate = partial(
        evaluate_both_ways,
        own=slice(offset, offset + len(query)),
        discounts=_discounts(rows, len(others), log_frequency, negative_log_frequency),
        ids=(*_pair_ids(all_query_id, all_key_id, rows), negative_id),
    )
    # A queue in half precision that wants no gradient is taken up piece by piece.
    others = others.to(rows) if others.requires_grad else others
    return fused(evaluate, rows, keys.to(rows), others, checked_temperature(temperature, rows))


def _checked_batch(
    query: Tensor, key: Tensor, gathered_query: Tensor | None, gathered_key: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the pairs of all workers, which must pass on the gradient of this worker's own."""
    if gathered_query is None and gathered_key is None:
        return query, key
    if gathered_query is None or gathered_key is None:
        missing = "gathered_query" if gathered_query is None else "gathered_key"
        raise ConfigError(f"only one side is gathered: {missing} is None; gather both or neither")
    if gathered_query.shape != gathered_key.shape or gathered_key.shape[1:] != key.shape[1:]:
        raise ConfigError(
            "gathered_query and gathered_key are not [batch, dim] of one shape: they came as "
            f"{list(gathered_query.shape)} and {list(gathered_key.shape)} for rows of {list(key.shape)}; "
            "gather every worker's rows of each"
        )
    for name, own, gathered in (("query", query, gathered_query), ("key", key, gathered_key)):
        check_passes_gradient(name, own, gathered)
    return gathered_query, gathered_key


def _of_batch(
    name: str,
    own: Tensor | None,
    gathered: Tensor | None,
    *,
    local_batch: int,
    batch: int,
    is_gathered: bool,
) -> Tensor | None:
    """Return what goes with the rows of the batch: one number for each, or None."""
    _check_numbers(name, own, local_batch)
    if not is_gathered and gathered is not None:
        raise ConfigError(
            f"gathered_{name} came without gathered rows: {list(gathered.shape)} numbers of no rows; "
            "pass gathered_query and gathered_key too"
        )
    if is_gathered:
        _check_both(name, own, f"gathered_{name}", gathered)
    _check_numbers(f"gathered_{name}", gathered, batch)
    return gathered if is_gathered else own


def _check_of_negatives(
    name: str, value: Tensor | None, name_of_keys: str, key_tower: Tensor | None, *, negatives: Tensor | None
) -> None:
    """Refuse what goes with the negatives unless they are there, and it came for the keys too."""
    if negatives is not None:
        _check_both(name, value, name_of_keys, key_tower)
        _check_numbers(name, value, len(negatives))
    elif value is not None:
        raise ConfigError(f"{name} came without negatives: {list(value.shape)} numbers of no rows; pass both")


def _check_both(name: str, value: Tensor | None, other_name: str, other: Tensor | None) -> None:
    if (value is None) != (other is None):
        missing, given = (name, other_name) if value is None else (other_name, name)
        raise ConfigError(f"{given} came without {missing}, which is None; pass both or neither")


def _check_numbers(name: str, numbers: Tensor | None, num_rows: int) -> None:
    if numbers is not None and numbers.shape != (num_rows,):
        raise ConfigError(
            f"{name} does not match its rows: {list(numbers.shape)} numbers came for {num_rows} rows; "
            "pass one per row"
        )


def _pair_ids(
    query_id: Tensor | None, key_id: Tensor | None, rows: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the ids of all queries and keys; where only one came, the others are all different."""
    if query_id is None and key_id is None:
        return None, None
    different = torch.arange(len(rows), device=rows.device)
    return different if query_id is None else query_id, different if key_id is None else key_id


def _discounts(
    rows: Tensor, num_negatives: int, log_frequency: Tensor | None, negative_log_frequency: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is off the logits of queries, keys and negatives as candidates, in base 2."""
    none = rows.new_zeros(len(rows))
    if log_frequency is None:
        return none, none, rows.new_zeros(num_negatives)
    of_negatives = log_frequency[:0] if negative_log_frequency is None else negative_log_frequency
    both = torch.cat([log_frequency, of_negatives]).detach()
    both = both.to(torch.promote_types(both.dtype, rows.dtype))
    # A constant changes nothing, and none below 0 leaves the bound of the logits what it is.
    both = ((both - both.amin()) * LOG2_E).to(rows)
    return none, both[: len(rows)], both[len(rows) :]
