"""What every store of negatives lends and answers, and what it refuses to take in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
from numpy.typing import DTypeLike

from raycl.errors import ConfigError

State = dict[str, np.ndarray | int]

# The largest float16: one bound for both types of rows, and embeddings of unit length stay far
# below it, so that nothing overflows on the way into a store.
_LARGEST = 65_504.0


@final
@dataclass(frozen=True, eq=False)
class Negatives:
    """Rows that a store lends, with who they are and when they were written.

    ``rows`` is [n, dim], float32 or float16; ``sample_id`` and ``step`` are int64 [n]. The ids tell
    false negatives, the steps how stale a row is. Where a store says so, the arrays are its own
    memory: they change with its next write and are not to be written.
    """

    rows: np.ndarray
    sample_id: np.ndarray
    step: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)


class NegativeStore(Protocol):
    """What each store answers to whoever holds it: an actor, a checkpoint, a user with a question."""

    @property
    def num_bytes(self) -> int:
        """Memory of the store when it is full, in bytes."""
        ...

    def negatives(self) -> Negatives:
        """Lend all rows there are, in the order of slots."""
        ...

    def get(self, sample_id: np.ndarray) -> Negatives:
        """Return the rows of these samples."""
        ...

    def state_dict(self) -> State:
        """Return arrays and integers from which an equal store can be made."""
        ...

    def load_state_dict(self, state: Mapping[str, np.ndarray | int]) -> None:
        """Become the store that ``state`` was taken from."""
        ...


def empty_rows(num_rows: int, dim: int, dtype: DTypeLike) -> np.ndarray:
    """Reserve rows of zeros, [num_rows, dim]; the kernel gives the memory when they are written.

    Raises:
        ConfigError: ``dim`` is below 1, or ``dtype`` is neither float32 nor float16.
    """
    if dim < 1:
        raise ConfigError(
            f"a store cannot keep rows of dim {dim}; give the dim of the embeddings, at least 1"
        )
    if np.dtype(dtype) not in (np.float32, np.float16):
        raise ConfigError(f"a store cannot keep rows of {np.dtype(dtype)}; choose float32 or float16")
    return np.zeros((num_rows, dim), dtype)


def checked_rows(rows: np.ndarray, *, dim: int, dtype: DTypeLike) -> np.ndarray:
    """Return rows [n, dim] as ``dtype``, contiguous.

    Raises:
        ConfigError: The shape is not [n, dim], or the values are not floating-point numbers of a
            size that float16 can hold.
    """
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise ConfigError(
            f"the rows do not fit the store: they came as {list(rows.shape)}; give one row of {dim} a sample"
        )
    if rows.dtype.kind != "f":
        raise ConfigError(f"the rows are not floating-point numbers: they came as {rows.dtype}; give float32")
    peak = np.abs(rows).max(initial=0)
    if not peak <= _LARGEST:  # turned round, NaN would pass
        raise ConfigError(
            f"the rows hold values that are no embedding's: the largest is {peak}; nothing was stored: "
            f"find out why the network gives them, or normalize the rows"
        )
    return np.ascontiguousarray(rows, dtype)


def checked_ids(sample_id: np.ndarray) -> np.ndarray:
    """Return the ids as int64 [n].

    Raises:
        ConfigError: They are not one row of integers.
    """
    if sample_id.ndim != 1 or sample_id.dtype.kind not in "iu" or sample_id.dtype == np.uint64:
        raise ConfigError(
            f"the sample ids are not one integer a row: they came as {sample_id.dtype} "
            f"{list(sample_id.shape)}; give int64 [n]"
        )
    return sample_id.astype(np.int64, copy=False)


def check_lengths(rows: np.ndarray, sample_id: np.ndarray) -> None:
    """Raise ``ConfigError`` unless there is one id a row."""
    if len(rows) != len(sample_id):
        raise ConfigError(
            f"rows and sample ids do not match: {len(rows)} rows came with {len(sample_id)} ids; give one id a row"
        )


def negatives_in(
    state: Mapping[str, np.ndarray | int], *, num_rows: int, dim: int, dtype: DTypeLike
) -> Negatives:
    """Return the rows of a state, ids and steps beside them.

    Raises:
        ConfigError: The state lacks one of them, or holds another number, dim or type of rows.
    """
    arrays = [np.asarray(state.get(name, ())) for name in ("rows", "sample_id", "step")]
    expected = [((num_rows, dim), np.dtype(dtype)), *[((num_rows,), np.dtype(np.int64))] * 2]
    found = [(array.shape, array.dtype) for array in arrays]
    if found != expected:
        raise ConfigError(
            f"the state is not one of this store: its rows, ids and steps are {_described(found)} where "
            f"{_described(expected)} are kept; load it into a store made with the same settings"
        )
    return Negatives(*arrays)


def _described(arrays: list[tuple[tuple[int, ...], np.dtype]]) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for shape, dtype in arrays)
