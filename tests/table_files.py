"""Rows written as parquet, Arrow, CSV and JSONL files and tars."""

import csv
import gzip
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import feather, ipc

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
