"""Judging by retrieval: do queries find their documents, images their captions, and words alone as well?"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from raycl.data.columns import ColumnNames
from raycl.errors import ConfigError, DataError
from raycl.inference.values import Values, embed_values, read_values
from raycl.judging.retrieval import average_precision, retrieval_scores
from raycl.judging.search import search
from raycl.judging.text_floor import bm25_search, tfidf_search, tfidf_similarity
from raycl.models.saved import ImageEncoder, load_encoder

DEPTH = 100  # of rankings: MRR and MAP look no deeper


@final
@dataclass(frozen=True, kw_only=True)
class Task:
    """Distinct queries and documents, judgments (query, document, grade), and pairs that do not count."""

    queries: list[Any]
    documents: list[Any]
    relevance: NDArray[np.int64]
    excluded: NDArray[np.int64]

    def turned(self) -> "Task":
        """Return the search for queries by documents: only documents that are relevant to some ask."""
        asking = np.unique(self.relevance[self.relevance[:, 2] > 0, 1])
        number = np.full(len(self.documents), -1)
        number[asking] = np.arange(len(asking))
        kept = self.relevance[number[self.relevance[:, 1]] >= 0]
        turned = np.stack([number[kept[:, 1]], kept[:, 0], kept[:, 2]], axis=1)
        return Task(
            queries=[self.documents[place] for place in asking],
            documents=self.queries,
            relevance=turned,
            excluded=np.empty((0, 2), np.int64),
        )


def evaluate_retrieval(
    *,
    run: str,
    test: str,
    train: str | None = None,
    columns: ColumnNames | None = None,
    queries: str | None = None,
    documents: str | None = None,
    floor: bool = True,
    examples: int = 0,
    gpu: bool = False,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> dict[str, Any]:
    """Judge by how queries of ``test`` find their documents among all of ``test`` and ``train``.

    A set holds pairs of query and document, perhaps with a label: 0 for no match, 1 and above for
    grades of relevance; or images with their captions, judged in both directions, among those of ``test`` alone.
    Pairs that ``train``
    knows to match do not count for a query, nor does its own text. Where queries and documents are
    sets of their own, as in a benchmark with judgments, give them as ``queries`` (``query_id``, ``query``)
    and ``documents`` (``document_id``, ``document``), and in ``test`` both ids with the label.

    Returns ``recall_at_1``, ``recall_at_5``, ``recall_at_10``, ``ndcg_at_10``, ``mrr`` and ``map``; ``average_precision``
    over the pairs of ``test`` where they have labels of both kinds; ``num_train`` and ``num_test``, rows of
    each set; and of texts the same by TF-IDF and BM25 as ``floor``. ``examples`` queries come with
    the documents nearest to them. Raises ``DataError`` if a column is missing or nothing is relevant,
    ``ConfigError`` if only one of ``queries`` and ``documents`` came.
    """
    if (queries is None) != (documents is None):
        missing = "queries" if queries is None else "documents"
        raise ConfigError(
            f"judgments need both sets, and {missing} is missing: give --set {missing}=URI as well"
        )
    options: dict[str, Any] = {"gpu": gpu, "address": address, "quiet": quiet, "debug": debug}
    names = columns or ColumnNames()
    result: dict[str, Any] = {"measure": "retrieval"}
    if isinstance(load_encoder(run), ImageEncoder):
        task, sizes = _image_task(test, names)
        embedded = _embed(task, run, options)
        for direction, each, (query, document) in (
            ("query_to_document", task, embedded),
            ("document_to_query", task.turned(), embedded[::-1]),
        ):
            if direction == "document_to_query":
                query = query[np.unique(task.relevance[:, 1])]
            scores = _scores(each, query, document)
            result |= {f"{direction}_{name}": value for name, value in scores.items()}
        return result | sizes
    values = read_values(test, _pair_columns(names, judged=queries is not None))
    if queries is not None and documents is not None:
        task, num_broken = _judged_task(values, queries, documents, names)
        sizes = {"num_train": 0, "num_test": len(values.label), "num_broken": num_broken}
    else:
        known = None if train is None else read_values(train, _pair_columns(names))
        task = _pair_task(values, known)
        sizes = {
            "num_train": 0 if known is None else len(known.label),
            "num_test": len(values.label),
            "num_broken": values.num_broken + (0 if known is None else known.num_broken),
        }
    query, document = _embed(task, run, options)
    result |= _scores(task, query, document)
    pairs = _labeled_pairs(task, values) if queries is None else None
    if pairs is not None:
        similarity = (normalize(query)[pairs[:, 0]] * normalize(document)[pairs[:, 1]]).sum(1)
        result["average_precision"] = average_precision(similarity.numpy(), pairs[:, 2])
    result |= sizes
    if floor:
        result["floor"] = _word_floor(task, pairs)
    if examples:
        result["examples"] = _examples(task, query, document, examples)
    return result


def _pair_columns(names: ColumnNames, *, judged: bool = False) -> ColumnNames:
    """Return the columns of pairs, or of judgments by ids."""
    if judged:
        ids = {"query_id": names.query_id or "query_id", "document_id": names.document_id or "document_id"}
        return ColumnNames(image=None, **ids, label=names.label)
    return ColumnNames(
        image=None,
        query=names.query or "query",
        document=names.document or "document",
        label=names.label,
    )


def _distinct(*lists: Sequence[Any]) -> dict[Any, int]:
    """Number the values in the order in which they come first."""
    return {value: number for number, value in enumerate(dict.fromkeys(v for each in lists for v in each))}


def _pair_task(test: Values, train: Values | None) -> Task:
    asked, answers = test.by_role["query"], test.by_role["document"]
    others = [] if train is None else train.by_role["document"]
    query, document = _distinct(asked), _distinct(answers, others)
    grade = test.label if test.has_labels else np.ones(len(asked), np.int64)
    relevance = np.array([(query[q], document[d], g) for q, d, g in zip(asked, answers, grade, strict=True)])
    matching = {(q, d) for q, d, g in relevance.tolist() if g > 0}
    excluded = {(number, document[text]) for text, number in query.items() if text in document}
    if train is not None:
        is_match = train.label != 0  # without labels all are -1
        known = zip(train.by_role["query"], others, is_match, strict=True)
        excluded |= {(query[q], document[d]) for q, d, match in known if match and q in query}
    left_out = np.array(sorted(excluded - matching), np.int64).reshape(-1, 2)
    return Task(
        queries=list(query),
        documents=list(document),
        relevance=relevance.reshape(-1, 3),
        excluded=left_out,
    )


def _judged_task(judgments: Values, queries: str, documents: str, names: ColumnNames) -> tuple[Task, int]:
    sets, numbers = {}, {}
    for role, uri in (("query", queries), ("document", documents)):
        id_column = getattr(names, f"{role}_id") or f"{role}_id"
        asked = ColumnNames(image=None, **{role: getattr(names, role) or role, f"{role}_id": id_column})
        found = read_values(uri, asked, keep_broken=True).by_role
        sets[role] = found[role]
        numbers[role] = {each: number for number, each in enumerate(found[f"{role}_id"])}
    rows = zip(judgments.by_role["query_id"], judgments.by_role["document_id"], judgments.label, strict=True)
    try:
        relevance = np.array([(numbers["query"][q], numbers["document"][d], g) for q, d, g in rows], np.int64)
    except KeyError as error:
        raise DataError(
            f"a judgment is about id {error}, which is in neither set; give the sets that were judged"
        ) from None
    return _without_broken(sets["query"], sets["document"], relevance.reshape(-1, 3), judgments)


def _without_broken(
    queries: list[Any], documents: list[Any], relevance: NDArray[np.int64], judgments: Values
) -> tuple[Task, int]:
    """Leave out queries and documents without a text, and the judgments about them; return how many."""
    sound = [np.array([text is not None for text in texts]) for texts in (queries, documents)]
    number = [np.cumsum(each) - 1 for each in sound]
    kept = relevance[sound[0][relevance[:, 0]] & sound[1][relevance[:, 1]]]
    if not judgments.has_labels:
        raise DataError("the judgments have no grades; name the column with --set data.columns.label=NAME")
    task = Task(
        queries=list(itertools.compress(queries, sound[0])),
        documents=list(itertools.compress(documents, sound[1])),
        relevance=np.stack([number[0][kept[:, 0]], number[1][kept[:, 1]], kept[:, 2]], axis=1),
        excluded=np.empty((0, 2), np.int64),
    )
    return task, int((~sound[0]).sum() + (~sound[1]).sum())


def _image_task(test: str, names: ColumnNames) -> tuple[Task, dict[str, int]]:
    """Return images as queries and captions as documents."""
    asked = ColumnNames(image=names.image or "image", caption=names.caption or "caption")
    values = read_values(test, asked)
    found = values.by_role
    captions = [each if isinstance(each, list) else [each] for each in found["caption"]]
    document = _distinct(*captions)
    relevance = np.array([(n, document[c], 1) for n, each in enumerate(captions) for c in each], np.int64)
    task = Task(
        queries=found["image"],
        documents=list(document),
        relevance=np.unique(relevance, axis=0),
        excluded=np.empty((0, 2), np.int64),
    )
    return task, {"num_train": 0, "num_test": len(captions), "num_broken": values.num_broken}


def _embed(task: Task, run: str, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    query = embed_values(task.queries, run, side="query", title="embedding the queries", **options)
    document = embed_values(task.documents, run, side="key", title="embedding the documents", **options)
    return query, document


def _scores(task: Task, query: Tensor, document: Tensor) -> dict[str, float]:
    _, ranked = search(query, document, k=DEPTH, excluded=task.excluded)
    return retrieval_scores(ranked, task.relevance)


def _labeled_pairs(task: Task, values: Values) -> NDArray[np.int64] | None:
    """Return (query, document, label) of the pairs of a set that says of both kinds which they are."""
    if not {0, 1} <= set(np.unique(values.label).tolist()):
        return None
    return np.stack(
        [task.relevance[:, 0], task.relevance[:, 1], (task.relevance[:, 2] > 0).astype(np.int64)], axis=1
    )


def _word_floor(task: Task, pairs: NDArray[np.int64] | None) -> dict[str, Any]:
    floor: dict[str, Any] = {}
    for name, find in (("tfidf", tfidf_search), ("bm25", bm25_search)):
        _, ranked = find(task.queries, task.documents, k=DEPTH, excluded=task.excluded)
        floor[name] = retrieval_scores(ranked, task.relevance)
    if pairs is not None:
        left, right = [task.queries[q] for q in pairs[:, 0]], [task.documents[d] for d in pairs[:, 1]]
        similarity = tfidf_similarity(left, right, [*task.queries, *task.documents])
        floor["tfidf"]["average_precision"] = average_precision(similarity, pairs[:, 2])
    return floor


def _examples(task: Task, query: Tensor, document: Tensor, num: int) -> list[dict[str, Any]]:
    """Return queries spread over all, each with its five nearest documents and whether they match."""
    chosen = np.linspace(0, len(task.queries) - 1, min(num, len(task.queries))).astype(np.int64)
    similarity, ranked = search(query[chosen], document, k=5)
    matching = {(q, d) for q, d, grade in task.relevance.tolist() if grade > 0}
    return [
        {
            "query": task.queries[q],
            "nearest": [
                {
                    "similarity": float(s),
                    "matches": (int(q), int(d)) in matching,
                    "document": task.documents[d],
                }
                for s, d in zip(row_similarity, row, strict=True)
            ],
        }
        for q, row, row_similarity in zip(chosen, ranked, similarity, strict=True)
    ]
