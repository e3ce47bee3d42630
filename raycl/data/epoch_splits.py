"""Dealing: Ray Data gives every worker its tables of an epoch, and begins the next epoch before this one is used up."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, final

import pyarrow as pa
import ray
from ray.train.collective import broadcast_from_rank_zero

from raycl.data.prefetch import Prefetched
from raycl.data.sampler import BatchShard

OpenEpoch = Callable[[int], ray.data.Dataset]

_AHEAD = 2  # tables that wait, of 64 MiB at most


@final
class EpochSplits:
    """A worker's tables, epoch after epoch: equally many rows for each worker.

    An actor of Ray Data deals an epoch, and takes seconds to begin. That of the next epoch is started
    along with this one's, and reads as soon as the last row of this one is dealt.
    """

    def __init__(self) -> None:
        self._last: tuple[BatchShard, int, _Reading] | None = None
        self._actors: dict[int, Any] = {}  # of the first worker, by epoch

    def tables(
        self, open_epoch: OpenEpoch, share: BatchShard, *, epoch: int, continues: bool, has_next: bool
    ) -> Iterator[pa.Table]:
        """Yield this worker's tables of an epoch; every worker calls this, with the same arguments but its rank.

        ``continues`` says that the epoch before was used to its end, ``has_next`` that the next epoch will
        follow, with the same share.
        """
        reading = self._begun(share, epoch) if continues else None
        self._last = None
        wanted = ([epoch] if reading is None else []) + ([epoch + 1] if has_next else [])
        parts = self._deal(open_epoch, share, wanted, kept=set() if reading is None else {epoch})
        if reading is None:
            reading = _Reading(parts[epoch])
        if has_next:
            reading.turn.let_follow(parts[epoch + 1])
        self._last = share, epoch, reading
        yield from reading.tables

    def _begun(self, share: BatchShard, epoch: int) -> "_Reading | None":
        """Return the reading of an epoch if it was begun behind the one before."""
        # Alike on all workers: an epoch that has ended has begun the next one, if there was to be one.
        if self._last is None or self._last[:2] != (share, epoch - 1):
            return None
        return self._last[2].turn.following

    def _deal(
        self, open_epoch: OpenEpoch, share: BatchShard, epochs: list[int], *, kept: set[int]
    ) -> dict[int, Any]:
        """Start actors that deal these epochs, and end all others but ``kept``; return this worker's parts."""
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
            self._end_actors_but(kept)
            self._actors |= {epoch: parts[epoch][0]._coord_actor for epoch in epochs}
        return {epoch: parts[epoch][share.rank] for epoch in epochs}

    def _end_actors_but(self, kept: set[int]) -> None:
        """End the actors of epochs that every worker has left by now, or that nobody will enter.

        Ray would not: what is broadcast is pickled on the way, and an actor whose handle was pickled lives as
        long as its owner. That would be a process of 120 MB more each epoch.
        """
        for epoch in self._actors.keys() - kept:
            actor = self._actors.pop(epoch)
            # Of an epoch that was left in its middle, tasks and what they claim of the cluster end first.
            ray.wait([actor.shutdown_executor.remote()], timeout=5)
            ray.kill(actor)


@final
class _Reading:
    """The tables of an epoch, some of them ahead. When this is forgotten, its thread and what follows it end."""

    def __init__(self, part: Any) -> None:
        self.turn = _NextEpoch()
        self.tables = Prefetched(_read(part, self.turn), depth=_AHEAD)


@final
class _NextEpoch:
    """The next epoch's turn: it begins once all of this one is read, and that it comes is known."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_read, self._part = False, None
        self.following: _Reading | None = None

    def let_follow(self, part: Any) -> None:
        """Let this part of the next epoch be read after this epoch."""
        with self._lock:
            self._part = part
            self._begin()

    def come(self) -> None:
        """All of this epoch is read."""
        with self._lock:
            self._is_read = True
            self._begin()

    def _begin(self) -> None:
        if self._is_read and self._part is not None:
            self.following, self._part = _Reading(self._part), None


def _read(part: Any, turn: _NextEpoch) -> Iterator[pa.Table]:
    yield from part.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)
    turn.come()
