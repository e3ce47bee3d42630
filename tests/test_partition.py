"""The slots of partition functions against a dictionary of plain numbers."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycl.negatives import MemoryBank

SETTINGS = settings(deadline=None, max_examples=100)
IDS = np.array([-3, 5, 6, 7, 20])
batch_lists = st.lists(st.lists(st.integers(0, 4), max_size=9), max_size=5)
seeds = st.integers(0, 2**32 - 1)


def some_slots(**changed: Any) -> MemoryBank:
    return MemoryBank(IDS, **({"dim": 2, "seed": 0, "momentum": 0.3, "kind": "partition"} | changed))


@SETTINGS
@given(batch_lists, st.floats(0, 0.95), seeds)
def test_slots_equal_moving_averages_of_plain_numbers(
    batches: list[list[int]], momentum: float, seed: int
) -> None:
    slots, plain, random = some_slots(momentum=momentum), {}, np.random.default_rng(seed)
    for step, choice in enumerate(batches):
        ids, partitions = IDS[choice], random.lognormal(0, 3, (len(choice), 2))
        slots.update(ids, np.log(partitions), step)
        for sample in set(ids.tolist()):
            mean = partitions[ids == sample].mean(0)  # repeated samples count once, as their mean
            earlier = plain.get(sample, mean)  # the first estimate is the batch's own
            plain[sample] = momentum * earlier + (1 - momentum) * mean
    stored = slots.negatives()
    for row, sample, step in zip(stored.rows, stored.sample_id.tolist(), stored.step, strict=True):
        assert (step >= 0) == (sample in plain)
        np.testing.assert_allclose(row, np.log(plain.get(sample, np.zeros(2))), rtol=0, atol=1e-5)


@pytest.fixture(autouse=True)
def no_warning_of_the_logarithm_of_zero() -> Any:
    with np.errstate(divide="ignore"):
        yield


@SETTINGS
@given(batch_lists, seeds, st.data())
def test_slots_do_not_depend_on_the_split_and_order_of_batches(
    batches: list[list[int]], seed: int, data: st.DataObject
) -> None:
    whole, split, random = some_slots(), some_slots(), np.random.default_rng(seed)
    for step, choice in enumerate(batches):
        ids, logs = IDS[choice], random.normal(0, 5, (len(choice), 2)).astype(np.float32)
        whole.update(ids, logs, step)
        order = np.array(data.draw(st.permutations(range(len(ids)))), np.int64)
        for part in np.split(order, sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=3)))):
            split.update(ids[part], logs[part], step)
    for ours, expected in zip(split.negatives().arrays(), whole.negatives().arrays(), strict=True):
        assert np.array_equal(ours, expected)


def test_partition_functions_beyond_the_range_of_float64_are_averaged() -> None:
    slots = some_slots(momentum=0.5)
    for step, log in enumerate((2_000.0, 2_001.0, -2_000.0)):
        slots.update(IDS[:1], np.full((1, 2), log), step)
    expected = 2_001 + math.log((1 + math.exp(-1)) / 4)
    np.testing.assert_allclose(slots.get(IDS[:1]).rows, expected, rtol=1e-6)


def test_a_restored_slot_without_an_estimate_takes_the_first_one() -> None:
    saved, restored = some_slots(), some_slots()
    saved.update(IDS[:1], np.array([[1.0, 2.0]]), 0)
    restored.update(IDS, np.ones((5, 2)), 0)
    restored.load_part(saved.negatives())
    for slots in (saved, restored):
        slots.update(IDS[:2], np.array([[3.0, 4.0], [5.0, 6.0]]), 1)
    assert np.array_equal(restored.negatives().rows, saved.negatives().rows)
    assert saved.get(IDS[1:2]).rows.tolist() == [[5.0, 6.0]]
