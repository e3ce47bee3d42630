"""Evaluation by sentence similarity (STS): the rank correlation of cosines and human scores."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch.nn.functional import normalize

from raycl.data.columns import UnlabeledColumnNames
from raycl.data.parquet_tables import open_parquet
from raycl.data.sources import existing, plain_values
from raycl.display import EvaluationResult
from raycl.errors import ConfigError, DataError
from raycl.evaluation.lexical_baselines import tfidf_similarity
from raycl.evaluation.metrics import sts_scores
from raycl.inference.embed import embed_values
from raycl.inference.encoder import read_encoders
from raycl.inference.reading import read_values
from raycl.tokenization import InvalidTextError, read_text

REQUIRED_COLUMNS = ("sentence1", "sentence2", "score")


def evaluate_sts(
    *,
    run: str,
    test: str,
    train: str | None = None,
    text: str = "text",
    baseline: bool = True,
    gpu: bool = False,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> EvaluationResult:
    """Compute Spearman's correlation of cosine and score over all pairs of each data set.

    ``test`` is a parquet file with the columns ``sentence1``, ``sentence2``, ``score`` and optionally
    ``dataset``. The ``baseline`` is the cosine of TF-IDF, with document frequencies from the column ``text``
    of ``train``, or without it from the sentences themselves; it is None for a data set in which no pair
    shares a word. Raises ``DataError`` for a missing column,
    or an invalid sentence or score.
    """
    (saved,) = read_encoders(run, ["query"])
    if saved.takes_images:
        raise ConfigError(f"the run at {run} has an encoder of images; sts needs one of texts")
    table = _read(test)
    left, right = (_texts(table, name, test) for name in ("sentence1", "sentence2"))
    score = _scores(table, test)
    names = table["dataset"].to_pylist() if "dataset" in table.column_names else ["sts"] * len(left)
    corpus = [*left, *right]
    if train is not None:
        train_rows = read_values(train, UnlabeledColumnNames(image=None, text=text)).by_role["text"]
        corpus = [each for row in train_rows for each in (row if isinstance(row, list) else [row])]
    embedding = normalize(
        embed_values([*left, *right], saved, gpu=gpu, address=address, quiet=quiet, debug=debug)
    )
    similarity = (embedding[: len(left)] * embedding[len(left) :]).sum(1).numpy()
    result = EvaluationResult({"measure": "sts", **sts_scores(similarity, score, names)})
    result.update({"num_train": 0 if train is None else len(corpus), "num_test": len(left)})
    if baseline:
        shared_words = tfidf_similarity(left, right, corpus)
        result["baseline"] = {"tfidf": sts_scores(shared_words, score, names, may_be_equal=True)}
    return result


def _read(uri: str) -> pa.Table:
    with open_parquet(existing(uri)) as file:
        table = file.read()
    for name in REQUIRED_COLUMNS:
        if name not in table.column_names:
            raise DataError(
                f"{uri} has no column {name!r}; it has {', '.join(table.column_names)}: sts needs "
                "sentence1, sentence2 and score"
            )
    if not len(table):
        raise DataError(f"{uri} has no rows; give a set with some")
    return table


def _texts(table: pa.Table, name: str, uri: str) -> list[str]:
    values = plain_values(table[name])
    for row, value in enumerate(values):
        try:
            values[row] = read_text(value)
        except InvalidTextError as error:
            raise DataError(
                f"row {row} of {uri} has a {name} that cannot be used: {error}; mend it or leave the row out"
            ) from None
    return values


def _scores(table: pa.Table, uri: str) -> NDArray[np.float64]:
    column = table["score"]
    try:
        score = column.cast(pa.float64()).to_numpy()
    except pa.ArrowException:
        score = np.array([np.nan])
    if not np.isfinite(score).all():
        raise DataError(
            f"the column score of {uri} has values of type {column.type} that are not finite numbers; "
            "give each pair a number"
        )
    return score
