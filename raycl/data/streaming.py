"""Datasets larger than memory: Ray Data reads them in every epoch, in a seeded order."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, final

import numpy as np
import pyarrow as pa
import ray

from raycl.data.codecs import Formats
from raycl.data.columns import ColumnNames
from raycl.data.decode import Decoder, decode_dataset, decode_source
from raycl.data.in_memory import Batch, InMemoryDataset
from raycl.data.sampler import BatchShard
from raycl.data.sources import Fragment, Source
from raycl.data.windows import LocalReader, OpenEpoch, Piece, StreamReader, WindowCutter
from raycl.errors import DataError


@final
@dataclass(frozen=True, kw_only=True)
class StreamingSampler:
    """Batches of a dataset that is read in every epoch, in a global order seeded by (seed, epoch).

    Fragments are read in a seeded order, and rows are shuffled in windows of ``shuffle_buffer_size`` rows, rounded
    down to whole global batches. The rows of the global batch of each step do not depend on the number of workers.
    The incomplete last batch of an epoch is dropped. With several ``length_buckets``, texts of similar length form
    a batch, within the window; see :func:`bucketed`. With ``samples_per_class``, as many batches as the window
    allows have whole groups; see :func:`grouped`. ``on_rows`` is called with the decoded rows of this worker's
    batches before they are used, in the thread that reads. A ``local`` reader reads without Ray.
    """

    open_epoch: OpenEpoch
    formats: Formats
    seed: int
    shuffle_buffer_size: int
    length_buckets: int = 1
    samples_per_class: int | None = None
    on_rows: Callable[[pa.Table], None] | None = None
    local: LocalReader | None = None
    _reader: StreamReader = field(default_factory=StreamReader, init=False, repr=False, compare=False)
    _counts: Counter[str] = field(default_factory=Counter, init=False, repr=False, compare=False)

    @property
    def grouped_fraction(self) -> float:
        """The fraction of all workers' rows so far in batches of whole groups of ``samples_per_class``."""
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

        ``has_next``: the next epoch will follow with the same share, so its rows are read while the last rows of
        this epoch are used. ``continues``: the previous epoch was used to its end. All workers must pass equal
        values. Raises ``DataError`` if no batch of a whole epoch has whole groups of ``samples_per_class``.
        """
        cutter = self.cutter(share)
        first, skipped = divmod(start, cutter.num_batches)
        pieces = (self.local or self._reader).pieces(
            self.open_epoch,
            cutter,
            share=share,
            epoch=epoch,
            first=first,
            continues=continues,
            has_next=has_next,
        )
        yield from islice(self._batches(pieces, share, epoch, is_whole=first == 0), skipped, None)

    def cutter(self, share: BatchShard) -> WindowCutter:
        """Return what shuffles and cuts each window for this number of workers."""
        return WindowCutter(
            formats=self.formats,
            seed=self.seed,
            shuffle_buffer_size=self.shuffle_buffer_size,
            batch_size=share.batch_size,
            num_workers=share.num_workers,
            length_buckets=self.length_buckets,
            samples_per_class=self.samples_per_class,
        )

    def _batches(
        self, pieces: Iterator[Piece], share: BatchShard, epoch: int, *, is_whole: bool
    ) -> Iterator[Batch]:
        size, num_grouped = len(range(share.batch_size)[share.rows]), 0
        for piece in pieces:
            if self.on_rows is not None:
                self.on_rows(piece.rows)
            rows = InMemoryDataset([piece.rows], self.formats)
            num_grouped += piece.num_grouped
            self._counts.update(grouped=piece.num_grouped, rows=len(rows) * (share.batch_size // size))
            for begin in range(0, len(rows), size):
                yield rows.take(np.arange(begin, begin + size), epoch=epoch)
        if self.samples_per_class is not None and is_whole and not num_grouped:
            raise DataError(
                f"data.samples_per_class {self.samples_per_class}: in epoch {epoch}, no shuffle buffer had "
                f"{share.batch_size // self.samples_per_class} classes with as many samples; raise "
                "data.shuffle_buffer_size, lower it, or set data.cache=materialize"
            )


def fragment_order(source: Source, seed: int, epoch: int) -> list[int]:
    """Return the numbers of the fragments in the order in which a stream reads them in an epoch."""
    return np.random.default_rng((seed, epoch)).permutation(len(source.fragments)).tolist()


def stream_source(
    source: Source, decoder: Decoder, *, seed: int, kept_whole: frozenset[int] = frozenset()
) -> OpenEpoch:
    """Return a function that opens an epoch of a source; see ``decode_source`` for ``kept_whole``."""
    # Only the worker that opens the epochs fetches the fragments.
    described, all_fragments = replace(source, fragments=()), ray.put(source.fragments)

    def open_epoch(epoch: int, num_unneeded: int) -> tuple[ray.data.Dataset, int]:
        whole = replace(described, fragments=ray.get(all_fragments))
        fragments = [whole.fragments[index] for index in fragment_order(whole, seed, epoch)]
        num_train: Any = ray.get(decoder.coordinator.num_train.remote()) if num_unneeded else {}
        needed, num_skipped = without_first_rows(fragments, num_train, num_unneeded)
        return decode_source(described, decoder, needed, kept_whole=kept_whole), num_skipped

    return open_epoch


def without_first_rows(
    fragments: Sequence[Fragment], num_train: Mapping[str, int], num_unneeded: int
) -> tuple[Sequence[Fragment], int]:
    """Return the fragments without the first ones that hold none but the first ``num_unneeded`` training rows.

    ``num_train`` are the training rows of the fragments that were read before, by name. Also returns the number of
    rows of the fragments that are left out. The last fragment is always kept.
    """
    num_skipped = 0
    for position, fragment in enumerate(fragments[:-1]):
        num_rows = num_train.get(fragment.name)
        if num_rows is None or num_skipped + num_rows > num_unneeded:
            return fragments[position:], num_skipped
        num_skipped += num_rows
    return fragments[-1:], num_skipped


def stream_dataset(
    dataset: ray.data.Dataset,
    columns: ColumnNames,
    decoder: Decoder,
    *,
    seed: int,
    classes: tuple[str, ...] | None = None,
) -> OpenEpoch:
    """Return a function that opens an epoch of a user's Ray Dataset; see ``decode_dataset`` for ``classes``."""

    def open_epoch(epoch: int, _: int) -> tuple[ray.data.Dataset, int]:
        shuffled = dataset.randomize_block_order(seed=hash((seed, epoch)) % 2**31)
        # A dataset keeps the settings of the process that created it.
        shuffled.context.execution_options.preserve_order = True
        return decode_dataset(shuffled, columns, decoder, classes=classes), 0

    return open_epoch
