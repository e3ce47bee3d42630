"""The queue of MoCo: the newest keys, first in, first out."""

from collections.abc import Mapping
from typing import final

import numpy as np
from numpy.typing import DTypeLike

from raycl.errors import ConfigError, RunError
from raycl.negatives.store import (
    Negatives,
    State,
    check_lengths,
    checked_ids,
    checked_rows,
    concatenate,
    empty_rows,
    negatives_in,
)


@final
class KeyQueue:
    """Keep the newest ``capacity`` keys (He et al., 2020).

    Every row ever pushed has a number, and its slot is that number modulo the capacity. So a copy
    that knows how many rows came before holds each row in the same slot, however the rows were
    split into pushes: ``copy.apply(*queue.since(copy.sequence))`` makes it equal to the last bit.
    """

    def __init__(self, capacity: int, dim: int, dtype: DTypeLike = np.float32) -> None:
        """Make an empty queue for rows [n, dim] of float32 or float16.

        Raises:
            ConfigError: ``capacity`` or ``dim`` is below 1, or ``dtype`` is another.
        """
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

    def push(self, rows: np.ndarray, sample_id: np.ndarray, step: int) -> None:
        """Store rows [n, dim] with ids [n], written at ``step``, in place of the oldest.

        Any n will do; if it exceeds ``capacity``, the last rows stay. The rows are stored as they
        come: the encoder normalizes them.

        Raises:
            ConfigError: Shapes or types do not fit, a value is NaN, infinite or above 65,504, or
                ``step`` is below 0; the queue is unchanged.
        """
        self._write(rows, sample_id, np.full(len(rows), step), self._sequence + len(rows))

    def apply(self, delta: Negatives, sequence: int) -> None:
        """Store the answer of ``since`` of another queue with this capacity.

        Rows that were already here are written again, to the same slots.

        Raises:
            ConfigError: As for ``push``.
            RunError: Rows are missing between this queue and ``delta``, or ``sequence`` is behind
                this queue; the queue is unchanged.
        """
        first = sequence - len(delta)
        if sequence < self._sequence or (first > self._sequence and len(delta) < self._capacity):
            raise RunError(
                f"the delta does not continue this queue: it holds rows {first} to {sequence}, and "
                f"{self._sequence} were here; apply since(0) to an empty queue"
            )
        self._write(delta.rows, delta.sample_id, delta.step, sequence)

    def negatives(self) -> Negatives:
        """Return all rows in the order of slots: the queue's memory, not a copy."""
        return self._slots[: len(self)]

    def since(self, sequence: int) -> tuple[Negatives, int]:
        """Return the rows pushed after the first ``sequence``, oldest first, and the new number.

        A reader that is more than ``capacity`` behind gets all rows. They are the queue's memory,
        unless they wrap around its end.

        A number ahead of the queue is refused: the reader has rows that this queue lost when it was
        restored to an older snapshot, under numbers that new rows will get. The queue can detect
        this only while it is behind, so restart the readers of a queue that was restored.

        Raises:
            RunError: ``sequence`` is ahead of this queue, or below 0.
        """
        if not 0 <= sequence <= self._sequence:
            raise RunError(
                f"the reader does not belong to this queue: it has seen {sequence} rows and {self._sequence} "
                "were pushed; start the reader again from an empty queue and since(0)"
            )
        older, newer = self._spans(max(sequence, self._sequence - self._capacity), self._sequence)
        rows = self._slots[older]
        return (rows if newer.stop == 0 else concatenate([rows, self._slots[newer]])), self._sequence

    def get(self, sample_id: np.ndarray) -> Negatives:
        """Return copies of the rows whose id is among ``sample_id`` [n], in the order of slots.

        A sample may have several rows, or none.

        Raises:
            ConfigError: ``sample_id`` is not int64 [n].
        """
        rows = self.negatives()
        return rows[np.flatnonzero(np.isin(rows.sample_id, checked_ids(sample_id)))]

    def state_dict(self) -> State:
        """Return rows, ids, steps, the number of rows ever pushed, and the capacity.

        The arrays are the queue's memory: save or copy them before the next push.
        """
        rows, sample_id, step = self.negatives().arrays()
        sizes = {"sequence": self._sequence, "capacity": self._capacity}
        return {"rows": rows, "sample_id": sample_id, "step": step, **sizes}

    def load_state_dict(self, state: Mapping[str, np.ndarray | int]) -> None:
        """Restore what ``state_dict`` returned, slot by slot.

        Raises:
            ConfigError: It had another capacity, dim or type; the queue is unchanged.
        """
        if state.get("capacity") != self._capacity:
            raise ConfigError(
                f"the state is of a queue of {state.get('capacity')} keys, this one keeps {self._capacity}; "
                "load it into a queue of that capacity"
            )
        sequence = int(state.get("sequence", -1))
        num_rows = min(sequence, self._capacity)
        dim, dtype = self._slots.rows.shape[1], self._slots.rows.dtype
        found = negatives_in(state, num_rows=num_rows, dim=dim, dtype=dtype)
        for slots, values in zip(self._slots.arrays(), found.arrays(), strict=True):
            slots[:num_rows] = values
        self._sequence = sequence

    def _write(self, rows: np.ndarray, sample_id: np.ndarray, step: np.ndarray, sequence: int) -> None:
        """Put rows in the slots of the numbers that end before ``sequence``."""
        rows = checked_rows(rows, dim=self._slots.rows.shape[1], dtype=self._slots.rows.dtype)
        ids = checked_ids(sample_id)
        check_lengths(rows, ids)
        if (step < 0).any():
            raise ConfigError(f"a key cannot be of step {step.min()}; steps count from 0")
        num_kept = min(len(rows), self._capacity)
        older, newer = self._spans(sequence - num_kept, sequence)
        for slots, fresh in zip(self._slots.arrays(), (rows, ids, step), strict=True):
            kept = fresh[len(fresh) - num_kept :]
            slots[older], slots[newer] = np.split(kept, [older.stop - older.start])
        self._sequence = sequence

    def _spans(self, start: int, stop: int) -> tuple[slice, slice]:
        """Return the slots of the rows from ``start`` to ``stop``: up to the last slot, and on from the first."""
        first = start % self._capacity
        last = min(first + stop - start, self._capacity)
        return slice(first, last), slice(0, stop - start - (last - first))
