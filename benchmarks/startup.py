"""From `raycl train` to the first step: seconds until each thing is there, the medians of a few runs.

    python benchmarks/startup.py [--data images.parquet] [--workers 2] [--batch-size 256] [--repeats 5] [--json FILE]

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

from measuring import FOLDER, make_parser, processes, report, summarize, table
from torch import Tensor, nn

import raycl
from raycl.models.image import build_image_encoder
from raycl.storage import Place

LOOK_S = 0.1  # a look at all processes takes some milliseconds
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


def start(options: argparse.Namespace, output: Path) -> dict[str, float]:
    """Run the command; return the seconds after which each thing was there."""
    marks, log = output.with_suffix(".marks"), output.with_suffix(".log")
    network = json.dumps({"image_size": 32, "marks": str(marks)})
    command = [str(Path(sys.executable).parent / "raycl"), "train", "simclr", "--data", options.data]
    command += ["--output", str(output), "--workers", str(options.workers), "--steps", "10"]
    command += ["--batch-size", str(options.batch_size), "--set", "encoder.name=startup:Marking"]
    command += ["--set", f"encoder.kwargs={network}", "--set", "evaluation.every_epochs=0"]
    command += ["--set", "evaluation.num_snapshot_samples=0"]
    began = time.time()
    with log.open("w") as file:
        environment = os.environ | {"PYTHONPATH": str(FOLDER)}
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)

    def seconds_until(is_so: Callable[[], Any]) -> float:
        while not is_so():
            if process.poll() or time.time() > began + LONGEST_S:
                process.kill()
                sys.exit(f"the run did not come to its first step: {log.read_text()}")
            time.sleep(LOOK_S)
        return time.time() - began

    def times() -> list[float]:
        return [float(line) - began for line in marks.read_text().split()] if marks.exists() else []

    found = {
        "accepted": seconds_until(lambda: (output / "config.yaml").exists()),
        "worker up": seconds_until(lambda: marks.exists() or has_worker()),
    }
    seconds_until(lambda: len(times()) > options.workers)
    found |= {"first forward": times()[0], "first step": times()[options.workers]}
    if process.wait(timeout=LONGEST_S):
        sys.exit(log.read_text())
    return found | {"end": time.time() - began}


def has_worker() -> bool:
    """Return whether a process trains, of whatever Ray: there should be no other one here."""
    return any(command.startswith("ray::RayTrainWorker") for _, command in processes().values())


def main() -> None:
    options = make_parser(__doc__, data=None, workers=2, batch_size=256, repeats=5).parse_args()
    # As in an installed package: without writable caches every process would compile it again.
    compileall.compile_dir(Path(raycl.__file__).parent, quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        if options.data is None:
            # Not in the driver and the workers, which import Marking.
            from raycl.demo.digits import write_digits

            options.data, _ = write_digits(Place(folder))
        runs = [start(options, Path(folder) / f"run-{number}") for number in range(options.repeats)]
    lines = [{"side": side, "seconds": summarize([run[side] for run in runs])} for side in runs[0]]
    report(options, lines, table(lines, side="", seconds="seconds"))


if __name__ == "__main__":
    main()
