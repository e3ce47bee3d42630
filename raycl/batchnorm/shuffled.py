"""Shuffled BatchNorm: keys are normalized in other company than their queries.

Where a query and its key are normalized together with the same rows, the statistics mark the one
key among all candidates that was made in the same company, and a network learns to read the mark
(He et al., 2020, section 3.3). So the keys are encoded in a random order, and put back.

The same order may be drawn for the views of one tower (SimCLR's): a row's positive then shares its
company as often as any negative does.

Synchronized statistics are no substitute where the negatives come from a queue: all rows of this
batch then share their statistics, those in the queue have others, and the current batch still
marks the positive (moco#46). They do cure methods whose negatives are all of the same batch.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from raycl.device_copy import upload
from raycl.distributed import gather, gather_detached, num_workers, rank

_PURPOSE = 0x5AFF1E  # keeps these draws apart from the orders of epochs, which hash (seed, epoch)


def encode_shuffled(encode: Callable[[Tensor], Tensor], rows: Tensor, *, seed: int, step: int) -> Tensor:
    """Encode rows among those of all workers in a random order; return them in their own order.

    The rows of all workers are gathered and permuted, each worker encodes its share of them, and
    the embeddings are gathered and put back. Statistics of BatchNorm are then those of a random
    share, or, after :func:`~raycl.batchnorm.split_batchnorm`, of random groups of it. A single
    worker needs that split: over its whole batch, statistics do not depend on the order.

    Collective: all workers call it, with the same seed and step. Each holds the rows of all of
    them for a moment.

    Args:
        encode: Rows to embeddings, [local_batch, ...] to [local_batch, dim]; for example a
            :class:`~raycl.models.momentum.MomentumEncoder`.
        rows: This worker's rows, [local_batch, ...], of any type; the same shape on every worker.
        seed: Of the run, not negative and the same on every worker: permutations that differ
            between workers would mix up rows.
        step: Draws another permutation at each step.

    Returns:
        The embeddings of ``rows``, [local_batch, dim]; their gradient, if they have one, goes back
        to the worker that encoded them, summed as :func:`~raycl.distributed.gather` sums it.
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
