"""An hour of training while something is killed every two minutes: goodput by victim, and memory as a picture.

    python benchmarks/soak.py [--minutes 60] [--every 120] [--output docs/images/soak.png]

Starts a Ray of its own and ``jobs/train.py`` as a process of its own: MoCo v2 on scikit-learn's digits, two workers,
streamed data. In turn a node with a worker, a worker, a shard, Ray Train's controller and the reader of the stream
are ended by SIGKILL. A spare node is there; another one joins 45 s after a node was killed. Every five seconds it reads each
process's private memory (``RssAnon``) and the size of Ray's object store. At last the run is asked to stop, and its
surviving processes are counted. It prints the losses by victim: seconds and steps, by the run's own lines of failures.
Beside the picture lies a JSON file of the same name with every number in it.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"  # or Ray writes a token into the home folder
# Ray's head notices a dead node after 3 s instead of 15 s or more.
os.environ |= {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}

import ray
from measuring import FOLDER, describe_machine, make_parser, processes, read_status, write_json
from pictures import FAINT, INK, panels, save

from raycl.demo.digits import write_digits
from raycl.progress import ProgressLine
from raycl.records import FAILURE, read_metrics, read_result
from raycl.storage import Place

# In any environment in which raycl is installed for development.
from tests.cluster import faults
from tests.cluster.faults import Node, kill_process

NODE = "node"
PROCESSES = ("ray::RayTrainWorker", "ray::QueueActor", "ray::TrainController", "ray::_Windows")
VICTIMS = (NODE, *PROCESSES)
KEPT = ("raylet", "gcs_server", "driver", "ray::RunCoordinator")  # what should live for the whole hour
LOOK_S = 5.0
# A new node starts that long after one was killed, since its start takes the CPUs of this machine.
SPARE_AFTER_S = 45.0
NODE_CPUS = 3
SETTINGS = {
    "workers": 2,
    "cpus_per_worker": NODE_CPUS - 0.5,  # a node has room for one worker
    "data.image_size": 16,
    "data.channels": 1,
    "data.cache": "stream",
    # Takes its time over every batch, so that an hour of it leaves room for others.
    "encoder.name": "tests.cluster.networks:slow",
    "encoder.kwargs": '{channels: 1, marker: "/nowhere"}',
    "evaluation.every_epochs": 50,
    "negatives.capacity": 1_024,
    "log_every_steps": 5,
}
Seen = list[tuple[float, float]]  # seconds since the start, MB


@contextmanager
def own_ray() -> Iterator[None]:
    """Start a separate Ray."""
    # A socket's path may have 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="rcl", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            num_cpus=NODE_CPUS + 1,
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
    command = [sys.executable, "jobs/train.py", "moco_v2", "--data", data, "--output", str(folder / "run")]
    command += ["--epochs", "100000", "--batch-size", "128"]
    command += [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, cwd=FOLDER.parent, env=environment, stdout=log, stderr=log)


class Soak:
    """Observations of a run while it loses one process after the other."""

    def __init__(self, run: subprocess.Popen[bytes], nodes: list[Node]) -> None:
        self._nodes, self._next_spare = nodes, float("inf")
        self._run, self._began, self.began = run, time.monotonic(), time.time()
        self.memory: dict[str, Seen] = {}  # by "kind pid"
        self.store: Seen = []
        self.kills: list[tuple[float, str]] = []

    def go_on(self, minutes: float, every_s: float) -> None:
        victims, next_kill = cycle(VICTIMS), every_s
        while self.seconds() < 60 * minutes and self._run.poll() is None:
            now = round(self.seconds(), 1)
            for name, held in self._held_mb():
                self.memory.setdefault(name, []).append((now, round(held, 1)))
            self.store.append((now, round(stored_mb(), 2)))
            if now >= next_kill:
                next_kill += every_s
                title = next(victims)
                with suppress(AssertionError):  # none of them lives just now
                    self._kill(title)
                    self.kills.append((self.seconds(), title.removeprefix("ray::")))
            if now >= self._next_spare:
                self._nodes.append(Node(NODE_CPUS))
                self._next_spare = float("inf")
            time.sleep(LOOK_S)

    def _kill(self, victim: str) -> None:
        if victim != NODE:
            kill_process(victim, timeout_s=60)
            return
        workers = faults.processes("ray::RayTrainWorker")
        lost = next(node for node in self._nodes if any(map(node.has, workers)))
        lost.kill()
        self._nodes.remove(lost)
        self._next_spare = self.seconds() + SPARE_AFTER_S

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def _held_mb(self) -> Iterator[tuple[str, float]]:
        """Yield kind, number and private memory of this Ray's processes and of the driver."""
        session = ray.get_runtime_context().get_session_name()
        for pid, (_, command) in processes().items():
            kind = command.split("(")[0].split(".")[0].split(" ")[0]
            if not kind.startswith("ray::"):
                kind = Path(command.split(" ")[0]).name if session in command else ""
            kind = "driver" if pid == self._run.pid else kind
            held = read_status("RssAnon", pid)
            if held and (kind.startswith("ray::") or kind in KEPT):
                yield f"{kind} {pid}", held

    def by_kind(self, kind: str) -> list[Seen]:
        return [seen for name, seen in self.memory.items() if name.split()[0] == kind]


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


