"""BatchNorm with statistics of the whole batch, merged from chunks and workers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from raycl.batchnorm import kernels
from raycl.batchnorm.kernels import Moments, gradient_sums, match_layout, merge, moments_of_batch
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
    return [moments_of_batch(merge(part), value) for part, value in zip(parts, values, strict=True)]


def normalize(
    x: Tensor, layer: _BatchNorm, moments: Moments, record: Callable[[Tensor, Tensor], None] | None
) -> Tensor:
    """Normalize a chunk [rows, channels, ...] by the moments of the whole batch.

    The gradient at ``x`` depends on all chunks, so autograd gets none. The backward pass calls
    ``record`` with the gradient at the output and the chunk's two sums;
    :func:`raycl.batchnorm.kernels.gradient_at_input` computes the gradient at ``x`` once the sums of all
    chunks are known. Weight and bias receive this chunk's gradient at once.
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
        ctx.save_for_backward(x, moments.mean, moments.variance)
        ctx.eps, ctx.record = eps, record
        ctx.parameter_types = [None if each is None else each.dtype for each in (weight, bias)]
        return kernels.normalize(x, weight, bias, moments.mean, moments.variance, eps)

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
    return list(all_sum(torch.cat(list(sums), dim=1)).split([each.shape[1] for each in sums], dim=1))
