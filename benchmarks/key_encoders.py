"""Keys by a pool of actors: accuracy at several ages of the keys, and the time of a step without them.

    python benchmarks/key_encoders.py --data train.parquet ages --output DIR [--ages 3.5 8 64 256] [--seeds 3]
        [--epochs 40] [--encoder small|resnet18|tiny] [--batch-size 256] [--set key.path=value] [--figure FILE]
        [--json FILE]
    python benchmarks/key_encoders.py --data train.parquet pace [--actors 1] [--steps 120] [--repeats 3]
        [--encoder small] [--batch-size 256] [--key-ms MS] [--json FILE]

``ages`` trains MoCo v2 with keys by the workers, and with keys by one actor that gets weights so seldom that their mean
age is as given; finished runs are kept. A run's ages, the fraction of keys that the worker encoded itself and the leakage
of BatchNorm are those that it logged. With BatchNorm the smallest mean age is 3.5: two steps ahead, mixed over four.

``pace`` pins the worker to the first core, and all other processes, the actors among them, to the remaining ones. The
sides take turns. ``step_ms`` is the median of the steps whose keys came from the pool, and ``images_s`` comes from their
mean; ``keys`` is the fraction of the time in which the worker waited for keys or encoded them. With ``--key-ms`` each
actor also sleeps for so many milliseconds in each batch, as if it waited for a device of its own: the table shows how many
such actors one worker needs.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from measuring import Line, add_times, alternate, apart, make_parser, repeating, report, summarize, table
from training_steps import ENCODERS, logged_steps, steps_alone

from raycl.config.overrides import parse_setting

AHEAD, MIXED = 2, 4
WARMUP_STEPS = 10
ENDLESS = 1_000_000


def encoder_settings(name: str) -> dict[str, Any]:
    return {f"encoder.{key}": value for key, value in ENCODERS[name].items()}


def pool_settings(actors: int, *, publish_every: int = 1, ahead: int = AHEAD) -> dict[str, Any]:
    settings = {"location": "actors", "actors": actors, "min_actors": 1, "max_age": ENDLESS}
    settings |= {"ahead": ahead, "publish_every": publish_every}
    return {f"momentum_encoder.{name}": value for name, value in settings.items()}


def publish_every(age: float) -> int:
    """Return how seldom weights must be published for keys of this mean age: they are used for so many steps."""
    return max(1, round(2 * (age - AHEAD - (MIXED - 1) / 2) + 1))


def ages(options: argparse.Namespace) -> None:
    sides: dict[str, dict[str, Any]] = {"workers": {}}
    for age in options.ages:
        sides[f"age {age:g}"] = pool_settings(1, publish_every=publish_every(age))
    lines, curves = [], {}
    for side, settings in sides.items():
        found = []
        for seed in range(options.seeds):
            output = Path(options.output) / f"{side.replace(' ', '-')}-seed-{seed}"
            common = {"seed": seed, "stages.0.epochs": options.epochs, "log_every_steps": 20}
            common |= {"stages.0.batch_size": options.batch_size, "evaluation.k": options.k}
            common |= dict(map(parse_setting, options.set))
            train(output, options.data, encoder_settings(options.encoder) | common | settings)
            found.append(read_run(output))
            curves.setdefault(side, []).append(found[-1].pop("curve"))
        lines.append({"side": side} | {key: summarize([each[key] for each in found]) for key in found[0]})
    titles = {
        "knn": "kNN",
        "age_mean": "mean age",
        "age_max": "oldest",
        "own": "by the worker",
        "leakage": "leakage",
    }
    report(options, lines, table(lines, side="keys", **titles), curves=curves)
    if options.figure is not None:
        draw(curves, Path(options.figure))


def train(output: Path, data: str, settings: dict[str, Any]) -> None:
    """Train or resume a run, unless it has finished."""
    import raycl
    from raycl.records import read_result
    from raycl.storage import Place

    place = Place(str(output))
    exists = (place / "result.json").exists()
    if exists and read_result(place)["status"] == "finished":
        return
    config = raycl.override(raycl.recipe("moco_v2", image_size=32, on_cpu=True), settings)
    raycl.train(config, data=data, output=place.uri, resume=exists, quiet=True)


def read_run(output: Path) -> dict[str, Any]:
    """Return the kNN curve of a run, and means of its logged ages."""
    from raycl.records import read_metrics
    from raycl.storage import Place

    lines = read_metrics(Place(str(output)))
    curve = [(line["samples"], line["knn_top1"]) for line in lines if "knn_top1" in line]
    steps = [line for line in lines if "loss" in line]
    leaks = [line["batchnorm_leakage"] for line in lines if "batchnorm_leakage" in line]

    def mean(key: str) -> float:
        return statistics.fmean([line.get(key, 0.0) for line in steps])

    oldest = max(line.get("key_age_max", 0.0) for line in steps)
    own = mean("own_keys_fraction") if "own_keys_fraction" in steps[-1] else 1.0
    leak = leaks[-1] if leaks else 0.0
    return {
        "knn": curve[-1][1],
        "age_mean": mean("key_age_mean"),
        "age_max": oldest,
        "own": own,
        "leakage": leak,
    } | {"curve": curve}


def draw(curves: dict[str, list[list[tuple[int, float]]]], path: Path) -> None:
    """Draw the median kNN over the seeds against the samples seen."""
    from pictures import panels, save

    figure, (axes,) = panels(1, 1, 6.5, 3.6)
    for side, runs in curves.items():
        accuracies = [
            statistics.median(accuracy)
            for accuracy in zip(*([y for _, y in run] for run in runs), strict=True)
        ]
        axes.plot([x / 1e3 for x, _ in runs[0]], accuracies, marker="o", ms=3, lw=1.2, label=side)
    axes.set(xlabel="thousand samples seen", ylabel="kNN top-1, held-out rows")
    axes.legend(fontsize=8)
    save(figure, path)


def pace(options: argparse.Namespace) -> None:
    chosen = {
        key: value
        for key, value in vars(options).items()
        if key in ("data", "encoder", "batch_size", "steps", "key_ms")
    }
    run: Callable[..., Any] = partial(apart, pinned_steps, chosen)
    sides = {"keys by the worker": partial(run, 0)}
    sides |= {f"keys by {count} actors": partial(run, count) for count in options.actors}
    lines: list[Line] = alternate(sides, options.repeats)
    add_times(lines, lines[0], "step_ms")
    titles = {
        "step_ms": "step, ms",
        "step_ms_times": "times",
        "images_s": "images/s",
        "keys": "keys",
        "own": "by the worker",
        "age": "mean age",
    }
    report(options, lines, table(lines, side="", **titles))


def pinned_steps(options: dict[str, Any], actors: int) -> dict[str, float]:
    """Train a worker on a core of its own; return the time of its steps."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])  # the worker counts its cores when it starts
    settings = steps_alone(argparse.Namespace(**options), workers=1, precision="float32")
    settings |= {"cpus_per_worker": 0.1}
    if options["key_ms"]:
        settings |= {"encoder.name": "tests.cluster.networks:slow_keys"}
        network = ENCODERS[options["encoder"]] | {"image_size": 32}
        settings |= {"encoder.kwargs": network | {"seconds": options["key_ms"] / 1e3}}
    else:
        settings |= encoder_settings(options["encoder"])
    if actors:
        pool = {"momentum_encoder.min_actors": actors, "momentum_encoder.cpus_per_actor": 0.1}
        settings |= pool_settings(actors) | pool
    with repeating(partial(pin, set(cores[:1]), set(cores[1:]) or set(cores))):
        lines = logged_steps("moco_v2", settings, options["data"])
    timed = [
        {"ms": 1e3 * (line["seconds"] - before["seconds"])} | line
        for before, line in zip(lines[WARMUP_STEPS:], lines[WARMUP_STEPS + 1 :], strict=False)
        if not actors or line["own_keys_fraction"] == 0.0
    ]
    own = statistics.fmean(line.get("own_keys_fraction", 1.0) for line in lines)
    if not timed:
        return {**dict.fromkeys(("step_ms", "images_s", "keys"), float("nan")), "own": own, "age": 0.0}
    return {
        "step_ms": statistics.median(line["ms"] for line in timed),
        "images_s": 1e3 * options["batch_size"] / statistics.fmean(line["ms"] for line in timed),
        "keys": statistics.fmean(line["keys_fraction"] for line in timed),
        "own": own,
        "age": statistics.fmean(line.get("key_age_mean", 0.0) for line in timed),
    }


