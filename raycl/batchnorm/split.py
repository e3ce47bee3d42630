"""BatchNorm by groups of rows: one device normalizes as several devices would.

Shuffled keys cure nothing if all rows share their statistics. Groups give a single device the separate
statistics that shuffling needs ("bn-splits" in MoCo's CIFAR-10 demo). The groups do not depend on the
number of workers, or on the chunks in which a worker embeds its rows.
"""

from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raycl.batchnorm.kernels import PLAIN, BatchNormBase, count_batch, refuse_other_kinds, track
from raycl.errors import ConfigError


def split_batchnorm(module: nn.Module, group_size: int) -> nn.Module:
    """Let every ``nn.BatchNorm1d/2d/3d`` in ``module`` normalize ``group_size`` rows at a time.

    The layers change in place and keep their parameters, buffers, hooks, names, settings and mode.
    Earlier state dicts and optimizers stay valid.

    Args:
        module: A network, or a single BatchNorm layer.
        group_size: Consecutive rows that are normalized together. The forward pass refuses a number
            of rows that is not a multiple of it.

    Returns:
        The same module.

    Raises:
        ConfigError: A layer is another kind of BatchNorm, or ``group_size`` is less than 2.
    """
    if group_size < 2:
        raise ConfigError(f"group_size must be at least 2 rows, got {group_size}; 32 is usual")
    refuse_other_kinds(module, (*PLAIN, SplitBatchNorm), verb="split")
    for layer in module.modules():
        if type(layer) in (*PLAIN, SplitBatchNorm):
            # Only forward differs. A new object would lose hooks, and layers that are used twice.
            layer.__class__ = SplitBatchNorm
            layer.group_size = group_size  # pyright: ignore[reportArgumentType]
    return module


@final
class SplitBatchNorm(BatchNormBase):
    """BatchNorm that in training normalizes each group of consecutive rows by its own statistics.

    Outputs and gradients equal one forward pass for each group. Each batch updates the running
    statistics once, by the mean of the groups' means and of their unbiased variances; the scatter of
    the groups' means is not part of the variance. In eval mode, and without groups (``group_size``
    None), the layer is ``nn.BatchNorm``. The memory format (channels_last) is kept.
    """

    group_size: int | None

    def forward(self, input: Tensor) -> Tensor:
        """Normalize [batch, channels, ...].

        Raises:
            ConfigError: The number of rows is not a multiple of the group size.
            ValueError: A group holds a single value per channel.
        """
        if not self.training or self.group_size is None:
            return super().forward(input)
        self._check_input_dim(input)
        if len(input) % self.group_size:
            raise ConfigError(
                f"{len(input)} rows do not split into groups of {self.group_size}; "
                "make the local batch, and a chunk of it, a multiple of the group"
            )
        rate = count_batch(self)
        groups = input.split(self.group_size)
        moments = None
        if self.running_mean is not None:
            moments = self.running_mean.new_zeros(2, len(groups), self.num_features)
        output = (self._at_once if input.is_cuda else self._one_by_one)(groups, moments)
        if moments is not None:
            mean, unbiased_variance = moments.mean(1)
            track(self, mean, unbiased_variance, rate)
        return output

    def _one_by_one(self, groups: Sequence[Tensor], moments: Tensor | None) -> Tensor:
        """Normalize each group, and write its mean and variance into ``moments`` [2, num_groups, channels]."""
        each = [(None, None)] * len(groups) if moments is None else moments.unbind(1)
        return torch.cat(
            [
                F.batch_norm(rows, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
                for rows, (mean, variance) in zip(groups, each, strict=True)
            ]
        )

    def _at_once(self, groups: Sequence[Tensor], moments: Tensor | None) -> Tensor:
        """Normalize the groups side by side as further channels: few launches on a GPU, twice the time on a CPU."""
        mean, variance = (None, None) if moments is None else moments.flatten(1)
        weight, bias = (
            None if each is None else each.repeat(len(groups)) for each in (self.weight, self.bias)
        )
        side_by_side = torch.cat(list(groups), dim=1)
        output = F.batch_norm(side_by_side, mean, variance, weight, bias, True, 1.0, self.eps)
        return torch.cat(output.chunk(len(groups), dim=1))
