"""Decode by Ray Data tasks, or by threads: fragments of a source to tables of decoded rows."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, final

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray

from raycl.data.codecs import Formats, store_all
from raycl.data.columns import ColumnNames
from raycl.data.ids import content_id, content_ids
from raycl.data.images import ImageFormat, is_flat
from raycl.data.labels import are_numbers, class_names, distinct_labels, inexact_label, may_be_fractions
from raycl.data.read_stats import ReadStats
from raycl.data.sources import Fragment, RawRows, Source
from raycl.data.split import Holdout, Keep
from raycl.errors import DataError, InvalidValueError
from raycl.gpus import available_cores

BLOCK_BYTES = 64 * 2**20
_ROWS_PER_FRAGMENT = 1_024  # of a Ray Dataset


@final
@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Turn raw rows into tables: ``sample_id``, ``label``, and the columns of the formats by role.

    A row with an invalid value is skipped, and the coordinator, if there is one, counts it by cause. It is an actor, or
    an object of this process. Rows that ``keep`` refuses are not decoded; ``count`` selects the decoded rows that are
    counted (by default all). The rows of a click log were counted before they were grouped into pairs:
    ``counts_rows=False``. ``prefix`` precedes the names of the fragments, by which the coordinator counts. With
    ``fingerprints``, it gets the hash of the contents of each fragment, before they are decoded.
    """

    formats: Formats
    coordinator: Any
    holdout: Holdout | None = None
    keep: Keep | None = None
    count: Keep | None = None
    counts_rows: bool = True
    prefix: str = ""
    fingerprints: bool = False

    def tables(self, fragment: str, batches: Iterator[RawRows]) -> Iterator[pa.Table]:
        """Yield the valid rows of one fragment, in order, in blocks of at most 64 MiB."""
        stats = ReadStats()
        block: list[pa.Table] = []
        for rows in batches:
            block.append(self._decode(rows, stats))
            if sum(part.nbytes for part in block) >= BLOCK_BYTES:
                yield pa.concat_tables(block).combine_chunks()
                block = []
        # A stream reads the rows of the periodic evaluation separately.
        name = f"{fragment}, to evaluate" if self.count else fragment
        if self.coordinator is not None:
            add_rows = self.coordinator.add_rows
            if hasattr(add_rows, "remote"):
                # Wait, so that the counts of skipped rows are known before the rows are used.
                ray.get(add_rows.remote(f"{self.prefix}{name}", stats))
            else:
                add_rows(f"{self.prefix}{name}", stats)
        nothing = {role: [] for role in self.formats}
        yield pa.concat_tables(block or [self._table(nothing, [], [])]).combine_chunks()

    def _decode(self, rows: RawRows, stats: ReadStats) -> pa.Table:
        """Return the valid rows, and count all rows."""
        wanted = np.flatnonzero(_accepted(self.keep, rows.sample_id)).tolist()
        counted = _accepted(self.count, rows.sample_id)
        decoded = {
            role: each.decode_all([rows.values[role][index] for index in wanted])
            for role, each in self.formats.items()
        }
        valid: list[int] = []  # positions in wanted
        for place, index in enumerate(wanted):
            error = row_error(decoded, place)
            if error is None:
                valid.append(place)
            elif counted[index]:
                stats.add_invalid(rows.where[index], error)
        chosen = np.array(wanted, np.int64)[valid]
        contents = {role: [values[place] for place in valid] for role, values in decoded.items()}
        if self.counts_rows:
            stats.num_rows += int(_accepted(self.count or self.keep, rows.sample_id).sum())
        train = None if self.holdout is None else self.holdout.is_train
        stats.num_train += int(_accepted(train, rows.sample_id[chosen]).sum())
        stats.num_flat += int((are_flat(self.formats, contents) & counted[chosen]).sum())
        if self.fingerprints:
            raw = {role: [rows.values[role][index] for index in chosen] for role in self.formats}
            raw |= {"sample_id": rows.sample_id[chosen].tolist(), "label": rows.label[chosen].tolist()}
            stats.fingerprint = (stats.fingerprint + sum(content_ids(raw).tolist())) % 2**64
        return self._table(contents, rows.sample_id[chosen], rows.label[chosen])

    def _table(self, contents: Mapping[str, Sequence[Any]], ids: Any, labels: Any) -> pa.Table:
        numbers = {"sample_id": pa.array(ids, pa.int64()), "label": pa.array(labels, pa.int64())}
        return pa.table(store_all(self.formats, contents) | numbers)


def row_error(decoded: Mapping[str, Sequence[Any]], place: int) -> InvalidValueError | None:
    """Return the error of a row, None for a valid one: a value is invalid, or lists differ in length."""
    values = {role: each[place] for role, each in decoded.items()}
    for value in values.values():
        if isinstance(value, InvalidValueError):
            return value
    # With another number of ids than negatives, ids would be assigned to the wrong negatives.
    has_both = {"negatives", "negative_ids"} <= values.keys()
    if has_both and len(values["negatives"]) != len(values["negative_ids"]):
        return InvalidValueError("negatives and negative_ids differ in number")
    return None


def are_flat(formats: Formats, contents: Mapping[str, Sequence[Any]]) -> NDArray[np.bool_]:
    """Whether each row has an image with a single value; ``contents`` are decoded values by role."""
    flat = np.zeros(max((len(values) for values in contents.values()), default=0), np.bool_)
    for role, each in formats.items():
        if isinstance(each, ImageFormat):
            flat |= np.array([is_flat(pixels) for pixels, _ in contents[role]], np.bool_)
    return flat


