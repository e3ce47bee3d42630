"""A group of workers that calls the shards of a memory bank for all, against a memory bank in process."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from raycl.distributed import RowExchange, gather_detached, num_workers, use_shared_memory
from raycl.losses.example_ids import ExampleIds
from raycl.losses.objective import StoreBatch
from raycl.negatives import MemoryBank
from raycl.negatives.client import MemoryBankClient
from raycl.negatives.spec import BankSpec
from raycl.training import group_bank, stores
from raycl.training.group_bank import GroupBank
from raycl.training.stores import BankStore
from raycl.training.views import Views
from tests.shards import bank_in_process
from tests.workers.processes import run_workers

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from scale_model import group_bytes  # pyright: ignore[reportMissingImports]

DIM, LOCAL, NUM_SAMPLES, NUM_DRAWN, NUM_STEPS = 3, 4, 40, 8, 6
CPU = torch.device("cpu")
Rows = tuple[np.ndarray, ...]


@contextmanager
def counted_bytes() -> Iterator[Callable[[], int]]:
    """Yield the number of bytes received from workers of the group so far."""
    received: list[int] = []

    def gather(rows: torch.Tensor) -> torch.Tensor:
        received.append(rows.nbytes * (num_workers() - 1))
        return gather_detached(rows)

    def exchange(rows: torch.Tensor, **sizes: list[int]) -> RowExchange:
        received.append(sum(sizes["received"]) * rows.shape[1])
        return RowExchange(rows, **sizes)

    with ExitStack() as stack:
        for module in (group_bank, stores):
            stack.enter_context(patch.object(module, "gather_detached", gather))
        stack.enter_context(patch.object(group_bank, "RowExchange", exchange))
        yield lambda: sum(received)


def some_views(rank: int, num_workers: int) -> list[Views]:
    """Return the batches of one worker; each has the ids of the next two."""
    rng = np.random.default_rng(0)
    batches = [rng.choice(NUM_SAMPLES, (num_workers, LOCAL), replace=False)[rank] for _ in range(NUM_STEPS)]
    return [
        Views(
            view_a=torch.empty(0),
            view_b=None,
            sample_id=torch.from_numpy(ids),
            ids=ids,
            example_ids=ExampleIds(query=torch.from_numpy(ids), key=torch.from_numpy(ids)),
            next_ids=tuple(batches[step + 1 : step + 3]),
        )
        for step, ids in enumerate(batches)
    ]


def fetched(batch: StoreBatch) -> Rows:
    if batch.partition is not None:
        return (batch.partition.stored.numpy(),)
    found = batch.key, batch.negatives, batch.negative_id
    return tuple(each.numpy().copy() for each in found if each is not None)


def steps_of(rank: int, size: int, output: str, case: dict[str, Any]) -> dict[str, Any]:
    """Make the steps of a worker with both stores; return their rows, and the calls of this worker's shards."""
    spec = BankSpec(**{"name": "bank", "dim": DIM, "output": output, "capacity": NUM_SAMPLES, **case["spec"]})
    num_drawn = 0 if spec.kind == "partition" else NUM_DRAWN
    with bank_in_process(spec) as bank, counted_bytes() as received, use_shared_memory():
        client = MemoryBankClient(bank, np.arange(NUM_SAMPLES), rank=rank, num_workers=size)
        settings: dict[str, Any] = {"device": CPU, "num_negatives": num_drawn}
        group = GroupBank(client, prefetches=case["prefetches"], **settings)
        local = MemoryBank(np.arange(NUM_SAMPLES), DIM, seed=spec.seed, kind=spec.kind)
        settings["holds_partitions"] = spec.kind == "partition"
        store, reference = BankStore(group, **settings), BankStore(local, **settings)
        for shard in bank.actors:
            shard.calls.clear()
        batches, found, expected = some_views(rank, size), list[Rows](), list[Rows]()
        early: Rows = ()
        num_bytes = 0
        for step, views in enumerate(batches):
            before = received()
            found.append(fetched(store.fetch(views, step=step)))
            num_bytes += received() - before
            fresh = fetched(reference.fetch(views, step=step))
            expected.append(early if case["prefetches"] and step not in (0, case.get("saved")) else fresh)
            if step + 1 < NUM_STEPS:  # without the update of this step
                early = fetched(reference.fetch(batches[step + 1], step=step + 1))
            written = torch.randn(LOCAL, DIM, generator=torch.Generator().manual_seed(10 * step + rank))
            reference.start_download(written, views)
            reference.update(step=step)
            before = received()
            store.start_download(written, views)
            store.update(step=step)
            num_bytes += received() - before
            if step + 1 == case.get("saved"):  # as for a snapshot
                group.drop()
                client.flush()
        client.flush()
        own = [shard.actor.store.negatives().arrays() for shard in bank.actors[rank::size]]
        return {
            "found": found,
            "expected": expected,
            "own": own,
            "num_bytes": num_bytes,
            "updated": local.negatives().arrays(),
            "calls": [shard.calls.count("push_pull") for shard in bank.actors],
            "metrics": store.metrics(step=NUM_STEPS - 1, seconds=1.0),
        }


