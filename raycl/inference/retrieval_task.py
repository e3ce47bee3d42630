"""What retrieval is judged on: queries, documents, and which of these match."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from raycl.data.columns import ColumnNames
from raycl.data.ids import entity_id, is_missing
from raycl.errors import DataError
from raycl.inference.embed_values import Values, read_values


@final
@dataclass(frozen=True, kw_only=True)
class Task:
    """Distinct queries and documents, judgments (query, document, grade), and pairs that do not count.

    ``labeled`` are (query, document, 0 or 1) of a set that says of both kinds which they are.
    """

    queries: list[Any]
    documents: list[Any]
    relevance: NDArray[np.int64]
    excluded: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))
    labeled: NDArray[np.int64] | None = None
    num_train: int = 0
    num_test: int
    num_broken: int

    @property
    def sizes(self) -> dict[str, int]:
        """The rows of each set, and those left out of them."""
        return {"num_train": self.num_train, "num_test": self.num_test, "num_broken": self.num_broken}

    def asking(self) -> NDArray[np.int64]:
        """Return the documents that are relevant to some query: those that ask when the task is turned."""
        return np.unique(self.relevance[self.relevance[:, 2] > 0, 1])

    def turned(self) -> "Task":
        """Return the search for queries by the documents that are relevant to some."""
        asking = self.asking()
        number = np.full(len(self.documents), -1)
        number[asking] = np.arange(len(asking))
        kept = self.relevance[number[self.relevance[:, 1]] >= 0]
        return Task(
            queries=[self.documents[place] for place in asking],
            documents=self.queries,
            relevance=np.stack([number[kept[:, 1]], kept[:, 0], kept[:, 2]], axis=1),
            num_test=self.num_test,
            num_broken=self.num_broken,
        )


def pair_task(test: str, train: str | None, names: ColumnNames) -> Task:
    """Return the search of the queries of ``test`` among the documents and negatives of both sets.

    Pairs that ``train`` knows to match do not count for a query, nor does its own text.
    """
    columns = ColumnNames(
        image=None,
        query=names.query or "query",
        document=names.document or "document",
        negatives=names.negatives,
        label=names.label,
    )
    judged = read_values(test, columns)
    known = None if train is None else read_values(train, columns)
    asked, answers = judged.by_role["query"], judged.by_role["document"]
    query = _distinct(asked)
    document = _distinct(_documents(judged), [] if known is None else _documents(known))
    grade = judged.label if judged.has_labels else np.ones(len(asked), np.int64)
    rows = [(query[q], document[d], g) for q, d, g in zip(asked, answers, grade, strict=True)]
    relevance = np.array(rows, np.int64).reshape(-1, 3)
    excluded = _own_texts(query, document)
    if known is not None:
        excluded |= {(query[q], document[d]) for q, d in _matches(known) if q in query}
    return Task(
        queries=list(query),
        documents=list(document),
        relevance=relevance,
        excluded=_not_matching(excluded, relevance),
        labeled=_labeled(relevance, judged.label),
        num_train=0 if known is None else len(known.label),
        num_test=len(judged.label),
        num_broken=judged.num_broken + (0 if known is None else known.num_broken),
    )


def judged_task(test: str, queries: str, documents: str, names: ColumnNames) -> Task:
    """Return the search of a benchmark: sets of queries and documents by id, and judgments with grades.

    A query's own text does not count. Raises ``DataError`` if an id comes twice in a set, a judgment is
    about an id that its set lacks, or none has a grade.
    """
    ids = {"query_id": names.query_id or "query_id", "document_id": names.document_id or "document_id"}
    judgments = read_values(test, ColumnNames(image=None, **ids, label=names.label))
    if not judgments.has_labels:
        raise DataError("the judgments have no grades; name the column with --set data.columns.label=NAME")
    texts, rows = {}, {}
    for role, uri in (("query", queries), ("document", documents)):
        id_column = ids[f"{role}_id"]
        asked = ColumnNames(image=None, **{role: getattr(names, role) or role, f"{role}_id": id_column})
        found = read_values(uri, asked, keep_broken=True).by_role
        texts[role] = found[role]
        rows[role] = _rows_of(judgments.by_role[f"{role}_id"], found[f"{role}_id"], uri)
    relevance = np.stack([rows["query"], rows["document"], judgments.label], axis=1)
    return _of_sound_texts(texts["query"], texts["document"], relevance, judgments.num_broken)


def image_task(test: str, names: ColumnNames) -> Task:
    """Return the search of captions by images."""
    values = read_values(test, ColumnNames(image=names.image or "image", caption=names.caption or "caption"))
    found = values.by_role
    captions = [each if isinstance(each, list) else [each] for each in found["caption"]]
    document = _distinct(*captions)
    relevance = np.array([(n, document[c], 1) for n, each in enumerate(captions) for c in each], np.int64)
    return Task(
        queries=found["image"],
        documents=list(document),
        relevance=np.unique(relevance.reshape(-1, 3), axis=0),
        num_test=len(captions),
        num_broken=values.num_broken,
    )


def _distinct(*lists: Sequence[Any]) -> dict[Any, int]:
    """Number the values in the order in which they come first."""
    return {value: number for number, value in enumerate(dict.fromkeys(v for each in lists for v in each))}


def _documents(pairs: Values) -> list[Any]:
    """Return the documents, and behind them the negatives."""
    return [*pairs.by_role["document"], *chain.from_iterable(pairs.by_role.get("negatives", []))]


def _matches(pairs: Values) -> list[tuple[Any, Any]]:
    rows = zip(pairs.by_role["query"], pairs.by_role["document"], pairs.label, strict=True)
    return [(query, document) for query, document, label in rows if label != 0]  # without labels all are -1


def _labeled(relevance: NDArray[np.int64], label: NDArray[np.int64]) -> NDArray[np.int64] | None:
    if not ((label == 0).any() and (label > 0).any()):
        return None
    return np.stack([relevance[:, 0], relevance[:, 1], (relevance[:, 2] > 0).astype(np.int64)], axis=1)


def _own_texts(queries: Iterable[Any], documents: Iterable[Any]) -> set[tuple[int, int]]:
    """Return each query with the documents that are its own text."""
    places: dict[Any, list[int]] = {}
    for place, text in enumerate(documents):
        places.setdefault(text, []).append(place)
    return {(number, place) for number, text in enumerate(queries) for place in places.get(text, ())}


def _not_matching(pairs: set[tuple[int, int]], relevance: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the pairs without those that are judged to match, [num_pairs, 2]."""
    matching = {(query, document) for query, document, grade in relevance.tolist() if grade > 0}
    return np.array(sorted(pairs - matching), np.int64).reshape(-1, 2)


