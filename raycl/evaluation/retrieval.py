"""Judge rankings by relevance, and labeled pairs by their similarity: trec_eval and scikit-learn."""

import numpy as np
import pytrec_eval
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, f1_score, precision_recall_curve

from raycl.errors import DataError

__all__ = ["average_precision", "best_f1", "best_threshold", "retrieval_scores"]

_MEASURES = {  # raycl's names, and trec_eval's
    "recall_at_1": "recall_1",
    "recall_at_5": "recall_5",
    "recall_at_10": "recall_10",
    "ndcg_at_10": "ndcg_cut_10",
    "mrr": "recip_rank",
    "map": "map",
}
_BY_ANY = {"recall_at_1": "success_1", "recall_at_5": "success_5", "recall_at_10": "success_10"}
_QUERIES = 1_024  # at once: trec_eval takes dictionaries of strings, about 110 bytes a document ranked
_MAX_GRADE = 10  # trec_eval walks a table as long as the highest gain, for each query


def retrieval_scores(
    ranked: NDArray[np.integer], relevance: NDArray[np.integer], *, any_is_enough: bool = False
) -> dict[str, float]:
    """Judge rankings by graded relevance; means over the queries that have a relevant document.

    ``ranked`` is [num_queries, k], positions of documents, best first; -1, where there is none, is
    passed over. ``relevance`` is [num_judgments, 3], rows of query position, document position and
    grade, 0 to 10. A document without a judgment has grade 0; of a pair judged twice the higher
    grade holds, as for a document that was shown twice and clicked once.

    Returns ``recall_at_1``, ``recall_at_5`` and ``recall_at_10`` (the share of **all** relevant
    documents that stand so high; or, where ``any_is_enough``, the share of queries of which one does,
    as image-text retrieval counts: Karpathy and Fei-Fei, 2015), ``ndcg_at_10`` with gain 2^grade - 1 (Burges et al., 2005),
    ``mrr`` and ``map``; the last two see no deeper than the ranking is, so give at least 100
    columns for them. Grade 1 and above is relevant; only nDCG tells grades apart. Queries without
    a relevant document are left out: ``num_queries`` counts those judged, ``num_skipped`` these.

    Raises ``DataError`` for shapes, positions or grades that do not fit, a document twice in a
    ranking, or no query with a relevant document.
    """
    _check_ranking(ranked)
    _check_relevance(relevance, len(ranked))
    gains = _gains(relevance)
    judged = sorted(gains, key=int)
    if not judged:
        raise DataError(
            f"none of the {len(ranked)} queries has a relevant document; "
            "check that the positions and the grades are in the right columns"
        )
    measures = _MEASURES | (_BY_ANY if any_is_enough else {})
    evaluator = pytrec_eval.RelevanceEvaluator(gains, set(measures.values()))
    rows: list[dict[str, float]] = []
    for first in range(0, len(judged), _QUERIES):
        run = {query: _as_scores(ranked[int(query)]) for query in judged[first : first + _QUERIES]}
        rows += evaluator.evaluate(run).values()
    scores = {name: sum(row[key] for row in rows) / len(judged) for name, key in measures.items()}
    return scores | {"num_queries": len(judged), "num_skipped": len(ranked) - len(judged)}


def average_precision(similarity: NDArray[np.floating], label: NDArray[np.integer]) -> float:
    """Return the average precision of pairs ranked by similarity, 0 to 1.

    ``similarity`` and ``label`` are [num_pairs], label 1 where the pair belongs together, else 0.
    Pairs of equal similarity count as found together. Raises ``DataError`` for shapes or values that
    do not fit, or labels of one class only.
    """
    _check_pairs("the", similarity, label)
    return float(average_precision_score(label, similarity))


def best_threshold(similarity: NDArray[np.floating], label: NDArray[np.integer]) -> float:
    """Return the similarity from which on pairs are best called positive: by F1, of equals the lowest.

    Arguments and errors as in ``average_precision``.
    """
    _check_pairs("the", similarity, label)
    precision, recall, threshold = precision_recall_curve(label, similarity)
    total = precision + recall
    f1 = 2 * precision * recall / np.where(total > 0, total, 1)
    return float(threshold[f1[:-1].argmax()])  # the last point of the curve calls no pair positive


