"""Tars of samples as WebDataset has them: consecutive files that share a name are one row."""

import contextlib
import json
import re
import sys
import tarfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial, reduce
from itertools import islice
from tarfile import HeaderError, ReadError
from typing import Any, Self, final

import pyarrow as pa

from raycl.data.columns import ColumnNames, is_list
from raycl.data.images import EXTENSIONS
from raycl.data.json_tables import common_type, found_schema, shared_schema
from raycl.data.tables import (
    BATCH_ROWS,
    BLOCK_BYTES,
    IDS_AND_LABELS,
    INT64,
    TableFile,
    TableFormat,
    chosen,
    is_integer,
    reading,
    roles_of,
    row_range,
)
from raycl.errors import DataError, first_line
from raycl.storage import Place

# The name that a sample's files share, in a folder that is not hidden, and the ending. A whole tar may lie in ~/.cache.
_NAME = re.compile(r"((?:(?:.*/)?(?:\.{0,2}|[^./][^/]*)/)?[^./]+)\.([^/]+)", re.DOTALL)
_TEXTS = frozenset({"txt", "text"})
_ENDINGS = {
    "image": frozenset(ending.removeprefix(".") for ending in EXTENSIONS),
    "text": _TEXTS,
    "caption": _TEXTS,
    "label": frozenset({"cls"}),
}
_ALL = range(sys.maxsize)
# A request takes about as long as 2 MB. The blocks after a hop double from the first one on.
_HOP_BYTES, _FIRST_BYTES = 2 * 2**20, 2**16
_END = tarfile.EOFHeaderError  # pyright: ignore[reportAttributeAccessIssue]


@final
class TarTables(TableFormat):
    """Tars, plain or compressed. A file's ending is its column, and so is each key of a JSON file.

    A column that a sample lacks is a missing value. Ids and labels in files are integers if all of a column are, else
    text.
    """

    name = "tar"
    endings = (".tar", ".tar.gz", ".tgz")

    def inspect(self, place: Place, columns: ColumnNames) -> TableFile:
        """Count the samples; reads JSON, ids and labels only, and skips the other files of a plain tar."""
        wanted = roles_of(replace(columns, **{role: role for role in columns.usual}))
        as_text = {name for name, roles in wanted.items() if IDS_AND_LABELS & set(roles)}
        num_rows, found = 0, dict[str, list[pa.DataType]]()
        for sample in _samples(place, wanted, as_text, _ALL):
            num_rows += 1
            for name, value in sample.items():
                kinds = found.setdefault(name, [])
                kind = _kind(place, name, value, is_text=name in as_text) if name in wanted else pa.null()
                if kind not in kinds:
                    kinds.append(kind)
        for name in wanted.keys() & found.keys() - as_text:
            reduce(partial(common_type, f"{name!r} of {place}"), map(_read_as_text, found[name]))
        # Other endings and keys may be in any encoding.
        found = {name: kinds for name, kinds in found.items() if _is_utf8(name)}
        schema = found_schema(place, columns, found, _common) if num_rows else pa.schema([])
        return TableFile(place=place, group_sizes=[num_rows] if num_rows else [], schema=schema)

    def shared_types(self, schemas: Sequence[pa.Schema], *, where: str) -> pa.Schema:
        """Return the types of the columns; one with integers in some files and text in others is text."""
        return shared_schema(schemas, where, _common)

    def read(
        self, place: Place, names: Sequence[str], types: pa.Schema | None, *, start: int, stop: int
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield (position, rows) of a range; skips the other files of a plain tar."""
        yield from row_range(place, _tables(place, chosen(types, names), range(start, stop)), start, stop)


@final
class _Member(tarfile.TarInfo):
    """A file in a tar. Python takes a tar as complete where one cannot be read, or where bytes are missing."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile)
        except _END:
            raise
        except HeaderError as error:
            raise ReadError(f"{error} at byte {tarfile.offset:,}, before the end of the tar") from error


@final
class _RemoteFile:
    """Read a remote file in blocks, and after a hop over a large file begin with a small one: the next name takes little."""

    def __init__(self, file: pa.NativeFile) -> None:
        self._file, self._position = file, 0
        self._start, self._block, self._size = 0, b"", BLOCK_BYTES

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, /) -> int:
        if offset - self._position > _HOP_BYTES:
            self._size = _FIRST_BYTES
        self._position = offset
        return offset

    def read(self, size: int, /) -> bytes:
        parts = []
        while size > 0:
            if not self._start <= self._position < self._start + len(self._block):
                self._file.seek(self._position)
                self._start, self._block = self._position, self._file.read(self._size)
                self._size = min(2 * self._size, BLOCK_BYTES)
            begin = self._position - self._start
            part = self._block[begin : begin + size]
            if not part:
                break
            parts.append(part)
            self._position += len(part)
            size -= len(part)
        return b"".join(parts)


