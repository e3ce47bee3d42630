"""Batches of several data sets: all rows of a batch come from one of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import final

import numpy as np
from numpy.typing import NDArray

from raycl.data.in_memory import Batch
from raycl.data.sampler import BatchShard, InMemorySampler


@final
@dataclass(frozen=True, kw_only=True)
class MixedSampler:
    """Batches of one data set each, in an order seeded by (seed, epoch).

    An epoch has as many batches as one pass over every data set has complete ones; :func:`batch_counts` divides
    them by the ``weights``. A data set continues where its previous epoch ended, and starts over in a new order
    after its last complete batch. The global batch of a step does not depend on the number of workers.
    """

    samplers: Sequence[InMemorySampler]
    seed: int
    weights: Sequence[float] | None = None

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

        The ``epoch`` of a batch counts the passes over its data set. ``continues`` and ``has_next`` are ignored.
        """
        passes = [sampler.num_batches(share.batch_size) for sampler in self.samplers]
        counts = batch_counts(passes, self.weights)
        order = self._order(counts, epoch)
        drawn = np.bincount(order[:start], minlength=len(counts))
        batches = [
            _batches_from(sampler, share, epoch * count + before)
            for sampler, count, before in zip(self.samplers, counts, drawn.tolist(), strict=True)
        ]
        for number in order[start:].tolist():
            yield replace(next(batches[number]), data_set=number)

    def _order(self, counts: Sequence[int], epoch: int) -> NDArray[np.int64]:
        """Return the data set of each step of an epoch."""
        rng = np.random.default_rng((self.seed, epoch))
        return rng.permutation(np.repeat(np.arange(len(counts)), counts))


def _batches_from(sampler: InMemorySampler, share: BatchShard, first: int) -> Iterator[Batch]:
    """Yield a data set's batches from number ``first`` on, pass after pass."""
    number, start = divmod(first, sampler.num_batches(share.batch_size))
    while True:
        yield from sampler.epoch_batches(share, epoch=number, start=start)
        number, start = number + 1, 0


def batch_counts(passes: Sequence[int], weights: Sequence[float] | None = None) -> list[int]:
    """Return the number of batches of each data set in an epoch; their sum is the sum of ``passes``.

    ``passes`` are the complete batches in one pass over each data set, and the result without ``weights``. With
    them, shares in proportion to the weights are rounded to whole batches, the largest remainders up.
    """
    if weights is None:
        return list(passes)
    exact = [Fraction(weight) * sum(passes) / sum(map(Fraction, weights)) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(counts)), key=lambda number: counts[number] - exact[number])
    for number in by_remainder[: sum(passes) - sum(counts)]:
        counts[number] += 1
    return counts
