"""A batch of 65,536 images on one machine, in chunks; and its loss alone, up to a million columns.

    python benchmarks/large_batch.py --data train.parquet test.parquet [--batch-size 65536] [--chunk-size 512]
        [--steps 2] [--json FILE]

The files' images are written to one Parquet file, again from the start until there are enough for a
batch. `raycl train simclr` takes a few steps on it, one worker with all cores, shuffled BatchNorm; the
step's time is the median without the first, the memory the peak of the process that trains. Then the loss
alone, forward and backward, in a process of its own and with as many threads: NT-Xent of that batch,
and InfoNCE of 1,024 queries among 1,048,576 gathered keys, gradient for the keys included.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from loss import build_step
from measuring import Line, apart, cost, make_parser, processes, read_status, repeating, report, table
from training_steps import SMALL, logged_steps, steps_alone

from raycl.gpus import available_cores
from raycl.losses import info_nce
from raycl.training.process import prepare_process

DIM = 128
SLICE, COLUMNS = 1_024, 2**20


def write_batch(files: list[str], num_rows: int, folder: Path) -> str:
    """Write so many images into one file; say how many of them are different."""
    images = pa.concat_tables([pq.read_table(file, columns=["image"]) for file in files])
    times = -(-num_rows // len(images))
    print(f"{min(num_rows, len(images)):,} different images in a batch of {num_rows:,}")
    path = folder / "images.parquet"
    pq.write_table(pa.concat_tables([images] * times).slice(0, num_rows), path, row_group_size=1_024)
    return str(path)


def train(data: str, options: argparse.Namespace) -> Line:
    """Take a few steps; return their time and the worker's memory."""
    settings = steps_alone(options, workers=1, precision="bfloat16") | SMALL
    # Groups of a chunk, in random company: exact in chunks without waiting for one another.
    settings |= {"batchnorm": "shuffled", "batchnorm_groups": options.batch_size // options.chunk_size}
    peaks: list[float] = []

    def look() -> None:
        workers = [pid for pid, (_, command) in processes().items() if "RayTrainWorker" in command]
        peaks.extend(read_status("VmHWM", pid) for pid in workers)

    with repeating(look):
        steps = logged_steps("simclr", settings | {"stages.0.chunk_size": options.chunk_size}, data)
    seconds = statistics.median(
        after["seconds"] - before["seconds"] for before, after in itertools.pairwise(steps)
    )
    waits = statistics.median(line["data_wait_fraction"] for line in steps[1:])
    return {
        "side": "training",
        "wall_s": seconds,
        "samples_per_second": options.batch_size / seconds,
        "memory_mb": max(peaks),
        "value": steps[-1]["loss"],
        "data_wait_fraction": waits,
    }


def loss(name: str, batch_size: int) -> Line:
    """Take a loss and its gradient once; libraries and their buffers are there before."""
    prepare_process(available_cores())
    build_step("nt_xent", "raycl", 64, DIM, 0)()
    step = build_step("nt_xent", "raycl", batch_size, DIM, 0) if name == "nt_xent" else gathered_step()
    values: list[float] = []
    found = cost(lambda: values.append(step()))
    return {"side": name} | found | {"value": values[0]}


def gathered_step() -> Callable[[], float]:
    """Return what takes InfoNCE of a slice of queries among a million gathered keys, gradient for these included."""
    torch.manual_seed(0)
    key = F.normalize(torch.randn(COLUMNS, DIM), dim=1).requires_grad_()
    query = F.normalize(key.detach()[:SLICE] + 0.05 * torch.randn(DIM), dim=1).requires_grad_()

    def step() -> float:
        value = info_nce(query, key[:SLICE], temperature=0.2, gathered_key=key)
        value.backward()
        return value.item()

    return step


def main() -> None:
    parser = make_parser(__doc__, batch_size=65_536, chunk_size=512, steps=2)
    parser.add_argument("--data", nargs="+", required=True)
    options = parser.parse_args()
    if options.steps < 2:
        sys.exit("give --steps 2 or more: the first step is not counted")
    with tempfile.TemporaryDirectory() as folder:
        lines = [train(write_batch(options.data, options.batch_size, Path(folder)), options)]
    lines += [apart(loss, name, options.batch_size) for name in ("nt_xent", "info_nce")]
    titles = {"wall_s": "wall s", "cpu_s": "CPU s", "memory_mb": "MB", "samples_per_second": "samples/s"}
    report(options, lines, table(lines, side="", **titles, data_wait_fraction="waits for data", value="loss"))


if __name__ == "__main__":
    main()
