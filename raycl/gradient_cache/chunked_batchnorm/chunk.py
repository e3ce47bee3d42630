"""One chunk of rows: its forward and backward pass through the segments of a network."""

import contextlib
from collections.abc import Callable, Collection, Iterable
from functools import partial, reduce
from operator import attrgetter
from typing import Any, final

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from raycl.batchnorm.kernels import Moments, gradient_at_input, normalize, scale_of
from raycl.errors import ConfigError
from raycl.gradient_cache.chunked_batchnorm.segments import Network, Segment
from raycl.gradient_cache.chunked_batchnorm.trace import WAYS_OUT, TracedNetwork
from raycl.gradient_cache.recompute import RandomState, RecomputeCheck, sample

Values = dict[Node, Any]


@final
class Statistics:
    """Statistics of the whole batch: each BatchNorm's moments, and its sums in the backward pass."""

    def __init__(self) -> None:
        self.moments: dict[Node, Moments] = {}  # by the value that is measured
        self.sums: dict[Node, Tensor] = {}  # by the call of the layer


@final
class Chunk:
    """Some rows, their values that wait for later segments, and gradients that wait for earlier ones."""

    def __init__(self, network: Network, rows: Tensor, statistics: Statistics) -> None:
        self._network = network
        self._statistics = statistics
        self._device = rows.device
        self._random_states: dict[int, RandomState] = {}
        self._samples: dict[Node, Tensor] = {}
        self._recorded: dict[Node, tuple[Tensor, Tensor]] = {}
        self._gradients: dict[Node, Tensor] = {}
        self.values: Values = {network.trace.rows: rows}

    @torch.no_grad()
    def advance(self, segment: Segment) -> None:
        """Run a segment without a graph, and keep its outputs."""
        before = RandomState(self._device)
        outputs = self._run(segment, {node: self.values[node] for node in segment.inputs})
        self._samples |= {node: sample(value) for node, value in outputs.items() if _has_rows(value)}
        self.values |= outputs
        if before != RandomState(self._device):
            self._random_states[segment.index] = before

    @torch.no_grad()
    def recompute(self, segment: Segment) -> None:
        """Run a segment again, for the values that were freed."""
        with self._random_state(segment):
            outputs = self._run(segment, {node: self.values[node] for node in segment.inputs})
        self.values = outputs | self.values

    def add_gradient(self, node: Node, gradient: Tensor) -> None:
        """Add to the gradient at a value."""
        present = self._gradients.get(node)
        self._gradients[node] = gradient if present is None else present + gradient

    @torch.enable_grad()
    def backward(
        self, segment: Segment, differentiable: set[Node], check: RecomputeCheck
    ) -> dict[Node, Tensor]:
        """Run a segment again with a graph, and backpropagate through it.

        Parameters receive their gradients, and so do the inputs of the segment. ``check`` receives
        samples of both forward passes. Returns the sums of the segment's BatchNorms, [2, channels] by call.
        """
        inputs = {node: _leaf(self.values[node], node in differentiable) for node in segment.inputs}
        with self._random_state(segment):
            outputs = self._run(segment, inputs, differentiable)
        for node in self._samples.keys() & outputs.keys():
            check.add(sample(outputs[node]), self._samples.pop(node), partial(_describe, segment))
        gradients = {node: self._take_gradient(node, value) for node, value in outputs.items()}
        heads = [node for node, gradient in gradients.items() if gradient is not None]
        if heads:
            torch.autograd.backward([outputs[node] for node in heads], [gradients[node] for node in heads])
        for node, leaf in inputs.items():
            if isinstance(leaf, Tensor) and leaf is not self.values[node] and leaf.grad is not None:
                self.add_gradient(node, leaf.grad)
        return {node: self._recorded[node][1] for node in segment.nodes if node in self._recorded}

    def free(self, nodes: Iterable[Node]) -> None:
        """Free values."""
        for node in nodes:
            del self.values[node]

    def _run(self, segment: Segment, inputs: Values, differentiable: set[Node] | None = None) -> Values:
        normalize_call = partial(self._normalize, differentiable or set())
        return _run_segment(self._network, segment, self.values, inputs, normalize_call)

    def _normalize(self, differentiable: set[Node], node: Node, x: Tensor) -> Tensor:
        """Normalize by the moments of the whole batch.

        The gradient at ``x`` depends on all chunks, so autograd gets none: ``_take_gradient`` computes it once the sums of
        all chunks are known.
        """
        source = node.all_input_nodes[0]

        def record(
            grad: Tensor, x: Tensor, scale: Tensor, moments: Moments, sums: Tensor, eps: float
        ) -> None:
            self._recorded[node] = grad, sums

        layer, moments = self._network.trace.layers[node], self._statistics.moments[source]
        return normalize(x.detach(), layer, moments, record if source in differentiable else None)

    def _take_gradient(self, node: Node, value: Any) -> Tensor | None:
        """Return the gradient from later segments at a value, directly and through BatchNorms."""
        parts = [self._gradients.pop(node)] if node in self._gradients else []
        for call, layer in self._network.trace.layers.items():
            if call in self._recorded and node is call.all_input_nodes[0]:
                grad, _ = self._recorded.pop(call)
                moments, sums = self._statistics.moments[node], self._statistics.sums[call]
                scale = scale_of(layer.weight, moments.mean)
                parts.append(gradient_at_input(grad, value.detach(), scale, moments, sums, layer.eps))
        is_wanted = isinstance(value, Tensor) and value.requires_grad
        return reduce(torch.add, parts) if is_wanted and parts else None

    def _random_state(self, segment: Segment) -> contextlib.AbstractContextManager[None]:
        """Draw as in the first pass; segments that drew nothing need no state."""
        state = self._random_states.get(segment.index)
        return contextlib.nullcontext() if state is None else state.restored()


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0 and value.numel() > 0


