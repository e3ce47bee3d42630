"""Evaluation by retrieval: queries to documents, or images to captions and back."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import normalize

from raycl.data.columns import ColumnNames, UnlabeledColumnNames
from raycl.data.decode import row_error
from raycl.data.ids import entity_id, is_missing
from raycl.data.matches import DistinctTexts
from raycl.data.read_stats import ReadStats
from raycl.display import EvaluationResult
from raycl.errors import ConfigError, DataError
from raycl.evaluation.lexical_baselines import bm25_search, tfidf_search, tfidf_similarity
from raycl.evaluation.metrics import average_precision, check_relevance, retrieval_scores
from raycl.evaluation.search import Ranking, fuse, num_texts, of_documents, search
from raycl.inference.embed import embed_values
from raycl.inference.encoder import read_encoders
from raycl.inference.reading import Values, read_pairs, read_values, report_invalid
from raycl.models.encoder_io import SavedEncoder
from raycl.models.specs import ImageEncoderSpec

DEPTH = 100  # of rankings: MRR and MAP ignore documents below


@final
@dataclass(frozen=True, kw_only=True)
class Task:
    """Distinct queries and documents with judgments by position.

    ``relevance`` has rows of (query, document, grade), ``excluded`` pairs (query, document) that a ranking
    skips. ``labeled`` has rows of (query, document, 0 or 1) if the set labels both kinds of pairs. With ids,
    ``same_as`` [num_documents] is the first position with the same id, which rankings and ``relevance`` name.
    """

    queries: list[Any]
    documents: list[Any]
    relevance: NDArray[np.int64]
    same_as: NDArray[np.int64] | None = None
    excluded: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))
    labeled: NDArray[np.int64] | None = None
    num_train: int = 0
    num_test: int
    num_invalid: int

    @property
    def sizes(self) -> dict[str, int]:
        """The number of rows in each set, and of the rows skipped as invalid."""
        return {"num_train": self.num_train, "num_test": self.num_test, "num_invalid": self.num_invalid}

    def rank(self, find: Callable[..., Ranking], query: Any, document: Any) -> Ranking:
        """Return the nearest documents by ``search`` or a function with its arguments."""
        same_as = np.arange(len(self.documents)) if self.same_as is None else self.same_as
        ranking = find(query, document, k=num_texts(same_as, DEPTH), excluded=self.excluded)
        return of_documents(ranking, same_as, DEPTH)

    def relevant_documents(self) -> NDArray[np.int64]:
        """Return the positions of documents that are relevant to some query, sorted."""
        return np.unique(self.relevance[self.relevance[:, 2] > 0, 1])

    def reversed(self) -> "Task":
        """Return the search for queries by the relevant documents."""
        relevant = self.relevant_documents()
        number = np.full(len(self.documents), -1)
        number[relevant] = np.arange(len(relevant))
        kept = self.relevance[number[self.relevance[:, 1]] >= 0]
        return Task(
            queries=[self.documents[position] for position in relevant],
            documents=self.queries,
            relevance=np.stack([number[kept[:, 1]], kept[:, 0], kept[:, 2]], axis=1),
            num_test=self.num_test,
            num_invalid=self.num_invalid,
        )


def evaluate_retrieval(
    *,
    run: str,
    test: str,
    train: str | None = None,
    columns: ColumnNames | None = None,
    queries: str | None = None,
    documents: str | None = None,
    network: nn.Module | None = None,
    baseline: bool = True,
    examples: int = 0,
    gpu: bool = False,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> EvaluationResult:
    """Rank all documents of ``test`` and ``train`` for each query of ``test``.

    A set holds pairs of query and document, with an optional label: 0 for no match, 1 and above for
    grades of relevance. A query ignores the documents that match it in ``train``, and its own text. If
    ``columns`` names ids (``query_id``, ``document_id``, ``negative_ids``), texts with an id in common are one query
    or document, and a document is ranked once, by the best of its texts. Or a set holds images with captions:
    then both directions are evaluated within ``test``, and one caption of
    an image is enough for its recall. For a benchmark with judgments, give the sets ``queries``
    (``query_id``, ``query``) and ``documents`` (``document_id``, ``document``), and both ids with the
    label in ``test``.

    Returns ``recall_at_1``, ``recall_at_5``, ``recall_at_10``, ``ndcg_at_10``, ``mrr`` and ``map``;
    ``average_precision`` over the pairs of ``test`` if they have labels of both kinds; the numbers of rows
    ``num_train``, ``num_test`` and ``num_invalid``; and for texts the same metrics of TF-IDF and BM25 as
    ``baseline``, and of the encoder's ranking fused with BM25's as ``hybrid``, both skipped, with a line on stderr, if no
    document has a word. ``examples`` adds that many queries with their nearest documents. A run that trained your own
    module needs it as ``network``. Raises ``DataError`` if a column is missing or nothing is relevant;
    ``ConfigError`` if only one of ``queries`` and ``documents`` is given, or ``train`` beside them, or for
    images any set beside ``test`` or any ``examples``, or if the run has an encoder of images but none of captions.
    """
    names = columns or ColumnNames()
    options: dict[str, Any] = {"network": network, "gpu": gpu, "address": address}
    options |= {"quiet": quiet, "debug": debug}
    if (queries is None) != (documents is None):
        missing = "queries" if queries is None else "documents"
        raise ConfigError(
            f"judgments need both sets, and {missing} is missing: give --set {missing}=URI as well"
        )
    if queries is not None and train is not None:
        raise ConfigError("judgments are about the sets of queries and documents alone; leave out --train")
    encoders = read_encoders(run, ["query", "key"], network=network)
    for each in encoders:
        each.check(network)  # before the sets are read
    if encoders[0].takes_images:
        if encoders[1].takes_images:
            raise ConfigError(
                f"the run at {run} has an encoder of images and none of captions; use knn or linear"
            )
        if train is not None or queries is not None:
            raise ConfigError(
                "images and captions are ranked within the set of --test alone; leave the other sets out"
            )
        if examples:
            raise ConfigError("examples are of texts, and the run has an encoder of images; leave them out")
        scores = _evaluate_images(test, names, encoders, options)
    else:
        if queries is not None and documents is not None:
            task = benchmark_task(test, queries, documents, names, quiet=quiet)
        else:
            task = pair_task(test, train, names, quiet=quiet)
        check_relevance(task.relevance, len(task.queries))  # before the texts are embedded
        scores = _evaluate_texts(task, encoders, options, baseline=baseline, examples=examples)
    return EvaluationResult({"measure": "retrieval", **scores})


def _evaluate_images(
    test: str, names: ColumnNames, encoders: list[SavedEncoder], options: dict[str, Any]
) -> dict[str, Any]:
    quiet = options["quiet"]
    values = read_captioned_images(test, names, quiet=quiet)
    images = list(_numbered(values.by_role["image"]))
    image, decoded = embed_values(
        images, encoders[0], title="embedding the queries", max_invalid_fraction=1.0, **options
    )
    broken = list(set(images) - {images[position] for position in decoded})
    task = image_task(_without(broken, values, encoders[0], test, quiet=quiet))
    caption, _ = embed_values(task.documents, encoders[1], title="embedding the documents", **options)
    directions = {
        "query_to_document": (task, image, caption),
        "document_to_query": (task.reversed(), caption[task.relevant_documents()], image),
    }
    result: dict[str, Any] = {}
    for direction, (own, query, document) in directions.items():
        _, ranked = own.rank(search, query, document)
        scores = retrieval_scores(ranked, own.relevance, any_is_enough=True)
        result |= {f"{direction}_{name}": value for name, value in scores.items()}
    return result | task.sizes


def _evaluate_texts(
    task: Task, encoders: list[SavedEncoder], options: dict[str, Any], *, baseline: bool, examples: int
) -> dict[str, Any]:
    query, _ = embed_values(task.queries, encoders[0], title="embedding the queries", **options)
    document, _ = embed_values(task.documents, encoders[1], title="embedding the documents", **options)
    similarities, ranked = task.rank(search, query, document)
    result: dict[str, Any] = dict(retrieval_scores(ranked, task.relevance))
    if task.labeled is not None:
        similarity = (normalize(query)[task.labeled[:, 0]] * normalize(document)[task.labeled[:, 1]]).sum(1)
        result["average_precision"] = average_precision(similarity.numpy(), task.labeled[:, 2])
    result |= task.sizes
    if baseline:
        try:
            result |= _lexical_baseline(task, ranked)
        except DataError as error:  # the encoder's results need no words
            print(f"raycl: no baseline of words: {error}", file=sys.stderr)
    if examples:
        result["examples"] = _examples(task, (similarities, ranked), examples)
    return result


def _lexical_baseline(task: Task, ranked: NDArray[np.int64]) -> dict[str, Any]:
    """Return the scores of TF-IDF and BM25, and of the encoder's ranking fused with BM25's."""
    rankings = {
        name: task.rank(find, task.queries, task.documents)[1]
        for name, find in (("tfidf", tfidf_search), ("bm25", bm25_search))
    }
    baseline: dict[str, Any] = {
        name: retrieval_scores(ranked, task.relevance) for name, ranked in rankings.items()
    }
    if task.labeled is not None:
        query = [task.queries[number] for number in task.labeled[:, 0]]
        document = [task.documents[number] for number in task.labeled[:, 1]]
        similarity = tfidf_similarity(query, document, [*task.queries, *task.documents])
        baseline["tfidf"]["average_precision"] = average_precision(similarity, task.labeled[:, 2])
    hybrid = retrieval_scores(fuse(ranked, rankings["bm25"])[:, :DEPTH], task.relevance)
    return {"hybrid": hybrid, "baseline": baseline}


def _examples(task: Task, ranking: Ranking, num: int) -> list[dict[str, Any]]:
    """Return evenly spaced queries, each with the first five documents of its ranking and whether they match."""
    chosen = np.linspace(0, len(task.queries) - 1, min(num, len(task.queries))).astype(np.int64)
    matches = {(q, d) for q, d, grade in task.relevance.tolist() if grade > 0}
    similarities, ranked = (each[chosen, :5] for each in ranking)
    return [
        {
            "query": task.queries[q],
            "nearest": [
                {
                    "similarity": float(s),
                    "matches": (int(q), int(d)) in matches,
                    "document": task.documents[d],
                }
                for s, d in zip(row_similarity, row, strict=True)
                if d >= 0  # the exclusions left fewer documents
            ],
        }
        for q, row, row_similarity in zip(chosen, ranked, similarities, strict=True)
    ]


def pair_task(test: str, train: str | None, names: ColumnNames, *, quiet: bool = True) -> Task:
    """Search the queries of ``test`` among the documents and negatives of both sets.

    A query ignores the documents that match it in ``train``, and its own text. Texts with an id in common, of a
    column that ``names`` names, are one query or document: each matches whatever the others match.
    """
    pairs, *others = (
        read_pairs(uri, names, only_named_ids=True, quiet=quiet) for uri in (test, train) if uri is not None
    )
    query, document = (_distinct(role, [pairs, *others]) for role in ("query", "document"))
    for line in [] if quiet else [*query.notices("query"), *document.notices("document")]:
        print(line, file=sys.stderr)
    of_query, of_document = (_first_with_id(each.entity) for each in (query, document))
    queries = query.texts[: len(set(pairs.by_role["query"]))]  # those of ``train`` follow
    queries_of, texts_of = _places(of_query[: len(queries)].tolist()), _places(of_document.tolist())

    def positions(values: Values) -> NDArray[np.int64]:
        rows = zip(values.by_role["query"], values.by_role["document"], strict=True)
        return np.array([(query.number[q], document.number[d]) for q, d in rows], np.int64)

    def as_first(rows: NDArray[np.int64]) -> list[tuple[int, int]]:
        return list(zip(of_query[rows[:, 0]].tolist(), of_document[rows[:, 1]].tolist(), strict=True))

    rows = positions(pairs)
    grades = pairs.label if pairs.has_labels else np.ones(len(rows), np.int64)
    judged = dict.fromkeys(zip(as_first(rows), grades.tolist(), strict=True))
    own_texts = np.array(list(_own_texts(query.texts, document.texts)), np.int64).reshape(-1, 2)
    skipped = set(as_first(own_texts))
    for each in others:
        skipped |= set(as_first(positions(each)[each.label != 0]))  # without labels all are -1
    skipped -= {pair for pair, grade in judged if grade > 0}
    relevance = [(each, d, grade) for (q, d), grade in judged for each in queries_of[q]]
    excluded = [(each, text) for q, d in skipped for each in queries_of.get(q, ()) for text in texts_of[d]]
    return Task(
        queries=queries,
        documents=document.texts,
        relevance=np.array(relevance, np.int64).reshape(-1, 3),
        same_as=of_document,
        excluded=np.array(sorted(excluded), np.int64).reshape(-1, 2),
        labeled=_labeled(rows, pairs.label),
        num_train=sum(len(each.label) for each in others),
        num_test=len(rows),
        num_invalid=sum(each.num_invalid for each in (pairs, *others)),
    )


def benchmark_task(
    test: str, queries: str, documents: str, names: ColumnNames, *, quiet: bool = True
) -> Task:
    """Read a benchmark: sets of queries and documents by id, and judgments with grades.

    A query ignores its own text. Raises ``DataError`` for a duplicate id in a set, a judgment about an
    unknown id, judgments without grades, or an id column that the judgments and a set name differently.
    """
    ids = {"query_id": names.query_id or "query_id", "document_id": names.document_id or "document_id"}
    judgments = read_values(test, _ColumnsById(image=None, **ids, label=names.label), quiet=quiet)
    if not judgments.has_labels:
        raise DataError("the judgments have no grades; name the column with --set data.columns.label=NAME")
    texts, rows = {}, {}
    for role, uri in (("query", queries), ("document", documents)):
        id_column = ids[f"{role}_id"]
        asked = {role: getattr(names, role) or role, f"{role}_id": id_column}
        columns = _ColumnsById(image=None, **asked)
        found = read_values(uri, columns, keep_invalid=True, quiet=quiet).by_role
        texts[role] = found[role]
        rows[role] = _rows_by_id(judgments.by_role[f"{role}_id"], found[f"{role}_id"], uri)
    relevance = np.stack([rows["query"], rows["document"], judgments.label], axis=1)
    return _valid_texts_task(texts["query"], texts["document"], relevance, judgments.num_invalid)


@final
class _ColumnsById(ColumnNames):
    """The columns of judgments, or of a set of queries or documents, whose labels have no meaning."""

    @property
    def usual(self) -> tuple[str, ...]:
        of_texts = self.query is not None or self.document is not None
        return tuple(role for role in super().usual if role != "label" or not of_texts)

    def found_in(self, names: Sequence[str], *, where: str) -> ColumnNames:
        for role in ("query_id", "document_id"):
            name = getattr(self, role)
            if name is not None and name not in names:
                raise DataError(
                    f"{where} has no column {name!r}; it has {', '.join(names)}: judgments and sets must name a column of ids "
                    f"alike ({role}, or --set data.columns.{role}=NAME for both); rename it in one of the files"
                )
        return super().found_in(names, where=where)


def read_captioned_images(test: str, names: ColumnNames, *, quiet: bool = True) -> Values:
    """Read images, which are not decoded, and their captions."""
    columns = UnlabeledColumnNames(image=names.image or "image", caption=names.caption or "caption")
    return read_values(test, columns, quiet=quiet)


def _without(broken: list[bytes], values: Values, saved: SavedEncoder, uri: str, *, quiet: bool) -> Values:
    """Skip and count the rows with a broken image, and name some of them."""
    if not broken:
        return values
    assert isinstance(saved.spec, ImageEncoderSpec), "the encoder takes images"
    decoded = {"image": saved.spec.image_format().decode_all(broken)}
    errors = {image: row_error(decoded, place) for place, image in enumerate(broken)}
    found = [errors.get(each) for each in values.by_role["image"]]
    stats = ReadStats(num_rows=len(found))
    for where, error in zip(values.where, found, strict=True):
        if error is not None:
            stats.add_invalid(where, error)
    report_invalid(uri, stats, quiet=quiet)
    return values.select(np.array([error is None for error in found]), uri)


def image_task(values: Values) -> Task:
    """Search captions by images; the captions of all rows with an image are its own."""
    images = values.by_role["image"]
    captions = [each if isinstance(each, list) else [each] for each in values.by_role["caption"]]
    image, document = _numbered(images), _numbered(*captions)
    rows = zip(images, captions, strict=True)
    relevance = np.array([(image[i], document[c], 1) for i, own in rows for c in own], np.int64)
    return Task(
        queries=list(image),
        documents=list(document),
        relevance=np.unique(relevance.reshape(-1, 3), axis=0),
        num_test=len(captions),
        num_invalid=values.num_invalid,
    )


def _numbered(*lists: Sequence[Any]) -> dict[Any, int]:
    """Number the distinct values in order of appearance."""
    return {value: number for number, value in enumerate(dict.fromkeys(chain.from_iterable(lists)))}


def _distinct(role: str, sets: Sequence[Values]) -> DistinctTexts[str]:
    """Return the queries, or the documents and negatives, of all sets."""
    texts, ids = list[str](), list[int | None]()
    for by_role in (each.by_role for each in sets):
        texts += by_role[role]
        ids += by_role.get(f"{role}_id") or [None] * len(by_role[role])
        if role == "document" and "negatives" in by_role:
            lists = by_role["negatives"]
            texts += chain.from_iterable(lists)
            ids += chain.from_iterable(by_role.get("negative_ids") or ([None] * len(own) for own in lists))
    return DistinctTexts(texts, ids)


def _first_with_id(entity: Sequence[int]) -> NDArray[np.int64]:
    """Return for each text the position of the first text of the same entity."""
    _, first, number = np.unique(entity, return_index=True, return_inverse=True)
    return first[number]


def _places(values: Iterable[Any]) -> dict[Any, list[int]]:
    """Return the positions of each value."""
    places: dict[Any, list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault(value, []).append(place)
    return places


def _labeled(rows: NDArray[np.int64], label: NDArray[np.int64]) -> NDArray[np.int64] | None:
    if not ((label == 0).any() and (label > 0).any()):
        return None
    return np.column_stack([rows, (label > 0).astype(np.int64)])


def _own_texts(queries: Iterable[Any], documents: Iterable[Any]) -> set[tuple[int, int]]:
    """Return each query with the documents of the same text."""
    positions = _places(documents)
    return {(number, position) for number, text in enumerate(queries) for position in positions.get(text, ())}


def _without_matches(pairs: set[tuple[int, int]], relevance: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the pairs that are not judged relevant, [num_pairs, 2]."""
    matches = {(query, document) for query, document, grade in relevance.tolist() if grade > 0}
    return np.array(sorted(pairs - matches), np.int64).reshape(-1, 2)


