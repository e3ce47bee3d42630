"""A worker's access to a bank, without waiting for other workers."""

import uuid
from collections.abc import Callable
from typing import NamedTuple, final

import numpy as np

from raycl.negatives.actor import BankActor, MemoryBankActor, Pulled, Pushed, QueueActor, Update
from raycl.negatives.bank import Bank
from raycl.negatives.memory_bank import SampleIndex, check_slots, draw_slots, normalized
from raycl.negatives.rpc import PendingCall
from raycl.negatives.store import Negatives, checked

_NO_SLOTS = np.empty(0, np.int64)


@final
class QueueClient:
    """A worker's own queue, of which rank 0 keeps the bank's copy up to date.

    Every worker sees the keys of every batch, so its queue is never stale and never asks the bank.
    Rank 0 sends each batch without waiting, and collects the answer with the next one. An actor that
    restarted, and so lost rows, gets them from the queue of rank 0.

    The methods raise ``RunError`` if the actor stays away, or if the bank was restored since this
    client was made.
    """

    def __init__(self, bank: Bank, *, rank: int = 0) -> None:
        """Copy the queue from the bank, which no worker writes to before all have made their client."""
        self._bank, self._rank = bank, rank
        (self._actor,) = bank.connections()
        self._attempt = self._actor.ask(BankActor.info).attempt
        self.queue = bank.read_queue()
        self._num_stored = self.queue.sequence  # by the actor, for certain
        self._in_flight: PendingCall[Pushed] | None = None

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for the bank so far."""
        return self._actor.waited_s

    @property
    def restarts(self) -> int:
        """Number of restarts of the actor that this client has seen."""
        return self._actor.num_restarts

    def push(self, rows: np.ndarray, sample_id: np.ndarray, step: int) -> None:
        """Store the global batch, as ``KeyQueue.push`` does: the same on every worker."""
        self._collect()
        self.queue.push(rows, sample_id, step)
        if self._rank == 0:
            self._send(self._num_stored)

    def flush(self) -> None:
        """Wait until the bank has all rows of rank 0."""
        self._collect()
        if self._rank == 0:
            self._send(self.queue.sequence)  # no rows, but the answer says whether some are missing
            self._collect()

    def save(self, step: int) -> None:
        """Write a snapshot of the bank; every worker calls it, and rank 0 writes."""
        if self._rank != 0:
            return
        self.flush()
        incarnation = ""
        # An actor that restarts while it saves has not got its lost rows back yet.
        while incarnation != self._actor.incarnation:
            incarnation = self._actor.incarnation
            self._bank.save(step)
            self.flush()

    def _send(self, sequence: int) -> None:
        """Send the actor the rows after the first ``sequence``, without waiting."""
        rows, newest = self.queue.since(sequence)
        self._in_flight = self._actor.send(QueueActor.push, self._attempt, rows, newest)

    def _collect(self) -> None:
        """Wait for the answer in flight; send the actor the rows that it lacks."""
        while self._in_flight:
            call, self._in_flight = self._in_flight, None
            answer = call.result()
            self._actor.note_incarnation(answer.incarnation)
            self._num_stored = answer.sequence
            if answer.sequence < self.queue.sequence:
                self._send(answer.sequence)


class _Request(NamedTuple):
    """A read in flight: its slots, the calls with their positions in ``slots``, and the updates before it."""

    slots: np.ndarray
    calls: list[tuple[PendingCall[Pulled], np.ndarray]]
    num_updates: int


@final
class MemoryBankClient:
    """A worker's access to the slots: one call a step writes its rows and reads others.

    With ``max_staleness`` 0 an update is in the bank when ``update`` returns, and ``barrier`` keeps
    the workers together: a bank that sends float32 equals a ``MemoryBank`` in process, to the last bit. Otherwise an
    update is sent with the next call, while the worker computes, and prefetched rows lack at most
    ``max_staleness`` updates of this worker.

    The methods raise ``RunError`` if a shard stays away, or if the bank was restored since this client
    was made; and ``ConfigError`` for rows, samples or slots that do not fit: nothing was written then.
    """

    def __init__(
        self,
        bank: Bank,
        sample_id: np.ndarray,
        *,
        rank: int = 0,
        max_staleness: int = 1,
        barrier: Callable[[], None] = lambda: None,
    ) -> None:
        """Join the bank with the ids that it was started with, in any order."""
        self._samples = SampleIndex(sample_id)
        assert len(self) == bank.spec.capacity, "a client has the ids that the bank was started with"
        self._bank, self._spec, self._rank, self._barrier = bank, bank.spec, rank, barrier
        self._max_staleness = max_staleness
        self._shards = bank.connections()
        self._attempt = max(shard.ask(BankActor.info).attempt for shard in self._shards)
        self._name, self._num_updates = uuid.uuid4().hex, 0
        self._buffered: list[list[Update]] = [[] for _ in self._shards]
        self._in_flight: _Request | None = None
        self._prefetched: tuple[_Request, Negatives] | None = None

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for the bank so far."""
        return sum(shard.waited_s for shard in self._shards)

    @property
    def restarts(self) -> int:
        """Number of restarts of shards that this client has seen; each loses updates since its snapshot."""
        return sum(shard.num_restarts for shard in self._shards)

    def slots_of(self, sample_id: np.ndarray) -> np.ndarray:
        """Return the slot of each sample, int64 [n]; raises ``ConfigError`` if one has none."""
        return self._samples.positions_of(sample_id)

    def draw(self, num: int, *, step: int) -> np.ndarray:
        """Draw slots for one step, the same on every worker: ``draw_slots`` with the bank's seed."""
        return draw_slots(len(self), num, seed=self._spec.seed, step=step)

    def prefetch(self, slots: np.ndarray) -> None:
        """Send the buffered updates and ask for ``slots``, int64 [n], without waiting.

        With ``max_staleness`` 0 it does nothing: a later read must see all updates.
        """
        check_slots(slots, 0, len(self))
        if self._max_staleness:
            self._finish()
            self._send(slots)

    def read(self, slots: np.ndarray) -> Negatives:
        """Return copies of the rows in ``slots``, int64 [n], in their order; a row never updated has step -1.

        The prefetched rows are returned if they are of these slots, and fresh enough.
        """
        check_slots(slots, 0, len(self))
        self._finish()
        if self._prefetched and np.array_equal(self._prefetched[0].slots, slots):
            (request, found), self._prefetched = self._prefetched, None
            if self._num_updates - request.num_updates <= self._max_staleness:
                return found
        return self._collect(self._send(slots))

    def update(self, sample_id: np.ndarray, rows: np.ndarray, step: int) -> None:
        """Move the slots of ``sample_id`` [n] towards ``rows`` [n, dim], as ``MemoryBank.update`` does.

        Each worker gives its own rows. They are sent now with ``max_staleness`` 0, and otherwise with
        the next call; the rows of at most one step are buffered.
        """
        ids, rows, own = self._by_shard(sample_id, rows)
        is_late = any(self._buffered)
        self._num_updates += 1
        for buffer, chosen in zip(self._buffered, own, strict=True):
            if len(chosen):
                buffer.append(Update(self._name, self._num_updates, ids[chosen], rows[chosen], step))
        if is_late or not self._max_staleness:
            self._finish()
            self._send(_NO_SLOTS)
        if not self._max_staleness:
            self._finish()
            self._barrier()

    def initialize(self, sample_id: np.ndarray, rows: np.ndarray) -> None:
        """Set the initial rows of this worker's samples, as ``MemoryBank.initialize`` does; waits for the bank."""
        ids, rows, own = self._by_shard(sample_id, rows)
        self.flush()
        calls = [
            shard.send(MemoryBankActor.initialize, self._attempt, ids[chosen], rows[chosen])
            for shard, chosen in zip(self._shards, own, strict=True)
        ]
        for call in calls:
            call.result()

    def flush(self) -> None:
        """Wait until the bank has all rows of this worker; prefetched rows are dropped."""
        self._finish()
        self._prefetched = None
        self._send(_NO_SLOTS, to_all=True)
        self._finish()

    def save(self, step: int) -> None:
        """Write a snapshot of the bank; every worker calls it."""
        self.flush()
        self._barrier()
        if self._rank == 0:
            self._bank.save(step)
        self._barrier()

    def _send(self, slots: np.ndarray, *, to_all: bool = False) -> _Request:
        """Send each shard its updates, and ask it for its part of the slots."""
        calls: list[tuple[PendingCall[Pulled], np.ndarray]] = []
        for shard, (connection, own) in enumerate(zip(self._shards, self._split(slots), strict=True)):
            updates, self._buffered[shard] = tuple(self._buffered[shard]), []
            if to_all or updates or len(own):
                call = connection.send(MemoryBankActor.push_pull, self._attempt, updates, slots[own])
                calls.append((call, own))
        self._in_flight = _Request(slots.copy(), calls, self._num_updates)
        return self._in_flight

    def _collect(self, request: _Request) -> Negatives:
        """Wait for the calls of the request in flight and return its rows."""
        self._in_flight, num_rows = None, len(request.slots)
        rows, step = np.empty((num_rows, self._spec.dim), self._spec.row_dtype), np.empty(num_rows, np.int64)
        for call, own in request.calls:
            answer = call.result()
            call.connection.note_incarnation(answer.incarnation)
            rows[own], step[own] = answer.rows, answer.step
        return Negatives(rows, self._samples.ids_at(request.slots), step)

    def _finish(self) -> None:
        """Wait for the request in flight, and keep its rows."""
        request = self._in_flight
        if request is not None:
            found = self._collect(request)
            if len(request.slots):
                self._prefetched = request, found

    def _split(self, slots: np.ndarray) -> list[np.ndarray]:
        """Return for each shard the positions in ``slots`` of its own."""
        shards = np.searchsorted(self._spec.first_slots[1:], slots, side="right")
        return [np.flatnonzero(shards == shard) for shard in range(len(self._shards))]

    def _by_shard(
        self, sample_id: np.ndarray, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Return ids and rows as they are sent, and the positions of each shard's own; raises ``ConfigError``."""
        rows, ids = checked(rows, sample_id, dim=self._spec.dim)
        if self._spec.sent_dtype != np.float32:
            # Lengths do not matter, and small rows would underflow.
            rows = normalized(rows).astype(self._spec.sent_dtype)
        return ids, rows, self._split(self._samples.positions_of(ids))
