"""A set too large to hold: every epoch reads it anew, in a seeded order, by Ray Data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import pyarrow as pa
import ray
from ray.train.collective import broadcast_from_rank_zero

from raycl.data.columns import ColumnNames
from raycl.data.decode import Decoder, decode_dataset, decode_source
from raycl.data.formats import Formats
from raycl.data.order import Share
from raycl.data.rows import Batch, Rows
from raycl.data.sources import Source

OpenEpoch = Callable[[int], ray.data.Dataset]


@final
@dataclass(frozen=True, kw_only=True)
class Stream:
    """Batches of a set that is read in every epoch; the same order for the same number of workers.

    Pieces come in an order drawn by (seed, epoch); rows are shuffled among the ``shuffle_rows``
    read last. Ray Data deals equally many rows to every worker, and batches are cut here, so that
    all workers make the same number of steps.
    """

    open_epoch: OpenEpoch
    formats: Formats
    seed: int
    shuffle_rows: int

    def epoch_batches(self, share: Share, *, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield this worker's batches of one epoch from step ``start`` on; every worker calls this."""
        window = max(self.shuffle_rows // share.num_workers, share.local_batch_size)
        seed = (self.seed, epoch, share.rank)
        shuffled = _shuffle(self._tables(share, epoch), self.formats, window, seed)
        for step, batch in enumerate(_rebatch(shuffled, share.local_batch_size, epoch)):
            if step >= start:
                yield batch

    def _tables(self, share: Share, epoch: int) -> Iterator[pa.Table]:
        splits: Any = None
        if share.rank == 0:
            splits = self.open_epoch(epoch).streaming_split(share.num_workers, equal=True)
        if share.num_workers > 1:
            splits = broadcast_from_rank_zero(splits)
        yield from splits[share.rank].iter_batches(
            batch_size=None, batch_format="pyarrow", prefetch_batches=1
        )


def stream_source(
    source: Source, decoder: Decoder, *, seed: int, kept_whole: frozenset[int] = frozenset()
) -> OpenEpoch:
    """Return how to open an epoch of a source; ``kept_whole`` is that of ``decode_source``."""

    def open_epoch(epoch: int) -> ray.data.Dataset:
        order = np.random.default_rng((seed, epoch)).permutation(len(source.pieces))
        pieces = tuple(source.pieces[index] for index in order)
        return decode_source(source, decoder, pieces, kept_whole=kept_whole)

    return open_epoch


def stream_dataset(
    dataset: ray.data.Dataset, columns: ColumnNames, decoder: Decoder, *, seed: int
) -> OpenEpoch:
    """Return how to open an epoch of a user's own Ray Dataset."""

    def open_epoch(epoch: int) -> ray.data.Dataset:
        shuffled = dataset.randomize_block_order(seed=hash((seed, epoch)) % 2**31)
        # A dataset keeps the settings of the process that made it.
        shuffled.context.execution_options.preserve_order = True
        return decode_dataset(shuffled, columns, decoder)

    return open_epoch


def _shuffle(
    tables: Iterator[pa.Table], formats: Formats, window: int, seed: tuple[int, ...]
) -> Iterator[tuple[Rows, np.ndarray]]:
    """Yield windows of rows, each with the order to take them in."""
    held: list[pa.Table] = []
    num_windows = num_held = 0
    for table in tables:
        held.append(table)
        num_held += table.num_rows
        if num_held >= window:
            yield _window(held, formats, (*seed, num_windows))
            held, num_held, num_windows = [], 0, num_windows + 1
    if num_held:
        yield _window(held, formats, (*seed, num_windows))


def _window(tables: list[pa.Table], formats: Formats, seed: tuple[int, ...]) -> tuple[Rows, np.ndarray]:
    rows = Rows(tables, formats)
    return rows, np.random.default_rng(seed).permutation(len(rows))


def _rebatch(windows: Iterator[tuple[Rows, np.ndarray]], size: int, epoch: int) -> Iterator[Batch]:
    """Cut windows into batches of exactly ``size`` rows; what is over begins the next window's."""
    over: Batch | None = None
    for rows, order in windows:
        first = 0
        if over is not None:
            first = min(size - len(over), len(order))
            over = over.joined(rows.take(order[:first], epoch=epoch))
            if len(over) < size:
                continue
            yield over
        last = first + (len(order) - first) // size * size
        for start in range(first, last, size):
            yield rows.take(order[start : start + size], epoch=epoch)
        over = rows.take(order[last:], epoch=epoch) if last < len(order) else None
