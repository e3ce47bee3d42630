"""One segment's operations on one chunk; writes in place spare the values that wait."""

from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from raycl.batchnorm.chunked.segments import Network, Segment
from raycl.batchnorm.chunked.trace import WAYS_OUT, TracedNetwork
from raycl.errors import ConfigError

Values = dict[Node, Any]


def run_segment(
    network: Network,
    segment: Segment,
    waiting: Values,
    inputs: Values,
    normalize: Callable[[Node, Tensor], Tensor],
) -> Values:
    """Run a segment's operations in their order.

    Args:
        network: The network of the segment.
        segment: What to run.
        waiting: All values of the chunk that wait; they are left as they are.
        inputs: The segment's inputs, of the same memory as those that wait.
        normalize: Called with the call of a BatchNorm and its input.

    Returns:
        The segment's outputs.

    Raises:
        ConfigError: An operation writes where it would change the values of others.
    """
    values = dict(inputs)
    for node in segment.nodes:
        if node in network.trace.layers:
            values[node] = normalize(node, values[node.all_input_nodes[0]])
        else:
            arguments = _spared(network, segment, node, waiting, values)
            values[node] = _evaluate(network.trace, node, arguments)
        for dead in segment.dying[node]:
            del values[dead]
    return {node: _single(node, values[node]) for node in segment.outputs}


def _spared(network: Network, segment: Segment, node: Node, waiting: Values, values: Values) -> Values:
    """Return the values as an operation may have them: a copy of what it writes and others need."""
    write = network.trace.writes.get(node)
    if write is None:
        return values
    target = values[write.target]
    if not isinstance(target, Tensor):  # a number, whose other names do not change with it
        return _refuse(node, "counts in place under two names") if write.is_read_later else values
    later = {each: value for each, value in values.items() if each not in segment.dying[node]}
    later |= {each: value for each, value in waiting.items() if network.is_read_after(each, segment)}
    later.pop(write.target, None)
    if _storage(target) in _storages(later.values()):
        return _refuse(node, "writes into a tensor that is read later under another name")
    if write.target in segment.dying[node] and _storage(target) not in _storages(waiting.values()):
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
        _refuse(node, "writes into its input without saying so")
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
        _refuse(node, f"leaves a {type(value).__name__} of tensors that is read behind a BatchNorm")
    return value


def _refuse(node: Node, what: str) -> Any:
    raise ConfigError(
        f"BatchNorm over the whole batch in chunks cannot follow {node.name}, which {what}; {WAYS_OUT}"
    )


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _storages(values: Collection[Any]) -> set[int]:
    return {_storage(value) for value in values if isinstance(value, Tensor)}
