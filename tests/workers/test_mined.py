"""The table of mined negatives on several workers."""

from typing import Any

import numpy as np
import torch

from raycl.training.corpus import build_corpus
from raycl.training.mined import MinedNegatives
from raycl.training.mining import MinerClient
from tests.test_mined import CONFIG, any_table, held_rows
from tests.workers.processes import run_workers


def take_table(rank: int, num_workers: int) -> list[Any]:
    """Return this worker's negatives before and after rank 0 has a table, and when it has no newer one."""
    torch.set_num_threads(1)
    rows = held_rows()
    corpus = build_corpus(rows, explicit=True).corpus
    mined = MinedNegatives(corpus, CONFIG.negatives.mined, seed=0)
    client = MinerClient(None, mined, refresh=5, device=torch.device("cpu"))
    batch = rows.take(np.arange(rank, 40, num_workers), epoch=2)
    found = []
    for table in (None, any_table(corpus), None):
        client._newest = table if rank == 0 else None
        client._share()
        found.append([each.reshape(len(batch), -1) for each in mined.draw(batch)])
        mined.use(mined.table)  # the next draw is of another batch
    return found


def test_all_workers_take_the_table_of_rank_0_and_draw_as_one_worker_does() -> None:
    alone, both = take_table(0, 1), run_workers(take_table, 2)
    for number, expected in enumerate(alone):
        for whole, *parts in zip(expected, *(each[number] for each in both), strict=True):
            np.testing.assert_array_equal(np.stack(parts, axis=1).reshape(whole.shape), whole)
    before, taken, kept = (step for _, step in alone)
    assert (before == -1).all()
    assert (taken >= 100).all()
    np.testing.assert_array_equal(taken, kept)
