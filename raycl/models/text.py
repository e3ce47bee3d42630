"""Text encoders: tokens [batch, length] to representations [batch, dim]."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from raycl.errors import ConfigError
from raycl.models.bag_of_subwords import BagOfSubwords
from raycl.models.hugging_face import HuggingFaceEncoder
from raycl.models.registry import HUGGING_FACE, TEXT_ENCODERS, check_encoder_name
from raycl.models.text_transformer import TextTransformer

_ENCODERS: dict[str, Callable[..., nn.Module]] = dict(
    zip(TEXT_ENCODERS, (TextTransformer, BagOfSubwords), strict=True)
)


def build_text_encoder(
    name: str, *, num_tokens: int, max_length: int, arguments: Mapping[str, Any] | None = None
) -> nn.Module:
    """Build an encoder of tokens [batch, length], padded with 0 at the end, to representations.

    ``name`` is ``transformer`` or ``bag_of_subwords``, untrained; ``transformers:PATH``, a model that
    Hugging Face's library saved in that folder; or ``package.module:function`` of the user's own.
    Each gets ``num_tokens`` (the size of the vocabulary), ``max_length`` (that of the longest row)
    and ``arguments`` by name. Raises ``ConfigError`` for an unknown name or impossible arguments.
    """
    sizes: dict[str, Any] = {"num_tokens": num_tokens, "max_length": max_length}
    if min(num_tokens, max_length) < 1:
        raise ConfigError(
            f"an encoder cannot be built for {sizes}; give the tokenizer's num_tokens and 1 or more"
        )
    check_encoder_name(name, is_text=True)
    if name.startswith(HUGGING_FACE):
        build: Callable[..., Any] = HuggingFaceEncoder
        sizes["path"] = name.removeprefix(HUGGING_FACE)
    elif ":" in name:
        build = _users_own(name)
    else:
        build = _ENCODERS[name]
    try:
        encoder = build(**{**sizes, **(arguments or {})})
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's function raises; an unknown argument
        raise ConfigError(
            f"cannot build encoder.name {name!r}: {' '.join(str(error).split())[:200]}; check encoder.kwargs"
        ) from error
    if not isinstance(encoder, nn.Module):
        raise ConfigError(f"{name} must return a torch.nn.Module, came {type(encoder).__name__}")
    return encoder


@torch.no_grad()
def text_representation_dim(encoder: nn.Module) -> int:
    """Return the width of an encoder's output; raises ``ConfigError`` unless it is [batch, dim]."""
    was_training = encoder.training
    device = next((p.device for p in encoder.parameters()), torch.device("cpu"))
    try:
        output = encoder.eval()(torch.ones(1, 1, dtype=torch.int64, device=device))
    except Exception as error:  # a network of the user's own may fail in any way
        raise ConfigError(
            f"the encoder does not take tokens int64 [batch, length]: {' '.join(str(error).split())[:200]}; "
            "give one that does"
        ) from error
    encoder.train(was_training)
    if not isinstance(output, Tensor) or output.ndim != 2:
        came = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ConfigError(f"an encoder must return [batch, dim], came {came}; pool over its tokens")
    return output.shape[1]


def _users_own(name: str) -> Callable[..., Any]:
    module_name, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), function)
    except Exception as error:  # whatever the user's module raises
        raise ConfigError(
            f"cannot find encoder.name {name!r}: {' '.join(str(error).split())[:200]}; "
            "give package.module:function"
        ) from error
