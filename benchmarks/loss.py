"""A loss, forward and backward: raycl beside lightly, open_clip's way and the plain formula.

    python benchmarks/loss.py [--loss hinge|bidirectional] [--json FILE] [--sizes 1024 4096] [--dims 128 512]
        [--memory-gb 20] [--quick]

NT-Xent unless another is asked for. The hinge is that with the hardest negative in row and column;
lightly has none. The bidirectional cross-entropy stands beside the arithmetic of open_clip's loss.

Time: one process, one thread, the implementations take turns, so that a busy machine is unfair
to none; the median of the process's CPU time (other programs do not count) and of the wall's.
Memory: a fresh process each, its peak resident memory above its memory before the loss.
The allocator is left as it comes, for all of them.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import describe_machine, read_status, summarize
from torch import Tensor

from raycl.losses import clip, hinge, nt_xent

TEMPERATURE, MARGIN = 0.1, 0.2
# Matrices of [2 * batch, 2 * batch] float32 held at the peak, as measured at batch 4,096.
MATRICES_HELD = {
    "nt_xent": {"raycl": 0.0, "lightly": 4.2, "plain": 3.3},
    "hinge": {"raycl": 0.0, "plain": 1.4},
    "bidirectional": {"raycl": 0.0, "open_clip": 1.0, "plain": 1.0},
}
Loss = Callable[[Tensor, Tensor], Tensor]


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


def load(loss: str, name: str) -> Loss:
    """Return the implementation of that name."""
    if name == "raycl":
        ours = {
            "nt_xent": partial(nt_xent, temperature=TEMPERATURE),
            "hinge": partial(hinge, margin=MARGIN, hardest=True),
            "bidirectional": partial(clip, temperature=TEMPERATURE),
        }
        return ours[loss]
    if name == "plain":
        return {"nt_xent": plain, "hinge": plain_hinge, "bidirectional": plain_bidirectional}[loss]
    if name == "open_clip":
        return open_clip_bidirectional
    try:
        from lightly.loss import NTXentLoss
    except ImportError:
        sys.exit("lightly is not installed; run `uv run --extra bench python benchmarks/loss.py`")
    return NTXentLoss(temperature=TEMPERATURE)


def make_views(size: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return two views of ``size`` unit rows that want gradients."""
    torch.manual_seed(0)
    view_a, view_b = F.normalize(torch.randn(2, size, dim), dim=2)
    return view_a.clone().requires_grad_(), view_b.clone().requires_grad_()


def step(loss: Loss, views: tuple[Tensor, Tensor]) -> float:
    """Take value and gradients once."""
    for view in views:
        view.grad = None
    value = loss(*views)
    value.backward()
    return value.item()


def print_memory(which: str, name: str, size: int, dim: int) -> None:
    """Print the peak extra memory (MB) of one step; runs in a process of its own."""
    loss, views = load(which, name), make_views(size, dim)
    step(loss, make_views(64, dim))  # libraries and their buffers are not the loss's memory
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = read_status("VmRSS")
    step(loss, views)
    print(read_status("VmHWM") - before)


def measure_memory(loss: str, name: str, size: int, dim: int) -> float:
    """Return the peak extra memory (MB) of one step."""
    command = [sys.executable, __file__, "--loss", loss, "--memory-of", name, str(size), str(dim)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(answer.stdout)


def measure_times(
    loss: str, names: list[str], size: int, dim: int, repeats: int
) -> dict[str, dict[str, Any]]:
    """Return CPU and wall milliseconds of each; they take turns."""
    losses, views = {name: load(loss, name) for name in names}, make_views(size, dim)
    values = {name: step(each, views) for name, each in losses.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(repeats):
        for name, each in losses.items():
            cpu, wall = time.process_time(), time.perf_counter()
            step(each, views)
            taken[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return {
        name: {
            "value": values[name],
            "cpu_ms": summarize([1e3 * cpu for cpu, _ in taken[name]]),
            "wall_ms": summarize([1e3 * wall for _, wall in taken[name]]),
        }
        for name in names
    }


def measure_cell(loss: str, size: int, dim: int, repeats: int, memory_gb: float) -> list[dict[str, Any]]:
    """Measure every implementation that fits at one size."""
    needed_gb = {name: held * (2 * size) ** 2 * 4 / 1e9 for name, held in MATRICES_HELD[loss].items()}
    fitting = [name for name, needed in needed_gb.items() if needed <= memory_gb]
    times = measure_times(loss, fitting, size, dim, repeats)
    rows = []
    for name in needed_gb:
        row: dict[str, Any] = {"name": name, "size": size, "dim": dim}
        if name in fitting:
            row |= times[name] | {"memory_mb": measure_memory(loss, name, size, dim)}
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--loss", choices=MATRICES_HELD, default="nt_xent")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory-gb", type=float, default=8.0, help="skip losses that would take more")
    parser.add_argument("--quick", action="store_true", help="one small size, three repeats")
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure, print the table, write the JSON."""
    torch.set_num_threads(1)
    arguments = parse_arguments()
    if arguments.memory_of:
        name, size, dim = arguments.memory_of
        print_memory(arguments.loss, name, int(size), int(dim))
        return
    if arguments.quick:
        arguments.sizes, arguments.dims, arguments.repeats = [1024], [128], 3
    for name in MATRICES_HELD[arguments.loss]:
        load(arguments.loss, name)  # say at once if it is absent
    print("  size  dim name      CPU ms (least-most)".ljust(52) + "  wall ms   time  memory MB  value")
    cells = []
    for size in arguments.sizes:
        for dim in arguments.dims:
            rows = measure_cell(arguments.loss, size, dim, arguments.repeats, arguments.memory_gb)
            print_cell(rows)
            cells += rows
    if arguments.json:
        result = {"machine": describe_machine(), "temperature": TEMPERATURE, "cells": cells}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
