"""Run raycl on a GPU: tests, profiles, losses of very large batches, rates, and CIFAR-10 beside lightly on the same file.

    python benchmarks/gpu.py --data cifar10 --output gpu [--minutes 9] [--parts tests profile ...] [--before FOLDER] [--quick]

A call takes at most ``--minutes`` and lists the rest; the same command continues there, also in the middle of a
training run. Each part is useful alone; this is their order:

- ``tests``: the tests that are marked ``gpu``.
- ``profile``: time, kernels and waits of a step of ResNet-18 and ResNet-50, and the table of ``torch.profiler``.
- ``loss``: NT-Xent and the loss of CLIP with their gradients, of 32k to 512k rows of 128 numbers, beside the compiled
  plain loss as long as that fits and Inf-CLIP's kernels if they are installed; and the size of a strip of logits.
- ``utilization``: ResNet-50 in bfloat16 with and without ``torch.compile``, as a share of a large matrix product's rate.
- ``data``: images a second of reading, decoding and drawing views, with all cores.
- ``rate``: samples a second of training, beside lightly's way with a DataLoader, and beside an older raycl with
  ``--before FOLDER``, which contains its package: ``git archive REVISION raycl | tar x -C FOLDER``.
- ``simclr``, ``moco_v2``: ResNet-18, batch 512, 200 epochs at the settings of lightly's benchmark (rate 0.06 times
  batch / 128, weight decay 5e-4, kNN with k = 200 and t = 0.1), which published 0.848 and 0.847 at its best epoch on
  the test set; here the last epoch counts. ``lightly_simclr``, ``lightly_moco_v2``: lightly itself on the same file.

``profile``, ``loss``, ``utilization`` and lightly need no Ray. ``--quick`` tries all of it in small, also on a CPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from data_path import images_per_second, write_photos
from gpu_lightly import lightly_rate, train_lightly
from gpu_measures import PROFILED, STRIPS, loss, profile, raycl_rate, settings_of, strips, utilization
from measuring import FOLDER, apart, describe_machine, make_parser, write_json

PUBLISHED = {"simclr": 0.848, "moco_v2": 0.847}
LARGEST_PLAIN = 65_536  # rows; their matrix of float32 takes 16 GiB, and autograd keeps two
SPARE_S = 45.0  # for a checkpoint, and the end of a run

Measure = Callable[[float], dict[str, Any] | None]  # until a deadline; None if it must continue


def tasks(options: argparse.Namespace) -> dict[str, dict[str, Measure]]:
    """Return the measurements of each part, by the names of their results."""
    here = partial(run_apart, options)
    sizes = (256, 512) if options.quick else (32_768, 65_536, 131_072, 262_144, 524_288)
    losses = {
        f"loss-{name}-{side}-{size}": here(loss, name, side, size)
        for size in sizes
        for name, sides in (("nt_xent", ("raycl", "plain")), ("clip", ("raycl", "plain", "inf_clip")))
        for side in sides
        if side != "plain" or size <= LARGEST_PLAIN
    }
    rates: dict[str, Measure] = {}
    for recipe in PUBLISHED:
        rates[f"rate-raycl-{recipe}"] = here(raycl_rate, recipe)
        if options.before:
            rates[f"rate-before-{recipe}"] = here(raycl_rate, recipe, package=options.before)
        rates[f"rate-lightly-{recipe}"] = here(lightly_rate, recipe)
    sides = ("held", "stream", "lightly", "own views", "decoding")
    encoders = ("encoder", "encoder_compiled", "step", "step_compiled")
    return {
        "tests": {"tests": partial(test, options)},
        "profile": {f"profile-{name}": here(profile, name) for name in PROFILED},
        "loss": losses | {f"strips-{size}": here(strips, size) for size in STRIPS},
        "utilization": {f"utilization-{side}": here(utilization, side) for side in encoders},
        "data": {f"data-{side.replace(' ', '_')}": partial(data, side, options) for side in sides},
        "rate": rates,
        **{recipe: {recipe: partial(train, recipe, options)} for recipe in PUBLISHED},
        **{f"lightly_{name}": {f"lightly_{name}": partial(lightly, name, options)} for name in PUBLISHED},
    }


def run_apart(
    options: argparse.Namespace, function: Callable[..., Any], *words: Any, package: Path | None = None
) -> Measure:
    """Measure in a process of its own, whose memory is its own; with an older ``package`` if given."""

    def measure(deadline: float) -> dict[str, Any] | None:
        paths = filter(None, [str(package or FOLDER.parent), os.environ.get("PYTHONPATH")])
        environment = {"PYTHONPATH": os.pathsep.join(paths)}
        left_s = max(1.0, deadline - time.monotonic())
        try:
            return apart(function, vars(options), *words, timeout_s=left_s, environment=environment)
        except subprocess.TimeoutExpired:
            return None

    return measure


def test(options: argparse.Namespace, deadline: float) -> dict[str, Any] | None:
    """Run the tests that are marked ``gpu``; return how many passed, and which failed."""
    report = options.output / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", *(["-x"] if options.quick else [])]
    command += ["tests/test_on_device.py", "tests/test_training_stores.py", f"--junitxml={report.absolute()}"]
    environment = os.environ | ({"RAYCL_GPU_TESTS_ON": "cpu"} if options.quick else {})
    left_s = max(1.0, deadline - time.monotonic())
    try:
        subprocess.run(command, cwd=FOLDER.parent, env=environment, timeout=left_s, check=False)
    except subprocess.TimeoutExpired:
        return None
    suite = next(ET.parse(report).getroot().iter("testsuite"))
    cases = list(suite.iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(bad) - skipped,
        "skipped": skipped,
        "failed": [str(case.get("name")) for case in bad],
        "seconds": float(suite.get("time", 0)),
    }


def data(side: str, options: argparse.Namespace, deadline: float) -> dict[str, Any] | None:
    """Take the rate of one side of ``data_path.py``: photographs of 224 pixels, or in small the file's images."""
    photos = options.output / "photos.parquet"
    if not options.quick and not photos.exists():
        write_photos(photos)
    flags = {"batch_size": 256, "cores": os.cpu_count(), "size": 32 if options.quick else 224}
    flags |= {"data": str(options.data / "train.parquet" if options.quick else photos)}
    flags |= {"seconds": 1.0 if options.quick else 8.0}
    try:
        left_s = max(1.0, deadline - time.monotonic())
        return {"images_per_second": apart(images_per_second, side, flags, timeout_s=left_s)}
    except subprocess.TimeoutExpired:
        return None


