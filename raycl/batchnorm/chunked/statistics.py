"""BatchNorm with statistics of the whole batch, merged from chunks and workers."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from raycl.batchnorm import kernels
from raycl.batchnorm.base import BatchNormBase
from raycl.batchnorm.kernels import (
    Moments,
    add_scaled,
    affine,
    check_count,
    gradient_sums,
    match_layout,
    merge,
    statistics_dtype,
)
from raycl.distributed import all_sum, gather_detached


def local_moments(values: Sequence[Tensor]) -> Tensor:
    """Return the moments of a chunk's values [rows, channels, ...] side by side, float64 [1, numbers]."""
    return torch.cat([kernels.local_moments(value.detach()) for value in values], dim=1)


def merge_moments(chunks: Sequence[Tensor], values: Sequence[Tensor], *, over_workers: bool) -> list[Moments]:
    """Merge the :func:`local_moments` of all chunks; over all workers by one collective.

    Args:
        chunks: Moments of each chunk, [1, numbers].
        values: The values of one chunk, for their channels and types.
        over_workers: Whether the batch spans all workers, or this one alone.

    Raises:
        ValueError: The batch holds a single value per channel.
    """
    widths = [2 * value.shape[1] + 1 for value in values]
    local = torch.cat([merge(part) for part in torch.cat(list(chunks)).split(widths, dim=1)], dim=1)
    parts = (gather_detached(local) if over_workers else local).split(widths, dim=1)
    return [_checked(merge(part), value) for part, value in zip(parts, values, strict=True)]


def _checked(merged: Tensor, value: Tensor) -> Moments:
    channels = value.shape[1]
    check_count(value, merged[0, -1])
    return Moments(*merged.to(statistics_dtype(value)).squeeze(0).split([channels, channels, 1]))


def track(layer: _BatchNorm, moments: Moments) -> None:
    """Update a layer's running statistics by one batch, as its own forward pass would."""
    if layer.training:
        # Plain nn.BatchNorm layers have all that these two methods use.
        layer = cast("BatchNormBase", layer)
        rate = BatchNormBase._count_batch(layer)
        unbiased_variance = moments.variance * (moments.num_values / (moments.num_values - 1))
        BatchNormBase._track(layer, moments.mean, unbiased_variance, rate)


def normalize(
    x: Tensor, layer: _BatchNorm, moments: Moments, record: Callable[[Tensor, Tensor], None] | None
) -> Tensor:
    """Normalize a chunk [rows, channels, ...] by the moments of the whole batch.

    The gradient at ``x`` depends on all chunks, so autograd gets none. The backward pass calls
    ``record`` with the gradient at the output and the chunk's two sums; :func:`gradient_at_input`
    computes the gradient at ``x`` once the sums of all chunks are known. Weight and bias receive
    this chunk's gradient at once.
    """
    anchor = None if record is None else torch.zeros((), requires_grad=True)
    return _Normalize.apply(anchor, x.detach(), layer.weight, layer.bias, moments, layer.eps, record)  # pyright: ignore[reportReturnType]


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor | None,  # makes autograd run the backward pass even if weight and bias are frozen
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: Moments,
        eps: float,
        record: Callable[[Tensor, Tensor], None] | None,
    ) -> Tensor:
        mean, variance, _ = moments
        ctx.save_for_backward(x, mean, variance)
        ctx.eps, ctx.record = eps, record
        ctx.parameter_types = [None if each is None else each.dtype for each in (weight, bias)]
        shift = torch.zeros_like(mean) if bias is None else bias.detach().to(mean.dtype)
        return affine(x, _scale(weight, mean), shift, mean, variance, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, mean, variance = ctx.saved_tensors
        grad = match_layout(grad, x)
        sums = gradient_sums(grad, x, mean, variance, ctx.eps)
        if ctx.record is not None:
            ctx.record(grad, sums)
        grad_weight, grad_bias = (
            # Copies: autograd adds to a parameter's gradient in place.
            each.to(dtype, copy=True) if dtype else None
            for each, dtype in zip(sums, ctx.parameter_types, strict=True)
        )
        return None, None, grad_weight, grad_bias, None, None, None


def sum_over_workers(sums: Sequence[Tensor]) -> list[Tensor]:
    """Sum several layers' [2, channels] over all workers: one collective."""
    if not sums:
        return []
    widths = [each.shape[1] for each in sums]
    return list(all_sum(torch.cat(list(sums), dim=1)).split(widths, dim=1))


def gradient_at_input(grad: Tensor, x: Tensor, layer: _BatchNorm, moments: Moments, sums: Tensor) -> Tensor:
    """Return the gradient at a chunk's input, through the batch's mean and variance as well.

    Args:
        grad: At the layer's output, [rows, channels, ...], as :func:`normalize` recorded it.
        x: The layer's input, [rows, channels, ...].
        layer: The layer.
        moments: Of the whole batch.
        sums: Over the whole batch, of grad * normalized x and of grad, [2, channels].
    """
    mean, variance, num_values = moments
    slope, level = sums / num_values
    scale = _scale(layer.weight, mean)
    # d/dx = scale / std * (grad - level - normalized x * slope): linear in grad and in x. In a low
    # precision the factor of x is rounded, and the shift made for the rounded one.
    factor = (scale * slope / -(variance + layer.eps)).to(x.dtype)
    shift = (-mean * factor).to(mean.dtype)
    grad_x = affine(grad, scale, shift, level, variance, layer.eps)
    add_scaled(grad_x, x, factor)
    return grad_x


def _scale(weight: Tensor | None, mean: Tensor) -> Tensor:
    return torch.ones_like(mean) if weight is None else weight.detach().to(mean.dtype)
