"""Evaluation by sentence similarity (STS): the rank correlation of cosines and human scores."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import normalize

from raycl.data.columns import ColumnNames, UnlabeledColumnNames
from raycl.data.discovery import check_no_splits, find_source
from raycl.data.sources import plain_values
from raycl.display import EvaluationResult
from raycl.errors import ConfigError, DataError
from raycl.evaluation.lexical_baselines import tfidf_similarity
from raycl.evaluation.metrics import check_scores, sts_scores
from raycl.inference.embed import embed_values
from raycl.inference.encoder import read_encoders
from raycl.inference.reading import read_values, report_unread
from raycl.tokenization import InvalidTextError, read_text

_DIGITS = 12  # of similarities: pairs of equal sentences tie at 1
REQUIRED_COLUMNS = ("sentence1", "sentence2", "score")


def evaluate_sts(
    *,
    run: str,
    test: str,
    train: str | None = None,
    text: str = "text",
    network: nn.Module | None = None,
    baseline: bool = True,
    gpu: bool = False,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> EvaluationResult:
    """Compute Spearman's correlation of cosine and score over all pairs of each data set.

    ``test`` is of any format that a run reads, with the columns ``sentence1``, ``sentence2``, ``score`` and
    optionally ``dataset``. The ``baseline`` is the cosine of TF-IDF, with document frequencies from the column ``text``
    of ``train``, or without it from the sentences themselves; it is None for a data set in which no pair
    shares a word, and skipped, with a line on stderr, if no sentence has one. A run that trained your own module needs
    it as ``network``. Raises ``DataError`` for a missing column, an invalid sentence or score, or a data set with a single
    pair or equal scores.
    """
    (saved,) = read_encoders(run, ["query"], network=network)
    saved.check(network)  # before the pairs are read
    if saved.takes_images:
        raise ConfigError(f"the run at {run} has an encoder of images; sts needs one of texts")
    pairs = _read(test, quiet=quiet)
    check_scores(pairs.score, pairs.dataset)  # before the sentences are embedded
    left, right = pairs.left, pairs.right
    corpus = [*left, *right]
    if train is not None:
        corpus = _read_corpus(train, text, quiet=quiet)
    # Each text once: rounding would give a repeated one another embedding, and so break ties.
    number = {each: position for position, each in enumerate(dict.fromkeys([*left, *right]))}
    options: dict[str, Any] = {"gpu": gpu, "address": address, "quiet": quiet, "debug": debug}
    embedding = normalize(embed_values(list(number), saved, network=network, **options)[0].double())
    left_rows, right_rows = (embedding[[number[each] for each in texts]] for texts in (left, right))
    similarity = (left_rows * right_rows).sum(1).numpy().round(_DIGITS)
    result = EvaluationResult({"measure": "sts", **sts_scores(similarity, pairs.score, pairs.dataset)})
    result.update({"num_train": 0 if train is None else len(corpus), "num_test": len(left)})
    if baseline:
        try:
            shared_words = tfidf_similarity(left, right, corpus).round(_DIGITS)
        except DataError as error:  # the encoder's results need no words
            print(f"raycl: no baseline of words: {error}", file=sys.stderr)
            return result
        result["baseline"] = {
            "tfidf": sts_scores(shared_words, pairs.score, pairs.dataset, may_be_equal=True)
        }
    return result


@final
@dataclass(frozen=True, kw_only=True)
class _Pairs:
    """Pairs of sentences with a score and the name of the data set of each."""

    left: list[str]
    right: list[str]
    score: NDArray[np.float64]
    dataset: list[Any]


class _PairColumns(ColumnNames):
    """The columns of scored pairs: as roles of ids, scores and names are numbers or text in files without types."""

    _usual: ClassVar[tuple[str, ...]] = ()  # no labels tell which pairs match

    def found_in(self, names: Sequence[str], *, where: str) -> ColumnNames:
        for name in REQUIRED_COLUMNS:
            if name not in names:
                raise DataError(
                    f"{where} has no column {name!r}; it has {', '.join(names)}: sts needs "
                    "sentence1, sentence2 and score"
                )
        return self if "dataset" in names else replace(self, document_id=None)

    def check_types(self, types: Mapping[str, pa.DataType], *, where: str) -> None:
        """Accept all types: each value is checked when it is read."""


def _read(uri: str, *, quiet: bool) -> _Pairs:
    asked = {"query": "sentence1", "document": "sentence2", "query_id": "score", "document_id": "dataset"}
    source = find_source(uri, _PairColumns(image=None, **asked))
    check_no_splits(source)
    report_unread([source], quiet=quiet)
    names = list(source.columns.asked.values())
    left, right, dataset = list[str](), list[str](), list[Any]()
    scores, places = list[Any](), list[str]()
    for fragment in source.fragments:
        where = str(fragment.place)
        for first, table in source.tables(fragment, names):
            left += _texts(table, "sentence1", where, first)
            right += _texts(table, "sentence2", where, first)
            scores += plain_values(table["score"])
            places += (f"row {row} of {where}" for row in range(first, first + len(table)))
            dataset += (
                list(map(_name, table["dataset"].to_pylist())) if "dataset" in names else ["sts"] * len(table)
            )
    return _Pairs(left=left, right=right, score=_numbers(scores, places), dataset=dataset)


def _read_corpus(uri: str, text: str, *, quiet: bool) -> list[str]:
    try:
        rows = read_values(uri, UnlabeledColumnNames(image=None, text=text), quiet=quiet).by_role["text"]
    except DataError as error:  # this measure names its only column by text=NAME
        raise DataError(re.sub(r"(--set '?)data\.columns(\.text)?", r"\1text", str(error))) from error
    return [each for row in rows for each in (row if isinstance(row, list) else [row])]


def _texts(table: pa.Table, name: str, where: str, first: int) -> list[str]:
    values = plain_values(table[name])
    for row, value in enumerate(values, first):
        try:
            values[row - first] = read_text(value)
        except InvalidTextError as error:
            raise DataError(
                f"row {row} of {where} has a {name} that cannot be used: {error}; fix it or remove the row"
            ) from None
    return values


def _name(value: Any) -> Any:
    """Return the name of a data set, which may be a number; text in place of a NaN or a list, which equal no other."""
    return value if value is None or isinstance(value, str | int) else str(value)


def _numbers(scores: Sequence[Any], places: Sequence[str]) -> NDArray[np.float64]:
    numbers = np.array(list(map(_number, scores)), np.float64)
    invalid = np.flatnonzero(~np.isfinite(numbers))
    if len(invalid):
        first, score = places[invalid[0]], scores[invalid[0]]
        score = score.decode(errors="replace") if isinstance(score, bytes) else score
        raise DataError(
            f"{first} has the score {score!r}, which is not a finite number ({len(invalid):,} of "
            f"{len(scores):,} rows have none); give each pair a number, or remove the row"
        )
    return numbers


def _number(score: Any) -> float:
    try:
        return float(score)
    except (TypeError, ValueError):  # missing, a list, or a text of no number
        return np.nan
