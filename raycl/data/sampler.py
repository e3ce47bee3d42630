"""The order of an epoch: which rows make the global batch of a step, and which are a worker's."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from raycl.data.in_memory import Batch, InMemoryDataset


@final
@dataclass(frozen=True, kw_only=True)
class BatchShard:
    """One worker's part of every global batch: ``batch_size / num_workers`` rows."""

    batch_size: int
    rank: int = 0
    num_workers: int = 1

    @property
    def local_batch_size(self) -> int:
        """Rows of this worker in a step."""
        return self.batch_size // self.num_workers


@final
@dataclass(frozen=True, kw_only=True)
class InMemorySampler:
    """Batches of rows at hand, in a global order drawn by (seed, epoch).

    Whatever the number of workers, step by step the same rows make the global batch. The last
    incomplete batch of an epoch is left out. ``length_buckets`` is that of :func:`bucketed`.
    """

    rows: InMemoryDataset
    seed: int
    length_buckets: int = 1

    def epoch_batches(
        self,
        share: BatchShard,
        *,
        epoch: int,
        start: int = 0,
        continues: bool = False,
        has_next: bool = False,
    ) -> Iterator[Batch]:
        """Yield this worker's batches of one epoch from step ``start`` on.

        ``continues`` and ``has_next`` only matter to a stream, which reads the next epoch ahead.
        """
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(len(self.rows))
        num_steps = len(order) // share.batch_size
        if self.length_buckets > 1:
            order = bucketed(
                order[: num_steps * share.batch_size],
                self.rows.num_tokens(),
                share=share,
                num_buckets=self.length_buckets,
                rng=rng,
            )
        for step in range(start, num_steps):
            first = step * share.batch_size + share.rank * share.local_batch_size
            yield self.rows.take(order[first : first + share.local_batch_size], epoch=epoch)


def bucketed(
    order: NDArray[np.int64],
    num_tokens: NDArray[np.int64],
    *,
    share: BatchShard,
    num_buckets: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Return the rows of whole batches in an order that brings texts of like lengths into one batch.

    The rows of every ``num_buckets`` batches are sorted by ``num_tokens`` and cut into batches again,
    which come in random order; a batch's rows are dealt to the workers in turn, so that all of them
    encode as much. So each epoch has other batches, and its rows are those of ``order``.
    """
    batches = []
    for start in range(0, len(order), num_buckets * share.batch_size):
        window = order[start : start + num_buckets * share.batch_size]
        by_length = window[np.argsort(num_tokens[window], kind="stable")]
        buckets = by_length.reshape(-1, share.local_batch_size, share.num_workers).swapaxes(1, 2)
        batches.append(buckets.reshape(-1, share.batch_size)[rng.permutation(len(buckets))])
    return np.concatenate([np.empty(0, np.int64), *(each.reshape(-1) for each in batches)])
