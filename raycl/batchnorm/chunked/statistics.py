"""BatchNorm by statistics of the whole batch, which come in from chunks and workers."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from raycl.batchnorm.base import BatchNormBase
from raycl.batchnorm.synchronized import (
    _add_scaled,
    _affine,
    _check_count,
    _gradient_sums,
    _like,
    _local_moments,
    _merge,
    _Moments,
    _statistics_type,
)
from raycl.distributed import all_sum, gather_detached

Moments = _Moments


def local_moments(values: Sequence[Tensor]) -> Tensor:
    """Return the moments of a chunk's values [rows, channels, ...] side by side, float64 [1, numbers]."""
    return torch.cat([_local_moments(value.detach()) for value in values], dim=1)


def merge_moments(chunks: Sequence[Tensor], values: Sequence[Tensor], *, over_workers: bool) -> list[Moments]:
    """Merge what :func:`local_moments` said of each chunk; over all workers, one collective.

    Args:
        chunks: Of each chunk, [1, numbers].
        values: One chunk's values, for their channels and types.
        over_workers: Whether the batch is that of all workers, or this one's.

    Raises:
        ValueError: The batch holds a single value per channel.
    """
    widths = [2 * value.shape[1] + 1 for value in values]
    local = torch.cat([_merge(part) for part in torch.cat(list(chunks)).split(widths, dim=1)], dim=1)
    parts = (gather_detached(local) if over_workers else local).split(widths, dim=1)
    return [_checked(_merge(part), value) for part, value in zip(parts, values, strict=True)]


def _checked(merged: Tensor, value: Tensor) -> Moments:
    channels = value.shape[1]
    _check_count(value, merged[0, -1])
    return Moments(*merged.to(_statistics_type(value)).squeeze(0).split([channels, channels, 1]))


def track(layer: _BatchNorm, moments: Moments) -> None:
    """Move a layer's running statistics by those of one batch, as its own forward pass would."""
    if layer.training:
        # Nothing here is particular to raycl's kinds of BatchNorm.
        layer = cast("BatchNormBase", layer)
        rate = BatchNormBase._count_batch(layer)
        unbiased_variance = moments.variance * (moments.num_values / (moments.num_values - 1))
        BatchNormBase._track(layer, moments.mean, unbiased_variance, rate)


def normalize(
    x: Tensor, layer: _BatchNorm, moments: Moments, note: Callable[[Tensor, Tensor], None] | None
) -> Tensor:
    """Normalize a chunk [rows, channels, ...] of the batch whose moments are given.

    No gradient flows into ``x``, since it depends on all chunks: in the backward pass ``note`` is
    told the gradient at the output and the chunk's two sums, from which :func:`gradient_at_input`
    makes it when all have come. Weight and bias receive this chunk's gradient at once.
    """
    anchor = None if note is None else torch.zeros((), requires_grad=True)
    return _Normalize.apply(anchor, x.detach(), layer.weight, layer.bias, moments, layer.eps, note)  # pyright: ignore[reportReturnType]


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor | None,  # asks for a backward pass where weight and bias do not
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: Moments,
        eps: float,
        note: Callable[[Tensor, Tensor], None] | None,
    ) -> Tensor:
        mean, variance, _ = moments
        ctx.save_for_backward(x, mean, variance)
        ctx.eps, ctx.note = eps, note
        ctx.parameter_types = [None if each is None else each.dtype for each in (weight, bias)]
        shift = torch.zeros_like(mean) if bias is None else bias.detach().to(mean.dtype)
        return _affine(x, _scale(weight, mean), shift, mean, variance, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, mean, variance = ctx.saved_tensors
        grad = _like(grad, x)
        sums = _gradient_sums(grad, x, mean, variance, ctx.eps)
        if ctx.note is not None:
            ctx.note(grad, sums)
        grad_weight, grad_bias = (
            # Copies: what becomes a parameter's gradient is added to in place.
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
    """Return the gradient at a chunk's input, that through mean and variance of the batch included.

    Args:
        grad: At the layer's output, [rows, channels, ...], as :func:`normalize` noted it.
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
    grad_x = _affine(grad, scale, shift, level, variance, layer.eps)
    _add_scaled(grad_x, x, factor)
    return grad_x


def _scale(weight: Tensor | None, mean: Tensor) -> Tensor:
    return torch.ones_like(mean) if weight is None else weight.detach().to(mean.dtype)
