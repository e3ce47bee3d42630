"""Helpers that the benchmarks share: the command line, fresh processes, summaries, memory, the machine."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that is described by the first line of a module's docstring, with the flag ``--json``."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser


def write_json(path: Path | None, content: Any) -> None:
    """Write results to the file that ``--json`` names, if any."""
    if path is not None:
        path.write_text(json.dumps(content, indent=2, default=str) + "\n")


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def run_apart(*words: object, num_threads: int | None = None, **environment: str) -> Any:
    """Run a script in a fresh process; return the JSON in the last line that it prints, or exit with its error."""
    command = [sys.executable, *map(str, words)]
    limits = {f"{name}_NUM_THREADS": str(num_threads) for name in ("OMP", "OPENBLAS") if num_threads}
    answer = subprocess.run(
        command, env=os.environ | environment | limits, capture_output=True, text=True, check=False
    )
    if answer.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{answer.stderr[-2_000:]}")
    return json.loads(answer.stdout.splitlines()[-1])


class Turn(NamedTuple):
    """The seconds of a call, in processor time of this process and on the wall, and its result."""

    cpu_s: float
    wall_s: float
    value: Any


def take_turns(
    sides: Mapping[str, Callable[[], Any]], repeats: int, *, warmup: int = 1
) -> dict[str, list[Turn]]:
    """Call the sides in turn, so that a busy machine is unfair to none; the first ``warmup`` calls do not count."""
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    for _ in range(warmup + repeats):
        for name, side in sides.items():
            cpu, wall = time.process_time(), time.perf_counter()
            value = side()
            turns[name].append(Turn(time.process_time() - cpu, time.perf_counter() - wall, value))
    return {name: own[warmup:] for name, own in turns.items()}


@contextmanager
def repeating(look: Callable[[], None], *, every_s: float = 0.5) -> Iterator[None]:
    """Call a function again and again in a thread, until the context ends."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(every_s):
            look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def private_mb(pid: int) -> float:
    """Return the private memory of a process in MB, without shared libraries and files."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024 / 1e6


def read_status(field: str) -> float:
    """Return a field of /proc/self/status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(field))
    return int(line.split()[1]) / 1024


def summarize(numbers: list[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(numbers), "min": min(numbers), "max": max(numbers)}


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, accelerator, versions and the current load as plain values."""
    return {
        "cpu": _processor(),
        "num_cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
    }


def _processor() -> str:
    listed = Path("/proc/cpuinfo")  # Linux only
    lines = listed.read_text().splitlines() if listed.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()
