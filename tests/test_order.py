"""Buckets of texts of like lengths: the same rows, less padding, equal shares."""

from itertools import pairwise

import numpy as np
import pytest

from raycl.data.in_memory import InMemoryDataset, texts_of, tokens_of
from raycl.data.sampler import BatchShard, InMemorySampler, bucketed
from raycl.recipes import recipe
from tests.pairs import clicks, rows_of, small_config
from tests.texts import invented_texts

NUM_ROWS, BUCKETS, BATCH_SIZE = 203, 4, 12


@pytest.fixture(scope="module")
def rows() -> InMemoryDataset:
    whole = {"text.max_length": 200, "text.max_document_length": 200}
    return rows_of(small_config(settings=whole), clicks(NUM_ROWS, num_negatives=[2, 0, 3]))


def epoch_of(
    rows: InMemoryDataset, share: BatchShard, *, length_buckets: int, epoch: int = 0
) -> list[list[int]]:
    shuffled = InMemorySampler(rows=rows, seed=5, length_buckets=length_buckets)
    return [batch.sample_id.tolist() for batch in shuffled.epoch_batches(share, epoch=epoch)]


def test_the_tokens_of_a_row_are_those_of_its_texts_and_of_the_longest_of_a_list(
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


def test_buckets_have_the_rows_of_the_epoch_in_other_batches(rows: InMemoryDataset) -> None:
    share = BatchShard(batch_size=BATCH_SIZE)
    mixed = np.array(epoch_of(rows, share, length_buckets=1))
    sorted_by_length = np.array(epoch_of(rows, share, length_buckets=BUCKETS))
    assert mixed.shape == sorted_by_length.shape == (NUM_ROWS // BATCH_SIZE, BATCH_SIZE)
    for start in range(0, len(mixed), BUCKETS):
        window, buckets = mixed[start : start + BUCKETS], sorted_by_length[start : start + BUCKETS]
        assert sorted(window.flat) == sorted(buckets.flat)
        lengths = rows.num_tokens()[buckets]
        ranges = sorted(zip(lengths.min(axis=1), lengths.max(axis=1), strict=True))
        assert all(below[1] <= above[0] for below, above in pairwise(ranges))
    assert not np.array_equal(sorted_by_length, epoch_of(rows, share, length_buckets=BUCKETS, epoch=1))


def test_long_batches_come_at_any_time_and_long_rows_are_not_the_ones_left_out(rows: InMemoryDataset) -> None:
    lengths, share = rows.num_tokens(), BatchShard(batch_size=BATCH_SIZE)
    longest_at, left_out = set(), []
    for epoch in range(20):
        batches = np.array(epoch_of(rows, share, length_buckets=BUCKETS, epoch=epoch))
        longest_at.add(int(lengths[batches[:BUCKETS]].sum(axis=1).argmax()))
        left_out += lengths[np.setdiff1d(np.arange(NUM_ROWS), batches)].tolist()
    assert longest_at == set(range(BUCKETS))
    # Of 11 rows in each of 20 epochs, drawn as all others: their mean is within 4 of its standard errors.
    assert abs(np.mean(left_out) - lengths.mean()) < 4 * lengths.std() / len(left_out) ** 0.5


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_workers_share_each_batch_and_its_length(rows: InMemoryDataset, num_workers: int) -> None:
    lengths = rows.num_tokens()
    alone = epoch_of(rows, BatchShard(batch_size=BATCH_SIZE), length_buckets=BUCKETS)
    shares = [
        BatchShard(batch_size=BATCH_SIZE, rank=rank, num_workers=num_workers) for rank in range(num_workers)
    ]
    together = list(zip(*(epoch_of(rows, share, length_buckets=BUCKETS) for share in shares), strict=True))
    assert len(alone) == len(together)
    for whole, parts in zip(alone, together, strict=True):
        assert sorted(whole) == sorted(row for part in parts for row in part)
        in_turn = np.sort(lengths[whole])
        for rank, part in enumerate(parts):
            assert lengths[part].tolist() == in_turn[rank::num_workers].tolist()


def test_nothing_to_sort_is_no_error() -> None:
    nothing = np.empty(0, np.int64)
    share, rng = BatchShard(batch_size=4), np.random.default_rng(0)
    assert len(bucketed(nothing, nothing, share=share, num_buckets=3, rng=rng)) == 0


def test_lists_of_texts_count_by_their_longest() -> None:
    texts = invented_texts(30)
    config = recipe("simcse")
    rows = rows_of(config, {"text": [texts[:2], texts[2], [*texts[3:9]]]})
    lengths = texts_of(rows.take(np.arange(3)), "text").tokens.lengths
    assert rows.num_tokens().tolist() == [max(lengths[:2]), lengths[2], max(lengths[3:])]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 6])
def test_any_number_of_workers_makes_the_same_batches(rows: InMemoryDataset, num_workers: int) -> None:
    shares = [
        BatchShard(batch_size=BATCH_SIZE, rank=rank, num_workers=num_workers) for rank in range(num_workers)
    ]
    shuffled = InMemorySampler(rows=rows, seed=0)
    whole = [
        each.sample_id.tolist() for each in shuffled.epoch_batches(BatchShard(batch_size=BATCH_SIZE), epoch=3)
    ]
    parts = zip(*(shuffled.epoch_batches(share, epoch=3) for share in shares), strict=True)
    assert [np.concatenate([part.sample_id for part in each]).tolist() for each in parts] == whole
    assert len(whole) > 1


def test_every_epoch_has_another_order_and_one_that_is_resumed_goes_on_in_it(rows: InMemoryDataset) -> None:
    shuffled, share = InMemorySampler(rows=rows, seed=0), BatchShard(batch_size=BATCH_SIZE)
    first, second = (
        [each.sample_id.tolist() for each in shuffled.epoch_batches(share, epoch=epoch)] for epoch in (0, 1)
    )
    assert first != second
    assert [each.sample_id.tolist() for each in shuffled.epoch_batches(share, epoch=1, start=1)] == second[1:]
