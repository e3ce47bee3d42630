"""Start of a bank's actors: memory, nodes, and one bank of a name."""

import time
from typing import Any

import numpy as np
import ray
from ray import exceptions

from raycl.display import format_bytes
from raycl.errors import ConfigError, RayclError, RunError
from raycl.negatives.actor import BankActor, MemoryBankActor, QueueActor
from raycl.negatives.bank import NAMESPACE, Bank, connect_bank, list_banks
from raycl.negatives.memory_bank import SampleIndex
from raycl.negatives.placement import ROLE, ROLES, nodes_for_a_bank, reserved_memory
from raycl.negatives.rpc import actor_facts
from raycl.negatives.snapshot import read_current, shard_place, write_current, write_samples
from raycl.negatives.spec import BankSpec
from raycl.ray_runtime import cause_of
from raycl.storage import Place

# How long a bank may outlive its driver.
_EXIT_TIMEOUT_S = 15.0


def start_bank(spec: BankSpec, sample_id: np.ndarray | None = None, *, cluster_grows: bool = False) -> Bank:
    """Start a bank's actors and wait until all answer.

    They restore the current snapshot below ``spec.output``, if there is one. A detached bank of
    this name and output is stopped first. A bank that is not detached ends with its driver.

    Args:
        spec: The specification of the bank.
        sample_id: For a memory bank, the ids of all training data, int64 [capacity], in any order.
        cluster_grows: Wait for nodes that are not there yet, rather than refuse.

    Raises:
        ConfigError: Another run has a bank of this name, this run is still running, no node has
            enough memory, or an id comes twice.
        RunError: The cluster has no place for all shards in time, or they are not ready in time.
        StorageError: The output cannot be read or written.
    """
    samples = None if sample_id is None else SampleIndex(sample_id)
    assert (samples is None) == (spec.kind == "queue") and (samples is None or len(samples) == spec.capacity)
    if not cluster_grows:
        _check_memory(spec)
    _stop_predecessor(spec)
    if samples is not None:
        write_samples(spec, samples.sample_id)
    current = read_current(spec)
    if not Place(spec.output).exists():
        write_current(spec, current)  # makes the folder, which a shard on another node may not have
    step = current.step
    has_snapshot = step > 0 or shard_place(spec, 0, 0).exists()  # of step 0: initialized slots
    bank = Bank(spec, _create_actors(spec))
    try:
        _wait_for_shards(bank, timeout_s=bank.timeout_s(for_storage=has_snapshot))
    except BaseException:  # after Ctrl-C, too: named actors that wait for a place would stay
        bank.stop()
        raise
    return bank


def _check_memory(spec: BankSpec) -> None:
    nodes = nodes_for_a_bank()
    if not nodes:
        raise ConfigError(
            f"nodes are labeled by {ROLE} and none of them is for a bank; label one as {' or '.join(ROLES)}"
        )
    need = max(reserved_memory(spec))
    have = max(node["Resources"].get("memory", 0.0) for node in nodes)
    if need > have:
        raise ConfigError(
            f"a shard of the bank needs {format_bytes(need)} of memory and the largest node for it has {format_bytes(have)}; "
            f"{_remedy(spec)}, or add a larger node"
        )


def _stop_predecessor(spec: BankSpec) -> None:
    if spec.name not in list_banks():
        return
    try:
        holder = connect_bank(spec.name)
    except (ConfigError, RunError) as error:
        if spec.name not in list_banks():  # it has ended since
            return
        raise RunError(
            f"a bank {spec.name!r} exists and does not answer; wait until it has started, end its actors (in the namespace "
            f"{NAMESPACE!r}, from {spec.actor_name(0)!r} on) with ray.kill if its run has ended, or set bank.name to another name"
        ) from error
    if holder.spec.output != spec.output:
        raise ConfigError(
            f"the bank {spec.name!r} belongs to the run at {holder.spec.output}; set bank.name to another name"
        )
    if holder.spec.detached:
        holder.stop()
        return
    # It ends with its driver, which may just have ended.
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    while spec.name in list_banks():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"the run at {spec.output} is still running: its bank {spec.name!r} answers; stop that run first"
            )
        time.sleep(0.2)


def _create_actors(spec: BankSpec) -> list[Any]:
    kind: type[BankActor[Any]] = QueueActor if spec.kind == "queue" else MemoryBankActor
    has_roles = any(ROLE in node["Labels"] for node in ray.nodes() if node["Alive"])
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,
        "namespace": NAMESPACE,
        "label_selector": {ROLE: f"in({','.join(ROLES)})"} if has_roles else {},
    }
    if spec.detached:
        options["lifetime"] = "detached"
    actors: list[Any] = []
    try:
        for shard, memory in enumerate(reserved_memory(spec)):
            own = {"name": spec.actor_name(shard), "memory": memory}
            actors.append(ray.remote(kind).options(**options, **own).remote(spec, shard))
    except ValueError as error:
        Bank(spec, actors).stop()
        raise ConfigError(
            f"another run started a bank {spec.name!r} at the same moment; set bank.name to another name"
        ) from error
    return actors


def _wait_for_shards(bank: Bank, *, timeout_s: float) -> None:
    """Wait until all shards answer; raises as ``start_bank`` does."""
    spec = bank.spec
    try:
        ray.get([actor.info.remote() for actor in bank.actors], timeout=timeout_s)
    except exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, RayclError):
            raise cause from error
        if not isinstance(error, exceptions.GetTimeoutError):
            raise RunError(f"the bank did not start: {cause_of(error)}; try again with --debug") from error
        if all(_has_place(actor) for actor in bank.actors):
            raise RunError(
                f"the bank was not ready within {timeout_s:g} s, although its shards have a place: check the load "
                f"of their nodes and the speed of {spec.place}, which may hold a snapshot, or raise bank.timeout_s"
            ) from error
        raise RunError(
            f"the bank found no place within {timeout_s:g} s: {spec.num_shards} shards need up to "
            f"{format_bytes(max(reserved_memory(spec)))} of memory each, which others use; end them, add a node, or {_remedy(spec)}"
        ) from error


def _has_place(actor: Any) -> bool:
    """Whether an actor has a process, which may still read its snapshot."""
    return bool(actor_facts(actor).get("Address", {}).get("IPAddress"))


def _remedy(spec: BankSpec) -> str:
    return (
        "set bank.dtype=float16, or lower negatives.capacity" if spec.kind == "queue" else "raise bank.shards"
    )
