"""Cut a network where BatchNorm needs the whole batch: segments that all chunks run in turn."""

from dataclasses import dataclass
from typing import final

from torch import nn
from torch.fx import Node

from raycl.gradient_cache.chunked_batchnorm.trace import TracedNetwork


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Operations that a chunk runs without waiting for the others."""

    index: int
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]  # values of earlier segments
    outputs: tuple[Node, ...]  # values that are read later, or measured
    measured: tuple[Node, ...]  # values made here of which a BatchNorm takes statistics
    freed_after: dict[Node, tuple[Node, ...]]  # by operation: the values with no later reader in this segment


@final
class Network:
    """A tower in its present modes, as segments.

    A BatchNorm is the start of the segment that reads it first, and is computed there from its input:
    the input waits in memory, never the output. Segments are also cut where all values that cross an
    operation wait anyway, such as the end of a residual block: that costs nothing.

    Raises:
        ConfigError: The tower cannot be traced, see :class:`~raycl.gradient_cache.chunked_batchnorm.trace.TracedNetwork`.
    """

    def __init__(self, tower: nn.Module) -> None:
        self.trace = TracedNetwork(tower)
        self._order = _in_order(self.trace)
        self._position = {node: number for number, node in enumerate(self._order)}
        self._last_read = {node: self._find_last_read(node) for node in self._order}
        self._crossing = [self._find_crossing(position) for position in range(len(self._order))]
        self._cuts = self._find_cuts()
        self.segments = [self._segment(index) for index in range(len(self._cuts) - 1)]
        self._readers = {node: self._find_readers(node) for node in self._order}

    def milestones(self, every: int | None) -> list[int]:
        """Return the first segment and each ``every``-th into which a single value leads, or all."""
        later = range(1, len(self.segments))
        if every is None:
            return [0, *later]
        return [0, *[index for index in later if len(self.crossing(index)) == 1][every - 1 :: every]]

    def crossing(self, index: int) -> set[Node]:
        """Return the values made before a segment that it or later ones read."""
        return self._crossing[self._cuts[index]]

    def is_read_before(self, node: Node, segment: Segment) -> bool:
        """Return whether earlier segments read a value."""
        return min(self._readers[node], default=segment.index) < segment.index

    def is_read_after(self, node: Node, segment: Segment) -> bool:
        """Return whether later segments read a value, or it is the result."""
        return max(self._readers[node], default=segment.index) > segment.index

    def differentiable(self) -> set[Node]:
        """Return the values that depend on a parameter that requires a gradient."""
        parameters = dict(self.trace.tower.named_parameters(remove_duplicate=False))
        differentiable: set[Node] = set()
        for node in self.trace.graph.nodes:
            module = self.trace.modules.get(node)
            own = list(module.parameters()) if module else []
            if node.op == "get_attr" and node.target in parameters:
                own = [parameters[node.target]]
            if any(each.requires_grad for each in own) or differentiable.intersection(node.all_input_nodes):
                differentiable.add(node)
        return differentiable

    def _find_last_read(self, node: Node) -> int:
        if node is self.trace.result:
            return len(self._order)
        # A BatchNorm without readers has no position; its input is measured anyway.
        return max((self._position[user] for user in node.users if user in self._position), default=-1)

    def _find_crossing(self, position: int) -> set[Node]:
        return {node for node in self._order[:position] if self._last_read[node] >= position}

    def _find_cuts(self) -> list[int]:
        last = len(self._order)
        needed = [0]
        for position, node in enumerate(self._order):
            if node in self.trace.layers and self._position[node.all_input_nodes[0]] >= needed[-1]:
                needed.append(position)
        waiting = set[Node]().union(*(self._crossing[position] for position in needed))
        free = [position for position in range(1, last) if self._crossing[position] <= waiting]
        return [*sorted({*needed, *free}), last]

    def _segment(self, index: int) -> Segment:
        start, end = self._cuts[index], self._cuts[index + 1]
        made = self._order[start:end]
        nodes = [node for node in made if node is not self.trace.rows]
        read = dict.fromkeys(each for node in nodes for each in _values_read(node))
        measured = {each.all_input_nodes[0] for each in self.trace.layers}
        outputs = [node for node in nodes if self._last_read[node] >= end or node in measured]
        return Segment(
            index=index,
            nodes=tuple(nodes),
            inputs=tuple(node for node in read if node not in nodes),
            outputs=tuple(outputs),
            measured=tuple(node for node in made if node in measured),
            freed_after=_freed_after(nodes, kept=set(outputs)),
        )

    def _find_readers(self, node: Node) -> list[int]:
        """Return the segments that read a value, in order; the result is read after the last one."""
        readers = [segment.index for segment in self.segments if node in segment.inputs]
        return [*readers, len(self.segments)] if node is self.trace.result else readers


def _values_read(node: Node) -> list[Node]:
    # Parameters and buffers are available everywhere.
    return [each for each in node.all_input_nodes if each.op != "get_attr"]


def _in_order(trace: TracedNetwork) -> list[Node]:
    """Return all computed values, each BatchNorm right before the first operation that reads it."""
    order: dict[Node, None] = {}

    def place(node: Node) -> None:
        for each in _values_read(node):
            if each in trace.layers and each not in order:
                place(each)
        order[node] = None

    for node in trace.graph.nodes:
        if node.op != "get_attr" and node not in trace.layers:
            place(node)
    del order[trace.graph.output_node()]
    return list(order)


def _freed_after(nodes: list[Node], *, kept: set[Node]) -> dict[Node, tuple[Node, ...]]:
    last: dict[Node, Node] = {node: node for node in nodes}  # a value without readers is freed at once
    last |= {each: node for node in nodes for each in _values_read(node)}
    freed_after: dict[Node, list[Node]] = {node: [] for node in nodes}
    for value, node in last.items():
        if value not in kept:
            freed_after[node].append(value)
    return {node: tuple(values) for node, values in freed_after.items()}
