"""Weights of rows: how much each row counts in the loss."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raycl.data.codecs import to_numpy
from raycl.errors import DataError


@final
@dataclass(frozen=True)
class WeightFormat:
    """A weight per row, a finite number of at least 0; any other value stops the run."""

    def decode_all(self, values: Sequence[Any]) -> list[float]:
        """Return the weights; raises ``DataError`` for an invalid one."""
        weights = np.array(values, np.float64)  # NaN for None
        _check_weights(weights, where="a batch of the data")
        return weights.tolist()

    def store(self, decoded: Sequence[float]) -> dict[str, pa.Array]:
        """Return the column ``value``."""
        return {"value": pa.array(decoded, pa.float64())}

    def read(self, columns: Mapping[str, Any]) -> NDArray[np.float64]:
        """Return the weights of these columns, [batch]."""
        return to_numpy(columns["value"])


def check_weight_columns(columns: Iterable[tuple[str, pa.ChunkedArray]], *, where: str) -> None:
    """Raise ``DataError`` unless all numbers are weights, and one of them is above 0.

    ``columns`` are the parts of the column of ``where``, each with the name of its place.
    """
    num_rows, total = dict[str, int](), 0.0
    for name, column in columns:
        weights = column.cast(pa.float64(), safe=False).to_numpy()
        first = num_rows.get(name, 0)
        _check_weights(weights, where=name, first_row=first)
        num_rows[name], total = first + len(weights), total + float(weights.sum())
    if sum(num_rows.values()) and not total:
        raise DataError(
            f"all {sum(num_rows.values())} weights of {where} are 0, so there is no loss; give rows a weight "
            "above 0, or remove data.columns.weight"
        )


def _check_weights(weights: NDArray[np.float64], *, where: str, first_row: int = 0) -> None:
    """Raise ``DataError`` for a weight that is missing (NaN), below 0, or too large for float32."""
    (invalid,) = np.nonzero(~((weights >= 0) & (weights <= np.finfo(np.float32).max)))
    if len(invalid):
        value = weights[invalid[0]]
        raise DataError(
            f"{'a missing weight (null or NaN)' if np.isnan(value) else f'the weight {value:g}'} in row "
            f"{first_row + invalid[0]} of {where} ({len(invalid)} of {len(weights)} rows are invalid); give each row "
            "a finite number of at least 0, or remove data.columns.weight"
        )
