"""An hour of training while something is killed every two minutes: the memory of every process, as a picture.

    python benchmarks/soak.py [--minutes 60] [--every 120] [--output docs/images/soak.png]

Starts a Ray of its own and ``jobs/train.py`` as a process of its own: MoCo v2 on scikit-learn's digits, two workers,
streamed data. In turn a worker, a shard, Ray Train's controller and a task that reads
are ended by SIGKILL. Every five seconds it reads each process's private memory (``RssAnon``) and the size of
Ray's object store. At last the run is asked to stop, and its surviving processes are
counted. Beside the picture lies a JSON file of the same name with every number in it.
"""

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"  # or Ray writes a token into the home folder

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import ray
from measuring import describe_machine

from raycl.demo.digits import write_digits
from raycl.progress import ProgressLine
from raycl.records import read_metrics, read_result
from raycl.storage import Place

# In any environment in which raycl is installed for development.
from tests.cluster.faults import kill_process, processes

ROOT = Path(__file__).parent.parent
VICTIMS = ("ray::RayTrainWorker", "ray::BankActor", "ray::TrainController", "ray::MapBatches")
KEPT = ("raylet", "gcs_server", "driver", "ray::RunCoordinator")  # what should live for the whole hour
LOOK_S = 5.0
SETTINGS = {
    "workers": 2,
    "cpus_per_worker": 0.5,
    "data.image_size": 16,
    "data.channels": 1,
    "data.cache": "stream",
    # Takes its time over every batch, so that an hour of it leaves room for others.
    "encoder.name": "tests.cluster.networks:slow",
    "encoder.kwargs": '{channels: 1, marker: "/nowhere"}',
    "evaluation.every_epochs": 50,
    "checkpoints.interval_s": 20,
    "negatives.capacity": 1_024,
    "log_every_steps": 5,
}


@contextmanager
def own_ray() -> Iterator[None]:
    """Start a separate Ray."""
    # A socket's path may have 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="rcl", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            _temp_dir=folder,
            object_store_memory=300 * 2**20,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        yield
        ray.shutdown()


def start_run(folder: Path) -> subprocess.Popen[bytes]:
    """Start a run of several days."""
    data, _ = write_digits(Place(str(folder / "digits")))
    flags = ["--data", data, "--output", str(folder / "run"), "--epochs", "100000", "--batch-size", "128"]
    flags += [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    address = ray.get_runtime_context().gcs_address
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "jobs/train.py", "moco_v2", *flags],
            cwd=ROOT,
            env=os.environ | {"RAY_ADDRESS": address},
            stdout=log,
            stderr=log,
        )


class Soak:
    """Observations of a run while it loses one process after the other."""

    def __init__(self, run: subprocess.Popen[bytes], output: Place) -> None:
        self._run, self._output, self._began = run, output, time.monotonic()
        self.memory: dict[str, list[tuple[float, float]]] = defaultdict(list)  # by "title pid"
        self.store: list[tuple[float, float]] = []
        self.kills: list[tuple[float, str]] = []

    def go_on(self, minutes: float, every_s: float) -> None:
        victims, next_kill = cycle(VICTIMS), every_s
        while self.seconds() < 60 * minutes and self._run.poll() is None:
            self._look()
            if self.seconds() >= next_kill:
                next_kill += every_s
                title = next(victims)
                with suppress(AssertionError):  # none of them lives just now
                    kill_process(title, timeout_s=60)
                    self.kills.append((self.seconds(), title.removeprefix("ray::")))
            time.sleep(LOOK_S)

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def _look(self) -> None:
        now = self.seconds()
        for title, pid in self._processes():
            if held := private_mb(pid):
                self.memory[f"{title} {pid}"].append((round(now, 1), round(held, 1)))
        self.store.append((round(now, 1), round(stored_mb(), 2)))

    def _processes(self) -> Iterator[tuple[str, int]]:
        yield "driver", self._run.pid
        for pid in processes("ray::"):
            with suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[0].strip()
                yield title.split("(")[0].split(".")[0], pid
        session = ray.get_runtime_context().get_session_name()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                line = (folder / "cmdline").read_bytes().decode(errors="replace")
                if session in line:
                    for name in ("raylet", "gcs_server"):
                        if line.split("\0")[0].endswith(f"/{name}"):
                            yield name, int(folder.name)


