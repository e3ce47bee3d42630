"""Trace a network to a graph of operations, or explain why that is impossible."""

import inspect
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx import Graph, Node
from torch.nn.modules.batchnorm import _BatchNorm

from raycl.batchnorm.kernels import PLAIN, refuse_other_kinds
from raycl.batchnorm.synchronized import SynchronizedBatchNorm
from raycl.errors import ConfigError, one_line

WAYS_OUT = "use batchnorm=group or batchnorm=layer, or remove chunk_size"

_WRITING = (
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv),
    *(operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor),
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class InPlaceWrite(NamedTuple):
    """The value that an operation overwrites."""

    target: Node
    is_read_later: bool  # under its old name, which now means the new value


@final
class TracedNetwork:
    """The operations of a tower in its present modes, with its own modules and parameters.

    Raises:
        ConfigError: ``torch.fx`` cannot trace the tower, or an operation would give other results when
            rows pass in chunks and twice.
    """

    def __init__(self, tower: nn.Module) -> None:
        refuse_other_kinds(
            tower, (*PLAIN, SynchronizedBatchNorm, nn.SyncBatchNorm), verb="embed in chunks through"
        )
        self.tower = tower
        self.graph = _graph(tower)
        self.modules = {
            node: tower.get_submodule(str(node.target))
            for node in self.graph.nodes
            if node.op == "call_module"
        }
        self.rows, self.result = _ends(self.graph)
        # Keyed by call: a layer that is used twice has two inputs.
        self.layers = {
            node: module
            for node, module in self.modules.items()
            if isinstance(module, _BatchNorm) and _takes_statistics(module)
        }
        self.writes = self._find_writes()
        self._refuse_hooks()
        self._refuse_functional_batchnorm()

    def _find_writes(self) -> dict[Node, InPlaceWrite]:
        """Return the writes in place, and redirect later readers to their results."""
        position = {node: number for number, node in enumerate(self.graph.nodes)}
        writes = {}
        for node in self.graph.nodes:
            if (target := _target_of_write(node, self.modules.get(node))) is not None:
                if target.op == "get_attr":
                    raise changes_itself(str(target.target))
                later = [user for user in target.users if position[user] > position[node]]
                for user in later:
                    user.replace_input_with(target, node)
                writes[node] = InPlaceWrite(target, bool(later))
        return writes

    def _refuse_hooks(self) -> None:
        called = {module for node, module in self.modules.items() if node not in self.layers}
        called |= {each for module in called for each in module.modules()}
        for name, module in self.tower.named_modules():
            if module not in called and any(getattr(module, hooks) for hooks in _HOOKS):
                raise ConfigError(
                    f"{name or 'the tower'} has hooks, which would not be called: BatchNorm over the whole "
                    f"batch in chunks runs the operations inside it; remove the hooks, or {WAYS_OUT}"
                )

    def _refuse_functional_batchnorm(self) -> None:
        for node in self.graph.nodes:
            if node.target in (F.batch_norm, torch.batch_norm) and _arguments(node).get("training", True):
                raise ConfigError(
                    f"{node.name} normalizes by a function, which would see one chunk only; "
                    f"use a layer, nn.BatchNorm1d/2d/3d, or {WAYS_OUT}"
                )


def _graph(tower: nn.Module) -> Graph:
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        try:
            graph = _Tracer().trace(tower)
        except ConfigError:
            raise
        except Exception as error:  # proxies in place of tensors may raise anything
            raise _untraceable("the tower", tower, error) from error
        if not torch.equal(before, torch.get_rng_state()):
            raise ConfigError(
                f"{type(tower).__name__} draws random numbers that do not depend on its rows, and tracing would "
                f"freeze them; draw them with torch.rand_like or in a layer, or {WAYS_OUT}"
            )
    return graph


def _untraceable(name: str, module: nn.Module, error: Exception) -> ConfigError:
    reason = one_line(error)
    return ConfigError(
        f"BatchNorm over the whole batch in chunks needs a network that torch.fx can trace, but "
        f"{name} ({type(module).__name__}) cannot be: {reason}; {WAYS_OUT}"
    )


def changes_itself(name: str) -> ConfigError:
    """Return the error for a network whose forward pass writes into one of its own tensors."""
    return ConfigError(
        f"the forward pass changes {name}, and would do so for every chunk and again in the backward pass; "
        f"{WAYS_OUT}"
    )


def _ends(graph: Graph) -> tuple[Node, Node]:
    rows = [node for node in graph.nodes if node.op == "placeholder"]
    result = graph.output_node().args[0]
    if len(rows) == 1 and isinstance(result, Node):
        return rows[0], result
    raise ConfigError(
        "BatchNorm over the whole batch in chunks needs a network from one tensor to one tensor, "
        f"got {len(rows)} arguments and a result of {type(result).__name__}; {WAYS_OUT}"
    )


def _takes_statistics(layer: _BatchNorm) -> bool:
    return layer.training or layer.running_mean is None or layer.running_var is None


def _target_of_write(node: Node, module: nn.Module | None) -> Node | None:
    if not _writes(node, module):
        return None
    target = node.args[0] if node.args else node.all_input_nodes[0]
    return target if isinstance(target, Node) else None


def _writes(node: Node, module: nn.Module | None) -> bool:
    if module is not None:
        return bool(getattr(module, "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    by_name = name.endswith("_") and not name.endswith("__")
    return by_name or node.target in _WRITING or bool(_arguments(node).get("inplace"))


def _arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a function by name, if Python knows its signature."""
    if isinstance(node.target, str):
        return dict(node.kwargs)
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):  # built in
        return dict(node.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _recorded(function: Callable[..., Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    def record(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return record


class _Proxy(fx.Proxy):
    """Record ``x += y`` as a write; fx itself records ``x + y``, which other names of x do not see."""


for _function in _WRITING:
    setattr(_Proxy, f"__{_function.__name__}__", _recorded(_function))


@final
class _Tracer(fx.Tracer):
    # Arithmetic on buffers belongs to the graph, like arithmetic on parameters.
    proxy_buffer_attributes = True

    def proxy(self, node: Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, _BatchNorm) or getattr(m, "is_one_operation", False):
            return True
        holds_batchnorm = any(isinstance(each, _BatchNorm) for each in m.modules())
        return super().is_leaf_module(m, module_qualified_name) and not holds_batchnorm

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except ConfigError:
            raise
        except Exception as error:  # as in _graph; the error names the innermost module
            raise _untraceable(self.path_of_module(m), m, error) from error
