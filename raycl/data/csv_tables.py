"""CSV and TSV files: a header and rows without types."""

import io
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import final

import pyarrow as pa
from pyarrow import csv

from raycl.data.columns import ColumnNames, is_number
from raycl.data.ids import EXACT
from raycl.data.tables import (
    IDS_AND_LABELS,
    TableFile,
    TableFormat,
    check_encoding,
    chosen,
    is_integer,
    open_text,
    reading,
    roles_in,
    row_range,
)
from raycl.errors import DataError, first_line
from raycl.storage import Place

_TEXTS = {"text", "caption", "query", "document"}
_FIRST_FIELD = re.compile(r'(?:"(?:[^"]|"")*"|(?!")[^,;\t|]*)([,;\t|])')  # and the delimiter after it
_ROW = re.compile(r"Row #([0-9]+)")
_BLOCK_BYTES = 16 * 2**20  # the longest row
_LAST = b"raycl: the last row"
_WHOLE_LINES = "give a header, and as many fields in each row, with quotes around one that has a comma"
_MOST_HEADER_BYTES = 64 * 2**10


@final
class CsvTables(TableFormat):
    """CSV with a header, comma-separated, or by tabs in TSV. An empty field is a missing value.

    Ids and labels are integers if all of a column are, floats if some are written as 3.0, else text.
    """

    name = "csv"
    endings = (".csv", ".tsv", ".csv.gz", ".tsv.gz")

    def inspect(self, place: Place, columns: ColumnNames) -> TableFile:
        """Read the file once."""
        header = _header(place)
        if not header:
            return TableFile(place=place, group_sizes=[], schema=pa.schema([]))
        _check_delimiter(place, header, columns)
        with _reading(place), open_text(place) as stream:
            try:
                names = _open(place, stream, [], None).schema.names
            except UnicodeDecodeError:
                raise DataError(f"the header of {place} is not UTF-8; write the file in UTF-8") from None
        roles = roles_in(place, names, columns)
        num_rows, found = _count(place, names, roles)
        kinds = {name: _type(each, found[name]) for name, each in roles.items()}
        schema = pa.schema([(name, kinds.get(name, pa.string())) for name in names])
        return TableFile(place=place, group_sizes=[num_rows], schema=schema)

    def shared_types(self, schemas: Sequence[pa.Schema], *, where: str) -> pa.Schema:
        """Return the types of the columns; one with numbers in some files and text in others is text."""
        kinds = {name: _common(each.field(name).type for each in schemas) for name in schemas[0].names}
        return pa.schema(list(kinds.items()))

    def read(
        self, place: Place, names: Sequence[str], types: pa.Schema | None, *, start: int, stop: int
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield (position, rows) of a range; reads the file from its beginning."""
        kinds = chosen(types, names)
        # The lines were read before, so that a column of numbers may only hold other values.
        is_of_numbers = bool(names) and all(is_number(kind) for kind in kinds.types)
        remedy = f"give a number in each row of {names[0]!r}" if is_of_numbers else _WHOLE_LINES
        with _reading(place, remedy), open_text(place) as stream:
            batches = _open(place, stream, names, kinds)
            yield from row_range(place, (pa.Table.from_batches([batch]) for batch in batches), start, stop)


def _header(place: Place) -> str:
    """Return the first line that is not empty, an empty text if there is none."""
    with _reading(place), open_text(place) as stream:
        start = stream.read(_MOST_HEADER_BYTES)
    check_encoding(place, start)
    lines = start.decode(errors="replace").splitlines()
    return next(filter(None, (line.lstrip("\ufeff") for line in lines)), "")


def _check_delimiter(place: Place, header: str, columns: ColumnNames) -> None:
    """Raise if the header is one field that another delimiter would split."""
    found = _FIRST_FIELD.match(header)
    if found and _delimiter(place) not in header and header not in columns.asked.values():
        raise DataError(
            f"the fields in the header of {place} are separated by {found[1]!r}; separate all fields by commas in "
            ".csv, by tabs in .tsv"
        )


@final
class _WithLastRow(io.RawIOBase):
    """A text file with one more row at its end."""

    def __init__(self, stream: pa.NativeFile, row: bytes) -> None:
        self._stream, self._row = stream, row

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        content = self._stream.read(size)
        if not content:
            content, self._row = self._row, b""
        return content


def _count(
    place: Place, names: Sequence[str], roles: Mapping[str, Collection[str]]
) -> tuple[int, dict[str, pa.DataType]]:
    """Return the number of rows, and the types of the values of the columns that have ``roles``.

    Arrow takes the rest of a file as one field if it ends within quotes: then the added row is missing. In TSV all
    columns are read, since a quote that is part of a text may join rows in any of them.
    """
    kinds: dict[str, pa.DataType] = dict.fromkeys(roles, pa.null())
    num_rows, last = 0, {}
    is_tsv = _delimiter(place) == "\t"
    read = names if is_tsv else list(roles)
    with _reading(place), open_text(place) as stream:
        row = b"\n" + _delimiter(place).encode().join([_LAST] * len(names)) + b"\n"
        ended = pa.PythonFile(_WithLastRow(stream, row), mode="r")
        for batch in _open(place, ended, read, pa.schema([(name, pa.binary()) for name in read])):
            if not batch.num_rows:
                continue
            if is_tsv:
                _check_not_joined(place, batch, num_rows)
            num_rows += batch.num_rows
            last = batch.slice(batch.num_rows - 1).to_pylist()[0]
            rows = batch.slice(0, batch.num_rows - (set(last.values()) == {_LAST}))
            _check_texts(place, rows, roles)
            for name, kind in kinds.items():
                if kind != pa.string():
                    kinds[name] = _common((kind, _kind(rows.column(name))))
    if set(last.values()) != {_LAST}:
        raise DataError(
            f"{place} ends within quotes: from its last row on ({num_rows - 1}), all is one field; close the quote, or "
            'write one that is part of a text as ""'
        )
    return num_rows - 1, kinds


def _check_not_joined(place: Place, batch: pa.RecordBatch, first: int) -> None:
    """Raise for a field of a TSV file that has tabs and newlines: rows between two quotes that are part of texts."""
    for column in batch.columns:
        for row, value in enumerate(column.to_pylist(), first):
            # The end of a file within quotes has an error of its own.
            if value and b"\t" in value and b"\n" in value and _LAST not in value:
                raise DataError(
                    f"row {row} of {place} has a field with tabs and newlines, as between two quotes that are part of texts; "
                    'put such texts in quotes, with "" for a quote, or give texts with both as .csv or .jsonl'
                )


def _check_texts(place: Place, rows: pa.RecordBatch, roles: Mapping[str, Collection[str]]) -> None:
    """Raise for paths, ids or labels that are not UTF-8."""
    for name, each in roles.items():
        try:
            if _type(each, pa.string()) == pa.string():
                rows.column(name).view(pa.string()).validate(full=True)
        except pa.ArrowInvalid:
            raise DataError(
                f"column {name!r} of {place} holds bytes that are not UTF-8; write the file in UTF-8"
            ) from None


def _kind(values: pa.Array) -> pa.DataType:
    """Return the type for all values: of integers, of floats of integers (pandas writes 3.0 beside a missing value), or of text."""
    given = values.drop_null().to_pylist()
    if not given:
        return pa.null()
    if all(map(is_integer, given)):
        return pa.int64()
    return pa.float64() if all(map(_is_exact, given)) else pa.string()


def _is_exact(text: bytes) -> bool:
    """Whether a text such as 3 or 3.0 is an integer that a float holds exactly."""
    whole = text.removesuffix(b".0")
    return is_integer(whole) and abs(int(whole)) < EXACT


def _common(kinds: Iterable[pa.DataType]) -> pa.DataType:
    """Return the type for the values of all types."""
    found = set(kinds) - {pa.null()}
    if len(found) <= 1:
        return found.pop() if found else pa.null()
    return pa.float64() if found == {pa.int64(), pa.float64()} else pa.string()


def _type(roles: Collection[str], kind: pa.DataType) -> pa.DataType:
    """Return the type to read a column with, whose values have the type ``kind``."""
    if IDS_AND_LABELS & set(roles):
        return kind
    if "weight" in roles:
        return pa.float64()
    # Texts as bytes: each text that is not UTF-8 is an invalid row. Images and lists are none in CSV.
    return pa.binary() if _TEXTS & set(roles) else pa.string()


def _reading(place: Place, remedy: str = _WHOLE_LINES) -> AbstractContextManager[None]:
    return reading(place, "csv", remedy, cause=_cause)


def _cause(error: Exception) -> str:
    """Return the cause with the number of the row as elsewhere; Arrow counts from 1, with the header."""
    return _ROW.sub(lambda found: f"row {int(found[1]) - 2}", first_line(error), count=1)


def _delimiter(place: Place) -> str:
    return "\t" if place.name.lower().removesuffix(".gz").endswith(".tsv") else ","


def _open(
    place: Place, stream: pa.NativeFile, names: Sequence[str], types: pa.Schema | None
) -> csv.CSVStreamingReader:
    """Open the columns ``names``, by default all."""
    return csv.open_csv(
        stream,
        # Several threads would not number the rows in errors.
        read_options=csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
        parse_options=csv.ParseOptions(delimiter=_delimiter(place), newlines_in_values=True),
        convert_options=csv.ConvertOptions(
            column_types=types, include_columns=list(names), null_values=[""], strings_can_be_null=True
        ),
    )
