"""Batch normalization over the rows of all workers (Ioffe and Szegedy, 2015).

If each worker normalizes by its own rows, the network can read from the statistics which rows shared
a worker, and contrastive losses reward that leak. Here the statistics cover the global batch, so the
result does not depend on the number of workers. That cures methods with in-batch negatives, but not
those with a queue: see ``shuffled.py``.

torch's ``SyncBatchNorm`` refuses CPU modules, and on CUDA the host waits three times per layer. The
CUDA path here uses its kernels without the waits.
"""

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from raycl.batchnorm.kernels import (
    PLAIN,
    BatchNormBase,
    Moments,
    check_count,
    count_batch,
    gradient_at_input,
    local_moments,
    match_layout,
    merge,
    moments_of_batch,
    normalize,
    refuse_other_kinds,
    statistics_dtype,
    track,
)
from raycl.distributed import all_sum, gather_detached, num_workers


def synchronize(module: nn.Module) -> nn.Module:
    """Turn every ``nn.BatchNorm1d/2d/3d`` in ``module`` into a :class:`SynchronizedBatchNorm`.

    The layers change in place and keep their parameters, buffers, hooks, names, settings and mode.
    Earlier state dicts and optimizers stay valid.

    Args:
        module: A network, or a single BatchNorm layer.

    Returns:
        The same module.

    Raises:
        ConfigError: A layer is another kind of BatchNorm, which would lose its own behavior.
    """
    refuse_other_kinds(module, (*PLAIN, *SYNCHRONIZED), verb="synchronize")
    for layer in module.modules():
        if type(layer) in PLAIN:
            # Only forward differs. A new object would lose hooks, and layers that are used twice.
            layer.__class__ = SynchronizedBatchNorm
    return module


@final
class SynchronizedBatchNorm(BatchNormBase):
    """BatchNorm with training statistics over the rows of all workers.

    Outputs, gradients and running statistics equal ``nn.BatchNorm`` on the global batch; the workers
    may have different numbers of rows. The gradients of weight and bias are this worker's share, to be
    summed or averaged over workers as ``DistributedDataParallel`` does. Forward and backward take one
    collective each; in eval mode and with one worker the layer is ``nn.BatchNorm``. Statistics are
    float32 for lower precisions. Input is [batch, channels, ...] and keeps its memory format
    (channels_last). Parameters, settings and state dict match ``nn.BatchNorm``.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize [batch, channels, ...]; in training mode all workers call this together.

        Raises:
            ValueError: The global batch holds a single value per channel, or the input has fewer
                than two dimensions.
        """
        if not self.training or num_workers() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        rate = count_batch(self)
        if input.is_cuda:
            buffers = (self.running_mean, self.running_var) if self.track_running_stats else (None,) * 2
            return _NormalizeOnDevice.apply(input, self.weight, self.bias, *buffers, self.eps, rate)  # pyright: ignore[reportReturnType]
        moments = moments_of_batch(merge(gather_detached(local_moments(input.detach()))), input)
        track(self, moments.mean, moments.unbiased_variance, rate)
        # The gradients of weight and bias are of this worker: the caller averages or sums them over workers.
        return normalize(input, self, moments, _at_input if input.requires_grad else None)


SYNCHRONIZED = (SynchronizedBatchNorm, nn.SyncBatchNorm)


def _at_input(grad: Tensor, x: Tensor, scale: Tensor, moments: Moments, sums: Tensor, eps: float) -> Tensor:
    """Return the gradient at the input, given the sums of this worker."""
    return gradient_at_input(grad, x, scale, moments, all_sum(sums), eps)


class _NormalizeOnDevice(torch.autograd.Function):
    """Normalize with the CUDA kernels of torch's ``SyncBatchNorm``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_variance: Tensor | None,
        eps: float,
        rate: float,
    ) -> Tensor:
        x, channels = _dense(x), x.shape[1]
        gathered = gather_detached(_device_moments(x, eps))
        means, invstds, counts = gathered.split([channels, channels, 1], dim=1)
        counts = counts.flatten()
        check_count(x, counts)
        # The kernel reads counts in the dtype of the running statistics, or of its first argument without them. A low
        # precision would round them.
        buffers = [each for each in (running_mean, running_variance) if each is not None]
        running = [each.to(means.dtype) for each in buffers]
        first, second = running or (None, None)
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            means, means, invstds, first, second, rate, eps, counts
        )
        for buffer, updated in zip(buffers, running, strict=True):
            if updated is not buffer:
                buffer.copy_(updated)
        ctx.save_for_backward(x, weight, mean, invstd, counts)
        # Without values the kernels cannot be launched.
        return (
            torch.batch_norm_elemt(x, weight, bias, mean, invstd, eps) if x.numel() else torch.empty_like(x)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, mean, invstd, counts = ctx.saved_tensors
        grad = match_layout(grad, x)
        if x.numel():
            level, slope, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
                grad, x, mean, invstd, weight, ctx.needs_input_grad[0], *ctx.needs_input_grad[1:3]
            )
        else:
            level, slope, grad_weight, grad_bias = (torch.zeros_like(mean) for _ in range(4))
        grad_x = None
        if ctx.needs_input_grad[0]:
            level, slope = all_sum(torch.stack([level, slope]))
            weight = None if weight is None else weight.to(mean.dtype)
            sums = (level, slope, counts.to(torch.int32))
            grad_x = (
                torch.batch_norm_backward_elemt(grad, x, mean, invstd, weight, *sums)
                if x.numel()
                else torch.empty_like(x)
            )
        of_parameters = (
            each if wanted else None
            for each, wanted in zip((grad_weight, grad_bias), ctx.needs_input_grad[1:3], strict=True)
        )
        return grad_x, *of_parameters, None, None, None, None


def _device_moments(x: Tensor, eps: float) -> Tensor:
    """Return mean, 1 / sqrt(variance + eps) and number of values side by side, [1, 2 * channels + 1]."""
    channels = x.shape[1]
    if x.numel():
        mean, invstd = torch.batch_norm_stats(x, eps)
        count = float(x.numel() // channels)
    else:
        # The merging kernel divides by the count. A tiny count avoids a mask, whose size the host would read.
        mean, invstd = (
            torch.full((channels,), value, dtype=statistics_dtype(x), device=x.device)
            for value in (0.0, eps**-0.5)
        )
        count = 1e-30
    return torch.cat([mean, invstd, mean.new_full((1,), count)])[None]


def _dense(x: Tensor) -> Tensor:
    """Return x without gaps, in channels_last if it is, else contiguous."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(x.dim())
    return x if last is not None and x.is_contiguous(memory_format=last) else x.contiguous()
