"""Rows written as parquet, CSV and JSONL files."""

import csv
import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Rows = Sequence[dict[str, Any]]


def write_rows(path: Path, rows: Rows) -> Path:
    """Write rows in the format of the file's name."""
    path.parent.mkdir(exist_ok=True)
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
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
