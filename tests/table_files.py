"""Rows written as parquet, Arrow, CSV and JSONL files."""

import csv
import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import feather, ipc

Rows = Sequence[dict[str, Any]]


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
