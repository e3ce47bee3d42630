"""Delta Lake tables: the parquet files of the newest version, which their log lists."""

import re
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from raycl.data.columns import ColumnNames
from raycl.data.tables import library
from raycl.errors import DataError, first_line, last_line
from raycl.storage import Place

LOG = "_delta_log"
# Features of a table whose parquet files hold its rows and columns under their own names. The next checks refuse tables
# that use the second and the third.
_FEATURES = {
    "vacuumProtocolCheck",
    "columnMapping",
    "deletionVectors",
    "timestampNtz",
    "typeWidening",
    "typeWidening-preview",
    "v2Checkpoint",
}
_MARKS = re.compile(r"\x1b\[\d*m|↳")  # colors and arrows


def delta_files(place: Place, columns: ColumnNames) -> tuple[list[str], ColumnNames]:
    """Return the files of the newest version, sorted, and the columns to read.

    Raises ``DataError`` for a table whose files alone would be read wrongly, and for a column that is not in the files.
    """
    table = _open(place)
    if others := sorted({*(table.protocol().reader_features or ())} - _FEATURES):
        raise DataError(
            f"{place} is a Delta table with {', '.join(others)}, which raycl does not read; copy it to a table without them"
        )
    about = table.metadata()
    if about.configuration.get("delta.columnMapping.mode", "none") != "none":
        raise DataError(
            f"{place} is a Delta table with column mapping, whose files have other column names; copy it to a table "
            "with delta.columnMapping.mode none"
        )
    if _has_deletions(table, place):
        raise DataError(
            f"{place} is a Delta table with deletion vectors, whose files still hold deleted rows; "
            "rewrite them by REORG TABLE ... APPLY (PURGE)"
        )
    found = columns.found_in([field.name for field in table.schema().fields], where=str(place))
    for role, name in found.asked.items():
        if name in about.partition_columns:
            raise DataError(
                f"{place} is partitioned by {name!r}, which its files do not hold; copy it to a table that is not, or name "
                f"another column with --set data.columns.{role}=NAME"
            )
    files = [unquote(path) for path in pa.table(table.get_add_actions())["path"].to_pylist()]
    if outside := next((path for path in files if path.startswith("/") or "://" in path), None):
        raise DataError(
            f"{place} is a Delta table with a file elsewhere, {outside}; copy it to a table of its own"
        )
    return sorted(files), found


def _open(place: Place) -> Any:
    if place.is_local and "%" in place.path + place.root:
        raise DataError(f"{place} has % in its path, which deltalake decodes; rename the folder")
    deltalake = library("deltalake", place, "a Delta table", extra="delta")
    address, options = place.for_object_store()
    try:
        return deltalake.DeltaTable(address, storage_options=options)
    except OSError as error:
        raise place.failure("read", OSError(_MARKS.sub("", last_line(error)).strip())) from error
    except deltalake.exceptions.DeltaError as error:
        raise DataError(
            f"cannot read {place} as a Delta table: {first_line(error)}; restore its folder {LOG}"
        ) from error


def _has_deletions(table: Any, place: Place) -> bool:
    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return False
    try:
        return any(batch.num_rows for batch in table.deletion_vectors())
    except Exception as error:  # a damaged file may raise anything
        raise DataError(
            f"cannot read the deletion vectors of {place}: {first_line(error)}; rewrite its files by REORG TABLE ... APPLY "
            "(PURGE)"
        ) from error
