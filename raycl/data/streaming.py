"""Datasets larger than memory: Ray Data reads them in every epoch, in a seeded order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
from raycl.data.sampler import BatchShard, bucketed
from raycl.data.sources import Source


@final
@dataclass(frozen=True, kw_only=True)
class StreamingSampler:
    """Batches of a dataset that is read in every epoch; the order depends on the number of workers.

    Fragments are read in an order seeded by (seed, epoch), and rows are shuffled in a buffer of
    ``shuffle_buffer_size`` rows. Ray Data splits the rows equally among workers, so that all workers
    make the same number of steps. With several ``length_buckets``, texts of similar length form a
    batch, within the shuffle buffer; see :func:`bucketed`.
    """

    open_epoch: OpenEpoch
    formats: Formats
    seed: int
    shuffle_buffer_size: int
    length_buckets: int = 1
    _dealing: EpochSplits = field(default_factory=EpochSplits, init=False, repr=False, compare=False)

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
        window = max(self.shuffle_buffer_size // share.num_workers, share.local_batch_size)
        seed = (self.seed, epoch, share.rank)
        tables = self._dealing.tables(
            self.open_epoch, share, epoch=epoch, continues=continues, has_next=has_next
        )
        shuffled = _shuffle(tables, self.formats, window, seed)

        def arranged(rows: InMemoryDataset, order: NDArray[np.int64], window: int) -> NDArray[np.int64]:
            if self.length_buckets == 1:
                return order
            # The same seed on all workers: if their windows have equally many batches, the batches of a
            # step have similar lengths.
            rng = np.random.default_rng((self.seed, epoch, window))
            own = BatchShard(batch_size=share.local_batch_size)
            return bucketed(order, rows.num_tokens(), share=own, num_buckets=self.length_buckets, rng=rng)

        for step, batch in enumerate(_rebatch(shuffled, share.local_batch_size, epoch, arranged)):
            if step >= start:
                yield batch


def stream_source(
    source: Source, decoder: Decoder, *, seed: int, kept_whole: frozenset[int] = frozenset()
) -> OpenEpoch:
    """Return a function that opens an epoch of a source; see ``decode_source`` for ``kept_whole``."""

    def open_epoch(epoch: int) -> ray.data.Dataset:
        order = np.random.default_rng((seed, epoch)).permutation(len(source.pieces))
        fragments = tuple(source.pieces[index] for index in order)
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


def _shuffle(
    tables: Iterator[pa.Table], formats: Formats, window: int, seed: tuple[int, ...]
) -> Iterator[tuple[InMemoryDataset, np.ndarray]]:
    """Yield windows of rows, each with a random order of its rows."""
    buffered: list[pa.Table] = []
    num_windows = num_buffered = 0
    for table in tables:
        buffered.append(table)
        num_buffered += table.num_rows
        if num_buffered >= window:
            yield _window(buffered, formats, (*seed, num_windows))
            buffered, num_buffered, num_windows = [], 0, num_windows + 1
    if num_buffered:
        yield _window(buffered, formats, (*seed, num_windows))


def _window(
    tables: list[pa.Table], formats: Formats, seed: tuple[int, ...]
) -> tuple[InMemoryDataset, np.ndarray]:
    rows = InMemoryDataset(tables, formats)
    return rows, np.random.default_rng(seed).permutation(len(rows))


def _rebatch(
    windows: Iterator[tuple[InMemoryDataset, np.ndarray]],
    size: int,
    epoch: int,
    arranged: Callable[[InMemoryDataset, NDArray[np.int64], int], NDArray[np.int64]],
) -> Iterator[Batch]:
    """Cut windows into batches of exactly ``size`` rows; a remainder is completed by the next window.

    ``arranged`` returns the order of the rows of a window's complete batches, given the window's index.
    """
    rest: Batch | None = None
    for number, (rows, order) in enumerate(windows):
        first = 0
        if rest is not None:
            first = min(size - len(rest), len(order))
            rest = rest.joined(rows.take(order[:first], epoch=epoch))
            if len(rest) < size:
                continue
            yield rest
        last = first + (len(order) - first) // size * size
        whole = arranged(rows, order[first:last], number)
        for start in range(0, len(whole), size):
            yield rows.take(whole[start : start + size], epoch=epoch)
        rest = rows.take(order[last:], epoch=epoch) if last < len(order) else None
