"""The actors that hold a bank: one for a queue, one for each shard of a memory bank."""

import contextlib
import functools
import json
import os
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar, TypeVarTuple, final

import numpy as np

from raycl.errors import RayclError, RunError
from raycl.negatives import snapshot
from raycl.negatives.memory_bank import MemoryBank
from raycl.negatives.queue import KeyQueue
from raycl.negatives.search import Neighbors, draw, nearest, newest_step, written
from raycl.negatives.spec import BankSpec
from raycl.negatives.stats import RateMeter, RowStats, ShardInfo, row_stats
from raycl.negatives.store import Negatives, State
from raycl.storage import Place

Store = TypeVar("Store", KeyQueue, MemoryBank)
Actor = TypeVar("Actor", bound="BankActor[Any]")
Arguments = TypeVarTuple("Arguments")
Answer = TypeVar("Answer")


class Pushed(NamedTuple):
    """Answer of a queue's actor to a push."""

    incarnation: str  # of the actor's process
    sequence: int  # rows that the actor has seen


class Pulled(NamedTuple):
    """Rows of a memory bank, in the order of the slots asked for."""

    incarnation: str  # of the actor's process
    rows: np.ndarray  # [n, dim]
    step: np.ndarray  # [n]


class Update(NamedTuple):
    """Rows for a memory bank; ``serial`` rises with each update of one client."""

    client: str
    serial: int
    sample_id: np.ndarray  # [n]
    rows: np.ndarray  # [n, dim]
    step: int


def _remote(method: Callable[[Actor, *Arguments], Answer]) -> Callable[[Actor, *Arguments], Answer]:
    """Count the calls of a method, and load the snapshot first if that failed when the actor started."""

    @functools.wraps(method)
    def counted(self: Actor, *arguments: *Arguments) -> Answer:
        self.calls[method.__name__] += 1
        self.load_once()
        return method(self, *arguments)

    return counted


