"""InfoNCE (van den Oord et al., 2018), with the negatives of MoCo (He et al., 2020)."""

from functools import partial

from torch import Tensor

from raycl.errors import ConfigError
from raycl.losses.checks import check_columns, check_offset, check_pair, checked_temperature
from raycl.losses.pair_ids import GivenIds, checked_pair_ids
from raycl.losses.rectangle import Side, evaluate_rectangle
from raycl.losses.tiled import fused, working_precision


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
) -> Tensor:
    """Classify each query's own key among its candidates (van den Oord et al., 2018).

    The candidates are the own key, the other keys of the batch (unless ``in_batch`` is False, as
    in MoCo: He et al., 2020) and ``negatives``. The loss is the **mean** over the local_batch
    queries. No [local_batch, num_negatives] matrix is held: at most a strip of 256 rows.

    **What is no negative.** A candidate whose id makes a pair with the query's anywhere in the batch
    is masked: see ``bidirectional_cross_entropy``.

    Args:
        query: [local_batch, dim], this worker's embeddings; unit rows are usual, other lengths
            are right too. Half precision is computed in float32.
        key: [local_batch, dim], row i the positive of query i.
        temperature: above 0; a 0-d tensor that requires grad is learned, its gradient exact.
        in_batch: whether the keys of the other queries are negatives.
        gathered_key: [batch, dim], the keys of all workers, gathered with gradient; ``key`` is
            then read from here. Averaged over workers (as DDP does) the gradients are those of
            the whole batch.
        offset: where this worker's keys begin in the gathered ones, and their ids in the gathered ids.
        sample_id: [local_batch] int64, the short form where a pair is one sample, as two views are:
            stands for ``query_id`` and ``key_id``. Distinct ids cost one sort.
        gathered_sample_id: [batch] int64, the ids of the gathered keys.
        query_id: [local_batch] int64; equal ids are the same query. Without them all are different.
        gathered_query_id: [batch] int64, the ids of all workers' queries, needed with ``gathered_key``.
            With ``in_batch=False`` no keys are gathered, but ids may be, for only then the pairs of
            other workers are known.
        key_id: [local_batch] int64; equal ids are the same key. Without them all are different.
        gathered_key_id: [batch] int64, the ids of all workers' keys; as ``gathered_query_id``.
        negatives: [num_negatives, dim], further candidates of every query: a queue's or bank's
            rows, in half precision too. There may be none yet: without a negative the loss is 0.
        negative_id: [num_negatives] int64, the ids of the negatives, which are keys too.

    Returns:
        A scalar, float32 (float64 for float64 embeddings). It can be differentiated once, at
        query, key, temperature and negatives; what requires no gradient costs none.

    Raises:
        ConfigError: shapes or arguments do not agree, or the temperature is not above 0.
    """
    check_pair("query and key", query, key)
    columns = _checked_columns(query, key, gathered_key, offset, in_batch=in_batch, negatives=negatives)
    others = query.new_empty(0, query.shape[1]) if negatives is None else negatives
    check_columns("the negatives", others, query)
    given = GivenIds(
        sample_id, gathered_sample_id, query_id, gathered_query_id, key_id, gathered_key_id, negative_id
    )
    ids = checked_pair_ids(
        given,
        own=slice(offset, offset + len(key)),
        batch=None if gathered_key is None else len(columns),
        in_batch=in_batch,
        num_negatives=None if negatives is None else len(others),
    )
    rows = working_precision(query)
    evaluate = partial(
        evaluate_rectangle,
        sides=(Side(slice(0, len(rows)), positive=offset if in_batch else 0, own=None),),
        in_batch=in_batch,
        pair_ids=ids,
    )
    # A queue in half precision that wants no gradient is taken up piece by piece.
    others = others.to(rows) if others.requires_grad else others
    return fused(evaluate, rows, columns.to(rows), others, checked_temperature(temperature, rows))


def _checked_columns(
    query: Tensor,
    key: Tensor,
    gathered_key: Tensor | None,
    offset: int,
    *,
    in_batch: bool,
    negatives: Tensor | None,
) -> Tensor:
    """Return the keys that the queries are compared with, their own among them."""
    if not in_batch and negatives is None:
        raise ConfigError(
            "there is nothing to compare with: in_batch is False and negatives is None; "
            "pass negatives ([0, dim] while a queue is empty)"
        )
    if not in_batch and gathered_key is not None:
        raise ConfigError(
            f"gathered keys would be of no use: {list(gathered_key.shape)} came with in_batch=False; "
            "leave gathered_key out"
        )
    columns = key if gathered_key is None else gathered_key
    check_columns("the gathered keys", columns, query)
    if in_batch:
        check_offset(offset, len(query), len(columns))
    return columns
