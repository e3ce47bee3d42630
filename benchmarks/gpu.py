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
from pathlib import Path
from typing import Any

from gpu_lightly import lightly_rate, train_lightly
from gpu_measures import PROFILED, STRIPS, loss, profile, raycl_rate, settings_of, strips, utilization
from measuring import describe_machine

ROOT = Path(__file__).parent.parent
PUBLISHED = {"simclr": 0.848, "moco_v2": 0.847}
LARGEST_PLAIN = 65_536  # rows; their matrix of float32 takes 16 GiB, and autograd keeps two
SPARE_S = 45.0  # for a checkpoint, and the end of a run

Measure = Callable[[float], dict[str, Any] | None]


def main() -> None:
    options = read_options()
    if options.one is not None:
        print(json.dumps(ONES[options.one[0]](options, *options.one[1:])))
        return
    options.output.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    for part in options.parts:
        for name, measure in tasks(part, options).items():
            path = options.output / f"{name}.json"
            if path.exists():
                print(f"{name}: there already", flush=True)
            elif time.monotonic() > deadline - SPARE_S:
                print(f"{name}: no time left; call again")
            elif found := measure(deadline):
                path.write_text(json.dumps(found | {"machine": describe_machine()}, indent=2) + "\n")
                print(f"{name}: {json.dumps(found)}", flush=True)
            else:
                print(f"{name}: begun; call again")


def tasks(part: str, options: argparse.Namespace) -> dict[str, Measure]:
    """Return the steps of a part, by the names of their results."""
    return TASKS[part](options)


def loss_tasks(options: argparse.Namespace) -> dict[str, Measure]:
    sizes = (256, 512) if options.quick else (32_768, 65_536, 131_072, 262_144, 524_288)
    cells = [
        (name, side, size)
        for size in sizes
        for name, sides in (("nt_xent", ("raycl", "plain")), ("clip", ("raycl", "plain", "inf_clip")))
        for side in sides
        if side != "plain" or size <= LARGEST_PLAIN
    ]
    found = {
        f"loss-{name}-{side}-{size}": apart(options, "loss", name, side, str(size))
        for name, side, size in cells
    }
    return found | {f"strips-{size}": apart(options, "strips", str(size)) for size in STRIPS}


def rate_tasks(options: argparse.Namespace) -> dict[str, Measure]:
    sides = ["raycl", *(["before"] if options.before else []), "lightly"]
    return {
        f"rate-{side}-{recipe}": apart(
            options,
            "lightly_rate" if side == "lightly" else "raycl_rate",
            recipe,
            before=side == "before",
        )
        for recipe in PUBLISHED
        for side in sides
    }


def data_tasks(options: argparse.Namespace) -> dict[str, Measure]:
    sides = ("held", "stream", "lightly", "own views", "decoding")
    return {
        f"data-{side.replace(' ', '_')}": lambda deadline, side=side: data(side, options, deadline)
        for side in sides
    }


def apart(options: argparse.Namespace, *one: str, before: bool = False) -> Measure:
    """Measure in a process of its own, whose memory is its own; with the older package if ``before``."""

    def measure(deadline: float) -> dict[str, Any] | None:
        command = [sys.executable, __file__, "--one", *one, "--data", str(options.data)]
        command += ["--output", str(options.output), *(["--quick"] if options.quick else [])]
        package = [str(options.before)] if before else [str(ROOT)]
        output = run_until(deadline, command, package)
        return None if output is None else json.loads(output.splitlines()[-1])

    return measure


