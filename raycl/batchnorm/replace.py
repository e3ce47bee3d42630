"""Layers that normalize each row by itself in the place of BatchNorm: nothing is left to leak."""

from typing import Literal

from torch import nn

from raycl.batchnorm.base import PLAIN, refuse_other_kinds

_MOST_GROUPS = 32  # Wu and He, 2018


def swap(module: nn.Module, kind: Literal["layer", "group"]) -> nn.Module:
    """Replace every ``nn.BatchNorm1d/2d/3d`` in ``module`` by a layer without batch statistics.

    ``"layer"`` normalizes all channels of a row together (LayerNorm: Ba et al., 2016), ``"group"``
    in up to 32 groups of at least two channels (GroupNorm: Wu and He, 2018), or of at least 16
    behind ``nn.BatchNorm1d``, whose input may have no places to average over. Both are
    ``nn.GroupNorm``, which takes [batch, channels, ...] of any dimension; on [batch, channels]
    with one group it is ``nn.LayerNorm``. The new layers take over weight, bias, eps and mode, so
    that optimizers made before stay valid; hooks and running statistics are lost.

    Args:
        module: A network, changed in place, or a single BatchNorm layer.
        kind: What comes in BatchNorm's place.

    Returns:
        The same module, or the new layer if ``module`` is itself one to replace.

    Raises:
        ConfigError: A layer is another kind of BatchNorm, whose own behavior would be lost.
    """
    refuse_other_kinds(module, PLAIN, verb="swap")
    # By layer and not by place: one that is used in two places stays one.
    swapped: dict[nn.Module | None, nn.Module] = {
        layer: _swapped(layer, kind) for layer in module.modules() if isinstance(layer, PLAIN)
    }
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child in swapped:
                setattr(parent, name, swapped[child])
    return swapped.get(module, module)


def _swapped(layer: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d, kind: str) -> nn.GroupNorm:
    channels = layer.num_features
    # Two values alone in a group come out as 1 and -1, whatever they were.
    smallest = 16 if isinstance(layer, nn.BatchNorm1d) else 2
    num_groups = _num_groups(channels, smallest) if kind == "group" else 1
    new = nn.GroupNorm(num_groups, channels, eps=layer.eps, affine=layer.affine)
    new.weight, new.bias = layer.weight, layer.bias
    return new.train(layer.training)


def _num_groups(channels: int, smallest: int) -> int:
    most = max(1, min(_MOST_GROUPS, channels // smallest))
    return max(number for number in range(1, most + 1) if channels % number == 0)
