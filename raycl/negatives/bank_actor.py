"""The actors that hold a bank: started by the driver, found by name, never two banks of one name."""

import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any, final

import numpy as np
import ray
from ray import exceptions

from raycl.display import format_bytes
from raycl.errors import ConfigError, RayclError, RunError, first_line
from raycl.negatives.bank import NAMESPACE, Bank, connect_bank, list_banks
from raycl.negatives.bank_shard import BankShard
from raycl.negatives.memory_bank_shard import MemoryBankShard
from raycl.negatives.messages import Reply
from raycl.negatives.queue_shard import QueueShard
from raycl.negatives.sample_index import SampleIndex
from raycl.negatives.snapshot import write_samples
from raycl.negatives.spec import BankSpec
from raycl.storage import Place
from raycl.tracking.prometheus import Exporter, Reading

# Rows, ids and steps, and what a call needs besides.
_MEMORY_MARGIN = 1.15

# Where nodes are labeled by their roles (see cluster.yaml), a bank is none of those that come and go.
_ROLE, _ROLES = "raycl.io/role", ("memory", "head")

# How long a bank may take to go when its driver has gone.
_PARTING_S = 15.0


@final
class BankActor:
    """Hold a shard; answer one call at a time, each answer marked with this life of the process."""

    def __init__(self, plan: BankSpec, shard: int) -> None:
        self._plan, self._number, self._incarnation = plan, shard, uuid.uuid4().hex
        self._shard: BankShard | None = None
        # An actor that fails to start would take the reason with it: whoever calls hears of it.
        with contextlib.suppress(RayclError):
            self._made()
        self._calls: Counter[str] = Counter()
        tags = {"run": Place(plan.output).name, "bank": plan.name, "shard": str(shard)}
        self._exporter = Exporter(tags, self._readings)

    def plan(self) -> BankSpec:
        """Return the plan, whether or not the shard could be made."""
        return self._plan

    def call(self, method: str, *arguments: Any) -> Reply:
        """Let the shard do it; raises what the shard raises."""
        self._calls[method] += 1
        return Reply(self._incarnation, getattr(self._made(), method)(*arguments))

    def _made(self) -> BankShard:
        """Return the shard; storage that failed before is tried anew."""
        if self._shard is None:
            kind = QueueShard if self._plan.kind == "queue" else MemoryBankShard
            self._shard = kind(self._plan, self._number)
        return self._shard

    def _readings(self) -> Iterator[Reading]:
        yield Reading("bank_bytes", self._plan.bytes_of(self._number))
        for method, count in list(self._calls.items()):
            yield Reading("bank_calls", count, method)
        if self._shard is not None:
            names = ("bank_rows", "bank_rows_written", "bank_rows_read")
            yield from map(Reading, names, self._shard.totals())


def start_bank(plan: BankSpec, sample_id: np.ndarray | None = None, *, cluster_grows: bool = False) -> Bank:
    """Start a bank's actors and wait until all answer.

    They begin with the snapshot in force below ``plan.output``, or as new. A detached bank of this name
    and output is ended first. A bank that is not detached ends with its driver.

    Args:
        plan: What the bank is.
        sample_id: Of a memory bank: the ids of all training data, int64 [capacity], in any order.
        cluster_grows: Wait for nodes that are not there yet, rather than refuse.

    Raises:
        ConfigError: The name is taken by another run, or by this one because it still goes on, no
            node has memory enough, or ids and plan do not fit together.
        RunError: The cluster has no place for all shards in time.
        StorageError: The output cannot be read or written.
    """
    ordered = _ordered(plan, sample_id)
    if not cluster_grows:
        _check_memory(plan)
    _end_predecessor(plan)
    if ordered is not None:
        write_samples(plan, ordered)
    bank = Bank(plan, _create_actors(plan))
    try:
        ray.get([actor.call.remote("hello") for actor in bank.actors], timeout=plan.timeout_s)
    except exceptions.RayError as error:
        bank.stop()
        raise _why_not_started(plan, error) from error
    return bank


