"""Statistics per channel and the passes over memory that BatchNorm is made of, and what its layers share.

Rows are [batch, channels, ...]; moments of disjoint parts, from pieces, chunks or workers, merge exactly.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from raycl.errors import ConfigError

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

_native_backward = torch.ops.aten.native_batch_norm_backward.default

# Values per channel that torch may sum at once. It sums a channels_last tensor in plain float32: at a
# mean of 1000 and 65,536 values, the error exceeds a third of a standard deviation.
_PIECE_VALUES = 2048


class Moments(NamedTuple):
    """Statistics per channel."""

    mean: Tensor  # [channels]
    variance: Tensor  # [channels], biased
    num_values: Tensor  # [1], values per channel

    @property
    def unbiased_variance(self) -> Tensor:
        """The variance that running statistics follow, [channels]."""
        return self.variance * (self.num_values / (self.num_values - 1))


def moments_of_batch(merged: Tensor, x: Tensor) -> Moments:
    """Return the merged moments of a batch, [1, 2 * channels + 1], in the dtype of statistics.

    Raises ``ValueError`` if the batch holds a single value per channel. ``x`` is a part of the batch.
    """
    channels = x.shape[1]
    check_count(x, merged[0, -1])
    return Moments(*merged.to(statistics_dtype(x)).squeeze(0).split([channels, channels, 1]))


def check_count(x: Tensor, num_values: Tensor) -> None:
    """Refuse a global batch with a single value per channel; ``num_values`` are the counts of its parts."""
    # Two values on this worker are two in all: no read from the device is needed.
    if x.numel() < 2 * x.shape[1] and num_values.sum().item() < 2:
        shape = list(x.shape)
        raise ValueError(f"Expected more than 1 value per channel when training, got input {shape}")


def local_moments(x: Tensor) -> Tensor:
    """Return mean, biased variance and number of values side by side, [1, 2 * channels + 1]."""
    channels = x.shape[1]
    if x.numel() == 0:
        return x.new_zeros(1, 2 * channels + 1, dtype=torch.float64)
    # The CUDA kernel sums by Welford's method in parallel, so it takes all values at once.
    pieces = [x] if x.is_cuda else x.split(max(1, _PIECE_VALUES // x[0, 0].numel()))
    # The kernel computes in the dtype of the running statistics; momentum 0 leaves them unchanged.
    unused = torch.zeros(2, channels, dtype=statistics_dtype(x), device=x.device)
    moments = [torch.batch_norm_update_stats(piece, unused[0], unused[1], 0.0) for piece in pieces]
    means, variances = (torch.stack(each) for each in zip(*moments, strict=True))
    num_values = means.new_full((len(pieces), 1), pieces[0].numel() // channels)
    num_values[-1] = pieces[-1].numel() // channels
    # Float64 costs nothing for such short vectors, and merging then adds no error.
    return merge(torch.cat([means, variances, num_values], dim=1).double())


def merge(parts: Tensor) -> Tensor:
    """Merge the moments of disjoint parts, [num_parts, 2 * channels + 1] (Chan et al., 1979)."""
    if len(parts) == 1:
        return parts
    channels = parts.shape[1] // 2
    means, variances, num_values = parts.split([channels, channels, 1], dim=1)
    total = num_values.sum(dim=0, keepdim=True)
    share = num_values / total
    mean = (share * means).sum(dim=0, keepdim=True)
    # Variances plus squared distances of the means: sums of squares would cancel.
    variance = (share * (variances + (means - mean).square_())).sum(dim=0, keepdim=True)
    return torch.cat([mean, variance, total], dim=1)


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of statistics: at least float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def match_layout(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient in the memory format of its input."""
    return grad if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)


