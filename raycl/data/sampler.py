"""The order of the rows of an epoch, their global batches, and each worker's shard."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from raycl.data.in_memory import Batch, InMemoryDataset


@final
@dataclass(frozen=True, kw_only=True)
class BatchShard:
    """One worker's shard of every global batch: ``batch_size / num_workers`` rows."""

    batch_size: int
    rank: int = 0
    num_workers: int = 1

    @property
    def local_batch_size(self) -> int:
        """Rows of this worker per step."""
        return self.batch_size // self.num_workers


@final
@dataclass(frozen=True, kw_only=True)
class InMemorySampler:
    """Batches of rows in memory, in a global order seeded by (seed, epoch).

    The rows of the global batch of each step do not depend on the number of workers. The incomplete
    last batch of an epoch is dropped. See :func:`bucketed` for ``length_buckets``.
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

        ``continues`` and ``has_next`` are ignored; a stream uses them to prefetch the next epoch.
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
    """Reorder the rows of complete batches, so that texts of similar length form a batch.

    The rows of every ``num_buckets`` batches are sorted by ``num_tokens`` and cut into batches, which
    are shuffled. The rows of a batch are assigned to workers in turn, for equal work. Batches differ
    between epochs; the result has the same rows as ``order``.
    """
    batches = []
    for start in range(0, len(order), num_buckets * share.batch_size):
        window = order[start : start + num_buckets * share.batch_size]
        by_length = window[np.argsort(num_tokens[window], kind="stable")]
        buckets = by_length.reshape(-1, share.local_batch_size, share.num_workers).swapaxes(1, 2)
        batches.append(buckets.reshape(-1, share.batch_size)[rng.permutation(len(buckets))])
    return np.concatenate([np.empty(0, np.int64), *(each.reshape(-1) for each in batches)])
