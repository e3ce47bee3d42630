"""Decoded rows in memory: zero-copy views into the object store, read by position."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raycl.data.codecs import Content, Formats, read_all
from raycl.data.ids import Ids
from raycl.data.images import Pixels
from raycl.data.texts import TokenLists, Tokens


@final
@dataclass(frozen=True, kw_only=True)
class Batch:
    """The contents of some rows by role, such as ``image``, with their ids and labels."""

    contents: Mapping[str, Content]
    sample_id: NDArray[np.int64]
    label: NDArray[np.int64]
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.sample_id)

    def joined(self, other: "Batch") -> "Batch":
        """Return the rows of this batch followed by the rows of ``other``."""
        return Batch(
            contents={role: each.joined(other.contents[role]) for role, each in self.contents.items()},
            sample_id=np.concatenate([self.sample_id, other.sample_id]),
            label=np.concatenate([self.label, other.label]),
            epoch=self.epoch,
        )


@final
class InMemoryDataset:
    """The rows of decoded tables in order, without a copy of their contents."""

    def __init__(self, tables: Sequence[pa.Table], formats: Formats) -> None:
        parts = [part for table in tables for part in table.to_batches() if part.num_rows]
        self._stored = read_all(formats, parts)
        self.sample_id = _column(parts, "sample_id")
        self.label = _column(parts, "label")
        sizes = [part.num_rows for part in parts]
        self._part = np.repeat(np.arange(len(parts)), sizes)
        self._row = np.concatenate([np.arange(size) for size in sizes] or [np.arange(0)])

    def __len__(self) -> int:
        return len(self.sample_id)

    def take(self, positions: NDArray[np.int64], *, epoch: int = 0) -> Batch:
        """Copy the rows at these positions into a batch."""
        part, row = self._part[positions], self._row[positions]
        return Batch(
            contents={role: stored.take(part, row) for role, stored in self._stored.items()},
            sample_id=self.sample_id[positions],
            label=self.label[positions],
            epoch=epoch,
        )

    def num_tokens(self) -> NDArray[np.int64]:
        """Return the number of tokens of each row [num_rows], for lists of their longest text."""
        counts = [stored.num_tokens(self._part, self._row) for stored in self._stored.values()]
        return np.sum([np.zeros(len(self), np.int64), *counts], axis=0)

    def where(self, keep: Callable[[NDArray[np.int64]], NDArray[np.bool_]]) -> Self:
        """Return the rows whose ids ``keep`` accepts, sorted by id, so that the order of blocks does not matter."""
        positions = np.flatnonzero(keep(self.sample_id))
        positions = positions[np.argsort(self.sample_id[positions], kind="stable")]
        chosen = object.__new__(type(self))
        chosen._stored = self._stored
        for name in ("sample_id", "label", "_part", "_row"):
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


def _column(parts: Sequence[pa.RecordBatch], name: str) -> NDArray[np.int64]:
    return np.concatenate([part.column(name).to_numpy() for part in parts] or [np.empty(0)]).astype(np.int64)


def pixels_of(batch: Batch) -> Pixels:
    """Return the images of a batch of images."""
    pixels = batch.contents["image"]
    assert isinstance(pixels, Pixels), "the role image holds images"
    return pixels


def tokens_of(batch: Batch, role: str) -> Tokens:
    """Return the texts of a batch with one text per row in this role."""
    tokens = batch.contents[role]
    assert isinstance(tokens, Tokens), f"the role {role} holds one text per row"
    return tokens


def texts_of(batch: Batch, role: str) -> TokenLists:
    """Return the texts of a batch with lists of texts in this role."""
    texts = batch.contents[role]
    assert isinstance(texts, TokenLists), f"the role {role} holds lists of texts"
    return texts


def ids_of(batch: Batch, role: str) -> Ids | None:
    """Return the ids of a batch in this role, if it has any."""
    ids = batch.contents.get(role)
    assert ids is None or isinstance(ids, Ids), f"the role {role} holds ids"
    return ids
