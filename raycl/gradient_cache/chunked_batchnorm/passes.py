"""Gradient caching with BatchNorm over the whole batch: exact, for more time or memory.

Gradient caching (Gao et al., 2021) embeds a batch chunk by chunk without graphs, takes the loss's
gradient at the embeddings, and runs each chunk again with its graph. BatchNorm breaks it: the
statistics of a chunk differ from the batch's, they mark its rows, and the gradient through the
batch's mean and variance is lost.

Here all chunks advance together. At each BatchNorm every chunk waits until the moments of all chunks
(and workers) are merged. In the backward pass they wait for the two sums that the gradient of
BatchNorm needs. Only one graph exists at a time, of one chunk and one segment; values that wait
between segments exist for the whole batch. So memory falls by less than with independent chunks, and
``activation_checkpoint_every`` saves more for one more forward pass.
"""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import final

import torch
from torch import Tensor, nn
from torch.fx import Node

from raycl.batchnorm.kernels import Moments, count_batch, local_moments, merge, moments_of_batch, track
from raycl.batchnorm.synchronized import SYNCHRONIZED
from raycl.distributed import all_sum, gather_detached
from raycl.errors import ConfigError
from raycl.gradient_cache.chunked_batchnorm.chunk import Chunk, Statistics
from raycl.gradient_cache.chunked_batchnorm.segments import Network, Segment
from raycl.gradient_cache.chunked_batchnorm.trace import changes_itself
from raycl.gradient_cache.recompute import RecomputeCheck, current_autocast


