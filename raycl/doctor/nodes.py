"""The nodes of a cluster: how to ask all of them at once, and the functions that run there.

This module must not import torch: tasks on every node import it.
"""

import platform
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, TypeVar, final

import numpy as np
import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycl.chain import code_hash
from raycl.errors import last_line
from raycl.gpus import accelerators

TIMEOUT_S = 60.0  # Ray may need ten seconds to start a process on a busy node
PACKAGES = ("ray", "torch", "pyarrow", "raycl")

Value = TypeVar("Value")


@final
@dataclass(frozen=True, kw_only=True)
class Node:
    """A node as Ray counts it, with Ray's types of its GPUs; the object store's size is in bytes."""

    node_id: str
    name: str
    is_head: bool
    num_cpus: float
    num_gpus: float
    object_store: float
    accelerators: Sequence[str] = ()


@final
@dataclass(frozen=True)
class NodeAnswer(Generic[Value]):
    """The answer of a node, or why there is none."""

    node: Node
    value: Value | None = None
    problem: str = ""


@final
@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """Versions by package, and memory in bytes: the limit of the node or its container, and how much is free."""

    versions: dict[str, str]
    memory: float
    free_memory: float


def alive_nodes() -> tuple[Node, ...]:
    """Return the nodes that are alive, the head first; names that several nodes share get a prefix of their id."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    counts = Counter(node["NodeManagerHostname"] for node in alive)
    nodes = []
    for each in alive:
        name, resources = each["NodeManagerHostname"], each["Resources"]
        node = Node(
            node_id=each["NodeID"],
            name=name if counts[name] == 1 else f"{name}/{each['NodeID'][:6]}",
            is_head="node:__internal_head__" in resources,
            num_cpus=resources.get("CPU", 0.0),
            num_gpus=resources.get("GPU", 0.0),
            object_store=resources.get("object_store_memory", 0.0),
            accelerators=accelerators(resources),
        )
        nodes.append(node)
    return tuple(sorted(nodes, key=lambda node: (not node.is_head, node.name)))


def ask_nodes(
    nodes: Iterable[Node],
    question: Callable[..., Value],
    *arguments: Any,
    num_gpus: float = 0,
    timeout_s: float = TIMEOUT_S,
) -> list[NodeAnswer[Value]]:
    """Call a function on each node, in tasks that take no CPU, and wait for at most ``timeout_s``."""
    pending = {}
    for node in nodes:
        task = ray.remote(question).options(
            num_cpus=0, num_gpus=num_gpus, max_retries=0, scheduling_strategy=on_node(node)
        )
        pending[task.remote(*arguments)] = node  # pyright: ignore[reportCallIssue]
    if pending:
        ray.wait(list(pending), num_returns=len(pending), timeout=timeout_s)
    return [_answer(ref, node, timeout_s) for ref, node in pending.items()]


def on_node(node: Node) -> NodeAffinitySchedulingStrategy:
    """Return the strategy that places a task on this node and on no other."""
    return NodeAffinitySchedulingStrategy(node.node_id, soft=False)


def _answer(ref: Any, node: Node, timeout_s: float) -> NodeAnswer[Any]:
    try:
        return NodeAnswer(node, ray.get(ref, timeout=0))
    except exceptions.GetTimeoutError:
        # The task ends with this process at the latest: canceling a task that finishes at that very moment
        # kills this process (Ray 2.60).
        return NodeAnswer(node, problem=f"no answer within {timeout_s:g} s")
    # Whatever failed on this node, the other nodes still answer.
    except Exception as error:
        return NodeAnswer(node, problem=last_line(error))


# The functions below run on the nodes.


def describe_node() -> NodeInfo:
    """Describe the node of this process."""
    memory, free_memory = _memory()
    return NodeInfo(versions=versions(), memory=memory, free_memory=free_memory)


def versions() -> dict[str, str]:
    """Return versions by package; raycl's has a fingerprint of the source, since jobs may ship their own."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["raycl"] += f" ({code_hash()[:8]})"
    return found


def _memory() -> tuple[float, float]:
    """Return total and free memory in bytes, within the container's limit; infinite on systems without /proc."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf"), float("inf")
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    total, free = kib["MemTotal"] * 1024.0, kib["MemAvailable"] * 1024.0
    container = Path("/sys/fs/cgroup")
    try:
        limit = float((container / "memory.max").read_text())  # "max" without a limit
        used = float((container / "memory.current").read_text())
        of_kind = dict(line.split() for line in (container / "memory.stat").read_text().splitlines())
        # The cache of files is freed when processes need the memory; Ray does not count it either.
        cached = float(of_kind["inactive_file"]) + float(of_kind["active_file"])
    except (OSError, ValueError, KeyError):
        return total, free
    return min(total, limit), min(free, limit - used + cached)


def gpu_memory() -> list[tuple[str, float]]:
    """Return name and memory in bytes of the GPUs that torch sees in this process."""
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    if found:  # torch counts GPUs even if CUDA itself fails to start
        torch.zeros(1, device="cuda").item()
    return [(each.name, float(each.total_memory)) for each in found]


def reachable_ports(ports: Sequence[int]) -> list[int]:
    """Return the ports of this machine that answer at its network address, not only on loopback."""
    address = network_address()
    return [port for port in ports if address is not None and _answers(address, port)]


def network_address() -> str | None:
    """Return the address that this machine sends from, without sending; None without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # reserved for documentation
            address = probe.getsockname()[0]
        except OSError:
            return None
    return None if address.startswith("127.") else address


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=10.0).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True  # only a refusal proves that the port is closed
    return True


def random_bytes(num_bytes: int) -> np.ndarray:
    """Return bytes that cannot be compressed."""
    return np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)


def fetch_seconds(boxes: list[Any], timeout_s: float) -> float:
    """Fetch an object from another node's object store; return the seconds that it took."""
    started = time.perf_counter()
    ray.get(boxes[0], timeout=timeout_s)
    return time.perf_counter() - started


def process_memory() -> float:
    """Return the memory of this process alone, in bytes; 0 on systems without /proc."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0.0
    return 1024.0 * sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
