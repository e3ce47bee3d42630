"""Whitening: a last layer that evens out the variances of a trained encoder's representations."""

from typing import final

import torch
from torch import Tensor, nn

_WEIGHT = 0.01  # of a batch among the moments, which follow the last hundred batches
_LEAST_VARIANCE = 1e-6  # of the mean square; below is rounding


@final
class Whitening(nn.Module):
    """Running moments of representations [batch, dim], and the linear layer that whitens them.

    The covariance C of the representations has few directions of large variance, which rule distances and cosines.
    With the mean variance v and the ``shrinkage`` a, the layer subtracts the mean and multiplies by
    ((C / v + a) / (1 + a))^(-1/2), which is symmetric (ZCA: Bell and Sejnowski, 1997; for search: Jégou and Chum,
    2012). A large ``a`` leaves the variances as they are, and a small one makes them equal.

    Training never reads the moments. Without any, the layer is the identity. A batch here is a pass of the encoder with
    gradients: a chunk of a batch, or its views of one size, counts as one.
    """

    is_one_operation = True  # for torch.fx, which cannot trace the update
    mean: Tensor
    second_moment: Tensor
    num_batches: Tensor

    def __init__(self, dim: int, *, shrinkage: float) -> None:
        super().__init__()
        self._shrinkage = shrinkage
        self.register_buffer("mean", torch.zeros(dim))
        # Not centered, so that the mean over workers equals the mean of all rows.
        self.register_buffer("second_moment", torch.zeros(dim, dim))
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.int64))

    def extra_repr(self) -> str:
        """Return the shrinkage, for the description of a network."""
        return f"shrinkage={self._shrinkage:g}"

    def forward(self, rows: Tensor) -> Tensor:
        """Return the same rows; in training, a pass with gradients adds them to the moments.

        The first pass over the chunks of a batch has no gradients, nor has a momentum encoder.
        """
        if self.training and torch.is_grad_enabled():
            self.update(rows.detach())
        return rows

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Take a batch of representations [batch, dim] into the moments; the first ones count equally."""
        self.num_batches += 1
        weight = (1 / self.num_batches).clamp(min=_WEIGHT).to(self.mean.dtype)
        with torch.autocast(rows.device.type, enabled=False):
            rows = rows.to(self.mean.dtype)
            self.mean.lerp_(rows.mean(0), weight)
            self.second_moment.lerp_(rows.T @ rows / len(rows), weight)

    @torch.no_grad()
    def layer(self) -> nn.Linear:
        """Return the layer, [batch, dim] to [batch, dim]."""
        mean = self.mean.double()
        covariance = self.second_moment.double() - mean.outer(mean)
        variance = covariance.diagonal().mean()
        layer = identity_layer(len(mean)).to(self.mean.device, self.mean.dtype)
        least = _LEAST_VARIANCE * self.second_moment.diagonal().mean()
        if variance > least and covariance.isfinite().all():
            variances, directions = torch.linalg.eigh(covariance / variance)
            scales = ((variances.clamp(min=0) + self._shrinkage) / (1 + self._shrinkage)).rsqrt()
            weight = (directions * scales) @ directions.T
            layer.weight.copy_(weight)
            layer.bias.copy_(-(weight @ mean))
        return layer


def identity_layer(dim: int) -> nn.Linear:
    """Return a linear layer that changes nothing."""
    with torch.random.fork_rng(devices=[]):  # torch's way to skip the draws imports sympy
        layer = nn.Linear(dim, dim)
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer.requires_grad_(False)
