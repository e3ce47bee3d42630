"""What the columns of a set hold: how values decode, how Arrow stores them, how batches read them back."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


class Content(Protocol):
    """The decoded values of a column in a batch."""

    def __len__(self) -> int:
        """Return how many rows these are."""
        ...

    def joined(self, other: Self) -> Self:
        """Return these rows with the other's after them."""
        ...


class Stored(Protocol):
    """The decoded values of a column in Arrow's memory."""

    def take(self, part: NDArray[np.int64], row: NDArray[np.int64]) -> Content:
        """Copy the values at these rows of these parts."""
        ...

    def num_tokens(self, part: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how long the texts at these rows are, of a list the longest one; 0 for what is no text."""
        ...


class Format(Protocol):
    """What the values of a column are, from the source to the batch."""

    def decode_all(self, values: Sequence[Any]) -> list[Any]:
        """Return each value decoded, or the ``BrokenValueError`` that says why it cannot be."""
        ...

    def store(self, decoded: Sequence[Any]) -> dict[str, pa.Array]:
        """Return Arrow columns that hold sound values, of which there may be none."""
        ...

    def read(self, parts: Sequence[pa.RecordBatch], prefix: str) -> Stored:
        """Return the values that ``store`` put into columns whose names then got a prefix."""
        ...


Formats = Mapping[str, Format]  # by the role of the column: image, text, query, ...


def store_all(formats: Formats, decoded: Mapping[str, Sequence[Any]]) -> dict[str, pa.Array]:
    """Return the Arrow columns of all roles, named ``role.column``."""
    return {
        f"{role}.{name}": array
        for role, each in formats.items()
        for name, array in each.store(decoded[role]).items()
    }


def read_all(formats: Formats, parts: Sequence[pa.RecordBatch]) -> dict[str, Stored]:
    """Return what ``store_all`` stored, by role."""
    return {role: each.read(parts, f"{role}.") for role, each in formats.items()}
