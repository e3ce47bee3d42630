"""Column formats: decode values, store them in Arrow, and read them back in batches."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


class Format(Protocol):
    """The format of a column's values, from the source to the batch."""

    def decode_all(self, values: Sequence[Any]) -> list[Any]:
        """Return each decoded value, or the ``InvalidValueError`` of a value that cannot be decoded."""
        ...

    def store(self, decoded: Sequence[Any]) -> dict[str, pa.Array]:
        """Return Arrow columns of decoded values; there may be none."""
        ...

    def read(self, columns: Mapping[str, Any]) -> Any:
        """Return the values of the columns of ``store`` as NumPy arrays."""
        ...


Formats = Mapping[str, Format]  # by the role of the column: image, text, query, ...


def store_all(formats: Formats, decoded: Mapping[str, Sequence[Any]]) -> dict[str, pa.Array]:
    """Return the Arrow columns of all roles, named ``role.column``."""
    return {
        f"{role}.{name}": array
        for role, each in formats.items()
        for name, array in each.store(decoded[role]).items()
    }


def read_all(formats: Formats, rows: pa.RecordBatch) -> dict[str, Any]:
    """Return the values of ``store_all`` by role."""
    columns: dict[str, dict[str, pa.Array]] = {role: {} for role in formats}
    for path in rows.schema.names:
        role, _, name = path.partition(".")
        if role in formats:
            columns[role][name] = rows.column(path)
    return {role: each.read(columns[role]) for role, each in formats.items()}


def list_lengths(column: Any) -> NDArray[np.int64]:
    """Return the length of each list of a column without missing values."""
    return np.diff(column.offsets.to_numpy()).astype(np.int64)


def bytes_of_text(kind: pa.DataType) -> pa.DataType:
    """Return the type of the bytes of texts. Categories stay ones: Arrow cannot decode those of string views."""
    return pa.dictionary(kind.index_type, pa.binary()) if pa.types.is_dictionary(kind) else pa.binary()


def to_numpy(column: pa.Array) -> NDArray[Any]:
    """Copy a column of numbers, so that torch may use its memory."""
    return column.to_numpy(zero_copy_only=False, writable=True)
