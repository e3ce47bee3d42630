"""Portraits of an encoder: what it makes of the same samples before the first step, and lately.

Below ``OUTPUT/portrait/`` lie ``samples.parquet``, a row a sample with its picture or texts, and
``first.parquet`` and ``latest.parquet`` with an embedding a row, in the same order.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raycl.errors import DataError
from raycl.storage import Place, check_plain

FOLDER = "portrait"
SAMPLES, FIRST, LATEST = "samples.parquet", "first.parquet", "latest.parquet"
NUM_BINS = 100
EDGES = np.linspace(-1.0, 1.0, NUM_BINS + 1)  # of the cosines that are counted


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ProbeSet:
    """The samples of a portrait: ids and labels [num_samples], -1 for none, and columns of their contents.

    ``contents`` has ``image`` (an encoded thumbnail), ``text``, ``caption``, ``query`` or ``document``.
    ``held_out`` says that the run does not train on them.
    """

    sample_id: NDArray[np.int64]
    label: NDArray[np.int64]
    contents: Mapping[str, list[Any]]
    held_out: bool


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Similarities:
    """How many cosines fell between successive ``EDGES``, [NUM_BINS] each: of positives, and of other pairs."""

    positives: NDArray[np.int64]
    negatives: NDArray[np.int64]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingSnapshot:
    """Unit rows [num_samples, dim] at a step, of pairs those of their queries and of their ``key``s."""

    step: int
    embedding: NDArray[np.float16]
    key: NDArray[np.float16] | None
    similarities: Similarities


def write_gallery(output: Place, gallery: ProbeSet) -> None:
    """Write ``samples.parquet``; raises ``StorageError``."""
    columns = {"sample_id": gallery.sample_id, "label": gallery.label, **gallery.contents}
    _write(output / FOLDER / SAMPLES, pa.table(columns), {"held_out": gallery.held_out})


def read_gallery(output: Place) -> ProbeSet | None:
    """Return the samples, or None where a run has no portrait; raises ``DataError`` for a damaged file."""
    found = _read(output / FOLDER / SAMPLES)
    if found is None:
        return None
    table, noted = found
    contents = {name: table[name].to_pylist() for name in table.column_names[2:]}
    return ProbeSet(
        sample_id=table["sample_id"].to_numpy(),
        label=table["label"].to_numpy(),
        contents=contents,
        held_out=bool(noted["held_out"]),
    )


def write_portrait(output: Place, name: str, portrait: EmbeddingSnapshot) -> None:
    """Write a portrait as ``FIRST`` or ``LATEST``; raises ``StorageError``."""
    columns = {"embedding": _column(portrait.embedding)}
    if portrait.key is not None:
        columns["key"] = _column(portrait.key)
    counted = {side: counts.tolist() for side, counts in vars(portrait.similarities).items()}
    _write(output / FOLDER / name, pa.table(columns), {"step": portrait.step, "similarities": counted})


def read_portrait(output: Place, name: str) -> EmbeddingSnapshot | None:
    """Return ``FIRST`` or ``LATEST``, or None where it is not; raises ``DataError`` for a damaged file."""
    found = _read(output / FOLDER / name)
    if found is None:
        return None
    table, noted = found
    counted = {side: np.array(counts, np.int64) for side, counts in noted["similarities"].items()}
    return EmbeddingSnapshot(
        step=noted["step"],
        embedding=_rows(table["embedding"]),
        key=_rows(table["key"]) if "key" in table.column_names else None,
        similarities=Similarities(**counted),
    )


def count_cosines(cosines: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    """Return how many fall into each bin; those that rounding put outside count at the ends, NaN nowhere."""
    finite = cosines[np.isfinite(cosines)]
    return np.histogram(np.clip(finite, -1.0, 1.0), EDGES)[0].astype(np.int64)


def _column(rows: NDArray[np.float16]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])


def _rows(column: pa.ChunkedArray) -> NDArray[np.float16]:
    width = column.type.list_size
    return column.combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(-1, width)


def _write(place: Place, table: pa.Table, noted: Mapping[str, Any]) -> None:
    stream = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"raycl": json.dumps(noted)}), stream)
    place.write_bytes(stream.getvalue())


def _read(place: Place) -> tuple[pa.Table, dict[str, Any]] | None:
    if not place.exists():
        return None
    content = place.read_bytes()
    try:
        check_plain(pq.read_schema(io.BytesIO(content)), place.uri)
        table = pq.read_table(io.BytesIO(content))
        return table, json.loads((table.schema.metadata or {})[b"raycl"])
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise DataError(
            f"{place} is no portrait of raycl's: {' '.join(str(error).split())[:200]}; remove it, and the report "
            "does without"
        ) from error
