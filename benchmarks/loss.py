"""A loss, forward and backward: raycl beside lightly, open_clip's way and the plain formula.

    python benchmarks/loss.py [--loss hinge|bidirectional|queue] [--json FILE] [--sizes 1024 4096]
        [--dims 128 512] [--num-negatives 65536] [--memory-gb 20] [--quick]

NT-Xent by default. The hinge uses the hardest negative in row and column; lightly has none. The bidirectional
cross-entropy stands beside the arithmetic of open_clip's loss. ``queue`` is InfoNCE over a queue (MoCo), whose
gradient is the queries' alone; lightly normalizes its rows, copies its queue and writes the keys to it as part
of its loss.

Time: one process, one thread, the implementations take turns, so that a busy machine is unfair
to none; the median of the process's CPU time (other programs do not count) and of the wall's.
Memory: a fresh process each, its peak resident memory above its memory before the loss.
The allocator is left as it comes, for all of them.
"""

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import describe_machine, make_parser, read_status, run_apart, summarize, take_turns, write_json
from torch import Tensor

from raycl.losses import clip, hinge, info_nce, nt_xent

TEMPERATURE, QUEUE_TEMPERATURE, MARGIN = 0.1, 0.07, 0.2
# Matrices of [2 * batch, 2 * batch] float32 held at the peak, as measured at batch 4,096.
MATRICES_HELD = {
    "nt_xent": {"raycl": 0.0, "lightly": 4.2, "plain": 3.3},
    "hinge": {"raycl": 0.0, "plain": 1.4},
    "bidirectional": {"raycl": 0.0, "open_clip": 1.0, "plain": 1.0},
    "queue": {"raycl": 0.0, "lightly": 0.0, "plain": 0.0},
}
Loss = Callable[..., Tensor]


def plain(view_a: Tensor, view_b: Tensor) -> Tensor:
    """Hold the whole matrix; one cross entropy."""
    rows = torch.cat([view_a, view_b])
    logits = rows @ rows.T / TEMPERATURE
    logits = logits.masked_fill(torch.eye(len(rows), dtype=torch.bool), -math.inf)
    return F.cross_entropy(logits, torch.arange(len(rows)).roll(len(view_a)))


def plain_hinge(query: Tensor, key: Tensor) -> Tensor:
    """Hold the whole matrix; the hardest negative in each row and column."""
    similarity = query @ key.T
    others = similarity.masked_fill(torch.eye(len(query), dtype=torch.bool), -math.inf)
    hardest = others.amax(1), others.amax(0)
    rows, columns = (F.relu(MARGIN + each - similarity.diagonal()).mean() for each in hardest)
    return (rows + columns) / 2


def plain_bidirectional(query: Tensor, key: Tensor) -> Tensor:
    """Hold the whole matrix; one cross entropy over its rows, one over its columns."""
    logits, own = query @ key.T / TEMPERATURE, torch.arange(len(query))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def open_clip_bidirectional(query: Tensor, key: Tensor) -> Tensor:
    """Scale the rows and take a product for each direction, as open_clip does."""
    own = torch.arange(len(query))
    of_queries, key_tower = query / TEMPERATURE @ key.T, key / TEMPERATURE @ query.T
    return (F.cross_entropy(of_queries, own) + F.cross_entropy(key_tower, own)) / 2


def plain_queue(query: Tensor, key: Tensor, queue: Tensor) -> Tensor:
    """Hold all logits, the own key's first, as MoCo's own code does; one cross entropy."""
    own = (query * key).sum(1, keepdim=True)
    logits = torch.cat([own, query @ queue.T], dim=1) / QUEUE_TEMPERATURE
    return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.int64))


def load(loss: str, name: str, queue: Tensor) -> Loss:
    """Return the implementation of that name; only the loss ``queue`` uses the queue [num_negatives, dim]."""
    if name == "raycl":
        return {
            "nt_xent": partial(nt_xent, temperature=TEMPERATURE),
            "hinge": partial(hinge, margin=MARGIN, hardest=True),
            "bidirectional": partial(clip, temperature=TEMPERATURE),
            "queue": partial(info_nce, temperature=QUEUE_TEMPERATURE, in_batch=False, negatives=queue),
        }[loss]
    if name == "plain":
        return {
            "nt_xent": plain,
            "hinge": plain_hinge,
            "bidirectional": plain_bidirectional,
            "queue": partial(plain_queue, queue=queue),
        }[loss]
    if name == "open_clip":
        return open_clip_bidirectional
    try:
        from lightly.loss import NTXentLoss
    except ImportError:
        sys.exit("lightly is not installed; run `uv run --extra bench python benchmarks/loss.py`")
    if loss != "queue":
        return NTXentLoss(temperature=TEMPERATURE)
    theirs = NTXentLoss(temperature=QUEUE_TEMPERATURE, memory_bank_size=tuple(queue.shape))
    theirs.memory_bank.bank = queue.clone()
    return theirs


