"""The bank's and the queue's protocol with many workers, on one machine: time, bytes, memory, losses.

    python benchmarks/scale.py [--json scale.json] [--quick]
        [--workers 1 2 4 ...] [--shards 1 4 16] [--rows 100000 ...] [--queue 65536] [--local-batch 64]
        [--num-negatives 4096] [--dim 128] [--processes 8] [--blocks 3] [--steps 8] [--lose-steps 8] [--kills 20]

Shards are Ray's actors as in training. Workers are real clients, a thread each, in ``--processes``
actors; they do nothing between the bank's calls, so a step is the protocol's alone, and they keep
abreast as a gather would. Every process makes the rows of all workers itself: messages between workers are not sent.
``scale_store.py`` measures the rest of a worker's store. All share this machine's cores and talk through its loopback:
a step's wall time is the sum of everybody's work, and only CPU time a call and bytes carry over to a cluster.
``--steps`` are a block's; ``--lose-steps`` those before the snapshot, twice as many after.

Each row follows from its sample and step, and read rows are checked: all ids, a sample of rows.
The largest bank is filled, saved, and loses a shard half-way; then every row is checked. Then it loses ``--kills``
shards in turn and is written and saved after each, while a thread asks for rows, neighbors and statistics.
"""

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import ray
from measuring import Line, make_parser, private_mb, report, summarize
from scale_clients import ClientGroup, Work, add_up, join, process_seconds, run, thread_seconds
from scale_drill import kill_while_asked, lose_a_shard, num_wrong_keys
from scale_model import bank_payload, queue_payload
from scale_report import text

from raycl.negatives.actor import BankActor
from raycl.negatives.bank import Bank
from raycl.negatives.spec import BankSpec
from raycl.negatives.start import start_bank
from raycl.progress import ProgressLine
from raycl.ray_runtime import init_ray

ITEMSIZE = 2  # float16, as rows travel by default
AT_REST_S = 2.0
MAX_QUEUES = 64
SIDES = {"memory_bank": "bank", "queue": "queue"}


@contextmanager
def started(kind: str, shards: int, rows: int, dim: int) -> Iterator[Bank]:
    """Hold a bank for a while; slots keep nothing of themselves, so that rows are known."""
    with tempfile.TemporaryDirectory() as folder:
        spec = BankSpec(
            name=f"scale {kind} {shards} {rows}",
            kind=kind,  # pyright: ignore[reportArgumentType]
            dim=dim,
            output=folder,
            capacity=rows,
            dtype="float16",
            momentum=0.0,
            num_shards=shards,
            timeout_s=600.0,
        )
        bank = start_bank(spec, np.arange(rows) if kind == "memory_bank" else None)
        try:
            yield bank
        finally:
            bank.stop()
            gc.collect()


class CpuClock:
    """CPU seconds of some processes beyond what they take at rest."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        before, since = self._now(), time.perf_counter()
        time.sleep(AT_REST_S)
        self._rate_at_rest = (self._now() - before) / (time.perf_counter() - since)
        self._began, self._since = self._now(), time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds since this was made."""
        return self._now() - self._began - self._rate_at_rest * (time.perf_counter() - self._since)

    def _now(self) -> float:
        return sum(map(process_seconds, self._pids))


def busiest_s(before: list[dict[str, float]], after: list[dict[str, float]]) -> float:
    """Return the CPU seconds of each shard's busiest thread, summed over shards."""
    pairs = zip(before, after, strict=True)
    return sum(max(then[name] - now.get(name, 0.0) for name in then) for now, then in pairs)


def measure(groups: list[Any], bank: Bank, work: Work, options: argparse.Namespace) -> Line:
    """Measure one number of workers with one bank; a queue must be new or restored."""
    active, join_s = join(groups, bank, work)
    pids = [connection.ask(BankActor.info).pid for connection in bank.connections()]
    num_steps, workers = options.steps, work.num_workers
    run(active, 0, 2)
    shard_clock, client_clock = CpuClock(pids), CpuClock(ray.get([group.pid.remote() for group in active]))
    threads = [thread_seconds(pid) for pid in pids]
    blocks = [run(active, 2 + number * num_steps, num_steps) for number in range(options.blocks)]
    shard_s, client_s = shard_clock.seconds(), client_clock.seconds()
    thread_s = busiest_s(threads, [thread_seconds(pid) for pid in pids])
    # Counted apart: to keep the answers for their sizes takes time and memory.
    last = 2 + options.blocks * num_steps
    _, counted = run(active, last, 2, keeps_answers=True)
    ray.get([group.flush.remote() for group in active])
    total, made = add_up(spent for _, spent in blocks), options.blocks * num_steps
    calls, shards = total.num_calls, bank.spec.num_shards
    num_rows = 2 * work.batch_size + work.num_negatives if work.kind == "memory_bank" else work.batch_size
    return {
        "side": SIDES[work.kind],
        "workers": workers,
        "shards": shards,
        "rows": work.num_rows,
        "step_ms": summarize([1e3 * wall / num_steps for wall, _ in blocks]),
        "cpu_ms": 1e3 * (shard_s + client_s) / made,
        "calls_a_shard": calls / made / shards,
        "rows_a_call": num_rows * made / calls,
        "shard_us": 1e6 * shard_s / calls,
        "thread_us": 1e6 * thread_s / calls,
        "client_us": 1e6 * client_s / calls,
        "waited_ms": 1e3 * total.waited_s / made / min(workers, shards),
        "join_s": join_s,
        "sent": counted.sent / 2,
        "received": counted.received / 2,
        **payload(work),
        "tcp_sent": total.tcp_sent / made,
        "tcp_received": total.tcp_received / made,
        "shard_mb": summarize(list(map(private_mb, pids))),
        "plan_mb": bank.spec.bytes_of(0) / 1e6,
        "wrong": total.num_wrong + counted.num_wrong + num_wrong_keys(bank, work, last + 2),
    }


