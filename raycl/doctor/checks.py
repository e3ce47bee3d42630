"""Checks of the cluster: versions, size, object store, GPUs, access and network."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray import exceptions
from ray._private import state, worker
from ray.core.generated import autoscaler_pb2

from raycl.display import format_bytes
from raycl.doctor.nodes import (
    TIMEOUT_S,
    Node,
    NodeAnswer,
    NodeInfo,
    ask_nodes,
    fetch_seconds,
    gpu_memory,
    on_node,
    random_bytes,
    reachable_ports,
    versions,
)
from raycl.doctor.result import CheckResult, failed, passed, passed_if
from raycl.errors import last_line

AUTOSCALING = "--set autoscaling=true"
MIN_OBJECT_STORE = 2**28
MIN_BYTES_PER_S = 30e6  # 240 Mbit/s
_TRANSFER_BYTES = 64 * 2**20
_MAX_TRANSFERS = 8
_UNTYPED_NODE = re.compile(r"node_[0-9a-f]*")  # Ray's type of a node that was started by hand
_LOOPBACK = ("127.", "localhost", "[::1]")
_FIX_GPUS = "install NVIDIA's driver and a torch with CUDA there, or start Ray with the right --num-gpus (see `nvidia-smi`)"
_FIX_ACCESS = (
    "set RAY_AUTH_MODE=token on all nodes before Ray starts (`ray get-auth-token --generate`), and here"
)
# Ray reads its authentication mode once per process, so the call without a token needs its own process.
_CALL_WITHOUT_TOKEN = """
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=10)
"""


def check_versions(answers: Sequence[NodeAnswer[NodeInfo]]) -> CheckResult:
    """Compare the versions of all nodes with the versions on this machine."""
    here = versions()
    seen = ", ".join(f"{name} {number}" for name, number in here.items())
    if silent := "; ".join(f"{answer.node.name}: {answer.problem}" for answer in answers if answer.problem):
        remedy = "install raycl on all nodes, and look at `ray status` and the logs of the silent ones"
        return failed("versions", f"{seen}; not every node answers: {silent}", remedy)
    differences = []
    for answer in answers:
        there = answer.value.versions if answer.value else here
        if others := [f"{name} {there.get(name)}" for name in here if there.get(name) != here[name]]:
            differences.append(f"{answer.node.name} has {', '.join(others)}")
    if differences:
        remedy = "install the same versions on all nodes and here"
        return failed("versions", f"here {seen}; {'; '.join(differences)}", remedy)
    return passed("versions", f"{seen}, on {_count_nodes(answers)}")


def check_size(nodes: Sequence[Node]) -> CheckResult:
    """Count nodes, CPUs and GPUs; a cluster without CPUs passes if it has an autoscaler."""
    num_cpus, num_gpus = sum(node.num_cpus for node in nodes), sum(node.num_gpus for node in nodes)
    seen = f"{_count_nodes(nodes)}, {num_cpus:g} CPUs, {num_gpus:g} GPUs"
    grows = has_autoscaler()
    if num_cpus >= 1:
        return passed("cluster", seen + (", and more when a run asks" if grows else ""))
    if grows:
        return passed("cluster", f"{seen} now; nodes come when a run asks ({AUTOSCALING})")
    unknown = "Ray does not report whether it has an autoscaler" if grows is None else "no autoscaler is seen"
    remedy = f"add a node with a CPU, or check that the autoscaler runs (`ray status`) and use {AUTOSCALING}"
    return failed("cluster", f"{seen}; {unknown}", remedy)


def has_autoscaler() -> bool | None:
    """Return whether an autoscaler can add nodes; None if Ray does not report it.

    Ray runs an autoscaler on every head; without node types to start, it only monitors. It reports the type
    of each node that it may start, and a generated name for every other node.
    """
    ray_worker: Any = worker.global_worker
    try:
        client = ray_worker.gcs_client
        node_types = _node_types_v1(client) | _node_types_v2(client)
    # Both reports are internal to Ray and may change with its version.
    except Exception:
        return None
    return None if not node_types else not all(map(_UNTYPED_NODE.fullmatch, node_types))


def _node_types_v1(client: Any) -> set[str]:
    status = client.internal_kv_get(b"__autoscaling_status", None, timeout=10)
    report = (json.loads(status) if status else {}).get("autoscaler_report") or {}
    return set(report.get("active_nodes") or ())


def _node_types_v2(client: Any) -> set[str]:
    reply: Any = autoscaler_pb2.GetClusterStatusReply()  # pyright: ignore[reportAttributeAccessIssue]
    reply.ParseFromString(client.get_cluster_status(timeout_s=10))
    if not reply.autoscaling_state.autoscaler_state_version:
        return set()
    # Nodes have no type where the autoscaler only monitors.
    return {node.ray_node_type_name or "node_" for node in reply.cluster_resource_state.node_states}


def check_object_store(nodes: Sequence[Node]) -> CheckResult:
    """Check the smallest object store: each node that trains or reads keeps samples in its own."""
    smallest = min(nodes, key=lambda node: node.object_store)
    seen = format_bytes(sum(node.object_store for node in nodes))
    if len(nodes) > 1:
        seen += f" in all, at least {format_bytes(smallest.object_store)} on a node ({smallest.name})"
    minimum = format_bytes(MIN_OBJECT_STORE)
    remedy = f"give Ray on {smallest.name} more (ray start --object-store-memory, at least {minimum})"
    return passed_if(smallest.object_store >= MIN_OBJECT_STORE, "object store", seen, remedy)


def check_gpus(nodes: Sequence[Node]) -> Iterator[CheckResult]:
    """Compare Ray's count of GPUs on each node with torch's, in a task that asks for the free ones."""
    resources, by_num_free = state.available_resources_per_node(), dict[int, list[Node]]()
    for node in nodes:
        if node.num_gpus >= 1:
            num_free = int(resources.get(node.node_id, {}).get("GPU", 0))
            by_num_free.setdefault(num_free, []).append(node)
    if not by_num_free:
        yield passed("GPUs", "none now; runs use the CPU unless a node comes with one")
    for node in by_num_free.pop(0, []):
        yield passed(f"GPUs of {node.name}", f"{node.num_gpus:g}, all in use now, so not checked")
    for num_free, some in by_num_free.items():
        for answer in ask_nodes(some, gpu_memory, num_gpus=num_free):
            yield _check_gpus_of(answer, num_free)


def _check_gpus_of(answer: NodeAnswer[list[tuple[str, float]]], num_free: int) -> CheckResult:
    name = f"GPUs of {answer.node.name}"
    if answer.value is None:
        return failed(name, f"Ray counts {answer.node.num_gpus:g}; {answer.problem}", _FIX_GPUS)
    models = ", ".join(f"{model} {format_bytes(memory)}" for model, memory in answer.value)
    seen = f"Ray counts {num_free} free of {answer.node.num_gpus:g}, torch sees {len(answer.value)}"
    seen += f" ({models})" if models else ""
    return passed_if(len(answer.value) == num_free, name, seen, _FIX_GPUS)


def check_access(nodes: Sequence[Node]) -> CheckResult:
    """Call Ray without a token; if it answers, check whether other machines can reach it."""
    address = ray.get_runtime_context().gcs_address
    is_refused = refuses_calls_without_token(address)
    if is_refused is None:
        seen = f"{address} neither answers nor refuses a call without a token"
        return failed("access", seen, "check that the head is well (`ray status`)")
    if is_refused:
        return passed("access", "Ray refuses calls without its token")
    exposed = _exposed_services(address, nodes)
    if not exposed:
        return passed("access", "no token is asked for, on this machine's loopback only")
    seen = f"no token is asked for, and other machines reach {' and '.join(exposed)}: they can run code on the cluster"
    return failed("access", seen, _FIX_ACCESS)


def refuses_calls_without_token(address: str) -> bool | None:
    """Return whether Ray refuses a call without a token; None if it neither answers nor refuses."""
    without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    try:
        call = subprocess.run(
            [sys.executable, "-c", _CALL_WITHOUT_TOKEN, address],
            env=without | {"RAY_AUTH_MODE": "disabled"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    if call.returncode == 0:
        return False
    return True if "InvalidAuthToken" in call.stderr or "Unauthenticated" in call.stderr else None


def _exposed_services(address: str, nodes: Sequence[Node]) -> list[str]:
    """Return the services of Ray's head that other machines can reach."""
    dashboard = getattr(worker._global_node, "webui_url", None)
    services = {_port(address): "its head", _port(dashboard): "its dashboard"}
    ports = [port for port in services if port]
    head = [node for node in nodes if node.is_head]
    reached = {port for answer in ask_nodes(head, reachable_ports, ports) for port in answer.value or ()}
    # Other machines use any address that is not loopback, even if the head cannot confirm it.
    reached |= {_port(each) for each in (address, dashboard) if each and not each.startswith(_LOOPBACK)}
    return [f"{services[port]} (port {port})" for port in sorted(reached & services.keys()) if port]


