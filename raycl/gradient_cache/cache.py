"""Gradient caching: the exact gradient of a batch larger than memory (Gao et al., 2021).

A contrastive loss compares all rows of a batch, so the mean over parts of the batch is another loss.
But it depends on the network only through the embeddings. So the batch is embedded in chunks without
graphs, the loss gives its gradient at the embeddings, and each chunk is embedded again with its graph
to backpropagate its part. Memory is one chunk's graph; time is at most one more forward pass, 4/3 of
the whole batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from raycl.batchnorm import SplitBatchNorm
from raycl.batchnorm.synchronized import SYNCHRONIZED
from raycl.distributed import all_agree
from raycl.errors import ConfigError
from raycl.gradient_cache.chunked_batchnorm import ChunkedBatchNorm
from raycl.gradient_cache.recompute import (
    RandomState,
    RecomputeCheck,
    RunningStatistics,
    current_autocast,
    first_nondeterministic_layer,
)

Rows = tuple[Tensor, ...]


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
    chunks pass the layers together, see
    :class:`~raycl.gradient_cache.chunked_batchnorm.ChunkedBatchNorm`, which needs more memory and has
    requirements of its own.

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
    if not normalizes_over_batch(tower):
        chunks = _IndependentChunks(tower, chunk_size=chunk_size, cached_chunks=cached_chunks)
    elif len(rows) == 1:
        chunks = ChunkedBatchNorm(
            tower, chunk_size=chunk_size, activation_checkpoint_every=activation_checkpoint_every
        )
    else:
        raise ConfigError(
            f"a tower with BatchNorm over the batch takes one tensor of rows, got {len(rows)}; "
            "set batchnorm to layer or group"
        )
    if not (torch.is_grad_enabled() and any(each.requires_grad for each in tower.parameters())):
        return chunks.embed(*rows, with_gradient=False)
    # Autograd needs an input that requires a gradient; the parameters get theirs in backward.
    anchor = torch.empty(0, requires_grad=True, device=rows[0].device)
    return _Cached.apply(anchor, chunks, *rows)  # pyright: ignore[reportReturnType]


@final
class _Cached(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, chunks: "_IndependentChunks | ChunkedBatchNorm", *rows: Tensor
    ) -> Tensor:
        ctx.chunks, ctx.num_rows = chunks, len(rows)
        return chunks.embed(*rows, with_gradient=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        chunks, ctx.chunks = ctx.chunks, None
        if chunks is None:
            raise RuntimeError("embeddings of chunks backpropagate once: their chunks are freed afterwards")
        chunks.backward(gradient)
        return (None,) * (2 + ctx.num_rows)


@final
class _IndependentChunks:
    """Embed the chunks of a batch; ``backward`` embeds them again, except those with a cached graph.

    Only for towers whose rows do not depend on other chunks. The running statistics of
    :class:`~raycl.batchnorm.SplitBatchNorm` are updated once, as by the whole batch.
    """

    def __init__(self, tower: nn.Module, *, chunk_size: int, cached_chunks: int) -> None:
        self._tower, self._chunk_size, self._cached_chunks = tower, chunk_size, cached_chunks
        self._recomputed: list[_Chunk] = []
        self._cached: list[Tensor] = []
        self._check = RecomputeCheck()

    def embed(self, *rows: Tensor, with_gradient: bool) -> Tensor:
        """Return the embeddings [num_rows, dim], without graph."""
        self._autocast = current_autocast(rows[0].device)
        chunks = list(zip(*(each.split(self._chunk_size) for each in rows), strict=True))
        num_cached = min(self._cached_chunks, len(chunks)) if with_gradient else 0
        # The last chunks keep their graph: no graph takes memory while the others pass.
        first_cached = len(chunks) - num_cached
        statistics = RunningStatistics(self._tower)
        embeddings = [
            *self._embed_without_graph(chunks[:first_cached], statistics, with_gradient=with_gradient),
            *self._embed_with_graph(chunks[first_cached:], statistics),
        ]
        statistics.update()
        return torch.cat(embeddings)

    def backward(self, gradient: Tensor) -> None:
        """Backpropagate ``gradient`` [num_rows, dim] into the parameters; once.

        Raises ``ReplayError`` if a chunk's embeddings differ from the first pass.
        """
        gradients = gradient.split(self._chunk_size)
        # Cached graphs go first, and each pass frees its own, so that one graph at a time is left.
        for part in gradients[len(self._recomputed) :]:
            torch.autograd.backward(self._cached.pop(0), part)
        statistics = RunningStatistics(self._tower)
        for chunk, part in zip(self._recomputed, gradients, strict=False):
            torch.autograd.backward(self._embed_again(chunk), part)
            statistics.restore()
        self._recomputed = []
        self._check.check()

    def _embed_without_graph(
        self, chunks: Sequence[Rows], statistics: RunningStatistics, *, with_gradient: bool
    ) -> Iterator[Tensor]:
        for number, rows in enumerate(chunks):
            random_state = RandomState(rows[0].device)
            with torch.no_grad():
                embedding = self._tower(*rows)
            statistics.record(num_rows=len(rows[0]))
            if with_gradient:
                self._recomputed.append(_Chunk(number, rows, random_state, embedding))
            yield embedding

    def _embed_with_graph(self, chunks: Sequence[Rows], statistics: RunningStatistics) -> Iterator[Tensor]:
        for rows in chunks:
            with torch.enable_grad():
                self._cached.append(self._tower(*rows))
            statistics.record(num_rows=len(rows[0]))
            yield self._cached[-1].detach()

    def _embed_again(self, chunk: "_Chunk") -> Tensor:
        with torch.enable_grad(), self._autocast(), chunk.random_state.restored():
            embedding = self._tower(*chunk.rows)
            self._check.add(embedding, chunk.embedding, partial(self._describe, chunk))
        return embedding

    def _describe(self, chunk: "_Chunk") -> str:
        with self._autocast():
            layer = first_nondeterministic_layer(self._tower, chunk.rows, chunk.random_state)
        return f"chunk {chunk.number}{f', at the layer {layer},' if layer else ''}"


@final
@dataclass(frozen=True)
class _Chunk:
    number: int
    rows: Rows
    random_state: RandomState
    embedding: Tensor


def _is_one_chunk(tower: nn.Module, rows: Tensor, chunk_size: int) -> bool:
    """Whether one chunk holds all rows; workers with synchronized BatchNorm decide together."""
    is_one = len(rows) <= chunk_size
    if any(isinstance(layer, SYNCHRONIZED) for layer in tower.modules()):
        return all_agree(is_one)
    return is_one


def normalizes_over_batch(tower: nn.Module) -> bool:
    """Whether a row's embedding depends on rows that may be in other chunks."""
    return any(
        isinstance(layer, _BatchNorm)
        and not isinstance(layer, SplitBatchNorm)
        and (layer.training or not layer.track_running_stats)
        for layer in tower.modules()
    )


def _check(rows: Rows, chunk_size: int, cached_chunks: int) -> None:
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
