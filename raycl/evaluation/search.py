"""Exact search: the documents most similar to each query, without pairs that are known already."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from raycl.errors import ConfigError, DataError
from raycl.evaluation.knn import nearest

__all__ = ["Ranking", "pair_numbers", "ranking_width", "search"]

# Similarity and document position, both [num_queries, k], best first; -inf and -1 where there is none.
Ranking = tuple[NDArray[np.floating], NDArray[np.int64]]

_QUERIES = 1_024  # at once: so one query with many excluded documents costs only its neighbors memory


def search(
    query: Tensor, documents: Tensor, *, k: int, excluded: NDArray[np.integer] | None = None
) -> Ranking:
    """Find the ``k`` documents with the highest cosine similarity to each query, exactly.

    ``query`` is [num_queries, dim], ``documents`` is [num_documents, dim], as the query and the bank
    of ``raycl.evaluation.nearest``, which searches. ``excluded`` is [num_excluded, 2], positions of a
    query and of a document that is not to be found for it: its own text among the documents, or a
    pair known from another split.

    Returns similarity and document position, both [num_queries, min(k, num_documents)], best first;
    of equal similarities the lower position comes first. Where the exclusions leave fewer documents
    the similarity is -inf and the position -1.

    Memory as in ``nearest`` for 1,024 queries at a time, and k plus as many as one of them excludes.
    Raises ``ConfigError`` for k below 1, ``DataError`` for shapes, positions or values that do not
    fit, no query or no document.
    """
    if query.ndim != 2 or documents.ndim != 2:
        raise DataError(
            "query and documents must be [num_queries, dim] and [num_documents, dim], got "
            f"{list(query.shape)} and {list(documents.shape)}; embed both with the same encoder"
        )
    width = ranking_width(k, len(query), len(documents))
    known = pair_numbers(excluded, len(query), len(documents))
    parts: list[Ranking] = []
    for first in range(0, len(query), _QUERIES):
        part = query[first : first + _QUERIES]
        # The numbers of this part's pairs, counted from its own first query.
        own = _between(known, first * len(documents), (first + len(part)) * len(documents))
        most = int(np.bincount(own // len(documents)).max(initial=0))
        similarity, index = (found.cpu().numpy() for found in nearest(part, documents, k=width + most))
        number = np.arange(len(part))[:, None] * len(documents) + index
        parts.append(_without(np.isin(number, own), similarity, index, width))
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def ranking_width(k: int, num_queries: int, num_documents: int) -> int:
    """Return how many documents a ranking has room for, once there is something to search."""
    if k < 1:
        raise ConfigError(f"k must be at least 1, got {k}; give the number of documents to find")
    if num_queries == 0 or num_documents == 0:
        raise DataError(
            f"a search needs queries and documents, got {num_queries} and {num_documents}; "
            "give sets that have some"
        )
    return min(k, num_documents)


def pair_numbers(
    pairs: NDArray[np.integer] | None, num_queries: int, num_documents: int
) -> NDArray[np.int64]:
    """Number pairs of positions, query * num_documents + document; sorted, each once."""
    if pairs is None:
        return np.empty(0, dtype=np.int64)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or not np.issubdtype(pairs.dtype, np.integer):
        raise DataError(
            "excluded must be integers [num_excluded, 2], a query's position and a document's, got "
            f"{pairs.dtype} {list(pairs.shape)}; give one row a pair"
        )
    outside = ((pairs < 0) | (pairs >= (num_queries, num_documents))).any(axis=1)
    if outside.any():
        raise DataError(
            f"excluded names the pair {pairs[outside][0].tolist()}, but there are {num_queries} queries "
            f"and {num_documents} documents; count both from 0"
        )
    query, document = pairs.astype(np.int64).T
    return np.unique(query * num_documents + document)


def _between(numbers: NDArray[np.int64], low: int, high: int) -> NDArray[np.int64]:
    """Return the sorted numbers from low to below high, less low."""
    start, stop = np.searchsorted(numbers, (low, high))
    return numbers[start:stop] - low


def _without(
    left_out: NDArray[np.bool_], similarity: NDArray[np.floating], index: NDArray[np.int64], width: int
) -> Ranking:
    """Close the gaps of what is left out, and keep the first columns; all but width [queries, k]."""
    # A stable sort of booleans puts what is left out last, and keeps the order of the rest.
    order = left_out.argsort(axis=1, kind="stable")[:, :width]
    left_out = np.take_along_axis(left_out, order, axis=1)
    similarity = np.take_along_axis(similarity, order, axis=1)
    index = np.take_along_axis(index, order, axis=1)
    return np.where(left_out, -np.inf, similarity), np.where(left_out, -1, index)
