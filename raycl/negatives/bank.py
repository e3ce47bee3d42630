"""The handle of a bank: snapshots, and questions from any process at any time."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar, TypeVarTuple, final

import numpy as np
import ray
from ray import exceptions

from raycl.arguments import check_type
from raycl.errors import ConfigError, RunError, first_line
from raycl.lease import writing_new
from raycl.negatives.actor import BankActor, MemoryBankActor, QueueActor
from raycl.negatives.placement import (
    ShardAtRisk,
    draining_nodes,
    free_memory,
    reserved_memory,
    shards_at_risk,
)
from raycl.negatives.queue import KeyQueue
from raycl.negatives.rpc import ShardConnection, actor_facts, ask_all
from raycl.negatives.search import Neighbors, SampleRows, checked_query, merge, newest_of
from raycl.negatives.snapshot import (
    ROWS_PER_GROUP,
    Current,
    prune_snapshots,
    read_current,
    write_current,
    write_needs,
)
from raycl.negatives.spec import BankSpec
from raycl.negatives.stats import BankStats, ShardStats, sum_up
from raycl.negatives.store import Negatives, checked_ids, concatenate, named
from raycl.ray_runtime import ambiguous_rays, connect, kill_actors

NAMESPACE = "raycl"
Arguments = TypeVarTuple("Arguments")
Answer = TypeVar("Answer")

# A question covers so many rows, and so many queries, a call: training's calls come in between.
_ROWS_PER_CALL, _QUERIES_PER_CALL = ROWS_PER_GROUP, 64
_CONNECT_TIMEOUT_S = 30.0
_SLOW_STORAGE = 10e6  # bytes a second
_POLL_S = 0.05


@final
class Bank:
    """The handle of a bank; it may be pickled and sent to any process of the cluster.

    Every method may raise ``RunError`` (a shard stays away) and ``StorageError``.
    """

    def __init__(self, spec: BankSpec, actors: list[Any]) -> None:
        """Keep the specification and the actors of the shards, in order."""
        self.spec, self.actors = spec, actors

    def timeout_s(self, *, for_storage: bool = False) -> float:
        """Return how long to wait for a shard; ``for_storage``, with time to write or read a snapshot."""
        return self.spec.timeout_s + (math.ceil(self.spec.bytes_of(0) / _SLOW_STORAGE) if for_storage else 0)

    def connections(self, *, for_storage: bool = False) -> list[ShardConnection]:
        """Return a new connection to each shard, which waits for ``timeout_s``."""
        timeout_s = self.timeout_s(for_storage=for_storage)
        return [
            ShardConnection(actor, self.spec.actor_name(shard), timeout_s=timeout_s)
            for shard, actor in enumerate(self.actors)
        ]

    def save(self, step: int) -> None:
        """Write a snapshot of all shards; from now on a shard that restarts restores it.

        A shard of a memory bank writes the rows written since the last snapshot, and from time to time all rows.

        Writes in flight may or may not be in it: let every client ``flush`` before, and none write
        until it is done. The clients' own ``save`` does so.
        """
        current = read_current(self.spec).step
        needed = ask_all(self.connections(for_storage=True), BankActor.save, step, current)
        write_needs(self.spec, step, set[int]().union(*needed))
        write_current(self.spec, replace(read_current(self.spec), step=step))

    def restore(self, step: int) -> None:
        """Restore the snapshot of ``save(step)``, or the initial state at step 0.

        One worker does this when a worker group starts, before any of them makes its client. Writes
        of clients made earlier are refused from then on. Raises ``StorageError`` if there is no such
        snapshot, ``ConfigError`` for one of another bank.
        """
        before = read_current(self.spec)
        after = Current(step, before.attempt + 1)
        write_current(self.spec, after)  # first, for a shard that restarts before it is asked
        try:
            ask_all(self.connections(for_storage=True), BankActor.restore, after.step, after.attempt)
        except Exception:
            write_current(self.spec, before)
            raise

    def prune(self, keep_steps: list[int]) -> None:
        """Delete the snapshots of all other steps, but never the latest saved or restored.

        The files of earlier steps that a kept snapshot needs stay too.
        """
        prune_snapshots(self.spec, keep_steps)

    def at_risk(self) -> list[ShardAtRisk]:
        """Return the shards whose node is drained, and so will be removed."""
        draining = draining_nodes()
        if not draining:
            return []
        facts = [actor_facts(actor) for actor in self.actors]
        nodes = [fact["Address"]["NodeID"] if fact["State"] == "ALIVE" else "" for fact in facts]
        return shards_at_risk(nodes, reserved_memory(self.spec), draining, free_memory())

    def move(self, shards: Sequence[int]) -> None:
        """Restart these shards from the current snapshot; Ray places them on nodes that are not drained.

        Rows written after the snapshot are lost: no client may write between the snapshot and the end of the move.
        """
        restarts = [actor_facts(self.actors[shard])["NumRestarts"] for shard in shards]
        for shard in shards:
            ray.kill(self.actors[shard], no_restart=False)
        connections = self.connections(for_storage=True)
        for shard, before in zip(shards, restarts, strict=True):
            until = time.monotonic() + connections[shard].timeout_s
            # Until Ray has noticed its death, the old process may still answer.
            while actor_facts(self.actors[shard])["NumRestarts"] == before and time.monotonic() < until:
                time.sleep(_POLL_S)
            connections[shard].ask(BankActor.info)

    def stop(self) -> None:
        """Kill the actors; the snapshots stay."""
        kill_actors(*self.actors)

    def negatives(self) -> Negatives:
        """Return a copy of all rows in the order of slots."""
        if self.spec.kind == "queue":
            return self.read_queue().negatives()
        parts = sorted(self._slice_by_slice(MemoryBankActor.read_slots), key=lambda part: part[0])
        return concatenate([rows for _, rows in parts])

    def read_queue(self) -> KeyQueue:
        """Return a copy of the queue, each row in its slot."""
        queue = KeyQueue(self.spec.capacity, self.spec.dim, self.spec.row_dtype)
        queue.load_state_dict(self.connections()[0].ask(QueueActor.state_dict))
        return queue

    def replace(self, slots: np.ndarray, sample_id: np.ndarray, rows: np.ndarray, step: int) -> None:
        """Replace the rows [n, dim] of distinct samples, in slots of a memory bank, both int64 [n]."""
        shards = np.searchsorted(self.spec.first_slots[1:], slots, side="right")
        calls = []
        for shard, connection in enumerate(self.connections()):
            own = np.flatnonzero(shards == shard)
            if len(own):
                calls.append(connection.send(MemoryBankActor.replace, sample_id[own], rows[own], step))
        for call in calls:
            call.result()

    def get(self, sample_id: np.ndarray) -> SampleRows:
        """Return the rows of these samples, int64 [n].

        A queue returns all their rows, in the order of slots. A memory bank returns one row each, in
        the order of ``sample_id``, of step -1 if it was never written; it raises ``ConfigError`` for
        other samples.
        """
        ids = checked_ids(sample_id)
        parts, newest = zip(*ask_all(self.connections(), BankActor.find, ids), strict=True)
        found = concatenate(list(parts))
        if self.spec.kind != "queue":
            unknown = ~np.isin(ids, found.sample_id)
            if unknown.any():
                raise ConfigError(
                    f"the bank {self.spec.name!r} has no slot for the samples {named(ids[unknown])}: it holds "
                    f"{self.spec.capacity} others; ask for ids of its training data"
                )
            # Shards are ranges of the sorted samples, so the rows found are sorted as well.
            found = found[np.searchsorted(found.sample_id, ids)]
        return SampleRows(**vars(found), newest_step=max(newest))

    def draw(self, num: int) -> np.ndarray:
        """Return the sample ids of ``num`` random written rows, or of all if there are fewer; a queue may repeat one."""
        found, num_written = zip(*ask_all(self.connections(), BankActor.draw, num), strict=True)
        rng, ends = np.random.default_rng(), np.cumsum(num_written)
        # As many of each shard as a draw from all rows gives.
        shard_of = np.searchsorted(
            ends, rng.choice(ends[-1], min(num, ends[-1]), replace=False), side="right"
        )
        sizes = np.bincount(shard_of, minlength=len(found))
        return rng.permutation(np.concatenate([ids[:n] for ids, n in zip(found, sizes, strict=True)]))

    def nearest(self, query: np.ndarray, k: int = 10) -> list[Neighbors]:
        """Return for each query, [dim] or [n, dim], the k written rows of the highest cosine: exact.

        Raises ``ConfigError`` for another dim, values that are not finite, zeros, ``k`` below 1, or a bank of
        partition functions.
        """
        return self._nearest(query, k, without=None)

    def nearest_of(self, sample_id: int, k: int = 10) -> Neighbors:
        """Return the rows nearest to the newest row of a sample, without the sample's own.

        Raises ``ConfigError`` if the sample is not in the bank, or was never written.
        """
        row = newest_of(self.get(np.array([sample_id])), sample_id, self.spec)
        return self._nearest(row, k, without=sample_id)[0]

    def stats(self) -> BankStats:
        """Count and measure all rows, and the throughput of the workers."""
        infos = ask_all(self.connections(), BankActor.info)
        facts = [actor_facts(actor) for actor in self.actors]
        shards = [
            ShardStats(
                node_id=fact["Address"]["NodeID"],
                node_ip=fact["Address"]["IPAddress"],
                pid=info.pid,
                rows=self.spec.rows_of(shard),
                num_bytes=self.spec.bytes_of(shard),
                restarts=fact["NumRestarts"],
            )
            for shard, (info, fact) in enumerate(zip(infos, facts, strict=True))
        ]
        row_parts = [part for _, part in self._slice_by_slice(BankActor.row_stats)]
        return sum_up(self.spec, shards, row_parts, infos)

    def export(self, uri: str) -> int:
        """Let each shard write its written rows as parquet to a new folder ``uri``; return how many.

        Each slice of rows has a file, so that training's calls come in between. Columns: ``sample_id``,
        ``step``, ``embedding``. Raises ``StorageError`` if the folder exists; a failure removes it.
        """
        with writing_new(uri) as place:
            return sum(num_rows for _, num_rows in self._slice_by_slice(BankActor.export, place.uri))

    def _nearest(self, query: np.ndarray, k: int, *, without: int | None) -> list[Neighbors]:
        if self.spec.kind == "partition":
            raise ConfigError(
                f"the bank {self.spec.name!r} holds partition functions, which have no neighbors; "
                "ask get for those of samples"
            )
        queries, found = checked_query(query, k, dim=self.spec.dim), list[Neighbors]()
        for start in range(0, len(queries), _QUERIES_PER_CALL):
            some = queries[start : start + _QUERIES_PER_CALL]
            parts = [part for _, part in self._slice_by_slice(BankActor.nearest, some, k, without)]
            found += [merge(of_one, k) for of_one in zip(*parts, strict=True)]
        return found

    def _slice_by_slice(
        self, method: Callable[[Any, int, int, *Arguments], Answer], *arguments: *Arguments
    ) -> Iterator[tuple[int, Answer]]:
        """Call a method for slices of rows, all shards at the same time; yield shards and answers.

        A shard without rows is asked once, for an empty slice.
        """
        connections = self.connections()
        sizes = [max(info.num_slots, 1) for info in ask_all(connections, BankActor.info)]
        for start in range(0, max(sizes), _ROWS_PER_CALL):
            calls = [
                (shard, connections[shard].send(method, start, start + _ROWS_PER_CALL, *arguments))
                for shard, size in enumerate(sizes)
                if start < size
            ]
            yield from [(shard, call.result()) for shard, call in calls]


def connect_bank(name: str, address: str | None = None, *, timeout_s: float | None = None) -> Bank:
    """Return the bank of this name, to ask it during training.

    It waits at most ``timeout_s`` for a shard that restarts: 30 s to connect, and then the run's ``bank.timeout_s``, by
    default. Joins the Ray at ``address`` (HOST:PORT), or in RAY_ADDRESS, or else the one on this machine,
    unless this process has joined one already; never starts one. If this machine has several, it
    joins the one with the bank.

    Raises:
        ConfigError: There is no such bank (the message lists the others), or no Ray to join, or several have the bank.
        RunError: The Ray or the bank does not answer.
    """
    check_type("name", name, str)
    names = list_banks(ray_of_bank(name, address))
    if name not in names:
        those = f"the banks here are {', '.join(map(repr, names))}" if names else "no bank is here"
        raise ConfigError(f"there is no bank {name!r}: {those}; check the name and the cluster's address")
    try:
        first = ShardConnection(
            ray.get_actor(f"{name}/0", NAMESPACE), f"{name}/0", timeout_s=timeout_s or _CONNECT_TIMEOUT_S
        )
        spec = first.ask(BankActor.spec)
        actors = [ray.get_actor(spec.actor_name(shard), NAMESPACE) for shard in range(spec.num_shards)]
    except (exceptions.RayError, RunError, ValueError) as error:
        raise RunError(
            f"the bank {name!r} does not answer: {first_line(error)}; try again when it has started"
        ) from error
    return Bank(replace(spec, timeout_s=min(spec.timeout_s, timeout_s or math.inf)), actors)


def ray_of_bank(name: str, address: str | None = None) -> str | None:
    """Return the address of the only Ray on this machine with this bank, or ``address`` if that or another setting chooses.

    Joins and leaves one after the other. Raises ``ConfigError`` if none or several of them have the bank.
    """
    rays = ambiguous_rays(address)
    if not rays:
        return address
    runs: dict[str, str] = {}  # with the bank, by address
    others: dict[str, list[str]] = {}
    for each in rays:
        try:
            others[each] = list_banks(each)
            if name in others[each]:
                runs[each] = connect_bank(name).spec.output
        except RunError as error:  # a Ray of another user, or one that ends
            others.setdefault(each, []).append(f"no answer ({first_line(error)})")
        finally:
            ray.shutdown()
    if len(runs) > 1:
        those = ", ".join(f"{each} ({run})" for each, run in runs.items())
        raise ConfigError(
            f"{len(runs)} Rays on this machine have a bank {name!r}: {those}; say which by --address HOST:PORT"
        )
    if not runs:
        those = "; ".join(f"{each}: {', '.join(banks) or 'none'}" for each, banks in others.items())
        raise ConfigError(
            f"none of the {len(rays)} Rays on this machine has a bank {name!r} that answers: {those}; check the name"
        )
    return next(iter(runs))


def list_banks(address: str | None = None) -> list[str]:
    """Return the names of all banks; joins a Ray, and raises, as ``connect_bank`` does."""
    connect(address)
    named_actors: Any = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in named_actors if actor["namespace"] == NAMESPACE]
    return sorted({name.rpartition("/")[0] for name in names if "/" in name})