def _rows_of(judged: list[Any], ids: list[Any], uri: str) -> list[int]:
    """Return the row of the set at ``uri`` that each judgment is about, by the set's ids."""
    rows: dict[int, int] = {}
    for row, each in enumerate(ids):
        if not is_missing(each) and rows.setdefault(entity_id(each), row) != row:
            raise DataError(f"id {_shown(each)} comes twice in {uri}; give each its own row")
    unknown = [each for each in judged if is_missing(each) or entity_id(each) not in rows]
    if unknown:
        raise DataError(
            f"a judgment is about id {_shown(unknown[0])}, which {uri} lacks; give the set judged"
        )
    return [rows[entity_id(each)] for each in judged]


def _shown(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _of_sound_texts(
    queries: list[Any], documents: list[Any], relevance: NDArray[np.int64], num_broken: int
) -> Task:
    """Leave out and count queries and documents without a text, and the judgments about them."""
    sound = [np.array([text is not None for text in texts]) for texts in (queries, documents)]
    number = [np.cumsum(each) - 1 for each in sound]
    kept = relevance[sound[0][relevance[:, 0]] & sound[1][relevance[:, 1]]]
    queries, documents = list(compress(queries, sound[0])), list(compress(documents, sound[1]))
    judged = np.stack([number[0][kept[:, 0]], number[1][kept[:, 1]], kept[:, 2]], axis=1)
    return Task(
        queries=queries,
        documents=documents,
        relevance=judged,
        excluded=_not_matching(_own_texts(queries, documents), judged),
        num_test=len(relevance),
        num_broken=num_broken + int((~sound[0]).sum() + (~sound[1]).sum()),
    )
