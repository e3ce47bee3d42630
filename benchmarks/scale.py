"""The bank's and the queue's protocol with many workers, on one machine: time, bytes, memory, losses.

    python benchmarks/scale.py [--json scale.json] [--picture docs/images/scale.png] [--quick]

Shards are Ray's actors as in training. Workers are real clients, a thread each, in ``--processes``
actors; they do nothing between the bank's calls, so a step is the protocol's alone, and they keep
abreast as a gather would. All share this machine's cores and talk through its loopback: a step's
wall time is the sum of everybody's work, and only CPU time a call and bytes carry over to a cluster.

Each row follows from its sample and step, and read rows are checked: all ids, a sample of rows.
The largest bank is filled, saved, and loses a shard half-way; then every row is checked.
"""

import argparse
import gc
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import numpy as np
import ray
from measuring import describe_machine, make_parser, private_mb, summarize, write_json
from scale_clients import ClientGroup, Work, add_up, join, process_seconds, run, thread_seconds
from scale_drill import lose_a_shard, num_wrong_keys
from scale_model import bank_payload, queue_payload
from scale_report import draw, fit, show_tables

from raycl.negatives.actor import BankActor
from raycl.negatives.bank import Bank
from raycl.negatives.spec import BankSpec
from raycl.negatives.start import start_bank
from raycl.progress import ProgressLine
from raycl.ray_runtime import init_ray

ITEMSIZE = 2  # float16, as rows travel by default
AT_REST_S = 2.0


@final
class Progress:
    """How many cells are measured, for the live line."""

    def __init__(self, total: int) -> None:
        self.done, self.total, self.text = 0, total, "starting"

    def look(self) -> tuple[int, int, str]:
        return self.done, self.total, self.text


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


def pids_of(bank: Bank) -> list[int]:
    return [connection.ask(BankActor.info).pid for connection in bank.connections()]


def seconds_of(pids: list[int]) -> float:
    """Return the CPU seconds of these processes."""
    return sum(map(process_seconds, pids))


def rate_at_rest(pids: list[int]) -> float:
    """Return the CPU seconds a second that these idle processes take."""
    before, since = seconds_of(pids), time.perf_counter()
    time.sleep(AT_REST_S)
    return (seconds_of(pids) - before) / (time.perf_counter() - since)


def busiest_s(before: list[dict[str, float]], after: list[dict[str, float]]) -> float:
    """Return the CPU seconds of each shard's busiest thread, summed over shards."""
    return sum(
        max(then[name] - now.get(name, 0.0) for name in then) for now, then in zip(before, after, strict=True)
    )


