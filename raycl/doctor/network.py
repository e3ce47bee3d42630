"""The network between nodes: how fast Ray's object store moves bytes from one to the next."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycl.doctor.nodes import Node, ask, why
from raycl.doctor.result import CheckResult

NUM_BYTES = 64 * 2**20
MAX_PAIRS = 8
SLOW = 30e6  # bytes a second: 240 Mbit/s
_PATIENCE_S = 60.0


def examine_network(nodes: Sequence[Node], gradient_bytes: float = 0.0) -> CheckResult:
    """Move bytes from each node to the next; say what a step's gradients would take at the slowest rate."""
    if len(nodes) == 1:
        return CheckResult(good=True, name="network", seen="one node")
    pairs = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))[:MAX_PAIRS]
    rates: dict[str, float] = {}
    for source, target in pairs:
        between = f"from {source.name} to {target.name}"
        try:
            rates[between] = _bytes_per_s(source, target)
        # Whatever Ray raises: that these two do not reach each other is the finding.
        except Exception as error:
            return CheckResult(
                good=False,
                name="network",
                seen=f"{between}: {_said(error)}",
                remedy="open all ports between the nodes of the cluster to each other (security group, firewall)",
            )
    slowest = min(rates, key=lambda between: rates[between])
    seen = f"{rates[slowest] / 1e6:,.0f} MB/s {slowest}" + (
        f", the slowest of {len(rates)} ways" if len(rates) > 1 else ""
    )
    if gradient_bytes:
        # Each worker sends and receives its gradients about twice, whatever the number of workers.
        seen += (
            f"; a step's gradients would take about {2 * gradient_bytes / rates[slowest]:.2g} s between nodes"
        )
    good = rates[slowest] >= SLOW
    remedy = "put the nodes into one zone, or use ones with more bandwidth"
    return CheckResult(good=good, name="network", seen=seen, remedy="" if good else remedy)


def produce(num_bytes: int) -> np.ndarray:
    """Return bytes that no compression shortens."""
    return np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)


def fetch(boxes: list[Any]) -> float:
    """Fetch what lies in another node's object store; return the seconds that it took."""
    started = time.perf_counter()
    ray.get(boxes[0], timeout=_PATIENCE_S)
    return time.perf_counter() - started


def _bytes_per_s(source: Node, target: Node) -> float:
    num_bytes = int(min(NUM_BYTES, source.object_store / 4, target.object_store / 4))
    seconds = 0.0
    for amount in (1_000, num_bytes):  # the first one opens the connection
        box: Any = (
            ray.remote(num_cpus=0, max_retries=0)(produce)
            .options(scheduling_strategy=NodeAffinitySchedulingStrategy(source.node_id, soft=False))
            .remote(max(amount, 200_000))
        )  # below, results travel with the answer and not by the store
        ready, _ = ray.wait([box], timeout=_PATIENCE_S, fetch_local=False)
        if not ready:
            raise TimeoutError(f"{source.name} does not answer")
        (answer,) = ask([target], fetch, [box], timeout_s=_PATIENCE_S)
        if answer.value is None:
            raise TimeoutError(answer.problem)
        seconds = answer.value
    return num_bytes / max(seconds, 1e-6)


def _said(error: BaseException) -> str:
    return (
        f"nothing came within {_PATIENCE_S:g} s"
        if isinstance(error, exceptions.GetTimeoutError)
        else why(error)
    )
