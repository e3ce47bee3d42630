"""The nodes of a bank's shards: which ones are for a bank, and which shards lose theirs soon."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray._private import state as ray_state

from raycl.negatives.spec import BankSpec

# Rows, ids and steps, and the memory of a call.
_MEMORY_MARGIN = 1.15

# Where nodes have roles (see cluster.yaml), a bank belongs on nodes that stay.
ROLE, ROLES = "raycl.io/role", ("memory", "head")


class ShardAtRisk(NamedTuple):
    """A shard whose node is drained: the node will be removed."""

    shard: int
    node_id: str
    has_room: bool  # on another node


def nodes_for_a_bank() -> list[dict[str, Any]]:
    """Return the living nodes that are labeled for a bank; all nodes if none has a role."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if not any(ROLE in node["Labels"] for node in nodes):
        return nodes
    return [node for node in nodes if node["Labels"].get(ROLE) in ROLES]


def reserved_memory(spec: BankSpec) -> list[int]:
    """Return the memory that each shard reserves on its node, in bytes."""
    return [int(_MEMORY_MARGIN * spec.bytes_of(shard)) + 1 for shard in range(spec.num_shards)]


def draining_nodes() -> set[str]:
    """Return the ids of the nodes whose removal was announced to Ray."""
    # Ray's public API does not list them.
    return set(ray_state.state.get_draining_nodes())


def free_memory() -> dict[str, float]:
    """Return the bytes of memory that nothing reserves on each node for a bank, by the node's id."""
    available = ray_state.available_resources_per_node()
    ids = [node["NodeID"] for node in nodes_for_a_bank()]
    return {each: float(available.get(each, {}).get("memory", 0.0)) for each in ids}


def shards_at_risk(
    nodes: Sequence[str], memory: Sequence[float], draining: Collection[str], free: Mapping[str, float]
) -> list[ShardAtRisk]:
    """Return the shards whose node is drained, each with whether another node has room for it beside those before.

    Args:
        nodes: The node of each shard.
        memory: The bytes that each shard reserves.
        draining: The nodes that are drained.
        free: The free bytes of the nodes for a bank; those that are drained do not count.
    """
    left = {node: num_bytes for node, num_bytes in free.items() if node not in draining}
    found: list[ShardAtRisk] = []
    for shard, node in enumerate(nodes):
        if node not in draining:
            continue
        emptiest = max(left, key=left.__getitem__, default=None)
        has_room = emptiest is not None and left[emptiest] >= memory[shard]
        if emptiest is not None and has_room:
            left[emptiest] -= memory[shard]
        found.append(ShardAtRisk(shard, node, has_room))
    return found
