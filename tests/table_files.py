"""Rows written as parquet, Arrow, CSV and JSONL files, tars, and Delta, Iceberg and Lance tables."""

import csv
import gzip
import io
import json
import shutil
import tarfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from pyarrow import feather, ipc
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.io import load_file_io
from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import assign_fresh_schema_ids
from pyiceberg.serializers import ToOutputFile
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.metadata import new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.table.update import update_table_metadata

Rows = Sequence[dict[str, Any]]
_FILES = {"image": "png", "text": "txt", "caption": "txt", "label": "cls"}


def write_rows(path: Path, rows: Rows) -> Path:
    """Write rows in the format of the file's name."""
    path.parent.mkdir(exist_ok=True)
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
        return path
    if name.endswith((".arrow", ".feather")):
        write_arrow(path, pa.Table.from_pylist(list(rows)))
        return path
    if name.endswith((".delta", ".iceberg", ".lance")):
        write_table(path, [rows])
        return path
    if name.endswith((".tar", ".tgz")):
        write_tar(path, [files_of(row) for row in rows])
        return path
    text = io.StringIO(newline="")
    if name.endswith(("jsonl", "ndjson")):
        text.writelines(
            json.dumps(row, ensure_ascii=bool(place % 2)) + "\n" for place, row in enumerate(rows)
        )
    else:
        delimiter = "\t" if name.endswith("tsv") else ","
        writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    content = text.getvalue().encode()
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


def write_parts(folder: Path, ending: str, parts: Sequence[Rows]) -> tuple[Path, list[Rows]]:
    """Write parts as the files of a folder, or one after the other to a table; return it, and the parts in its order."""
    if ending in ("delta", "iceberg", "lance"):
        table = write_table(folder / f"rows.{ending}", parts)
        # Delta and Iceberg give random names to files, which have different numbers of rows here.
        sizes = [pq.read_metadata(file).num_rows for file in sorted(table.rglob("*.parquet"))]
        return table, [part for size in sizes for part in parts if len(part) == size] or [*parts]
    for name, part in zip("abc", parts, strict=False):
        write_rows(folder / f"{name}.{ending}", part)
    return folder, [*parts]


def write_table(path: Path, parts: Sequence[Rows]) -> Path:
    """Replace the Delta, Iceberg or Lance table of this name by one to which the parts were appended."""
    shutil.rmtree(path, ignore_errors=True)
    tables = [pa.Table.from_pylist(list(part)) for part in parts]
    if path.suffix == ".iceberg":
        iceberg = IcebergFolder("tests").create(path, tables[0].schema)
        for table in tables:
            iceberg.append(table)
    for table in tables:
        if path.suffix == ".delta":
            write_deltalake(path, table, mode="append")
        if path.suffix == ".lance":
            lance = pytest.importorskip("lance")  # 85 MB, so it is not an extra of the tests
            lance.write_dataset(table, path, mode="append" if path.exists() else "create")
    return path


class IcebergFolder(NoopCatalog):
    """The catalog of a table in a folder: its newest metadata file has the highest number."""

    def create(self, path: Path, schema: pa.Schema) -> Table:
        """Create a table."""
        metadata = new_table_metadata(
            schema=assign_fresh_schema_ids(_pyarrow_to_schema_without_ids(schema)),
            partition_spec=UNPARTITIONED_PARTITION_SPEC,
            sort_order=UNSORTED_SORT_ORDER,
            location=f"file://{path}",
        )
        return self._saved(metadata, 0)

    def commit_table(self, table: Table, requirements: Any, updates: Any) -> CommitTableResponse:
        """Write the next metadata file."""
        number = int(table.metadata_location.rpartition("/")[2][:5]) + 1
        saved = self._saved(update_table_metadata(table.metadata, updates), number)
        return CommitTableResponse(metadata=saved.metadata, metadata_location=saved.metadata_location)

    def _saved(self, metadata: Any, number: int) -> Table:
        io = load_file_io(location=metadata.location)
        location = f"{metadata.location}/metadata/{number:05}-{uuid.uuid4()}.metadata.json"
        ToOutputFile.table_metadata(metadata, io.new_output(location))
        return Table(("rows",), metadata, location, io, self)


def write_arrow(path: Path, table: pa.Table, *, batch_rows: int = 4) -> Path:
    """Write a stream as ``save_to_disk`` of ``datasets`` does, or a Feather file."""
    path.parent.mkdir(exist_ok=True, parents=True)
    if path.suffix == ".feather":
        feather.write_feather(table, path, chunksize=batch_rows)
        return path
    with pa.OSFile(str(path), "wb") as file, ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, batch_rows)
    return path


def write_saved(folder: Path, table: pa.Table, *, num_files: int = 2) -> Path:
    """Write the folder that ``save_to_disk`` of ``datasets`` writes."""
    names = [f"data-{number:05d}-of-{num_files:05d}.arrow" for number in range(num_files)]
    rows = -(-table.num_rows // num_files)
    for number, name in enumerate(names):
        write_arrow(folder / name, table.slice(number * rows, rows))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


def files_of(row: dict[str, Any]) -> dict[str, bytes]:
    """Return the files of a row in a tar by ending: image, text and label, and all else as JSON."""
    apart = {name: row[name] for name in _FILES if isinstance(row.get(name), str | bytes | int)}
    files = {
        _FILES[name]: value if isinstance(value, bytes) else str(value).encode()
        for name, value in apart.items()
    }
    return files | {"json": json.dumps({name: row[name] for name in row.keys() - apart.keys()}).encode()}


def write_tar(path: Path, samples: Sequence[dict[str, bytes]]) -> Path:
    """Write the files of each sample by ending."""
    path.parent.mkdir(exist_ok=True, parents=True)
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as tar:
        for number, files in enumerate(samples):
            for ending, content in files.items():
                member = tarfile.TarInfo(f"part/{number:06d}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path
