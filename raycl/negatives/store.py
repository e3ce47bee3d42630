"""Rows of a store of negatives, and the checks of rows before they are stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import DTypeLike

from raycl.arguments import check_type
from raycl.errors import ConfigError

State = dict[str, np.ndarray | int]

# The largest float16 bounds both types of rows. Embeddings of unit length stay far below it, so
# nothing overflows on the way into a store.
_MAX_VALUE = 65_504.0


@final
@dataclass(frozen=True, eq=False)
class Negatives:
    """Rows of a store, with the sample and the step that each belongs to.

    ``rows`` is [n, dim], float32 or float16; ``sample_id`` and ``step`` are int64 [n]. Where a
    method says so, the arrays are the store's own memory: do not write to them, and copy them
    before the next write of the store.
    """

    rows: np.ndarray
    sample_id: np.ndarray
    step: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: slice | np.ndarray) -> "Negatives":
        return Negatives(self.rows[index], self.sample_id[index], self.step[index])

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rows, ids and steps."""
        return self.rows, self.sample_id, self.step


def concatenate(parts: list[Negatives]) -> Negatives:
    """Return the rows of all parts, in their order; there must be at least one part."""
    return Negatives(*map(np.concatenate, zip(*(part.arrays() for part in parts), strict=True)))


def empty_rows(num_rows: int, dim: int, dtype: DTypeLike) -> np.ndarray:
    """Reserve rows of zeros, [num_rows, dim]; the kernel allocates their memory at the first write.

    Raises ``ConfigError`` if ``dim`` is below 1, or ``dtype`` neither float32 nor float16.
    """
    check_type("dim", dim, int)
    if dim < 1:
        raise ConfigError(
            f"a store cannot keep rows of dim {dim}; give the dim of the embeddings, at least 1"
        )
    if dtype not in (np.dtype(np.float32), np.dtype(np.float16)):
        name = getattr(dtype, "__name__", dtype)
        raise ConfigError(f"a store cannot keep rows of {name}; choose float32 or float16")
    return np.zeros((num_rows, dim), dtype)


def checked(
    rows: np.ndarray, sample_id: np.ndarray, *, dim: int, dtype: DTypeLike = np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows [n, dim] as ``dtype``, contiguous, and their ids as int64 [n].

    Raises ``ConfigError`` if a shape or type does not fit, the lengths differ, or a value is NaN, infinite
    or too large for float16.
    """
    _check_array("rows", rows)
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise ConfigError(
            f"the rows do not fit the store: they came as {list(rows.shape)}; give a row of {dim} for each sample"
        )
    if rows.dtype.kind != "f":
        raise ConfigError(f"the rows are not floating-point numbers: they came as {rows.dtype}; give float32")
    peak = np.abs(rows).max(initial=0)
    if not peak <= _MAX_VALUE:  # the other way round, NaN would pass
        raise ConfigError(
            f"the rows are not embeddings: the largest value is {peak}; nothing was stored: "
            f"check why the network returns it, or normalize the rows"
        )
    ids = checked_ids(sample_id)
    if len(rows) != len(ids):
        raise ConfigError(
            f"rows and sample ids do not match: {len(rows)} rows came with {len(ids)} ids; give an id for each row"
        )
    return np.ascontiguousarray(rows, dtype), ids


def checked_steps(step: int | np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the step of each row; raises ``ConfigError`` unless it is an integer, or integers [num_rows]."""
    steps, expected = np.asarray(step), np.shape(rows)[:1]
    if steps.dtype.kind not in "iu" or steps.shape not in ((), expected):
        raise ConfigError(
            f"the step is not an integer, or one for each row: it came as {steps.dtype} {list(steps.shape)}; "
            f"give a number, or int64 {list(expected)}"
        )
    return np.broadcast_to(steps, expected)


def checked_ids(sample_id: np.ndarray) -> np.ndarray:
    """Return the ids as int64 [n]; raises ``ConfigError`` unless they are integers in one dimension."""
    _check_array("sample ids", sample_id)
    if sample_id.ndim != 1 or sample_id.dtype.kind not in "iu" or sample_id.dtype == np.uint64:
        raise ConfigError(
            f"the sample ids are not one integer for each row: they came as {sample_id.dtype} "
            f"{list(sample_id.shape)}; give int64 [n]"
        )
    return sample_id.astype(np.int64, copy=False)


def _check_array(name: str, values: object) -> None:
    if not isinstance(values, np.ndarray):
        raise ConfigError(
            f"the {name} must be a numpy array, came {type(values).__name__}; of a tensor, give .detach().cpu().numpy()"
        )


def named(numbers: np.ndarray) -> str:
    """Name up to three numbers."""
    distinct = np.unique(numbers)
    those = ", ".join(map(str, distinct[:3]))
    return f"{those} and others" if len(distinct) > 3 else those


def negatives_in(
    state: Mapping[str, np.ndarray | int], *, num_rows: int, dim: int, dtype: DTypeLike
) -> Negatives:
    """Return the rows of a state; raises ``ConfigError`` if an array is missing or has another shape or type."""
    arrays = [np.asarray(state.get(name, ())) for name in ("rows", "sample_id", "step")]
    expected = [((num_rows, dim), np.dtype(dtype)), *[((num_rows,), np.dtype(np.int64))] * 2]
    found = [(array.shape, array.dtype) for array in arrays]
    if found != expected:
        raise ConfigError(
            f"the state does not fit this store: its rows, ids and steps are {_described(found)}, expected "
            f"{_described(expected)}; load it into a store made with the same settings"
        )
    return Negatives(*arrays)


def _described(arrays: list[tuple[tuple[int, ...], np.dtype]]) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for shape, dtype in arrays)