def _describe(segment: Segment) -> str:
    names = [node.name for node in segment.nodes]
    return f"a chunk, at one of the operations {', '.join(names[:8])}{', ...' if names[8:] else ''},"


def _leaf(value: Any, is_differentiable: bool) -> Any:
    if is_differentiable and isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _run_segment(
    network: Network,
    segment: Segment,
    waiting: Values,
    inputs: Values,
    normalize: Callable[[Node, Tensor], Tensor],
) -> Values:
    """Run the operations of a segment, and return its outputs.

    ``waiting`` are all values of the chunk that wait; they stay unchanged. ``inputs`` are the segment's
    inputs and share their memory. ``normalize`` is called with the call of a BatchNorm and its input.
    Raises ``ConfigError`` if an operation in place would change the values of others.
    """
    values = dict(inputs)
    for node in segment.nodes:
        if node in network.trace.layers:
            values[node] = normalize(node, values[node.all_input_nodes[0]])
        else:
            arguments = _protected(network, segment, node, waiting, values)
            values[node] = _evaluate(network.trace, node, arguments)
        for freed in segment.freed_after[node]:
            del values[freed]
    return {node: _single(node, values[node]) for node in segment.outputs}


def _protected(network: Network, segment: Segment, node: Node, waiting: Values, values: Values) -> Values:
    """Return the values for an operation; a target in place that is needed later is copied."""
    write = network.trace.writes.get(node)
    if write is None:
        return values
    target = values[write.target]
    if not isinstance(target, Tensor):  # a number, whose other names do not change with it
        return _refuse(node, "counts in place under two names") if write.is_read_later else values
    later = {each: value for each, value in values.items() if each not in segment.freed_after[node]}
    later |= {each: value for each, value in waiting.items() if network.is_read_after(each, segment)}
    later.pop(write.target, None)
    if _storage(target) in _storages(later.values()):
        return _refuse(node, "writes into a tensor that is read later under another name")
    if write.target in segment.freed_after[node] and _storage(target) not in _storages(waiting.values()):
        return values
    return values | {write.target: target.clone()}


def _evaluate(trace: TracedNetwork, node: Node, values: Values) -> Any:
    def value_of(each: Node) -> Any:
        return attrgetter(str(each.target))(trace.tower) if each.op == "get_attr" else values[each]

    args, kwargs = map_arg((node.args, node.kwargs), value_of)  # pyright: ignore[reportGeneralTypeIssues]
    inputs = [value for value in map(value_of, node.all_input_nodes) if isinstance(value, Tensor)]
    versions = [value._version for value in inputs]
    result = _function(trace, node)(*args, **kwargs)
    if node not in trace.writes and versions != [value._version for value in inputs]:
        _refuse(node, "writes into its input, which its name does not show")
    return result


def _function(trace: TracedNetwork, node: Node) -> Callable[..., Any]:
    if node in trace.modules:
        return trace.modules[node]
    if node.op == "call_method":
        return lambda self, *args, **kwargs: getattr(self, str(node.target))(*args, **kwargs)
    assert callable(node.target)
    return node.target


def _single(node: Node, value: Any) -> Any:
    if not isinstance(value, Tensor) and any(isinstance(each, Tensor) for each in tree_leaves(value)):
        _refuse(node, f"returns a {type(value).__name__} of tensors that is read after a BatchNorm")
    return value


def _refuse(node: Node, reason: str) -> Any:
    raise ConfigError(
        f"BatchNorm over the whole batch in chunks cannot follow {node.name}, which {reason}; {WAYS_OUT}"
    )


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _storages(values: Collection[Any]) -> set[int]:
    return {_storage(value) for value in values if isinstance(value, Tensor)}
