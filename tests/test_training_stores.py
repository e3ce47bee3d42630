"""Stores during a training step: the copy on a device equals the queue."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raycl.losses.example_ids import ExampleIds
from raycl.negatives import KeyQueue, MemoryBank
from raycl.training.stores import BankStore, QueueStore, _DeviceCopy
from raycl.training.views import Views

CAPACITY, DIM = 7, 3


@given(st.lists(st.integers(0, 17), max_size=6), st.sampled_from(["float32", "float16"]))
def test_a_copy_on_a_device_equals_the_queue_for_any_batches(sizes: list[int], dtype: str) -> None:
    queue = KeyQueue(CAPACITY, DIM, dtype)
    copy, rng = _DeviceCopy(queue, CAPACITY, torch.device("cpu")), np.random.default_rng(0)
    for step, size in enumerate(sizes):
        rows = rng.standard_normal((size, DIM), np.float32)
        ids = np.arange(size) + 100 * step
        copy.write(torch.from_numpy(rows), torch.from_numpy(ids), first=queue.sequence)
        queue.push(rows, ids, step)
        held, fetched = queue.negatives(), copy.fetch(len(queue))
        assert fetched.negatives is not None
        assert fetched.negative_id is not None
        assert np.array_equal(fetched.negatives.numpy(), held.rows)
        assert np.array_equal(fetched.negative_id.numpy(), held.sample_id)
    filled = _DeviceCopy(queue, CAPACITY, torch.device("cpu")).fetch(len(queue)).negatives
    assert filled is not None
    assert np.array_equal(filled.numpy(), queue.negatives().rows)


def test_the_ages_in_a_queue_are_measured_at_the_next_step() -> None:
    queue = KeyQueue(CAPACITY, DIM)
    store = QueueStore(queue, capacity=CAPACITY, device=torch.device("cpu"))
    for step in (0, 3):
        queue.push(np.ones((2, DIM), np.float32), np.arange(2), step)
    ages = {"negatives_age_mean": 2.5, "negatives_age_max": 4.0}
    assert store.metrics(step=3, seconds=1.0) == ages | {"negatives_wait_fraction": 0.0}


def test_the_ages_in_a_bank_cover_only_read_rows_that_were_written() -> None:
    bank = MemoryBank(np.arange(6), DIM, seed=0)
    store = BankStore(bank, num_negatives=6, device=torch.device("cpu"))
    for step, sample in ((1, 4), (2, 5)):
        bank.update(np.array([sample]), np.ones((1, DIM), np.float32), step)
    ids = np.array([4])
    sample_id = torch.from_numpy(ids)
    example_ids = ExampleIds(query=sample_id, key=sample_id)
    views = Views(view_a=torch.zeros(1), view_b=None, sample_id=sample_id, ids=ids, example_ids=example_ids)
    store.fetch(views, step=5)
    # Sample 4 is read twice: as the batch's own slot and among the six drawn slots.
    ages = {"negatives_age_mean": pytest.approx(11 / 3), "negatives_age_max": 4.0}
    assert store.metrics(step=5, seconds=1.0) == ages | {"negatives_wait_fraction": 0.0}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_on_a_gpu_equals_the_queue() -> None:
    queue = KeyQueue(CAPACITY, DIM)
    copy = _DeviceCopy(queue, CAPACITY, torch.device("cuda"))
    for step in range(5):
        rows, ids = torch.randn(4, DIM), torch.arange(4) + step
        copy.write(rows.cuda(), ids.cuda(), first=queue.sequence)
        queue.push(rows.numpy(), ids.numpy(), step)
    fetched = copy.fetch(len(queue)).negatives
    assert fetched is not None
    assert np.array_equal(fetched.cpu().numpy(), queue.negatives().rows)
