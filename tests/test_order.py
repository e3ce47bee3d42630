"""The order of rows in an epoch: equal batches for any number of workers, and buckets of similar lengths."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from raycl.data import windows
from raycl.data.in_memory import InMemoryDataset, texts_of, tokens_of
from raycl.data.sampler import BatchShard, InMemorySampler, bucketed
from raycl.data.streaming import StreamingSampler
from raycl.data.windows import LocalReader, RowRange, StreamReader, _Windows
from raycl.recipes import recipe
from tests.pairs import clicks, rows_of, small_config
from tests.texts import invented_texts

NUM_ROWS, BUCKETS, BATCH_SIZE = 203, 4, 12
ALONE = BatchShard(batch_size=BATCH_SIZE)


@pytest.fixture(scope="module")
def rows() -> InMemoryDataset:
    whole = {"text.max_length": 200, "text.max_document_length": 200}
    return rows_of(small_config(settings=whole), clicks(NUM_ROWS, num_negatives=[2, 0, 3]))


def epoch_of(
    rows: InMemoryDataset,
    share: BatchShard = ALONE,
    *,
    length_buckets: int = 1,
    epoch: int = 0,
    start: int = 0,
) -> list[list[int]]:
    sampler = InMemorySampler(rows=rows, seed=5, length_buckets=length_buckets)
    return [batch.sample_id.tolist() for batch in sampler.epoch_batches(share, epoch=epoch, start=start)]


def shards(num_workers: int) -> list[BatchShard]:
    return [
        BatchShard(batch_size=BATCH_SIZE, rank=rank, num_workers=num_workers) for rank in range(num_workers)
    ]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 6])
def test_batches_do_not_depend_on_the_number_of_workers(rows: InMemoryDataset, num_workers: int) -> None:
    whole = epoch_of(rows, epoch=3)
    parts = zip(*(epoch_of(rows, share, epoch=3) for share in shards(num_workers)), strict=True)
    assert [[row for part in each for row in part] for each in parts] == whole
    assert len(whole) == NUM_ROWS // BATCH_SIZE
    assert epoch_of(rows, replace(shards(num_workers)[-1], is_whole=True), epoch=3) == whole


def test_an_epoch_has_each_row_at_most_once_and_resumes_in_the_same_order(rows: InMemoryDataset) -> None:
    first, second = epoch_of(rows, epoch=0), epoch_of(rows, epoch=1)
    assert first != second
    for epoch in (first, second):
        assert len({row for batch in epoch for row in batch}) == NUM_ROWS // BATCH_SIZE * BATCH_SIZE
    assert epoch_of(rows, epoch=1, start=4) == second[4:]
    # By hand: numpy's permutation of the rows, seeded by seed and epoch.
    order = np.random.default_rng((5, 1)).permutation(NUM_ROWS)
    assert second == order[: len(second) * BATCH_SIZE].reshape(-1, BATCH_SIZE).tolist()


def test_the_length_of_a_row_counts_its_texts_and_the_longest_text_of_each_list(
    rows: InMemoryDataset,
) -> None:
    batch = rows.take(np.arange(NUM_ROWS))
    negatives = texts_of(batch, "negatives")
    ends = np.cumsum(negatives.counts)
    longest = [
        max(negatives.tokens.lengths[end - count : end], default=0)
        for end, count in zip(ends, negatives.counts, strict=True)
    ]
    expected = tokens_of(batch, "query").lengths + tokens_of(batch, "document").lengths + longest
    assert rows.num_tokens().tolist() == expected.tolist()
    assert len(set(longest)) > 2
    odd = rows.where(lambda ids: ids % 2 == 1)
    assert odd.num_tokens().tolist() == expected[1::2].tolist()
    texts = invented_texts(30)
    lists = rows_of(recipe("simcse"), {"text": [texts[:2], texts[2], [*texts[3:9]]]})
    lengths = texts_of(lists.take(np.arange(3)), "text").tokens.lengths
    assert lists.num_tokens().tolist() == [max(lengths[:2]), lengths[2], max(lengths[3:])]


def test_buckets_have_the_same_rows_in_different_batches(rows: InMemoryDataset) -> None:
    mixed = np.array(epoch_of(rows))
    sorted_by_length = np.array(epoch_of(rows, length_buckets=BUCKETS))
    assert mixed.shape == sorted_by_length.shape == (NUM_ROWS // BATCH_SIZE, BATCH_SIZE)
    for start in range(0, len(mixed), BUCKETS):
        window, buckets = mixed[start : start + BUCKETS], sorted_by_length[start : start + BUCKETS]
        assert sorted(window.flat) == sorted(buckets.flat)
        lengths = rows.num_tokens()[buckets]
        ranges = sorted(zip(lengths.min(axis=1), lengths.max(axis=1), strict=True))
        assert all(below[1] <= above[0] for below, above in pairwise(ranges))
    assert not np.array_equal(sorted_by_length, epoch_of(rows, length_buckets=BUCKETS, epoch=1))


def plain_buckets(lengths: NDArray[np.int64], seed: Any, num_rows: int, num_buckets: int) -> list[list[int]]:
    """Return shuffled batches of Python's stable sort of the rows of every ``num_buckets`` batches."""
    rng, batches = np.random.default_rng(seed), list[list[int]]()
    order = rng.permutation(num_rows)[: num_rows // BATCH_SIZE * BATCH_SIZE].tolist()
    for start in range(0, len(order), num_buckets * BATCH_SIZE):
        window = sorted(order[start : start + num_buckets * BATCH_SIZE], key=lengths.tolist().__getitem__)
        batches += rng.permutation(np.reshape(window, (-1, BATCH_SIZE))).tolist()
    return batches


@pytest.mark.parametrize(("num_buckets", "num_workers"), [(2, 1), (5, 3)])
def test_buckets_equal_a_plain_sort_in_memory_and_in_a_stream(
    rows: InMemoryDataset, num_buckets: int, num_workers: int
) -> None:
    shares, lengths = shards(num_workers), rows.num_tokens()
    stream = replace(
        stream_of(shuffle_buffer_size=NUM_ROWS, length_buckets=num_buckets), formats=rows._formats
    )
    # The only window of an epoch has rows that complete no batch.
    table = pa.Table.from_batches([rows.arrow_rows(np.arange(NUM_ROWS))])
    [streamed], _ = stream.cutter(shares[0]).cut([table], epoch=1, number=0)
    in_memory, in_stream = (
        plain_buckets(lengths, seed, NUM_ROWS, num_buckets) for seed in [(5, 3), (3, 1, 0)]
    )
    for share, cut in zip(shares, streamed, strict=True):
        own = slice(share.rank, None, num_workers)  # the workers take turns
        found = epoch_of(rows, share, length_buckets=num_buckets, epoch=3)
        assert found == [batch[own] for batch in in_memory]
        assert cut["sample_id"].to_pylist() == [row for batch in in_stream for row in batch[own]]


def test_neither_the_time_of_a_batch_nor_the_dropped_rows_depend_on_length(rows: InMemoryDataset) -> None:
    lengths = rows.num_tokens()
    longest_at, dropped = set(), []
    for epoch in range(20):
        batches = np.array(epoch_of(rows, length_buckets=BUCKETS, epoch=epoch))
        longest_at.add(int(lengths[batches[:BUCKETS]].sum(axis=1).argmax()))
        dropped += lengths[np.setdiff1d(np.arange(NUM_ROWS), batches)].tolist()
    assert longest_at == set(range(BUCKETS))
    # The mean over 11 random rows in each of 20 epochs is within 4 standard errors.
    assert abs(np.mean(dropped) - lengths.mean()) < 4 * lengths.std() / len(dropped) ** 0.5


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_workers_share_every_bucket_and_pad_to_one_length(rows: InMemoryDataset, num_workers: int) -> None:
    lengths = rows.num_tokens()
    alone = epoch_of(rows, length_buckets=BUCKETS)
    together = zip(
        *(epoch_of(rows, share, length_buckets=BUCKETS) for share in shards(num_workers)), strict=True
    )
    for whole, parts in zip(alone, together, strict=True):
        assert sorted(whole) == sorted(row for part in parts for row in part)
        in_turn = np.sort(lengths[whole])
        for rank, part in enumerate(parts):
            assert lengths[part].tolist() == in_turn[rank::num_workers].tolist()


def test_an_empty_epoch_has_no_buckets() -> None:
    nothing = np.empty(0, np.int64)
    rng = np.random.default_rng(0)
    assert len(bucketed(nothing, nothing, share=ALONE, num_buckets=3, rng=rng)) == 0


def stream_of(*, shuffle_buffer_size: int, length_buckets: int = 1) -> StreamingSampler:
    def no_cluster(epoch: int) -> Any:
        raise AssertionError("the tables are given")

    return StreamingSampler(
        open_epoch=no_cluster,
        formats={},
        seed=3,
        shuffle_buffer_size=shuffle_buffer_size,
        length_buckets=length_buckets,
    )


def cut_stream(
    sizes: list[int], *, buffer: int, num_workers: int, num_pieces: int = 1
) -> list[list[list[int]]]:
    """Return the ids of each worker's batches, [num_workers][num_steps]; blocks have these numbers of rows."""
    cutter = stream_of(shuffle_buffer_size=buffer).cutter(
        BatchShard(batch_size=BATCH_SIZE, num_workers=num_workers)
    )
    ends = np.cumsum(sizes)
    blocks = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    ranges = (RowRange(ids, 0, len(ids), len(ids)) for ids in blocks)
    seen: list[list[list[int]]] = [[] for _ in range(num_workers)]
    for number, window in enumerate(cutter.windows(ranges)):
        ids = [part.block[part.start : part.stop] for part in window]
        tables = [pa.table({"sample_id": each, "label": each}) for each in ids]
        pieces, _ = cutter.cut(tables, epoch=1, number=number, num_pieces=num_pieces)
        for piece in pieces:
            for rank, rows in enumerate(piece):
                seen[rank] += np.reshape(rows["sample_id"], (-1, BATCH_SIZE // num_workers)).tolist()
    return seen


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_streamed_batches_do_not_depend_on_workers_blocks_and_pieces(num_workers: int) -> None:
    [whole] = cut_stream([203], buffer=40, num_workers=1)
    assert len(whole) == 203 // BATCH_SIZE
    for sizes in ([203], [1] * 203, [100, 0, 7, 96]):
        parts = zip(*cut_stream(sizes, buffer=40, num_workers=num_workers, num_pieces=2), strict=True)
        assert [[row for part in each for row in part] for each in parts] == whole


def test_a_stream_shuffles_windows_of_whole_batches_and_uses_every_row_once() -> None:
    [batches] = cut_stream([60, 60, 83], buffer=40, num_workers=1)
    for number, start in enumerate(range(0, 203, 36)):  # 40 rows are three batches
        window = [row for batch in batches[3 * number : 3 * number + 3] for row in batch]
        whole = range(start, min(start + 36, 203 // BATCH_SIZE * BATCH_SIZE))
        assert len(set(window)) == len(window) == len(whole)
        assert set(window) <= set(range(start, min(start + 36, 203)))
        assert window != sorted(window)
    # By hand: numpy's permutation of the window's 36 rows, seeded by seed, epoch and number of the window.
    assert batches[3] == (36 + np.random.default_rng((3, 1, 1)).permutation(36))[:BATCH_SIZE].tolist()


@pytest.mark.parametrize(("num_rows", "num_steps"), [(11, 0), (12, 1), (47, 3), (48, 4)])
def test_the_last_window_gives_all_of_its_whole_batches(num_rows: int, num_steps: int) -> None:
    assert len(cut_stream([num_rows], buffer=40, num_workers=1)[0]) == num_steps


def test_an_error_of_the_epoch_read_ahead_does_not_hide_the_end_of_this_one() -> None:
    async def check() -> None:
        windows = _Windows(stream_of(shuffle_buffer_size=40).cutter(ALONE))
        await windows._end(0)
        await windows._fail(ValueError("epoch 1 is broken"))
        assert await windows.window(0, 0, 3) is None
        with pytest.raises(ValueError, match="epoch 1 is broken"):
            await windows.window(0, 1, 0)

    asyncio.run(check())


def plain_windows(
    num_rows: int, num_workers: int, *, epoch: int = 1, size: int = 36
) -> list[list[list[list[int]]]]:
    """Return the ids of an epoch, [window][step][worker]: numpy's permutation of every ``size`` rows."""
    found = []
    for number, start in enumerate(range(0, num_rows // BATCH_SIZE * BATCH_SIZE, size)):
        rows = start + np.random.default_rng((3, epoch, number)).permutation(min(size, num_rows - start))
        complete = rows[: len(rows) // BATCH_SIZE * BATCH_SIZE]
        found.append(complete.reshape(-1, num_workers, BATCH_SIZE // num_workers).tolist())
    return found


def table_of(ids: NDArray[np.int64]) -> pa.Table:
    return pa.table({"sample_id": ids, "label": ids % 6})


@pytest.mark.parametrize(("num_rows", "num_workers", "first"), [(203, 1, 0), (190, 3, 2)])
def test_a_local_reader_yields_every_batch_of_a_worker_or_of_all(
    num_rows: int, num_workers: int, first: int
) -> None:
    tables = [table_of(ids) for ids in np.split(np.arange(num_rows), [50, 51, 51, 140])]
    reader = LocalReader(num_rows=list(map(len, tables)), load=tables.__getitem__)
    opened: dict[Any, Any] = {(1, 0): (range(5), 0)}
    stream = replace(stream_of(shuffle_buffer_size=40), local=reader, open_epoch=lambda *given: opened[given])
    steps = [step for window in plain_windows(num_rows, num_workers)[first:] for step in window]
    for share in shards(num_workers):
        found = [batch.sample_id.tolist() for batch in stream.epoch_batches(share, epoch=1, start=3 * first)]
        assert found == [step[share.rank] for step in steps]
    whole = replace(shards(num_workers)[-1], is_whole=True)
    found = [batch.sample_id.tolist() for batch in stream.epoch_batches(whole, epoch=1, start=3 * first)]
    assert found == [[row for part in step for row in part] for step in steps]
    assert stream.grouped_fraction == 0
    # Each window of 36 rows has six rows of each class.
    grouped = replace(stream, samples_per_class=3)
    batches = [*grouped.epoch_batches(whole, epoch=1)]
    assert len(batches) == num_rows // BATCH_SIZE
    assert {count for batch in batches for count in Counter(batch.label.tolist()).values()} == {3}
    assert grouped.grouped_fraction == 1


async def windows_of(actor: _Windows, rank: int, epoch: int, first: int) -> list[list[list[int]]]:
    """Return the ids of a worker's pieces of each window."""
    found: list[list[list[int]]] = []
    while (window := await actor.window(rank, epoch, first + len(found))) is not None:
        found.append([piece["sample_id"].to_pylist() for piece in window[:-1]])
    return found


class Remote:
    """A method or a task of Ray: ``remote`` calls it at once."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


@pytest.mark.parametrize(
    ("buffer", "num_workers", "first", "num_skipped", "piece_bytes", "piece_lengths"),
    [
        (40, 1, 0, 0, 1_000, [[3]] * 5 + [[1]]),
        (40, 2, 2, 50, 70, [[2, 1]] * 3 + [[1]]),  # a worker has 144 bytes of a window
        (40, 3, 1, 30, 30, [[1, 1, 1]] * 4 + [[1]]),
        (48, 1, 0, 0, 120, [[2, 2]] * 4),  # three pieces of four batches: one would be empty
    ],
)
def test_an_actor_passes_on_the_windows_of_an_epoch_in_pieces(
    buffer: int,
    num_workers: int,
    first: int,
    num_skipped: int,
    piece_bytes: int,
    piece_lengths: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut = windows._cut_window._function  # type: ignore[attr-defined]

    def options(num_returns: int) -> Remote:
        def call(*given: Any) -> list[Any]:
            found = cut(*given)
            assert len(found) == num_returns
            return found

        return Remote(call)

    monkeypatch.setattr(windows, "_cut_window", SimpleNamespace(options=options))
    monkeypatch.setattr(windows, "_PIECE_BYTES", piece_bytes)
    size, opened = BATCH_SIZE // num_workers, list[int]()
    cutter = stream_of(shuffle_buffer_size=buffer).cutter(shards(num_workers)[0])

    def entry(start: int, stop: int) -> Any:
        metadata = SimpleNamespace(num_rows=stop - start, size_bytes=8 * (stop - start))
        return SimpleNamespace(ref=table_of(np.arange(start, stop)), metadata=metadata)

    # Two blocks as they are, and one of which a slice is used.
    blocks = [entry(num_skipped, 100), entry(100, 100), entry(90, 300)]
    part = SimpleNamespace(start_offset=10, end_offset=113)
    bundles = [
        SimpleNamespace(blocks=blocks[:1], slices=[None]),
        SimpleNamespace(blocks=blocks[1:], slices=[None, part]),
    ]

    def dataset(epoch: int) -> Any:
        return SimpleNamespace(iter_internal_ref_bundles=lambda: opened.append(epoch) or bundles)

    async def check() -> None:
        actor = _Windows(cutter)
        for epoch in (1, 2):
            await actor.read(epoch, first, dataset(epoch), num_skipped)
        await asyncio.sleep(0.01)
        assert opened in ([], [1])  # one epoch after the other, at most a window ahead
        for epoch in (1, 2):
            by_worker = await asyncio.gather(
                *(windows_of(actor, rank, epoch, first) for rank in range(num_workers))
            )
            plain = plain_windows(203, num_workers, epoch=epoch, size=cutter.num_rows)[first:]
            for rank, found in enumerate(by_worker):
                assert [[len(piece) // size for piece in window] for window in found] == piece_lengths
                rows = [[row for piece in window for row in piece] for window in found]
                assert rows == [[row for step in window for row in step[rank]] for window in plain]
        actor._epochs.put(None)  # type: ignore[arg-type]
        with pytest.raises(TypeError):  # an error ends the thread, and reaches who waits
            await actor.window(0, 3, 0)

    asyncio.run(asyncio.wait_for(check(), 30))


def test_a_resumed_epoch_and_the_one_read_ahead_begin_at_windows_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads, killed = list[Any](), list[Any]()

    def start(cutter: Any) -> Any:
        return SimpleNamespace(
            read=Remote(lambda *given: reads.append(given)),
            window=Remote(lambda _, epoch, number: ["a", "b", 36] if (epoch, number) == (1, 2) else None),
        )

    def pieces(epoch: int, first: int, *, cutter: Any, continues: bool, has_next: bool = False) -> list[Any]:
        return list(
            reader.pieces(
                lambda epoch, num_unneeded: (f"epoch {epoch}", num_unneeded),
                cutter,
                share=ALONE,
                epoch=epoch,
                first=first,
                continues=continues,
                has_next=has_next,
            )
        )

    monkeypatch.setattr(windows, "ray", SimpleNamespace(get=lambda found: found, kill=killed.append))
    monkeypatch.setattr(windows, "helper_actor", lambda *_, **__: Remote(start))
    reader, cutter = StreamReader(), stream_of(shuffle_buffer_size=40).cutter(ALONE)
    found = pieces(1, 2, cutter=cutter, continues=False, has_next=True)
    assert found == [("a", 36), ("b", 0)]
    assert reads == [(1, 2, "epoch 1", 2 * 36), (2, 0, "epoch 2", 0)]
    pieces(2, 0, cutter=cutter, continues=True, has_next=True)
    assert (reads[2:], killed) == ([(3, 0, "epoch 3", 0)], [])
    # An epoch that was left early, another cutter, and an epoch that was not announced: each has a new actor.
    pieces(3, 0, cutter=cutter, continues=False, has_next=True)
    assert (reads[3:], len(killed)) == ([(3, 0, "epoch 3", 0), (4, 0, "epoch 4", 0)], 1)
    pieces(4, 0, cutter=replace(cutter, seed=4), continues=True)
    assert (reads[5:], len(killed)) == ([(4, 0, "epoch 4", 0)], 2)
    pieces(5, 0, cutter=replace(cutter, seed=4), continues=True)
    assert (reads[6:], len(killed)) == ([(5, 0, "epoch 5", 0)], 3)


@pytest.mark.parametrize("hook", ["", "raycl.import_worker", "theirs.import_worker"])
def test_only_the_first_worker_starts_calls_and_ends_the_actor_of_all(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors, reads, killed, settings = list[Any](), list[int](), list[Any](), list[Any]()

    def start(cutter: Any) -> Any:
        read = Remote(lambda epoch, *_: reads.append(epoch))
        window = Remote(lambda rank, epoch, number: None if number else [f"{rank} of {epoch}", 0])
        actors.append(SimpleNamespace(read=read, window=window))
        return actors[-1]

    def helper_actor(_: Any, **options: Any) -> Remote:
        settings.append(options.get("runtime_env"))
        return Remote(start)

    def broadcast(actor: Any) -> Any:
        assert (actor is None) == bool(rank)
        return actors[-1]

    monkeypatch.setenv(windows.HOOK, hook)
    monkeypatch.setattr(windows, "ray", SimpleNamespace(get=lambda found: found, kill=killed.append))
    monkeypatch.setattr(windows, "helper_actor", helper_actor)
    monkeypatch.setattr(windows, "broadcast_from_rank_zero", broadcast)
    readers, shares = [StreamReader(), StreamReader()], shards(2)
    cutter = stream_of(shuffle_buffer_size=40).cutter(shares[0])
    arguments: dict[str, Any] = {"first": 0, "continues": False, "has_next": False}
    for epoch in (1, 2):
        for rank, reader in enumerate(readers):
            pieces = reader.pieces(lambda *_: (None, 0), cutter, share=shares[rank], epoch=epoch, **arguments)
            assert [piece.rows for piece in pieces] == [f"{rank} of {epoch}"]
    assert (len(actors), reads, killed) == (2, [1, 2], actors[:1])
    # The hook that imports torch would delay it; another one is the user's.
    own = {"env_vars": {windows.HOOK: "raycl.import_reader"}}
    assert settings == [own if hook.startswith("raycl.") else None] * 2


def test_a_buffer_smaller_than_a_batch_is_one_batch() -> None:
    [batches] = cut_stream([30], buffer=5, num_workers=1)
    assert [sorted(batch) for batch in batches] == [list(range(12)), list(range(12, 24))]
