"""The order of an epoch: which rows make the global batch of a step, and which are a worker's."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np

from raycl.data.rows import Batch, Rows


@final
@dataclass(frozen=True, kw_only=True)
class Share:
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
class Shuffled:
    """Batches of rows at hand, in a global order drawn by (seed, epoch).

    Whatever the number of workers, step by step the same rows make the global batch. The last
    incomplete batch of an epoch is left out.
    """

    rows: Rows
    seed: int

    def epoch_batches(self, share: Share, *, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield this worker's batches of one epoch from step ``start`` on."""
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.rows))
        for step in range(start, len(self.rows) // share.batch_size):
            first = step * share.batch_size + share.rank * share.local_batch_size
            yield self.rows.take(order[first : first + share.local_batch_size], epoch=epoch)
