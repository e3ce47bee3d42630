"""Batch normalization over the rows of all workers (Ioffe and Szegedy, 2015).

With statistics of its own rows only, each worker normalizes differently, and a network can tell
from them which rows sat together: a leak that contrastive losses reward. Here the statistics are
those of the global batch, so that the result does not depend on the number of workers. That cures
methods whose negatives are all of the same batch, but not a queue: see ``shuffled.py``.

torch's ``SyncBatchNorm`` refuses CPU modules, and on CUDA makes the host wait three times a layer.
Its kernels are the ones used here on CUDA, without the waits.
"""

import math
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from raycl.batchnorm.base import PLAIN, BatchNormBase, refuse_other_kinds
from raycl.distributed import all_sum, gather_detached, num_workers

_native_backward = torch.ops.aten.native_batch_norm_backward.default

# Values per channel that torch may add up in one go, for it sums a channels_last tensor in plain
# float32: at a mean of 1000 and 65,536 values, the error exceeds a third of a standard deviation.
_PIECE_VALUES = 2048


def synchronize(module: nn.Module) -> nn.Module:
    """Turn every ``nn.BatchNorm1d/2d/3d`` in ``module`` into a :class:`SynchronizedBatchNorm`.

    The layers are changed in place and keep all they own: parameters, buffers, hooks, names,
    settings and mode. State dicts and optimizers made before stay valid.

    Args:
        module: A network, or a single BatchNorm layer.

    Returns:
        The same module.

    Raises:
        ConfigError: A layer is another kind of BatchNorm, whose own behavior would be lost.
    """
    refuse_other_kinds(module, (*PLAIN, *SYNCHRONIZED), verb="synchronize")
    for layer in module.modules():
        if type(layer) in PLAIN:
            # Only forward differs. A new object would lose hooks and layers used in two places.
            layer.__class__ = SynchronizedBatchNorm
    return module