def _accepted(keep: Keep | None, sample_id: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.ones(len(sample_id), np.bool_) if keep is None else keep(sample_id)


def map_fragments(
    source: Source,
    read: Callable[[Source, Fragment], Iterator[pa.Table]],
    fragments: Sequence[Fragment] | None = None,
) -> ray.data.Dataset:
    """Return the tables that ``read`` yields for each fragment of a source, lazily, in order."""
    fragments = source.fragments if fragments is None else fragments
    # Every task carries the source: drop the list of all other fragments.
    described = replace(source, fragments=())

    def read_block(batch: pa.Table) -> Iterator[pa.Table]:
        for text in batch["fragment"].to_pylist():
            yield from read(described, Fragment.from_json(text))

    rows = [{"fragment": fragment.to_json()} for fragment in fragments]
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
    return dataset.map_batches(read_block, batch_size=1, batch_format="pyarrow", zero_copy_batch=True)


def decode_source(
    source: Source,
    decoder: Decoder,
    fragments: Sequence[Fragment] | None = None,
    *,
    kept_whole: frozenset[int] = frozenset(),
) -> ray.data.Dataset:
    """Return the decoded rows of a source as a lazy Ray Dataset, with at least a block per fragment, in order.

    All rows of the fragments whose first id is in ``kept_whole`` are kept, also held-out ones.
    """
    whole = replace(decoder, keep=None, holdout=None)

    def read(described: Source, fragment: Fragment) -> Iterator[pa.Table]:
        chosen = whole if fragment.first_id in kept_whole else decoder
        return chosen.tables(fragment.name, described.read(fragment, chosen.keep))

    return map_fragments(source, read, fragments)


def decode_here(
    fragments: Sequence[Fragment],
    read: Callable[[Fragment], Iterator[RawRows]],
    decoder: Decoder,
) -> Iterator[pa.Table]:
    """Yield the decoded rows of fragments in order, without Ray; threads may decode all rows ahead.

    An interrupt ends them after their current batch.
    """
    is_over = threading.Event()

    def decode(fragment: Fragment) -> list[pa.Table]:
        batches = takewhile(lambda _: not is_over.is_set(), read(fragment))
        return list(decoder.tables(fragment.name, batches))

    with ThreadPoolExecutor(available_cores()) as pool:
        try:
            for tables in pool.map(decode, fragments):
                yield from tables
        finally:
            is_over.set()


def decode_table(
    table: pa.Table, columns: ColumnNames, decoder: Decoder, classes: tuple[str, ...] | None = None
) -> Iterator[pa.Table]:
    """Yield the decoded rows of a table, in order."""
    for start in range(0, table.num_rows, _ROWS_PER_FRAGMENT):
        rows = RawRows.of_table(table.slice(start, _ROWS_PER_FRAGMENT), columns, classes)
        yield from decoder.tables(f"ids {content_id(rows.sample_id.tobytes())}", iter([rows]))


def decode_dataset(
    dataset: ray.data.Dataset,
    columns: ColumnNames,
    decoder: Decoder,
    *,
    classes: tuple[str, ...] | None = None,
) -> ray.data.Dataset:
    """Return the decoded rows of the user's own Ray Dataset.

    Without an id column a row's id is a hash of its contents, so equal rows share an id. ``classes`` are
    the names of text labels. Raises ``DataError`` if a column is missing.
    """
    found = columns_of(dataset, columns)

    def read(block: pa.Table) -> Iterator[pa.Table]:
        return decode_table(block, found, decoder, classes)

    # By blocks: each epoch shuffles them, and rows joined across blocks would count as new fragments.
    return dataset.map_batches(read, batch_size=None, batch_format="pyarrow")


def classes_of(dataset: ray.data.Dataset, columns: ColumnNames) -> tuple[str, ...] | None:
    """Return the sorted class names of text labels; executes the dataset for that column.

    Raises ``DataError`` for labels that are neither text nor integers.
    """
    label = columns.label
    schema = dataset.schema()
    if label is None or schema is None:
        return None
    kind = schema.types[schema.names.index(label)]
    if isinstance(kind, pa.DataType):  # Ray returns another type for some pandas columns
        columns.check_label_type(kind, where="the dataset")
        if are_numbers(kind):
            return None

    def distinct(batch: pa.Table) -> pa.Table:
        column = batch[label]
        # Arrow cannot compare pickled objects; their type is refused below.
        is_plain = not isinstance(column.type, pa.BaseExtensionType)
        return pa.table({label: distinct_labels(column) if is_plain else column.slice(0, 1)})

    found = dataset.select_columns([label]).map_batches(distinct, batch_size=None, batch_format="pyarrow")
    batches: Any = found.iter_batches(batch_size=None, batch_format="pyarrow")
    parts = [batch[label] for batch in batches]
    for part in parts:
        columns.check_label_type(part.type, where="the dataset")
    parts = [part for part in parts if not pa.types.is_null(part.type)]
    if any(may_be_fractions(part.type) for part in parts):
        for other in filter(None, map(inexact_label, parts)):
            raise columns.label_error(other, where="the dataset")
        return None
    return None if all(are_numbers(part.type) for part in parts) else class_names(parts)


def columns_of(dataset: ray.data.Dataset, columns: ColumnNames) -> ColumnNames:
    """Return the columns to read of a dataset; raises ``DataError`` if one is missing or the dataset is empty."""
    schema = dataset.schema()
    if schema is None:
        raise DataError("the Ray Dataset has no rows and no columns; give one with rows")
    return columns.found_in(list(schema.names), where="the dataset")
