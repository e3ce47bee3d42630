"""The harness of all benchmarks: read the command line, alternate sides, run a function apart, print a table, write JSON.

A result is a list of lines: dicts with a ``side``, further words that name the case, and figures. A figure is a
number, or its median, minimum and maximum over repeats.
"""

import argparse
import inspect
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
Line = dict[str, Any]


def make_parser(doc: str | None, *, reports: bool = True, **flags: Any) -> argparse.ArgumentParser:
    """Return a parser with a flag for each keyword, whose value is its default, and ``--json`` if it ``reports``.

    A type stands for a required flag, None for an optional word, False for a switch, a tuple for choices with the
    default first, and a list for several values (of these, if they are words).
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if reports:
        parser.add_argument("--json", type=Path, help="write the results here")
    for name, default in flags.items():
        kind: dict[str, Any] = {"default": default, "type": type(default)}  # a number, a word, a path
        if isinstance(default, type):
            kind = {"type": default, "required": True}
        elif default is None:
            kind = {}
        elif default is False:
            kind = {"action": "store_true"}
        elif isinstance(default, tuple):
            kind = {"choices": default, "default": default[0]}
        elif isinstance(default, list):
            kind = {"nargs": "+", "default": default, "type": type(default[0])}
            kind |= {"choices": default} if isinstance(default[0], str) else {}
        parser.add_argument(f"--{name.replace('_', '-')}", **kind)
    return parser


def report(options: argparse.Namespace, lines: Sequence[Line], text: str, **more: Any) -> None:
    """Print the table, and write lines, settings and machine to the file that ``--json`` names, if any."""
    print(text, flush=True)
    if options.json is not None:
        content = {"machine": describe_machine(), "settings": vars(options), "lines": lines} | more
        write_json(options.json, content)


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def table(lines: Sequence[Line], **titles: str) -> str:
    """Return lines as a table: the titles of its columns, by key of a line."""
    return markdown_table(
        list(titles.values()), [[write_figure(line.get(key, "-")) for key in titles] for line in lines]
    )


def write_figure(figure: Any) -> str:
    """Write three digits of a number, or all before the point; minimum and maximum in parentheses."""
    if isinstance(figure, Mapping):
        median, least, most = (write_figure(figure[name]) for name in ("median", "min", "max"))
        return median if least == most else f"{median} ({least}-{most})"
    if isinstance(figure, float | int):
        return f"{figure:,.0f}" if abs(figure) >= 100 or isinstance(figure, int) else f"{figure:.3g}"
    return "-" if figure is None else str(figure)


def summarize(numbers: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(numbers), "min": min(numbers), "max": max(numbers)}


def middle(figure: Any) -> float:
    """Return the median of a figure."""
    return figure["median"] if isinstance(figure, Mapping) else figure


def add_times(lines: Sequence[Line], first: Line, *keys: str) -> None:
    """Add ``KEY_times`` to lines: how many times a figure is that of ``first``."""
    for line in lines:
        if "skipped" not in line:
            line |= {f"{key}_times": middle(line[key]) / middle(first[key]) for key in keys}


def alternate(
    sides: Mapping[str, Callable[[], Mapping[str, float]]], repeats: int, *, warmup: int = 0
) -> list[Line]:
    """Call the sides in turn, so that a busy machine is unfair to none; return a line for each.

    A side returns figures, which are summarized; its first ``warmup`` calls do not count.
    """
    turns = [{side: call() for side, call in sides.items()} for _ in range(warmup + repeats)][warmup:]
    return [
        {"side": side} | {key: summarize([turn[side][key] for turn in turns]) for key in turns[0][side]}
        for side in sides
    ]


def timed(call: Callable[[], Any]) -> Callable[[], dict[str, float]]:
    """Return a side that takes the milliseconds of a call: CPU time of this process, and on the wall."""

    def side() -> dict[str, float]:
        cpu, wall = time.process_time(), time.perf_counter()
        call()
        return {
            "cpu_ms": 1e3 * (time.process_time() - cpu),
            "wall_ms": 1e3 * (time.perf_counter() - wall),
        }

    return side


def cost(work: Callable[[], Any]) -> dict[str, float]:
    """Do work once; return its seconds, and the peak of this process's memory above that before."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before, cpu, wall = read_status("VmRSS"), time.process_time(), time.perf_counter()
    work()
    seconds = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
    return seconds | {"memory_mb": read_status("VmHWM") - before}


def apart(
    function: Callable[..., Any],
    *arguments: Any,
    num_threads: int | None = None,
    timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Call a function of a script in a fresh process; arguments and result travel as JSON. Exit with its error.

    Raises ``subprocess.TimeoutExpired`` after ``timeout_s``.
    """
    module, name = Path(inspect.getfile(function)).stem, function.__name__
    code = (
        f"import json, sys; from {module} import {name}; print(json.dumps({name}(*json.loads(sys.argv[1]))))"
    )
    limits = {f"{kind}_NUM_THREADS": str(num_threads) for kind in ("OMP", "OPENBLAS") if num_threads}
    variables = os.environ | (environment or {}) | limits
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), variables.get("PYTHONPATH")]))
    began = time.monotonic()
    answer = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments, default=str)],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    words = " ".join(str(each) for each in arguments if isinstance(each, str | int))
    if answer.returncode:
        sys.exit(f"{module}.{name} {words} failed:\n{answer.stderr[-3_000:]}")
    print(f"{module}.{name} {words}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return json.loads(answer.stdout.splitlines()[-1])


def in_workers(function: Callable[..., Any], num_workers: int, *arguments: Any) -> list[Any]:
    """Call a function with its rank in so many fresh processes at once; return the results by rank."""
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        calls = [pool.submit(function, rank, *arguments) for rank in range(num_workers)]
        return [call.result() for call in calls]


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


def read_status(field: str, pid: int | str = "self") -> float:
    """Return a field of a process's status, in MB; 0 if the process or the field is gone."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), 0.0)
    return 0.0


def processes() -> dict[int, tuple[int, str]]:
    """Return the parent and the command line of all processes, by their number."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            command = (folder / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            found[int(folder.name)] = int(parent), command
    return found


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
