"""The queue of MoCo: the newest keys, first in, first out."""

from collections.abc import Mapping
from typing import final

import numpy as np
from numpy.typing import DTypeLike

from raycl.errors import ConfigError, RunError
from raycl.negatives.store import (
    Negatives,
    NegativeStore,
    State,
    check_lengths,
    checked_ids,
    checked_rows,
    empty_rows,
    negatives_in,
)


@final
class KeyQueue(NegativeStore):
    """Keep the newest ``capacity`` keys (He et al., 2020).

    Every row ever pushed has a number, and its slot is that number modulo the capacity. So a copy
    that knows how many rows came before holds each row in the same slot, however they were cut
    into pushes: ``replica.apply(*queue.since(replica.sequence))`` makes it equal to the last bit.
    """

    def __init__(self, capacity: int, dim: int, dtype: DTypeLike = np.float32) -> None:
        """Make an empty queue for rows [n, dim] of float32 or float16.

        Raises:
            ConfigError: ``capacity`` or ``dim`` is below 1, or ``dtype`` is another.
        """
        if capacity < 1:
            raise ConfigError(f"a queue cannot keep {capacity} keys; give a capacity of at least 1")
        self._capacity = capacity
        self._rows = empty_rows(capacity, dim, dtype)
        self._sample_id = np.zeros(capacity, np.int64)
        self._step = np.zeros(capacity, np.int64)
        self._sequence = 0

    def __len__(self) -> int:
        return min(self._sequence, self._capacity)

    @property
    def sequence(self) -> int:
        """How many rows were ever pushed."""
        return self._sequence

    @property
    def num_bytes(self) -> int:
        """Memory of rows, ids and steps, in bytes."""
        return self._rows.nbytes + self._sample_id.nbytes + self._step.nbytes

    def push(self, rows: np.ndarray, sample_id: np.ndarray, step: int) -> None:
        """Take in rows [n, dim] with ids [n], written at ``step``; the oldest give way.

        Any n will do; of more than ``capacity`` rows the last stay. The rows are kept as they come:
        normalizing them is the encoder's affair.

        Raises:
            ConfigError: Shapes or types do not fit, or a value is NaN, infinite or above 65,504;
                the queue is as before.
        """
        self._write(rows, sample_id, np.full(len(rows), step), self._sequence + len(rows))

    def apply(self, delta: Negatives, sequence: int) -> None:
        """Take in what ``since`` of another queue of this capacity answered.

        Rows that were already here are written once more, to the same slots.

        Raises:
            ConfigError: As for ``push``.
            RunError: Between these rows and those at hand some are missing, or ``sequence`` lies
                behind this queue's own; the queue is as before.
        """
        first = sequence - len(delta)
        if sequence < self._sequence or (first > self._sequence and len(delta) < self._capacity):
            raise RunError(
                f"the delta does not continue this queue: it holds rows {first} to {sequence}, and "
                f"{self._sequence} were here; apply since(0) to an empty queue"
            )
        self._write(delta.rows, delta.sample_id, delta.step, sequence)

    def negatives(self) -> Negatives:
        """Lend the rows pushed so far, in the order of slots: the queue's memory, not a copy."""
        return self._lend(slice(0, len(self)))

    def since(self, sequence: int) -> tuple[Negatives, int]:
        """Return the rows pushed after the first ``sequence``, oldest first, and the new number.

        A reader more than ``capacity`` behind gets all rows there are. They are the queue's memory,
        unless they wrap round its end.

        A number ahead of the queue is refused rather than answered with nothing: it comes from a
        reader that saw rows which this queue lost, by going back to an older snapshot. Such a
        reader keeps rows under numbers that will be given anew, and must start over. The queue
        notices only while it is behind, so whoever restores one tells its readers.

        Raises:
            RunError: ``sequence`` is ahead of this queue, or below 0.
        """
        if not 0 <= sequence <= self._sequence:
            raise RunError(
                f"the reader is not one of this queue: it has seen {sequence} rows and {self._sequence} "
                "were pushed; start the reader over from an empty queue and since(0), or push its rows anew"
            )
        oldest = max(sequence, self._sequence - self._capacity)
        older, newer = self._runs(oldest, self._sequence)
        if newer.stop == 0:
            return self._lend(older), self._sequence
        return Negatives(
            *(np.concatenate([array[older], array[newer]]) for array in self._arrays())
        ), self._sequence

    def get(self, sample_id: np.ndarray) -> Negatives:
        """Return copies of the rows whose id is among ``sample_id`` [n], in the order of slots.

        A sample may have several rows, or none.

        Raises:
            ConfigError: ``sample_id`` is not int64 [n].
        """
        slots = np.flatnonzero(np.isin(self.negatives().sample_id, checked_ids(sample_id)))
        return Negatives(*(array[slots] for array in self._arrays()))

    def state_dict(self) -> State:
        """Return the rows there are, ids, steps and the number of rows ever pushed.

        The arrays are the queue's memory: save or copy them before the next push.
        """
        mine = self.negatives()
        return {
            "rows": mine.rows,
            "sample_id": mine.sample_id,
            "step": mine.step,
            "sequence": self._sequence,
            "capacity": self._capacity,
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray | int]) -> None:
        """Become the queue that ``state`` was taken from, slot by slot.

        Raises:
            ConfigError: It had another capacity, dim or type; the queue is as before.
        """
        if state.get("capacity") != self._capacity:
            raise ConfigError(
                f"the state is of a queue of {state.get('capacity')} keys, this one keeps {self._capacity}; "
                "load it into a queue of that capacity"
            )
        sequence = int(state.get("sequence", -1))
        num_rows = min(sequence, self._capacity)
        kept = negatives_in(state, num_rows=num_rows, dim=self._rows.shape[1], dtype=self._rows.dtype)
        for mine, theirs in zip(self._arrays(), (kept.rows, kept.sample_id, kept.step), strict=True):
            mine[:num_rows] = theirs
        self._sequence = sequence

    def _write(self, rows: np.ndarray, sample_id: np.ndarray, step: np.ndarray, sequence: int) -> None:
        """Put rows in the slots of the numbers that end before ``sequence``."""
        rows = checked_rows(rows, dim=self._rows.shape[1], dtype=self._rows.dtype)
        ids = checked_ids(sample_id)
        check_lengths(rows, ids)
        num_kept = min(len(rows), self._capacity)
        older, newer = self._runs(sequence - num_kept, sequence)
        for mine, fresh in zip(self._arrays(), (rows, ids, step), strict=True):
            kept = fresh[len(fresh) - num_kept :]
            mine[older], mine[newer] = np.split(kept, [older.stop - older.start])
        self._sequence = sequence

    def _runs(self, start: int, stop: int) -> tuple[slice, slice]:
        """Return where the rows of these numbers lie: up to the last slot, and on from the first."""
        first = start % self._capacity
        last = min(first + stop - start, self._capacity)
        return slice(first, last), slice(0, stop - start - (last - first))

    def _lend(self, slots: slice) -> Negatives:
        return Negatives(*(array[slots] for array in self._arrays()))

    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._rows, self._sample_id, self._step
