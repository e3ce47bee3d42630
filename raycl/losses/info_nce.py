"""InfoNCE (van den Oord et al., 2018), with the negatives of MoCo (He et al., 2020)."""

from functools import partial

from torch import Tensor

from raycl.errors import ConfigError
from raycl.losses.checks import (
    check_columns,
    check_companion,
    check_offset,
    check_pair,
    check_sample_id,
    checked_ids,
    checked_temperature,
)
from raycl.losses.rectangle import Ids, Side, evaluate_rectangle
from raycl.losses.tiled import fused, has_duplicates, working_precision


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
    negatives: Tensor | None = None,
    negative_id: Tensor | None = None,
) -> Tensor:
    """Classify each query's own key among its candidates (van den Oord et al., 2018).

    The candidates are the own key, the other keys of the batch (unless ``in_batch`` is False, as
    in MoCo: He et al., 2020) and ``negatives``. The loss is the **mean** over the local_batch
    queries. No [local_batch, num_negatives] matrix is held: at most a strip of 256 rows.

    Args:
        query: [local_batch, dim], this worker's embeddings; unit rows are usual, other lengths
            are right too. Half precision is computed in float32.
        key: [local_batch, dim], row i the positive of query i.
        temperature: above 0; a 0-d tensor that requires grad is learned, its gradient exact.
        in_batch: whether the keys of the other queries are negatives.
        gathered_key: [batch, dim], the keys of all workers, gathered with gradient; ``key`` is
            then read from here. Averaged over workers (as DDP does) the gradients are those of
            the whole batch.
        offset: where this worker's keys begin in the gathered ones.
        sample_id: [local_batch] int64; a candidate with the query's id that is not its own key
            is a false negative and is masked. Distinct ids cost one sort.
        gathered_sample_id: [batch] int64, the ids of the gathered keys.
        negatives: [num_negatives, dim], further candidates of every query: a queue's or bank's
            rows, in half precision too. There may be none yet: without a negative the loss is 0.
        negative_id: [num_negatives] int64, the ids of the negatives.

    Returns:
        A scalar, float32 (float64 for float64 embeddings). It can be differentiated once, at
        query, key, temperature and negatives; what requires no gradient costs none.

    Raises:
        ConfigError: shapes or arguments do not agree, or the temperature is not above 0.
    """
    check_pair("query and key", query, key)
    check_sample_id(sample_id, query)
    check_companion("gathered_sample_id", gathered_sample_id, "gathered_key", gathered_key)
    check_companion("negative_id", negative_id, "negatives", negatives)
    columns = _checked_columns(query, key, gathered_key, offset, in_batch=in_batch, negatives=negatives)
    others = query.new_empty(0, query.shape[1]) if negatives is None else negatives
    check_columns("the negatives", others, query)
    ids = None
    if in_batch:
        ids = _batch_ids(sample_id, gathered_sample_id, columns, is_gathered=gathered_key is not None)
    negative_ids = None
    if negatives is not None:
        negative_ids = checked_ids(("sample_id", sample_id), ("negative_id", negative_id), len(others))
    rows = working_precision(query)
    evaluate = partial(
        evaluate_rectangle,
        sides=(Side(slice(0, len(rows)), positive=offset, own=None),),
        in_batch=in_batch,
        ids=ids,
        negative_ids=negative_ids,
    )
    # A queue in half precision that wants no gradient is taken up piece by piece.
    others = others.to(rows) if others.requires_grad else others
    return fused(evaluate, rows, columns.to(rows), others, checked_temperature(temperature).to(rows))


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
    check_offset(offset, len(query), len(columns))
    return columns


def _batch_ids(
    sample_id: Tensor | None, gathered_sample_id: Tensor | None, columns: Tensor, *, is_gathered: bool
) -> Ids | None:
    """Return ids of queries and keys, or None where there is nothing to mask."""
    column_id = gathered_sample_id if is_gathered else sample_id
    ids = checked_ids(("sample_id", sample_id), ("gathered_sample_id", column_id), len(columns))
    return ids if ids is not None and has_duplicates(ids[1]) else None