def add_scaled(out: Tensor, x: Tensor, factor: Tensor) -> None:
    """Add x times its channel's factor to ``out``, which has the strides of ``x``."""
    channels = len(factor)
    last = x.movedim(1, -1)
    if not last.is_contiguous() or not last.numel():
        out.addcmul_(x, factor.view(-1, *[1] * (x.dim() - 2)))
        return
    # In channels_last few channels make short rows: repeat the factors for a long inner loop.
    repeats = math.gcd(last.numel() // channels, 2 ** (4096 // channels).bit_length())
    rows = (-1, repeats * channels)
    out.movedim(1, -1).view(rows).addcmul_(last.view(rows), factor.repeat(repeats))


def affine(x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * scale + shift in one pass over memory."""
    return torch.native_batch_norm(x, scale, shift, mean, variance, False, 0.0, eps)[0]


def scale_of(weight: Tensor | None, mean: Tensor) -> Tensor:
    """Return a layer's weight [channels] in the dtype of statistics; ones without a weight."""
    return torch.ones_like(mean) if weight is None else weight.detach().to(mean.dtype)


def gradient_sums(grad: Tensor, x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
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


def gradient_at_input(
    grad: Tensor, x: Tensor, scale: Tensor, moments: Moments, sums: Tensor, eps: float
) -> Tensor:
    """Return the gradient at the input, through the batch's mean and variance as well.

    Args:
        grad: At the output, [rows, channels, ...].
        x: The input of these rows.
        scale: The layer's weight, from :func:`scale_of`.
        moments: The statistics of the whole batch.
        sums: The :func:`gradient_sums` of the whole batch.
        eps: The layer's epsilon.
    """
    mean, variance, num_values = moments
    slope, level = sums / num_values
    # d/dx = scale / std * (grad - level - normalized x * slope): linear in grad and in x. In a low precision
    # the factor of x is rounded, and the shift is computed for the rounded one, so only a small part of a
    # small term is lost. The factor of grad stays exact.
    factor = (scale * slope / -(variance + eps)).to(x.dtype)
    shift = (-mean * factor).to(mean.dtype)
    grad_x = affine(grad, scale, shift, level, variance, eps)
    add_scaled(grad_x, x, factor)
    return grad_x


def normalize(
    x: Tensor, layer: _BatchNorm, moments: Moments, at_input: Callable[..., Tensor | None] | None
) -> Tensor:
    """Normalize rows [rows, channels, ...] by the moments of their whole batch.

    Weight and bias receive the gradients of these rows. The backward pass calls ``at_input`` with the arguments of
    :func:`gradient_at_input`, of which the sums are of these rows only; it returns the gradient at ``x``, or None.
    """
    # The anchor makes autograd run the backward pass even if nothing else requires it.
    anchor = None if at_input is None else torch.zeros((), requires_grad=True)
    return _Normalize.apply(anchor, x, layer.weight, layer.bias, moments, layer.eps, at_input)  # pyright: ignore[reportReturnType]


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor | None,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: Moments,
        eps: float,
        at_input: Callable[..., Tensor | None] | None,
    ) -> Tensor:
        mean, variance, _ = moments
        scale = scale_of(weight, mean)
        shift = torch.zeros_like(mean) if bias is None else bias.detach().to(mean.dtype)
        ctx.save_for_backward(x, scale, *moments)
        ctx.eps, ctx.at_input = eps, at_input
        ctx.parameter_types = [None if each is None else each.dtype for each in (weight, bias)]
        return affine(x, scale, shift, mean, variance, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, scale, *moments = ctx.saved_tensors
        grad, moments = match_layout(grad, x), Moments(*moments)
        sums = gradient_sums(grad, x, moments.mean, moments.variance, ctx.eps)
        grad_x = None if ctx.at_input is None else ctx.at_input(grad, x, scale, moments, sums, ctx.eps)
        grad_weight, grad_bias = (
            # Copies: autograd adds to a parameter's gradient in place.
            each.to(dtype, copy=True) if dtype else None
            for each, dtype in zip(sums, ctx.parameter_types, strict=True)
        )
        return None, grad_x, grad_weight, grad_bias, None, None, None


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
