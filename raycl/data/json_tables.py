"""Files of lines of JSON: an object per row."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, reduce
from typing import final

import pyarrow as pa
from pyarrow import json

from raycl.data.columns import ColumnNames, is_list
from raycl.data.tables import (
    BLOCK_BYTES,
    IDS_AND_LABELS,
    TableFile,
    TableFormat,
    check_encoding,
    chosen,
    open_text,
    reading,
    roles_in,
    row_range,
)
from raycl.errors import DataError, first_line
from raycl.storage import Place

_TEXTS = {"text", "caption", "query", "document", "negatives"}
_NOT_TEXTS = IDS_AND_LABELS | {"negative_ids"}
_MAX_LINE_BYTES = 64 * 2**20
_ROW = re.compile(r" in row ([0-9]+)$")
Common = Callable[[str, pa.DataType, pa.DataType], pa.DataType]  # ``common_type``, or as it


@final
class JsonTables(TableFormat):
    """Lines of JSON objects, whose keys are the columns. A key that a row lacks is a missing value."""

    name = "jsonl"
    endings = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")

    def inspect(self, place: Place, columns: ColumnNames) -> TableFile:
        """Read the file once."""
        num_rows, found = 0, dict[str, list[pa.DataType]]()
        for rows in _tables(place, None):
            num_rows += rows.num_rows
            for field in rows.schema:
                found.setdefault(field.name, []).append(_plain(field.type))
        if not num_rows:
            return TableFile(place=place, group_sizes=[], schema=pa.schema([]))
        return TableFile(
            place=place, group_sizes=[num_rows], schema=found_schema(place, columns, found, common_type)
        )

    def shared_types(self, schemas: Sequence[pa.Schema], *, where: str) -> pa.Schema:
        """Return the types of the columns; raises ``DataError`` if two files differ."""
        return shared_schema(schemas, where, common_type)

    def read(
        self, place: Place, names: Sequence[str], types: pa.Schema | None, *, start: int, stop: int
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield (position, rows) of a range; reads the file from its beginning."""
        yield from row_range(place, _tables(place, chosen(types, names)), start, stop)


def _tables(place: Place, schema: pa.Schema | None) -> Iterator[pa.Table]:
    """Yield the rows with the columns of the schema, by default all with types of their own."""
    behavior = "infer" if schema is None else "ignore"
    options = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=behavior)
    first = 0
    for lines in _blocks(place):
        if not lines.strip():
            continue
        if not first:
            check_encoding(place, lines)
        try:
            table = json.read_json(
                pa.BufferReader(lines),
                read_options=json.ReadOptions(use_threads=False, block_size=len(lines) + 1),
                parse_options=options,
            )
            if schema is not None:
                table.validate(full=True)  # an invalid string would fail where it is used
        except pa.ArrowException as error:
            raise _broken(place, first, error) from error
        first += table.num_rows
        yield table


def _blocks(place: Place) -> Iterator[bytes]:
    """Yield the file in blocks of whole lines."""
    rest = b""
    with _reading(place), open_text(place) as stream:
        while content := stream.read(BLOCK_BYTES):
            lines, _, rest = (rest + content).rpartition(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                raise DataError(
                    f"{place} has a line of more than {_MAX_LINE_BYTES:,} bytes; give an object per line"
                )
            yield lines
    yield rest


def _broken(place: Place, first: int, error: Exception) -> DataError:
    """Return the error for a row that Arrow refused; it numbers rows from the ``first`` one of the block."""
    cause = first_line(error)
    if found := _ROW.search(cause):
        cause = f"{cause[: found.start()]} in row {first + int(found[1])}"
    remedy = "give an object per line, with values of one type for each key"
    if "surrogate" in cause:
        remedy = r"write a whole character in place of half of one, such as \ud83d"
    if "UTF8" in cause:
        remedy = "write the file in UTF-8"
    return DataError(f"cannot read {place} as jsonl: {cause}; {remedy}")


def shared_schema(schemas: Sequence[pa.Schema], where: str, common: Common) -> pa.Schema:
    """Return the schema of files of the same columns, whose types may differ."""
    kinds = {name: [each.field(name).type for each in schemas] for name in schemas[0].names}
    fields = [(name, reduce(partial(common, f"{name!r} of {where}"), each)) for name, each in kinds.items()]
    return pa.schema(fields)


def found_schema(
    place: Place, columns: ColumnNames, found: Mapping[str, Sequence[pa.DataType]], common: Common
) -> pa.Schema:
    """Return the types to read the columns with, from those that each has in parts of a file."""
    kinds = {name: each[0] for name, each in found.items()}
    for name, roles in roles_in(place, list(found), columns).items():
        kind = reduce(partial(common, f"{name!r} of {place}"), found[name])
        if "sample_id" in roles and pa.types.is_floating(kind):
            # Arrow makes floats of larger integers, and so merges them.
            raise DataError(
                f"ids must be integers of 64 bits or text, column {name!r} of {place} holds others; give them as text"
            )
        kinds[name] = _type(roles, kind)
    return pa.schema(list(kinds.items()))


def common_type(column: str, one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return the type for values of both types."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if is_list(one) and is_list(other):
        return pa.list_(common_type(column, one.value_type, other.value_type))  # type: ignore[attr-defined]
    if {one, other} == {pa.int64(), pa.float64()}:
        return pa.float64()
    raise DataError(f"column {column} holds {one} and {other}; give its values one type")


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return text for what Arrow takes as a time."""
    if is_list(kind):
        return pa.list_(_plain(kind.value_type))  # type: ignore[attr-defined]
    return pa.string() if pa.types.is_timestamp(kind) else kind


def _type(roles: Collection[str], kind: pa.DataType) -> pa.DataType:
    """Return the type to read a column with, which was found with type ``kind``."""
    if not _TEXTS & set(roles) or _NOT_TEXTS & set(roles):
        return kind
    # Texts as bytes: each text that is not UTF-8 is an invalid row.
    if is_list(kind) and pa.types.is_string(kind.value_type):  # type: ignore[attr-defined]
        return pa.list_(pa.binary())
    return pa.binary() if pa.types.is_string(kind) else kind


def _reading(place: Place) -> AbstractContextManager[None]:
    return reading(place, "jsonl", "give an object per line, in UTF-8")