def run_until(deadline: float, command: list[str], packages: list[str]) -> str | None:
    """Return a command's output, or None if its time was over before; packages are found in these folders first."""
    paths = [*packages, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        return subprocess.run(
            command,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=max(1.0, deadline - time.monotonic()),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        ).stdout
    except subprocess.TimeoutExpired:
        return None


def test(options: argparse.Namespace, deadline: float) -> dict[str, Any] | None:
    """Run the tests that are marked ``gpu``; return how many passed, and which failed."""
    report = options.output / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-x" if options.quick else "-q"]
    command += ["tests/test_on_device.py", "tests/test_training_stores.py", f"--junitxml={report.absolute()}"]
    if options.quick:
        os.environ["RAYCL_GPU_TESTS_ON"] = "cpu"
    try:
        subprocess.run(command, cwd=ROOT, timeout=max(1.0, deadline - time.monotonic()), check=False)
    except subprocess.TimeoutExpired:
        return None
    suite = next(ET.parse(report).getroot().iter("testsuite"))
    cases = list(suite.iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return {
        "passed": len(cases) - len(bad) - len(skipped),
        "skipped": len(skipped),
        "failed": [str(case.get("name")) for case in bad],
        "seconds": float(suite.get("time", 0)),
    }


def data(side: str, options: argparse.Namespace, deadline: float) -> dict[str, Any] | None:
    """Take the rate of one side of ``data_path.py``."""
    result = options.output / "data_path.json"
    seconds, size = (1, 32) if options.quick else (8, 224)
    command = [sys.executable, str(Path(__file__).parent / "data_path.py"), "--sides", side, "--repeats", "1"]
    command += [
        "--size",
        str(size),
        "--seconds",
        str(seconds),
        "--cores",
        str(os.cpu_count()),
        "--json",
        str(result),
    ]
    if options.quick:
        command += ["--data", str(options.data / "train.parquet")]
    if run_until(deadline, command, [str(ROOT)]) is None:
        return None
    return {"images_per_second": json.loads(result.read_text())["medians"][side]}


def train(recipe: str, options: argparse.Namespace, deadline: float) -> dict[str, Any] | None:
    """Train until the run is over or the time; then judge. None if the run must continue in another call."""
    output = options.output / "runs" / recipe
    train_set, test_set = (str(options.data / f"{name}.parquet") for name in ("train", "test"))
    settings = settings_of(recipe, options.quick) | {"log_every_steps": 50, "evaluation.every_epochs": 0}
    command = [*raycl("train", recipe), "--data", train_set, "--output", str(output)]
    command += ["--steps", "40"] if options.quick else ["--epochs", "200"]
    command += [f"--set={name}={value}" for name, value in settings.items() if name != "gpu"]
    gpu = ["--gpu"] if settings["gpu"] else []
    resume = ["--resume"] if (output / "config.yaml").exists() else []
    began = time.monotonic()
    run = subprocess.Popen([*command, *gpu, *resume])
    try:
        run.wait(max(1.0, deadline - SPARE_S - time.monotonic()))
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGTERM)  # it saves first
        try:
            status = run.wait(SPARE_S)
        except subprocess.TimeoutExpired:
            run.kill()
            status = run.wait()
        if status != 128 + signal.SIGTERM:
            sys.exit(f"{recipe} did not save when its time was over: its last checkpoint is older")
        return None
    if run.returncode:
        sys.exit(f"training {recipe} failed")
    if time.monotonic() > deadline - SPARE_S:
        return None  # --resume of a run that is over only judges
    judge = [*raycl("evaluate", "knn"), "--run", str(output), "--train", train_set, "--test", test_set, *gpu]
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


def raycl(*words: str) -> list[str]:
    return [sys.executable, "-m", "raycl", *words]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.parquet and test.parquet")
    parser.add_argument("--output", type=Path, default=Path("gpu"), help="folder of results and runs")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call")
    parser.add_argument("--parts", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--before", type=Path, help="folder with an older package, for rate")
    parser.add_argument("--quick", action="store_true", help="small sizes, also without a GPU")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


TASKS: dict[str, Callable[[argparse.Namespace], dict[str, Measure]]] = {
    "tests": lambda options: {"tests": lambda deadline: test(options, deadline)},
    "profile": lambda options: {f"profile-{name}": apart(options, "profile", name) for name in PROFILED},
    "loss": loss_tasks,
    "utilization": lambda options: {
        f"utilization-{side}": apart(options, "utilization", side)
        for side in ("encoder", "encoder_compiled", "step", "step_compiled")
    },
    "data": data_tasks,
    "rate": rate_tasks,
    **{
        recipe: lambda options, recipe=recipe: {recipe: lambda deadline: train(recipe, options, deadline)}
        for recipe in PUBLISHED
    },
    **{
        f"lightly_{recipe}": lambda options, recipe=recipe: {
            f"lightly_{recipe}": lambda deadline: train_lightly(recipe, options, deadline - SPARE_S)
        }
        for recipe in PUBLISHED
    },
}
ONES = {
    "loss": loss,
    "strips": strips,
    "profile": profile,
    "utilization": utilization,
    "raycl_rate": raycl_rate,
    "lightly_rate": lightly_rate,
}

if __name__ == "__main__":
    main()
