"""Group click logs: one row per positive, with the explicit negatives of its query."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from raycl.data.columns import ColumnNames
from raycl.data.decode import map_fragments
from raycl.data.ids import content_id, entity_id, is_missing, why_invalid
from raycl.data.labels import NO_LABEL, name_of
from raycl.data.matches import divided, join_by_id, notices
from raycl.data.read_stats import ReadStats
from raycl.data.sources import Fragment, RawRows, Source, values_of
from raycl.errors import InvalidValueError
from raycl.ray_runtime import fetch_tables
from raycl.tokenization import read_text

WITHOUT_POSITIVE = "queries without a positive document"
REPEATED = "repeated pairs"
CONTRADICTED = "explicit negatives that are a positive of the same query"
_CAUSES = (WITHOUT_POSITIVE, REPEATED, CONTRADICTED)
_ROWS_PER_PART = 20_000  # of a log, for the tasks that group it
_MOST_PARTS = 200  # Ray's default

_ROW = pa.schema(
    [
        ("group", pa.int64()),
        ("query", pa.string()),
        ("document", pa.string()),
        ("clicked", pa.bool_()),
        ("query_id", pa.int64()),
        ("document_id", pa.int64()),
    ]
)
_QUERY = ("group", "query_id")
_PAIR = pa.schema(
    [
        ("query", pa.string()),
        ("document", pa.string()),
        ("negatives", pa.list_(pa.string())),
        ("query_id", pa.int64()),
        ("document_id", pa.int64()),
        ("negative_ids", pa.list_(pa.int64())),
        *((f"num_{cause}", pa.int64()) for cause in _CAUSES),
    ]
)
GROUPED = ColumnNames(image=None, query="query", document="document", negatives="negatives")


def group_source(source: Source, coordinator: Any, *, prefix: str = "") -> ray.data.Dataset:
    """Return the pairs of a labeled source; see :func:`group_rows`."""

    def read(described: Source, fragment: Fragment) -> Iterator[pa.Table]:
        stats = ReadStats()
        for rows in described.read(fragment):
            yield _valid_rows(rows.values, labels_as_given(rows, described), rows.where, stats)
        ray.get(coordinator.add_rows.remote(f"{prefix}{fragment.name}, labeled", stats))

    labeled = map_fragments(source, read)
    if source.columns.query_id is not None:
        labeled = join_queries(labeled, coordinator)
    num_parts = min(math.ceil(source.num_rows / _ROWS_PER_PART), _MOST_PARTS)
    return group_rows(labeled, coordinator, prefix=prefix, num_parts=num_parts)


def group_dataset(
    dataset: ray.data.Dataset, columns: ColumnNames, coordinator: Any, *, prefix: str = ""
) -> ray.data.Dataset:
    """Return the pairs of the user's labeled dataset; see :func:`group_rows`."""
    label = columns.label
    assert label is not None, "a labeled dataset has a column of labels"

    def read(batch: pa.Table) -> pa.Table:
        values, labels, stats = values_of(batch, columns), batch[label].to_pylist(), ReadStats()
        where = [f"row {place} of a batch" for place in range(len(labels))]
        valid = _valid_rows(values, labels, where, stats)
        ray.get(coordinator.add_rows.remote(f"{prefix}labeled {_hash_of([values, labels])}", stats))
        return valid

    labeled = dataset.map_batches(read, batch_size=1_024, batch_format="pyarrow")
    if columns.query_id is not None:
        labeled = join_queries(labeled, coordinator)
    return group_rows(labeled, coordinator, prefix=prefix)


