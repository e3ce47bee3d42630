"""Networks of the user's own: import and call the function that builds one, and check its output."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from raycl.distributed.device_copy import device_of
from raycl.errors import ConfigError, one_line


def build_network(
    name: str,
    build: Callable[..., Any] | None = None,
    section: str = "encoder",
    required: str = "",
    /,
    **arguments: Any,
) -> nn.Module:
    """Call ``build``, by default the function ``package.module:function`` of that name.

    ``section`` has the settings of the encoder, and ``required`` names the arguments that are not among its ``kwargs``.
    Raises ``ConfigError`` if that fails or returns something else than a network.
    """
    is_own = build is None
    build = build or _import_function(name, section)
    try:
        network = build(**arguments)
    except ConfigError:
        raise
    except Exception as error:  # the user's function may raise anything
        also = f", and that the function takes {required}" if required and is_own else ""
        raise ConfigError(
            f"cannot build {section}.name {name!r}: {one_line(error)}; check {section}.kwargs{also}"
        ) from error
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{name} must return a torch.nn.Module, came {type(network).__name__}")
    return network


@torch.no_grad()
def output_dim(encoder: nn.Module, example: Tensor, *, inputs: str) -> int:
    """Return the width of an encoder's output for one example [1, ...].

    Raises ``ConfigError`` if the encoder rejects such ``inputs`` or does not return [batch, dim].
    """
    was_training = encoder.training
    device = device_of(encoder)
    try:
        output = encoder.eval()(example.to(device))
    except Exception as error:  # the user's network may raise anything
        raise ConfigError(
            f"the encoder does not take {inputs}: {one_line(error)}; give one that does"
        ) from error
    encoder.train(was_training)
    if not isinstance(output, Tensor) or output.ndim != 2:
        came = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ConfigError(f"an encoder must return [batch, dim], came {came}; flatten or pool its output")
    return output.shape[1]


def unused_parameters(encoder: nn.Module, example: Tensor) -> set[nn.Parameter]:
    """Return the trainable parameters without a part in the output for an example [1, ...], in evaluation mode."""
    was_training = encoder.training
    device = device_of(encoder)
    output = encoder.eval()(example.to(device))
    encoder.train(was_training)
    # No backward pass: cuDNN's recurrent layers need training mode for it.
    found: set[Any] = set()
    ahead = [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in found:
            found.add(node)
            ahead += [each for each, _ in node.next_functions]
    used = {getattr(node, "variable", None) for node in found}
    return {each for each in encoder.parameters() if each.requires_grad and each not in used}


def _import_function(name: str, section: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(
            f"cannot find {section}.name {name!r}: {one_line(error)}; give package.module:function"
        ) from error