def losses_by_victim(
    kills: list[tuple[float, str]], began: float, output: Place
) -> dict[str, dict[str, Any]]:
    """Return by victim the number of kills and of groups that were lost, and the cost of each group."""
    lost = [line for line in read_metrics(output) if line.get("event") == FAILURE]
    found: dict[str, dict[str, Any]] = {}
    for number, (at, kind) in enumerate(kills):
        until = kills[number + 1][0] if number + 1 < len(kills) else float("inf")
        own = [line for line in lost if at - 1 <= line["time"] - began < until - 1]
        each = found.setdefault(
            kind, {"kills": 0, "groups_lost": 0, "lost_seconds": [], "repeated_steps": []}
        )
        each["kills"] += 1
        each["groups_lost"] += len(own)
        each["lost_seconds"].append(sum(line["lost_seconds"] for line in own))
        each["repeated_steps"].append(sum(line["repeated_steps"] for line in own))
    for each in found.values():
        each |= {f"median_{name}": median(each[name]) for name in ("lost_seconds", "repeated_steps")}
    return found


def draw(soak: Soak, path: Path) -> None:
    """Draw a line for each process that lived for a while, by its kind, and below the object store."""
    figure, (above, below) = panels(2, 1, 8.6, 5.2, sharex=True, height_ratios=[3, 1])
    for number, kind in enumerate((*KEPT, *PROCESSES)):
        lived = [seen for seen in soak.by_kind(kind) if seen[-1][0] - seen[0][0] > 10]
        for index, seen in enumerate(lived):
            label = None if index else kind.removeprefix("ray::").lstrip("_")  # "_" would hide it
            above.plot([at / 60 for at, _ in seen], [mb for _, mb in seen], color=f"C{number}", label=label)
    for at, _ in soak.kills:
        above.axvline(at / 60, color=FAINT, lw=0.6, ls=":")
    above.set(ylabel="own memory of a process, MB", ylim=(0, None))
    above.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.14))
    below.plot([at / 60 for at, _ in soak.store], [mb for _, mb in soak.store], color=INK)
    below.set(xlabel="minutes; dotted: a process was killed", ylabel="object store, MB", ylim=(0, None))
    save(figure, path)


def quarters(soak: Soak) -> dict[str, dict[str, float]]:
    """Return by kind what its processes held in the second quarter of the time and in the last one."""
    end, found = soak.store[-1][0], {}
    for kind in (*KEPT, *PROCESSES):
        seen = [at_mb for each in soak.by_kind(kind) for at_mb in each]
        second = [mb for at, mb in seen if 0.25 <= at / end < 0.5]
        last = [mb for at, mb in seen if at / end >= 0.75]
        if second and last:
            found[kind] = {"second_quarter": median(second), "last_quarter": median(last)}
    return found


def main() -> None:
    options = make_parser(__doc__, reports=False, minutes=60.0, every=120.0, output="soak.png").parse_args()
    picture, total = Path(options.output), round(60 * options.minutes)
    with tempfile.TemporaryDirectory() as folder, own_ray(), ExitStack() as stack:
        output, log = Place(str(Path(folder) / "run")), Path(folder) / "log"
        before, nodes = actors_alive(), [Node(NODE_CPUS), Node(NODE_CPUS)]
        stack.callback(lambda: [node.kill() for node in nodes])
        run = start_run(Path(folder))
        stack.callback(run.kill)
        soak = Soak(run, nodes)

        def progress() -> tuple[int, int, str]:
            return round(soak.seconds()), total, f"seconds, {len(soak.kills)} killed"

        with ProgressLine("soaking", progress):
            soak.go_on(options.minutes, options.every)
        if run.poll() is not None:
            sys.exit(f"the run ended by itself, after {soak.kills} were killed:\n{log.read_text()[-20_000:]}")
        run.send_signal(signal.SIGTERM)
        status = run.wait(180)
        time.sleep(20)
        result: dict[str, Any] = {
            "status": read_result(output)["status"],
            "exit_status": status,
            "steps": [line["step"] for line in read_metrics(output) if "loss" in line][-1],
            "goodput": [line["goodput"] for line in read_metrics(output) if "loss" in line][-1],
            "kills": soak.kills,
            "by_victim": losses_by_victim(soak.kills, soak.began, output),
            "own_memory_mb": quarters(soak),
            "object_store_mb": {"most": max(mb for _, mb in soak.store), "after": stored_mb()},
            "actors_left": [name for name in actors_alive() if name not in before],
        }
        print(json.dumps(result, indent=2))
        result |= {"memory": soak.memory, "store": soak.store, "machine": describe_machine()}
        write_json(picture.with_suffix(".json"), result | {"log": log.read_text()[-20_000:]})
    draw(soak, picture)


if __name__ == "__main__":
    main()