def payload(work: Work) -> dict[str, int]:
    """Return the bytes of a step's calls by the formulas."""
    if work.kind == "queue":
        model = queue_payload(work.batch_size, work.dim, itemsize=ITEMSIZE)
    else:
        model = bank_payload(work.batch_size, work.num_negatives, work.dim, itemsize=ITEMSIZE)
    return {f"model_{name}": value for name, value in model._asdict().items()}


def write_and_save(groups: list[Any], bank: Bank, work: Work, num_steps: int, number: int) -> None:
    """Make the next steps after those of ``lose_a_shard``, and save the bank."""
    active, first = groups[: work.num_workers], (3 + number) * num_steps
    run(active, first, num_steps)
    ray.get([group.flush.remote() for group in active])
    bank.save(first + num_steps)


def plan_cells(options: argparse.Namespace) -> list[tuple[str, int, int, list[int]]]:
    """Return the cells: kind, shards, rows, and numbers of workers."""
    middle, most = options.rows[len(options.rows) // 2], max(options.workers)
    banks = [("memory_bank", shards, middle, options.workers) for shards in options.shards]
    banks += [
        ("memory_bank", max(options.shards), rows, sorted({1, most}))
        for rows in options.rows
        if rows != middle
    ]
    # Every worker has the whole queue: few fit into one machine.
    return [*banks, ("queue", 1, options.queue, [each for each in options.workers if each <= MAX_QUEUES])]


def measure_all(groups: list[Any], options: argparse.Namespace) -> tuple[list[Line], dict[str, Any]]:
    """Measure every cell, and lose a shard of the largest bank; return the lines and the results of the loss."""
    lines: list[Line] = []
    lost: dict[str, Any] = {}
    plan = plan_cells(options)
    total = sum(len(numbers) for *_, numbers in plan)
    sizes = {name: getattr(options, name) for name in ("local_batch", "num_negatives", "dim")}
    with ProgressLine("cells", lambda: (len(lines), total, "of the bank and the queue")):
        for kind, shards, rows, numbers in plan:
            sizes["num_negatives"] = options.num_negatives if kind == "memory_bank" else 0
            usual = Work(kind=kind, num_workers=1, num_rows=rows, **sizes)
            with started(kind, shards, rows, options.dim) as bank:
                for num_workers in numbers:
                    if kind == "queue":
                        bank.restore(0)  # its rows are numbered
                    work = replace(usual, num_workers=num_workers)
                    lines.append(measure(groups, bank, work, options))
                if (kind, shards, rows) == ("memory_bank", max(options.shards), max(options.rows)):
                    most = replace(usual, num_workers=max(numbers))
                    lost = lose_a_shard(groups, bank, most, options.lose_steps)
                    write = partial(write_and_save, groups, bank, most, options.lose_steps)
                    lost["asked"] = kill_while_asked(bank, most, options.kills, write)
    return lines, lost


def read_options() -> argparse.Namespace:
    numbers: dict[str, Any] = {"workers": [1, 4, 16, 64, 256, 1_024], "shards": [1, 4, 16]}
    numbers["rows"] = [100_000, 1_000_000, 10_000_000]
    sizes: dict[str, Any] = {
        "queue": 65_536,
        "local_batch": 32,
        "num_negatives": 4_096,
        "dim": 128,
        "processes": 8,
    }
    steps: dict[str, Any] = {"blocks": 3, "steps": 8, "lose_steps": 8, "kills": 20}
    options = make_parser(__doc__, quick=False, **numbers, **sizes, **steps).parse_args()
    if options.quick:
        options.workers, options.shards, options.rows = [1, 2, 4], [1, 2], [10_000, 30_000, 100_000]
        options.processes, options.blocks, options.steps, options.lose_steps = 2, 3, 8, 3
    return options


def main() -> None:
    options = read_options()
    began = time.monotonic()
    init_ray(os.environ.get("RAY_ADDRESS") or "local")
    make_group: Any = ray.remote(num_cpus=0)(ClientGroup)
    groups = [make_group.remote() for _ in range(options.processes)]
    lines, lost = measure_all(groups, options)
    more = {"lost_shard": lost, "seconds": time.monotonic() - began}
    report(options, lines, text(lines, **more), **more)
    ray.shutdown()


if __name__ == "__main__":
    main()
