"""Contrastive accumulation with BatchNorm over the whole batch: exact, at the price of time or memory.

Contrastive gradient accumulation (Gao et al., 2021) embeds a batch chunk by chunk without graphs,
takes the loss's gradient at the embeddings, and runs each chunk once more with its graph. BatchNorm
breaks it: a chunk's statistics are not the batch's, they tell its rows from others, and the
gradient through the mean and the variance of the batch is lost.

Here all chunks go through the network side by side. Where a BatchNorm stands, each waits until the
moments of all are merged, over all workers too. On the way back they wait for the two sums that the
gradient of BatchNorm needs. Only one chunk's graph of one segment lives at a time; what waits
between segments lives for the whole batch. So memory falls by less than chunks promise, and with
``milestone_every`` it falls further, for one more forward pass.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn

from raycl.batchnorm.chunked.chunked_pass import ChunkedPass
from raycl.batchnorm.chunked.segments import Network
from raycl.batchnorm.chunked.trace import changes_itself
from raycl.errors import ConfigError


@final
class ChunkedBatchNorm:
    """Embed rows in chunks and go back, as one forward and backward pass of the whole batch would.

    Embeddings, gradients and running statistics are those of ``nn.BatchNorm`` on this worker's rows, or,
    where the layers are synchronized (one of them is enough), on the rows of all workers, which then
    move together: ``embed`` and ``backward`` are collective. Layers in eval mode use their running
    statistics as ever. Chunks may differ in length, and workers in their number of rows.

    The tower keeps its modules, parameters and hooks. Layers run twice, so hooks on them are called
    twice; hooks on BatchNorms and on modules of other modules would not be called and are refused.
    Draws of dropout come in another order than in a single pass, layer by layer.

    Args:
        tower: Rows to embeddings, [batch, ...] to [batch, dim]. Each row by itself but for its
            ``nn.BatchNorm1d/2d/3d`` or synchronized layers; ``torch.fx`` must be able to trace it,
            anew whenever its modes have changed.
        chunk_size: Rows of which a graph exists at a time.
        milestone_every: ``None`` keeps all values that wait between segments, from forward to
            backward. A number k keeps them only at every k-th place through which a single value
            passes, such as the end of a residual block, and makes them once more for the way back:
            less memory, and one more forward pass without graphs.

    Raises:
        ConfigError: The tower cannot be traced, holds another kind of BatchNorm, or a number is
            not positive.
    """

    def __init__(self, tower: nn.Module, *, chunk_size: int, milestone_every: int | None = None) -> None:
        if chunk_size < 1:
            raise ConfigError(f"chunk_size must be at least 1, came {chunk_size}; 32 is usual")
        if milestone_every is not None and milestone_every < 1:
            raise ConfigError(f"milestone_every must be None or at least 1, came {milestone_every}; try 1")
        self._tower = tower
        self._chunk_size = chunk_size
        self._milestone_every = milestone_every
        self._modes = _modes(tower)
        self._network = Network(tower)
        self._journey: ChunkedPass | None = None

    @torch.no_grad()
    def embed(self, rows: Tensor, *, with_gradient: bool = True) -> Tensor:
        """Return the embeddings of [batch, ...], [batch, dim], without a graph.

        Args:
            rows: This worker's rows.
            with_gradient: Remember what ``backward`` needs, in the place of what an earlier call left.

        Raises:
            ConfigError: The tower does something that would come out differently in chunks.
            ValueError: The batch holds a single value per channel.
        """
        self._trace_again_if_modes_changed()
        if with_gradient:
            self._journey = None  # its memory first
        milestones = self._network.milestones(self._milestone_every)
        journey = ChunkedPass(self._network, rows, chunk_size=self._chunk_size, milestones=milestones)
        before = _versions(self._tower)
        with _own_casts():
            embeddings = journey.forward(keep=with_gradient)
        _refuse_changes(before, _versions(self._tower))
        journey.track()
        if with_gradient:
            self._journey = journey
        return embeddings

    def backward(self, gradient: Tensor) -> None:
        """Add to the parameters' gradients; once for each ``embed``.

        Args:
            gradient: Of this worker's loss at its embeddings, [batch, dim]. Parameters receive this
                worker's share, to be averaged or summed over workers as for a tower under
                ``DistributedDataParallel`` with synchronized layers.

        Raises:
            RuntimeError: No embeddings wait for their gradient.
            ConfigError: The gradient is not of the shape of the embeddings.
        """
        journey = self._journey
        if journey is None:
            raise RuntimeError("no embeddings wait for their gradient: call embed(rows) before each backward")
        journey.check(gradient)
        self._journey = None
        with _own_casts():
            journey.backward(gradient)

    def _trace_again_if_modes_changed(self) -> None:
        if (modes := _modes(self._tower)) != self._modes:
            self._network, self._modes = Network(self._tower), modes


def _modes(tower: nn.Module) -> list[bool]:
    return [module.training for module in tower.modules()]


@contextlib.contextmanager
def _own_casts() -> Iterator[None]:
    """Keep autocast from using the same cast weights with a graph that it made without, or vice versa."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def _versions(tower: nn.Module) -> dict[str, int]:
    tensors = itertools.chain(tower.named_parameters(), tower.named_buffers())
    return {name: tensor._version for name, tensor in tensors}


def _refuse_changes(before: dict[str, int], after: dict[str, int]) -> None:
    changed = [name for name, version in after.items() if version != before.get(name)]
    if changed:
        raise changes_itself(changed[0])