def pin(worker: set[int], others: set[int]) -> None:
    """Pin the threads of the processes that this one started: the trainer's to ``worker``, all others to ``others``."""
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if not folder.name.isdigit() or not is_ours(int(folder.name)):
                continue
            is_worker = (folder / "cmdline").read_bytes().startswith(b"ray::RayTrainWorker")
            cores = worker if is_worker else others
            for thread in (folder / "task").iterdir():
                with suppress(OSError, ValueError):
                    os.sched_setaffinity(int(thread.name), cores)


def is_ours(pid: int) -> bool:
    """Return whether a process descends from this one."""
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if pid == os.getpid():
            return True
    return False


def main() -> None:
    parser = make_parser(
        __doc__,
        data=str,
        output="",
        ages=[3.5, 8.0, 64.0, 256.0],
        seeds=3,
        epochs=40,
        k=200,
        figure=None,
        actors=[1],
        key_ms=0.0,
        steps=120,
        repeats=3,
        encoder="small",
        batch_size=256,
    )
    parser.add_argument("part", choices=("ages", "pace"))
    parser.add_argument("--set", action="append", default=[], help="a setting of all runs, key.path=value")
    options = parser.parse_args()
    if options.part == "ages" and not options.output:
        parser.error("ages needs --output, the folder of its runs")
    ages(options) if options.part == "ages" else pace(options)


if __name__ == "__main__":
    main()
