"""The momentum encoder (He et al., 2020), also the average of the weights for evaluation."""

import copy
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raycl.errors import ConfigError
from raycl.models.whitening import Whitening


@final
class MomentumEncoder(nn.Module):
    """A frozen copy of a tower whose weights are a moving average of the tower's weights.

    It starts as an exact copy, buffers included, in the tower's mode, device and memory format, and
    shares no memory with the tower. Its state dict holds all of its state.
    """

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = copy.deepcopy(tower).requires_grad_(False)

    # Not inference_mode: losses save the keys for their backward pass, which it forbids.
    @torch.no_grad()
    def forward(self, views: Tensor) -> Tensor:
        """Embed views [batch, ...] to [batch, dim], constants to any loss."""
        return self.tower(views)

    @torch.no_grad()
    def update(self, source: nn.Module, momentum: float) -> None:
        """Move towards ``source``: weights <- momentum * weights + (1 - momentum) * source's.

        Running statistics of a BatchNorm in training mode stay, since the key side's own forward passes
        update them. In eval mode, and for whitening, they are averaged as the weights, since they belong to them: copies
        would be the statistics of the newest weights. All other buffers are copied.

        Args:
            source: The tower that was copied, without its ``DistributedDataParallel`` wrapper.
            momentum: 0 copies, 1 changes nothing; usually the schedule's value at this step.

        Raises:
            ConfigError: The momentum lies outside [0, 1].
        """
        if not 0.0 <= momentum <= 1.0:
            raise ConfigError(f"momentum must lie in [0, 1], came {momentum}; 0.99 to 0.999 is usual")
        # parameters() yields a shared parameter once on both sides, so it moves once.
        averaged: list[Tensor] = list(self.tower.parameters())
        targets: list[Tensor] = list(source.parameters())
        for layer, own, followed in _following_buffers(self.tower, source):
            if isinstance(layer, _BatchNorm | Whitening) and own.is_floating_point():
                averaged.append(own)
                targets.append(followed)
            else:
                own.copy_(followed)
        torch._foreach_lerp_(averaged, targets, 1.0 - momentum)


def _following_buffers(tower: nn.Module, source: nn.Module) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
    """Yield the buffers of all layers, except of a BatchNorm in training mode, and the source's."""
    for layer, other in zip(tower.modules(), source.modules(), strict=True):
        if not (isinstance(layer, _BatchNorm) and layer.training):
            for own, followed in zip(layer.buffers(recurse=False), other.buffers(recurse=False), strict=True):
                yield layer, own, followed
