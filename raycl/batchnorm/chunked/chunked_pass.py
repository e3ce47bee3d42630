"""The chunks of one batch on their way through a network, waiting for each other at every BatchNorm."""

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from typing import final

import torch
from torch import Tensor
from torch.fx import Node

from raycl.batchnorm.chunked.chunk import Chunk, Statistics, random_state, set_random_state
from raycl.batchnorm.chunked.segments import Network, Segment
from raycl.batchnorm.chunked.statistics import local_moments, merge_moments, sum_over_workers, track
from raycl.batchnorm.synchronized import SYNCHRONIZED
from raycl.errors import ConfigError
from raycl.recompute import Replays


@final
class ChunkedPass:
    """One batch, forward once and backward at most once.

    Args:
        network: What it passes through.
        rows: [batch, ...].
        chunk_size: Rows that go together.
        milestones: Indices of segments, from 0 upwards. The values that lead into these are kept
            for the way back, all others are made once more.
    """

    def __init__(self, network: Network, rows: Tensor, *, chunk_size: int, milestones: list[int]) -> None:
        self._network = network
        self._chunk_size = chunk_size
        self._milestones = milestones
        self._statistics = Statistics()
        self._replays = Replays()
        self._chunks = [Chunk(network, part, self._statistics) for part in rows.split(chunk_size)]
        self._over_workers = any(isinstance(each, SYNCHRONIZED) for each in network.trace.layers.values())
        self._shape = torch.Size()
        self._device = rows.device
        self._autocast = (
            torch.is_autocast_enabled(rows.device.type),
            torch.get_autocast_dtype(rows.device.type),
        )

    def forward(self, *, keep: bool) -> Tensor:
        """Return the embeddings [batch, dim]; keep what the way back needs."""
        kept = {self._network.trace.rows}.union(*map(self._network.crossing, self._milestones))
        for segment in self._network.segments:
            self._advance(segment, kept if keep else set())
        result = self._network.trace.result
        embeddings = torch.cat([chunk.values[result] for chunk in self._chunks])
        for chunk in self._chunks:
            chunk.forget({result} - kept)
        self._shape = embeddings.shape
        return embeddings

    def track(self) -> None:
        """Move the running statistics, in the order of the network's own forward pass."""
        for call, layer in self._network.trace.layers.items():
            track(layer, self._statistics.moments[call.all_input_nodes[0]])

    def check(self, gradient: Tensor) -> None:
        """Raise ``ConfigError`` unless a gradient is of the shape of the embeddings."""
        if gradient.shape != self._shape:
            raise ConfigError(
                f"the gradient must be of the shape of the embeddings, {list(self._shape)}, "
                f"came {list(gradient.shape)}; pass the loss's gradient at what embed returned"
            )

    def backward(self, gradient: Tensor) -> None:
        """Add to the parameters' gradients, whatever the random state and the autocast around it.

        Raises ``ReplayError`` if the network gave other values than in the forward pass.
        """
        for chunk, part in zip(self._chunks, gradient.detach().split(self._chunk_size), strict=True):
            chunk.ask(self._network.trace.result, part)
        learned = self._network.learned()
        with _random_state_put_back(self._device), self._autocast_of_forward():
            for start, end in reversed(list(pairwise([*self._milestones, len(self._network.segments)]))):
                self._go_back_to_milestone(self._network.segments[start:end], learned)
        self._replays.check()

    def _advance(self, segment: Segment, kept: set[Node]) -> None:
        moments: list[Tensor] = []
        first: list[Tensor] = []
        for chunk in self._chunks:
            chunk.advance(segment)
            if values := [chunk.values[node] for node in segment.measured]:
                moments.append(local_moments(values))
                first = first or values
            chunk.forget(
                [n for n in chunk.values if not (n in kept or self._network.is_read_after(n, segment))]
            )
        if moments:
            merged = merge_moments(moments, first, over_workers=self._over_workers)
            self._statistics.moments |= dict(zip(segment.measured, merged, strict=True))

    def _go_back_to_milestone(self, stretch: list[Segment], learned: set[Node]) -> None:
        if any(learned.intersection(segment.nodes) for segment in stretch):
            for chunk in self._chunks:
                for segment in stretch[:-1]:
                    chunk.repeat(segment)
        for segment in reversed(stretch):
            self._go_back(segment, learned)

    def _go_back(self, segment: Segment, learned: set[Node]) -> None:
        layers = self._network.trace.layers
        calls = [n for n in segment.nodes if n in layers and n.all_input_nodes[0] in learned]
        moments = [self._statistics.moments[call.all_input_nodes[0]] for call in calls]
        sums = {
            call: torch.stack([each.mean, each.mean]).zero_()
            for call, each in zip(calls, moments, strict=True)
        }
        for chunk in self._chunks:
            if learned.intersection(segment.nodes):
                for call, each in chunk.go_back(segment, learned, self._replays).items():
                    sums[call] += each
            chunk.forget([n for n in chunk.values if not self._network.is_read_before(n, segment)])
        totals = list(sums.values())
        if self._over_workers:
            totals = sum_over_workers(totals)
        self._statistics.sums |= dict(zip(calls, totals, strict=True))

    def _autocast_of_forward(self) -> contextlib.AbstractContextManager[object]:
        enabled, dtype = self._autocast
        return torch.autocast(self._device.type, dtype=dtype, enabled=enabled)


@contextlib.contextmanager
def _random_state_put_back(device: torch.device) -> Iterator[None]:
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)
