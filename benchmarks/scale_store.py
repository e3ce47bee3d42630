"""The store of one worker among many: its shards are real, and what other workers send is made up.

    python benchmarks/scale_store.py [--json store.json] [--workers 1 16 ...] [--shards 16] [--rows 1000000]
        [--local-batch 32] [--num-negatives 4096] [--dim 128] [--steps 9]

The slots of all workers are true, as after a gather. Other workers' rows are copies of this worker's in new memory,
so a message costs what receiving it from memory costs, without a network. Here the shards are in this process, and
their CPU time is reported apart: neither Ray nor serialization is in it. ``scale.py`` measures the same store with Ray's actors.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from measuring import Line, make_parser, report, table
from scale_clients import Work
from torch import Tensor

from raycl.losses.example_ids import ExampleIds
from raycl.negatives import rpc
from raycl.negatives.actor import MemoryBankActor
from raycl.negatives.bank import Bank
from raycl.negatives.client import MemoryBankClient
from raycl.negatives.snapshot import write_samples
from raycl.negatives.spec import BankSpec
from raycl.training import group_bank, stores
from raycl.training.group_bank import GroupBank
from raycl.training.stores import BankStore
from raycl.training.views import Views

CPU = torch.device("cpu")
WARMUP = 3  # steps
STORES = {
    "workers": "workers",
    "worker": "a worker that",
    "thread_cpu": "CPU of its store, ms",
    "shard_cpu": "CPU of its shards, ms",
}


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


def measure_store(bank: Bank, work: Work, rank: int, *, num_steps: int) -> Line:
    """Make the store's part of some steps."""
    rows = torch.nn.functional.normalize(torch.randn(work.local_batch, work.dim), dim=1)
    spent: list[dict[str, float]] = []
    with one_worker(work, rank, num_steps + 2):
        store, client = _store(bank, work, rank)
        own = [_own(work, rank, step) for step in range(num_steps + 2)]
        for step in range(num_steps):
            next_ids = tuple(own[step + 1 : step + 3])
            sample_id = torch.from_numpy(own[step])
            views = Views(
                view_a=rows,
                view_b=None,
                sample_id=sample_id,
                ids=own[step],
                example_ids=ExampleIds(query=sample_id, key=sample_id),
                next_ids=next_ids,
            )
            before = _clocks(client)
            store.fetch(views, step=step)
            store.start_download(rows, views)
            store.update(step=step)
            after = _clocks(client)
            spent.append({name: after[name] - before[name] for name in after})
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


class ShardHere:
    """A shard in this process, as an actor's handle; it counts its CPU seconds."""

    cpu_s = 0.0  # of all shards

    def __init__(self, spec: BankSpec, number: int) -> None:
        self._actor = MemoryBankActor(spec, number)

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Any:
            since = time.thread_time()
            try:
                return getattr(self._actor, method)(*arguments)
            finally:
                ShardHere.cpu_s += time.thread_time() - since

        return SimpleNamespace(remote=remote)


def measure_here(work: Work, rank: int, *, num_shards: int, num_steps: int) -> Line:
    """Measure the store of a worker whose shards are in this process."""
    with tempfile.TemporaryDirectory() as output:
        spec = BankSpec(
            name="here",
            kind="memory_bank",
            dim=work.dim,
            output=output,
            capacity=work.num_rows,
            dtype="float16",
            num_shards=num_shards,
        )
        write_samples(spec, np.arange(work.num_rows))
        with patch.object(rpc, "ray", SimpleNamespace(get=lambda answer, timeout: answer)):
            bank, ShardHere.cpu_s = Bank(spec, [ShardHere(spec, shard) for shard in range(num_shards)]), 0.0
            line = measure_store(bank, work, rank, num_steps=num_steps)
    shard_ms = 1e3 * ShardHere.cpu_s / num_steps
    return line | {"shard_cpu": shard_ms, "thread_cpu": line["thread_cpu"] - shard_ms}


def main() -> None:
    sizes: dict[str, Any] = {"rows": 1_000_000, "local_batch": 32, "num_negatives": 4_096, "dim": 128}
    workers = [1, 16, 64, 256, 1_024]
    options = make_parser(__doc__, workers=workers, shards=16, steps=9, **sizes).parse_args()
    torch.set_num_threads(1)
    lines = []
    for num_workers in options.workers:
        work = Work(
            kind="memory_bank",
            num_workers=num_workers,
            num_rows=options.rows,
            local_batch=options.local_batch,
            num_negatives=options.num_negatives,
            dim=options.dim,
        )
        last = num_workers - 1  # a worker that calls no shard, if there is one
        for rank in [0, last] if last >= options.shards else [0]:
            counts = {"num_shards": options.shards, "num_steps": options.steps}
            lines.append(measure_here(work, rank, **counts))
    report(options, lines, table(lines, **STORES))


if __name__ == "__main__":
    main()
