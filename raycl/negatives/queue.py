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

    Rows may also come by their numbers, in parts and in any order (``place``). Until its row is
    there, a slot is missing: its step is -1 in ``state_dict`` and ``since``, and nobody else sees it.
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
        self._num_missing = 0

    def __len__(self) -> int:
        return self._num_slots() - self._num_missing

    @property
    def sequence(self) -> int:
        """How many rows were ever pushed."""
        return self._sequence

    @property
    def first_missing(self) -> int:
        """The smallest number whose row is not here and not yet out of date; ``sequence`` if none is."""
        missing = self._step[: self._num_slots()] < 0
        return int(self.numbers()[missing].min(initial=self._sequence))

    @property
    def num_bytes(self) -> int:
        """Memory of rows, ids and steps, in bytes."""
        return self._rows.nbytes + self._sample_id.nbytes + self._step.nbytes

    def push(self, rows: np.ndarray, sample_id: np.ndarray, step: int) -> None:
        """Take in rows [n, dim] with ids [n], written at ``step``; the oldest give way.

        Any n will do; of more than ``capacity`` rows the last stay. The rows are kept as they come:
        normalizing them is the encoder's affair.

        Raises:
            ConfigError: Shapes or types do not fit, a value is NaN, infinite or above 65,504, or
                ``step`` is below 0; the queue is as before.
        """
        self._write(rows, sample_id, _steps(step, len(rows)), self._sequence + len(rows))

    def place(
        self, numbers: np.ndarray, rows: np.ndarray, sample_id: np.ndarray, step: int | np.ndarray
    ) -> None:
        """Take in rows [n, dim] by their numbers, int64 [n], ascending; ``step`` is one for all or [n].

        Parts of a batch may come in any order, and twice. A number ahead of the queue moves it on,
        and rows skipped over are missing until they come. A row whose slot belongs to a newer
        number is not put back.

        Raises:
            ConfigError: As for ``push``, or the numbers are not ascending from 0 on.
        """
        rows = checked_rows(rows, dim=self._rows.shape[1], dtype=self._rows.dtype)
        ids, steps = checked_ids(sample_id), _steps(step, len(rows))
        check_lengths(rows, ids)
        _check_numbers(numbers, len(rows))
        if len(numbers) == 0:
            return
        self._move_on(max(self._sequence, int(numbers[-1]) + 1))
        wanted = numbers >= self._sequence - self._capacity
        slots = numbers[wanted] % self._capacity
        self._num_missing -= int((self._step[slots] < 0).sum())
        for mine, fresh in zip(self._arrays(), (rows, ids, steps), strict=True):
            mine[slots] = fresh[wanted]

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
        """Lend the rows there are, in the order of slots: the queue's memory, a copy while rows are missing."""
        mine = self._lend(slice(0, self._num_slots()))
        return mine if self._num_missing == 0 else self._take(np.flatnonzero(mine.step >= 0))

    def numbers(self) -> np.ndarray:
        """Return the number that each slot belongs to, int64 [num_slots], missing ones included."""
        return numbers_of(np.arange(self._num_slots()), sequence=self._sequence, capacity=self._capacity)

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
        mine = self._lend(slice(0, self._num_slots()))
        return self._take(np.flatnonzero(np.isin(mine.sample_id, checked_ids(sample_id)) & (mine.step >= 0)))

    def state_dict(self) -> State:
        """Return the rows there are, ids, steps and the number of rows ever pushed.

        The arrays are the queue's memory: save or copy them before the next push.
        """
        mine = self._lend(slice(0, self._num_slots()))
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
        self._count_missing()

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
        if self._num_missing or (step < 0).any():
            self._count_missing()

    def _move_on(self, sequence: int) -> None:
        """Give the slots up to ``sequence`` to new numbers, all of them missing."""
        for run in self._runs(max(self._sequence, sequence - self._capacity), sequence):
            self._num_missing += int((self._step[run] >= 0).sum())
            self._step[run] = -1
        self._sequence = sequence

    def _count_missing(self) -> None:
        self._num_missing = int((self._step[: self._num_slots()] < 0).sum())

    def _num_slots(self) -> int:
        return min(self._sequence, self._capacity)

    def _runs(self, start: int, stop: int) -> tuple[slice, slice]:
        """Return where the rows of these numbers lie: up to the last slot, and on from the first."""
        first = start % self._capacity
        last = min(first + stop - start, self._capacity)
        return slice(first, last), slice(0, stop - start - (last - first))

    def _lend(self, slots: slice) -> Negatives:
        return Negatives(*(array[slots] for array in self._arrays()))

    def _take(self, slots: np.ndarray) -> Negatives:
        return Negatives(*(array[slots] for array in self._arrays()))

    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._rows, self._sample_id, self._step


def numbers_of(slots: np.ndarray, *, sequence: int, capacity: int) -> np.ndarray:
    """Return the numbers of the rows in these slots of a queue that has seen ``sequence`` rows."""
    last = sequence - 1
    return last - (last - slots) % capacity


def _steps(step: int | np.ndarray, num_rows: int) -> np.ndarray:
    steps = np.broadcast_to(np.asarray(step), (num_rows,))
    if len(steps) and steps.min() < 0:
        raise ConfigError(f"a key cannot be of step {steps.min()}; steps count from 0")
    return steps


def _check_numbers(numbers: np.ndarray, num_rows: int) -> None:
    if len(numbers) != num_rows:
        raise ConfigError(
            f"rows and their numbers do not match: {num_rows} rows came with {len(numbers)} numbers"
        )
    if num_rows and (numbers[0] < 0 or (np.diff(numbers) < 1).any()):
        raise ConfigError(
            f"the numbers of the rows are not ascending from 0 on: they came as {numbers[:4].tolist()}...; "
            "give each row its number, in order"
        )
