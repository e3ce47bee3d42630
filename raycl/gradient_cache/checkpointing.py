"""Activation checkpointing: keep few activations, and compute the others again (Chen et al., 2016)."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raycl.gradient_cache.cache import normalizes_over_batch
from raycl.gradient_cache.recompute import RunningStatistics


def checkpoint_activations(
    tower: nn.Module, blocks: Sequence[nn.Module], *, every: int | None, chunk_size: int | None = None
) -> bool:
    """Keep the input of every k-th block from now on, and compute the rest again in the backward pass.

    Embeddings, gradients and BatchNorm's running statistics stay equal to the last bit; dropout draws the
    same masks. Time is one more forward pass of the blocks.

    Args:
        tower: the network of the blocks.
        blocks: in the order of the forward pass, each called once with the result of the one before.
        every: k; None keeps all activations again.
        chunk_size: of :func:`~raycl.gradient_cache.embed_in_chunks`, which has its own way for
            BatchNorm over the whole batch; there all blocks stay as they are.

    Returns:
        Whether the number has an effect: there are blocks, or chunks with BatchNorm over the whole batch.
    """
    for block in blocks:
        vars(block).pop("forward", None)
    if every is None:
        return False
    if chunk_size is not None and normalizes_over_batch(tower):
        return True
    for start in range(0, len(blocks), every):
        segment = _Segment(blocks[start : start + every])
        for index, block in enumerate(blocks[start : start + every]):
            block.forward = segment.skip if index else segment.run
    return bool(blocks)


@final
class _Segment:
    """Consecutive blocks: the first one runs all of them, and the others return their input."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks, self._returns_tuple = blocks, False

    def run(self, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(rows, *args, **kwargs)
        return checkpoint(
            self._forward, rows, *args, use_reentrant=False, context_fn=self._contexts, **kwargs
        )

    def skip(self, rows: Tensor, *_: Any, **__: Any) -> Any:
        return (rows,) if self._returns_tuple else rows

    def _forward(self, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        output: Any = rows
        for block in self._blocks:
            output = type(block).forward(block, rows, *args, **kwargs)
            # Blocks of transformers before 5.0 return a tuple.
            self._returns_tuple = isinstance(output, tuple)
            rows = output[0] if self._returns_tuple else output
        return output

    def _contexts(
        self,
    ) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        return contextlib.nullcontext(), self._statistics_restored()

    @contextlib.contextmanager
    def _statistics_restored(self) -> Iterator[None]:
        """Update the running statistics once, in the first pass."""
        statistics = RunningStatistics(nn.ModuleList(self._blocks))
        try:
            yield
        finally:
            statistics.restore()
