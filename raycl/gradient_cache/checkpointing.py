"""Activation checkpointing: keep few activations, and compute the others again (Chen et al., 2016)."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raycl.errors import ConfigError
from raycl.gradient_cache.cache import normalizes_over_batch
from raycl.gradient_cache.recompute import RunningStatistics


def checkpoint_activations(
    tower: nn.Module, blocks: Sequence[nn.Module], *, every: int | None, chunk_size: int | None = None
) -> bool:
    """Keep the input of every k-th block from now on, and compute the rest again in the backward pass.

    Embeddings, gradients and BatchNorm's running statistics stay equal to the last bit; dropout draws the
    same masks. Time is one more forward pass of the blocks. With k above 1, the first pass raises
    ``ConfigError`` for blocks that take other outputs of a block than its first, such as T5's position bias, and for
    layers between blocks.

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
        own = vars(block).pop("forward", None)
        if isinstance(own, _Deferred):
            _, own = own.args
        if own is not None:
            block.forward = own
    if every is None:
        return False
    if chunk_size is not None and normalizes_over_batch(tower):
        return True
    for start in range(0, len(blocks), every):
        segment = _Segment(blocks[start : start + every])
        for block in blocks[start : start + every]:
            block.forward = _Deferred(segment.call, block, vars(block).get("forward"))
    return bool(blocks)


class _Deferred(partial[Any]):
    """The forward method of a block in a segment; ``args`` are the block and the method set on the block, or None."""


@final
class _Segment:
    """Consecutive blocks: each waits with its own arguments and returns its input, and the last one runs all of them.

    In the first pass the first block runs alone and shows whether blocks return tuples.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self._waiting: list[Callable[[Tensor], Any]] = []
        # The input of the next block, and the number of its changes in place.
        self._passed: tuple[Tensor, int] | None = None
        self._num_outputs: int | None = None  # of a block, 0 for a tensor; None before the first pass
        self._other_outputs: list[Any] = []  # of the first block in the first pass

    def call(
        self, block: nn.Module, own: Callable[..., Any] | None, rows: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        def forward(rows: Tensor) -> Any:
            return (own or partial(type(block).forward, block))(rows, *args, **kwargs)

        if not torch.is_grad_enabled():
            return forward(rows)
        if block is self._blocks[0]:
            self._waiting = []  # of a pass that failed
        elif self._passed is None or rows is not self._passed[0] or rows._version != self._passed[1]:
            self._num_outputs = None
            raise ConfigError(
                f"activation_checkpoint_every runs several blocks in a row, and {type(block).__name__} takes something else "
                "than the result of the block before it; set it to 1"
            )
        others, self._other_outputs = self._other_outputs, []
        if any(value is other for value in (*args, *kwargs.values()) for other in others):
            self._num_outputs = None
            raise ConfigError(
                f"activation_checkpoint_every passes on one output of a block, and {type(block).__name__} takes "
                "others from the block before it; set it to 1"
            )
        self._waiting.append(forward)
        if block is not self._blocks[-1] and self._num_outputs is not None:
            self._passed = rows, rows._version
            return (rows, *[None] * (self._num_outputs - 1)) if self._num_outputs else rows
        ready, self._waiting = self._waiting, []
        output = checkpoint(partial(self._run, ready), rows, use_reentrant=False, context_fn=self._contexts)
        passed = output[0] if isinstance(output, tuple) else output
        # The last block's would keep its graph after the backward pass.
        self._passed = None if block is self._blocks[-1] else (passed, passed._version)
        if isinstance(output, tuple) and block is not self._blocks[-1]:
            given = {id(each) for each in (None, *args, *kwargs.values())}
            self._other_outputs = [each for each in output[1:] if id(each) not in given]
        return output

    def _run(self, ready: Sequence[Callable[[Tensor], Any]], rows: Tensor) -> Any:
        output: Any = rows
        for forward in ready:
            output = forward(rows)
            is_tuple = isinstance(output, tuple)  # of some models of transformers
            self._num_outputs = len(output) if is_tuple else 0
            rows = output[0] if is_tuple else output
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
