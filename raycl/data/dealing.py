"""Dealing: Ray Data gives every worker its tables of an epoch, and begins the next epoch before this one is used up."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, final

import pyarrow as pa
import ray
from ray.train.collective import broadcast_from_rank_zero

from raycl.data.order import Share
from raycl.data.prefetch import Prefetched

OpenEpoch = Callable[[int], ray.data.Dataset]

_AHEAD = 4  # tables that wait, of 64 MiB at most


@final
class Dealing:
    """A worker's tables, epoch after epoch: equally many rows for each worker.

    An actor of Ray Data deals an epoch, and takes seconds to begin. That of the next epoch is started
    along with this one's, and reads as soon as the last row of this one is dealt.
    """

    def __init__(self) -> None:
        self._following: dict[tuple[Share, int], _Reading] = {}
        self._actors: dict[int, Any] = {}  # of the first worker, by epoch

    def tables(self, open_epoch: OpenEpoch, share: Share, *, epoch: int, another: bool) -> Iterator[pa.Table]:
        """Yield this worker's tables of an epoch; every worker calls this.

        ``another`` says that the next epoch will be asked for, with the same share, after this one.
        """
        before = self._following.pop((share, epoch), None)
        self._forget(share)
        reading = None if before is None else before.following
        wanted = ([epoch] if reading is None else []) + ([epoch + 1] if another else [])
        parts = self._deal(open_epoch, share, wanted) if wanted else {}
        if reading is None:
            reading = _Reading(parts[epoch])
        if another:
            reading.let_follow(parts[epoch + 1])
            self._following[share, epoch + 1] = reading
        try:
            yield from reading.tables
        except BaseException:
            reading.close()
            raise

    def _forget(self, share: Share) -> None:
        """End what was begun for an epoch that nobody asks for now: after a rollback, or in another stage."""
        for key in [key for key in list(self._following) if key[0].rank == share.rank]:
            self._following.pop(key).close()

    def _deal(self, open_epoch: OpenEpoch, share: Share, epochs: list[int]) -> dict[int, Any]:
        """Start actors that deal these epochs; return this worker's part of each."""
        parts: Any = None
        if share.rank == 0:
            parts = {
                epoch: open_epoch(epoch).streaming_split(share.num_workers, equal=True) for epoch in epochs
            }
        if share.num_workers > 1:
            parts = broadcast_from_rank_zero(parts)
        if share.rank == 0:
            self._end_actors_but({epochs[-1] - 1})
            self._actors |= {epoch: parts[epoch][0]._coord_actor for epoch in epochs}
        return {epoch: parts[epoch][share.rank] for epoch in epochs}

    def _end_actors_but(self, kept: set[int]) -> None:
        """End the actors of the epochs before, which every worker has left by now.

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
    """The tables of an epoch, some of them ahead; and those of the next one once all of these are read."""

    def __init__(self, part: Any) -> None:
        self._lock = threading.Lock()
        self._is_read = self._is_closed = False
        self._next_part: Any = None
        self.following: _Reading | None = None
        self.tables = Prefetched(self._read(part), depth=_AHEAD)

    def let_follow(self, part: Any) -> None:
        """Read this part of the next epoch after this one."""
        with self._lock:
            self._next_part = part
            self._follow()

    def close(self) -> None:
        """End this reading, and what follows it."""
        with self._lock:
            self._is_closed = True
            self.tables.close()
            if self.following is not None:
                self.following.close()

    def _read(self, part: Any) -> Iterator[pa.Table]:
        yield from part.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)
        with self._lock:
            self._is_read = True
            self._follow()

    def _follow(self) -> None:
        is_time = self._is_read and not self._is_closed
        if is_time and self._next_part is not None and self.following is None:
            self.following = _Reading(self._next_part)
