"""The nodes of a cluster, and one question put to all of them, which none can hold up."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

PATIENCE_S = 60.0  # a process of Ray's may take ten seconds to start on a busy node

Value = TypeVar("Value")


@final
@dataclass(frozen=True, kw_only=True)
class Node:
    """A node as Ray counts it; memory and object store in bytes."""

    node_id: str
    name: str
    is_head: bool
    num_cpus: float
    num_gpus: float
    object_store: float


@final
@dataclass(frozen=True)
class Answer(Generic[Value]):
    """What a node answered, or why it did not."""

    node: Node
    value: Value | None = None
    problem: str = ""

    @property
    def came(self) -> bool:
        """Whether there is a value."""
        return not self.problem


def alive_nodes() -> tuple[Node, ...]:
    """Return the nodes that are alive, the head first; a name that several share gets the id's beginning."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    shared = Counter(node["NodeManagerHostname"] for node in alive)
    nodes = [_described(node, shared) for node in alive]
    return tuple(sorted(nodes, key=lambda node: (not node.is_head, node.name)))


def ask(
    nodes: Iterable[Node],
    question: Callable[..., Value],
    *arguments: Any,
    of_each: Mapping[str, Sequence[Any]] | None = None,
    num_gpus: float = 0,
    timeout_s: float = PATIENCE_S,
) -> list[Answer[Value]]:
    """Put a question to each node, in a task that takes no CPU there; wait no longer than ``timeout_s``.

    ``of_each`` holds further arguments by the id of a node.
    """
    pending = {}
    for node in nodes:
        task = ray.remote(question).options(
            num_cpus=0,
            num_gpus=num_gpus,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        )
        further = (of_each or {}).get(node.node_id, ())
        pending[task.remote(*arguments, *further)] = node  # pyright: ignore[reportCallIssue]
    ray.wait(list(pending), num_returns=len(pending), timeout=timeout_s) if pending else None
    return [_answer(ref, node, timeout_s) for ref, node in pending.items()]


def describe_problems(answers: Iterable[Answer[Any]]) -> str:
    """Return what kept nodes from answering, in one line."""
    return "; ".join(f"{answer.node.name}: {answer.problem}" for answer in answers if not answer.came)


def why(error: BaseException) -> str:
    """Return the last line of an error that came from another process."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _answer(ref: Any, node: Node, timeout_s: float) -> Answer[Any]:
    try:
        return Answer(node, ray.get(ref, timeout=0))
    except exceptions.GetTimeoutError:
        # It is left alone, and ends with this process at the latest: to cancel a task that is done at that
        # very moment ends this process (Ray 2.60).
        return Answer(node, problem=f"no answer within {timeout_s:g} s")
    # Whatever went wrong there, the other nodes are asked all the same.
    except Exception as error:
        return Answer(node, problem=why(error))


def _described(node: dict[str, Any], shared: Counter[str]) -> Node:
    name, resources = node["NodeManagerHostname"], node["Resources"]
    return Node(
        node_id=node["NodeID"],
        name=name if shared[name] == 1 else f"{name}/{node['NodeID'][:6]}",
        is_head="node:__internal_head__" in resources,
        num_cpus=resources.get("CPU", 0.0),
        num_gpus=resources.get("GPU", 0.0),
        object_store=resources.get("object_store_memory", 0.0),
    )