class BankActor(ABC, Generic[Store]):
    """Hold a store, or one shard of it: snapshots, and questions from any process.

    A new actor restores the current snapshot. It refuses the calls of workers of an earlier attempt
    with ``RunError``.
    """

    def __init__(self, spec: BankSpec, shard: int = 0) -> None:
        self._spec, self._shard = spec, shard
        self._incarnation, self._attempt = uuid.uuid4().hex, 0
        self._store: Store | None = None
        self._puts, self._reads = RateMeter(), RateMeter()
        self.calls: Counter[str] = Counter()
        # If the constructor raised, Ray would not pass the reason on: the first call raises it.
        with contextlib.suppress(RayclError):
            self.load_once()
        # Clients import this module too, and should not pay for the trackers.
        from raycl.tracking.prometheus import Exporter

        tags = {"run": Place(spec.output).name, "bank": spec.name, "shard": str(shard)}
        self._exporter = Exporter(tags, self._readings)

    def load_once(self) -> None:
        """Restore the current snapshot, unless that was done; raises as ``restore`` does."""
        if self._store is None:
            snapshot.check_visible(self._spec)
            current = snapshot.read_current(self._spec)
            self._attempt = current.attempt
            self._load(current.step)

    def spec(self) -> BankSpec:
        """Return the specification, whether or not the snapshot could be read."""
        return self._spec

    @_remote
    def info(self) -> ShardInfo:
        """Return the attempt, the process, the number of slots in use, and the throughput."""
        puts, reads = self._puts, self._reads
        rates = puts.per_second(), reads.per_second()
        return ShardInfo(self._attempt, os.getpid(), len(self.store), puts.total, reads.total, *rates)

    @_remote
    def save(self, step: int, current: int) -> tuple[int, ...]:
        """Write the snapshot of a step, atomically; return the steps whose files it needs.

        An increment continues the snapshot of the step ``current``, which must be the bank's current one. Raises
        ``StorageError``.
        """
        return self._save(step, current)

    @_remote
    def restore(self, step: int, attempt: int) -> None:
        """Restore the snapshot of a step, or the initial state at step 0, for a new attempt.

        Raises ``StorageError`` if there is no such snapshot, ``ConfigError`` for one of another bank.
        """
        self._attempt, before = attempt, self._attempt
        try:
            self._load(step)
        except RayclError:
            self._attempt = before
            raise

    @_remote
    def find(self, sample_id: np.ndarray) -> tuple[Negatives, int]:
        """Return the rows of these samples that are here, in the order of slots, and the newest step of all rows."""
        return self._rows_of(sample_id), newest_step(self.store.negatives())

    @_remote
    def draw(self, num: int) -> tuple[np.ndarray, int]:
        """Return the sample ids of ``num`` random written rows, or of all if there are fewer, and the written rows."""
        rows = self.store.negatives()
        return draw(rows, num), int((rows.step >= 0).sum())

    @_remote
    def nearest(
        self, start: int, stop: int, queries: np.ndarray, k: int, without: int | None
    ) -> list[Neighbors]:
        """Return the k rows of these slots that are nearest to each unit query [n, dim]."""
        return nearest(self.store.negatives()[start:stop], queries, k, without=without)

    @_remote
    def row_stats(self, start: int, stop: int) -> RowStats:
        """Count and measure the rows of these slots."""
        return row_stats(self.store.negatives()[start:stop])

    @_remote
    def export(self, start: int, stop: int, uri: str) -> int:
        """Write the written rows of these slots to a file below ``uri``; return how many.

        Raises ``RunError`` unless this node sees the claim on ``uri`` of the process that exports.
        """
        rows = written(self.store.negatives()[start:stop])
        if len(rows):
            snapshot.check_claimed(self._spec, Place(uri))
            name = f"shard-{self._shard}-of-{self._spec.num_shards}-from-{start:010d}.parquet"
            snapshot.write_rows(Place(uri) / name, rows, snapshot.shape_metadata(self._spec, self._shard))
        return len(rows)

    @property
    def store(self) -> Store:
        """The store, once it is loaded."""
        assert self._store is not None, "load_once comes first"
        return self._store

    @abstractmethod
    def _rows_of(self, sample_id: np.ndarray) -> Negatives:
        """Return copies of the rows of these samples that are here, in the order of slots."""

    @abstractmethod
    def _load(self, step: int) -> None:
        """Restore the snapshot of a step, or the initial state at step 0."""

    @abstractmethod
    def _save(self, step: int, current: int) -> tuple[int, ...]:
        """Write the snapshot of a step, as ``save`` does."""

    def _write(self, step: int, facts: dict[str, str], chosen: np.ndarray | None = None) -> None:
        """Write all rows of the store, or the ``chosen`` ones, for the snapshot of a step."""
        facts = {"step": str(step), "attempt": str(self._attempt)} | facts
        metadata = snapshot.shape_metadata(self._spec, self._shard) | facts
        place = snapshot.shard_place(self._spec, self._shard, step)
        snapshot.write_rows(place, self.store.negatives(), metadata, chosen=chosen)

    def _check_attempt(self, attempt: int) -> None:
        if attempt != self._attempt:
            raise RunError(
                f"the bank {self._spec.name!r} was restored after this worker had joined it, so its rows came "
                "too late and were skipped; stop the worker, or make its client after bank.restore"
            )

    def _readings(self) -> Iterator[Any]:
        from raycl.tracking.prometheus import Reading

        yield Reading("bank_bytes", self._spec.bytes_of(self._shard))
        for method, count in list(self.calls.items()):
            yield Reading("bank_calls", count, method)
        if self._store is not None:
            yield Reading("bank_rows", len(self._store))
            yield Reading("bank_rows_written", self._puts.total)
            yield Reading("bank_rows_read", self._reads.total)


@final
class QueueActor(BankActor[KeyQueue]):
    """Hold a copy of the queue that outlives the workers."""

    @_remote
    def push(self, attempt: int, rows: Negatives, sequence: int) -> Pushed:
        """Store the rows whose numbers end before ``sequence``, unless rows before them are missing.

        Rows that came before are not stored again. The answer says how many rows the actor has
        seen: a client sends the rest.
        """
        self._check_attempt(attempt)
        queue, num_new = self.store, sequence - self.store.sequence
        if num_new > 0 and (num_new <= len(rows) or len(rows) == self._spec.capacity):
            queue.apply(rows, sequence)
            self._puts.count(min(num_new, len(rows)))
        return Pushed(self._incarnation, queue.sequence)

    @_remote
    def state_dict(self) -> State:
        """Return the state of the queue."""
        self._reads.count(len(self.store))
        return self.store.state_dict()

    def _rows_of(self, sample_id: np.ndarray) -> Negatives:
        return self.store.get(sample_id)

    def _save(self, step: int, current: int) -> tuple[int, ...]:
        self._write(step, {"sequence": str(self.store.sequence)})
        return (step,)

    def _load(self, step: int) -> None:
        spec = self._spec
        queue = KeyQueue(spec.capacity, spec.dim, spec.row_dtype)
        if step:
            queue.load_state_dict(snapshot.read_queue(spec, step))
        self._store = queue


