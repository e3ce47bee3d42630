"""Metrics of rankings (trec_eval), labeled pairs (scikit-learn) and sentence similarity (SciPy)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytrec_eval
from numpy.typing import NDArray
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score, f1_score, precision_recall_curve

from raycl.errors import DataError

__all__ = ["average_precision", "best_f1", "best_threshold", "retrieval_scores", "spearman", "sts_scores"]

Numbers = NDArray[np.floating] | NDArray[np.integer]

_METRICS = {  # raycl's names: trec_eval's names
    "recall_at_1": "recall_1",
    "recall_at_5": "recall_5",
    "recall_at_10": "recall_10",
    "ndcg_at_10": "ndcg_cut_10",
    "mrr": "recip_rank",
    "map": "map",
}
_BY_ANY = {"recall_at_1": "success_1", "recall_at_5": "success_5", "recall_at_10": "success_10"}
_QUERIES = 1_024  # per call: trec_eval takes dictionaries of strings, about 110 bytes per ranked document
_MAX_GRADE = 10  # for each query, trec_eval scans a table as long as the highest gain


def retrieval_scores(
    ranked: NDArray[np.integer], relevance: NDArray[np.integer], *, any_is_enough: bool = False
) -> dict[str, float]:
    """Score rankings by graded relevance, as means over the queries with a relevant document.

    ``ranked`` is [num_queries, k], positions of documents, best first; -1 marks an empty place.
    ``relevance`` is [num_judgments, 3], rows of query position, document position and grade, 0 to 10. A
    document without a judgment has grade 0. The highest of several judgments of a pair counts, as for a
    document that was shown twice and clicked once.

    Returns ``recall_at_1``, ``recall_at_5`` and ``recall_at_10``: the share of **all** relevant documents
    within that rank, or with ``any_is_enough`` the share of queries with any such document, as usual for
    image-text retrieval (Karpathy and Fei-Fei, 2015). Also ``ndcg_at_10`` with gain 2^grade - 1 (Burges et
    al., 2005), ``mrr`` and ``map``; the last two depend on the depth of the ranking, so give at least 100
    columns. Grades of 1 and above are relevant; only nDCG distinguishes them. Queries without a relevant
    document are skipped: ``num_queries`` counts the others, ``num_skipped`` the skipped ones.

    Raises ``DataError`` for invalid shapes, positions or grades, a document twice in a ranking, or if no
    query has a relevant document.
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
    metrics = _METRICS | (_BY_ANY if any_is_enough else {})
    evaluator = pytrec_eval.RelevanceEvaluator(gains, set(metrics.values()))
    rows: list[dict[str, float]] = []
    for first in range(0, len(judged), _QUERIES):
        run = {query: _as_scores(ranked[int(query)]) for query in judged[first : first + _QUERIES]}
        rows += evaluator.evaluate(run).values()
    scores = {name: sum(row[key] for row in rows) / len(judged) for name, key in metrics.items()}
    return scores | {"num_queries": len(judged), "num_skipped": len(ranked) - len(judged)}


def average_precision(similarity: NDArray[np.floating], label: NDArray[np.integer]) -> float:
    """Return the average precision of pairs ranked by similarity, 0 to 1.

    ``similarity`` and ``label`` are [num_pairs]; the label is 1 for a match, else 0.
    Pairs of equal similarity share one threshold. Raises ``DataError`` for invalid shapes or values, or
    labels of a single class.
    """
    _check_pairs("the", similarity, label)
    return float(average_precision_score(label, similarity))


def best_threshold(similarity: NDArray[np.floating], label: NDArray[np.integer]) -> float:
    """Return the similarity threshold with the best F1, the lowest of several.

    Arguments and errors as in ``average_precision``.
    """
    _check_pairs("the", similarity, label)
    precision, recall, threshold = precision_recall_curve(label, similarity)
    total = precision + recall
    f1 = 2 * precision * recall / np.where(total > 0, total, 1)
    return float(threshold[f1[:-1].argmax()])  # the last point has no positives


