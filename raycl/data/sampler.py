"""The order of the rows of an epoch, their global batches, and each worker's shard; batches of several data sets."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import final

import numpy as np
from numpy.typing import NDArray

from raycl.data.in_memory import Batch, InMemoryDataset


@final
@dataclass(frozen=True, kw_only=True)
class BatchShard:
    """One worker's shard of every global batch: ``batch_size / num_workers`` rows.

    ``is_whole`` stands for the shards of all workers, in the order of ranks.
    """

    batch_size: int
    rank: int = 0
    num_workers: int = 1
    is_whole: bool = False

    @property
    def local_batch_size(self) -> int:
        """Rows of this worker per step."""
        return self.batch_size // self.num_workers

    @property
    def rows(self) -> slice:
        """The rows of the global batch."""
        if self.is_whole:
            return slice(0, self.batch_size)
        return slice(self.rank * self.local_batch_size, (self.rank + 1) * self.local_batch_size)


@final
@dataclass(frozen=True, kw_only=True)
class InMemorySampler:
    """Batches of rows in memory, in a global order seeded by (seed, epoch).

    The rows of the global batch of each step do not depend on the number of workers. The incomplete
    last batch of an epoch is dropped. See :func:`bucketed` for ``length_buckets``, and
    :func:`class_batches` for ``samples_per_class``, which leaves the number of batches unchanged.
    """

    rows: InMemoryDataset
    seed: int
    length_buckets: int = 1
    samples_per_class: int | None = None

    def num_batches(self, batch_size: int) -> int:
        """Return the number of batches in an epoch."""
        return len(self.rows) // batch_size

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
        num_steps = self.num_batches(share.batch_size)
        if self.samples_per_class is None:
            batches, epochs = self._order(share, num_steps, rng), itertools.repeat(epoch)
        else:
            batches = class_batches(
                self.rows.label,
                batch_size=share.batch_size,
                samples_per_class=self.samples_per_class,
                rng=rng,
            )
            # A row may be drawn several times in an epoch: each step has its own views.
            epochs = itertools.count(epoch * num_steps)
        for batch, number in itertools.islice(zip(batches, epochs, strict=False), start, num_steps):
            yield self.rows.take(batch[share.rows], epoch=number)

    def _order(self, share: BatchShard, num_steps: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return the rows of each batch, [num_steps, batch_size], each row at most once."""
        order = rng.permutation(len(self.rows))[: num_steps * share.batch_size]
        if self.length_buckets > 1:
            order = bucketed(
                order, self.rows.num_tokens(), share=share, num_buckets=self.length_buckets, rng=rng
            )
        return order.reshape(num_steps, share.batch_size)


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


def class_batches(
    label: NDArray[np.int64], *, batch_size: int, samples_per_class: int, rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of batches without end: ``batch_size / samples_per_class`` classes, drawn uniformly.

    Each class gives ``samples_per_class`` adjacent rows. Its rows are drawn in a random order, which is drawn
    again once too few rows are left, so that a batch has no row twice and all rows of a class are equally
    likely. Classes with fewer rows and rows without a label are not drawn.
    """
    classes = _rows_by_class(label, samples_per_class)
    left = [rows[:0] for rows in classes]
    while True:
        parts = []
        for number in rng.choice(len(classes), batch_size // samples_per_class, replace=False):
            if len(left[number]) < samples_per_class:
                left[number] = rng.permutation(classes[number])
            parts.append(left[number][:samples_per_class])
            left[number] = left[number][samples_per_class:]
        yield np.concatenate(parts)


def grouped(
    order: NDArray[np.int64],
    label: NDArray[np.int64],
    *,
    batch_size: int,
    samples_per_class: int,
    rng: np.random.Generator,
) -> tuple[NDArray[np.int64], int]:
    """Reorder rows so that as many batches as possible have ``samples_per_class`` rows of each class.

    The result has the same rows as ``order``; the other rows form batches in their order, and the rows that
    complete no batch come last. Returns also the number of rows in batches of whole groups.
    """
    classes = _rows_by_class(label[order], samples_per_class)
    left = np.array([len(rows) // samples_per_class for rows in classes])
    num_classes, batches = batch_size // samples_per_class, [np.empty(0, np.int64)]
    while np.count_nonzero(left) >= num_classes:
        # Classes with the most groups first, in random order among equals: this gives the most batches.
        for number in np.lexsort((rng.random(len(left)), -left))[:num_classes]:
            left[number] -= 1
            batches.append(order[classes[number][left[number] * samples_per_class :][:samples_per_class]])
    first = np.concatenate(batches)
    order = np.concatenate([first, order[~np.isin(order, first)]])
    complete = len(order) // batch_size * batch_size
    whole = order[:complete].reshape(-1, batch_size)
    order[:complete] = whole[rng.permutation(len(whole))].reshape(-1)
    return order, len(first)


def _rows_by_class(label: NDArray[np.int64], least: int) -> list[NDArray[np.int64]]:
    """Return the rows of each class with at least this many; rows without a label belong to none."""
    labeled = np.flatnonzero(label >= 0)
    by_class = labeled[np.argsort(label[labeled], kind="stable")]
    starts = np.flatnonzero(np.diff(label[by_class])) + 1
    return [rows for rows in np.split(by_class, starts) if len(rows) >= least]


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
