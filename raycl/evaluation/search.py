"""Exact search for the documents most similar to each query, with excluded pairs."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from raycl.errors import ConfigError, DataError
from raycl.evaluation.knn import nearest

# Similarity and document position, both [num_queries, k], best first; -inf and -1 mark an empty place.
Ranking = tuple[NDArray[np.floating], NDArray[np.int64]]

_FUSION_OFFSET = 60  # as in the paper
_QUERIES = 1_024  # per block: a query with many exclusions costs memory in its block only


def search(
    query: Tensor, documents: Tensor, *, k: int, excluded: NDArray[np.integer] | None = None
) -> Ranking:
    """Find the ``k`` documents with the highest cosine similarity to each query, exactly.

    ``query`` is [num_queries, dim], ``documents`` is [num_documents, dim], the inputs of
    ``raycl.evaluation.nearest``. ``excluded`` is [num_excluded, 2], positions of a query and of a document
    that it must not find: its own text among the documents, or a pair known from another split.

    Returns similarity and document position, both [num_queries, min(k, num_documents)], best first. Ties
    are in order of position. If the exclusions leave fewer documents, the similarity is -inf and the
    position -1.

    Memory as in ``nearest`` for 1,024 queries, with k plus the most exclusions of one query. Raises
    ``ConfigError`` for k below 1, ``DataError`` for values that are not finite, or without a query or a
    document.
    """
    width = ranking_width(k, len(query), len(documents))
    known = pair_numbers(excluded, len(documents))
    parts: list[Ranking] = []
    for first in range(0, len(query), _QUERIES):
        part = query[first : first + _QUERIES]
        # The pairs of this block, numbered from its first query.
        own = _between(known, first * len(documents), (first + len(part)) * len(documents))
        max_excluded = int(np.bincount(own // len(documents)).max(initial=0))
        similarity, index = (
            found.cpu().numpy() for found in nearest(part, documents, k=width + max_excluded)
        )
        number = np.arange(len(part))[:, None] * len(documents) + index
        parts.append(_without(np.isin(number, own), similarity, index, width))
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def fuse(*rankings: NDArray[np.integer]) -> NDArray[np.int64]:
    """Merge rankings of the same queries by reciprocal rank fusion (Cormack, Clarke and Buettcher, 2009).

    Each is [num_queries, k], document positions, best first; -1 marks an empty place; all have the same k. A document
    scores the sum of 1 / (60 + its rank) over the rankings that have it. Of equal scores, the higher rank in one
    ranking comes first, then the earlier ranking. Returns [num_queries, sum of all k], with -1 in empty places.
    """
    interleaved = np.stack(rankings, axis=2).reshape(len(rankings[0]), -1)
    gains = 1 / (_FUSION_OFFSET + 1 + np.arange(interleaved.shape[1]) // len(rankings))
    merged = np.full(interleaved.shape, -1, dtype=np.int64)
    for row, found in enumerate(interleaved):
        documents, first, number = np.unique(found[found >= 0], return_index=True, return_inverse=True)
        score = np.bincount(number, weights=gains[found >= 0])
        merged[row, : len(documents)] = documents[np.lexsort((first, -score))]
    return merged


def ranking_width(k: int, num_queries: int, num_documents: int) -> int:
    """Return the number of columns of a ranking; raises ``ConfigError`` or ``DataError`` as ``search``."""
    if k < 1:
        raise ConfigError(f"k must be at least 1, got {k}; give the number of documents to find")
    if num_queries == 0 or num_documents == 0:
        raise DataError(
            f"a search needs queries and documents, got {num_queries} and {num_documents}; "
            "give sets with some"
        )
    return min(k, num_documents)


def pair_numbers(pairs: NDArray[np.integer] | None, num_documents: int) -> NDArray[np.int64]:
    """Number pairs of positions [num_pairs, 2] as query * num_documents + document, sorted and unique."""
    if pairs is None:
        return np.empty(0, dtype=np.int64)
    query, document = pairs.astype(np.int64).T
    return np.unique(query * num_documents + document)


def _between(numbers: NDArray[np.int64], low: int, high: int) -> NDArray[np.int64]:
    """Return the sorted numbers in [low, high), minus low."""
    start, stop = np.searchsorted(numbers, (low, high))
    return numbers[start:stop] - low


def _without(
    is_excluded: NDArray[np.bool_], similarity: NDArray[np.floating], index: NDArray[np.int64], width: int
) -> Ranking:
    """Remove excluded entries and keep the first ``width`` columns of arrays [num_queries, k]."""
    # A stable sort of booleans moves exclusions to the end and keeps the order of the rest.
    order = is_excluded.argsort(axis=1, kind="stable")[:, :width]
    is_excluded = np.take_along_axis(is_excluded, order, axis=1)
    similarity = np.take_along_axis(similarity, order, axis=1)
    index = np.take_along_axis(index, order, axis=1)
    return np.where(is_excluded, -np.inf, similarity), np.where(is_excluded, -1, index)
