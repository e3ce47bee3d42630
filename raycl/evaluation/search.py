"""Exact search for the documents most similar to each query, with excluded pairs."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycl.errors import ConfigError, DataError
from raycl.evaluation.knn import Mask, nearest

# Similarity and document position, both [num_queries, k], best first; -inf and -1 mark an empty place.
Ranking = tuple[NDArray[np.floating], NDArray[np.int64]]

_FUSION_OFFSET = 60  # as in the paper


def search(
    query: Tensor,
    documents: Tensor,
    *,
    k: int,
    excluded: NDArray[np.integer] | None = None,
    entities: tuple[NDArray[np.integer], NDArray[np.integer]] | None = None,
) -> Ranking:
    """Find the ``k`` documents with the highest cosine similarity to each query, exactly.

    ``query`` is [num_queries, dim], ``documents`` is [num_documents, dim], the inputs of
    ``raycl.evaluation.nearest``. ``excluded`` is [num_excluded, 2], positions of a query and of a document
    that it must not find: its own text among the documents, or a pair known from another split. With ``entities``,
    the entity of each query [num_queries] and of each document [num_documents], it holds entities instead of positions,
    so many queries and documents of one entity take no more memory.

    Returns similarity and document position, both [num_queries, min(k, num_documents)], best first. Ties
    are in order of position. If the exclusions leave fewer documents, the similarity is -inf and the
    position -1.

    Memory as in ``nearest``, for any number of exclusions. Raises
    ``ConfigError`` for k below 1, ``DataError`` for values that are not finite, or without a query or a
    document.
    """
    width = ranking_width(k, len(query), len(documents))
    mask = None
    if excluded is not None and len(excluded):
        of_query, of_document = entities or (np.arange(len(query)), np.arange(len(documents)))
        mask = _mask(excluded, of_query, of_document)
    similarity, index = (found.cpu().numpy() for found in nearest(query, documents, k=width, mask=mask))
    return similarity, np.where(np.isneginf(similarity), -1, index)


def num_texts(document: NDArray[np.integer], k: int) -> int:
    """Return the number of texts to find, so that ``k`` documents are among them; at most 10 ``k``.

    ``document`` [num_texts] is the document of each text, an integer from 0.
    """
    sizes = np.sort(np.unique(document, return_counts=True)[1])[::-1]
    return min(int(sizes[: k - 1].sum()) + 1, 10 * k)


def of_documents(ranking: Ranking, document: NDArray[np.integer], k: int) -> Ranking:
    """Turn rankings of texts into rankings of the first ``k`` documents, each at the place of its best text.

    ``document`` as in ``num_texts``.
    """
    num_queries, width = ranking[1].shape
    similarity = np.full((num_queries, min(k, width)), -np.inf, ranking[0].dtype)
    index = np.full(similarity.shape, -1, dtype=np.int64)
    for row, found in enumerate(ranking[1]):
        found = document[found[found >= 0]]
        first = np.sort(np.unique(found, return_index=True)[1])[:k]
        similarity[row, : len(first)], index[row, : len(first)] = ranking[0][row, first], found[first]
    return similarity, index


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


def _mask(
    excluded: NDArray[np.integer], of_query: NDArray[np.integer], of_document: NDArray[np.integer]
) -> Mask:
    """Return the mask of pairs of entities [num_excluded, 2] for queries and documents of these entities."""
    pairs = excluded[np.isin(excluded[:, 0], of_query)]
    pairs = pairs[np.argsort(pairs[:, 0])]

    def mask(queries: slice, documents: slice) -> Tensor:
        entity, row = np.unique(of_query[queries], return_inverse=True)
        known, column = np.unique(of_document[documents], return_inverse=True)
        first, stop = (np.searchsorted(pairs[:, 0], entity, side=side) for side in ("left", "right"))
        own = np.concatenate([pairs[a:b, 1] for a, b in zip(first, stop, strict=True)])
        place = np.searchsorted(known, own).clip(max=len(known) - 1)
        is_here = known[place] == own
        if not is_here.any():
            return torch.empty((0, 2), dtype=torch.int64)
        is_excluded = np.zeros((len(entity), len(known)), np.bool_)
        is_excluded[np.repeat(np.arange(len(entity)), stop - first)[is_here], place[is_here]] = True
        return torch.from_numpy(is_excluded.take(column, axis=1).take(row, axis=0)).nonzero()

    return mask
