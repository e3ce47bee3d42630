"""Arrow and Feather files, and the folders that ``save_to_disk`` of Hugging Face's ``datasets`` writes."""

import contextlib
import io
import json
import mmap
import os
import posixpath
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import final

import pyarrow as pa
from pyarrow import ipc

from raycl.data.columns import ColumnNames
from raycl.data.tables import BLOCK_BYTES, TableFile, TableFormat, reading, roles_in, row_range
from raycl.errors import DataError
from raycl.storage import Place, check_plain

_FILE = b"ARROW1"  # how a file with an index begins; other files are streams of batches
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream
_COMPUTED = re.compile(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow")
_DESCRIPTIONS = ("state.json", "dataset_info.json")
_BYTES = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


@final
class ArrowTables(TableFormat):
    """Arrow's own format, as a stream of batches of rows or with an index: the files know their types."""

    name = "arrow"
    endings = (".arrow", ".feather")

    def inspect(self, place: Place, columns: ColumnNames) -> TableFile:
        """Return the number of rows and the schema; reads no rows of a local file."""
        with _reading(place), _open(place) as source:
            schema = _reader(source).schema
            roles_in(place, schema.names, columns)
            num_rows = sum(batch.num_rows for batch in _batches(source, _narrowest(schema)))
            # The files have no index of rows, so a part is found from the beginning: at most eight parts.
            return TableFile(place=place, group_sizes=[num_rows], schema=schema)

    def read(
        self, place: Place, names: Sequence[str], types: pa.Schema | None, *, start: int, stop: int
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield (position, rows) of a range; reads only the columns' bytes in its batches of a local file."""
        with _reading(place), _open(place) as source:
            yield from row_range(place, _tables(source, names, start), start, stop)


def unread_files(uri: str, files: Sequence[str]) -> set[str]:
    """Return the files below ``uri`` in folders that ``datasets`` saved or cached and that are not its data.

    ``datasets`` computed them, or they belong to a data set that was saved there before. Raises ``DataError``
    for a folder of several splits (a ``DatasetDict``), or without one of its files.
    """
    arrow_files = {path for path in files if path.endswith(".arrow")}
    with_arrow_files = {posixpath.dirname(path) for path in arrow_files}
    listed: dict[str, set[str]] = {}  # by the folder of a saved data set
    for path in files:
        folder, name = posixpath.split(path)
        if name == "state.json":
            names = _data_files(Place(uri) / path, is_saved=folder in with_arrow_files)
            if names is not None:
                listed[folder] = {posixpath.join(folder, each) for each in names}
    for path in files:
        folder, name = posixpath.split(path)
        if name == "dataset_dict.json":
            saved = {*listed, *with_arrow_files} - {""}
            splits = sorted(each for each in saved if posixpath.dirname(each) == folder)
            given = " or ".join(f"--data {shlex.quote((Place(uri) / split).uri)}" for split in splits)
            if splits:
                raise DataError(f"{uri} holds a data set in {len(splits)} splits; give {given}")
    if missing := set[str]().union(*listed.values()).difference(files):
        raise DataError(f"{uri} lacks {min(missing)}, which its state.json lists; save the data set again")
    read = arrow_files - _computed_in_caches(files)
    return {path for path in arrow_files if path not in listed.get(posixpath.dirname(path), read)}


def descriptions(paths: Iterable[str]) -> set[str]:
    """Return the files in which ``datasets`` describes the data of these Arrow files, whether they exist or not."""
    folders = {posixpath.dirname(path) for path in paths if path.endswith(".arrow")}
    return {posixpath.join(folder, name) for folder in folders for name in _DESCRIPTIONS}


def _computed_in_caches(files: Sequence[str]) -> set[str]:
    """Return the files that ``map`` and ``filter`` wrote beside the data in the cache of ``load_dataset``."""
    computed, caches, with_data = set[str](), set[str](), set[str]()
    for path in files:
        folder, name = posixpath.split(path)
        if _COMPUTED.fullmatch(name):
            computed.add(path)
        elif name == "dataset_info.json":
            caches.add(folder)
        elif name.endswith(".arrow"):
            with_data.add(folder)
    return {path for path in computed if posixpath.dirname(path) in caches & with_data}


def _data_files(state: Place, *, is_saved: bool) -> list[str] | None:
    """Return the names in the ``state.json`` of a saved data set; None if it is another file and not ``is_saved``."""
    try:
        return [each["filename"] for each in json.loads(state.read_bytes())["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        if not is_saved:
            return None
        raise DataError(
            f"cannot read {state} as the state of a saved data set: {error!r}; save it again"
        ) from error


@contextlib.contextmanager
def _open(place: Place) -> Iterator[pa.NativeFile]:
    """Open a file; a local one is mapped into memory, so that only the used parts are read."""
    with contextlib.ExitStack() as stack:
        if place.is_local:
            file = stack.enter_context(open(place.resolve()[1], "rb"))
            if not file.seek(0, os.SEEK_END):
                raise pa.ArrowInvalid("the file is empty")
            # Not Arrow's own mapping, which lets the system read all batches ahead.
            source = pa.BufferReader(pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        else:
            source = stack.enter_context(place.open())
            if source.read(len(_FILE)) != _FILE:
                # A stream is read in order.
                source = pa.PythonFile(io.BufferedReader(source, BLOCK_BYTES), mode="r")  # type: ignore[arg-type]
        _check_names(schema := _reader(source).schema)
        check_plain(schema, str(place))
        yield source


def _check_names(fields: Iterable[pa.Field]) -> None:
    """Raise ``ArrowInvalid`` unless all names are text, also of the parts of structs."""
    for field in fields:
        try:
            _ = field.name
        except UnicodeDecodeError as error:
            raise pa.ArrowInvalid(f"the name of a column is not UTF-8 ({error})") from error
        if isinstance(field.type, pa.StructType):
            _check_names(field.type)


def _reader(
    source: pa.NativeFile, options: ipc.IpcReadOptions | None = None
) -> ipc.RecordBatchFileReader | ipc.RecordBatchStreamReader:
    source.seek(0)
    start = source.read(len(_FILE))
    source.seek(0)
    if start == _FILE:
        return ipc.open_file(source, options=options)
    if start[:4] == b"FEA1":
        raise pa.ArrowInvalid("it has version 1 of Feather, which has no lists or structs")
    source.seek(max(source.size() - len(_END), 0))
    if source.read(len(_END)) != _END:
        raise pa.ArrowInvalid("it is cut off, or no Arrow file")
    source.seek(0)
    return ipc.open_stream(source, options=options)


def _batches(source: pa.NativeFile, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield all batches of rows, with only the columns ``names``."""
    # The columns are numbered in the order of the file.
    numbers = sorted(map(_reader(source).schema.names.index, names))
    reader = _reader(source, ipc.IpcReadOptions(included_fields=numbers, use_threads=False))
    if isinstance(reader, ipc.RecordBatchFileReader):
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number).select(list(names))
    else:
        for batch in reader:
            yield batch.select(list(names))


def _narrowest(schema: pa.Schema) -> list[str]:
    """Return a column of which little must be read."""
    unique = [field for field in schema if schema.names.count(field.name) == 1]
    narrow = [field.name for field in unique if pa.types.is_primitive(field.type)]
    return (narrow or [field.name for field in unique])[:1]


def _tables(source: pa.NativeFile, names: Sequence[str], start: int) -> Iterator[pa.Table]:
    """Yield all batches; raises ``ArrowInvalid`` if one from row ``start`` on refers to bytes outside of it.

    The use of such a value would end the process.
    """
    position = 0
    for batch in _batches(source, names):
        position += batch.num_rows
        if position > start:
            for column in batch.columns:
                column.validate()
                # Text that is not UTF-8 is an invalid row, but no damage.
                column.view(_without_text(column.type)).validate(full=True)
        yield pa.Table.from_batches([batch])


def _without_text(kind: pa.DataType) -> pa.DataType:
    """Return the type whose values are bytes where these are text."""
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_without_text(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_without_text(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_text(field.type)) for field in kind])
    return _BYTES.get(kind, kind)


def _reading(place: Place) -> AbstractContextManager[None]:
    return reading(place, "arrow", "give a file that Arrow or Hugging Face's datasets wrote")
