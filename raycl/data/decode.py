"""Decode by Ray Data tasks: fragments of a source to tables of decoded rows."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray

from raycl.data.codecs import Formats, store_all
from raycl.data.columns import ColumnNames
from raycl.data.coordinator import NUM_EXAMPLES
from raycl.data.ids import content_id, stable_ids
from raycl.data.images import ImageFormat, is_flat
from raycl.data.labels import NO_LABEL, are_numbers, class_names, label_numbers
from raycl.data.sources import Fragment, RawRows, Source, plain_values
from raycl.data.split import Holdout
from raycl.errors import BrokenValueError

BLOCK_BYTES = 64 * 2**20
Keep = Callable[[NDArray[np.int64]], NDArray[np.bool_]]
_ROWS_PER_FRAGMENT = 1_024  # of a Ray Dataset


@final
@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Turn raw rows into tables: ``sample_id``, ``label``, and the columns of the formats by role.

    A row with a broken value is left out and counted by its cause in the logbook. Rows that ``keep`` refuses
    are not decoded at all; of those decoded, ``count`` says which are counted (by default all). Pairs of a
    click log are rows that were counted before they were grouped: ``counts_rows=False``.
    """

    formats: Formats
    logbook: Any
    holdout: Holdout | None = None
    keep: Keep | None = None
    count: Keep | None = None
    counts_rows: bool = True

    def tables(self, piece: str, batches: Iterator[RawRows]) -> Iterator[pa.Table]:
        """Yield the valid rows of one piece, in order, in blocks of at most 64 MiB."""
        broken: Counter[str] = Counter()
        examples: list[str] = []
        num_rows = num_train = num_flat = 0
        block: list[pa.Table] = []
        for rows in batches:
            if self.counts_rows:
                num_rows += int(_accepted(self.count or self.keep, rows.sample_id).sum())
            table, flat = self._decode(rows, broken, examples)
            num_flat += flat
            num_train += self._count_train(table)
            block.append(table)
            if sum(part.nbytes for part in block) >= BLOCK_BYTES:
                yield pa.concat_tables(block).combine_chunks()
                block = []
        # The rows to judge on are read by themselves where a set is streamed.
        name = f"{piece}, to judge on" if self.count else piece
        # Wait, so that the counts of skipped rows are known before the rows are used.
        ray.get(
            self.logbook.add_rows.remote(name, num_rows, num_train, broken, examples[:NUM_EXAMPLES], num_flat)
        )
        nothing = {role: [] for role in self.formats}
        yield pa.concat_tables(block or [self._table(nothing, [], [])]).combine_chunks()

    def _decode(self, rows: RawRows, broken: Counter[str], examples: list[str]) -> tuple[pa.Table, int]:
        """Return the valid rows, and the number of counted rows with a flat image."""
        wanted = _accepted(self.keep, rows.sample_id)
        counted = _accepted(self.count, rows.sample_id)
        wanted = np.flatnonzero(wanted).tolist()
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
                broken[str(error)] += 1
                examples.append(f"{rows.where[index]} ({error})")
        chosen = np.array(wanted, np.int64)[valid]
        contents = {role: [values[place] for place in valid] for role, values in decoded.items()}
        flat = are_flat(self.formats, contents) & counted[chosen]
        return self._table(contents, rows.sample_id[chosen], rows.label[chosen]), int(flat.sum())

    def _table(self, contents: Mapping[str, Sequence[Any]], ids: Any, labels: Any) -> pa.Table:
        numbers = {"sample_id": pa.array(ids, pa.int64()), "label": pa.array(labels, pa.int64())}
        return pa.table(store_all(self.formats, contents) | numbers)

    def _count_train(self, table: pa.Table) -> int:
        if self.holdout is None:
            return table.num_rows
        return int(self.holdout.is_train(table["sample_id"].to_numpy()).sum())


def row_error(decoded: Mapping[str, Sequence[Any]], place: int) -> BrokenValueError | None:
    """Return the error of a row, None for a valid one: a value is invalid, or lists differ in length."""
    values = {role: each[place] for role, each in decoded.items()}
    for value in values.values():
        if isinstance(value, BrokenValueError):
            return value
    # With another number of ids than negatives, ids would be assigned to the wrong negatives.
    if {"negatives", "negative_ids"} <= values.keys() and len(values["negatives"]) != len(
        values["negative_ids"]
    ):
        return BrokenValueError("negatives and negative_ids differ in number")
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


