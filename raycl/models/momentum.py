"""The momentum encoder: a copy of a tower that follows it slowly (He et al., 2020)."""

import copy
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raycl.errors import ConfigError


@final
class MomentumEncoder(nn.Module):
    """Encode keys by a frozen copy of a tower, whose weights are a moving average of the tower's.

    It begins as an exact copy, buffers included, with the tower's mode, device and memory format,
    and owes the tower nothing afterwards but its updates. All of its state is in its state dict.
    """

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = copy.deepcopy(tower).requires_grad_(False)

    # Not inference_mode: its tensors must not be saved for a backward pass, as losses save keys.
    @torch.no_grad()
    def forward(self, views: Tensor) -> Tensor:
        """Embed views [batch, ...] to [batch, dim], constants to any loss."""
        return self.tower(views)

    @torch.no_grad()
    def update(self, source: nn.Module, momentum: float) -> None:
        """Move towards ``source``: weights <- momentum * weights + (1 - momentum) * source's.

        Of the buffers, the running statistics of a BatchNorm in training mode follow the key side's
        own forward passes and are left alone. All others, among them those of a BatchNorm in eval
        mode, which would grow stale, become the source's.

        Args:
            source: The tower this is a copy of; not its ``DistributedDataParallel`` wrapper.
            momentum: 0 copies, 1 changes nothing; usually a schedule's value at this step.

        Raises:
            ConfigError: The momentum lies outside [0, 1].
        """
        if not 0.0 <= momentum <= 1.0:
            raise ConfigError(f"momentum must lie in [0, 1], came {momentum}; 0.99 to 0.999 is usual")
        # parameters() names a shared one once, on both sides: it moves once.
        torch._foreach_lerp_(list(self.tower.parameters()), list(source.parameters()), 1.0 - momentum)
        for own, followed in _following_buffers(self.tower, source):
            own.copy_(followed)


def _following_buffers(tower: nn.Module, source: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    for layer, other in zip(tower.modules(), source.modules(), strict=True):
        if not (isinstance(layer, _BatchNorm) and layer.training):
            yield from zip(layer.buffers(recurse=False), other.buffers(recurse=False), strict=True)
