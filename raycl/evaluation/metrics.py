"""Metrics of rankings (trec_eval), labeled pairs (scikit-learn) and sentence similarity (SciPy)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytrec_eval
from numpy.typing import NDArray
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score

from raycl.errors import DataError

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

    Raises ``DataError`` for other grades, or if no query has a relevant document.
    """
    check_relevance(relevance, len(ranked))
    gains = _gains(relevance)
    judged = sorted(gains, key=int)
    metrics = _METRICS | (_BY_ANY if any_is_enough else {})
    evaluator = pytrec_eval.RelevanceEvaluator(gains, set(metrics.values()))
    rows: list[dict[str, float]] = []
    for first in range(0, len(judged), _QUERIES):
        run = {query: _as_scores(ranked[int(query)]) for query in judged[first : first + _QUERIES]}
        rows += evaluator.evaluate(run).values()
    scores = {name: sum(row[key] for row in rows) / len(judged) for name, key in metrics.items()}
    return scores | {"num_queries": len(judged), "num_skipped": len(ranked) - len(judged)}


def check_relevance(relevance: NDArray[np.integer], num_queries: int) -> None:
    """Raise ``DataError`` for grades other than 0 to 10, or if no query has a relevant document.

    ``relevance`` is [num_judgments, 3], as for :func:`retrieval_scores`.
    """
    grades = relevance[:, 2]
    if len(grades) and not 0 <= grades.min() <= grades.max() <= _MAX_GRADE:
        raise DataError(
            f"grades of relevance must be 0 to {_MAX_GRADE}, got {grades.min()} to {grades.max()}; "
            "check the label column"
        )
    if not (grades >= 1).any():
        raise DataError(
            f"none of the {num_queries} queries has a relevant document, whose label is 1 or more; "
            "check the label column"
        )


def average_precision(similarity: NDArray[np.floating], label: NDArray[np.integer]) -> float:
    """Return the average precision of pairs ranked by similarity, 0 to 1.

    ``similarity`` and ``label`` are [num_pairs]; the label is 1 for a match, else 0.
    Pairs of equal similarity share one threshold.
    """
    return float(average_precision_score(label, similarity))


def spearman(similarity: Numbers, score: Numbers, name: str = "the set") -> float:
    """Return Spearman's rank correlation of similarities and scores, both [num_pairs]; -1 to 1.

    Equal values share the mean of their ranks. ``name`` names the set in errors. Raises ``DataError`` for
    values that are not finite, or similarities or scores that are all equal, which have no ranks.
    """
    _check_ranks("similarities", similarity, name)
    _check_ranks("scores", score, name)
    result: Any = spearmanr(similarity, score)
    return float(result.statistic)


def check_scores(score: Numbers, dataset: Sequence[str]) -> None:
    """Raise ``DataError`` as ``spearman`` does for the scores of a data set; both arguments are [num_pairs]."""
    for name, own in _pairs_by_name(dataset).items():
        _check_ranks("scores", score[own], name)


def sts_scores(
    similarity: Numbers, score: Numbers, dataset: Sequence[str], *, may_be_equal: bool = False
) -> dict[str, Any]:
    """Correlate all pairs of each data set at once: "all" in the tables of SimCSE (Gao et al., 2021).

    ``similarity`` and ``score`` are [num_pairs], ``dataset`` names each pair's data set. Subsets, such as
    the news and the forums of STS12, are not averaged. Returns ``spearman``, the correlation by data set
    in order of appearance, and their ``mean``. With ``may_be_equal`` both are None for similarities of a data
    set that are all equal. Raises ``DataError`` as ``spearman`` does.
    """
    by_name: dict[str, float | None] = {}
    for name, own in _pairs_by_name(dataset).items():
        is_equal = may_be_equal and len(np.unique(similarity[own])) < 2
        by_name[name] = None if is_equal else spearman(similarity[own], score[own], name)
    known = [value for value in by_name.values() if value is not None]
    mean = float(np.mean(known)) if len(known) == len(by_name) else None
    return {"spearman": by_name, "mean": mean}


def _pairs_by_name(dataset: Sequence[str]) -> dict[str, NDArray[np.bool_]]:
    """Return the pairs of each data set, [num_pairs], in order of appearance."""
    names = np.asarray(dataset, dtype=object)  # numbers in one file and texts in another stay apart
    return {name: names == name for name in dict.fromkeys(dataset)}


def _check_ranks(kind: str, values: Numbers, name: str) -> None:
    if len(values) < 2:
        raise DataError(f"{name} has fewer than two pairs, which have no ranks; leave that data set out")
    if not np.isfinite(values).all():
        raise DataError(f"{kind} of {name} are not all finite; look for nan or inf")
    if len(np.unique(values)) < 2:
        remedy = (
            "look for embeddings that have collapsed" if kind == "similarities" else "give scores that differ"
        )
        raise DataError(
            f"the {len(values)} {kind} of {name} do not differ, so they have no ranks; "
            f"{remedy}, or leave that data set out"
        )


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
