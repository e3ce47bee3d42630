"""The fingerprint of decoded rows, the same for any order of the rows and any cut into blocks."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from raycl.data.codecs import list_lengths


def fingerprint(*tables: pa.Table) -> int:
    """Return the sum over all rows of a hash of their ids, labels and contents, modulo 2**64."""
    total = 0
    for rows in [batch for table in tables for batch in table.to_batches()]:
        columns = [_cells(rows.column(name)) for name in sorted(rows.schema.names)]
        for cells in zip(*columns, strict=True):
            digest = hashlib.blake2b(digest_size=8)
            for cell in cells:
                digest.update(_with_length(cell))
            total += int.from_bytes(digest.digest(), "little")
    return total % 2**64


def fingerprint_of_blocks(blocks: Sequence[ray.ObjectRef], names: Sequence[str] | None = None) -> int:
    """Return the fingerprint of the tables that these refer to, or of their columns ``names``, by Ray tasks."""
    task: Any = ray.remote(_of_columns)
    return sum(ray.get([task.remote(block, names) for block in blocks])) % 2**64


def _of_columns(table: pa.Table, names: Sequence[str] | None) -> int:
    return fingerprint(table if names is None else table.select(names))


def _cells(column: pa.Array) -> Iterator[bytes]:
    """Yield the content of each row of a column without missing values."""
    kind = column.type
    if pa.types.is_fixed_size_binary(kind):
        yield from column.to_pylist()
    elif pa.types.is_list(kind):
        part = _parts(column.flatten())
        for start, end in pairwise(np.cumsum([0, *list_lengths(column)]).tolist()):
            yield part(start, end)
    else:
        part = _parts(column)
        for row in range(len(column)):
            yield part(row, row + 1)


def _parts(values: pa.Array) -> Callable[[int, int], bytes]:
    """Return the function that joins the contents of the rows between two positions."""
    if pa.types.is_list(values.type):
        cells = list(map(_with_length, _cells(values)))
        return lambda start, end: b"".join(cells[start:end])
    numbers = values.to_numpy(zero_copy_only=False)
    content, width = numbers.tobytes(), numbers.itemsize
    return lambda start, end: content[start * width : end * width]


def _with_length(cell: bytes) -> bytes:
    return len(cell).to_bytes(8, "little") + cell
