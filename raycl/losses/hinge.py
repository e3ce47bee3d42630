"""The hinge loss: every positive is to be nearer than the negatives, by a margin."""

import math
from functools import partial

from torch import Tensor

from raycl.errors import ConfigError
from raycl.losses.checks import check_columns, check_offset, check_pair, check_passes_gradient
from raycl.losses.margins import Pairs
from raycl.losses.pair_ids import GivenIds, checked_pair_ids
from raycl.losses.tiled import fused, working_precision
from raycl.losses.violations import evaluate_margins


def hinge(
    query: Tensor,
    key: Tensor,
    *,
    margin: float,
    hardest: bool = False,
    bidirectional: bool | None = None,
    in_batch: bool = True,
    gathered_query: Tensor | None = None,
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
    """Rank each query's own key above its other candidates, by a margin (Kiros et al., 2014).

    A candidate n violates query i by max(0, margin + query i . n - query i . key i), whose gradient
    at 0 is 0. The candidates are the other keys of the batch (unless ``in_batch`` is False) and
    ``negatives``. A query's loss is the **mean** violation of its negatives, those that are masked
    left out (Kiros et al. take the sum), or that of the ``hardest`` (VSE++: Faghri et al., 2018);
    without a negative it is 0. The loss is the **mean** over the local_batch queries.

    ``bidirectional`` ranks each key's own query above the other queries of the batch in the same
    way, and the loss is **half** the sum of both means (VSE++ adds them, which is twice that).
    No [batch, batch] matrix is ever held.

    **What is no negative.** A query and a key whose ids make a pair anywhere in the batch are
    masked, in both directions, as in ``bidirectional_cross_entropy``: another pair with the same key,
    another pair with the same query, and any candidate, of ``negatives`` too, that is some other
    pair's key of the same query. Positives of which the batch has no pair are not known here: leave
    them out of ``negatives``. Without ``query_id`` every query counts as a different one, without
    ``key_id`` every key.

    Args:
        query: [local_batch, dim], this worker's embeddings; unit rows are usual, other lengths
            are right too. Half precision is computed in float32.
        key: [local_batch, dim], row i the positive of query i.
        margin: above 0, in units of the dot product: unit rows differ by 2 at most.
        hardest: take the most similar negative only, of equally similar ones the first (keys come
            before ``negatives``).
        bidirectional: by default what ``in_batch`` is.
        in_batch: whether the other pairs of the batch are negatives.
        gathered_query: [batch, dim], the queries of all workers, gathered with gradient; ``query``
            is then read from here. Goes with ``gathered_key`` if bidirectional, and only then.
        gathered_key: [batch, dim], the keys of all workers, gathered with gradient; ``key`` is
            then read from here. Averaged over workers (as DDP does) the gradients are those of
            the whole batch.
        offset: where this worker's rows begin in the gathered ones, and their ids in the gathered ids.
        sample_id: [local_batch] int64, the short form where a pair is one sample, as two views are:
            stands for ``query_id`` and ``key_id``. Distinct ids cost one sort.
        gathered_sample_id: [batch] int64, the ids of the gathered rows.
        query_id: [local_batch] int64; equal ids are the same query.
        gathered_query_id: [batch] int64, the ids of all workers' queries, with ``gathered_key`` needed
            even where the queries themselves are not gathered. With ``in_batch=False`` no keys are
            gathered, but ids may be, for only then the pairs of other workers are known.
        key_id: [local_batch] int64; equal ids are the same key (document, item, caption).
        gathered_key_id: [batch] int64, the ids of all workers' keys; as ``gathered_query_id``.
        negatives: [num_negatives, dim], further candidates of every query, of no key: explicit
            negatives, gathered from all workers, or a queue's or bank's rows, in half precision
            too. There may be none yet.
        negative_id: [num_negatives] int64, the ids of the negatives, which are keys too.

    Returns:
        A scalar, float32 (float64 for float64 embeddings). It can be differentiated once, at
        query, key (or the gathered ones) and negatives; what requires no gradient costs none.

    Raises:
        ConfigError: shapes or arguments do not agree, or the margin is not above 0.
    """
    _check_margin(margin)
    check_pair("query and key", query, key)
    both_ways = _checked_directions(bidirectional, in_batch=in_batch, has_negatives=negatives is not None)
    _check_gathered(gathered_query, gathered_key, in_batch=in_batch, bidirectional=both_ways)
    queries = _gathered_or_own("query", query, gathered_query)
    keys = _gathered_or_own("key", key, gathered_key)
    _check_same_length(queries, keys, bidirectional=both_ways)
    others = query.new_empty(0, query.shape[1]) if negatives is None else negatives
    check_columns("the negatives", others, query)
    own = slice(offset, offset + len(key))
    if in_batch:
        check_offset(offset, len(key), len(keys))
    given = GivenIds(
        sample_id, gathered_sample_id, query_id, gathered_query_id, key_id, gathered_key_id, negative_id
    )
    ids = checked_pair_ids(
        given,
        own=own,
        batch=None if gathered_key is None else len(keys),
        in_batch=in_batch,
        num_negatives=None if negatives is None else len(others),
    )
    alone = slice(0, len(query))
    pairs = Pairs(alone if gathered_query is None else own, own if in_batch else alone, in_batch, both_ways)
    rows = working_precision(queries)
    evaluate = partial(evaluate_margins, pairs=pairs, margin=margin, hardest=hardest, ids=ids)
    # A queue in half precision that wants no gradient is taken up piece by piece.
    others = others.to(rows) if others.requires_grad else others
    return fused(evaluate, rows, keys.to(rows), others)


def _check_margin(margin: float) -> None:
    if not (math.isfinite(margin) and margin > 0):
        raise ConfigError(
            f"the margin is not a finite number above 0: it is {margin:g}; "
            "usual values for unit rows lie between 0.1 and 0.5"
        )


def _checked_directions(bidirectional: bool | None, *, in_batch: bool, has_negatives: bool) -> bool:
    """Say whether keys are compared with queries, too."""
    if not in_batch and not has_negatives:
        raise ConfigError(
            "there is nothing to compare with: in_batch is False and negatives is None; "
            "pass negatives ([0, dim] while a queue is empty)"
        )
    if bidirectional and not in_batch:
        raise ConfigError(
            "the keys have nothing to be compared with: bidirectional is True and in_batch is False; "
            "leave bidirectional out, or the batch in"
        )
    return in_batch if bidirectional is None else bidirectional


def _check_gathered(
    gathered_query: Tensor | None, gathered_key: Tensor | None, *, in_batch: bool, bidirectional: bool
) -> None:
    """Refuse gathered rows that would be of no use, and one half of those that are needed."""
    for name, rows, is_met in (
        ("gathered_query", gathered_query, bidirectional),
        ("gathered_key", gathered_key, in_batch),
    ):
        if rows is not None and not is_met:
            raise ConfigError(
                f"gathered rows would be of no use: {name} came as {list(rows.shape)} with "
                f"{in_batch=} and {bidirectional=}; leave {name} out"
            )
    if bidirectional and (gathered_query is None) != (gathered_key is None):
        missing = "gathered_query" if gathered_query is None else "gathered_key"
        raise ConfigError(
            f"only one side is gathered: {missing} is None while bidirectional is True; "
            "gather both or neither, or pass bidirectional=False"
        )


def _gathered_or_own(name: str, own: Tensor, gathered: Tensor | None) -> Tensor:
    """Return the rows of all workers, which must pass on the gradient of this worker's own."""
    if gathered is None:
        return own
    check_columns(f"the rows of gathered_{name}", gathered, own)
    check_passes_gradient(name, own, gathered)
    return gathered


def _check_same_length(queries: Tensor, keys: Tensor, *, bidirectional: bool) -> None:
    if bidirectional and len(queries) != len(keys):
        raise ConfigError(
            f"the gathered rows are no pairs: {len(queries)} queries came with {len(keys)} keys; "
            "gather every worker's rows of each"
        )
