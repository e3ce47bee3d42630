"""A bank as its holders see it: snapshots, and questions that any process may ask at any time."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, final

import numpy as np
import ray
from ray import exceptions

from raycl.errors import ConfigError, RunError, first_line
from raycl.negatives.bank_stats import BankStats, ShardStats, sum_up
from raycl.negatives.messages import Part, ShardInfo
from raycl.negatives.queue import KeyQueue
from raycl.negatives.queue_shard import place_part
from raycl.negatives.rpc import ShardConnection, actor_facts
from raycl.negatives.sample_index import named
from raycl.negatives.search import Neighbors, RowStats, checked_query, merge
from raycl.negatives.snapshot import ROWS_A_GROUP, Current, prune_snapshots, read_current, write_current
from raycl.negatives.spec import BankSpec
from raycl.negatives.store import Negatives, checked_ids
from raycl.negatives.throughput import Throughput
from raycl.storage import absolute

NAMESPACE = "raycl"

# A question is asked of so many rows, and so many queries, at a time: training goes on in between.
_ROWS_A_CALL, _QUERIES_A_CALL = ROWS_A_GROUP, 64
_PATIENCE_S = 30.0
_SLOW_STORAGE = 10e6  # bytes a second


@final
class Bank:
    """The handle of a bank; it may be pickled and sent to any process of the cluster.

    Every method may raise ``RunError`` (a shard stays away) and ``StorageError``.
    """

    def __init__(self, plan: BankSpec, actors: list[Any]) -> None:
        """Hold the actors of the shards, in order."""
        self.plan, self.actors = plan, actors

    def lines(self, *, longer_s: float = 0.0) -> list[ShardConnection]:
        """Return a line of the caller's own to each shard, which waits so much longer than usual."""
        return [
            ShardConnection(actor, self.plan.actor_name(shard), timeout_s=self.plan.timeout_s + longer_s)
            for shard, actor in enumerate(self.actors)
        ]

    def save(self, step: int) -> None:
        """Write a snapshot, all shards at once; from now on a shard that dies comes back with it.

        Writes that are under way may or may not be in it: let every client ``flush`` before, and
        none write meanwhile. The clients' own ``save`` sees to that.
        """
        self._ask_all("save", step, at_storage=True)
        write_current(self.plan, replace(read_current(self.plan), step=step))

    def restore(self, step: int) -> None:
        """Become what the bank was at ``save(step)``, or as new at step 0.

        Done once, by one worker, when a group of workers starts, and before any of them makes its
        client. Writes of clients made earlier are refused from now on.

        Raises:
            StorageError: There is no such snapshot.
            ConfigError: It is of a bank of another shape.
        """
        before = read_current(self.plan)
        after = Current(step, before.attempt + 1)
        write_current(self.plan, after)  # first, for a shard that dies meanwhile
        try:
            self._ask_all("restore", after.step, after.attempt, at_storage=True)
        except Exception:
            write_current(self.plan, before)
            raise

    def prune(self, keep_steps: list[int]) -> None:
        """Delete the snapshots of all other steps, but never the latest saved or restored."""
        prune_snapshots(self.plan, keep_steps)

    def stop(self) -> None:
        """End the actors; the snapshots stay."""
        for actor in self.actors:
            ray.kill(actor)

    def negatives(self) -> Negatives:
        """Return a copy of all rows there are, in the order of slots."""
        if self.plan.kind == "queue":
            return self.read_queue().negatives()
        all_rows = self._empty(self.plan.capacity)
        for part in self._walk("read_slots"):
            all_rows.rows[part.numbers] = part.rows
            all_rows.sample_id[part.numbers] = part.sample_id
            all_rows.step[part.numbers] = part.step
        return all_rows

    def read_queue(self) -> KeyQueue:
        """Return a copy of the queue, each row in its slot."""
        queue = KeyQueue(self.plan.capacity, self.plan.dim, self.plan.row_dtype)
        for part in self._walk("read_slots"):
            place_part(queue, part)
        return queue

    def get(self, sample_id: np.ndarray) -> Negatives:
        """Return the rows of these samples, int64 [n], as the bank's store would.

        Of a queue: all rows that are in it, in the order of slots. Of a memory bank: one each, in
        the order asked; its step is -1 if it was never written.

        Raises:
            ConfigError: The memory bank has no such sample.
        """
        ids = checked_ids(sample_id)
        found = Part(*map(np.concatenate, zip(*self._ask_all("find", ids), strict=True)))
        if self.plan.kind == "queue":
            there = np.flatnonzero(found.step >= 0)
            order = there[np.argsort(found.numbers[there] % self.plan.capacity)]
        else:
            order = self._positions(ids, found.sample_id)
        return Negatives(found.rows[order], found.sample_id[order], found.step[order])

    def nearest(self, query: np.ndarray, k: int = 10) -> list[Neighbors]:
        """Return for each query, [dim] or [n, dim], the k written rows of the highest cosine: exact.

        Raises:
            ConfigError: Another dim, numbers that are not finite, zeros, or ``k`` below 1.
        """
        return self._nearest(checked_query(query, k, dim=self.plan.dim), k, without=None)

    def nearest_of(self, sample_id: int, k: int = 10) -> Neighbors:
        """Return the rows nearest to the newest row of a sample, its own left out.

        Raises:
            ConfigError: The sample is not in the bank, or was never written.
        """
        own = self.get(np.array([sample_id]))
        if len(own) == 0 or own.step.max() < 0:
            raise ConfigError(
                f"the bank {self.plan.name!r} holds no row of sample {sample_id} now; ask for another sample, "
                "or ask with an embedding"
            )
        row = own.rows[own.step.argmax()]
        return self._nearest(checked_query(row, k, dim=self.plan.dim), k, without=sample_id)[0]

    def stats(self) -> BankStats:
        """Count and measure all rows, and how many come and go."""
        hellos: list[ShardInfo] = self._ask_all("hello")
        traffic: list[Throughput] = self._ask_all("traffic")
        facts = [actor_facts(actor) for actor in self.actors]
        shards = [
            ShardStats(
                node_id=fact["Address"]["NodeID"],
                node_ip=fact["Address"]["IPAddress"],
                pid=hello.pid,
                rows=self.plan.rows_of(shard),
                num_bytes=self.plan.bytes_of(shard),
                restarts=fact["NumRestarts"],
            )
            for shard, (hello, fact) in enumerate(zip(hellos, facts, strict=True))
        ]
        census: list[RowStats] = list(self._walk("census"))
        return sum_up(self.plan, shards, census, traffic)

    def export(self, uri: str) -> int:
        """Let each shard write its rows as parquet below ``uri``; return how many were written.

        A file for every slice of rows, so that training goes on in between. Columns: ``sample_id``,
        ``step``, ``embedding``. Rows never written are left out.
        """
        return sum(self._walk("export", absolute(uri)))

    def _nearest(self, queries: np.ndarray, k: int, *, without: int | None) -> list[Neighbors]:
        found: list[Neighbors] = []
        for start in range(0, len(queries), _QUERIES_A_CALL):
            some = queries[start : start + _QUERIES_A_CALL]
            parts = list(self._walk("nearest", some, k, without)) or [[_nobody()] * len(some)]
            found += [merge(of_one, k) for of_one in zip(*parts, strict=True)]
        return found

    def _ask_all(self, method: str, *arguments: Any, at_storage: bool = False) -> list[Any]:
        """Ask all shards at once; what they read or write at a storage takes time by their size."""
        lines = self.lines(longer_s=self.plan.bytes_of(0) / _SLOW_STORAGE if at_storage else 0.0)
        for line in lines:
            line.send(method, *arguments)
        return [line.collect() for line in lines]

    def _walk(self, method: str, *arguments: Any) -> Iterator[Any]:
        """Ask a question slice by slice, all shards at the same time, and yield the answers."""
        sizes = [hello.num_slots for hello in self._ask_all("hello")]
        lines = self.lines()
        for start in range(0, max(sizes), _ROWS_A_CALL):
            asked = [line for line, size in zip(lines, sizes, strict=True) if start < size]
            for line in asked:
                line.send(method, start, start + _ROWS_A_CALL, *arguments)
            yield from [line.collect() for line in asked]

    def _positions(self, ids: np.ndarray, found: np.ndarray) -> np.ndarray:
        # Shards are ranges of the sorted samples: what they found is sorted as well.
        positions = np.searchsorted(found, ids)
        unknown = ~np.isin(ids, found)
        if unknown.any():
            raise ConfigError(
                f"the bank {self.plan.name!r} has no slot for the samples {named(ids[unknown])}: it holds "
                f"{self.plan.capacity} others; ask for ids of its training data"
            )
        return positions

    def _empty(self, num_rows: int) -> Negatives:
        rows = np.empty((num_rows, self.plan.dim), self.plan.row_dtype)
        return Negatives(rows, np.empty(num_rows, np.int64), np.empty(num_rows, np.int64))