def join_queries(labeled: ray.data.Dataset, coordinator: Any) -> ray.data.Dataset:
    """Return the rows with one ``group`` for the queries that share a text or an id, also through a chain of both.

    Without it, each text is a group. Executes the dataset, and compares the distinct pairs of a text and an id in this
    process. The coordinator gets a notice if ids join a large part of the texts.
    """
    labeled = labeled.materialize()
    queries = labeled.map_batches(_distinct_queries, batch_size=None, batch_format="pyarrow")
    tables = [table for table in fetch_tables(queries) if len(table)]
    if not tables:
        return labeled
    joined, lines = joined_groups(pa.concat_tables(tables))
    for line in lines:
        coordinator.add_notice.remote(line)

    def join(table: pa.Table) -> pa.Table:
        groups = [joined.get(group, group) for group in table["group"].to_pylist()]
        return table.set_column(0, "group", pa.array(groups, pa.int64()))

    return labeled.map_batches(join, batch_size=None, batch_format="pyarrow") if joined else labeled


def _distinct_queries(table: pa.Table) -> pa.Table:
    distinct = np.unique(np.stack([table[name].to_numpy() for name in _QUERY], 1), axis=0)
    return pa.table(dict(zip(_QUERY, distinct.T, strict=True)))


def joined_groups(queries: pa.Table) -> tuple[dict[int, int], list[str]]:
    """Return the first group of each that an id joins to another, and notices; ``queries`` has group and query_id."""
    texts, number = np.unique(queries["group"].to_numpy(), return_inverse=True)
    entity = np.array(join_by_id(np.stack([number, queries["query_id"].to_numpy()], 1), len(texts)))
    _, first, place = np.unique(entity, return_index=True, return_inverse=True)
    pairs = zip(texts.tolist(), texts[first[place]].tolist(), strict=True)
    return {text: first for text, first in pairs if text != first}, notices("query", entity)


def group_rows(
    labeled: ray.data.Dataset, coordinator: Any, *, prefix: str = "", num_parts: int = _MOST_PARTS
) -> ray.data.Dataset:
    """Return one row per positive: query, document, and the unclicked documents of the query.

    Rows belong to the same query if they share ``group``, see :func:`join_queries`. Repeated
    pairs count once, and a document that was clicked at least once is not a negative of that query. Pairs of a query with
    many unclicked documents share them, see :func:`raycl.data.matches.divided`.
    The coordinator counts the skipped rows, by names that begin with ``prefix``. The queries are divided into
    ``num_parts`` parts; each takes time, even if it is empty.
    """
    # One part without a shuffle, which takes 10 s for the smallest log.
    parts = labeled.repartition(1) if num_parts == 1 else labeled.repartition(num_parts, keys=["group"])
    grouped = parts.map_batches(_pairs_of_groups, batch_size=None, batch_format="pyarrow")

    def finish(table: pa.Table) -> pa.Table:
        name, stats = _skipped_in(table)
        ray.get(coordinator.add_rows.remote(f"{prefix}{name}", stats))
        kept = table.filter(table["document"].is_valid())
        return kept.select([name for name in kept.column_names if not name.startswith("num_")])

    return grouped.map_batches(finish, batch_size=None, batch_format="pyarrow")


def _skipped_in(pairs: pa.Table) -> tuple[str, ReadStats]:
    """Return a name for these pairs, and the number of skipped rows of their groups by cause."""
    counts = {cause: sum(pairs[f"num_{cause}"].to_pylist()) for cause in _CAUSES}
    skipped = Counter({cause: count for cause, count in counts.items() if count})
    # A query may span several blocks, and several queries may share a text.
    names = pairs.select(["query", "query_id", "document"])
    return f"groups {_hash_of(names.to_pydict())}", ReadStats(skipped=skipped)


def _hash_of(values: Any) -> int:
    return content_id(repr(values).encode())


def labels_as_given(rows: RawRows, source: Source) -> list[Any]:
    """Return the labels of rows as in the dataset, None for a missing one; a source numbers text labels by sorted name."""
    classes = source.classes
    labels = rows.label.tolist()
    return [None if each == NO_LABEL else each if classes is None else classes[each] for each in labels]


def _valid_rows(
    values: Mapping[str, Sequence[Any]], labels: Sequence[Any], where: Sequence[str], stats: ReadStats
) -> pa.Table:
    """Return the valid rows, and count all of them; training rows are counted once they are paired."""
    stats.num_rows += len(labels)
    valid = []
    for place, label in enumerate(labels):
        try:
            valid.append(_checked_row({role: each[place] for role, each in values.items()}, label))
        except InvalidValueError as error:
            stats.add_invalid(where[place], error)
    return pa.Table.from_pylist(valid, schema=_ROW)