@contextlib.contextmanager
def _open(place: Place) -> Iterator[tarfile.TarFile]:
    """Open a tar; a file that cannot be read raises an error."""
    source: Any
    with reading(place, "tar", "write the tar again"), place.open() as source:
        is_compressed = place.name.lower().endswith("gz")
        if is_compressed:
            source = pa.CompressedInputStream(pa.BufferedInputStream(source, BLOCK_BYTES), "gzip")
        elif not place.is_local:
            source = _RemoteFile(source)  # a request for each name would be slow
        try:
            with tarfile.open(fileobj=source, mode="r|" if is_compressed else "r:", tarinfo=_Member) as tar:
                yield tar
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise pa.ArrowInvalid(first_line(error)) from error


def _samples(
    place: Place, wanted: Collection[str], names: Collection[str], rows: range
) -> Iterator[dict[str, Any]]:
    """Yield the values of each sample: of the columns ``names`` and from JSON in these rows, and else ``b""``.

    A column that is ``wanted`` has one file in each sample.
    """
    row, key, sample, keys = 0, "", dict[str, Any](), dict[str, Any]()
    with _open(place) as tar:
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]
            named = _NAME.fullmatch(member.name)
            if named is None or not member.isreg() or member.issparse():
                continue
            if named[1] != key:
                if key:
                    yield keys | sample
                    row += 1
                key, sample, keys = named[1], {}, {}
            columns = _columns(named[2])
            if twice := sample.keys() & columns & set(wanted):
                raise DataError(
                    f"row {row} of {place} has two files for column {twice.pop()!r}, the second is {member.name!r}; "
                    "keep one of them, or name an ending as the column"
                )
            is_json = named[2].lower() == "json"
            content = b""
            if row in rows and (is_json or not columns.isdisjoint(names)):
                content = _content(tar, member)
            if is_json:
                keys = _parsed(place, row, content) if row in rows else {}
            else:
                sample |= dict.fromkeys(columns, content)
        if key:
            yield keys | sample


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None, "only regular files are read"
    return file.read()


@cache
def _columns(ending: str) -> frozenset[str]:
    """Return the names of the column of files with an ending: its own, and the roles that it stands for."""
    roles = {name for name, endings in _ENDINGS.items() if ending.lower() in endings}
    return frozenset({ending.removesuffix(".txt"), *roles})


def _parsed(place: Place, row: int, content: bytes) -> dict[str, Any]:
    """Return the columns in JSON: the keys of an object, and none in other values, such as a list."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"cannot read the JSON of row {row} of {place}: {first_line(error)}; correct or remove it"
        ) from error
    return found if isinstance(found, dict) else {}


def _tables(place: Place, schema: pa.Schema, rows: range) -> Iterator[pa.Table]:
    """Yield the samples with the columns of the schema; values that are not in ``rows`` are wrong."""
    samples = _samples(place, schema.names, schema.names, rows)
    first = 0
    while found := list(islice(samples, BATCH_ROWS)):
        inside = [sample if first + number in rows else {} for number, sample in enumerate(found)]
        first += len(found)
        try:
            arrays = [
                pa.array([_converted(each.get(field.name), field.type) for each in inside], field.type)
                for field in schema
            ]
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(
                f"cannot read {place} as tar: {first_line(error)}; give text in UTF-8, and do not change it during a run"
            ) from error
        yield pa.table(arrays, schema=schema)


def _kind(place: Place, name: str, value: Any, *, is_text: bool) -> pa.DataType:
    """Return the type of a value of a column; ``is_text``: a file of it holds an id or a label."""
    match value:
        case bytes() if is_text:
            try:
                text = value.decode().strip()
            except UnicodeDecodeError:
                raise DataError(
                    f"column {name!r} of {place} holds bytes that are not UTF-8; give text"
                ) from None
            return pa.int64() if is_integer(text.encode()) else pa.string() if text else pa.null()
        case bytes():
            return pa.binary()
        case bool():
            return pa.bool_()
        case int() if value in INT64:
            return pa.int64()
        case int() | float():
            return pa.float64()
        case str():
            return pa.string()
        case list():
            kinds = [_kind(place, name, each, is_text=is_text) for each in value]
            return pa.list_(reduce(partial(common_type, f"{name!r} of {place}"), kinds, pa.null()))
        case None:
            return pa.null()
    return pa.struct([])


def _read_as_text(kind: pa.DataType) -> pa.DataType:
    """Return text for the content of a file, which may be one beside texts in JSON."""
    return pa.string() if pa.types.is_binary(kind) else kind


def _is_utf8(name: str) -> bool:
    return name.encode(errors="replace").decode() == name


def _common(column: str, one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return the type for values of both types."""
    if {one, other} in ({pa.int64(), pa.string()}, {pa.binary(), pa.string()}):
        return pa.string() if pa.int64() in (one, other) else pa.binary()
    return common_type(column, one, other)


def _converted(value: Any, kind: pa.DataType) -> Any:
    """Return a value as one of the type."""
    if isinstance(value, bytes) and not pa.types.is_binary(kind):
        value = value.decode().strip() or None
        return int(value) if value is not None and pa.types.is_integer(kind) else value
    if isinstance(value, str) and pa.types.is_binary(kind):
        return value.encode(errors="surrogatepass")  # not UTF-8: an invalid row
    if isinstance(value, list) and is_list(kind):
        return [_converted(each, kind.value_type) for each in value]  # type: ignore[attr-defined]
    return str(value) if isinstance(value, int) and pa.types.is_string(kind) else value