def connect_bank(name: str) -> Bank:
    """Return the bank of this name in the Ray that this process has joined.

    Raises:
        ConfigError: There is none; those there are, are named.
        RunError: It does not answer, or no Ray is joined.
    """
    names = list_banks()
    if name not in names:
        those = f"the banks here are {', '.join(map(repr, names))}" if names else "no bank is here"
        raise ConfigError(f"there is no bank {name!r}: {those}; check the name and the cluster's address")
    try:
        plan: Any = ray.get(ray.get_actor(f"{name}/0", NAMESPACE).plan.remote(), timeout=_PATIENCE_S)
        actors = [ray.get_actor(plan.actor_name(shard), NAMESPACE) for shard in range(plan.num_shards)]
    except (exceptions.RayError, ValueError) as error:
        raise RunError(
            f"the bank {name!r} does not answer: {first_line(error)}; try again when it has started"
        ) from error
    return Bank(plan, actors)


def list_banks() -> list[str]:
    """Return the names of the banks in the Ray that this process has joined; raises ``RunError``."""
    if not ray.is_initialized():
        raise RunError("no Ray is joined, so there are no banks to see; join a cluster first")
    named_actors: Any = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in named_actors if actor["namespace"] == NAMESPACE]
    return sorted({name.rpartition("/")[0] for name in names if "/" in name})


def _nobody() -> Neighbors:
    nothing = np.empty(0, np.int64)
    return Neighbors(sample_id=nothing, similarity=nothing.astype(np.float32), step=nothing)
