"""Column formats: decode values, store them in Arrow, and read them back in batches."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


class Content(Protocol):
    """The decoded values of a column in a batch."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def joined(self, other: Self) -> Self:
        """Return these rows followed by the rows of ``other``."""
        ...


class Stored(Protocol):
    """The decoded values of a column in Arrow memory."""

    def take(self, part: NDArray[np.int64], row: NDArray[np.int64]) -> Content:
        """Copy the values at these rows of these parts."""
        ...

    def num_tokens(self, part: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens of each row: the longest text of a list, 0 for other contents."""
        ...


class Format(Protocol):
    """The format of a column's values, from the source to the batch."""

    def decode_all(self, values: Sequence[Any]) -> list[Any]:
        """Return each decoded value, or the ``BrokenValueError`` of a value that cannot be decoded."""
        ...

    def store(self, decoded: Sequence[Any]) -> dict[str, pa.Array]:
        """Return Arrow columns of decoded values; there may be none."""
        ...

    def read(self, parts: Sequence[pa.RecordBatch], prefix: str) -> Stored:
        """Return the values of ``store``, whose columns now have a prefix."""
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
    """Return the values of ``store_all`` by role."""
    return {role: each.read(parts, f"{role}.") for role, each in formats.items()}
