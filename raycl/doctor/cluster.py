"""The cluster: versions equal on all nodes, CPUs now or to come, object store, GPUs as torch sees them."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ray._private import state
from ray._private.worker import global_worker
from ray.core.generated import autoscaler_pb2

from raycl.doctor.machine import Machine, versions
from raycl.doctor.nodes import Answer, Node, ask, describe_problems
from raycl.doctor.result import CheckResult, size

LEAST_STORE = 2**28  # 0.25 GiB
GROW = "--set autoscaling=true"
_WATCHED = re.compile(r"node_[0-9a-f]*")  # the kind of a node that nobody gave a kind


def examine_versions(answers: Sequence[Answer[Machine]]) -> CheckResult:
    """Compare the versions of all nodes with those here."""
    here = versions()
    seen = ", ".join(f"{name} {number}" for name, number in here.items())
    differing = [difference for answer in answers if (difference := _difference(answer, here))]
    if silent := describe_problems(answers):
        return CheckResult(
            good=False,
            name="versions",
            seen=f"{seen}; not every node answers: {silent}",
            remedy="install raycl on all nodes, and look at `ray status` and the logs of those",
        )
    if differing:
        return CheckResult(
            good=False,
            name="versions",
            seen=f"here {seen}; {'; '.join(differing)}",
            remedy="install the same versions on all nodes and here",
        )
    return CheckResult(good=True, name="versions", seen=f"{seen}, on {_count(len(answers), 'node')}")


def examine_size(nodes: Sequence[Node]) -> CheckResult:
    """Count nodes, CPUs and GPUs; none now are well if an autoscaler brings some."""
    num_cpus, num_gpus = (sum(getattr(node, name) for node in nodes) for name in ("num_cpus", "num_gpus"))
    seen = f"{_count(len(nodes), 'node')}, {num_cpus:g} CPUs, {num_gpus:g} GPUs"
    grows = can_grow()
    if num_cpus >= 1:
        return CheckResult(
            good=True, name="cluster", seen=seen + (", and more when a run asks" if grows else "")
        )
    if grows:
        return CheckResult(good=True, name="cluster", seen=f"{seen} now; nodes come when a run asks ({GROW})")
    unknown = "whether an autoscaler is there cannot be told" if grows is None else "no autoscaler is seen"
    return CheckResult(
        good=False,
        name="cluster",
        seen=f"{seen}; {unknown}",
        remedy=f"add a node with a CPU, or look whether the autoscaler runs (`ray status`) and use {GROW}",
    )


def examine_object_store(nodes: Sequence[Node]) -> CheckResult:
    """Look at the smallest object store: samples are held in that of each node that trains or reads."""
    least = min(nodes, key=lambda node: node.object_store)
    good = least.object_store >= LEAST_STORE
    seen = size(sum(node.object_store for node in nodes))
    if len(nodes) > 1:
        seen += f" in all, at least {size(least.object_store)} on a node ({least.name})"
    remedy = f"give Ray on {least.name} more (ray start --object-store-memory, at least {size(LEAST_STORE)})"
    return CheckResult(good=good, name="object store", seen=seen, remedy="" if good else remedy)


def examine_gpus(nodes: Sequence[Node]) -> Iterator[CheckResult]:
    """Compare Ray's count of GPUs on each node with what torch sees there, in a task that asks for them."""
    with_gpus = [node for node in nodes if node.num_gpus >= 1]
    if not with_gpus:
        yield CheckResult(
            good=True, name="GPUs", seen="none now; runs use the CPU unless a node comes with one"
        )
    for node in with_gpus:
        yield _examine_gpus_of(node)


def gpu_memory() -> list[tuple[str, float]]:
    """Return name and memory in bytes of the GPUs that torch sees in this process."""
    import torch

    # A count may be read where CUDA itself does not start.
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    if found:
        torch.zeros(1, device="cuda").item()
    return [(each.name, float(each.total_memory)) for each in found]


def free_gpus(node: Node) -> int:
    """Return how many of a node's GPUs no one uses, as Ray counts them."""
    return int(state.available_resources_per_node().get(node.node_id, {}).get("GPU", 0))


def can_grow() -> bool | None:
    """Whether an autoscaler brings nodes; None if Ray does not tell.

    Ray runs the autoscaler's process on every head and lets it only watch where it was given no kinds of
    nodes to start. It names the kind of those it may start: an own name for each node is one it watches.
    """
    worker: Any = global_worker
    client = worker.gcs_client
    try:
        kinds = _kinds_of_first_version(client) | _kinds_of_second_version(client)
    # Both are Ray's own notes, which it may write otherwise one day.
    except Exception:
        return None
    return None if not kinds else not all(map(_WATCHED.fullmatch, kinds))


def _kinds_of_first_version(client: Any) -> set[str]:
    written = client.internal_kv_get(b"__autoscaling_status", None, timeout=10)
    report = (json.loads(written) if written else {}).get("autoscaler_report") or {}
    return set(report.get("active_nodes") or ())


def _kinds_of_second_version(client: Any) -> set[str]:
    reply: Any = autoscaler_pb2.GetClusterStatusReply()  # pyright: ignore[reportAttributeAccessIssue]
    reply.ParseFromString(client.get_cluster_status(timeout_s=10))
    if not reply.autoscaling_state.autoscaler_state_version:
        return set()
    # Where it only watches, nodes have no kind.
    return {node.ray_node_type_name or "node_" for node in reply.cluster_resource_state.node_states}


def _examine_gpus_of(node: Node) -> CheckResult:
    name, num_free = f"GPUs of {node.name}", free_gpus(node)
    if not num_free:
        return CheckResult(good=True, name=name, seen=f"{node.num_gpus:g}, all in use now, so not looked at")
    (answer,) = ask([node], gpu_memory, num_gpus=num_free)
    if answer.value is None:
        return CheckResult(
            good=False, name=name, seen=f"Ray counts {node.num_gpus:g}; {answer.problem}", remedy=_MEND_GPUS
        )
    kinds = ", ".join(f"{kind} {size(memory)}" for kind, memory in answer.value)
    seen = f"Ray counts {num_free} free of {node.num_gpus:g}, torch sees {len(answer.value)}"
    good = len(answer.value) == num_free
    return CheckResult(
        good=good,
        name=name,
        seen=f"{seen} ({kinds})" if kinds else seen,
        remedy="" if good else _MEND_GPUS,
    )


_MEND_GPUS = "install NVIDIA's driver and a torch with CUDA there, or start Ray with the right --num-gpus (see `nvidia-smi`)"


def _difference(answer: Answer[Machine], here: dict[str, str]) -> str:
    if answer.value is None:
        return ""
    there = answer.value.versions
    others = [f"{name} {there.get(name)}" for name in here if there.get(name) != here[name]]
    return f"{answer.node.name} has {', '.join(others)}" if others else ""


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