# Calls to a shard: one a step, and a last one for the last update. With prefetching, the update of the last but one step
# is sent without a question. A snapshot flushes, and two steps are asked for again.
SLOTS, PARTITIONS = {"kind": "memory_bank", "num_shards": 3}, {"kind": "partition", "num_shards": 2}
CASES: dict[str, dict[str, Any]] = {
    "one shard": {"spec": {"kind": "memory_bank"}, "prefetches": False, "calls": NUM_STEPS + 1},
    "three shards": {"spec": SLOTS, "prefetches": False, "calls": NUM_STEPS + 1},
    "prefetched": {"spec": SLOTS, "prefetches": True, "calls": NUM_STEPS + 2},
    "prefetched, saved": {"spec": SLOTS, "prefetches": True, "calls": NUM_STEPS + 5, "saved": 3},
    "partitions": {"spec": PARTITIONS, "prefetches": False, "calls": NUM_STEPS + 1},
    "prefetched partitions": {"spec": PARTITIONS, "prefetches": True, "calls": NUM_STEPS + 2},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_a_group_reads_the_rows_of_a_local_bank_with_one_call_a_shard_and_step(
    tmp_path: Path, num_workers: int, case: dict[str, Any]
) -> None:
    spec = BankSpec(name="bank", dim=DIM, output=str(tmp_path), capacity=NUM_SAMPLES, **case["spec"])
    found = (
        [steps_of(0, 1, str(tmp_path), case)]
        if num_workers == 1
        else run_workers(steps_of, num_workers, str(tmp_path), case)
    )
    for worker in found:
        for step, (rows, expected) in enumerate(zip(worker["found"], worker["expected"], strict=True)):
            assert all(map(np.array_equal, rows, expected)), step
    calls = np.sum([worker["calls"] for worker in found], axis=0)
    assert calls.tolist() == [case["calls"]] * spec.num_shards
    for shard in range(spec.num_shards):
        held = found[shard % num_workers]["own"][shard // num_workers]
        own = slice(*spec.first_slots[shard : shard + 2])
        for ours, theirs in zip(held, found[0]["updated"], strict=True):
            assert np.array_equal(ours, theirs[own])
    num_drawn = 0 if spec.kind == "partition" else NUM_DRAWN
    num_bytes = group_bytes(num_workers, num_workers * LOCAL, num_drawn, spec.dim, itemsize=4)
    if "saved" not in case:  # it drops rows on their way
        assert sum(worker["num_bytes"] for worker in found) == NUM_STEPS * num_workers * num_bytes
    assert [worker["metrics"]["bank_restarts"] for worker in found] == [0.0] * num_workers