def measure(groups: list[Any], bank: Bank, work: Work, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one number of workers with one bank; a queue must be new or restored."""
    active, join_s = join(groups, bank, work)
    pids, step = pids_of(bank), 0
    num_steps = max(2, math.ceil(arguments.steps / work.num_workers))
    run(active, step, 2)
    step += 2
    walls: list[float] = []
    clients = ray.get([group.pid.remote() for group in active])
    idle = [rate_at_rest(each) for each in (pids, clients)]
    threads, used_s = [thread_seconds(pid) for pid in pids], [seconds_of(each) for each in (pids, clients)]
    spent_in_blocks = []
    for _ in range(arguments.blocks):
        wall, spent = run(active, step, num_steps)
        step += num_steps
        spent_in_blocks.append(spent)
        walls.append(1e3 * wall / num_steps)
    in_busiest_s = busiest_s(threads, [thread_seconds(pid) for pid in pids])
    in_blocks_s = sum(walls) * num_steps / 1e3
    shard_s, client_s = (
        seconds_of(each) - before - at_rest * in_blocks_s
        for each, before, at_rest in zip((pids, clients), used_s, idle, strict=True)
    )
    # Counted apart: to keep the answers for their sizes takes time and memory.
    _, counted = run(active, step, 2, keeps_answers=True)
    ray.get([group.flush.remote() for group in active])
    total, made = add_up(spent_in_blocks), arguments.blocks * num_steps * work.num_workers
    return {
        "kind": work.kind,
        "workers": work.num_workers,
        "shards": bank.spec.num_shards,
        "rows": work.num_rows,
        "step_ms": summarize(walls),
        "calls_a_step": total.num_calls / made,
        "rows_a_call": (2 * work.local_batch + work.num_negatives) * made / total.num_calls,
        "shard_us_a_call": 1e6 * shard_s / total.num_calls,
        "busiest_thread_us_a_call": 1e6 * in_busiest_s / total.num_calls,
        "client_us_a_call": 1e6 * client_s / total.num_calls,
        "cpu_at_rest": {"shards": idle[0], "clients": idle[1]},
        "waited_ms_a_step": 1e3 * total.waited_s / made,
        "join_s": join_s,
        "payload": {
            "sent": counted.sent / 2 / work.num_workers,
            "received": counted.received / 2 / work.num_workers,
        },
        "tcp": {"sent": total.tcp_sent / made, "received": total.tcp_received / made},
        "shard_mb": summarize(list(map(private_mb, pids))),
        "plan_mb": bank.spec.bytes_of(0) / 1e6,
        "wrong": total.num_wrong + counted.num_wrong + num_wrong_keys(bank, work, step + 2),
    }


def show(cell: dict[str, Any]) -> None:
    step, payload, tcp = cell["step_ms"], cell["payload"], cell["tcp"]
    print(
        f"{cell['kind']:11} {cell['workers']:>3} {cell['shards']:>3} {cell['rows']:>10,} "
        f"{step['median']:>8.1f} ({step['min']:.1f}-{step['max']:.1f})".ljust(56)
        + f"{cell['calls_a_step']:>5.1f} {cell['shard_us_a_call']:>7.0f} {cell['busiest_thread_us_a_call']:>7.0f} "
        f"{cell['client_us_a_call']:>7.0f} {cell['waited_ms_a_step']:>8.1f} "
        f"{payload['sent'] / 1e3:>7.1f} {payload['received'] / 1e3:>7.1f} "
        f"{tcp['sent'] / 1e3:>7.1f} {tcp['received'] / 1e3:>7.1f} "
        f"{cell['shard_mb']['median']:>6.0f} {cell['plan_mb']:>6.1f} {cell['wrong']:>3}",
        flush=True,
    )


HEADER = (
    "kind          W   S       rows  step ms (least-most)".ljust(56)
    + "calls  shard  thread  client   waited    sent  recvd  TCP out  TCP in  MB shard  plan wrong\n".rjust(
        60
    )
    + " " * 56
    + "/step  us/call us/call us/call ms/step   KB/step KB/step"
)


def plan_cells(arguments: argparse.Namespace) -> list[tuple[str, int, int, list[int]]]:
    """Return the cells: kind, shards, rows, and numbers of workers."""
    middle, most = arguments.rows[len(arguments.rows) // 2], max(arguments.workers)
    banks = [("memory_bank", shards, middle, arguments.workers) for shards in arguments.shards]
    for rows in arguments.rows:
        if rows != middle:
            banks.append(("memory_bank", max(arguments.shards), rows, sorted({1, most})))
    return [*banks, ("queue", 1, arguments.queue, arguments.workers[::2])]


def measure_all(
    groups: list[Any],
    plan: list[tuple[str, int, int, list[int]]],
    arguments: argparse.Namespace,
    line: Progress,
    result: dict[str, Any],
) -> None:
    """Measure every cell, and lose a shard of the largest bank; store the numbers in ``result``."""
    for kind, shards, rows, numbers in plan:
        line.text = f"{kind}, {shards} shards, {rows:,} rows"
        usual = Work(
            kind=kind,
            num_workers=1,
            num_rows=rows,
            local_batch=arguments.local_batch,
            num_negatives=arguments.num_negatives if kind == "memory_bank" else 0,
            dim=arguments.dim,
        )
        with started(kind, shards, rows, arguments.dim) as bank:
            for num_workers in numbers:
                if kind == "queue":
                    bank.restore(0)  # its rows are numbered
                cell = measure(groups, bank, replace(usual, num_workers=num_workers), arguments)
                show(cell)
                result["cells"].append(cell)
                keep(result, arguments)
                line.done += 1
            if (kind, shards, rows) == ("memory_bank", max(arguments.shards), max(arguments.rows)):
                line.text += ", of which one is lost"
                most = replace(usual, num_workers=max(numbers))
                result["lost_shard"] = lose_a_shard(groups, bank, most, arguments.lose_steps)
                keep(result, arguments)
                line.done += 1


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--picture", type=Path, help="draw the results here")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--queue", type=int, default=65_536, help="keys of the queue")
    parser.add_argument("--local-batch", type=int, default=64, help="rows of a worker and step")
    parser.add_argument("--num-negatives", type=int, default=4_096, help="slots drawn for a step")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--processes", type=int, default=8, help="that hold the clients")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=96, help="steps a block, shared by the workers, at least 2"
    )
    parser.add_argument(
        "--lose-steps", type=int, default=8, help="steps before the snapshot; twice as many after"
    )
    parser.add_argument("--quick", action="store_true", help="few workers and rows: half a minute")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.workers, arguments.shards, arguments.rows = [1, 2, 4], [1, 2], [10_000, 30_000, 100_000]
        arguments.processes, arguments.blocks, arguments.steps, arguments.lose_steps = 2, 3, 8, 3
    return arguments


def keep(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Write what there is, for a long run may not come to its end."""
    write_json(arguments.json, result)


def main() -> None:
    """Measure, print the tables, write the JSON, draw the picture."""
    arguments = parse_arguments()
    started_at = time.monotonic()
    init_ray(os.environ.get("RAY_ADDRESS") or "local")
    plan = plan_cells(arguments)
    line = Progress(sum(len(numbers) for *_, numbers in plan) + 1)
    model = {
        "memory_bank": bank_payload(
            arguments.local_batch, arguments.num_negatives, arguments.dim, itemsize=ITEMSIZE
        )._asdict(),
        "queue": queue_payload(arguments.local_batch, arguments.dim, itemsize=ITEMSIZE)._asdict(),
    }
    result: dict[str, Any] = {
        "machine": describe_machine() | {"cores_used": len(os.sched_getaffinity(0))},
        "settings": {
            name: getattr(arguments, name) for name in ("local_batch", "num_negatives", "dim", "processes")
        },
        "model": model,
        "cells": [],
    }
    print(HEADER, flush=True)
    make_group: Any = ray.remote(num_cpus=0)(ClientGroup)
    groups = [make_group.remote() for _ in range(arguments.processes)]
    with ProgressLine("cells", line.look):
        measure_all(groups, plan, arguments, line, result)
    result |= {"fits": fit(result["cells"]), "seconds": time.monotonic() - started_at}
    show_tables(result)
    keep(result, arguments)
    if arguments.picture:
        draw(result, arguments.picture)
    ray.shutdown()


if __name__ == "__main__":
    main()
