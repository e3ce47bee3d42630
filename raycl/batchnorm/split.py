"""BatchNorm by chunks of the batch: one device normalizes as several would, each for itself.

Shuffling the keys cures nothing where all rows share their statistics. Chunks give a single device
the separate statistics that shuffling needs ("bn-splits" in MoCo's demo on CIFAR-10), and the same
groups of rows whatever the number of workers: 8 chunks on one, 4 on each of two, 2 on each of four.
"""

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raycl.batchnorm.layers import PLAIN, AnyBatchNorm, refuse_other_kinds
from raycl.errors import ConfigError


def split_batchnorm(module: nn.Module, num_chunks: int) -> nn.Module:
    """Let every ``nn.BatchNorm1d/2d/3d`` in ``module`` normalize ``num_chunks`` chunks separately.

    The layers are changed in place and keep all they own: parameters, buffers, hooks, names,
    settings and mode. State dicts and optimizers made before stay valid.

    Args:
        module: A network, or a single BatchNorm layer.
        num_chunks: Equal parts of a worker's rows, in their order; the local batch must be a
            multiple of it, which is checked in the forward pass.

    Returns:
        The same module.

    Raises:
        ConfigError: A layer is another kind of BatchNorm, or ``num_chunks`` is not positive.
    """
    if num_chunks < 1:
        raise ConfigError(f"num_chunks must be at least 1, came {num_chunks}; 8 is usual")
    refuse_other_kinds(module, (*PLAIN, SplitBatchNorm), verb="split")
    for layer in module.modules():
        if type(layer) in (*PLAIN, SplitBatchNorm):
            # Only forward differs. A new object would lose hooks and layers used in two places.
            layer.__class__ = SplitBatchNorm
            layer.num_chunks = num_chunks  # pyright: ignore[reportArgumentType]
    return module


@final
class SplitBatchNorm(AnyBatchNorm):
    """BatchNorm that in training normalizes each chunk of consecutive rows by its own statistics.

    Outputs and gradients equal those of one forward pass for each chunk. Running statistics move
    once a batch, towards the mean of the chunks' means and of their unbiased variances: variances
    as a chunk has them, without the scatter of the chunks' means. In eval mode, and with one chunk,
    the layer is ``nn.BatchNorm``. Its memory format (channels_last) is kept.
    """

    num_chunks: int

    def forward(self, input: Tensor) -> Tensor:
        """Normalize [batch, channels, ...].

        Raises:
            ConfigError: The rows cannot be split into chunks of equal size.
            ValueError: A chunk holds a single value per channel.
        """
        if not self.training or self.num_chunks == 1:
            return super().forward(input)
        self._check_input_dim(input)
        if len(input) % self.num_chunks:
            raise ConfigError(
                f"{len(input)} rows do not split into {self.num_chunks} chunks of equal size; "
                "make the local batch a multiple of the number of chunks"
            )
        rate = self._count_batch()
        moments = self._empty_moments()
        chunks = zip(input.chunk(self.num_chunks), moments, strict=True)
        output = torch.cat(
            [
                F.batch_norm(rows, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
                for rows, (mean, variance) in chunks
            ]
        )
        if isinstance(moments, Tensor):
            mean, unbiased_variance = moments.mean(0)
            self._track(mean, unbiased_variance, rate)
        return output

    def _empty_moments(self) -> Tensor | list[tuple[None, None]]:
        """Return what each chunk writes its moments into, [num_chunks, 2, channels]."""
        if self.running_mean is None:
            return [(None, None)] * self.num_chunks
        return self.running_mean.new_zeros(self.num_chunks, 2, self.num_features)