def is_clicked(label: Any) -> bool:
    """Return whether a label is 1; raise ``InvalidValueError`` unless it is 0 or 1."""
    text = name_of(label).lower()
    if text in ("1", "true", "1.0"):
        return True
    if text in ("0", "false", "0.0"):
        return False
    is_absent = is_missing(label) or text in (
        "nan",
        "-1",
    )  # a source has one number for null and -1, and floats as texts
    raise InvalidValueError("no label, or -1" if is_absent else "label other than 0 and 1")


def _checked_row(values: Mapping[str, Any], label: Any) -> dict[str, Any]:
    clicked = is_clicked(label)
    query, document = read_text(values["query"]), read_text(values["document"])
    query_id, document_id = (
        _id_of(values[role]) if role in values else None for role in ("query_id", "document_id")
    )
    return {
        "group": content_id(query.encode()),
        "query": query,
        "document": document,
        "clicked": clicked,
        "query_id": query_id,
        "document_id": document_id,
    }


def _id_of(value: Any) -> int:
    if cause := why_invalid(value):
        raise InvalidValueError(cause)
    return entity_id(value)


def _pairs_of_groups(table: pa.Table) -> pa.Table:
    """Return the pairs of rows that hold whole groups, in the order of groups."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        groups.setdefault(row["group"], []).append(row)
    pairs = [pair for _, rows in sorted(groups.items()) for pair in _pairs_of_group(rows)]
    return pa.Table.from_pylist(pairs, schema=_PAIR)


def _pairs_of_group(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # The shuffle returns rows in any order; sort them, since the ids of pairs hash their contents.
    rows.sort(key=itemgetter("document", "document_id", "query", "clicked"))
    clicked = [row for row in rows if row["clicked"]]
    others = [row for row in rows if not row["clicked"]]
    seen: set[Any] = set()  # texts and ids of positive documents
    positives = _with_new_documents(clicked, seen)
    negatives = [row for row in others if not _document_of(row) & seen]
    distinct = _with_new_documents(negatives, set())
    counts = {
        f"num_{WITHOUT_POSITIVE}": int(not positives),
        f"num_{REPEATED}": len(clicked) - len(positives) + len(negatives) - len(distinct),
        f"num_{CONTRADICTED}": len(others) - len(negatives),
    }
    no_pair = {**rows[0], "document": None, "document_id": None}
    kept = positives or [no_pair]
    shares = zip(kept, divided(distinct, len(kept)), strict=True)
    pairs = [{**row, **_lists(share), **dict.fromkeys(counts, 0)} for row, share in shares]
    pairs[0] |= counts
    return pairs


def _lists(negatives: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {
        "negatives": [row["document"] for row in negatives],
        "negative_ids": [row["document_id"] for row in negatives if row["document_id"] is not None],
    }


def _document_of(row: Mapping[str, Any]) -> set[Any]:
    """Return the document's text and, if it has one, its id."""
    return {row["document"], row["document_id"]} - {None}


def _with_new_documents(rows: list[dict[str, Any]], seen: set[Any]) -> list[dict[str, Any]]:
    """Return the rows whose document is not among the ``seen``, by text or id; adds all to ``seen``."""
    new = []
    for row in rows:
        document = _document_of(row)
        if not document & seen:
            new.append(row)
        seen |= document
    return new


def grouped_columns(columns: ColumnNames) -> ColumnNames:
    """Return the columns of the result of :func:`group_rows` for a dataset with these columns."""
    has_ids = columns.document_id is not None
    has_negatives = "negatives" in columns.usual
    return replace(
        GROUPED,
        negatives="negatives" if has_negatives else None,
        query_id="query_id" if columns.query_id else None,
        document_id="document_id" if has_ids else None,
        negative_ids="negative_ids" if has_ids and has_negatives else None,
    )
