"""The store of one worker among many, for ``scale.py``: its calls are real, and what other workers send is made up.

The slots of all workers are true, as after a gather. Other workers' rows are copies of this worker's in new memory,
so that a message costs what it costs to receive it from memory, without a network.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from measuring import Line
from scale_clients import Work
from torch import Tensor

from raycl.negatives.bank import Bank
from raycl.negatives.client import MemoryBankClient
from raycl.training import group_bank, stores
from raycl.training.group_bank import GroupBank
from raycl.training.stores import BankStore
from raycl.training.views import Views

CPU = torch.device("cpu")
WARMUP = 3  # steps


class MadeUpRows:
    """The rows of other workers: zeros."""

    def __init__(self, rows: Tensor, *, sent: list[int], received: list[int]) -> None:
        self._rows, self._size = rows, sum(received)

    def arrived(self) -> Tensor:
        return self._rows.new_zeros(self._size, self._rows.shape[1])


@contextmanager
def one_worker(work: Work, rank: int, num_steps: int) -> Iterator[None]:
    """Act as the worker of this rank."""
    batches = {_own(work, rank, step).tobytes(): work.ids(step) for step in range(num_steps)}

    def gather(rows: Tensor) -> Tensor:
        if rows.dtype == torch.int64:
            return torch.from_numpy(batches[rows.numpy().tobytes()].copy())
        return rows.repeat(work.num_workers, 1)

    replaced = {"rank": lambda: rank, "num_workers": lambda: work.num_workers, "RowExchange": MadeUpRows}
    with ExitStack() as stack:
        for module in (group_bank, stores):
            stack.enter_context(patch.object(module, "gather_detached", gather))
        for name, value in replaced.items():
            stack.enter_context(patch.object(group_bank, name, value))
        yield


def measure_store(bank: Bank, work: Work, rank: int, *, num_steps: int, pause_s: float) -> Line:
    """Make the store's part of some steps, with a pause where a worker computes."""
    rows = torch.nn.functional.normalize(torch.randn(work.local_batch, work.dim), dim=1)
    spent: list[dict[str, float]] = []
    with one_worker(work, rank, num_steps + 2):
        store, client = _store(bank, work, rank)
        own = [_own(work, rank, step) for step in range(num_steps + 2)]
        for step in range(num_steps):
            next_ids = tuple(own[step + 1 : step + 3])
            ids = own[step]
            views = Views(
                view_a=rows, view_b=None, sample_id=torch.from_numpy(ids), ids=ids, next_ids=next_ids
            )
            before = _clocks(client)
            store.fetch(views, step=step)
            paused = _clocks(client)
            time.sleep(pause_s)
            resumed = _clocks(client)
            store.start_download(rows, views)
            store.update(step=step)
            after = _clocks(client)
            spent.append({name: after[name] - resumed[name] + paused[name] - before[name] for name in after})
        client.flush()
    middle = {name: 1e3 * statistics.median(each[name] for each in spent[WARMUP:]) for name in spent[0]}
    calls = bank.spec.num_shards > rank
    return {"workers": work.num_workers, "worker": "calls a shard" if calls else "calls none", **middle}


def _own(work: Work, rank: int, step: int) -> np.ndarray:
    return work.ids(step, slice(rank, rank + 1))


def _store(bank: Bank, work: Work, rank: int) -> tuple[BankStore, MemoryBankClient]:
    client = MemoryBankClient(bank, np.arange(work.num_rows), rank=rank, num_workers=work.num_workers)
    settings: dict[str, Any] = {"num_negatives": work.num_negatives, "device": CPU}
    return BankStore(GroupBank(client, prefetches=True, **settings), **settings), client


def _clocks(client: MemoryBankClient) -> dict[str, float]:
    return {
        "thread_cpu": time.thread_time(),
        "process_cpu": time.process_time(),
        "wall": time.perf_counter(),
        "waited": client.waited_s,
    }
