"""A shard of a queue."""

from typing import final

import numpy as np

from raycl.errors import ConfigError
from raycl.negatives.bank_shard import BankShard
from raycl.negatives.messages import Part
from raycl.negatives.queue import KeyQueue, numbers_of
from raycl.negatives.snapshot import read_parts
from raycl.negatives.store import Negatives


@final
class QueueShard(BankShard):
    """Every ``num_shards``-th row of a queue's log."""

    _queue: KeyQueue

    def push(self, attempt: int, part: Part) -> None:
        """Take in rows by number; those that came before do no harm.

        Raises:
            RunError: The bank was restored since the client was made.
        """
        self._admit(attempt)
        self._place(part)
        self._puts.count(len(part.rows))

    def _place(self, part: Part) -> None:
        numbers, num_shards = part.numbers, self._plan.num_shards
        if (numbers % num_shards != self._shard).any():
            raise ConfigError(
                f"rows of other shards came to shard {self._shard} of {num_shards}; ask this one"
            )
        self._queue.place(numbers // num_shards, part.rows, part.sample_id, part.step)

    def _become(self, step: int) -> None:
        plan = self._plan
        metadata = self._metadata(step) if step else None
        self._queue = KeyQueue(plan.rows_of(self._shard), plan.dim, plan.row_dtype)
        if metadata:
            self._read(step, sequence=int(metadata["sequence"]))

    def _read(self, step: int, *, sequence: int) -> None:
        start = 0
        for rows in read_parts(self._plan, self._shard, step):
            slots = np.arange(start, start + len(rows))
            numbers = numbers_of(slots, sequence=sequence, capacity=self._plan.rows_of(self._shard))
            place_part(self._queue, Part(numbers, rows.rows, rows.sample_id, rows.step))
            start += len(rows)

    def _slots(self) -> Negatives:
        state = self._queue.state_dict()
        return Negatives(*(np.asarray(state[name]) for name in ("rows", "sample_id", "step")))

    def _numbers(self) -> np.ndarray:
        return self._queue.numbers() * self._plan.num_shards + self._shard

    def _sequence(self) -> int:
        return self._queue.sequence

    def _first_missing(self) -> int:
        return self._queue.first_missing * self._plan.num_shards + self._shard


def place_part(queue: KeyQueue, part: Part) -> None:
    """Place the rows of some slots, of which some may be missing and the last may be the oldest."""
    order = np.argsort(part.numbers, kind="stable")
    there = order[part.step[order] >= 0]
    queue.place(*(array[there] for array in part))
