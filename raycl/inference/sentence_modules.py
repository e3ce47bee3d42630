"""The modules of the package sentence-transformers that a text goes through, as files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_linear_bn_eval

from raycl.errors import ConfigError
from raycl.inference.sentence_networks import Files, config_file, weights_file
from raycl.models.bag_of_subwords import BagOfSubwords

_SAME, _RELU = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.ReLU"
_GELU = "torch.nn.modules.activation.GELU"


@final
@dataclass(frozen=True)
class Module:
    """One module: its class in that package, and its files."""

    kind: str
    files: Files


def pooling(dim: int, kind: str) -> Module:
    """Return what makes one row of a text's tokens: their mean, or the first one (``cls``)."""
    first = kind == "cls"
    return Module(
        "Pooling",
        config_file(
            word_embedding_dimension=dim, pooling_mode_cls_token=first, pooling_mode_mean_tokens=not first
        ),
    )


def bag(network: BagOfSubwords, tokens: Sequence[str], numbers: Tensor) -> Iterator[Module]:
    """Yield what comes behind the vectors of a bag's tokens.

    ``tokens`` are the tokenizer's in the order of their numbers, ``numbers`` [num_tokens] what they are here.
    """
    if network.log_weights is not None:
        weights = network.log_weights.detach()[numbers].exp().tolist()
        by_token = dict(zip(tokens, weights, strict=True))
        yield Module("WordWeights", config_file(vocab=list(tokens), word_weights=by_token))
    dim = network.norm.normalized_shape[0]
    yield pooling(dim, "mean")
    norm = {f"norm.{name}": value for name, value in network.norm.state_dict().items()}
    yield Module("LayerNorm", config_file(dimension=dim) | weights_file(norm))
    if network.network is not None:
        widen, narrow = (layer for layer in network.network if isinstance(layer, nn.Linear))
        # The mean is added behind the network; it comes past as two rows, for GELU(x) - GELU(-x) is x.
        past = torch.eye(dim)
        widened = torch.cat([widen.weight, past, -past]), torch.cat([widen.bias, torch.zeros(2 * dim)])
        yield _dense(*widened, _GELU)
        yield _dense(torch.cat([narrow.weight, past, -past], 1), narrow.bias, _SAME)


def head(layers: nn.Module) -> Iterator[Module]:
    """Yield the layers of a projection head; raises ``ConfigError`` for one that has no such module."""
    linear: nn.Linear | None = None
    for layer in layers.children():
        if isinstance(layer, nn.Linear):
            if linear is not None:
                yield _dense(linear.weight, linear.bias, _SAME)
            linear = layer
        elif isinstance(layer, nn.BatchNorm1d) and linear is not None:
            linear = fuse_linear_bn_eval(linear, layer)
        elif isinstance(layer, nn.ReLU) and linear is not None:
            yield _dense(linear.weight, linear.bias, _RELU)
            linear = None
        else:
            raise ConfigError(
                f"sentence-transformers has no module for the {type(layer).__name__} of the projection head; "
                "load the encoder with raycl.load_encoder"
            )
    if linear is not None:
        yield _dense(linear.weight, linear.bias, _SAME)


def _dense(weight: Tensor, bias: Tensor, activation: str) -> Module:
    """Return a linear layer, its weight [out_features, in_features], and what follows it."""
    out_features, in_features = weight.shape
    config = config_file(
        in_features=in_features, out_features=out_features, bias=True, activation_function=activation
    )
    return Module("Dense", config | weights_file({"linear.weight": weight, "linear.bias": bias}))
