"""The bank as a training worker sees it: like the store, only that no worker waits for another."""

import uuid
from collections.abc import Callable
from typing import Any, NamedTuple, final

import numpy as np

from raycl.errors import ConfigError, RayclError
from raycl.negatives.bank import Bank
from raycl.negatives.memory_bank import draw_slots, normalized
from raycl.negatives.messages import Part, Update
from raycl.negatives.rpc import ShardConnection
from raycl.negatives.sample_index import SampleIndex, named
from raycl.negatives.store import Negatives, State, check_lengths, checked_ids, checked_rows

# A shard that lost rows gets them back in calls of so many.
_ROWS_A_CALL = 4_096


def no_barrier() -> None:
    """Wait for nobody: the barrier of a worker that is alone."""


@final
class QueueClient:
    """A worker's own ring of the newest keys, and its part in keeping the bank's copy of it.

    Every worker sees the keys of every batch, so its ring is never stale and never asks. Each
    sends only its own part of a batch, and collects the answer with the next one. A shard that
    comes back without some rows gets them from the ring of rank 0.
    """

    def __init__(
        self, bank: Bank, *, rank: int = 0, num_workers: int = 1, barrier: Callable[[], None] = no_barrier
    ) -> None:
        """Fill the ring from the bank, which no worker writes to before all have made their client.

        Raises:
            RunError: A shard stays away.
        """
        self._bank, self._rank, self._num_workers, self._barrier = bank, rank, num_workers, barrier
        self._lines = bank.lines()
        self._attempt = max(line.ask("hello").attempt for line in self._lines)
        self._ring = bank.read_queue()

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def sequence(self) -> int:
        """How many rows were ever pushed, by all workers."""
        return self._ring.sequence

    @property
    def num_bytes(self) -> int:
        """Memory of the ring, in bytes."""
        return self._ring.num_bytes

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for the bank so far."""
        return sum(line.waited_s for line in self._lines)

    @property
    def restarts(self) -> int:
        """How often this client has seen a shard come back from its death."""
        return sum(line.num_restarts for line in self._lines)

    def push(self, rows: np.ndarray, sample_id: np.ndarray, step: int) -> None:
        """Take in the global batch, rows [n, dim] with ids [n]: the same on every worker.

        Raises:
            ConfigError: As for ``KeyQueue.push``; nothing was written.
            RunError: A shard stays away, or the bank was restored since this client was made.
        """
        rows = checked_rows(rows, dim=self._bank.plan.dim, dtype=self._bank.plan.sent_dtype)
        _collect_all(self._lines)
        first = self._ring.sequence
        self._ring.push(rows, sample_id, step)
        # Only now: others may have sent this batch already, to the shard's last life.
        self._mend()
        self._send(first, rows, checked_ids(sample_id), step)

    def negatives(self) -> Negatives:
        """Lend the ring's rows, in the order of slots: its memory, not a copy."""
        return self._ring.negatives()

    def get(self, sample_id: np.ndarray) -> Negatives:
        """Return copies of the ring's rows of these samples, in the order of slots."""
        return self._ring.get(sample_id)

    def state_dict(self) -> State:
        """Return the state of the ring, as ``KeyQueue`` does."""
        return self._ring.state_dict()

    def flush(self) -> None:
        """Wait until the bank has all that this worker sent; rank 0 sees that shards lack nothing."""
        self._collect()
        for line in self._lines:
            line.send("hello", self._attempt)
        self._collect()

    def save(self, step: int) -> None:
        """Write a snapshot of the bank; every worker calls it."""
        self.flush()
        self._barrier()
        if self._rank == 0:
            _save(self._bank, self._lines, step, self.flush)
        self._barrier()

    def _send(self, first: int, rows: np.ndarray, sample_id: np.ndarray, step: int) -> None:
        """Send this worker's part of the batch whose first row has the number ``first``."""
        bounds = [len(rows) * rank // self._num_workers for rank in (self._rank, self._rank + 1)]
        # Rows that the rest of the batch has pushed out again are not worth sending.
        mine = np.arange(max(bounds[0], len(rows) - self._bank.plan.capacity), bounds[1])
        for shard, line in enumerate(self._lines):
            own = mine[(first + mine) % len(self._lines) == shard]
            if len(own):
                steps = np.full(len(own), step)
                line.send("push", self._attempt, Part(first + own, rows[own], sample_id[own], steps))

    def _collect(self) -> None:
        _collect_all(self._lines)
        self._mend()

    def _mend(self) -> None:
        for shard, line in enumerate(self._lines):
            while line.has_restarted() and self._rank == 0:
                self._refill(shard, line)

    def _refill(self, shard: int, line: ShardConnection) -> None:
        """Send a shard all that the ring has and it lacks."""
        first = line.ask("hello").first_missing
        plan, state = self._bank.plan, self._ring.state_dict()
        rows, sample_id, step = (np.asarray(state[name]) for name in ("rows", "sample_id", "step"))
        start = max(first, self.sequence - plan.capacity)
        numbers = np.arange(start + (shard - start) % plan.num_shards, self.sequence, plan.num_shards)
        for begin in range(0, len(numbers), _ROWS_A_CALL):
            some = numbers[begin : begin + _ROWS_A_CALL]
            slots = some % plan.capacity
            sent = rows[slots].astype(plan.sent_dtype, copy=False)
            line.ask("push", self._attempt, Part(some, sent, sample_id[slots], step[slots]))


@final
class MemoryBankClient:
    """A worker's way to the slots: one call a step takes its rows there and brings others back.

    With ``max_staleness`` 0 an update is in the bank when ``update`` returns, and ``barrier`` keeps
    the workers together: one worker then has what a ``MemoryBank`` of its own would be, to the
    last bit. Otherwise an update goes along with the next call, while the worker computes, and what
    was prefetched lacks at most ``max_staleness`` updates of this worker's.
    """

    def __init__(
        self,
        bank: Bank,
        sample_id: np.ndarray,
        *,
        rank: int = 0,
        max_staleness: int = 1,
        barrier: Callable[[], None] = no_barrier,
    ) -> None:
        """Join the bank with the ids that it was started with, in any order.

        Raises:
            ConfigError: There are more or fewer ids than slots, or ``max_staleness`` is below 0.
            RunError: A shard stays away.
        """
        self._samples = SampleIndex(sample_id)
        if len(self._samples) != bank.plan.capacity:
            raise ConfigError(
                f"the bank {bank.plan.name!r} has {bank.plan.capacity} slots and {len(sample_id)} ids came; "
                "give the ids that it was started with"
            )
        if max_staleness < 0:
            raise ConfigError(
                f"bank.max_staleness must be at least 0, came {max_staleness}; 0 waits each step"
            )
        self._bank, self._rank, self._barrier = bank, rank, barrier
        self._max_staleness = max_staleness
        self._lines = bank.lines()
        self._attempt = max(line.ask("hello").attempt for line in self._lines)
        self._name, self._num_updates = uuid.uuid4().hex, 0
        self._waiting: list[list[Update]] = [[] for _ in self._lines]
        self._in_flight: _Asked | None = None
        self._prefetched: tuple[_Asked, Negatives] | None = None

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def num_bytes(self) -> int:
        """Memory of the bank, in bytes, all shards together."""
        plan = self._bank.plan
        return sum(plan.bytes_of(shard) for shard in range(plan.num_shards))

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for the bank so far."""
        return sum(line.waited_s for line in self._lines)

    @property
    def restarts(self) -> int:
        """How often this client has seen a shard come back; updates since its snapshot are lost."""
        return sum(line.num_restarts for line in self._lines)

    def slots_of(self, sample_id: np.ndarray) -> np.ndarray:
        """Return the slot of each sample, int64 [n]; raises ``ConfigError`` if one has none."""
        return self._samples.positions_of(sample_id)

    def draw(self, num: int, *, step: int) -> np.ndarray:
        """Draw slots for one step, the same on every worker: ``draw_slots`` with the bank's seed."""
        return draw_slots(len(self), num, seed=self._bank.plan.seed, step=step)

    def prefetch(self, slots: np.ndarray) -> None:
        """Send the updates that wait, and ask for ``slots``, int64 [n], without waiting.

        With ``max_staleness`` 0 nothing happens: what is read then must be of that moment.

        Raises:
            ConfigError: There is no such slot.
            RunError: A shard stays away.
        """
        self._check(slots)
        if self._max_staleness:
            self._finish()
            self._issue(slots)

    def read(self, slots: np.ndarray) -> Negatives:
        """Return copies of the rows in ``slots``, int64 [n], in their order; -1 is the step of a first row.

        What was prefetched is returned if these slots were, and if it is fresh enough.

        Raises:
            ConfigError: There is no such slot.
            RunError: A shard stays away.
        """
        self._check(slots)
        self._finish()
        if self._prefetched and np.array_equal(self._prefetched[0].slots, slots):
            (asked, found), self._prefetched = self._prefetched, None
            if self._num_updates - asked.num_updates <= self._max_staleness:
                return found
        return self._collect(self._issue(slots))

    def get(self, sample_id: np.ndarray) -> Negatives:
        """Return copies of the rows of these samples, in their order; raises what ``read`` raises."""
        return self.read(self.slots_of(sample_id))

    def negatives(self) -> Negatives:
        """Return a copy of all rows in the order of slots, with all that this worker has written."""
        self.flush()
        return self._bank.negatives()

    def update(self, sample_id: np.ndarray, rows: np.ndarray, step: int) -> None:
        """Move the slots of ``sample_id`` [n] towards ``rows`` [n, dim], as ``MemoryBank.update`` does.

        Each worker gives its own rows. They are sent now with ``max_staleness`` 0, and otherwise with
        the next call; at most the rows of one step wait.

        Raises:
            ConfigError: As for ``MemoryBank.update``; nothing was written.
            RunError: A shard stays away, or the bank was restored since this client was made.
        """
        rows = checked_rows(rows, dim=self._bank.plan.dim, dtype=np.float32)
        check_lengths(rows, checked_ids(sample_id))
        is_late = any(self._waiting)
        self._put_aside(self._samples.positions_of(sample_id), rows, step)
        if is_late or not self._max_staleness:
            self._finish()
            self._issue(_NO_SLOTS)
        if not self._max_staleness:
            self._finish()
            self._barrier()

    def fill(self, sample_id: np.ndarray, rows: np.ndarray) -> None:
        """Give this worker's samples their first rows, as ``MemoryBank.fill`` does; waits for the bank.

        Raises:
            ConfigError: As for ``MemoryBank.fill``; nothing was written.
            RunError: A shard stays away, or the bank was restored since this client was made.
        """
        rows = checked_rows(rows, dim=self._bank.plan.dim, dtype=np.float32)
        check_lengths(rows, checked_ids(sample_id))
        slots = self._samples.positions_of(sample_id)
        self.flush()
        sent = self._to_send(rows)
        for line, own in zip(self._lines, self._homes(slots), strict=True):
            if len(own):
                line.send("fill", self._attempt, self._samples.ids_at(slots[own]), sent[own])
        for line in self._lines:
            line.collect()

    def flush(self) -> None:
        """Wait until the bank has all that this worker wrote; what was prefetched is forgotten."""
        self._finish()
        self._prefetched = None
        if any(self._waiting):
            self._collect(self._issue(_NO_SLOTS))
        for line in self._lines:
            line.ask("hello", self._attempt)

    def save(self, step: int) -> None:
        """Write a snapshot of the bank; every worker calls it."""
        self.flush()
        self._barrier()
        if self._rank == 0:
            _save(self._bank, self._lines, step, self.flush)
        self._barrier()

    def _put_aside(self, slots: np.ndarray, rows: np.ndarray, step: int) -> None:
        self._num_updates += 1
        rows = self._to_send(rows)
        for shard, own in enumerate(self._homes(slots)):
            if len(own):
                update = Update(
                    self._name, self._num_updates, self._samples.ids_at(slots[own]), rows[own], step
                )
                self._waiting[shard].append(update)

    def _to_send(self, rows: np.ndarray) -> np.ndarray:
        if self._bank.plan.sent_dtype == np.float32:
            return rows
        # Lengths do not count, and small ones would be lost.
        return normalized(rows).astype(self._bank.plan.sent_dtype)

    def _issue(self, slots: np.ndarray) -> "_Asked":
        """Send each shard its updates, and ask it for those of the slots that it holds."""
        self._in_flight = _Asked(slots.copy(), self._homes(slots), self._num_updates)
        for shard, (line, own) in enumerate(zip(self._lines, self._in_flight.homes, strict=True)):
            if len(own) or self._waiting[shard]:
                line.send("exchange", self._attempt, tuple(self._waiting[shard]), slots[own])
                self._waiting[shard] = []
        return self._in_flight

    def _collect(self, asked: "_Asked") -> Negatives:
        plan, num_rows = self._bank.plan, len(asked.slots)
        rows, step = np.empty((num_rows, plan.dim), plan.row_dtype), np.empty(num_rows, np.int64)
        self._in_flight = None
        for answer, own in zip(_collect_all(self._lines), asked.homes, strict=True):
            if len(own):
                rows[own], step[own] = answer
        return Negatives(rows, self._samples.ids_at(asked.slots), step)

    def _finish(self) -> None:
        """Wait for the call in flight, and keep what it brings."""
        if self._in_flight:
            asked = self._in_flight
            found = self._collect(asked)
            if len(asked.slots):
                self._prefetched = asked, found

    def _homes(self, slots: np.ndarray) -> list[np.ndarray]:
        """Return for each shard the positions in ``slots`` of those that it holds."""
        shards = np.searchsorted(self._bank.plan.first_slots[1:], slots, side="right")
        return [np.flatnonzero(shards == shard) for shard in range(len(self._lines))]

    def _check(self, slots: np.ndarray) -> None:
        if len(slots) and (slots.min() < 0 or slots.max() >= len(self)):
            outside = slots[(slots < 0) | (slots >= len(self))]
            raise ConfigError(
                f"the slots {named(outside)} are not here: these are 0 to {len(self) - 1}; ask for those"
            )


_NO_SLOTS = np.empty(0, np.int64)


class _Asked(NamedTuple):
    """A question in flight: which slots, where they lie, and after how many updates it was asked."""

    slots: np.ndarray
    homes: list[np.ndarray]
    num_updates: int


def _collect_all(lines: list[ShardConnection]) -> list[Any]:
    """Wait for all that is in flight; after an error nothing is."""
    try:
        return [line.collect() for line in lines]
    except RayclError:
        for line in lines:
            line.drop()
        raise


def _save(bank: Bank, lines: list[ShardConnection], step: int, flush: Callable[[], None]) -> None:
    """Save until no shard has died meanwhile, since one that did had not yet got its rows back."""
    while True:
        before = [line.incarnation for line in lines]
        bank.save(step)
        flush()
        if before == [line.incarnation for line in lines]:
            return
