"""Group click logs: one row per positive, with the explicit negatives of its query."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, final

import pyarrow as pa
import ray

from raycl.data.columns import ColumnNames
from raycl.data.coordinator import NUM_EXAMPLES
from raycl.data.decode import values_in
from raycl.data.ids import content_id, entity_id, is_missing
from raycl.data.sources import Fragment, RawRows, Source
from raycl.errors import BrokenValueError, DataError
from raycl.tokenization import BrokenTextError, read_text

WITHOUT_POSITIVE = "queries without a positive document"
REPEATED = "repeated pairs"
CONTRADICTED = "explicit negatives that are a positive of the same query"

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
_PAIR = pa.schema(
    [
        ("query", pa.string()),
        ("document", pa.string()),
        ("negatives", pa.list_(pa.string())),
        ("query_id", pa.int64()),
        ("document_id", pa.int64()),
        ("negative_ids", pa.list_(pa.int64())),
        *((f"num_{cause}", pa.int64()) for cause in (WITHOUT_POSITIVE, REPEATED, CONTRADICTED)),
    ]
)
GROUPED = ColumnNames(image=None, query="query", document="document", negatives="negatives")


def group_source(source: Source, coordinator: Any) -> ray.data.Dataset:
    """Return the pairs of a labeled source; see :func:`group_rows`."""
    described = replace(source, pieces=())

    def read(batch: pa.Table) -> Iterator[pa.Table]:
        for text in batch["fragment"].to_pylist():
            fragment = Fragment.from_json(text)
            batches = ((rows, labels_as_given(rows, described)) for rows in described.read(fragment))
            yield from _valid_tables(f"{fragment.uri}:{fragment.first_id}, labeled", batches, coordinator)

    fragments = ray.data.from_items(
        [{"fragment": fragment.to_json()} for fragment in source.pieces],
        override_num_blocks=len(source.pieces),
    )
    labeled = fragments.map_batches(read, batch_size=1, batch_format="pyarrow", zero_copy_batch=True)
    return group_rows(labeled, coordinator)


def group_dataset(dataset: ray.data.Dataset, columns: ColumnNames, coordinator: Any) -> ray.data.Dataset:
    """Return the pairs of the user's labeled dataset; see :func:`group_rows`."""
    label = columns.label
    assert label is not None, "a labeled dataset has a column of labels"

    def read(batch: pa.Table) -> Iterator[pa.Table]:
        values, labels = values_in(batch, columns), batch[label].to_pylist()
        where = [f"row {place} of a batch" for place in range(len(labels))]
        empty: Any = pa.array([], pa.int64()).to_numpy()
        rows = RawRows(values=values, sample_id=empty, label=empty, where=where)
        yield from _valid_tables(f"labeled {_hash_of([values, labels])}", [(rows, labels)], coordinator)

    return group_rows(dataset.map_batches(read, batch_size=1_024, batch_format="pyarrow"), coordinator)


def group_rows(labeled: ray.data.Dataset, coordinator: Any) -> ray.data.Dataset:
    """Return one row per positive: query, document, and the unclicked documents of the query.

    Rows belong to the same query if they share ``query_id``, or the text if there are no ids. Repeated
    pairs count once, and a document that was clicked at least once is not a negative of that query.
    The coordinator counts the skipped rows.
    """
    grouped = labeled.groupby("group").map_groups(_pairs_of_group, batch_format="pyarrow")

    def finish(table: pa.Table) -> pa.Table:
        ray.get(coordinator.add_left_out.remote(*_left_out_of(table)))
        kept = table.filter(table["document"].is_valid())
        return kept.select([name for name in kept.column_names if not name.startswith("num_")])

    return grouped.map_batches(finish, batch_size=None, batch_format="pyarrow")


def _left_out_of(pairs: pa.Table) -> tuple[str, Counter[str]]:
    """Return a name for these pairs, and the number of skipped rows of their groups by cause."""
    left_out = Counter()
    for cause in (WITHOUT_POSITIVE, REPEATED, CONTRADICTED):
        left_out[cause] = int(sum(pairs[f"num_{cause}"].to_pylist()))
    # A query may span several blocks, and several queries may share a text.
    names = pairs.select(["query", "query_id", "document"])
    return f"groups {_hash_of(names.to_pydict())}", left_out


def _hash_of(values: Any) -> int:
    return content_id(repr(values).encode())


def labels_as_given(rows: RawRows, source: Source) -> list[Any]:
    """Return the labels of rows as in the dataset; a source numbers text labels by sorted name."""
    if source.classes is None:
        return rows.label.tolist()
    return [source.classes[number] if number >= 0 else None for number in rows.label]


