"""Decoding by Ray Data tasks: pieces of a source in, tables of equal-sized pixels out."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray

from raycl.data.holdout import Holdout
from raycl.data.images import BrokenImageError, ImageFormat
from raycl.data.logbook import NUM_EXAMPLES
from raycl.data.sources import NO_LABEL, Piece, RawRows, Source, content_id, stable_ids
from raycl.errors import DataError

BLOCK_BYTES = 64 * 2**20
Keep = Callable[[NDArray[np.int64]], NDArray[np.bool_]]


@final
@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Turn raw rows into tables: ``pixels`` (bytes), ``aspect``, ``sample_id``, ``label``.

    A broken row is left out and counted by its cause in the logbook. Rows that ``keep`` refuses
    are not decoded at all; of those decoded, ``count`` says which are counted (by default all).
    """

    image_format: ImageFormat
    logbook: Any
    holdout: Holdout | None = None
    keep: Keep | None = None
    count: Keep | None = None

    def tables(self, piece: str, batches: Iterator[RawRows]) -> Iterator[pa.Table]:
        """Yield the sound rows of one piece, in order, in blocks of at most 64 MiB."""
        broken: Counter[str] = Counter()
        examples: list[str] = []
        num_rows = num_train = 0
        block: list[pa.Table] = []
        for rows in batches:
            num_rows += int(_accepted(self.count or self.keep, rows.sample_id).sum())
            table = self._decode(rows, broken, examples)
            num_train += self._count_train(table)
            block.append(table)
            if sum(part.nbytes for part in block) >= BLOCK_BYTES:
                yield pa.concat_tables(block).combine_chunks()
                block = []
        # The rows to judge on are read by themselves where a set is streamed.
        name = f"{piece}, to judge on" if self.count else piece
        # Waited for, so that whoever has the rows also finds the count of those that are missing.
        ray.get(self.logbook.add_rows.remote(name, num_rows, num_train, broken, examples[:NUM_EXAMPLES]))
        yield pa.concat_tables(block or [self._table([], [], [], [])]).combine_chunks()

    def _decode(self, rows: RawRows, broken: Counter[str], examples: list[str]) -> pa.Table:
        wanted = _accepted(self.keep, rows.sample_id)
        counted = _accepted(self.count, rows.sample_id)
        pixels: list[bytes] = []
        aspects: list[float] = []
        sound: list[int] = []
        for index in np.flatnonzero(wanted).tolist():
            try:
                image, aspect = self.image_format.decode(rows.images[index])
            except BrokenImageError as error:
                if counted[index]:
                    broken[str(error)] += 1
                    examples.append(f"{rows.where[index]} ({error})")
                continue
            pixels.append(image.tobytes())
            aspects.append(aspect)
            sound.append(index)
        return self._table(pixels, aspects, rows.sample_id[sound], rows.label[sound])

    def _table(self, pixels: list[bytes], aspects: list[float], ids: Any, labels: Any) -> pa.Table:
        row = pa.binary(self.image_format.size**2 * self.image_format.channels)
        return pa.table(
            {
                "pixels": pa.array(pixels, row),
                "aspect": pa.array(aspects, pa.float32()),
                "sample_id": pa.array(ids, pa.int64()),
                "label": pa.array(labels, pa.int64()),
            }
        )

    def _count_train(self, table: pa.Table) -> int:
        if self.holdout is None:
            return table.num_rows
        return int(self.holdout.is_train(table["sample_id"].to_numpy()).sum())


def _accepted(keep: Keep | None, sample_id: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.ones(len(sample_id), np.bool_) if keep is None else keep(sample_id)


def decode_source(
    source: Source,
    decoder: Decoder,
    pieces: tuple[Piece, ...] | None = None,
    *,
    kept_whole: frozenset[int] = frozenset(),
) -> ray.data.Dataset:
    """Return the decoded rows of a source as a lazy Ray Dataset, a block or more a piece, in order.

    Of pieces whose first id is among ``kept_whole`` every row is kept, held out or not.
    """
    pieces = source.pieces if pieces is None else pieces
    # Every task carries the source: leave out the list of all the other pieces.
    described = replace(source, pieces=())
    whole = replace(decoder, keep=None, holdout=None)

    def read(batch: pa.Table) -> Iterator[pa.Table]:
        for text in batch["piece"].to_pylist():
            piece = Piece.from_json(text)
            decoder_here = whole if piece.first_id in kept_whole else decoder
            yield from decoder_here.tables(f"{piece.uri}:{piece.first_id}", described.read(piece))

    table = ray.data.from_items(
        [{"piece": piece.to_json()} for piece in pieces], override_num_blocks=len(pieces)
    )
    return table.map_batches(read, batch_size=1, batch_format="pyarrow", zero_copy_batch=True)


def decode_dataset(dataset: ray.data.Dataset, columns: Any, decoder: Decoder) -> ray.data.Dataset:
    """Return the decoded rows of a user's own Ray Dataset.

    Without an id column a row's id is the hash of its image, so equal images share one.
    Raises ``DataError`` if a column is missing.
    """
    names = column_names(dataset)
    for name in (columns.image, columns.label, columns.sample_id):
        if name is not None and name not in names:
            raise DataError(f"the dataset has no column {name!r}; it has {', '.join(names)}")
    label = columns.label or ("label" if "label" in names else None)
    sample_id = columns.sample_id or ("sample_id" if "sample_id" in names else None)

    def read(batch: Any) -> Any:
        images = list(batch[columns.image])
        if label and batch[label].dtype.kind not in "iub":
            raise DataError(
                f"labels must be integers, column {label!r} holds {batch[label].dtype}; map them first"
            )
        ids = stable_ids(batch[sample_id].tolist()) if sample_id else _content_ids(images)
        labels = batch[label].astype(np.int64) if label else np.full(len(images), NO_LABEL, np.int64)
        where = [f"row with id {row_id}" for row_id in ids]
        rows = RawRows(images=images, sample_id=ids, label=labels, where=where)
        yield from decoder.tables(f"ids {content_id(ids.tobytes())}", iter([rows]))

    return dataset.map_batches(read, batch_size=1_024, batch_format="numpy")


def column_names(dataset: ray.data.Dataset) -> list[str]:
    """Return the columns of a dataset, none if it is empty."""
    schema = dataset.schema()
    return list(schema.names) if schema is not None else []


def _content_ids(images: list[Any]) -> NDArray[np.int64]:
    contents = (image.tobytes() if isinstance(image, np.ndarray) else image or b"" for image in images)
    return np.array([content_id(content) for content in contents], np.int64)
