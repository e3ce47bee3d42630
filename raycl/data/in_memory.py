"""Decoded rows in memory: zero-copy views into the object store, read by position."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raycl.data.codecs import Formats, read_all, store_all
from raycl.data.images import Pixels
from raycl.data.texts import TokenLists, Tokens, num_tokens

Content = Pixels | Tokens | TokenLists | NDArray[Any]  # ids or weights


@final
@dataclass(frozen=True, kw_only=True)
class Batch:
    """The contents of some rows by role, such as ``image``, with their ids and labels.

    ``epoch`` is one number, or one for each row. ``data_set`` is the number of their data set if a run has several.
    """

    contents: Mapping[str, Content]
    sample_id: NDArray[np.int64]
    label: NDArray[np.int64]
    epoch: int | NDArray[np.int64] = 0
    data_set: int = 0

    def __len__(self) -> int:
        return len(self.sample_id)


@final
class InMemoryDataset:
    """The rows of decoded tables in order, without a copy of their contents."""

    def __init__(self, tables: Sequence[pa.Table], formats: Formats) -> None:
        self._formats = formats
        self._parts = [part for table in tables for part in table.to_batches() if part.num_rows]
        self._starts = np.cumsum([0, *(part.num_rows for part in self._parts)])
        self._place = np.arange(self._starts[-1])  # of each row in the concatenated parts
        self.sample_id = _column(self._parts, "sample_id")
        self.label = _column(self._parts, "label")

    def __len__(self) -> int:
        return len(self.sample_id)

    def take(self, positions: NDArray[np.int64], *, epoch: int = 0) -> Batch:
        """Copy the rows at these positions into a batch."""
        return Batch(
            contents=read_all(self._formats, self.arrow_rows(positions)) if self._formats else {},
            sample_id=self.sample_id[positions],
            label=self.label[positions],
            epoch=epoch,
        )

    def arrow_rows(self, positions: NDArray[np.int64]) -> pa.RecordBatch:
        """Copy the rows at these positions, with all their columns; without positions, an empty batch of the contents."""
        if not len(positions):
            return pa.record_batch(store_all(self._formats, {role: [] for role in self._formats}))
        # Slices are views, so each row is copied once. `take` on a table would concatenate all parts first.
        places = self._place[positions]
        part = np.searchsorted(self._starts, places, side="right") - 1
        inside = places - self._starts[part]
        return pa.concat_batches(
            self._parts[number].slice(row, 1) for number, row in zip(part, inside, strict=True)
        )

    def num_tokens(self) -> NDArray[np.int64]:
        """Return the number of tokens of each row [num_rows], for lists of their longest text."""
        counts = [num_tokens(part) for part in self._parts]
        return np.concatenate([np.empty(0, np.int64), *counts])[self._place]

    def text_ids(self, role: str) -> NDArray[np.int64]:
        """Return the id of the only text of each row in this role [num_rows]."""
        return _column(self._parts, f"{role}.id")[self._place]

    def where(self, keep: Callable[[NDArray[np.int64]], NDArray[np.bool_]]) -> Self:
        """Return the rows whose ids ``keep`` accepts, sorted by id, so that the order of blocks does not matter."""
        return self._chosen(keep(self.sample_id))

    def only(self, role: str) -> Self:
        """Return the same rows with the contents of this role alone."""
        chosen = copy.copy(self)
        chosen._formats = {role: self._formats[role]}
        chosen._parts = [
            part.select([name for name in part.schema.names if name.startswith(f"{role}.")])
            for part in self._parts
        ]
        return chosen

    def without_contents(self) -> Self:
        """Return the rows with ids and labels only: their batches are drawn without a copy of the contents."""
        bare = copy.copy(self)
        bare._formats = {}
        return bare

    def labeled(self) -> Self:
        """Return the rows that have a label, sorted by id."""
        return self._chosen(self.label >= 0)

    def _chosen(self, kept: NDArray[np.bool_]) -> Self:
        positions = np.flatnonzero(kept)
        positions = positions[np.argsort(self.sample_id[positions], kind="stable")]
        chosen = copy.copy(self)
        chosen.sample_id, chosen.label = self.sample_id[positions], self.label[positions]
        chosen._place = self._place[positions]
        return chosen

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


def ids_of(batch: Batch, role: str) -> NDArray[np.int64] | None:
    """Return the ids of a batch in this role, if it has any; lists of ids are joined."""
    ids = batch.contents.get(role)
    assert ids is None or isinstance(ids, np.ndarray), f"the role {role} holds ids"
    return ids


def weights_of(batch: Batch) -> NDArray[np.float64] | None:
    """Return the weights of the rows of a batch, if they have any."""
    weights = batch.contents.get("weight")
    assert weights is None or isinstance(weights, np.ndarray), "the role weight holds numbers"
    return weights
