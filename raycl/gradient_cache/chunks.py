"""Chunks of a batch, embedded twice: once for the loss, once for the gradient."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from raycl.recompute import (
    RandomState,
    Replays,
    RunningStatistics,
    autocast_as_now,
    first_nondeterministic_layer,
)

Rows = tuple[Tensor, ...]


@final
class Chunks:
    """Embed the chunks of a batch; ``backward`` embeds them again, but for those whose graph is kept.

    Only for towers that embed each row without the rows of other chunks. The running statistics of
    :class:`~raycl.batchnorm.SplitBatchNorm` move once, as far as the whole batch would move them.
    """

    def __init__(self, tower: nn.Module, *, chunk_size: int, kept_chunks: int) -> None:
        self._tower, self._chunk_size, self._kept_chunks = tower, chunk_size, kept_chunks
        self._replayed: list[_Chunk] = []
        self._kept: list[Tensor] = []
        self._replays = Replays()

    def embed(self, *rows: Tensor, with_gradient: bool) -> Tensor:
        """Return the embeddings [num_rows, dim], without graph."""
        self._autocast = autocast_as_now(rows[0].device)
        chunks = list(zip(*(each.split(self._chunk_size) for each in rows), strict=True))
        num_kept = min(self._kept_chunks, len(chunks)) if with_gradient else 0
        # The last ones are kept: while the others pass, no graph takes up room.
        first_kept = len(chunks) - num_kept
        statistics = RunningStatistics(self._tower)
        embeddings = [
            *self._embed_plainly(chunks[:first_kept], statistics, with_gradient=with_gradient),
            *self._embed_with_graph(chunks[first_kept:], statistics),
        ]
        statistics.move()
        return torch.cat(embeddings)

    def backward(self, gradient: Tensor) -> None:
        """Add to the parameters' gradients what ``gradient`` [num_rows, dim] asks; once.

        Raises ``ReplayError`` if a chunk's embeddings are not what they were.
        """
        gradients = gradient.split(self._chunk_size)
        # Those that are kept go first, each freed by its own pass, so that one graph at a time is left.
        for its_gradient in gradients[len(self._replayed) :]:
            torch.autograd.backward(self._kept.pop(0), its_gradient)
        statistics = RunningStatistics(self._tower)
        for chunk, its_gradient in zip(self._replayed, gradients, strict=False):
            torch.autograd.backward(self._embed_again(chunk), its_gradient)
            statistics.put_back()
        self._replayed = []
        self._replays.check()

    def _embed_plainly(
        self, chunks: Sequence[Rows], statistics: RunningStatistics, *, with_gradient: bool
    ) -> Iterator[Tensor]:
        for number, rows in enumerate(chunks):
            random_state = RandomState(rows[0].device)
            with torch.no_grad():
                embedding = self._tower(*rows)
            statistics.take(num_rows=len(rows[0]))
            if with_gradient:
                self._replayed.append(_Chunk(number, rows, random_state, embedding))
            yield embedding

    def _embed_with_graph(self, chunks: Sequence[Rows], statistics: RunningStatistics) -> Iterator[Tensor]:
        for rows in chunks:
            with torch.enable_grad():
                self._kept.append(self._tower(*rows))
            statistics.take(num_rows=len(rows[0]))
            yield self._kept[-1].detach()

    def _embed_again(self, chunk: "_Chunk") -> Tensor:
        with torch.enable_grad(), self._autocast(), chunk.random_state.again():
            embedding = self._tower(*chunk.rows)
            self._replays.add(embedding, chunk.embedding, partial(self._describe, chunk))
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