def best_f1(
    dev_similarity: NDArray[np.floating],
    dev_label: NDArray[np.integer],
    similarity: NDArray[np.floating],
    label: NDArray[np.integer],
) -> float:
    """Return F1, 0 to 1, at the threshold that is best for the dev pairs: the test pairs choose nothing.

    Each two are [num_pairs], of one set; the rest as in ``average_precision``.
    """
    _check_pairs("the test", similarity, label)
    return float(f1_score(label, similarity >= best_threshold(dev_similarity, dev_label)))


def _gains(relevance: NDArray[np.integer]) -> dict[str, dict[str, int]]:
    """Return the gains of the relevant documents of each query that has some, as trec_eval takes them."""
    # trec_eval's gain is linear, the grade itself: so it is given gains for grades. Grade 1 has gain
    # 1, so that the measures without grades still count the same documents as relevant.
    gains: dict[str, dict[str, int]] = {}
    for query, document, grade in relevance[relevance[:, 2] >= 1].tolist():
        of_query = gains.setdefault(str(query), {})
        of_query[str(document)] = max(2**grade - 1, of_query.get(str(document), 0))
    return gains


def _as_scores(row: NDArray[np.integer]) -> dict[str, float]:
    """Give the documents of one ranking scores that fall by 1 from place to place."""
    # trec_eval sorts by score and breaks ties by the document's name, so that of two documents
    # equally similar "9" would stand before "10", whatever the search had put first.
    found = row[row >= 0].tolist()
    return {str(document): float(-place) for place, document in enumerate(found)}


def _check_ranking(ranked: NDArray[np.integer]) -> None:
    if ranked.ndim != 2 or 0 in ranked.shape or not np.issubdtype(ranked.dtype, np.integer):
        raise DataError(
            "ranked must be integers [num_queries, k], one query and one column or more, got "
            f"{ranked.dtype} {list(ranked.shape)}; give the positions that a search returned"
        )
    if ranked.min() < -1:
        raise DataError(
            f"ranked must be positions from 0, or -1 for none, got {ranked.min()}; count documents from 0"
        )
    in_order = np.sort(ranked, axis=1)
    twice = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)
    if twice.any():
        raise DataError(
            f"the ranking of query {twice.any(axis=1).argmax()} names document {in_order[:, 1:][twice][0]} "
            "twice; rank each document once"
        )


def _check_relevance(relevance: NDArray[np.integer], num_queries: int) -> None:
    if relevance.ndim != 2 or relevance.shape[1] != 3 or not np.issubdtype(relevance.dtype, np.integer):
        raise DataError(
            "relevance must be integers [num_judgments, 3], rows of query, document and grade, got "
            f"{relevance.dtype} {list(relevance.shape)}; give one row a judgment"
        )
    highest = (num_queries - 1, np.iinfo(np.int64).max, _MAX_GRADE)
    outside = ((relevance < 0) | (relevance > highest)).any(axis=1)
    if outside.any():
        raise DataError(
            f"relevance has the row {relevance[outside][0].tolist()}, but queries are 0 to "
            f"{num_queries - 1}, documents 0 or more and grades 0 to {_MAX_GRADE}; "
            "check the order of the columns"
        )


def _check_pairs(name: str, similarity: NDArray[np.floating], label: NDArray[np.integer]) -> None:
    if similarity.ndim != 1 or label.shape != similarity.shape or len(label) == 0:
        raise DataError(
            f"{name} pairs must have one similarity and one label each, got {list(similarity.shape)} and "
            f"{list(label.shape)}; check that both come from the same pairs"
        )
    if not np.isfinite(similarity).all():
        raise DataError(f"{name} pairs have similarities that are not finite; look for nan in the embeddings")
    classes = np.unique(label)
    if not np.isin(classes, (0, 1)).all():
        raise DataError(
            f"labels of pairs must be 0 or 1, got {classes[:5].tolist()}; 1 says that a pair belongs together"
        )
    if len(classes) == 1:
        raise DataError(
            f"{name} pairs all have label {classes[0]}; give pairs that belong together and pairs that do not"
        )
