"""Shuffled BatchNorm: keys are normalized with other rows than their queries.

If a query and its key share the statistics of the same rows, these mark the positive among all
candidates, and a network learns to read the mark (He et al., 2020, section 3.3). So keys are encoded
in a random order, and put back into their own order.

Both views of a single tower (SimCLR) may be shuffled as well: then a positive shares the statistics of
its row as often as any negative does.

Synchronized statistics do not replace this for a queue: all rows of the batch share their statistics,
the rows of the queue had others, and so the batch still marks the positive (moco#46). They do cure
methods with in-batch negatives.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from raycl.distributed import gather, gather_detached, num_workers, rank
from raycl.distributed.device_copy import upload

_PURPOSE = 0x5AFF1E  # separates these draws from the orders of epochs, which hash (seed, epoch)


def encode_shuffled(encode: Callable[[Tensor], Tensor], rows: Tensor, *, seed: int, step: int) -> Tensor:
    """Encode the rows of all workers in a random order; return embeddings in the original order.

    The rows of all workers are gathered and permuted, each worker encodes its share, and the embeddings
    are gathered and put back. So BatchNorm takes the statistics of a random share, or of random groups
    after :func:`~raycl.batchnorm.split_batchnorm`. A single worker needs the groups: the statistics of
    its whole batch do not depend on the order.

    Collective: all workers call it, with the same seed and step. Each briefly holds the rows of all.

    Args:
        encode: Rows to embeddings, [local_batch, ...] to [local_batch, dim]; for example a
            :class:`~raycl.models.momentum.MomentumEncoder`.
        rows: This worker's rows, [local_batch, ...], of any type; the same shape on every worker.
        seed: The run's seed, not negative and equal on every worker: different permutations would
            mix up rows.
        step: Draws another permutation at each step.

    Returns:
        The embeddings of ``rows``, [local_batch, dim]. Their gradient flows to the worker that encoded
        them, summed as by :func:`~raycl.distributed.gather`.
    """
    local_batch = len(rows)
    own = slice(rank() * local_batch, (rank() + 1) * local_batch)
    order = permutation(num_workers() * local_batch, seed=seed, step=step)
    drawn, back = upload([order[own], order.argsort()[own]], rows.device)
    share = gather_detached(rows).index_select(0, drawn)
    embeddings = gather(encode(share))
    return embeddings.index_select(0, back)


def permutation(num_rows: int, *, seed: int, step: int) -> Tensor:
    """Draw an order of rows, int64 [num_rows], the same on every worker and machine."""
    return torch.from_numpy(np.random.default_rng((_PURPOSE, seed, step)).permutation(num_rows))