def best_f1(
    dev_similarity: NDArray[np.floating],
    dev_label: NDArray[np.integer],
    similarity: NDArray[np.floating],
    label: NDArray[np.integer],
) -> float:
    """Return the F1 of the test pairs, 0 to 1, at the threshold chosen on the dev pairs.

    Similarities and labels of a set are [num_pairs]; errors as in ``average_precision``.
    """
    _check_pairs("the test", similarity, label)
    return float(f1_score(label, similarity >= best_threshold(dev_similarity, dev_label)))


def spearman(similarity: Numbers, score: Numbers) -> float:
    """Return Spearman's rank correlation of similarities and scores, both [num_pairs]; -1 to 1.

    Equal values share the mean of their ranks. Raises ``DataError`` for different shapes, values that are
    not finite, or similarities or scores that are all equal, which have no ranks.
    """
    return _spearman(similarity, score, "the set")


def sts_scores(similarity: Numbers, score: Numbers, dataset: Sequence[str]) -> dict[str, Any]:
    """Correlate all pairs of each data set at once: "all" in the tables of SimCSE (Gao et al., 2021).

    ``similarity`` and ``score`` are [num_pairs], ``dataset`` names each pair's data set. Subsets, such as
    the news and the forums of STS12, are not averaged. Returns ``spearman``, the correlation by data set
    in order of appearance, and their ``mean``. Raises ``DataError`` as ``spearman`` does.
    """
    if not len(similarity) == len(score) == len(dataset):
        raise DataError(
            "each pair needs a similarity, a score and the name of its data set, got "
            f"{len(similarity)}, {len(score)} and {len(dataset)}; check that all come from the same pairs"
        )
    if len(dataset) == 0:
        raise DataError("the set of pairs is empty: got 0 rows; give a test set with some")
    names = np.asarray(dataset)
    by_name = {
        name: _spearman(similarity[names == name], score[names == name], name)
        for name in dict.fromkeys(dataset)
    }
    return {"spearman": by_name, "mean": float(np.mean(list(by_name.values())))}


def _gains(relevance: NDArray[np.integer]) -> dict[str, dict[str, int]]:
    """Return trec_eval's input: the gains of the relevant documents of each query with some."""
    # trec_eval's gain is the grade itself, so it gets gains in place of grades. Grade 1 has gain 1, so
    # the metrics without grades count the same documents as relevant.
    gains: dict[str, dict[str, int]] = {}
    for query, document, grade in relevance[relevance[:, 2] >= 1].tolist():
        own = gains.setdefault(str(query), {})
        own[str(document)] = max(2**grade - 1, own.get(str(document), 0))
    return gains


def _as_scores(row: NDArray[np.integer]) -> dict[str, float]:
    """Give the documents of one ranking scores that fall by 1 per rank."""
    # trec_eval breaks ties by the document's name: with equal similarities "9" would rank before "10",
    # in whatever order the search returned them.
    found = row[row >= 0].tolist()
    return {str(document): float(-place) for place, document in enumerate(found)}


def _check_ranking(ranked: NDArray[np.integer]) -> None:
    if ranked.ndim != 2 or 0 in ranked.shape or not np.issubdtype(ranked.dtype, np.integer):
        raise DataError(
            "ranked must be integers [num_queries, k] with at least one query and column, got "
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
            f"{relevance.dtype} {list(relevance.shape)}; give a row per judgment"
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
        raise DataError(f"labels of pairs must be 0 or 1, got {classes[:5].tolist()}; 1 marks a match")
    if len(classes) == 1:
        raise DataError(f"{name} pairs all have label {classes[0]}; give matching pairs and others")


def _spearman(similarity: Numbers, score: Numbers, name: str) -> float:
    if similarity.ndim != 1 or score.shape != similarity.shape:
        raise DataError(
            f"similarity and score must both be [num_pairs], got {list(similarity.shape)} and "
            f"{list(score.shape)}; check that both come from the same pairs"
        )
    for kind, values in (("similarities", similarity), ("scores", score)):
        if not np.isfinite(values).all():
            raise DataError(f"{kind} of {name} are not all finite; look for nan or inf")
        if len(np.unique(values)) < 2:
            raise DataError(
                f"the {len(values)} {kind} of {name} do not differ, so they have no ranks; "
                "look for embeddings that have collapsed, or leave that data set out"
            )
    result: Any = spearmanr(similarity, score)
    return float(result.statistic)
