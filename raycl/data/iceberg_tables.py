"""Iceberg tables: the parquet files of the current snapshot, which their metadata list. No catalog is asked."""

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import pyarrow as pa

from raycl.data.columns import ColumnNames
from raycl.data.tables import library
from raycl.errors import DataError, RayclError, first_line
from raycl.storage import Place

_ENDING, _ZIPPED = ".metadata.json", ".gz"
METADATA = (_ENDING, _ENDING + _ZIPPED)  # endings of a metadata file
_SNAPSHOT = re.compile(r"snap-.*\.avro")
_METADATA = re.compile(r"(?:v(\d+)|(\d{5,})-[^.]*)(?:\.gz)?\.metadata\.json(?:\.gz)?")
_SCHEME = re.compile(r"(file:(//)?|s3[an]?://)")
_HINT = "version-hint.text"
_REWRITE = "rewrite its files by CALL system.rewrite_data_files"


@final
@dataclass(frozen=True, kw_only=True)
class IcebergTable:
    """The current snapshot of a table: its folder, its parquet files, sorted, and the columns to read."""

    place: Place
    files: list[str]
    columns: ColumnNames
    metadata: Any

    def check(self, place: Place, schema: pa.Schema) -> None:
        """Raise ``DataError`` unless the columns in a file are those that have their names today.

        Iceberg knows columns by ids: a file keeps the names of the time when it was written.
        """
        names = list(dict.fromkeys(self.columns.asked.values()))
        with _reading(place):
            convert = _pyiceberg("io.pyarrow", place).pyarrow_to_schema
            index = _pyiceberg("schema", place).index_by_name
            ids = index(self.metadata.schema().select(*names))
            chosen = pa.schema([schema.field(name) for name in names if name in schema.names])
            found = index(convert(chosen, name_mapping=self.metadata.name_mapping()))
        if found != ids:
            different = sorted({name.split(".")[0] for name, _ in found.items() ^ ids.items()})
            raise DataError(
                f"{place} was written when its table had other columns of the names {', '.join(map(repr, different))}; "
                f"{_REWRITE}"
            )


def find_metadata(place: Place) -> Place | None:
    """Return the newest metadata file of a table's folder or of its folder ``metadata``, or the file itself.

    Returns None if there is none. Raises ``DataError`` if several are the newest, or none has a name with a number.
    """
    if place.name.endswith(METADATA):
        return place
    if (place / "metadata").is_folder():
        place = place / "metadata"
    if place.name != "metadata":
        return None
    entries = place.entries()
    numbers = {name: int(found[1] or found[2]) for name in entries if (found := _METADATA.fullmatch(name))}
    if not numbers:
        if any(map(_SNAPSHOT.fullmatch, entries)):
            raise DataError(
                f"{place} is of an Iceberg table, but has no metadata file with a number, such as v3{_ENDING}; "
                "give the metadata file"
            )
        return None
    # A number in the hint may be old, since a table without a catalog raises it later; a name is the catalog's.
    hint = (place / _HINT).read_text().strip() if _HINT in entries else ""
    newest = sorted(name for name, number in numbers.items() if number == max(numbers.values()))
    hinted = (hint, hint + _ENDING, hint + _ENDING + _ZIPPED)
    newest = [name for name in hinted if name in entries] or newest
    if len(newest) > 1:
        raise DataError(
            f"{place} has {len(newest)} files with the highest number, {' and '.join(newest)}; give the one that the "
            "table's catalog names"
        )
    return place / newest[0]


def open_iceberg(file: Place, columns: ColumnNames) -> IcebergTable:
    """Return the current snapshot of the table with this metadata file.

    Raises ``DataError`` for a table whose parquet files alone would be read wrongly.
    """
    place = file.parent.parent
    with _reading(file):
        metadata = _pyiceberg("serializers", file).FromInputFile.table_metadata(_Input(file))
        folder, snapshot = _Folder(place, metadata.location), metadata.current_snapshot()
        manifests = [] if snapshot is None else snapshot.manifests(folder)
        files = [each.data_file for part in manifests for each in part.fetch_manifest_entry(folder)]
        found = columns.found_in([field.name for field in metadata.schema().fields], where=str(place))
    if any(each.content.name != "DATA" for each in files):
        raise DataError(
            f"{place} is an Iceberg table with delete files, beside data files that still hold deleted rows; {_REWRITE}"
        )
    if others := sorted({each.file_format.name for each in files} - {"PARQUET"}):
        raise DataError(f"{place} is an Iceberg table with {others[0]} files; write them as parquet")
    names = sorted(folder.name_of(each.file_path) for each in files)
    return IcebergTable(place=place, files=names, columns=found, metadata=metadata)


@final
@dataclass(frozen=True)
class _Folder:
    """The files of a table, as pyiceberg asks for them; the table may have been copied from its ``location``."""

    place: Place
    location: str

    def name_of(self, location: str) -> str:
        """Return the name of a file below the folder; raises ``DataError`` if it is elsewhere."""
        root, path = (_SCHEME.sub("", each, count=1) for each in (self.location.rstrip("/") + "/", location))
        if not path.startswith(root):
            raise DataError(
                f"{self.place} is an Iceberg table of {self.location} with a file elsewhere, {location}; copy it to a table "
                "of its own"
            )
        return path.removeprefix(root)

    def new_input(self, location: str) -> "_Input":
        """Return a file."""
        return _Input(self.place / self.name_of(location))


@final
@dataclass(frozen=True)
class _Input:
    place: Place

    @property
    def location(self) -> str:
        """The name, which has .gz before its ending if the file is compressed."""
        name = self.place.name  # older tables have it after the ending
        return f"{name.removesuffix(_ENDING + _ZIPPED)}{_ZIPPED}{_ENDING}" if name.endswith(_ZIPPED) else name

    def open(self) -> io.BytesIO:
        """Return the whole content."""
        return io.BytesIO(self.place.read_bytes())


def _pyiceberg(module: str, place: Place) -> Any:
    return library(f"pyiceberg.{module}", place, "an Iceberg table", extra="iceberg")


@contextlib.contextmanager
def _reading(place: Place) -> Iterator[None]:
    try:
        yield
    except RayclError:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise DataError(
            f"cannot read {place} of an Iceberg table: {first_line(error)}; restore the table, or give another metadata file"
        ) from error
