"""The table of mined negatives on several workers."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from raycl.training.corpus import build_corpus
from raycl.training.mined import MinedNegatives
from raycl.training.miner import CorpusUpdate, MinerUpdate
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
    return found


def take_corpus(rank: int, num_workers: int) -> list[Any]:
    """Return this worker's negatives of a stream before and after rank 0 has a corpus, and when only a newer table came."""
    torch.set_num_threads(1)
    rows = held_rows()
    corpus = build_corpus(rows, explicit=False).corpus
    mined = MinedNegatives(None, CONFIG.negatives.mined, seed=0, load_rows=lambda _: corpus)
    client = MinerClient(None, mined, refresh=5, device=torch.device("cpu"))
    table, batch = any_table(corpus), rows.take(np.arange(rank, 40, num_workers), epoch=2)
    corpus_update = CorpusUpdate(b"rows", corpus.to_bytes())
    found = []
    for update in (
        None,
        MinerUpdate("miner", table, corpus_update, 60),
        MinerUpdate("miner", replace(table, query_step=300)),
    ):
        if rank == 0 and update is not None:
            client._note(update)
        client._share()
        drawn = mined.draw(batch)
        names = (
            []
            if mined.corpus is None
            else mined.corpus.document.text_id[drawn.document].reshape(len(batch), -1)
        )
        found.append([*(each.reshape(len(batch), -1) for each in drawn), names])
    assert mined.table is not None
    assert mined.table.query_step == 300
    assert mined.rows == (b"rows" if rank == 0 else None)
    return found


def take_both(rank: int, num_workers: int) -> list[Any]:
    return [take_table(rank, num_workers), take_corpus(rank, num_workers)]


def test_all_workers_take_the_table_of_rank_0_and_draw_as_one_worker_does() -> None:
    alone, both = take_both(0, 1), run_workers(take_both, 2)
    for kind, held in enumerate(alone):
        for number, expected in enumerate(held):
            for whole, *parts in zip(expected, *(each[kind][number] for each in both), strict=True):
                np.testing.assert_array_equal(np.stack(parts, axis=1).reshape(np.shape(whole)), whole)
    before, taken, kept = (step for _, step in alone[0])
    assert (before == -1).all()
    assert (taken >= 100).all()
    np.testing.assert_array_equal(taken, kept)
    before, taken, kept = (names for *_, names in alone[1])
    assert not len(before)
    assert taken.shape == (40, CONFIG.negatives.mined.num)
    np.testing.assert_array_equal(taken, kept)
