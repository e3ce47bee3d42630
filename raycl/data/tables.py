"""The formats of files of rows: the methods of each, and common parts of reading text."""

import contextlib
import importlib
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import pyarrow as pa

from raycl.data.columns import ColumnNames
from raycl.errors import DataError, first_line
from raycl.storage import Place, is_unreachable

BATCH_ROWS = 256
BLOCK_BYTES = 4 * 2**20  # of a text file, read at once
IDS_AND_LABELS = {"label", "sample_id", "query_id", "document_id"}  # roles of integers or texts
INT64 = range(-(2**63), 2**63)
_INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,18}")  # "007" and "7" are different ids


@final
@dataclass(frozen=True, kw_only=True)
class TableFile:
    """A file that was not read yet: its place, the numbers of rows that are read at once, and its columns.

    ``schema`` is empty for a file without rows in a format that names the columns in each row.
    """

    place: Place
    group_sizes: list[int]
    schema: pa.Schema


class TableFormat(Protocol):
    """A format of files of rows: its name in messages, and the ends of file names.

    All methods raise ``StorageError``, and ``DataError`` for a broken file.
    """

    name: str
    endings: tuple[str, ...] = ()

    def inspect(self, place: Place, columns: ColumnNames) -> TableFile:
        """Count the rows and find the types of the columns."""
        ...

    def shared_types(self, schemas: Sequence[pa.Schema], *, where: str) -> pa.Schema | None:
        """Return the types with which all files are read, from the types of each; None if the files know them."""
        return None

    def read(
        self, place: Place, names: Sequence[str], types: pa.Schema | None, *, start: int, stop: int
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield (position, at most 256 rows) of the rows ``start`` to ``stop``; only the columns ``names``."""
        ...

    def column(self, file: TableFile, name: str, types: pa.Schema | None) -> pa.ChunkedArray:
        """Return a column of all rows."""
        stop, names = sum(file.group_sizes), [name]
        parts = self.read(file.place, names, types, start=0, stop=stop) if stop else []
        nothing = chosen(types or file.schema, names).empty_table()
        return pa.concat_tables([nothing, *(table for _, table in parts)]).unify_dictionaries()[name]


@contextlib.contextmanager
def reading(
    place: Place, name: str, remedy: str, *, cause: Callable[[Exception], str] = first_line
) -> Iterator[None]:
    """Turn errors of a file's reader into ``StorageError`` or ``DataError``.

    Rows of an unreadable file do not count as invalid rows, since their number is unknown.
    """
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and is_unreachable(error):
            raise place.failure("read", error) from error
        remedy = remedy if isinstance(error, pa.ArrowException) else "write the file again"
        raise DataError(f"cannot read {place} as {name}: {cause(error)}; {remedy}") from error


def library(module: str, place: Place, what: str, *, extra: str | None = None) -> Any:
    """Return the module of an optional package; raises ``DataError`` if it is not installed.

    ``extra`` installs it, by default one of the same name.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(
            f"{place} is {what}, which needs the module {package}, and that is not installed here; "
            f"pip install 'raycl[{extra or package}]'"
        ) from error


@contextlib.contextmanager
def open_text(place: Place) -> Iterator[pa.NativeFile]:
    """Open a text file, decompressed if its name ends in .gz; raises ``OSError``."""
    with place.open() as file:
        stream = pa.BufferedInputStream(file, BLOCK_BYTES)
        yield pa.CompressedInputStream(stream, "gzip") if place.name.lower().endswith(".gz") else stream


def check_encoding(place: Place, start: bytes) -> None:
    """Raise ``DataError`` for a text file that begins with the mark of UTF-16."""
    if start[:2] in (BOM_UTF16_LE, BOM_UTF16_BE):
        raise DataError(f"{place} is in UTF-16; write the file in UTF-8")


def row_range(
    place: Place, tables: Iterable[pa.Table], start: int, stop: int
) -> Iterator[tuple[int, pa.Table]]:
    """Yield (position, rows) of the rows ``start`` to ``stop`` of a file, which is read as consecutive tables.

    Raises ``DataError`` if there are fewer rows.
    """
    position = 0
    for table in tables:
        for low in range(max(start - position, 0), min(stop - position, table.num_rows), BATCH_ROWS):
            yield position + low, table.slice(low, min(BATCH_ROWS, stop - position - low))
        position += table.num_rows
        if position >= stop:
            return
    raise DataError(
        f"{place} has {position:,} rows, and had at least {stop:,} before; do not change it during a run"
    )


def is_integer(text: bytes) -> bool:
    """Whether a text is an integer of 64 bits, as Python writes it."""
    return _INTEGER.fullmatch(text) is not None and int(text) in INT64


def roles_of(columns: ColumnNames) -> dict[str, list[str]]:
    """Return the roles of each named column."""
    roles: dict[str, list[str]] = {}
    for role, name in columns.asked.items():
        roles.setdefault(name, []).append(role)
    return roles


def roles_in(place: Place, names: Sequence[str], columns: ColumnNames) -> dict[str, list[str]]:
    """Return the roles of the columns that are read.

    Raises ``DataError`` if two columns have the name of one, or a folder such as ``label=0`` has it and no column.
    """
    folders = {part.partition("=")[0] for part in place.path.split("/")[:-1] if "=" in part}
    for name in (*columns.asked.values(), *columns.usual):
        if name in folders and name not in names:
            raise DataError(
                f"{place.root} is partitioned by {name!r}, which its files do not hold; write it into the files"
            )
    roles = roles_of(columns.found_in(list(names), where=str(place)))
    for name in roles:
        if names.count(name) > 1:
            raise DataError(f"{place} has {names.count(name)} columns {name!r}; rename all but one of them")
    return roles


def chosen(types: pa.Schema | None, names: Sequence[str]) -> pa.Schema:
    """Return the types of some columns."""
    assert types is not None, "the types are found before the rows are read"
    return pa.schema([types.field(name) for name in names])
