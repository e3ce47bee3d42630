"""Ids from the dataset: of queries, documents and negatives."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from raycl.data.codecs import to_numpy
from raycl.errors import DataError, InvalidValueError

_INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,19}")  # as Python writes it: "007" and "7" are different ids
_64_BITS = range(-(2**63), 2**64)
EXACT = 2**53  # integers below it are exact as float64


@final
@dataclass(frozen=True)
class IdFormat:
    """One id per row, or with ``in_lists`` a list of ids; a single id counts as a list of one."""

    in_lists: bool = False

    def decode_all(self, values: Sequence[Any]) -> list[list[int] | InvalidValueError]:
        """Return the ids of each row as numbers, or the error of the row."""
        return [self._numbers(value) for value in values]

    def store(self, decoded: Sequence[list[int]]) -> dict[str, pa.Array]:
        """Return the column ``id``, of lists."""
        return {"id": pa.array(decoded, pa.list_(pa.int64()))}

    def read(self, columns: Mapping[str, Any]) -> NDArray[np.int64]:
        """Return the ids of these columns; lists are joined."""
        return to_numpy(columns["id"].flatten())

    def _numbers(self, value: Any) -> list[int] | InvalidValueError:
        values = [value]
        if self.in_lists and (value is None or isinstance(value, list | tuple | np.ndarray)):
            values = [] if value is None else list(value)
        cause = next(filter(None, map(why_invalid, values)), None)
        return InvalidValueError(cause) if cause else list(map(entity_id, values))


def is_missing(value: Any) -> bool:
    """Whether an id is missing: None, NaN (as NumPy writes it), or an empty text."""
    if isinstance(value, float | np.floating):
        return bool(np.isnan(value))
    return value is None or (isinstance(value, str | bytes) and not value)


def why_invalid(value: Any) -> str | None:
    """Return why a value cannot be an id: it is missing, or a float that may have lost digits; None for an id."""
    if is_missing(value):
        return "missing id"
    is_inexact = isinstance(value, float | np.floating) and abs(value) >= EXACT
    return "id of 2^53 or more as float" if is_inexact else None


def stable_id(value: Any) -> int:
    """Return an int64: integers stay (64 unsigned bits wrap around), other values are hashed."""
    # NumPy turns integers into floats if one of them is missing, and databases write them as decimals.
    if isinstance(value, float | np.floating) and value.is_integer():
        value = int(value)
    if isinstance(value, Decimal) and value.is_finite() and value == int(value) in _64_BITS:
        value = int(value)
    if isinstance(value, int | np.integer):
        return (int(value) + 2**63) % 2**64 - 2**63
    return content_id(value if isinstance(value, bytes) else str(value).encode())


def entity_id(value: Any) -> int:
    """Return the :func:`stable_id` of a query or document; the text of an integer gets the integer's id.

    One column may hold ids as numbers, and another, such as the negatives, the same ids as texts.
    """
    content = value.encode() if isinstance(value, str) else value
    if isinstance(content, bytes) and _INTEGER.fullmatch(content) and int(content) in _64_BITS:
        value = int(content)
    return stable_id(value)


def stable_ids(values: list[Any], where: Sequence[str] | None = None) -> NDArray[np.int64]:
    """Turn the values of an id column into int64, see :func:`stable_id`; ``where`` names the row of each in errors.

    Raises ``DataError`` for a row without an id, or with a float that may have lost digits.
    """
    for row, cause in enumerate(map(why_invalid, values)):
        if cause is not None:
            found = "no id" if is_missing(values[row]) else f"an {cause}"
            place = f"row {row} of a batch" if where is None else where[row]
            raise DataError(
                f"{place} has {found}: give every row its own id, an integer or text, or remove the id column"
            )
    return np.array(list(map(stable_id, values)), np.int64)


def content_id(content: bytes) -> int:
    """Hash bytes to an int64 that is the same on every machine."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def content_ids(values: Mapping[str, Sequence[Any]]) -> NDArray[np.int64]:
    """Return the :func:`content_id` of each row; ``values`` are by role, so equal rows share an id."""
    rows = zip(*values.values(), strict=True)
    return np.array([content_id(b"\0".join(map(_bytes_of, row))) for row in rows], np.int64)


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, np.ndarray | Image.Image):
        return value.tobytes()
    if isinstance(value, list):
        return b"\1".join(map(_bytes_of, value))
    return value if isinstance(value, bytes) else b"" if value is None else str(value).encode()
