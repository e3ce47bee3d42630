"""Embeddings whose graph is made chunk by chunk, when the gradient comes back.

A contrastive loss compares all rows of a batch: the mean over parts of it is another loss. But it
knows the network only through the embeddings. So the batch is embedded in chunks without graphs,
the loss gives its gradient at the embeddings, and each chunk is embedded once more, now with its
graph, to pass its part of that gradient on (Gao et al., 2021). Memory is that of one chunk's graph,
and time at most that of one more forward pass: 4/3 of the whole batch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from raycl.batchnorm import SplitBatchNorm
from raycl.batchnorm.chunked.chunked_batchnorm import ChunkedBatchNorm
from raycl.batchnorm.synchronized import SYNCHRONIZED
from raycl.distributed import all_agree
from raycl.errors import ConfigError
from raycl.gradient_cache.chunks import Chunks


def embed_in_chunks(
    tower: nn.Module, *rows: Tensor, chunk_size: int, kept_chunks: int = 1, milestone_every: int | None = None
) -> Tensor:
    """Embed a batch with the graph of one chunk at a time; any loss may follow, and ``backward``.

    The embeddings, the parameters' gradients and BatchNorm's running statistics are those of
    ``tower(*rows)``, whatever the chunks: dropout is replayed with the random state that it had,
    and what is normalized over the whole batch is still normalized over the whole batch. For that
    all chunks go through the layers side by side: see :class:`~raycl.batchnorm.chunked.chunked_batchnorm.ChunkedBatchNorm`,
    which needs more memory, and its ``ConfigError``.

    With several workers all call this together, and average the gradients afterwards
    (:func:`raycl.distributed.average_`), once: ``DistributedDataParallel`` is not involved.

    Args:
        tower: Rows to embeddings, [batch, ...] to [batch, dim], each row by itself but for BatchNorm.
        rows: [local_batch, ...]; several are passed on together. They get no gradient.
        chunk_size: Rows of a chunk; the last one may be smaller.
        kept_chunks: How many chunks keep their graph from the first pass and need no second. The
            last one's costs no memory, for it is gone when the others come again; each further one
            costs a chunk's graph and saves a chunk's forward pass. None is kept where BatchNorm goes
            over the whole batch.
        milestone_every: Only there: 1 has the least memory, ``None`` the least time, for it spares
            one more forward pass.

    Returns:
        [local_batch, dim]; it can be differentiated once. Without gradient (``torch.no_grad``, or a
        frozen tower) only the chunks are left of all this.

    Raises:
        ConfigError: A number is too small, a row tensor asks for a gradient, or BatchNorm is part of
            a network that cannot be cut at it.
        ReplayError: In ``backward``: a chunk came out otherwise when it was embedded again (of
            what BatchNorm over the whole batch cuts into pieces, samples are compared).
    """
    _check(rows, chunk_size, kept_chunks)
    if _is_one_chunk(tower, rows[0], chunk_size):
        return tower(*rows)
    if _normalizes_over_batch(tower):
        lockstep = ChunkedBatchNorm(tower, chunk_size=chunk_size, milestone_every=milestone_every)
        embed, go_back = partial(lockstep.embed, _only(rows)), lockstep.backward
    else:
        chunks = Chunks(tower, chunk_size=chunk_size, kept_chunks=kept_chunks)
        embed, go_back = partial(chunks.embed, *rows), chunks.backward
    if not (torch.is_grad_enabled() and any(each.requires_grad for each in tower.parameters())):
        return embed(with_gradient=False)
    # The graph needs an input that asks for a gradient; the parameters get theirs when it goes back.
    anchor = torch.empty(0, requires_grad=True, device=rows[0].device)
    return _Accumulated.apply(anchor, partial(embed, with_gradient=True), go_back)  # pyright: ignore[reportReturnType]


@final
class _Accumulated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, embed: Callable[[], Tensor], go_back: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.go_back = go_back
        return embed()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        go_back, ctx.go_back = ctx.go_back, None
        if go_back is None:
            raise RuntimeError("accumulated embeddings go back once: their chunks are forgotten afterwards")
        go_back(gradient)
        return None, None, None


def _is_one_chunk(tower: nn.Module, rows: Tensor, chunk_size: int) -> bool:
    """Whether there is nothing to cut; workers whose BatchNorms wait for each other go the same way."""
    is_one = len(rows) <= chunk_size
    if any(isinstance(layer, SYNCHRONIZED) for layer in tower.modules()):
        return all_agree(is_one)
    return is_one


def _only(rows: tuple[Tensor, ...]) -> Tensor:
    if len(rows) != 1:
        raise ConfigError(
            f"a tower with BatchNorm over the batch takes one tensor of rows, came {len(rows)}; "
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


def _check(rows: tuple[Tensor, ...], chunk_size: int, kept_chunks: int) -> None:
    if not rows or any(len(each) != len(rows[0]) for each in rows):
        raise ConfigError(
            f"the rows are not of one length: {[len(each) for each in rows]} came; pass tensors [local_batch, ...]"
        )
    if chunk_size < 1 or kept_chunks < 0:
        raise ConfigError(
            f"chunk_size must be at least 1 and kept_chunks at least 0, came {chunk_size} and {kept_chunks}"
        )
    if any(each.requires_grad for each in rows):
        raise ConfigError(
            "accumulated rows get no gradient, but one asks for it (requires_grad): detach it, or make it part "
            "of the tower"
        )
