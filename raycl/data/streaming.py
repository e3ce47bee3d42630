"""Datasets larger than memory: Ray Data reads them in every epoch, in a seeded order."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import final

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray

from raycl.data.codecs import Formats
from raycl.data.columns import ColumnNames
from raycl.data.decode import Decoder, decode_dataset, decode_source
from raycl.data.epoch_splits import EpochSplits, OpenEpoch
from raycl.data.in_memory import Batch, InMemoryDataset
from raycl.data.sampler import BatchShard, bucketed, grouped
from raycl.data.sources import Source
from raycl.errors import DataError


@final
@dataclass(frozen=True, kw_only=True)
class StreamingSampler:
    """Batches of a dataset that is read in every epoch; the order depends on the number of workers.

    Fragments are read in an order seeded by (seed, epoch), and rows are shuffled in a buffer of
    ``shuffle_buffer_size`` rows. Ray Data splits the rows equally among workers, so that all workers
    make the same number of steps. With several ``length_buckets``, texts of similar length form a
    batch, within the shuffle buffer; see :func:`bucketed`. With ``samples_per_class``, each worker forms
    as many batches of whole groups as its shuffle buffer allows; see :func:`grouped`.
    """

    open_epoch: OpenEpoch
    formats: Formats
    seed: int
    shuffle_buffer_size: int
    length_buckets: int = 1
    samples_per_class: int | None = None
    _splits: EpochSplits = field(default_factory=EpochSplits, init=False, repr=False, compare=False)
    _counts: Counter[str] = field(default_factory=Counter, init=False, repr=False, compare=False)

    @property
    def grouped_fraction(self) -> float:
        """The fraction of this worker's rows so far in batches of whole groups of ``samples_per_class``."""
        return self._counts["grouped"] / max(1, self._counts["rows"])

    def epoch_batches(
        self,
        share: BatchShard,
        *,
        epoch: int,
        start: int = 0,
        continues: bool = False,
        has_next: bool = False,
    ) -> Iterator[Batch]:
        """Yield this worker's batches of one epoch from step ``start`` on; collective.

        ``has_next``: the next epoch will follow with the same share, so its rows are prefetched while the
        last rows of this epoch are used. ``continues``: the previous epoch was used to its end. All workers
        must pass equal values.
        """
        tables = self._splits.tables(
            self.open_epoch, share, epoch=epoch, continues=continues, has_next=has_next
        )
        yield from islice(self._batches(tables, share, epoch), start, None)

    def _batches(self, tables: Iterator[pa.Table], share: BatchShard, epoch: int) -> Iterator[Batch]:
        """Yield complete batches of shuffled windows; a remainder is completed by the next window."""
        size = share.local_batch_size
        rest: list[pa.Table] = []
        num_grouped = 0
        windows = _windows(tables, max(self.shuffle_buffer_size // share.num_workers, size))
        for number, window in enumerate(windows):
            num_rest = sum(table.num_rows for table in rest)
            rows = InMemoryDataset([*rest, *window], self.formats)
            rng = np.random.default_rng((self.seed, epoch, share.rank, number))
            shuffled = num_rest + rng.permutation(len(rows) - num_rest)
            order = np.concatenate([np.arange(num_rest), shuffled])
            complete = len(order) // size * size
            first = min(size, complete) if num_rest else 0
            if self.length_buckets > 1:
                order[first:complete] = self._bucketed(order[first:complete], rows, size, (epoch, number))
            if self.samples_per_class is not None:
                groups = self.samples_per_class
                order, num_rows = grouped(
                    order, rows.label, batch_size=size, samples_per_class=groups, rng=rng
                )
                num_grouped += num_rows
                self._counts.update(grouped=num_rows, rows=complete)
            for begin in range(0, complete, size):
                yield rows.take(order[begin : begin + size], epoch=epoch)
            rest = (
                [pa.Table.from_batches([rows.arrow_rows(order[complete:])])] if complete < len(order) else []
            )
        if self.samples_per_class is not None and not num_grouped:
            raise DataError(
                f"data.samples_per_class {self.samples_per_class}: in epoch {epoch}, no shuffle buffer of worker "
                f"{share.rank} had {size // self.samples_per_class} classes with as many samples; raise "
                "data.shuffle_buffer_size, lower it, or set data.cache=materialize"
            )

    def _bucketed(
        self, order: NDArray[np.int64], rows: InMemoryDataset, size: int, window: tuple[int, int]
    ) -> NDArray[np.int64]:
        # The same seed on all workers: if their windows have equally many batches, the batches of a step
        # have similar lengths.
        rng = np.random.default_rng((self.seed, *window))
        own = BatchShard(batch_size=size)
        return bucketed(order, rows.num_tokens(), share=own, num_buckets=self.length_buckets, rng=rng)


def stream_source(
    source: Source, decoder: Decoder, *, seed: int, kept_whole: frozenset[int] = frozenset()
) -> OpenEpoch:
    """Return a function that opens an epoch of a source; see ``decode_source`` for ``kept_whole``."""

    def open_epoch(epoch: int) -> ray.data.Dataset:
        order = np.random.default_rng((seed, epoch)).permutation(len(source.fragments))
        fragments = tuple(source.fragments[index] for index in order)
        return decode_source(source, decoder, fragments, kept_whole=kept_whole)

    return open_epoch


def stream_dataset(
    dataset: ray.data.Dataset,
    columns: ColumnNames,
    decoder: Decoder,
    *,
    seed: int,
    classes: tuple[str, ...] | None = None,
) -> OpenEpoch:
    """Return a function that opens an epoch of a user's Ray Dataset; see ``decode_dataset`` for ``classes``."""

    def open_epoch(epoch: int) -> ray.data.Dataset:
        shuffled = dataset.randomize_block_order(seed=hash((seed, epoch)) % 2**31)
        # A dataset keeps the settings of the process that created it.
        shuffled.context.execution_options.preserve_order = True
        return decode_dataset(shuffled, columns, decoder, classes=classes)

    return open_epoch


def _windows(tables: Iterator[pa.Table], min_rows: int) -> Iterator[list[pa.Table]]:
    """Yield successive tables of at least ``min_rows`` rows together; the last window may have fewer."""
    window: list[pa.Table] = []
    num_rows = 0
    for table in tables:
        window.append(table)
        num_rows += table.num_rows
        if num_rows >= min_rows:
            yield window
            window, num_rows = [], 0
    if num_rows:
        yield window
