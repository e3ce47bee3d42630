"""A worker's access to a bank, without waiting for other workers."""

import uuid
from collections.abc import Callable
from typing import NamedTuple, final

import numpy as np

from raycl.negatives.actor import BankActor, MemoryBankActor, Pulled, Pushed, QueueActor, Update
from raycl.negatives.averages import normalized
from raycl.negatives.bank import Bank
from raycl.negatives.memory_bank import SampleIndex, check_slots, draw_slots
from raycl.negatives.rpc import PendingCall
from raycl.negatives.store import checked

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
        (self._actor,) = bank.connections(for_storage=True)  # a shard that restarts reads its snapshot
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

    def push(self, rows: np.ndarray, sample_id: np.ndarray, step: int | np.ndarray) -> None:
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


class Part(NamedTuple):
    """The rows of some of the slots asked for: those in the shards that a worker calls."""

    positions: np.ndarray  # [n], ascending, in the slots asked for
    rows: np.ndarray  # [n, dim]
    step: np.ndarray  # [n]


class _Request(NamedTuple):
    """A read in flight: the number of its slots, and the calls with their positions among the slots."""

    num_slots: int
    calls: list[tuple[PendingCall[Pulled], np.ndarray]]


@final
class MemoryBankClient:
    """The access of a group of workers to the slots: one call a step and shard, for all workers.

    Each worker calls the shards whose number modulo ``num_workers`` is its ``rank``. The workers pass the
    answers on; a group of one has all shards.

    An update is sent with the next ``ask``, so rows that are asked for after it contain it: a bank that sends
    float32 equals a ``MemoryBank`` in process, to the last bit. At most one call to a shard is in flight.

    The methods raise ``RunError`` if a shard stays away, or if the bank was restored since this client
    was made; and ``ConfigError`` for rows, samples or slots that do not fit: nothing was written then.
    """

    def __init__(
        self,
        bank: Bank,
        sample_id: np.ndarray,
        *,
        rank: int = 0,
        num_workers: int = 1,
        barrier: Callable[[], None] = lambda: None,
    ) -> None:
        """Join the bank with the ids that it was started with, in any order; ``barrier`` waits for all workers."""
        self._samples = SampleIndex(sample_id)
        assert len(self) == bank.spec.capacity, "a client has the ids that the bank was started with"
        self._bank, self._spec, self._barrier = bank, bank.spec, barrier
        self._rank, self._num_workers = rank, num_workers
        # By number: a worker calls every num_workers-th shard, or none.
        # A shard that restarts reads its snapshot.
        self._shards = dict(list(enumerate(bank.connections(for_storage=True)))[rank::num_workers])
        self._attempt = max((shard.ask(BankActor.info).attempt for shard in self._shards.values()), default=0)
        self._name, self._num_updates = uuid.uuid4().hex, 0
        self._buffered: dict[int, list[Update]] = {shard: [] for shard in self._shards}
        self._in_flight: _Request | None = None
        self._part: Part | None = None

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def sent_dtype(self) -> np.dtype:
        """Type of the rows in messages."""
        return self._spec.sent_dtype

    @property
    def waited_s(self) -> float:
        """Seconds that this worker has waited for its shards so far."""
        return sum(shard.waited_s for shard in self._shards.values())

    @property
    def restarts(self) -> int:
        """Number of restarts of this worker's shards that it has seen; each loses updates since its snapshot."""
        return sum(shard.num_restarts for shard in self._shards.values())

    def slots_of(self, sample_id: np.ndarray) -> np.ndarray:
        """Return the slot of each sample, int64 [n]; raises ``ConfigError`` if one has none."""
        return self._samples.positions_of(sample_id)

    def ids_at(self, slots: np.ndarray) -> np.ndarray:
        """Return the samples in these slots, int64 [n]."""
        return self._samples.ids_at(slots)

    def callers_of(self, slots: np.ndarray) -> np.ndarray:
        """Return the rank of the worker that calls the shard of each slot, int64 [n]."""
        return self._shards_of(slots) % self._num_workers

    def draw(self, num: int, *, step: int) -> np.ndarray:
        """Draw slots for one step, the same on every worker: ``draw_slots`` with the bank's seed."""
        return draw_slots(len(self), num, seed=self._spec.seed, step=step)

    def ask(self, slots: np.ndarray) -> None:
        """Send this worker's shards their updates, and ask for their part of ``slots``, int64 [n], without waiting."""
        check_slots(slots, 0, len(self))
        self._finish()
        self._send(slots)

    def answer(self) -> Part:
        """Wait for the rows asked for last; a row that was never updated has step -1."""
        self._finish()
        assert self._part is not None, "rows are asked for, and returned once"
        part, self._part = self._part, None
        return part

    def update(self, sample_id: np.ndarray, rows: np.ndarray, step: int) -> None:
        """Move the slots of ``sample_id`` [n] towards ``rows`` [n, dim], as ``MemoryBank.update`` does.

        Every worker gives the rows of all workers, and sends those of its own shards with the next ``ask``. If
        there is none before the next update, they are sent with that one.
        """
        is_late, self._num_updates = any(self._buffered.values()), self._num_updates + 1
        for shard, ids, own in self._by_shard(sample_id, rows):
            self._buffered[shard].append(Update(self._name, self._num_updates, ids, own, step))
        if is_late:
            self._finish()
            self._send(_NO_SLOTS)

    def initialize(self, sample_id: np.ndarray, rows: np.ndarray) -> None:
        """Set the initial rows of samples of all workers, as ``MemoryBank.initialize`` does; waits for the bank."""
        parts = self._by_shard(sample_id, rows)
        self.flush()
        calls = [
            self._shards[shard].send(MemoryBankActor.initialize, self._attempt, ids, own)
            for shard, ids, own in parts
        ]
        for call in calls:
            call.result()

    def flush(self) -> None:
        """Wait until this worker's shards have all rows; rows that were asked for are dropped."""
        self._finish()
        self._send(_NO_SLOTS, to_all=True)
        self._finish()
        self._part = None

    def save(self, step: int) -> None:
        """Write a snapshot of the bank; every worker calls it."""
        self.flush()
        self._barrier()
        if self._rank == 0:
            self._bank.save(step)
        self._barrier()

    def _send(self, slots: np.ndarray, *, to_all: bool = False) -> None:
        """Send this worker's shards their updates, and ask them for their part of the slots."""
        calls: list[tuple[PendingCall[Pulled], np.ndarray]] = []
        shard_of = self._shards_of(slots) if self._shards else _NO_SLOTS
        for shard, connection in self._shards.items():
            own, updates = np.flatnonzero(shard_of == shard), tuple(self._buffered[shard])
            self._buffered[shard] = []
            if to_all or updates or len(own):
                call = connection.send(MemoryBankActor.push_pull, self._attempt, updates, slots[own])
                calls.append((call, own))
        self._in_flight = _Request(len(slots), calls)

    def _finish(self) -> None:
        """Wait for the request in flight, and keep its rows."""
        if self._in_flight is None:
            return
        request, self._in_flight = self._in_flight, None
        shape = request.num_slots, self._spec.dim
        rows, step = np.empty(shape, self._spec.sent_dtype), np.empty(request.num_slots, np.int64)
        is_own = np.zeros(request.num_slots, bool)
        for call, own in request.calls:
            answer = call.result()
            call.connection.note_incarnation(answer.incarnation)
            rows[own], step[own], is_own[own] = answer.rows, answer.step, True
        if request.num_slots:
            positions = np.flatnonzero(is_own)
            self._part = Part(positions, rows[positions], step[positions])

    def _shards_of(self, slots: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._spec.first_slots[1:], slots, side="right")

    def _by_shard(self, sample_id: np.ndarray, rows: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Return this worker's shards that get rows, with ids and rows as they are sent; raises ``ConfigError``."""
        if not self._shards:
            return []
        shard_of = self._shards_of(self._samples.positions_of(sample_id))
        if len(rows) == len(sample_id):  # or they are refused below
            mine = np.flatnonzero(shard_of % self._num_workers == self._rank)
            rows, sample_id, shard_of = rows[mine], sample_id[mine], shard_of[mine]
        rows, ids = checked(rows, sample_id, dim=self._spec.dim)
        if self._spec.sent_dtype != np.float32:
            # Lengths do not matter, and small rows would underflow.
            rows = normalized(rows).astype(self._spec.sent_dtype)
        chosen = {shard: np.flatnonzero(shard_of == shard) for shard in self._shards}
        return [(shard, ids[own], rows[own]) for shard, own in chosen.items() if len(own)]
