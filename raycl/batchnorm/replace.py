"""Replace BatchNorm by layers that normalize each row by itself, so that nothing can leak."""

from typing import Literal

from torch import nn

from raycl.batchnorm.kernels import PLAIN, refuse_other_kinds
from raycl.errors import ConfigError

_MAX_GROUPS = 32  # Wu and He, 2018


def replace_batchnorm(module: nn.Module, kind: Literal["layer", "group"]) -> nn.Module:
    """Replace every ``nn.BatchNorm1d/2d/3d`` in ``module`` by a layer without batch statistics.

    ``"layer"`` normalizes all channels of a row together (LayerNorm: Ba et al., 2016). ``"group"``
    makes up to 32 groups of at least two channels (GroupNorm: Wu and He, 2018), or of at least 16 in
    place of ``nn.BatchNorm1d``, whose input may have no positions to average over. Both are
    ``nn.GroupNorm``, which takes [batch, channels, ...] of any dimension; with one group on
    [batch, channels] it equals ``nn.LayerNorm``. The new layers take over weight, bias, eps and mode,
    so earlier optimizers stay valid; hooks and running statistics are lost.

    Args:
        module: A network, changed in place, or a single BatchNorm layer.
        kind: The new layer.

    Returns:
        The same module, or the new layer if ``module`` is a BatchNorm layer.

    Raises:
        ConfigError: The kind is unknown, or a layer is another kind of BatchNorm, which would lose its own behavior.
    """
    if kind not in ("layer", "group"):
        raise ConfigError(f"unknown normalization {kind!r} in place of BatchNorm; choose layer or group")
    refuse_other_kinds(module, PLAIN, verb="replace")
    # Keyed by layer: a layer that is used twice stays one layer.
    replaced: dict[nn.Module | None, nn.Module] = {
        layer: _replacement(layer, kind) for layer in module.modules() if isinstance(layer, PLAIN)
    }
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child in replaced:
                setattr(parent, name, replaced[child])
    return replaced.get(module, module)


def _replacement(layer: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d, kind: str) -> nn.GroupNorm:
    channels = layer.num_features
    # A group of two values always normalizes to 1 and -1.
    smallest = 16 if isinstance(layer, nn.BatchNorm1d) else 2
    num_groups = _num_groups(channels, smallest) if kind == "group" else 1
    new = nn.GroupNorm(num_groups, channels, eps=layer.eps, affine=layer.affine)
    new.weight, new.bias = layer.weight, layer.bias
    return new.train(layer.training)


def _num_groups(channels: int, smallest: int) -> int:
    limit = max(1, min(_MAX_GROUPS, channels // smallest))
    return max(number for number in range(1, limit + 1) if channels % number == 0)