def decode_source(
    source: Source,
    decoder: Decoder,
    pieces: tuple[Fragment, ...] | None = None,
    *,
    kept_whole: frozenset[int] = frozenset(),
) -> ray.data.Dataset:
    """Return the decoded rows of a source as a lazy Ray Dataset, a block or more a piece, in order.

    Of pieces whose first id is among ``kept_whole`` every row is kept, held out or not.
    """
    pieces = source.pieces if pieces is None else pieces
    # Every task carries the source: drop the list of all other fragments.
    described = replace(source, pieces=())
    whole = replace(decoder, keep=None, holdout=None)

    def read(batch: pa.Table) -> Iterator[pa.Table]:
        for text in batch["piece"].to_pylist():
            piece = Fragment.from_json(text)
            decoder_here = whole if piece.first_id in kept_whole else decoder
            yield from decoder_here.tables(f"{piece.uri}:{piece.first_id}", described.read(piece))

    table = ray.data.from_items(
        [{"piece": piece.to_json()} for piece in pieces], override_num_blocks=len(pieces)
    )
    return table.map_batches(read, batch_size=1, batch_format="pyarrow", zero_copy_batch=True)


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
        for start in range(0, block.num_rows, _ROWS_PER_FRAGMENT):
            rows = _raw_rows(block.slice(start, _ROWS_PER_FRAGMENT), found, classes)
            yield from decoder.tables(f"ids {content_id(rows.sample_id.tobytes())}", iter([rows]))

    # By blocks: each epoch shuffles them, and rows joined across blocks would count as new fragments.
    return dataset.map_batches(read, batch_size=None, batch_format="pyarrow")


def values_in(batch: pa.Table, columns: ColumnNames) -> dict[str, list[Any]]:
    """Return the contents of a dataset's batch by role.

    From Arrow: NumPy would turn integers into floats if one is missing, and so merge large ids.
    """
    return {role: plain_values(batch[name]) for role, name in columns.contents.items()}


def _raw_rows(batch: pa.Table, columns: ColumnNames, classes: tuple[str, ...] | None = None) -> RawRows:
    values = values_in(batch, columns)
    label, sample_id = columns.label, columns.sample_id
    ids = stable_ids(batch[sample_id].to_pylist()) if sample_id else _content_ids(values)
    labels = label_numbers(batch[label], classes) if label else np.full(len(ids), NO_LABEL, np.int64)
    where = [f"row with id {row_id}" for row_id in ids]
    return RawRows(values=values, sample_id=ids, label=labels, where=where)


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
        return pa.table({label: column.unique() if is_plain else column.slice(0, 1)})

    found = dataset.select_columns([label]).map_batches(distinct, batch_size=None, batch_format="pyarrow")
    batches: Any = found.iter_batches(batch_size=None, batch_format="pyarrow")
    parts = [batch[label] for batch in batches]
    for part in parts:
        columns.check_label_type(part.type, where="the dataset")
    parts = [part for part in parts if not pa.types.is_null(part.type)]
    return None if all(are_numbers(part.type) for part in parts) else class_names(parts)


def columns_of(dataset: ray.data.Dataset, columns: ColumnNames) -> ColumnNames:
    """Return the columns to read of a dataset; raises ``DataError`` if one is missing."""
    return columns.found_in(column_names(dataset), where="the dataset")


def column_names(dataset: ray.data.Dataset) -> list[str]:
    """Return the column names of a dataset; none if it is empty."""
    schema = dataset.schema()
    return list(schema.names) if schema is not None else []


def _content_ids(values: Mapping[str, Sequence[Any]]) -> NDArray[np.int64]:
    rows = zip(*values.values(), strict=True)
    return np.array([content_id(b"\0".join(map(_bytes_of, row))) for row in rows], np.int64)


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, list):
        return b"\1".join(map(_bytes_of, value))
    return value if isinstance(value, bytes) else b"" if value is None else str(value).encode()
