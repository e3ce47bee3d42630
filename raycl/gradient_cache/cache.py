"""Gradient caching: the exact gradient of a batch larger than memory (Gao et al., 2021).

A contrastive loss compares all rows of a batch, so the mean over parts of the batch is another loss.
But it depends on the network only through the embeddings. So the batch is embedded in chunks without
graphs, the loss gives its gradient at the embeddings, and each chunk is embedded again with its graph
to backpropagate its part. Memory is one chunk's graph; time is at most one more forward pass, 4/3 of
the whole batch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from raycl.batchnorm import SplitBatchNorm
from raycl.batchnorm.chunked import ChunkedBatchNorm
from raycl.batchnorm.synchronized import SYNCHRONIZED
from raycl.distributed import all_agree
from raycl.errors import ConfigError
from raycl.gradient_cache.chunks import Chunks


def embed_in_chunks(
    tower: nn.Module,
    *rows: Tensor,
    chunk_size: int,
    cached_chunks: int = 1,
    activation_checkpoint_every: int | None = None,
) -> Tensor:
    """Embed a batch with the graph of one chunk at a time; apply any loss, and call ``backward``.

    Embeddings, gradients and BatchNorm's running statistics equal ``tower(*rows)`` for any chunk size.
    Dropout draws the same masks in both passes. BatchNorm over the whole batch stays so: then all
    chunks pass the layers together, see :class:`~raycl.batchnorm.chunked.ChunkedBatchNorm`, which
    needs more memory and has requirements of its own.

    With several workers, all call this together, and average the gradients once afterwards
    (:func:`raycl.distributed.average_`), without ``DistributedDataParallel``.

    Args:
        tower: Rows to embeddings, [batch, ...] to [batch, dim], each row by itself except for BatchNorm.
        rows: [local_batch, ...]; several tensors are passed on together. They get no gradient.
        chunk_size: Rows of a chunk; the last one may be smaller.
        cached_chunks: Chunks that keep their graph from the first pass and need no second one. The
            first of them costs no memory, since its graph is freed before the others are recomputed.
            Each further one costs the graph of a chunk and saves the forward pass of a chunk. Unused
            with BatchNorm over the whole batch.
        activation_checkpoint_every: With BatchNorm over the whole batch only: 1 takes the least memory, ``None``
            the least time, by one forward pass.

    Returns:
        [local_batch, dim], differentiable once. Under ``torch.no_grad`` or with a frozen tower the
        batch is only cut into chunks.

    Raises:
        ConfigError: A number is too small, a tensor of rows requires a gradient, or the network has
            BatchNorm and cannot be traced.
        ReplayError: In ``backward``: the second forward pass of a chunk gave other values. With
            BatchNorm over the whole batch, samples of the values are compared.
    """
    _check(rows, chunk_size, cached_chunks)
    if _is_one_chunk(tower, rows[0], chunk_size):
        return tower(*rows)
    if _normalizes_over_batch(tower):
        chunked = ChunkedBatchNorm(
            tower, chunk_size=chunk_size, activation_checkpoint_every=activation_checkpoint_every
        )
        embed, backward = partial(chunked.embed, _single(rows)), chunked.backward
    else:
        chunks = Chunks(tower, chunk_size=chunk_size, cached_chunks=cached_chunks)
        embed, backward = partial(chunks.embed, *rows), chunks.backward
    if not (torch.is_grad_enabled() and any(each.requires_grad for each in tower.parameters())):
        return embed(with_gradient=False)
    # Autograd needs an input that requires a gradient; the parameters get theirs in backward.
    anchor = torch.empty(0, requires_grad=True, device=rows[0].device)
    return _Cached.apply(anchor, partial(embed, with_gradient=True), backward)  # pyright: ignore[reportReturnType]


@final
class _Cached(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, embed: Callable[[], Tensor], backward: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.backpropagate = backward
        return embed()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        backpropagate, ctx.backpropagate = ctx.backpropagate, None
        if backpropagate is None:
            raise RuntimeError("embeddings of chunks backpropagate once: their chunks are freed afterwards")
        backpropagate(gradient)
        return None, None, None


def _is_one_chunk(tower: nn.Module, rows: Tensor, chunk_size: int) -> bool:
    """Whether one chunk holds all rows; workers with synchronized BatchNorm decide together."""
    is_one = len(rows) <= chunk_size
    if any(isinstance(layer, SYNCHRONIZED) for layer in tower.modules()):
        return all_agree(is_one)
    return is_one


def _single(rows: tuple[Tensor, ...]) -> Tensor:
    if len(rows) != 1:
        raise ConfigError(
            f"a tower with BatchNorm over the batch takes one tensor of rows, got {len(rows)}; "
            "set batchnorm to layer or group"
        )
    return rows[0]


def _normalizes_over_batch(tower: nn.Module) -> bool:
    """Whether a row's embedding depends on rows that may be in other chunks."""
    return any(
        isinstance(layer, _BatchNorm)
        and not isinstance(layer, SplitBatchNorm)
        and (layer.training or not layer.track_running_stats)
        for layer in tower.modules()
    )


def _check(rows: tuple[Tensor, ...], chunk_size: int, cached_chunks: int) -> None:
    if not rows or any(len(each) != len(rows[0]) for each in rows):
        raise ConfigError(
            f"all rows must have one length, got {[len(each) for each in rows]}; pass tensors [local_batch, ...]"
        )
    if chunk_size < 1 or cached_chunks < 0:
        raise ConfigError(
            f"chunk_size must be at least 1 and cached_chunks at least 0, got {chunk_size} and {cached_chunks}"
        )
    if any(each.requires_grad for each in rows):
        raise ConfigError(
            "rows embedded in chunks get no gradient, but one requires it: detach it, or make it part of the tower"
        )