@final
class ChunkedBatchNorm:
    """One batch in chunks, exactly as in one pass: ``embed`` once, then ``backward`` at most once.

    Embeddings, gradients and running statistics equal ``nn.BatchNorm`` on this worker's rows. If any
    layer is synchronized they equal it on the rows of all workers, and ``embed`` and ``backward`` are
    collective. Layers in eval mode use their running statistics. Chunks may differ in length, and
    workers in their number of rows.

    The tower keeps its modules, parameters and hooks. Layers run twice, so their hooks are called
    twice. Hooks on BatchNorm layers and on modules that contain modules would not be called, and are
    refused. Dropout draws layer by layer, in another order than a single pass.

    Args:
        tower: Rows to embeddings, [batch, ...] to [batch, dim]. Each row by itself except for
            ``nn.BatchNorm1d/2d/3d`` or synchronized layers. ``torch.fx`` must be able to trace it.
        chunk_size: Rows that have a graph at the same time.
        activation_checkpoint_every: ``None`` keeps all values that wait between segments, from forward to
            backward. A number k keeps them only at every k-th point through which a single value
            passes, such as the end of a residual block, and recomputes the others: less memory, and
            one more forward pass without graphs.

    Raises:
        ConfigError: The tower cannot be traced, contains another kind of BatchNorm, or
            ``activation_checkpoint_every`` is not positive.
    """

    def __init__(
        self, tower: nn.Module, *, chunk_size: int, activation_checkpoint_every: int | None = None
    ) -> None:
        if activation_checkpoint_every is not None and activation_checkpoint_every < 1:
            raise ConfigError(
                f"activation_checkpoint_every must be None or at least 1, got {activation_checkpoint_every}; try 1"
            )
        self._tower, self._chunk_size = tower, chunk_size
        self._network = Network(tower)
        # Indices of segments, ascending from 0: their inputs are kept for the backward pass.
        self._milestones = self._network.milestones(activation_checkpoint_every)
        self._statistics, self._check = Statistics(), RecomputeCheck()
        self._over_workers = any(
            isinstance(each, SYNCHRONIZED) for each in self._network.trace.layers.values()
        )
        self._chunks: list[Chunk] = []

    @torch.no_grad()
    def embed(self, rows: Tensor, *, with_gradient: bool = True) -> Tensor:
        """Return the embeddings [batch, dim] of rows [batch, ...], without a graph.

        Args:
            rows: This worker's rows.
            with_gradient: Keep the values for ``backward``.

        Raises:
            ConfigError: An operation of the tower would give other results in chunks.
            ValueError: The batch holds a single value per channel.
        """
        network, result = self._network, self._network.trace.result
        self._autocast = current_autocast(rows.device)
        self._chunks = [Chunk(network, part, self._statistics) for part in rows.split(self._chunk_size)]
        kept = (
            {network.trace.rows}.union(*map(network.crossing, self._milestones)) if with_gradient else set()
        )
        before = _versions(self._tower)
        with _own_casts():
            for segment in network.segments:
                self._advance(segment, kept)
        changed = [name for name, version in _versions(self._tower).items() if version != before.get(name)]
        if changed:
            raise changes_itself(changed[0])
        embeddings = torch.cat([chunk.values[result] for chunk in self._chunks])
        for chunk in self._chunks:
            chunk.free({result} - kept)
        self._update_running_statistics()
        return embeddings

    def backward(self, gradient: Tensor) -> None:
        """Add to the gradients of the parameters, under the random state and autocast of ``embed``.

        Args:
            gradient: Of this worker's loss at its embeddings, [batch, dim]. Parameters receive this
                worker's share, to be averaged or summed over workers as ``DistributedDataParallel``
                does with synchronized layers.

        Raises:
            ReplayError: The network gave other values than in the forward pass.
        """
        for chunk, part in zip(self._chunks, gradient.detach().split(self._chunk_size), strict=True):
            chunk.add_gradient(self._network.trace.result, part)
        differentiable = self._network.differentiable()
        with _own_casts(), self._autocast():
            for start, end in reversed(list(pairwise([*self._milestones, len(self._network.segments)]))):
                self._backward_to_milestone(self._network.segments[start:end], differentiable)
        self._chunks = []
        self._check.check()

    def _update_running_statistics(self) -> None:
        """Update the layers in the order of the network's own forward pass."""
        for call, layer in self._network.trace.layers.items():
            if layer.training:
                moments = self._statistics.moments[call.all_input_nodes[0]]
                track(layer, moments.mean, moments.unbiased_variance, count_batch(layer))

    def _advance(self, segment: Segment, kept: set[Node]) -> None:
        moments: list[Tensor] = []
        first: list[Tensor] = []
        for chunk in self._chunks:
            chunk.advance(segment)
            if values := [chunk.values[node] for node in segment.measured]:
                moments.append(torch.cat([local_moments(each.detach()) for each in values], dim=1))
                first = first or values
            chunk.free(
                [n for n in chunk.values if not (n in kept or self._network.is_read_after(n, segment))]
            )
        if moments:
            merged = _merge_moments(moments, first, over_workers=self._over_workers)
            self._statistics.moments |= dict(zip(segment.measured, merged, strict=True))

    def _backward_to_milestone(self, segments: list[Segment], differentiable: set[Node]) -> None:
        if any(differentiable.intersection(segment.nodes) for segment in segments):
            for chunk in self._chunks:
                for segment in segments[:-1]:
                    chunk.recompute(segment)
        for segment in reversed(segments):
            self._backward(segment, differentiable)

    def _backward(self, segment: Segment, differentiable: set[Node]) -> None:
        layers = self._network.trace.layers
        calls = [n for n in segment.nodes if n in layers and n.all_input_nodes[0] in differentiable]
        moments = [self._statistics.moments[call.all_input_nodes[0]] for call in calls]
        sums = {
            call: torch.stack([each.mean, each.mean]).zero_()
            for call, each in zip(calls, moments, strict=True)
        }
        for chunk in self._chunks:
            if differentiable.intersection(segment.nodes):
                for call, each in chunk.backward(segment, differentiable, self._check).items():
                    sums[call] += each
            chunk.free([n for n in chunk.values if not self._network.is_read_before(n, segment)])
        totals = list(sums.values())
        if self._over_workers and totals:
            totals = all_sum(torch.cat(totals, dim=1)).split([each.shape[1] for each in totals], dim=1)
        self._statistics.sums |= dict(zip(calls, totals, strict=True))


def _merge_moments(
    chunks: Sequence[Tensor], values: Sequence[Tensor], *, over_workers: bool
) -> list[Moments]:
    """Merge the moments [1, numbers] of all chunks, over all workers by one collective; ``values`` are of one chunk.

    Raises ``ValueError`` if the batch holds a single value per channel.
    """
    widths = [2 * value.shape[1] + 1 for value in values]
    local = torch.cat([merge(part) for part in torch.cat(list(chunks)).split(widths, dim=1)], dim=1)
    parts = (gather_detached(local) if over_workers else local).split(widths, dim=1)
    return [moments_of_batch(merge(part), value) for part, value in zip(parts, values, strict=True)]


@contextlib.contextmanager
def _own_casts() -> Iterator[None]:
    """Keep autocast from sharing cast weights between passes with a graph and passes without one."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def _versions(tower: nn.Module) -> dict[str, int]:
    return {name: each._version for name, each in chain(tower.named_parameters(), tower.named_buffers())}
