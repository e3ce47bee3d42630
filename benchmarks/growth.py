"""How cost grows with the work: rows, queue, bank, batch. Exponents are fitted, and all points drawn.

    python benchmarks/growth.py [--only rows queue bank batch] [--quick] [--output growth.png] [--json FILE]

Each point is a process of its own; its cost is the median of its CPU seconds, with one thread, and the memory it
took above its memory before. ``rows``: an epoch of a streamed set of 16-pixel JPEGs, read, decoded and
shuffled, in seconds of the clock on all cores; the memory is the training process's. ``queue``: loss and
gradient of 256 queries against so many keys, and a push of 256. ``bank``: 4,096 slots drawn and read, 256
updated. ``batch``: NT-Xent and its gradient over so many pairs; its rows times its columns grow with
the square. Workers are in ``scale.py`` and ``scale_training.py``.
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from measuring import Line, apart, cost, make_parser, markdown_table, report
from pictures import BLUES, FAINT, as_logs, panels, save
from training_steps import open_samples, write_images

DIM, BATCH, NUM_DRAWN = 128, 256, 4_096
SIZES = {
    "rows": (10_000, 100_000, 1_000_000),
    "queue": (1_024, 8_192, 65_536, 262_144, 1_048_576),
    "bank": (100_000, 1_000_000, 10_000_000),
    "batch": (256, 1_024, 4_096, 16_384, 65_536),
}
DUE = {"rows": 1.0, "queue": 1.0, "bank": 0.0, "batch": 2.0}  # the exponents of the work
UNITS = {"rows": "rows read", "queue": "keys", "bank": "slots", "batch": "pairs"}


def rows(size: int) -> Line:
    import raycl
    from raycl.data.sampler import BatchShard
    from raycl.training.process import prepare_process

    prepare_process(2)
    settings = {"data.cache": "stream", "evaluation.every_epochs": 0}
    config = raycl.override(raycl.recipe("simclr", image_size=16), settings)
    images = np.random.default_rng(0).integers(0, 255, (2_000, 16, 16, 3), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        data = write_images(Path(folder) / "images.parquet", list(images), size)
        with open_samples(config, str(data)) as samples:
            stream, epochs = samples.stream(), count()

            def read() -> None:
                for _ in stream.epoch_batches(BatchShard(batch_size=BATCH), epoch=next(epochs)):
                    pass

            return median_cost(read, 3, clock="wall_s")


def queue(size: int) -> Line:
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

    return median_cost(step, 5)


def bank(size: int) -> Line:
    from raycl.negatives.memory_bank import MemoryBank

    held, rng, numbers = MemoryBank(np.arange(size), DIM, seed=0), np.random.default_rng(0), count()
    fresh, ids = unit_rows(rng, BATCH), rng.choice(size, BATCH, replace=False)

    def steps() -> None:
        for _ in range(20):
            number = next(numbers)
            held.read(held.draw(NUM_DRAWN, step=number))
            held.update(ids, fresh, number)

    found = median_cost(steps, 5)
    return found | {"seconds": found["seconds"] / 20}


def batch(size: int) -> Line:
    from loss import build_step

    from raycl.training.process import prepare_process

    prepare_process(1)
    step = build_step("nt_xent", "raycl", size, DIM, 0)
    return median_cost(step, 5 if size <= 16_384 else 0)


def median_cost(work: Callable[[], Any], repeats: int, *, clock: str = "cpu_s") -> Line:
    """Return the median cost of some repeats after the first one; without repeats, of the first one."""
    first = cost(work)
    found = [cost(work) for _ in range(repeats)] or [first]
    return {
        "seconds": statistics.median(each[clock] for each in found),
        "memory_mb": statistics.median(each["memory_mb"] for each in found),
    }


def unit_rows(rng: np.random.Generator, number: int) -> np.ndarray:
    found = rng.standard_normal((number, DIM), np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


KINDS = {"rows": rows, "queue": queue, "bank": bank, "batch": batch}


def by_kind(lines: Sequence[Line]) -> dict[str, list[Line]]:
    kinds = dict.fromkeys(line["side"] for line in lines)
    return {kind: [line for line in lines if line["side"] == kind] for kind in kinds}


def exponent(points: Sequence[Line]) -> float:
    """Return the slope of the logarithms over the upper half, where constants no longer count."""
    upper = points[-max(2, (len(points) + 1) // 2) :]
    logs = np.log([[point["size"], point["seconds"]] for point in upper])
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0]) if len(upper) > 1 else 0.0


def table(lines: Sequence[Line]) -> str:
    """Return the power with which seconds grow, beside that of the work."""
    cells = []
    for kind, points in by_kind(lines).items():
        least, most = points[0], points[-1]
        sizes = f"{least['size']:,} to {most['size']:,} {UNITS[kind]}"
        seconds = f"{least['seconds']:.3g} to {most['seconds']:.3g}"
        cells.append([kind, sizes, seconds, f"{exponent(points):.2f}", f"{DUE[kind]:g}"])
    return markdown_table(["work", "from, to", "seconds", "power", "of the work"], cells)


def draw(lines: Sequence[Line], path: Path) -> None:
    """Draw seconds over size, a panel a kind, beside the slope that the work itself has."""
    kinds = by_kind(lines)
    figure, grid = panels(1, len(kinds), 3.2 * len(kinds), 3.2)
    for axes, (kind, points) in zip(grid, kinds.items(), strict=True):
        x, y = (np.array([point[name] for point in points]) for name in ("size", "seconds"))
        axes.plot(x, y, "o-", color=BLUES[-1], label=f"measured: power {exponent(points):.2f}")
        axes.plot(x, y[-1] * (x / x[-1]) ** DUE[kind], "--", color=FAINT, label=f"power {DUE[kind]:g}")
        as_logs(axes, UNITS[kind], "seconds")
        # A decade at least, or noise would look like growth.
        axes.set(title=kind, ylim=(min(y.min(), y.max() / 10) / 2, y.max() * 2))
        axes.legend(frameon=False, fontsize=8)
    save(figure, path)


def main() -> None:
    parser = make_parser(__doc__, only=list(SIZES), quick=False, output=None)
    options = parser.parse_args()
    lines = [
        {"side": kind, "size": size} | apart(KINDS[kind], size)
        for kind in options.only
        for size in (SIZES[kind][:2] if options.quick else SIZES[kind])
    ]
    report(options, lines, table(lines))
    if options.output:
        draw(lines, Path(options.output))


if __name__ == "__main__":
    main()
