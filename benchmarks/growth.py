"""How cost grows with the work: rows, queue, bank, batch. Exponents are fitted, and all points drawn.

    python benchmarks/growth.py [--only rows queue bank batch] [--quick] [--json FILE] [--output growth.png]

Each point is a process of its own; its cost is the median of its CPU seconds, with one thread, and the memory it
took above its memory before. ``rows``: an epoch of a streamed set of 16-pixel JPEGs, read, decoded and
shuffled, in seconds of the clock on all cores; the memory is the training process's. ``queue``: loss and
gradient of 256 queries against so many keys, and a push of 256. ``bank``: 4,096 slots drawn and read, 256
updated. ``batch``: NT-Xent and its gradient over so many pairs; its rows times its columns grow with
the square. Workers are in ``scale.py`` and ``scale_training.py``.
"""

import argparse
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter
from measuring import describe_machine, make_parser, read_status, run_apart, write_json
from result_tables import DUE, UNITS, growth_table

DIM, BATCH, NUM_DRAWN = 128, 256, 4_096
REPEATS = 5
SIZES = {
    "rows": (10_000, 100_000, 1_000_000),
    "queue": (1_024, 8_192, 65_536, 262_144, 1_048_576),
    "bank": (100_000, 1_000_000, 10_000_000),
    "batch": (256, 1_024, 4_096, 16_384, 65_536),
}


def main() -> None:
    options = read_options()
    if options.point is not None:
        kind, size = options.point
        print(json.dumps(KINDS[kind](int(size))))
        return
    found = {kind: [measured(kind, size) for size in sizes(kind, options)] for kind in options.only}
    exponents = {kind: exponent(points) for kind, points in found.items()}
    report = {"points": found, "exponents": exponents, "machine": describe_machine()}
    print(growth_table(report))
    write_json(options.json, report)
    if options.output:
        draw(found, exponents, options.output)


def sizes(kind: str, options: argparse.Namespace) -> tuple[int, ...]:
    return SIZES[kind][:2] if options.quick else SIZES[kind]


def measured(kind: str, size: int) -> dict[str, float]:
    """Measure one point in a process of its own."""
    point = {"size": size} | run_apart(__file__, "--point", kind, size)
    print(f"{kind:6} {size:>10,}  {point['seconds']:10.4f} s  {point['mb']:8.0f} MB", flush=True)
    return point


def exponent(points: list[dict[str, float]]) -> float:
    """Return the slope of the logarithms over the upper half, where constants no longer count."""
    upper = points[-max(2, (len(points) + 1) // 2) :]
    logs = np.log([[point["size"], point["seconds"]] for point in upper])
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])


def cost(work: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> dict[str, float]:
    """Do the work a few times; return its median seconds, and its peak of memory."""
    work()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before, seconds = read_status("VmRSS"), []
    for _ in range(REPEATS):
        began = clock()
        work()
        seconds.append(clock() - began)
    return {"seconds": statistics.median(seconds), "mb": read_status("VmHWM") - before}


def rows(size: int) -> dict[str, float]:
    import raycl
    from raycl.data.sampler import BatchShard
    from raycl.data.sources import find_source
    from raycl.ray_runtime import connect_cluster
    from raycl.training.coordinator import start_coordinator
    from raycl.training.data_module import DataModule
    from raycl.training.preflight import column_names
    from raycl.training.process import prepare_process

    prepare_process(2)
    config = raycl.override(
        raycl.recipe("simclr", image_size=16), {"data.cache": "stream", "evaluation.every_epochs": 0}
    )
    with tempfile.TemporaryDirectory() as folder:
        data = write_images(Path(folder) / "images.parquet", size)
        connect_cluster(None)
        with start_coordinator() as coordinator:
            source = find_source(str(data), column_names(config))
            stream = DataModule(config, coordinator, source, None).stream()

            def read(epoch: int) -> float:
                began = time.perf_counter()
                for _ in stream.epoch_batches(BatchShard(batch_size=BATCH), epoch=epoch):
                    pass
                return time.perf_counter() - began

            read(0)
            Path("/proc/self/clear_refs").write_text("5")
            before = read_status("VmRSS")
            seconds = statistics.median(read(epoch) for epoch in (1, 2, 3))
            return {"seconds": seconds, "mb": read_status("VmHWM") - before}


def write_images(path: Path, number: int) -> Path:
    """Write JPEGs of 16 pixels, a few thousand different ones again and again."""
    from PIL import Image

    rng, files = np.random.default_rng(0), []
    for _ in range(2_000):
        stream = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (16, 16, 3), np.uint8)).save(stream, "JPEG")
        files.append(stream.getvalue())
    with pq.ParquetWriter(path, pa.schema({"image": pa.binary()})) as writer:
        for start in range(0, number, 10_000):
            some = [files[index % len(files)] for index in range(start, min(start + 10_000, number))]
            writer.write_table(pa.table({"image": some}))
    return path


