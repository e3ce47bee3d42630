"""From `raycl train` to the first step: seconds until each thing is there, the medians of a few runs.

    python benchmarks/startup.py [--data images.parquet] [--workers 2] [--repeats 5] [--json FILE]

Without ``--data`` on the demo's digits. Each run is the command itself, in a shell of its own, which starts a Ray
of its own. ``accepted``: the run was checked and its output begun. ``worker up``: Ray is up, the rows are read, and
a process that trains is there. ``first forward``: the encoder is asked for the first time. ``first step``: every
worker has made one, and asks for the second. ``end``: the whole command with ten steps and its report. raycl is
compiled beforehand, as an installed package is.
"""

import argparse
import compileall
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import describe_machine, make_parser, summarize, write_json
from torch import Tensor, nn

import raycl
from raycl.demo.digits import write_digits
from raycl.models.image import build_image_encoder
from raycl.storage import Place

STEPS = 10
LOOK_S = 0.1  # a look at all processes takes 2 ms
LONGEST_S = 180.0


class Marking(nn.Module):
    """A small ResNet that writes down when it is asked in training."""

    def __init__(self, *, image_size: int, marks: str) -> None:
        super().__init__()
        self.network = build_image_encoder("resnet10", image_size=image_size, stem="half", width=0.5)
        self._marks = Path(marks)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            with self._marks.open("a") as file:
                file.write(f"{time.time()}\n")
        return self.network(images)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", help="images; by default the demo's digits")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    # As in an installed package: without writable caches every process would compile it again.
    compileall.compile_dir(Path(raycl.__file__).parent, quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        if options.data is None:
            options.data, _ = write_digits(Place(folder))
        runs = [start(options, Path(folder) / f"run-{number}") for number in range(options.repeats)]
    found = {name: summarize([run[name] for run in runs]) for name in runs[0]}
    for name, seconds in found.items():
        print(f"{name:16} {seconds['median']:6.1f} s  ({seconds['min']:.1f} to {seconds['max']:.1f})")
    report = {"seconds": found, "settings": vars(options), "machine": describe_machine()}
    write_json(options.json, report)


def start(options: argparse.Namespace, output: Path) -> dict[str, float]:
    """Run the command; return the seconds after which each thing was there."""
    marks = output.with_suffix(".marks")
    settings = {
        "encoder.name": "startup:Marking",
        "encoder.kwargs": json.dumps({"image_size": 32, "marks": str(marks)}),
        "evaluation.every_epochs": 0,
        "evaluation.num_snapshot_samples": 0,
    }
    command = [str(Path(sys.executable).parent / "raycl"), "train", "simclr", "--data", options.data]
    command += ["--output", str(output), "--workers", str(options.workers), "--steps", str(STEPS)]
    command += ["--batch-size", str(options.batch_size)]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    began = time.time()
    with output.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    found = {
        "accepted": wait(process, output, lambda: (output / "config.yaml").exists()) - began,
        "worker up": wait(process, output, lambda: marks.exists() or has_worker()) - began,
    }
    wait(process, output, lambda: marks.exists() and len(times(marks)) > options.workers)
    steps = times(marks)
    found |= {"first forward": steps[0] - began, "first step": steps[options.workers] - began}
    if process.wait(timeout=LONGEST_S):
        sys.exit(output.with_suffix(".log").read_text())
    return found | {"end": time.time() - began}


def times(marks: Path) -> list[float]:
    return [float(line) for line in marks.read_text().split()]


def has_worker() -> bool:
    """Return whether a process trains, of whatever Ray: there should be no other one here."""
    return any(
        title.startswith("ray::RayTrainWorker") for title in map(title_of, Path("/proc").glob("[0-9]*"))
    )


def title_of(process: Path) -> str:
    try:
        return (process / "cmdline").read_text(errors="replace")
    except OSError:  # it has ended
        return ""


def wait(process: subprocess.Popen[bytes], output: Path, is_so: Callable[[], Any]) -> float:
    """Return when it was so."""
    deadline = time.time() + LONGEST_S
    while not is_so():
        if process.poll() or time.time() > deadline:
            process.kill()
            sys.exit(f"the run did not come to its first step: {output.with_suffix('.log').read_text()}")
        time.sleep(LOOK_S)
    return time.time()


if __name__ == "__main__":
    main()