def _port(address: str | None) -> int:
    port = (address or "").rpartition(":")[2]
    return int(port) if port.isdigit() else 0


def check_network(nodes: Sequence[Node], gradient_bytes: float = 0.0) -> CheckResult:
    """Send bytes from each node to the next; estimate the gradients' time at the slowest rate."""
    if len(nodes) < 2:
        return passed("network", "one node" if nodes else "not checked, since no node answers")
    rates: dict[str, float] = {}
    for source, target in list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))[:_MAX_TRANSFERS]:
        route = f"from {source.name} to {target.name}"
        try:
            rates[route] = _bytes_per_s(source, target)
        # Any error means that these two nodes do not reach each other.
        except Exception as error:
            late = isinstance(error, exceptions.GetTimeoutError)
            seen = f"{route}: " + (f"nothing came within {TIMEOUT_S:g} s" if late else last_line(error))
            remedy = (
                "open all ports between the nodes of the cluster to each other (security group, firewall)"
            )
            return failed("network", seen, remedy)
    slowest = min(rates, key=lambda route: rates[route])
    seen = f"{rates[slowest] / 1e6:,.0f} MB/s {slowest}"
    seen += f", the slowest of {len(rates)} ways" if len(rates) > 1 else ""
    if gradient_bytes:
        # An all-reduce sends and receives the gradients about twice per worker, whatever the number of workers.
        seconds = 2 * gradient_bytes / rates[slowest]
        seen += f"; a step's gradients would take about {seconds:.2g} s between nodes"
    remedy = "put the nodes into one zone, or use ones with more bandwidth"
    return passed_if(rates[slowest] >= MIN_BYTES_PER_S, "network", seen, remedy)


def _bytes_per_s(source: Node, target: Node) -> float:
    num_bytes = int(min(_TRANSFER_BYTES, source.object_store / 4, target.object_store / 4))
    seconds = 0.0
    # The first transfer opens the connection. Smaller results would bypass the object store.
    for size in (200_000, num_bytes):
        task: Any = ray.remote(num_cpus=0, max_retries=0)(random_bytes)
        box = task.options(scheduling_strategy=on_node(source)).remote(size)
        ready, _ = ray.wait([box], timeout=TIMEOUT_S, fetch_local=False)
        if not ready:
            raise TimeoutError(f"{source.name} does not answer")
        (answer,) = ask_nodes([target], fetch_seconds, [box], TIMEOUT_S)
        if answer.value is None:
            raise TimeoutError(answer.problem)
        seconds = answer.value
    return num_bytes / max(seconds, 1e-6)


def _count_nodes(nodes: Sequence[object]) -> str:
    return f"{len(nodes):,} node{'' if len(nodes) == 1 else 's'}"