def queue(size: int) -> dict[str, float]:
    import torch
    import torch.nn.functional as F

    from raycl.losses import info_nce
    from raycl.negatives.queue import KeyQueue
    from raycl.training.process import prepare_process

    prepare_process(1)
    rng = np.random.default_rng(0)
    held = KeyQueue(size, DIM)
    held.push(unit_rows(rng, size), np.arange(size), 0)
    query, key = F.normalize(torch.randn(2, BATCH, DIM), dim=2)
    query.requires_grad_()
    pushed = unit_rows(rng, BATCH)

    def step() -> None:
        query.grad = None
        stored = torch.from_numpy(held.negatives().rows)
        info_nce(query, key, temperature=0.07, in_batch=False, negatives=stored).backward()
        held.push(pushed, np.arange(BATCH), 1)

    return cost(step)


def bank(size: int) -> dict[str, float]:
    from raycl.negatives.memory_bank import MemoryBank

    held = MemoryBank(np.arange(size), DIM, seed=0)
    rng = np.random.default_rng(0)
    rows_of, ids = unit_rows(rng, BATCH), rng.choice(size, BATCH, replace=False)
    steps = iter(range(10**9))

    def step() -> None:
        for _ in range(20):
            number = next(steps)
            held.read(held.draw(NUM_DRAWN, step=number))
            held.update(ids, rows_of, number)

    found = cost(step)
    return found | {"seconds": found["seconds"] / 20}


def batch(size: int) -> dict[str, float]:
    import torch
    import torch.nn.functional as F

    from raycl.losses import nt_xent
    from raycl.training.process import prepare_process

    prepare_process(1)
    view_a, view_b = F.normalize(torch.randn(2, size, DIM), dim=2)
    view_a.requires_grad_()

    def step() -> None:
        view_a.grad = None
        nt_xent(view_a, view_b, temperature=0.1).backward()

    return cost(step) if size <= 16_384 else once(step)


def once(work: Callable[[], None]) -> dict[str, float]:
    """Return the cost of work that takes long enough to be done once."""
    Path("/proc/self/clear_refs").write_text("5")
    before, began = read_status("VmRSS"), time.process_time()
    work()
    return {"seconds": time.process_time() - began, "mb": read_status("VmHWM") - before}


def unit_rows(rng: np.random.Generator, number: int) -> np.ndarray:
    found = rng.standard_normal((number, DIM), np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def draw(found: dict[str, list[dict[str, float]]], exponents: dict[str, float], path: Path) -> None:
    """Draw seconds over size, a panel a kind, beside the slope that the work itself has."""
    figure, panels = plt.subplots(1, len(found), figsize=(3.2 * len(found), 3.2), layout="constrained")
    for axes, (kind, points) in zip(np.atleast_1d(panels), found.items(), strict=True):
        x, y = (np.array([point[name] for point in points]) for name in ("size", "seconds"))
        axes.loglog(x, y, "o-", color="#08519c", label=f"measured: power {exponents[kind]:.2f}")
        due = y[-1] * (x / x[-1]) ** DUE[kind]
        axes.loglog(x, due, "--", color="#999999", label=f"power {DUE[kind]:g}")
        axes.set(title=kind, xlabel=UNITS[kind], ylabel="seconds")
        # A decade at least, or noise would look like growth.
        axes.set_ylim(min(y.min(), y.max() / 10) / 2, y.max() * 2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def read_options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--quick", action="store_true", help="the two smallest sizes of each")
    parser.add_argument("--output", type=Path, help="draw the picture here")
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


KINDS = {"rows": rows, "queue": queue, "bank": bank, "batch": batch}

if __name__ == "__main__":
    main()
