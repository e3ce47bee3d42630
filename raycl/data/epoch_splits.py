"""The split of an epoch among workers by Ray Data, with prefetching of the next epoch."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, final

import pyarrow as pa
import ray
from ray.train.collective import broadcast_from_rank_zero

from raycl.data.prefetch import Prefetched
from raycl.data.sampler import BatchShard

OpenEpoch = Callable[[int], ray.data.Dataset]

_AHEAD = 2  # prefetched tables, of 64 MiB at most


@final
class EpochSplits:
    """A worker's tables of each epoch; every worker gets the same number of rows.

    A Ray Data actor splits an epoch, and takes seconds to start. The actor of the next epoch is therefore
    started with the actor of this epoch, and reads as soon as this epoch is read.
    """

    def __init__(self) -> None:
        self._last: tuple[BatchShard, int, _EpochReader] | None = None
        self._actors: dict[int, Any] = {}  # by epoch; on the first worker only

    def tables(
        self, open_epoch: OpenEpoch, share: BatchShard, *, epoch: int, continues: bool, has_next: bool
    ) -> Iterator[pa.Table]:
        """Yield this worker's tables of an epoch; collective, with equal arguments except for the rank.

        ``continues``: the previous epoch was used to its end. ``has_next``: the next epoch will follow with
        the same share.
        """
        reader = self._prefetched(share, epoch) if continues else None
        self._last = None
        wanted = ([epoch] if reader is None else []) + ([epoch + 1] if has_next else [])
        parts = self._split(open_epoch, share, wanted, kept=set() if reader is None else {epoch})
        if reader is None:
            reader = _EpochReader(parts[epoch])
        if has_next:
            reader.upcoming.set_next(parts[epoch + 1])
        self._last = share, epoch, reader
        yield from reader.tables

    def _prefetched(self, share: BatchShard, epoch: int) -> "_EpochReader | None":
        """Return the reader of an epoch if it was started during the previous epoch."""
        # Equal on all workers: an epoch that ended has started the next one, if ``has_next``.
        if self._last is None or self._last[:2] != (share, epoch - 1):
            return None
        return self._last[2].upcoming.following

    def _split(
        self, open_epoch: OpenEpoch, share: BatchShard, epochs: list[int], *, kept: set[int]
    ) -> dict[int, Any]:
        """Start the actors of these epochs, and stop all others except ``kept``; return this worker's parts."""
        if not epochs:
            return {}
        parts: Any = None
        if share.rank == 0:
            parts = {
                epoch: open_epoch(epoch).streaming_split(share.num_workers, equal=True) for epoch in epochs
            }
        if share.num_workers > 1:
            parts = broadcast_from_rank_zero(parts)
        if share.rank == 0:
            self._stop_actors_except(kept)
            self._actors |= {epoch: parts[epoch][0]._coord_actor for epoch in epochs}
        return {epoch: parts[epoch][share.rank] for epoch in epochs}

    def _stop_actors_except(self, kept: set[int]) -> None:
        """Stop the actors of epochs that no worker reads anymore.

        Ray does not stop them: broadcasting pickles their handles, and an actor with a pickled handle lives
        as long as its owner. Each epoch would leak a process of 120 MB.
        """
        for epoch in self._actors.keys() - kept:
            actor = self._actors.pop(epoch)
            # If an epoch was not read to its end, first stop its tasks and release their resources.
            ray.wait([actor.shutdown_executor.remote()], timeout=5)
            ray.kill(actor)


@final
class _EpochReader:
    """The prefetched tables of an epoch; deleting this stops its thread and the next epoch's reader."""

    def __init__(self, part: Any) -> None:
        self.upcoming = _NextEpoch()
        self.tables = Prefetched(_read(part, self.upcoming), depth=_AHEAD)


@final
class _NextEpoch:
    """Starts to read the next epoch once this epoch is read and the next epoch's part is set."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_read, self._part = False, None
        self.following: _EpochReader | None = None

    def set_next(self, part: Any) -> None:
        """Set the part of the next epoch, to be read after this epoch."""
        with self._lock:
            self._part = part
            self._start_if_ready()

    def mark_read(self) -> None:
        """Record that this epoch is read completely."""
        with self._lock:
            self._is_read = True
            self._start_if_ready()

    def _start_if_ready(self) -> None:
        if self._is_read and self._part is not None:
            self.following, self._part = _EpochReader(self._part), None


def _read(part: Any, upcoming: _NextEpoch) -> Iterator[pa.Table]:
    yield from part.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)
    upcoming.mark_read()
