"""The windows of a stream: an actor reads the rows of each epoch in order, and tasks cut them into global batches."""

import asyncio
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import pyarrow as pa
import ray
from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR as HOOK
from ray.train.collective import broadcast_from_rank_zero

from raycl.data.codecs import Formats
from raycl.data.in_memory import InMemoryDataset
from raycl.data.prefetch import Prefetched
from raycl.data.sampler import BatchShard, bucketed, grouped
from raycl.gpus import available_cores
from raycl.ray_runtime import helper_actor

# Given an epoch and the number of its first rows that are not needed: its rows without some of these, and how many rows
# these are. The rows are a Ray Dataset, or for a LocalReader the numbers of its fragments.
OpenEpoch = Callable[[int, int], tuple[Any, int]]

_PIECE_BYTES = 64 * 2**20
_AHEAD = 2  # prefetched pieces of a worker


class RowRange(NamedTuple):
    """Some adjacent rows of a block."""

    block: Any
    start: int
    stop: int
    num_bytes: float


class Piece(NamedTuple):
    """A worker's rows of consecutive batches, and how many rows of all workers' batches are in whole groups."""

    rows: pa.Table
    num_grouped: int


@final
@dataclass(frozen=True, kw_only=True)
class WindowCutter:
    """Shuffles each window of rows and cuts its global batches for the workers.

    The rows of a batch are a function of the seed, the epoch and the window's number. See :func:`bucketed` for
    ``length_buckets``, and :func:`grouped` for ``samples_per_class``.
    """

    formats: Formats
    seed: int
    shuffle_buffer_size: int
    batch_size: int
    num_workers: int
    length_buckets: int = 1
    samples_per_class: int | None = None

    @property
    def num_batches(self) -> int:
        """Global batches of a window; the last window of an epoch may have fewer."""
        return max(1, self.shuffle_buffer_size // self.batch_size)

    @property
    def num_rows(self) -> int:
        """Rows of a window."""
        return self.num_batches * self.batch_size

    def windows(self, blocks: Iterator[RowRange]) -> Iterator[list[RowRange]]:
        """Yield windows of ``num_batches`` batches; the rows of an incomplete last batch are left out."""
        window: list[RowRange] = []
        left = size = self.num_rows
        for block, start, stop, num_bytes in blocks:
            row_bytes = num_bytes / max(1, stop - start)
            while start < stop:
                end = min(stop, start + left)
                window.append(RowRange(block, start, end, row_bytes * (end - start)))
                start, left = end, left - (end - start)
                if not left:
                    yield window
                    window, left = [], size
        if size - left >= self.batch_size:
            yield window

    def cut(
        self, tables: list[pa.Table], *, epoch: int, number: int, num_pieces: int = 1
    ) -> tuple[list[list[pa.Table]], int]:
        """Cut a window into pieces of consecutive batches.

        Returns each worker's rows of each piece, [num_pieces][num_workers], and the number of rows in batches of
        whole groups. Pieces without a batch are left out.
        """
        rows = InMemoryDataset(tables, self.formats)
        rng = np.random.default_rng((self.seed, epoch, number))
        order, num_grouped = rng.permutation(len(rows)), 0
        complete = len(order) // self.batch_size * self.batch_size
        share = BatchShard(batch_size=self.batch_size, num_workers=self.num_workers)
        if self.length_buckets > 1:
            order = bucketed(
                order[:complete], rows.num_tokens(), share=share, num_buckets=self.length_buckets, rng=rng
            )
        if self.samples_per_class is not None:
            groups = self.samples_per_class
            order, num_grouped = grouped(
                order, rows.label, batch_size=self.batch_size, samples_per_class=groups, rng=rng
            )
        batches = order[:complete].reshape(-1, self.num_workers, share.local_batch_size)
        num_steps = -(-len(batches) // num_pieces)
        pieces = [batches[piece * num_steps : (piece + 1) * num_steps] for piece in range(num_pieces)]
        return [
            [
                pa.Table.from_batches([rows.arrow_rows(piece[:, rank].reshape(-1))])
                for rank in range(self.num_workers)
            ]
            for piece in pieces
            if len(piece)
        ], num_grouped


@final
class StreamReader:
    """A worker's pieces of each epoch, in the order of the batches.

    An actor on the first worker's node reads the epochs one after the other, at most one window ahead of the slowest
    worker. It reads the next epoch as soon as this epoch is read.
    """

    def __init__(self) -> None:
        self._cutter: WindowCutter | None = None
        self._actor: Any = None
        self._next: int | None = None  # the epoch that the actor reads after the last one that was asked for

    def pieces(
        self,
        open_epoch: OpenEpoch,
        cutter: WindowCutter,
        *,
        share: BatchShard,
        epoch: int,
        first: int,
        continues: bool,
        has_next: bool,
    ) -> Iterator[Piece]:
        """Yield this worker's pieces of an epoch from window ``first`` on; collective.

        All workers pass equal arguments except for the rank of ``share``. ``continues``: the previous epoch was used to
        its end. ``has_next``: the next epoch will follow with the same cutter.
        """
        rank = share.rank
        wanted = [epoch, epoch + 1] if has_next else [epoch]
        if continues and (cutter, epoch) == (self._cutter, self._next):
            del wanted[0]
        else:
            self._start(cutter, rank)
        self._next = epoch + 1 if has_next else None
        if rank == 0:
            for each in wanted:  # one by one: an asynchronous actor may change the order of its calls
                start = first if each == epoch else 0
                ray.get(self._actor.read.remote(each, start, *open_epoch(each, start * cutter.num_rows)))
        return Prefetched(_fetch(self._actor, rank, epoch, first), depth=_AHEAD)

    def _start(self, cutter: WindowCutter, rank: int) -> None:
        """Start an actor in place of the last one."""
        last, self._cutter = self._actor, cutter
        if rank == 0:
            options: dict[str, Any] = {"max_concurrency": cutter.num_workers + 2}
            if env_vars := reader_environment():
                options["runtime_env"] = {"env_vars": env_vars}
            self._actor = helper_actor(_Windows, **options).remote(cutter)
        if cutter.num_workers > 1:
            self._actor = broadcast_from_rank_zero(self._actor if rank == 0 else None)
        if rank == 0 and last is not None:
            ray.kill(last)  # now no worker reads from it


def reader_environment() -> dict[str, str]:
    """Return the environment variables in which the reader of a stream differs from the worker that starts it.

    It imports other modules than a new worker, and must not take a process from the workers. Empty if a worker imports
    none, or by a hook of the user's.
    """
    hook = os.environ.get(HOOK, "")
    return {HOOK: hook.replace("import_worker", "import_reader")} if hook.startswith("raycl.") else {}


@final
@dataclass(frozen=True, kw_only=True)
class LocalReader:
    """The pieces of each epoch, read by this process without Ray.

    ``num_rows`` are the numbers of valid rows of the fragments, and ``load`` returns the rows of one. Only the fragments of
    windows that are used are loaded.
    """

    num_rows: Sequence[int]
    load: Callable[[int], pa.Table]

    def pieces(
        self,
        open_epoch: OpenEpoch,
        cutter: WindowCutter,
        *,
        share: BatchShard,
        epoch: int,
        first: int,
        continues: bool,
        has_next: bool,
    ) -> Iterator[Piece]:
        """Yield the pieces of an epoch from window ``first`` on, each with the rows of one batch."""
        fragments, _ = open_epoch(epoch, 0)
        ranges = (RowRange(fragment, 0, self.num_rows[fragment], 0.0) for fragment in fragments)
        for number, window in enumerate(cutter.windows(ranges)):
            if number < first:
                continue
            with ThreadPoolExecutor(available_cores()) as pool:
                loaded = pool.map(self.load, [part.block for part in window])
                tables = [
                    table.slice(part.start, part.stop - part.start)
                    for part, table in zip(window, loaded, strict=True)
                ]
            num_steps = sum(map(len, tables)) // cutter.batch_size
            pieces, num_grouped = cutter.cut(tables, epoch=epoch, number=number, num_pieces=num_steps)
            for index, by_worker in enumerate(pieces):
                rows = pa.concat_tables(by_worker) if share.is_whole else by_worker[share.rank]
                yield Piece(rows, 0 if index else num_grouped)


def _fetch(actor: Any, rank: int, epoch: int, first: int) -> Iterator[Piece]:
    for number in itertools.count(first):
        window = ray.get(actor.window.remote(rank, epoch, number))
        if window is None:
            return
        *pieces, num_grouped = window
        for index, piece in enumerate(pieces):
            yield Piece(ray.get(piece), ray.get(num_grouped) if index == 0 else 0)


@final
class _Windows:
    """Passes on references to the pieces of each window of the epochs that it reads."""

    def __init__(self, cutter: WindowCutter) -> None:
        self._cutter = cutter
        self._epochs: queue.Queue[tuple[int, int, ray.data.Dataset, int]] = queue.Queue()
        self._changed = asyncio.Condition()
        self._window: dict[tuple[int, int], dict[int, list[Any]]] = {}  # by worker, until it is passed on
        self._ended: set[int] = set()  # the epochs that were read to the end
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def read(self, epoch: int, first: int, dataset: ray.data.Dataset, num_skipped: int) -> None:
        """Read an epoch after those that were asked for before, and pass on its windows from ``first`` on.

        The dataset lacks ``num_skipped`` rows of the windows before ``first``.
        """
        self._epochs.put((epoch, first, dataset, num_skipped))
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            threading.Thread(target=self._read_epochs, name="raycl-windows", daemon=True).start()

    async def window(self, rank: int, epoch: int, number: int) -> list[Any] | None:
        """Return references to a worker's pieces and to the number of grouped rows; None after the last window."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._error or (epoch, number) in self._window or epoch in self._ended
            )
            pieces = self._window.get((epoch, number))
            if pieces is None:
                # An error of the epoch that is read ahead must not hide the end of this one.
                if self._error is not None and epoch not in self._ended:
                    raise self._error
                return None
            own = pieces.pop(rank)
            if not pieces:
                del self._window[epoch, number]
                self._changed.notify_all()
            return own

    def _read_epochs(self) -> None:
        try:
            while True:
                epoch, first, dataset, num_skipped = self._epochs.get()
                skipped = RowRange(None, 0, num_skipped, 0.0)
                blocks = itertools.chain([skipped], _blocks(dataset))
                for number, window in enumerate(self._cutter.windows(blocks)):
                    if number >= first:
                        pieces = self._cut(window, epoch, number)
                        window.clear()  # nothing but the task needs its blocks
                        self._run(self._pass_on((epoch, number), pieces))
                self._run(self._end(epoch))
        except BaseException as error:  # the workers raise it
            self._run(self._fail(error))

    def _run(self, work: Any) -> None:
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _cut(self, window: list[RowRange], epoch: int, number: int) -> dict[int, list[Any]]:
        """Start to cut a window; return the references of each worker."""
        cutter = self._cutter
        num_bytes = sum(part.num_bytes for part in window)
        num_steps = sum(part.stop - part.start for part in window) // cutter.batch_size
        num_pieces = max(1, int(num_bytes / cutter.num_workers / _PIECE_BYTES))
        num_pieces = -(-num_steps // -(-num_steps // num_pieces))  # none is empty
        ranges = [(part.start, part.stop) for part in window]
        refs: Any = _cut_window.options(num_returns=num_pieces * cutter.num_workers + 1).remote(
            cutter, epoch, number, num_pieces, ranges, *(part.block for part in window)
        )
        return {rank: [*refs[rank : -1 : cutter.num_workers], refs[-1]] for rank in range(cutter.num_workers)}

    async def _pass_on(self, key: tuple[int, int], pieces: dict[int, list[Any]]) -> None:
        """Wait until every worker has its pieces of this window."""
        async with self._changed:
            self._window[key] = pieces
            self._changed.notify_all()
            await self._changed.wait_for(lambda: key not in self._window)

    async def _end(self, epoch: int) -> None:
        async with self._changed:
            self._ended.add(epoch)
            self._changed.notify_all()

    async def _fail(self, error: BaseException) -> None:
        async with self._changed:
            self._error = error
            self._changed.notify_all()


def _blocks(dataset: ray.data.Dataset) -> Iterator[RowRange]:
    """Yield the blocks of a dataset in their order, as they are read."""
    for bundle in dataset.iter_internal_ref_bundles():
        for entry, part in zip(bundle.blocks, bundle.slices or (), strict=True):
            num_rows = entry.metadata.num_rows or 0
            start, stop = (0, num_rows) if part is None else (part.start_offset, part.end_offset)
            num_bytes = (entry.metadata.size_bytes or 0) * (stop - start) / max(1, num_rows)
            yield RowRange(entry.ref, start, stop, num_bytes)


@ray.remote(num_cpus=0)
def _cut_window(
    cutter: WindowCutter,
    epoch: int,
    number: int,
    num_pieces: int,
    ranges: list[tuple[int, int]],
    *blocks: pa.Table,
) -> list[Any]:
    tables = [block.slice(start, stop - start) for block, (start, stop) in zip(blocks, ranges, strict=True)]
    pieces, num_grouped = cutter.cut(tables, epoch=epoch, number=number, num_pieces=num_pieces)
    return [*itertools.chain.from_iterable(pieces), num_grouped]