def make_rows(loss: str, size: int, dim: int, num_negatives: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return two views of ``size`` unit rows that require gradients (beside a queue, the first one), and a queue."""
    torch.manual_seed(0)
    view_a, view_b = (each.clone() for each in F.normalize(torch.randn(2, size, dim), dim=2))
    view_a.requires_grad_()
    if loss != "queue":
        return (view_a, view_b.requires_grad_()), torch.empty(0, dim)
    return (view_a, view_b), F.normalize(torch.randn(num_negatives, dim), dim=1)


def step(loss: Loss, views: tuple[Tensor, Tensor]) -> float:
    """Take value and gradients once."""
    for view in views:
        view.grad = None
    value = loss(*views)
    value.backward()
    return value.item()


def print_memory(which: str, name: str, size: int, dim: int, num_negatives: int) -> None:
    """Print the peak extra memory (MB) of one step; runs in a process of its own."""
    small, small_queue = make_rows(which, 64, dim, 64)
    step(load(which, name, small_queue), small)  # libraries and their buffers are not the loss's memory
    views, queue = make_rows(which, size, dim, num_negatives)
    loss = load(which, name, queue)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = read_status("VmRSS")
    step(loss, views)
    print(read_status("VmHWM") - before)


def measure_times(
    loss: str, names: list[str], repeats: int, *, size: int, dim: int, num_negatives: int
) -> dict[str, dict[str, Any]]:
    """Return CPU and wall milliseconds of each; they take turns."""
    views, queue = make_rows(loss, size, dim, num_negatives)
    losses = {name: load(loss, name, queue) for name in names}
    values = {name: step(each, views) for name, each in losses.items()}
    steps = {name: partial(step, each, views) for name, each in losses.items()}
    return {
        name: {
            "value": values[name],
            "cpu_ms": summarize([1e3 * turn.cpu_s for turn in turns]),
            "wall_ms": summarize([1e3 * turn.wall_s for turn in turns]),
        }
        for name, turns in take_turns(steps, repeats, warmup=0).items()
    }


def measure_cell(size: int, dim: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every implementation that fits at one size."""
    loss, num_negatives = arguments.loss, arguments.num_negatives
    needed_gb = {name: held * (2 * size) ** 2 * 4 / 1e9 for name, held in MATRICES_HELD[loss].items()}
    fitting = [name for name, needed in needed_gb.items() if needed <= arguments.memory_gb]
    sizes = {"size": size, "dim": dim, "num_negatives": num_negatives}
    times = measure_times(loss, fitting, arguments.repeats, **sizes)
    rows = []
    for name in needed_gb:
        row: dict[str, Any] = {"name": name, **sizes}
        if name in fitting:
            words = "--loss", loss, "--memory-of", name, size, dim, num_negatives
            row |= times[name] | {"memory_mb": run_apart(__file__, *words, num_threads=1)}
        else:
            row["skipped"] = f"needs about {needed_gb[name]:.0f} GB"
        rows.append(row)
    return rows


def print_cell(rows: list[dict[str, Any]]) -> None:
    """Print one line per implementation, with its ratio to raycl."""
    own = rows[0]
    for row in rows:
        label = f"{row['size']:>6} {row['dim']:>4} {row['name']:<9}"
        if "skipped" in row:
            print(f"{label} skipped: {row['skipped']}", flush=True)
            continue
        cpu, wall = row["cpu_ms"], row["wall_ms"]
        slower = cpu["median"] / own["cpu_ms"]["median"]
        bigger = row["memory_mb"] / own["memory_mb"]
        print(
            f"{label} {cpu['median']:>9.1f} ({cpu['min']:.1f}-{cpu['max']:.1f})".ljust(52)
            + f"{wall['median']:>9.1f} {slower:>6.1f}x {row['memory_mb']:>8.1f} {bigger:>6.1f}x"
            + f"   {row['value']:.5f}",
            flush=True,
        )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--loss", choices=MATRICES_HELD, default="nt_xent")
    parser.add_argument("--sizes", type=int, nargs="+", help="rows of a batch [1024 4096 16384; queue: 256]")
    parser.add_argument("--dims", type=int, nargs="+", help="[128 512; queue: 128]")
    parser.add_argument("--num-negatives", type=int, default=65_536, help="keys of the queue")
    parser.add_argument("--repeats", type=int, help="[5; queue: 9]")
    parser.add_argument("--memory-gb", type=float, default=8.0, help="skip losses that would take more")
    parser.add_argument("--quick", action="store_true", help="one small size, three repeats")
    parser.add_argument("--memory-of", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    is_queue = arguments.loss == "queue"
    if arguments.quick:
        arguments.sizes, arguments.dims, arguments.repeats = [256 if is_queue else 1024], [128], 3
        arguments.num_negatives = 8_192
    arguments.sizes = arguments.sizes or ([256] if is_queue else [1024, 4096, 16384])
    arguments.dims = arguments.dims or ([128] if is_queue else [128, 512])
    arguments.repeats = arguments.repeats or (9 if is_queue else 5)
    return arguments


def main() -> None:
    """Measure, print the table, write the JSON."""
    torch.set_num_threads(1)
    arguments = parse_arguments()
    if arguments.memory_of:
        name, *sizes = arguments.memory_of
        print_memory(arguments.loss, name, *map(int, sizes))
        return
    if "lightly" in MATRICES_HELD[arguments.loss]:
        load(arguments.loss, "lightly", torch.ones(64, 8))  # fails at once if it is not installed
    print("  size  dim name      CPU ms (least-most)".ljust(52) + "  wall ms   time  memory MB  value")
    cells = []
    for size in arguments.sizes:
        for dim in arguments.dims:
            rows = measure_cell(size, dim, arguments)
            print_cell(rows)
            cells += rows
    temperature = QUEUE_TEMPERATURE if arguments.loss == "queue" else TEMPERATURE
    result = {"machine": describe_machine(), "temperature": temperature, "cells": cells}
    write_json(arguments.json, result)


if __name__ == "__main__":
    main()