def _ordered(plan: BankSpec, sample_id: np.ndarray | None) -> np.ndarray | None:
    if plan.kind == "queue":
        return None
    num_ids = 0 if sample_id is None else len(sample_id)
    if sample_id is None or num_ids != plan.capacity:
        raise ConfigError(
            f"the memory bank is planned for {plan.capacity} samples and {num_ids} ids came; "
            "give the ids of all training data, and their number as capacity"
        )
    return SampleIndex(sample_id).sample_id


def _check_memory(plan: BankSpec) -> None:
    need = max(_memory_of(plan, shard) for shard in range(plan.num_shards))
    nodes = nodes_for_a_bank()
    if not nodes:
        raise ConfigError(
            f"nodes are labeled by {_ROLE} and none of them is for a bank; label one as {' or '.join(_ROLES)}"
        )
    have = max(node["Resources"].get("memory", 0.0) for node in nodes)
    if need > have:
        raise ConfigError(
            f"a shard of the bank needs {format_bytes(need)} of memory and the largest node for it has {format_bytes(have)}; "
            "raise bank.shards, set bank.dtype=float16, or add a larger node"
        )


def nodes_for_a_bank() -> list[dict[str, Any]]:
    """Return the living nodes that are labeled for a bank; all, if none says what it is for."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if not _have_roles(nodes):
        return nodes
    return [node for node in nodes if node["Labels"].get(_ROLE) in _ROLES]


def _have_roles(nodes: list[dict[str, Any]]) -> bool:
    return any(_ROLE in node["Labels"] for node in nodes)


def _selector() -> dict[str, str]:
    """Return how the nodes for a bank are labeled; nothing, if no node says what it is for."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return {_ROLE: f"in({','.join(_ROLES)})"} if _have_roles(alive) else {}


def _end_predecessor(plan: BankSpec) -> None:
    if plan.name not in list_banks():
        return
    holder = connect_bank(plan.name)
    if holder.plan.output != plan.output:
        raise ConfigError(
            f"the bank {plan.name!r} belongs to the run at {holder.plan.output}; set bank.name to another name"
        )
    if holder.plan.detached:
        holder.stop()
        return
    # It ends with its driver, which may just have ended.
    deadline = time.monotonic() + _PARTING_S
    while plan.name in list_banks():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"the run at {plan.output} still goes on: its bank {plan.name!r} answers; end that run first"
            )
        time.sleep(0.2)


def _create_actors(plan: BankSpec) -> list[Any]:
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0}
    options |= {"namespace": NAMESPACE, "label_selector": _selector()}
    if plan.detached:
        options["lifetime"] = "detached"
    actors: list[Any] = []
    try:
        for shard in range(plan.num_shards):
            own = {"name": plan.actor_name(shard), "memory": _memory_of(plan, shard)}
            actors.append(ray.remote(BankActor).options(**options, **own).remote(plan, shard))
    except ValueError as error:
        Bank(plan, actors).stop()
        raise ConfigError(
            f"a bank {plan.name!r} was started at this very moment by another run; set bank.name to another name"
        ) from error
    return actors


def _why_not_started(plan: BankSpec, error: exceptions.RayError) -> RayclError:
    cause = getattr(error, "cause", None)
    if isinstance(cause, RayclError):
        return cause
    need = max(_memory_of(plan, shard) for shard in range(plan.num_shards))
    if isinstance(error, exceptions.GetTimeoutError):
        return RunError(
            f"the bank found no place within {plan.timeout_s:g} s: {plan.num_shards} shards need up to "
            f"{format_bytes(need)} of memory each and others hold it; end them, add a node or raise bank.shards"
        )
    return RunError(f"the bank did not start: {first_line(error)}; try again with --debug")


def _memory_of(plan: BankSpec, shard: int) -> int:
    return int(_MEMORY_MARGIN * plan.bytes_of(shard)) + 1
