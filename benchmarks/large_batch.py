"""A batch of 65,536 images on one machine, in chunks; and its loss alone, up to a million columns.

    python benchmarks/large_batch.py --data train.parquet test.parquet [--batch-size 65536] [--steps 2]

The files' images are written to one Parquet file, again from the start until there are enough for a
batch. `raycl train simclr` takes a few steps on it, one worker with all cores, shuffled BatchNorm; the
step's time is the median without the first, the memory the peak of each process of the run. Then the loss
alone, forward and backward, in a process of its own and with as many threads: NT-Xent of that batch,
and InfoNCE of 1,024 queries among 1,048,576 gathered keys, gradient for the keys included.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from measuring import describe_machine, make_parser, read_status, repeating, run_apart, write_json

import raycl
from raycl.losses import info_nce, nt_xent
from raycl.records import read_metrics
from raycl.storage import Place
from raycl.training.process import available_cores, prepare_process

DIM = 128
SLICE, COLUMNS = 1_024, 2**20
WORKER = "train worker"


def write_batch(files: list[str], num_rows: int, folder: Path) -> str:
    """Write so many images into one file; say how many of them are different."""
    table = pa.concat_tables([pq.read_table(file, columns=["image"]) for file in files])
    times = -(-num_rows // len(table))
    print(f"{min(num_rows, len(table)):,} different images in a batch of {num_rows:,}")
    path = folder / "images.parquet"
    pq.write_table(pa.concat_tables([table] * times).slice(0, num_rows), path, row_group_size=1_024)
    return str(path)


def look_at_peaks(mb: dict[str, float]) -> None:
    """Update the peak memory in MB of each kind of process of a run."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_text().split("\0")[0]
            status = (folder / "status").read_text()
        except OSError:
            continue  # it has ended
        if name.startswith("ray::") and "VmHWM" in status:
            peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
            kind = WORKER if "RayTrainWorker" in name else name.removeprefix("ray::").split("(")[0]
            mb[kind] = max(peak, mb.get(kind, 0.0))


def train(data: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Take a few steps; return their time and the memory."""
    config = raycl.override(
        raycl.recipe("simclr", image_size=32),
        {
            "workers": 1,
            "precision": "bfloat16",
            # Groups of a chunk, in random company: exact in chunks without waiting for one another.
            "batchnorm": "shuffled",
            "batchnorm_groups": options.batch_size // options.chunk_size,
            "encoder.name": "resnet10",
            "encoder.stem": "half",
            "encoder.width": 0.5,
            "stages.0.epochs": None,
            "stages.0.steps": options.steps,
            "stages.0.batch_size": options.batch_size,
            "stages.0.chunk_size": options.chunk_size,
            "evaluation.every_epochs": 0,
            "log_every_steps": 1,
        },
    )
    peaks: dict[str, float] = {}
    with repeating(lambda: look_at_peaks(peaks)):
        raycl.train(config, data=data, output=str(folder / "run"), quiet=True)
    lines = [line for line in read_metrics(Place(str(folder / "run"))) if "loss" in line]
    seconds = [after["seconds"] - before["seconds"] for before, after in itertools.pairwise(lines)]
    return {
        "step_s": statistics.median(seconds),
        "samples_per_second": options.batch_size / statistics.median(seconds),
        "data_wait_fraction": statistics.median(line["data_wait_fraction"] for line in lines[1:]),
        "loss": [line["loss"] for line in lines],
        "peak_mb": dict(sorted(peaks.items(), key=lambda each: -each[1])),
    }


def run_loss(name: str, batch_size: int) -> None:
    """Take a loss and its gradient once, and print its cost; runs in a process of its own."""
    prepare_process(available_cores())
    torch.manual_seed(0)
    num_rows = COLUMNS if name == "info_nce" else batch_size
    key = F.normalize(torch.randn(num_rows, DIM), dim=1)
    query = F.normalize(key[: SLICE if name == "info_nce" else num_rows] + 0.05 * torch.randn(DIM), dim=1)
    for rows in (query, key):
        rows.requires_grad_()
    nt_xent(query[:64], key[:64], temperature=0.2).backward()  # libraries and their buffers
    query.grad = key.grad = None
    Path("/proc/self/clear_refs").write_text("5")
    before, start, cpu = read_status("VmRSS"), time.perf_counter(), time.process_time()
    if name == "info_nce":
        loss = info_nce(query, key[:SLICE], temperature=0.2, gathered_key=key)
    else:
        loss = nt_xent(query, key, temperature=0.2)
    loss.backward()
    cost = {"wall_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu, "value": loss.item()}
    print(json.dumps(cost | {"memory_mb": read_status("VmHWM") - before}))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--data", nargs="+", help="Parquet files with an image column")
    parser.add_argument("--batch-size", type=int, default=65_536)
    parser.add_argument("--chunk-size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--loss", choices=["nt_xent", "info_nce"], help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure, print, write the JSON."""
    options = parse_arguments()
    if options.loss:
        run_loss(options.loss, options.batch_size)
        return
    if not options.data:
        sys.exit("give --data: Parquet files with an image column")
    if options.steps < 2:
        sys.exit("give --steps 2 or more: the first step is not counted")
    with tempfile.TemporaryDirectory() as folder:
        data = write_batch(options.data, options.batch_size, Path(folder))
        step = train(data, Path(folder), options)
    print(
        f"a step: {step['step_s']:.1f} s, {step['samples_per_second']:,.0f} samples/s, "
        f"{step['data_wait_fraction']:.1%} of it waiting for data"
    )
    print("peak memory, MB: " + ", ".join(f"{name} {mb:,.0f}" for name, mb in step["peak_mb"].items()))
    losses = {
        name: run_apart(__file__, "--loss", name, "--batch-size", options.batch_size)
        for name in ("nt_xent", "info_nce")
    }
    print(
        f"its loss alone (NT-Xent, {2 * options.batch_size:,} x {DIM}): {losses['nt_xent']['wall_s']:.1f} s, "
        f"{losses['nt_xent']['wall_s'] / step['step_s']:.0%} of the step, {losses['nt_xent']['memory_mb']:,.0f} MB"
    )
    print(
        f"InfoNCE of {SLICE:,} queries among {COLUMNS:,} x {DIM} keys: {losses['info_nce']['wall_s']:.2f} s, "
        f"{losses['info_nce']['memory_mb']:,.0f} MB"
    )
    result = {"machine": describe_machine(), "step": step, "losses": losses}
    write_json(options.json, result)


if __name__ == "__main__":
    main()
