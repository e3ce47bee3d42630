"""Several data sets in one run: each batch has rows of one of them, in proportion to sizes or weights."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pyarrow as pa
import pytest

from raycl.data.in_memory import Batch, InMemoryDataset
from raycl.data.mixed import MixedSampler, batch_counts
from raycl.data.sampler import BatchShard, InMemorySampler

BATCH_SIZE = 4
SIZES = (50, 23, 9)  # 12, 5 and 2 complete batches
PASSES = [12, 5, 2]
WHOLE = BatchShard(batch_size=BATCH_SIZE)


def sampler_of(
    *sizes: int, weights: tuple[float, ...] | None = None, equal_ids: bool = False
) -> MixedSampler:
    """Return a sampler of data sets whose ids are 1,000 apart, or the same numbers."""
    sets = []
    for number, size in enumerate(sizes):
        ids = np.arange(size) + (0 if equal_ids else 1_000 * number)
        sets.append(InMemoryDataset([pa.table({"sample_id": ids, "label": ids})], {}))
    samplers = [InMemorySampler(rows=rows, seed=20 + number) for number, rows in enumerate(sets)]
    return MixedSampler(samplers=samplers, seed=3, weights=weights)


def ids_of(batches: Iterator[Batch]) -> list[list[int]]:
    return [batch.sample_id.tolist() for batch in batches]


def data_sets_of(sampler: MixedSampler, epoch: int) -> list[int]:
    return [batch.data_set for batch in sampler.epoch_batches(WHOLE, epoch=epoch)]


@pytest.mark.parametrize("weights", [None, (1, 1, 1), (3, 1, 2.5)])
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_each_batch_has_rows_of_one_data_set_for_any_number_of_workers(
    num_workers: int, weights: tuple[float, ...] | None
) -> None:
    sampler = sampler_of(*SIZES, weights=weights)
    for epoch in (0, 3):
        whole = list(sampler.epoch_batches(WHOLE, epoch=epoch))
        for batch in whole:
            assert set(batch.sample_id // 1_000) == {batch.data_set}
        shares = [
            ids_of(
                sampler.epoch_batches(
                    BatchShard(batch_size=BATCH_SIZE, rank=rank, num_workers=num_workers), epoch=epoch
                )
            )
            for rank in range(num_workers)
        ]
        joined = [[row for part in parts for row in part] for parts in zip(*shares, strict=True)]
        assert joined == ids_of(iter(whole))


def test_without_weights_an_epoch_is_one_pass_over_every_data_set() -> None:
    sampler, last = sampler_of(*SIZES), []
    for epoch in range(3):
        batches = list(sampler.epoch_batches(WHOLE, epoch=epoch))
        rows = np.concatenate([batch.sample_id for batch in batches])
        assert len(np.unique(rows)) == len(rows) == sum(PASSES) * BATCH_SIZE
        assert Counter(batch.data_set for batch in batches) == dict(enumerate(PASSES))
        assert {batch.epoch for batch in batches} == {epoch}
        last.append([batch.data_set for batch in batches])
    assert last[0] != last[1] != last[2]
    assert last[0] != sorted(last[0])


def test_one_data_set_of_several_has_the_order_of_its_own_sampler() -> None:
    sampler = sampler_of(*SIZES)
    for number, own in enumerate(sampler.samplers):
        mixed = [each for each in sampler.epoch_batches(WHOLE, epoch=5) if each.data_set == number]
        assert ids_of(iter(mixed)) == ids_of(own.epoch_batches(WHOLE, epoch=5))


@pytest.mark.parametrize("weights", [(1, 1, 1), (8, 1, 1), (0.1, 0.2, 0.3)])
def test_weights_divide_an_epoch_and_each_data_set_is_used_up_before_it_starts_over(
    weights: tuple[float, ...],
) -> None:
    sampler, num_epochs = sampler_of(*SIZES, weights=weights), 6
    batches = [each for epoch in range(num_epochs) for each in sampler.epoch_batches(WHOLE, epoch=epoch)]
    counts = Counter(batch.data_set for batch in batches)
    for number, passes in enumerate(PASSES):
        exact = sum(PASSES) * weights[number] / sum(weights)
        assert abs(counts[number] / num_epochs - exact) < 1
        own = [batch for batch in batches if batch.data_set == number]
        for start in range(0, len(own), passes):
            window = own[start : start + passes]
            rows = np.concatenate([batch.sample_id for batch in window])
            assert len(np.unique(rows)) == len(window) * BATCH_SIZE
            assert {batch.epoch for batch in window} == {start // passes}


@pytest.mark.parametrize("weights", [None, (8, 1, 1)])
def test_a_resumed_epoch_has_the_remaining_batches(weights: tuple[float, ...] | None) -> None:
    sampler = sampler_of(*SIZES, weights=weights)
    whole = list(sampler.epoch_batches(WHOLE, epoch=2))
    for start in (0, 1, 7, len(whole)):
        rest = list(sampler.epoch_batches(WHOLE, epoch=2, start=start))
        assert ids_of(iter(rest)) == ids_of(iter(whole[start:]))
        assert [(each.data_set, each.epoch) for each in rest] == [
            (each.data_set, each.epoch) for each in whole[start:]
        ]


def test_equal_ids_in_two_data_sets_never_meet_in_a_batch() -> None:
    sampler = sampler_of(20, 20, equal_ids=True)
    for batch in sampler.epoch_batches(WHOLE, epoch=0):
        assert len(set(batch.sample_id)) == BATCH_SIZE


@pytest.mark.parametrize(
    ("passes", "weights", "counts"),
    [
        ([12, 5, 2], None, [12, 5, 2]),
        ([12, 5, 2], [12, 5, 2], [12, 5, 2]),
        ([12, 5, 2], [1, 1, 1], [7, 6, 6]),
        ([12, 5, 2], [0.1, 0.1, 0.8], [2, 2, 15]),
        ([3, 3], [1000, 1], [6, 0]),
    ],
)
def test_batch_counts_are_shares_of_the_weights_with_the_sum_of_the_passes(
    passes: list[int], weights: list[float] | None, counts: list[int]
) -> None:
    assert batch_counts(passes, weights) == counts
    assert sum(counts) == sum(passes)


def test_data_sets_are_drawn_as_by_the_proportional_sampler_of_sentence_transformers() -> None:
    samplers = pytest.importorskip("sentence_transformers.base.sampler")
    utils = pytest.importorskip("torch.utils.data")
    peers = [
        utils.BatchSampler(utils.RandomSampler(range(size)), BATCH_SIZE, drop_last=True) for size in SIZES
    ]
    joined = utils.ConcatDataset([range(size) for size in SIZES])
    peer = samplers.ProportionalBatchSampler(joined, peers)
    own = sampler_of(*SIZES)
    ends = np.cumsum(SIZES)
    theirs = [{int(np.searchsorted(ends, row, side="right")) for row in batch} for batch in peer]
    assert all(len(each) == 1 for each in theirs)
    assert Counter(number for each in theirs for number in each) == Counter(data_sets_of(own, 0))
    assert len(peer) == len(data_sets_of(own, 0))
    # Neither draws the data sets in turn.
    assert len({tuple(islice(data_sets_of(own, epoch), 6)) for epoch in range(8)}) > 4


def test_equal_weights_draw_as_many_batches_of_each_as_the_round_robin_of_sentence_transformers() -> None:
    samplers = pytest.importorskip("sentence_transformers.base.sampler")
    utils = pytest.importorskip("torch.utils.data")
    peers = [
        utils.BatchSampler(utils.RandomSampler(range(size)), BATCH_SIZE, drop_last=True) for size in SIZES
    ]
    peer = samplers.RoundRobinBatchSampler(utils.ConcatDataset([range(size) for size in SIZES]), peers)
    ends = np.cumsum(SIZES)
    theirs = Counter(int(np.searchsorted(ends, batch[0], side="right")) for batch in peer)
    ours = Counter(data_sets_of(sampler_of(*SIZES, weights=(1, 1, 1)), 0))
    assert set(theirs.values()) == {min(PASSES)}
    assert max(ours.values()) - min(ours.values()) <= 1  # but over a whole epoch
    assert ours.total() == sum(PASSES)
