"""Lance tables: the fragments of the newest version."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, final

import pyarrow as pa

from raycl.data.columns import ColumnNames
from raycl.data.tables import BATCH_ROWS, TableFile, TableFormat, library
from raycl.errors import DataError, RayclError, first_line
from raycl.storage import Place, check_plain

_GROUP_ROWS = 1_024
_ORIGIN = re.compile(r"(, )?/\S+\.rs:\d+:\d+")  # of an error, in Lance's own code


@final
class LanceTables(TableFormat):
    """Lance: a place is a fragment of a version, which no longer changes. Any range of its rows is read alone."""

    name = "lance"

    def inspect(self, place: Place, columns: ColumnNames) -> TableFile:
        """Return the number of rows and the schema; reads no rows."""
        with _reading(place):
            fragment = _fragment(place)
            check_plain(fragment.schema, str(place))
            groups, rest = divmod(fragment.count_rows(), _GROUP_ROWS)
            schema = fragment.scanner(blob_handling="all_binary").projected_schema
            return TableFile(place=place, group_sizes=[_GROUP_ROWS] * groups + [rest], schema=schema)

    def read(
        self, place: Place, names: Sequence[str], types: pa.Schema | None, *, start: int, stop: int
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield (position, rows) of a range."""
        with _reading(place):
            for batch in _batches(place, names, offset=start, limit=stop - start, batch_size=BATCH_ROWS):
                yield start, pa.Table.from_batches([batch])
                start += batch.num_rows


def is_lance(place: Place) -> bool:
    """Whether a folder is a Lance table."""
    if not (place / "_versions").is_folder():
        return False
    return place.name.endswith(".lance") or (place / "data").is_folder()


def lance_fragments(place: Place, columns: ColumnNames) -> list[str]:
    """Return the names of the fragments of the newest version, in their order.

    Raises ``DataError`` for missing columns.
    """
    with _reading(place):
        table = _open(place.uri)
        columns.found_in(table.schema.names, where=str(place))
        return [
            f"version-{table.version}/{each.fragment_id}-{_file_of(each)}" for each in table.get_fragments()
        ]


@lru_cache(maxsize=8)  # the list of fragments is long, and each is read in many parts
def _open_version(uri: str, version: int) -> Any:
    return _open(uri, version)


def _open(uri: str, version: int | None = None) -> Any:
    place = Place(uri)
    address, options = place.for_object_store()
    return library("lance", place, "a Lance table").dataset(address, version=version, storage_options=options)


def _fragment(place: Place) -> Any:
    version, _, name = place.path.removeprefix("version-").partition("/")
    number, _, file = name.partition("-")
    for _ in range(2):
        fragment = _open_version(place.root, int(version)).get_fragment(int(number))
        if fragment is not None and _file_of(fragment) == file:
            return fragment
        _open_version.cache_clear()  # another table may have replaced the one that was opened
    raise DataError(f"{place} no longer exists; do not replace a table during a run")


def _file_of(fragment: Any) -> str:
    return fragment.data_files()[0].path


def _batches(place: Place, names: Sequence[str], **options: int) -> Iterator[pa.RecordBatch]:
    # Blobs come with their bytes, not as descriptions.
    return _fragment(place).to_batches(columns=list(names), blob_handling="all_binary", **options)


@contextlib.contextmanager
def _reading(place: Place) -> Iterator[None]:
    try:
        yield
    except RayclError:
        raise
    except BaseException as error:
        # A panic of Lance, as for a damaged file, is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        cause = _ORIGIN.sub("", first_line(error))
        if isinstance(error, OSError) or ("LanceError(IO)" in cause and not place.is_local):
            raise place.failure("read", OSError(cause)) from error
        raise DataError(f"cannot read {place} as a Lance table: {cause}; write the table again") from error
