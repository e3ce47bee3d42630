"""The queue of MoCo: the newest keys, first in, first out."""

from collections.abc import Mapping
from typing import final

import numpy as np
from numpy.typing import DTypeLike

from raycl.arguments import check_type
from raycl.errors import ConfigError, RunError
from raycl.negatives.store import (
    Negatives,
    State,
    checked,
    checked_ids,
    checked_steps,
    empty_rows,
    negatives_in,
)


@final
class KeyQueue:
    """Keep the newest ``capacity`` keys (He et al., 2020).

    Every row ever pushed has a number, and its slot is that number modulo the capacity. So a copy
    that knows how many rows came before holds each row in the same slot, however the rows were
    split into pushes: ``copy.apply(*queue.since(copy.sequence))`` makes it equal to the last bit.

    Whatever does not fit is refused with ``ConfigError``, and the queue is unchanged: sizes below 1,
    other shapes and types, steps below 0, values that are NaN, infinite or above 65,504.
    """

    def __init__(self, capacity: int, dim: int, dtype: DTypeLike = np.float32) -> None:
        """Make an empty queue for rows [n, dim] of float32 or float16."""
        check_type("capacity", capacity, int)
        if capacity < 1:
            raise ConfigError(f"a queue cannot keep {capacity} keys; give a capacity of at least 1")
        self._capacity, self._sequence = capacity, 0
        ids, steps = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
        self._slots = Negatives(empty_rows(capacity, dim, dtype), ids, steps)

    def __len__(self) -> int:
        return min(self._sequence, self._capacity)

    @property
    def sequence(self) -> int:
        """Number of rows ever pushed."""
        return self._sequence

    @property
    def num_bytes(self) -> int:
        """Memory of rows, ids and steps, in bytes."""
        return sum(array.nbytes for array in self._slots.arrays())

    def push(self, rows: np.ndarray, sample_id: np.ndarray, step: int | np.ndarray) -> None:
        """Store rows [n, dim] with ids [n], of one step or of steps [n], in place of the oldest.

        Any n will do; if it exceeds ``capacity``, the last rows stay. The rows are stored as they
        come: the encoder normalizes them.
        """
        new = Negatives(rows, sample_id, checked_steps(step, rows))
        self._write(new, self._sequence + len(np.atleast_1d(rows)))

    def apply(self, delta: Negatives, sequence: int) -> None:
        """Store the answer of ``since`` of another queue with this capacity.

        Rows that were already here are written again, to the same slots. Raises ``RunError`` if rows are
        missing between this queue and ``delta``, or if ``sequence`` is behind this queue.
        """
        first = sequence - len(delta)
        if sequence < self._sequence or (first > self._sequence and len(delta) < self._capacity):
            raise RunError(
                f"the delta does not continue this queue: it holds rows {first} to {sequence}, and "
                f"{self._sequence} were here; apply since(0) to an empty queue"
            )
        self._write(delta, sequence)

    def negatives(self) -> Negatives:
        """Return all rows in the order of slots: the queue's memory, not a copy."""
        return self._slots[: len(self)]

    def since(self, sequence: int) -> tuple[Negatives, int]:
        """Return copies of the rows pushed after the first ``sequence``, oldest first, and the new number.

        A reader that is more than ``capacity`` behind gets all rows.

        A number ahead of the queue is refused with ``RunError``: the reader has rows that this queue lost when it was
        restored to an older snapshot, under numbers that new rows will get. The queue can detect
        this only while it is behind, so restart the readers of a queue that was restored.
        """
        if not 0 <= sequence <= self._sequence:
            raise RunError(
                f"the reader does not belong to this queue: it has seen {sequence} rows and {self._sequence} "
                "were pushed; start the reader again from an empty queue and since(0)"
            )
        first = max(sequence, self._sequence - self._capacity)
        return self._slots[np.arange(first, self._sequence) % self._capacity], self._sequence

    def get(self, sample_id: np.ndarray) -> Negatives:
        """Return copies of the rows whose id is among ``sample_id`` [n], in the order of slots.

        A sample may have several rows, or none.
        """
        rows = self.negatives()
        return rows[np.flatnonzero(np.isin(rows.sample_id, checked_ids(sample_id)))]

    def state_dict(self) -> State:
        """Return rows, ids, steps, the number of rows ever pushed, and the capacity.

        The arrays are the queue's memory: save or copy them before the next push.
        """
        sizes = {"sequence": self._sequence, "capacity": self._capacity}
        return {**vars(self.negatives()), **sizes}

    def load_state_dict(self, state: Mapping[str, np.ndarray | int]) -> None:
        """Restore what ``state_dict`` returned, slot by slot."""
        if state.get("capacity") != self._capacity:
            raise ConfigError(
                f"the state is of a queue of {state.get('capacity')} keys, this one keeps {self._capacity}; "
                "load it into a queue of that capacity"
            )
        sequence = int(state.get("sequence", -1))
        num_rows = min(sequence, self._capacity)
        dim, dtype = self._slots.rows.shape[1], self._slots.rows.dtype
        self._set(np.arange(num_rows), negatives_in(state, num_rows=num_rows, dim=dim, dtype=dtype))
        self._sequence = sequence

    def _write(self, new: Negatives, sequence: int) -> None:
        """Put rows in the slots of the numbers that end before ``sequence``."""
        dim, dtype = self._slots.rows.shape[1], self._slots.rows.dtype
        rows, ids = checked(new.rows, new.sample_id, dim=dim, dtype=dtype)
        if (new.step < 0).any():
            raise ConfigError(f"a key cannot be of step {new.step.min()}; steps count from 0")
        num_kept = min(len(rows), self._capacity)
        kept = Negatives(rows, ids, new.step)[len(rows) - num_kept :]
        self._set(np.arange(sequence - num_kept, sequence) % self._capacity, kept)
        self._sequence = sequence

    def _set(self, slots: np.ndarray, new: Negatives) -> None:
        for held, values in zip(self._slots.arrays(), new.arrays(), strict=True):
            held[slots] = values