def _valid_tables(
    name: str, batches: Iterable[tuple[RawRows, Sequence[Any]]], coordinator: Any
) -> Iterator[pa.Table]:
    """Yield the valid rows, and report the counts of all rows."""
    broken: Counter[str] = Counter()
    examples: list[str] = []
    num_rows = 0
    for rows, labels in batches:
        num_rows += len(labels)
        yield _valid_rows(rows, labels, broken, examples)
    # These rows are not training rows; their pairs are counted later.
    ray.get(coordinator.add_rows.remote(name, num_rows, 0, broken, examples[:NUM_EXAMPLES]))


def _valid_rows(rows: RawRows, labels: Sequence[Any], broken: Counter[str], examples: list[str]) -> pa.Table:
    valid = []
    for place, label in enumerate(labels):
        try:
            valid.append(_checked_row(rows, place, label))
        except BrokenValueError as error:
            broken[str(error)] += 1
            examples.append(f"{rows.where[place]} ({error})")
    return pa.Table.from_pylist(valid, schema=_ROW)


def is_clicked(label: Any) -> bool:
    """Return whether a label is 1; raise ``BrokenValueError`` unless it is 0 or 1."""
    if str(label) in ("1", "True", "1.0"):
        return True
    if str(label) in ("0", "False", "0.0"):
        return False
    raise BrokenValueError("label other than 0 and 1")


def _checked_row(rows: RawRows, place: int, label: Any) -> dict[str, Any]:
    clicked = is_clicked(label)
    query, document = (read_text(rows.values[role][place]) for role in ("query", "document"))
    query_id, document_id = (
        None if role not in rows.values else _id_of(rows.values[role][place])
        for role in ("query_id", "document_id")
    )
    return {
        "group": content_id(query.encode()) if query_id is None else query_id,
        "query": query,
        "document": document,
        "clicked": clicked,
        "query_id": query_id,
        "document_id": document_id,
    }


def _id_of(value: Any) -> int:
    if is_missing(value):
        raise BrokenTextError("missing id")
    return entity_id(value)


@final
class _SeenDocuments:
    """Documents seen so far, by id or by text."""

    def __init__(self) -> None:
        self._known: set[Any] = set()

    def add(self, row: dict[str, Any]) -> bool:
        """Add a document; return whether it was new."""
        names = {row["document"], row["document_id"]} - {None}
        is_new = not names & self._known
        self._known |= names
        return is_new

    def __contains__(self, row: dict[str, Any]) -> bool:
        return bool({row["document"], row["document_id"]} & self._known)


def _pairs_of_group(table: pa.Table) -> pa.Table:
    # The shuffle returns rows in any order; sort them, since the ids of pairs hash their contents.
    rows = sorted(table.to_pylist(), key=itemgetter("document", "document_id", "query", "clicked"))
    seen, seen_negatives = _SeenDocuments(), _SeenDocuments()
    positives = [row for row in rows if row["clicked"] and seen.add(row)]
    others = [row for row in rows if not row["clicked"]]
    negatives = [row for row in others if row not in seen]
    distinct = [row for row in negatives if seen_negatives.add(row)]
    repeated = sum(row["clicked"] for row in rows) - len(positives) + len(negatives) - len(distinct)
    counts = {
        f"num_{WITHOUT_POSITIVE}": int(not positives),
        f"num_{REPEATED}": repeated,
        f"num_{CONTRADICTED}": len(others) - len(negatives),
    }
    explicit = {
        "negatives": [row["document"] for row in distinct],
        "negative_ids": [row["document_id"] for row in distinct if row["document_id"] is not None],
    }
    no_pair = {**rows[0], "document": None, "document_id": None}
    pairs = [{**row, **explicit, **dict.fromkeys(counts, 0)} for row in positives or [no_pair]]
    pairs[0] |= counts
    names = set(_PAIR.names)
    return pa.Table.from_pylist(
        [{k: v for k, v in pair.items() if k in names} for pair in pairs], schema=_PAIR
    )


def grouped_columns(columns: ColumnNames) -> ColumnNames:
    """Return the columns of the result of :func:`group_rows` for a dataset with these columns."""
    has_ids = columns.document_id is not None
    return replace(
        GROUPED,
        query_id="query_id" if columns.query_id else None,
        document_id="document_id" if has_ids else None,
        negative_ids="negative_ids" if has_ids else None,
    )


def check_labels(columns: ColumnNames) -> None:
    """Raise if a dataset has both labels and a list of negatives."""
    if columns.label is not None and columns.negatives is not None:
        raise DataError(
            f"the dataset has labels ({columns.label!r}) and lists of negatives ({columns.negatives!r}): "
            "remove one of the two columns"
        )
