"""Processes that stand ready to replace lost ones, so that a group starts without new processes and their imports.

Each worker and controller asks Ray on its node for an idle process with its own environment, which imports the modules
that it will need. The first worker asks on other nodes with room for a worker too, until Ray agrees. Ray gives idle
processes of the same job and environment to new actors. A process that cannot be had costs time only: Ray then starts one
when it is needed.
"""

import contextlib
import gc
import importlib
import json
import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

import ray
from ray._private import ray_constants, worker
from ray.runtime_env import RuntimeEnv

HOOK = ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR  # names the function that a new process calls
_MIN_RUN_S = 60.0  # a shorter run needs no other process, whose imports would take its CPUs
_DELAY_S = 15.0  # their imports must not delay the first steps of a group
_TURN_S = 2.0  # in which a process starts, without its imports
_KEPT_S = 7 * 24 * 3600
_TIMEOUT_S = 10.0
_LOOK_S = 30.0  # between two looks for nodes that joined


def importing(function: str) -> dict[str, str]:
    """Return the environment of processes that call a function of this module when they start.

    Empty if a new process may not find raycl, or if the job has such a function of its own.
    """
    own = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    with contextlib.suppress(metadata.PackageNotFoundError):
        metadata.distribution("raycl")
        return {} if HOOK in own else {HOOK: f"{__name__}.{function}"}
    return {}


def import_worker() -> None:
    """Import the modules of a training worker."""
    _import("training.loop")


def import_controller() -> None:
    """Import the modules of Ray Train's controller."""
    _import("training.controller")


def import_reader() -> None:
    """Import the modules of the actor that reads a stream, and of its tasks."""
    _import("data.streaming")


def stand_by(
    number: int = 1, *, began: float, turn: int = 0, env_vars: Mapping[str, str] | None = None
) -> None:
    """Ask for processes that can replace this one, if this one still lives a minute after the run ``began``.

    The processes of a node ask in ``turn``, since a node starts no more processes at once than it has CPUs, and ignores
    further requests. With ``env_vars``, the new ones can replace an actor that this one started with these.
    """
    delay = _delay(began) + turn * _TURN_S
    timer = threading.Timer(delay, request_standby, [number], {"env_vars": env_vars})
    timer.daemon = True
    timer.start()


def stand_by_elsewhere(
    coordinator: Any, *, workers: int, began: float, actors: Sequence[Mapping[str, str]] = ()
) -> None:
    """Ask for processes on other nodes with room for this actor, at the time of :func:`stand_by` and as nodes join.

    ``actors`` are the environment variables of actors that this one starts, which need a process there too. A node that
    agreed is not asked again in a run. At most twice as many nodes as ``workers`` are asked, the workers' nodes included.
    """

    def look() -> None:
        time.sleep(_delay(began))
        while True:
            # Ray restarts a dead coordinator; the next look asks it again.
            with contextlib.suppress(Exception):
                nodes = nodes_with_room(ray.nodes(), ray.get_runtime_context().get_assigned_resources())
                # Nodes that refuse must not delay others.
                shuffled = random.Random().sample(list(nodes), len(nodes))
                new = coordinator.nodes_without_standby.remote(shuffled, most=2 * workers)
                for node in ray.get(new, timeout=_TIMEOUT_S):
                    has_agreed = request_standby(address=nodes[node])
                    for env_vars in actors:
                        time.sleep(_TURN_S)
                        has_agreed &= request_standby(address=nodes[node], env_vars=env_vars)
                    if has_agreed:
                        coordinator.add_standby_node.remote(node)
            time.sleep(_LOOK_S)

    threading.Thread(target=look, name="raycl-standby", daemon=True).start()


def nodes_with_room(nodes: Iterable[Mapping[str, Any]], needed: Mapping[str, float]) -> dict[str, str]:
    """Return the addresses by id of living nodes, as ``ray.nodes`` lists them, that have the needed resources in all."""
    return {
        node["NodeID"]: f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
        for node in nodes
        if node["Alive"] and all(node["Resources"].get(name, 0) >= needed[name] for name in needed)
    }


def request_standby(
    number: int = 1, *, address: str | None = None, env_vars: Mapping[str, str] | None = None
) -> bool:
    """Ask Ray on a node for idle processes with the environment of this one; return whether it agreed.

    ``address`` is the address of the node's raylet; without it, the node is this one. With ``env_vars``, the processes
    have these as well, like an actor that this process starts with them.
    """
    if not ray.is_initialized():  # get_runtime_context would start Ray, or wait for a cluster that has ended
        return False
    # Ray's own interface for its libraries, which may change: a run must not depend on it.
    with contextlib.suppress(Exception):
        from ray._private.grpc_utils import init_grpc_channel
        from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc

        node: Any = worker._global_node
        context = ray.get_runtime_context()
        request = node_manager_pb2.PrestartWorkersRequest(  # pyright: ignore[reportAttributeAccessIssue]
            language=common_pb2.Language.Value("PYTHON"),  # pyright: ignore[reportAttributeAccessIssue]
            job_id=bytes.fromhex(context.get_job_id()),
            keep_alive_duration_secs=_KEPT_S,
            num_workers=number,
        )
        request.runtime_env_info.serialized_runtime_env = _environment(env_vars or {})
        channel: Any = init_grpc_channel(address or f"{node.node_ip_address}:{node.node_manager_port}")
        with channel:
            node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=_TIMEOUT_S)
        return True
    return False


def _environment(env_vars: Mapping[str, str]) -> str:
    """Return the environment of an actor that this process starts with these variables, as Ray writes it."""
    own = ray.get_runtime_context().get_runtime_env_string()
    if not env_vars:
        return own
    merged = json.loads(own)
    if not merged:
        return RuntimeEnv(env_vars=dict(env_vars)).serialize()
    merged["env_vars"] = merged.get("env_vars", {}) | env_vars
    return json.dumps(merged, sort_keys=True, separators=(",", ":"))


def _delay(began: float) -> float:
    return max(_DELAY_S, began + _MIN_RUN_S - time.time())


def _import(module: str) -> None:
    """Import a module of raycl, before this process gets an actor; garbage collection would take a sixth of the time."""
    gc.disable()
    with contextlib.suppress(Exception):  # an actor that needs the modules reports the error
        importlib.import_module(f"raycl.{module}")
    gc.enable()
