"""InfoNCE with a queue (MoCo), forward and backward: raycl beside lightly and plain torch.

    python benchmarks/queue_loss.py [--json FILE] [--batches 256] [--num-negatives 65536] [--dims 128] [--quick]

Time: one process, one thread, the implementations take turns, so that a busy machine is unfair
to none; the median of the process's CPU time (other programs do not count) and of the wall's.
Memory: a fresh process each, its peak resident memory above its memory before the loss.
The gradient is the queries'; keys and queue want none. lightly normalizes its rows, copies its
queue and writes the keys to it as part of its loss; the allocator is left as it comes, for all.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import describe_machine, read_status, summarize
from torch import Tensor

from raycl.losses import info_nce

TEMPERATURE = 0.07
NAMES = ("raycl", "lightly", "plain")
Loss = Callable[[Tensor, Tensor], Tensor]


def load(name: str, queue: Tensor) -> Loss:
    """Return the implementation of that name, a function of query and key."""
    if name == "raycl":
        return lambda query, key: info_nce(
            query, key, temperature=TEMPERATURE, in_batch=False, negatives=queue
        )
    if name == "plain":
        return lambda query, key: plain(query, key, queue)
    try:
        from lightly.loss import NTXentLoss
    except ImportError:
        sys.exit("lightly is not installed; run `uv run --extra bench python benchmarks/queue_loss.py`")
    loss = NTXentLoss(temperature=TEMPERATURE, memory_bank_size=tuple(queue.shape))
    loss.memory_bank.bank = queue.clone()
    return loss


def plain(query: Tensor, key: Tensor, queue: Tensor) -> Tensor:
    """Hold all logits, the own key's first, as MoCo's own code does; one cross entropy."""
    own = (query * key).sum(1, keepdim=True)
    logits = torch.cat([own, query @ queue.T], dim=1) / TEMPERATURE
    return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.int64))


def make_rows(batch: int, num_negatives: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries that want a gradient, keys, and a queue: unit rows."""
    torch.manual_seed(0)
    query, key = F.normalize(torch.randn(2, batch, dim), dim=2)
    return query.clone().requires_grad_(), key, F.normalize(torch.randn(num_negatives, dim), dim=1)


def step(loss: Loss, query: Tensor, key: Tensor) -> float:
    """Take value and gradient once."""
    query.grad = None
    value = loss(query, key)
    value.backward()
    return value.item()


def print_memory(name: str, batch: int, num_negatives: int, dim: int) -> None:
    """Print the peak extra memory (MB) of one step; runs in a process of its own."""
    query, key, queue = make_rows(batch, num_negatives, dim)
    small = make_rows(8, 64, dim)
    step(load(name, small[2]), *small[:2])  # libraries and their buffers are not the loss's memory
    loss = load(name, queue)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = read_status("VmRSS")
    step(loss, query, key)
    print(read_status("VmHWM") - before)


def measure_memory(name: str, batch: int, num_negatives: int, dim: int) -> float:
    """Return the peak extra memory (MB) of one step."""
    sizes = [str(batch), str(num_negatives), str(dim)]
    command = [sys.executable, __file__, "--memory-of", name, *sizes]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(answer.stdout)


def measure_cell(batch: int, num_negatives: int, dim: int, repeats: int) -> list[dict[str, Any]]:
    """Measure every implementation at one size; they take turns."""
    query, key, queue = make_rows(batch, num_negatives, dim)
    losses = {name: load(name, queue) for name in NAMES}
    values = {name: step(loss, query, key) for name, loss in losses.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    for _ in range(repeats):
        for name, loss in losses.items():
            cpu, wall = time.process_time(), time.perf_counter()
            step(loss, query, key)
            taken[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return [
        {
            "name": name,
            "batch": batch,
            "num_negatives": num_negatives,
            "dim": dim,
            "value": values[name],
            "cpu_ms": summarize([1e3 * cpu for cpu, _ in taken[name]]),
            "wall_ms": summarize([1e3 * wall for _, wall in taken[name]]),
            "memory_mb": measure_memory(name, batch, num_negatives, dim),
        }
        for name in NAMES
    ]


def print_cell(rows: list[dict[str, Any]]) -> None:
    """Print one line per implementation, with its ratio to raycl."""
    own = rows[0]
    for row in rows:
        cpu, wall = row["cpu_ms"], row["wall_ms"]
        slower = cpu["median"] / own["cpu_ms"]["median"]
        label = f"{row['batch']:>6} {row['num_negatives']:>9} {row['dim']:>4} {row['name']:<8}"
        print(
            f"{label} {cpu['median']:>9.1f} ({cpu['min']:.1f}-{cpu['max']:.1f})".ljust(56)
            + f"{wall['median']:>9.1f} {slower:>6.1f}x {row['memory_mb']:>10.1f}   {row['value']:.5f}",
            flush=True,
        )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--batches", type=int, nargs="+", default=[256])
    parser.add_argument("--num-negatives", type=int, nargs="+", default=[65_536])
    parser.add_argument("--dims", type=int, nargs="+", default=[128])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one small size, three repeats")
    parser.add_argument("--memory-of", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure, print the table, write the JSON."""
    torch.set_num_threads(1)
    arguments = parse_arguments()
    if arguments.memory_of:
        name, *sizes = arguments.memory_of
        print_memory(name, *map(int, sizes))
        return
    if arguments.quick:
        arguments.batches, arguments.num_negatives, arguments.repeats = [256], [8192], 3
    print(
        " batch negatives  dim name     CPU ms (least-most)".ljust(56) + "  wall ms   time  memory MB  value"
    )
    cells = []
    for batch in arguments.batches:
        for num_negatives in arguments.num_negatives:
            for dim in arguments.dims:
                rows = measure_cell(batch, num_negatives, dim, arguments.repeats)
                print_cell(rows)
                cells += rows
    if arguments.json:
        result = {"machine": describe_machine(), "temperature": TEMPERATURE, "cells": cells}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