def private_mb(pid: int) -> float:
    """Return the private memory of a process, 0 if it is gone."""
    with suppress(OSError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) / 1024
    return 0.0


def stored_mb() -> float:
    """Return what Ray's object store holds."""
    from ray._private.internal_api import memory_summary

    lines = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True).splitlines()
    line = next((line for line in lines if line.startswith("Plasma memory usage")), "a a a 0 MiB")
    return float(line.split()[3])


def actors_alive() -> list[str]:
    """Return the classes of the actors that are alive."""
    from ray._private.state import actors

    return sorted(actor["ActorClassName"] for actor in actors().values() if actor["State"] == "ALIVE")


def draw(soak: Soak, path: Path) -> None:
    """Draw a line for each process that lived for a minute, by its kind, and below the object store."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8.6, 5.2), dpi=110, sharex=True, layout="constrained", height_ratios=[3, 1]
    )
    kinds = [*dict.fromkeys(name.split()[0] for name in soak.memory)]
    shown = [kind for kind in kinds if kind in KEPT or kind in VICTIMS]
    for number, kind in enumerate(shown):
        label = kind.removeprefix("ray::")
        for name, seen in soak.memory.items():
            if name.split()[0] == kind and seen[-1][0] - seen[0][0] > 10:
                times, held = zip(*seen, strict=True)
                above.plot([at / 60 for at in times], held, color=f"C{number}", lw=1.3, label=label)
                label = None
    for at, _ in soak.kills:
        above.axvline(at / 60, color="#999999", lw=0.6, ls=":")
    above.set(ylabel="own memory of a process, MB", ylim=(0, None))
    above.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.14))
    times, held = zip(*soak.store, strict=True)
    below.plot([at / 60 for at in times], held, color="#444444", lw=1.2)
    below.set(xlabel="minutes; dotted: a process was killed", ylabel="object store, MB", ylim=(0, None))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def summarize(soak: Soak) -> dict[str, dict[str, float]]:
    """Return by kind what its processes held in the second quarter of the time and in the last one."""
    end = soak.store[-1][0]
    found: dict[str, dict[str, float]] = {}
    for kind in (*KEPT, *VICTIMS):
        seen = [at_held for name, each in soak.memory.items() if name.split()[0] == kind for at_held in each]
        quarters = [
            [held for at, held in seen if since <= at / end < until]
            for since, until in ((0.25, 0.5), (0.75, 1))
        ]
        if all(quarters):
            found[kind] = {"second_quarter": median(quarters[0]), "last_quarter": median(quarters[1])}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=120.0, help="seconds from one death to the next")
    parser.add_argument("--output", type=Path, default=Path("soak.png"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, own_ray(), ExitStack() as stack:
        output = Place(str(Path(folder) / "run"))
        before = actors_alive()
        run = start_run(Path(folder))
        stack.callback(run.kill)
        soak = Soak(run, output)
        total = round(60 * options.minutes)
        with ProgressLine(
            "soaking", lambda: (round(soak.seconds()), total, f"seconds, {len(soak.kills)} killed")
        ):
            soak.go_on(options.minutes, options.every)
        if run.poll() is not None:
            log = options.output.with_suffix(".log")
            log.write_text((Path(folder) / "log").read_text())
            raise RuntimeError(f"the run ended by itself: see {log}; killed were {soak.kills}")
        run.send_signal(signal.SIGTERM)
        status = run.wait(180)
        time.sleep(20)
        lines = [line for line in read_metrics(output) if "loss" in line]
        result: dict[str, Any] = {
            "status": read_result(output)["status"],
            "exit_status": status,
            "steps": lines[-1]["step"],
            "kills": soak.kills,
            "own_memory_mb": summarize(soak),
            "object_store_mb": {"most": max(held for _, held in soak.store), "after": stored_mb()},
            "actors_left": [name for name in actors_alive() if name not in before],
        }
        log = (Path(folder) / "log").read_text()
    draw(soak, options.output)
    print(json.dumps(result, indent=2))
    result |= {
        "memory": soak.memory,
        "store": soak.store,
        "machine": describe_machine(),
        "log": log[-20_000:],
    }
    options.output.with_suffix(".json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