def _rows_by_id(judged: list[Any], ids: list[Any], uri: str) -> list[int]:
    """Return the row in the set at ``uri`` of each judged id."""
    rows: dict[int, int] = {}
    for row, each in enumerate(ids):
        if not is_missing(each) and rows.setdefault(entity_id(each), row) != row:
            raise DataError(f"id {_as_text(each)} comes twice in {uri}; give each its own row")
    unknown = [each for each in judged if is_missing(each) or entity_id(each) not in rows]
    if unknown:
        raise DataError(
            f"a judgment is about id {_as_text(unknown[0])}, which {uri} lacks; give the set judged"
        )
    return [rows[entity_id(each)] for each in judged]


def _as_text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _valid_texts_task(
    queries: list[Any], documents: list[Any], relevance: NDArray[np.int64], num_invalid: int
) -> Task:
    """Skip and count queries and documents with invalid texts, and skip their judgments."""
    is_query, is_document = (np.array([text is not None for text in each]) for each in (queries, documents))
    kept = relevance[is_query[relevance[:, 0]] & is_document[relevance[:, 1]]]
    queries, documents = list(compress(queries, is_query)), list(compress(documents, is_document))
    query, document = np.cumsum(is_query) - 1, np.cumsum(is_document) - 1
    renumbered = np.stack([query[kept[:, 0]], document[kept[:, 1]], kept[:, 2]], axis=1)
    return Task(
        queries=queries,
        documents=documents,
        relevance=renumbered,
        excluded=_without_matches(_own_texts(queries, documents), renumbered),
        num_test=len(relevance),
        num_invalid=num_invalid + int((~is_query).sum() + (~is_document).sum()),
    )