@final
class MemoryBankActor(BankActor[MemoryBank]):
    """Hold a contiguous range of a memory bank's slots."""

    _applied: dict[str, int]  # client -> serial of its last update
    _chain: snapshot.Chain  # of the snapshot saved or restored last

    @_remote
    def push_pull(self, attempt: int, updates: tuple[Update, ...], slots: np.ndarray) -> Pulled:
        """Apply updates, each once, then return the rows of ``slots``, int64 [n]."""
        self._check_attempt(attempt)
        for client, serial, sample_id, rows, step in updates:
            if serial > self._applied.get(client, 0):
                self.store.update(sample_id, rows, step)
                self._applied[client] = serial
                self._puts.count(len(rows))
        found = self.store.read(slots)
        self._reads.count(len(slots))
        return Pulled(self._incarnation, found.rows.astype(self._spec.sent_dtype, copy=False), found.step)

    @_remote
    def initialize(self, attempt: int, sample_id: np.ndarray, rows: np.ndarray) -> None:
        """Set the initial rows of samples; safe to repeat."""
        self._check_attempt(attempt)
        self.store.initialize(sample_id, rows)
        self._puts.count(len(rows))

    @_remote
    def replace(self, sample_id: np.ndarray, rows: np.ndarray, step: int) -> None:
        """Replace the rows of distinct samples; safe to repeat."""
        self.store.replace(sample_id, rows, step)
        self._puts.count(len(rows))

    @_remote
    def read_slots(self, start: int, stop: int) -> Negatives:
        """Return rows by their place in this shard."""
        rows = self.store.negatives()[start:stop]
        self._reads.count(len(rows))
        return rows

    def _rows_of(self, sample_id: np.ndarray) -> Negatives:
        return self.store.find(sample_id)  # a scan of all rows would keep the workers waiting

    def _save(self, step: int, current: int) -> tuple[int, ...]:
        store, unsaved = self.store, self.store.unsaved()
        # If this shard saved or restored another one since, its files may be deleted.
        before = self._chain if self._chain.steps[-1:] == (current,) else snapshot.Chain()
        chain = before.extended(step, num_unsaved=len(unsaved), num_rows=len(store))
        facts = {"sequence": str(len(store)), "applied": json.dumps(self._applied)}
        chosen = unsaved if len(chain.steps) > 1 else None
        self._write(step, facts | chain.metadata(before), chosen)
        self._chain = chain
        store.mark_saved()
        return chain.steps

    def _load(self, step: int) -> None:
        spec, shard = self._spec, self._shard
        # There is a snapshot of step 0 if the slots were initialized.
        has_rows = step > 0 or snapshot.shard_place(spec, shard, 0).exists()
        metadata, chain = snapshot.read_chain(spec, shard, step) if has_rows else ({}, snapshot.Chain())
        # A client whose update is in the snapshot, but was never answered, sends it again.
        is_of_attempt = has_rows and int(metadata["attempt"]) == self._attempt
        self._applied = json.loads(metadata["applied"]) if is_of_attempt else {}
        self._store = None  # frees its memory before the next one is made
        store = MemoryBank(
            snapshot.read_samples(spec, shard),
            spec.dim,
            seed=spec.seed,
            momentum=spec.momentum,
            dtype=spec.row_dtype,
            first_slot=int(spec.first_slots[shard]),
            num_slots=spec.capacity,
            kind=spec.kind,
        )
        for saved in chain.steps:
            for rows in snapshot.read_parts(spec, shard, saved):
                store.load_part(rows)
        store.mark_saved()
        self._store, self._chain = store, chain
