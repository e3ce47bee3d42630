"""Judge sentence similarity: do similarities rank pairs as people's scores do?"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from raycl.errors import DataError

__all__ = ["spearman", "sts_scores"]

Numbers = NDArray[np.floating] | NDArray[np.integer]


def spearman(similarity: Numbers, score: Numbers) -> float:
    """Return Spearman's rank correlation of similarities and scores, both [num_pairs]; -1 to 1.

    Equal values share the mean of their ranks. Raises ``DataError`` for shapes that do not agree,
    values that are not finite, or similarities or scores that are all equal: these have no ranks.
    """
    return _spearman(similarity, score, "the set")


def sts_scores(similarity: Numbers, score: Numbers, dataset: Sequence[str]) -> dict[str, Any]:
    """Judge each data set by all its pairs at once: "all" in the tables of SimCSE (Gao et al., 2021).

    ``similarity`` and ``score`` are [num_pairs], ``dataset`` is the name of each pair's data set.
    Subsets, such as the news and the forums of STS12, are not averaged. Returns ``spearman``, a
    correlation by data set in the order of their first pairs, and ``mean``, over the data sets.
    Raises ``DataError`` as ``spearman``.
    """
    if not len(similarity) == len(score) == len(dataset):
        raise DataError(
            "each pair needs a similarity, a score and the name of its data set, got "
            f"{len(similarity)}, {len(score)} and {len(dataset)}; check that all come from the same pairs"
        )
    if len(dataset) == 0:
        raise DataError("there is no pair to judge: got 0 rows; give a test set that has some")
    names = np.asarray(dataset)
    by_name = {
        name: _spearman(similarity[names == name], score[names == name], name)
        for name in dict.fromkeys(dataset)
    }
    return {"spearman": by_name, "mean": float(np.mean(list(by_name.values())))}


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
