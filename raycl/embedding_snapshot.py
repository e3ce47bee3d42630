"""Embedding snapshots: the embeddings of the same samples before the first step and most recently.

``OUTPUT/embedding_snapshots/`` holds ``samples.parquet``, one row per sample with its image or texts, and
``first.parquet`` and ``latest.parquet`` with one embedding per row, in the same order. Outputs written before this
name have the same files in ``OUTPUT/portrait/``.
"""

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raycl.errors import DataError, one_line
from raycl.storage import Place, check_plain

Content = TypeVar("Content")

FOLDER, OLD_FOLDER = "embedding_snapshots", "portrait"
SAMPLES, FIRST, LATEST = "samples.parquet", "first.parquet", "latest.parquet"
NUM_BINS = 100
EDGES = np.linspace(-1.0, 1.0, NUM_BINS + 1)  # of the histograms of cosines


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ProbeSet:
    """The samples of a snapshot: ids and labels [num_samples], label -1 for none, and columns of their contents.

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
    """Counts of cosines between successive ``EDGES``, [NUM_BINS] each, for positives and for other pairs."""

    positives: NDArray[np.int64]
    negatives: NDArray[np.int64]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingSnapshot:
    """Unit rows [num_samples, dim] at a step; for pairs, of the queries and of their ``key``."""

    step: int
    embedding: NDArray[np.float16]
    key: NDArray[np.float16] | None
    similarities: Similarities


def write_probe_set(output: Place, probes: ProbeSet) -> None:
    """Write ``samples.parquet``; raises ``StorageError``."""
    columns = {"sample_id": probes.sample_id, "label": probes.label, **probes.contents}
    _write(output / FOLDER / SAMPLES, pa.table(columns), {"held_out": probes.held_out})


def read_probe_set(output: Place) -> ProbeSet | None:
    """Return the samples, or None if a run has no snapshot; raises ``DataError`` for a damaged file."""
    return _read(output, SAMPLES, _probe_set)


def write_snapshot(output: Place, name: str, snapshot: EmbeddingSnapshot) -> None:
    """Write a snapshot as ``FIRST`` or ``LATEST``; raises ``StorageError``."""
    rows = {"embedding": snapshot.embedding} | ({} if snapshot.key is None else {"key": snapshot.key})
    columns = {
        column: pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
        for column, values in rows.items()
    }
    counts = {side: values.tolist() for side, values in vars(snapshot.similarities).items()}
    metadata = {"step": snapshot.step, "similarities": counts}
    _write(output / FOLDER / name, pa.table(columns), metadata)


def read_snapshot(output: Place, name: str) -> EmbeddingSnapshot | None:
    """Return ``FIRST`` or ``LATEST``, or None if it does not exist; raises ``DataError`` for a damaged file."""
    return _read(output, name, _snapshot)


def count_cosines(cosines: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    """Return the counts per bin; cosines that rounding moved outside count in the outer bins, NaN nowhere."""
    finite = cosines[np.isfinite(cosines)]
    return np.histogram(np.clip(finite, -1.0, 1.0), EDGES)[0].astype(np.int64)


def _probe_set(table: pa.Table, metadata: Mapping[str, Any]) -> ProbeSet:
    return ProbeSet(
        sample_id=table["sample_id"].to_numpy(),
        label=table["label"].to_numpy(),
        contents={name: table[name].to_pylist() for name in table.column_names[2:]},
        held_out=bool(metadata["held_out"]),
    )


def _snapshot(table: pa.Table, metadata: Mapping[str, Any]) -> EmbeddingSnapshot:
    counts = {side: np.array(values, np.int64) for side, values in metadata["similarities"].items()}
    return EmbeddingSnapshot(
        step=metadata["step"],
        embedding=_rows(table["embedding"]),
        key=_rows(table["key"]) if "key" in table.column_names else None,
        similarities=Similarities(**counts),
    )


def _rows(column: pa.ChunkedArray) -> NDArray[np.float16]:
    width = column.type.list_size
    return column.combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(-1, width)


def _write(place: Place, table: pa.Table, metadata: Mapping[str, Any]) -> None:
    stream = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"raycl": json.dumps(metadata)}), stream)
    place.write_bytes(stream.getvalue())


def _read(output: Place, name: str, parse: Callable[[pa.Table, Any], Content]) -> Content | None:
    for place in (output / FOLDER / name, output / OLD_FOLDER / name):
        if place.exists():
            return _parsed(place, parse)
    return None


def _parsed(place: Place, parse: Callable[[pa.Table, Any], Content]) -> Content:
    content = place.read_bytes()
    try:
        check_plain(pq.read_schema(io.BytesIO(content)), place.uri)
        table = pq.read_table(io.BytesIO(content))
        return parse(table, json.loads((table.schema.metadata or {})[b"raycl"]))
    except (pa.ArrowException, OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{place} is not an embedding snapshot of raycl: {one_line(error)}; remove it to "
            "write the report without it"
        ) from error
