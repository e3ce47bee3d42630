"""Shared parts of the BatchNorm layers."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raycl.errors import ConfigError

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class BatchNormBase(_BatchNorm):
    """BatchNorm of [batch, channels, ...]; subclasses choose the rows of the statistics."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected [batch, channels, ...], got {input.dim()}D input")


def count_batch(layer: _BatchNorm) -> float:
    """Count the batch, and return the weight of its statistics in the running statistics."""
    if layer.track_running_stats and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            return 1 / float(layer.num_batches_tracked)
    return layer.momentum or 0.0


@torch.no_grad()
def track(layer: _BatchNorm, mean: Tensor, unbiased_variance: Tensor, rate: float) -> None:
    """Move the running statistics towards a batch's, [channels] each, by ``rate``."""
    if layer.track_running_stats and layer.running_mean is not None and layer.running_var is not None:
        layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), rate)
        layer.running_var.lerp_(unbiased_variance.to(layer.running_var.dtype), rate)


def refuse_other_kinds(module: nn.Module, known: tuple[type[nn.Module], ...], *, verb: str) -> None:
    """Raise ``ConfigError`` if a layer is another kind of BatchNorm, which would lose its own behavior."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and type(layer) not in known:
            raise ConfigError(
                f"cannot {verb} {name or 'the module'}: {type(layer).__name__} is a "
                "BatchNorm with behavior of its own; use nn.BatchNorm1d/2d/3d instead"
            )