@final
class SynchronizedBatchNorm(BatchNormBase):
    """BatchNorm whose training statistics are those of the rows of all workers.

    Forward, gradients and running statistics equal those of ``nn.BatchNorm`` on the global batch;
    the workers may hold different numbers of rows. The gradients of weight and bias are this
    worker's share, to be summed or averaged over workers as ``DistributedDataParallel`` does.
    One collective call forward and one backward; in eval mode and alone there is none, and the
    layer is ``nn.BatchNorm``. Statistics are float32 for lower precisions. Input is
    [batch, channels, ...]; its memory format (channels_last) is kept. Parameters, settings and
    state dict are those of ``nn.BatchNorm``.
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
        rate = self._count_batch()
        if input.is_cuda:
            return self._forward_on_device(input, rate)
        moments = _global_moments(input)
        unbiased_variance = moments.variance * (moments.num_values / (moments.num_values - 1))
        self._track(moments.mean, unbiased_variance, rate)
        return _Normalize.apply(input, self.weight, self.bias, moments, self.eps)  # pyright: ignore[reportReturnType]

    def _forward_on_device(self, input: Tensor, rate: float) -> Tensor:
        buffers = (self.running_mean, self.running_var) if self.track_running_stats else (None,) * 2
        return _NormalizeOnDevice.apply(input, self.weight, self.bias, *buffers, self.eps, rate)  # pyright: ignore[reportReturnType]


SYNCHRONIZED = (SynchronizedBatchNorm, nn.SyncBatchNorm)


class _Moments(NamedTuple):
    """Statistics per channel of some rows."""

    mean: Tensor  # [channels]
    variance: Tensor  # [channels], biased
    num_values: Tensor  # [1], values per channel


@torch.no_grad()
def _global_moments(x: Tensor) -> _Moments:
    channels = x.shape[1]
    merged = _merge(gather_detached(_local_moments(x))).to(_statistics_type(x))
    moments = _Moments(*merged.squeeze(0).split([channels, channels, 1]))
    _check_count(x, moments.num_values)
    return moments


def _check_count(x: Tensor, num_values: Tensor) -> None:
    """Refuse a global batch with a single value per channel; its parts have ``num_values``."""
    # With two values here there are two in all: do not wait for the count without need.
    if x.numel() < 2 * x.shape[1] and num_values.sum().item() < 2:
        shape = list(x.shape)
        raise ValueError(f"Expected more than 1 value per channel when training, got input {shape}")


def _local_moments(x: Tensor) -> Tensor:
    """Return mean, biased variance and number of values side by side, [1, 2 * channels + 1]."""
    channels = x.shape[1]
    if x.numel() == 0:
        return x.new_zeros(1, 2 * channels + 1, dtype=torch.float64)
    # CUDA's kernel adds up by Welford's method and in parallel: it takes everything in one go.
    pieces = [x] if x.is_cuda else x.split(max(1, _PIECE_VALUES // x[0, 0].numel()))
    # The kernel computes in the type of the running statistics, which it also moves: by nothing.
    unused = torch.zeros(2, channels, dtype=_statistics_type(x), device=x.device)
    moments = [torch.batch_norm_update_stats(piece, unused[0], unused[1], 0.0) for piece in pieces]
    means, variances = (torch.stack(each) for each in zip(*moments, strict=True))
    num_values = means.new_full((len(pieces), 1), pieces[0].numel() // channels)
    num_values[-1] = pieces[-1].numel() // channels
    # Vectors of this length cost nothing in float64, and merging then adds no error.
    return _merge(torch.cat([means, variances, num_values], dim=1).double())


def _merge(parts: Tensor) -> Tensor:
    """Merge the moments of disjoint parts, [num_parts, 2 * channels + 1] (Chan et al., 1979)."""
    if len(parts) == 1:
        return parts
    channels = parts.shape[1] // 2
    means, variances, num_values = parts.split([channels, channels, 1], dim=1)
    total = num_values.sum(dim=0, keepdim=True)
    share = num_values / total
    mean = (share * means).sum(dim=0, keepdim=True)
    # From the variances and the distances of the means: sums of squares would cancel.
    variance = (share * (variances + (means - mean).square_())).sum(dim=0, keepdim=True)
    return torch.cat([mean, variance, total], dim=1)


def _statistics_type(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _Normalize(torch.autograd.Function):
    """Normalize by moments that are themselves functions of the input on all workers."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: _Moments,
        eps: float,
    ) -> Tensor:
        mean, variance, num_values = moments
        scale = torch.ones_like(mean) if weight is None else weight.detach().to(mean.dtype)
        shift = torch.zeros_like(mean) if bias is None else bias.detach().to(mean.dtype)
        ctx.save_for_backward(x, scale, mean, variance, num_values)
        ctx.eps = eps
        ctx.parameter_types = [None if each is None else each.dtype for each in (weight, bias)]
        return _affine(x, scale, shift, mean, variance, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, scale, mean, variance, num_values = ctx.saved_tensors
        grad = _like(grad, x)
        local = _gradient_sums(grad, x, mean, variance, ctx.eps)
        grad_x = None
        if ctx.needs_input_grad[0]:
            slope, level = all_sum(local).div_(num_values)
            # d/dx = scale / std * (grad - level - normalized x * slope): linear in grad and in x.
            # In a low precision the factor of x is rounded, and the shift made for the rounded
            # one: a small part of a small term is lost. The factor of grad stays exact.
            factor = (scale * slope / -(variance + ctx.eps)).to(x.dtype)
            shift = -mean * factor
            grad_x = _affine(grad, scale, shift.to(mean.dtype), level, variance, ctx.eps)
            _add_scaled(grad_x, x, factor)
        # The sums of this worker: whoever averages or adds the gradients does it for these too.
        grad_weight, grad_bias = (
            each.to(dtype) if dtype else None for each, dtype in zip(local, ctx.parameter_types, strict=True)
        )
        return grad_x, grad_weight, grad_bias, None, None


class _NormalizeOnDevice(torch.autograd.Function):
    """The same by the kernels of torch's ``SyncBatchNorm``."""

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
        _check_count(x, counts)
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            x, means, invstds, running_mean, running_variance, rate, eps, counts
        )
        ctx.save_for_backward(x, weight, mean, invstd, counts)
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, mean, invstd, counts = ctx.saved_tensors
        grad = _like(grad, x)
        if x.numel():
            level, slope, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
                grad, x, mean, invstd, weight, ctx.needs_input_grad[0], *ctx.needs_input_grad[1:3]
            )
        else:
            level, slope, grad_weight, grad_bias = (torch.zeros_like(mean) for _ in range(4))
        grad_x = None
        if ctx.needs_input_grad[0]:
            level, slope = all_sum(torch.stack([level, slope]))
            grad_x = torch.batch_norm_backward_elemt(
                grad, x, mean, invstd, weight, level, slope, counts.to(torch.int32)
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
        # The kernel that merges divides by the count: no rows count next to nothing, instead of a mask, for whose
        # size the host would wait.
        mean, invstd = (
            torch.full((channels,), value, dtype=_statistics_type(x), device=x.device)
            for value in (0.0, eps**-0.5)
        )
        count = 1e-30
    return torch.cat([mean, invstd, mean.new_full((1,), count)])[None]


def _dense(x: Tensor) -> Tensor:
    """Return x without gaps, in channels_last if it is, else contiguous."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(x.dim())
    return x if last is not None and x.is_contiguous(memory_format=last) else x.contiguous()


def _like(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient in the memory format of its input."""
    return grad if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)


def _add_scaled(out: Tensor, x: Tensor, factor: Tensor) -> None:
    """Add x times its channel's factor to ``out``, which has the strides of ``x``."""
    channels = len(factor)
    last = x.movedim(1, -1)
    if not last.is_contiguous() or not last.numel():
        out.addcmul_(x, factor.view(-1, *[1] * (x.dim() - 2)))
        return
    # With channels last a row is as short as the channels are few: repeat the factors, so that the
    # innermost loop is long.
    repeats = math.gcd(last.numel() // channels, 2 ** (4096 // channels).bit_length())
    rows = (-1, repeats * channels)
    out.movedim(1, -1).view(rows).addcmul_(last.view(rows), factor.repeat(repeats))


def _affine(x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * scale + shift in one pass over memory."""
    return torch.native_batch_norm(x, scale, shift, mean, variance, False, 0.0, eps)[0]


def _gradient_sums(grad: Tensor, x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """Return the sums of grad * normalized x and of grad, [2, channels]."""
    if x.numel() == 0:
        return mean.new_zeros(2, len(mean))
    if x.is_cuda:
        invstd = (variance + eps).rsqrt()
        level, slope, _, _ = torch.batch_norm_backward_reduce(grad, x, mean, invstd, None, True, False, False)
        return torch.stack([slope * invstd, level])
    _, slope, level = _native_backward(
        grad, x, None, mean, variance, None, None, False, eps, [False, True, True]
    )
    return torch.stack([slope, level])
