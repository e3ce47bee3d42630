"""Decoded rows at hand: zero-copy views into the object store, read by position."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raycl.data.images import ImageFormat


@final
@dataclass(frozen=True, kw_only=True)
class Batch:
    """Images [batch, size, size, channels] as uint8, their ids, labels and original aspects."""

    images: NDArray[np.uint8]
    sample_id: NDArray[np.int64]
    label: NDArray[np.int64]
    aspect: NDArray[np.float32]
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.sample_id)

    def joined(self, other: "Batch") -> "Batch":
        """Return this batch's rows with the other's after them."""
        return Batch(
            images=np.concatenate([self.images, other.images]),
            sample_id=np.concatenate([self.sample_id, other.sample_id]),
            label=np.concatenate([self.label, other.label]),
            aspect=np.concatenate([self.aspect, other.aspect]),
            epoch=self.epoch,
        )


@final
class Rows:
    """Rows of decoded tables in their order, without a copy of the pixels."""

    def __init__(self, tables: Sequence[pa.Table], image_format: ImageFormat) -> None:
        parts = [part for table in tables for part in table.to_batches() if part.num_rows]
        self._images = [_pixels(part, image_format) for part in parts]
        self._shape = (image_format.size, image_format.size, image_format.channels)
        self.sample_id = _column(parts, "sample_id", np.dtype(np.int64))
        self.label = _column(parts, "label", np.dtype(np.int64))
        self.aspect = _column(parts, "aspect", np.dtype(np.float32))
        sizes = [part.num_rows for part in parts]
        self._part = np.repeat(np.arange(len(parts)), sizes)
        self._row = np.concatenate([np.arange(size) for size in sizes] or [np.arange(0)])

    def __len__(self) -> int:
        return len(self.sample_id)

    def take(self, positions: NDArray[np.int64], *, epoch: int = 0) -> Batch:
        """Copy the rows at these positions into a batch."""
        images = np.empty((len(positions), *self._shape), np.uint8)
        for out, part, row in zip(images, self._part[positions], self._row[positions], strict=True):
            out[...] = self._images[part][row]
        return Batch(
            images=images,
            sample_id=self.sample_id[positions],
            label=self.label[positions],
            aspect=self.aspect[positions],
            epoch=epoch,
        )

    def where(self, keep: Callable[[NDArray[np.int64]], NDArray[np.bool_]]) -> Self:
        """Return the rows whose ids ``keep`` accepts, sorted by id so that block order is forgotten."""
        positions = np.flatnonzero(keep(self.sample_id))
        positions = positions[np.argsort(self.sample_id[positions], kind="stable")]
        chosen = object.__new__(type(self))
        chosen._images, chosen._shape = self._images, self._shape
        for name in ("sample_id", "label", "aspect", "_part", "_row"):
            setattr(chosen, name, getattr(self, name)[positions])
        return chosen

    def labeled(self) -> Self:
        """Return the rows that have a label, sorted by id."""
        known = self.sample_id[self.label >= 0]
        return self.where(lambda ids: np.isin(ids, known))

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield all rows in order; the last batch may be short."""
        for start in range(0, len(self), size):
            yield self.take(np.arange(start, min(start + size, len(self))))


def _pixels(part: pa.RecordBatch, image_format: ImageFormat) -> NDArray[np.uint8]:
    column = part.column("pixels")
    width = image_format.size**2 * image_format.channels
    data = np.frombuffer(
        column.buffers()[1], np.uint8, count=len(column) * width, offset=column.offset * width
    )
    return data.reshape(len(column), image_format.size, image_format.size, image_format.channels)


def _column(parts: Sequence[pa.RecordBatch], name: str, dtype: np.dtype) -> NDArray:
    return np.concatenate([part.column(name).to_numpy() for part in parts] or [np.empty(0)]).astype(dtype)
