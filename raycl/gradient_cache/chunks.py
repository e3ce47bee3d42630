"""Embed a batch in independent chunks, first for the loss, then for the gradient."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from raycl.recompute import (
    RandomState,
    RecomputeCheck,
    RunningStatistics,
    current_autocast,
    first_nondeterministic_layer,
)

Rows = tuple[Tensor, ...]


@final
class Chunks:
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
