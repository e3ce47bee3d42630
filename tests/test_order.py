"""The order of rows in an epoch: equal batches for any number of workers, and buckets of similar lengths."""

import asyncio
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raycl.data.in_memory import InMemoryDataset, texts_of, tokens_of
from raycl.data.sampler import BatchShard, InMemorySampler, bucketed
from raycl.data.streaming import StreamingSampler
from raycl.data.windows import RowRange, _Windows
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


def test_an_epoch_has_each_row_at_most_once_and_resumes_in_the_same_order(rows: InMemoryDataset) -> None:
    first, second = epoch_of(rows, epoch=0), epoch_of(rows, epoch=1)
    assert first != second
    for epoch in (first, second):
        assert len({row for batch in epoch for row in batch}) == NUM_ROWS // BATCH_SIZE * BATCH_SIZE
    assert epoch_of(rows, epoch=1, start=4) == second[4:]


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


def test_a_buffer_smaller_than_a_batch_is_one_batch() -> None:
    [batches] = cut_stream([30], buffer=5, num_workers=1)
    assert [sorted(batch) for batch in batches] == [list(range(12)), list(range(12, 24))]