def train(recipe: str, options: argparse.Namespace, deadline: float) -> dict[str, Any] | None:
    """Train until the run is over or the time; then judge. None if the run must continue in another call."""
    output, raycl = options.output / "runs" / recipe, [sys.executable, "-m", "raycl"]
    train_set, test_set = (str(options.data / f"{name}.parquet") for name in ("train", "test"))
    settings = settings_of(recipe, options.quick) | {"log_every_steps": 50, "evaluation.every_epochs": 0}
    gpu = ["--gpu"] if settings.pop("gpu") else []
    command = [*raycl, "train", recipe, "--data", train_set, "--output", str(output), *gpu]
    command += ["--steps", "40"] if options.quick else ["--epochs", "200"]
    command += [f"--set={name}={value}" for name, value in settings.items()]
    command += ["--resume"] if (output / "config.yaml").exists() else []
    began = time.monotonic()
    run = subprocess.Popen(command)
    try:
        run.wait(max(1.0, deadline - SPARE_S - time.monotonic()))
    except subprocess.TimeoutExpired:
        stop(run, recipe)
        return None
    if run.returncode:
        sys.exit(f"training {recipe} failed")
    if time.monotonic() > deadline - SPARE_S:
        return None  # --resume of a run that is over only judges
    judge = [*raycl, "evaluate", "knn", "--run", str(output), "--train", train_set, "--test", test_set, *gpu]
    judge += ["--set", "k=200", "--set", "temperature=0.1"]
    judged = subprocess.run(judge, check=True, stdout=subprocess.PIPE, text=True)
    result = json.loads((output / "result.json").read_text())
    return {
        "knn": json.loads(judged.stdout.splitlines()[-1]),
        "published": PUBLISHED[recipe],
        "training_s": result["seconds"],
        "samples_per_second": result["samples_per_second"],
        "last_call_s": time.monotonic() - began,
    }


def stop(run: subprocess.Popen[bytes], recipe: str) -> None:
    """Ask a run to save and end; exit if it did not save."""
    run.send_signal(signal.SIGTERM)
    try:
        status = run.wait(SPARE_S)
    except subprocess.TimeoutExpired:
        run.kill()
        status = run.wait()
    if status != 128 + signal.SIGTERM:
        sys.exit(f"{recipe} did not save when its time was over: its last checkpoint is older")


def lightly(recipe: str, options: argparse.Namespace, deadline: float) -> dict[str, Any] | None:
    return train_lightly(recipe, vars(options), deadline - SPARE_S)


def main() -> None:
    flags: dict[str, Any] = {
        "data": Path,
        "output": Path("gpu"),
        "minutes": 9.0,
        "before": None,
        "quick": False,
    }
    parser = make_parser(__doc__, reports=False, **flags)
    parser.add_argument("--parts", nargs="+", help="without it, all")
    options = parser.parse_args()
    options.before = options.before and Path(options.before)
    parts = tasks(options)
    if unknown := set(options.parts or ()) - parts.keys():
        parser.error(f"unknown --parts {', '.join(unknown)}; choose {', '.join(parts)}")
    options.output.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    for part in options.parts or parts:
        for name, measure in parts[part].items():
            path = options.output / f"{name}.json"
            if path.exists():
                print(f"{name}: there already", flush=True)
            elif time.monotonic() > deadline - SPARE_S:
                print(f"{name}: no time left; call again")
            elif found := measure(deadline):
                write_json(path, found | {"machine": describe_machine()})
                print(f"{name}: {json.dumps(found)}", flush=True)
            else:
                print(f"{name}: begun; call again")


if __name__ == "__main__":
    main()
