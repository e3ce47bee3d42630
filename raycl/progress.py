"""The live progress line, read from the coordinator while the driver waits."""

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Self, final

import ray
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from raycl.display import progress_html

Reading = Callable[[], tuple[int, int, str] | None]
Notices = Callable[[], list[str]]

POLL_S = 0.5
LINE_EVERY_S = 15.0
PACE_OVER_S = 10.0
WAITING_S = 90.0  # a group of workers starts in less


@final
class ProgressLine:
    """Show progress: a bar on a terminal or in a notebook, and periodic lines in a log.

    ``read`` returns (done, total, text), or None before the first progress. ``notices`` returns all
    notices so far; each is printed once.
    """

    def __init__(self, title: str, read: Reading, *, notices: Notices = list, quiet: bool = False) -> None:
        self._title, self._read, self._notices, self._quiet = title, read, notices, quiet
        self._num_printed = 0
        self._console = Console(stderr=True)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if not self._quiet:
            self._thread.join()

    def _watch(self) -> None:
        with self._open_display() as show:
            while True:
                is_last = self._stopped.is_set()
                notices = self._notices()[self._num_printed :]
                self._num_printed += len(notices)
                for notice in notices:  # above the bar, since rich redirects stderr
                    print(notice, file=sys.stderr, flush=True)
                if seen := self._read():
                    show(*seen, is_last)
                if is_last:
                    return
                self._stopped.wait(POLL_S)

    def _open_display(self) -> contextlib.AbstractContextManager["Show"]:
        if self._console.is_jupyter:
            return contextlib.nullcontext(_show_in_notebook(self._title))
        if self._console.is_terminal:
            return _open_bar(self._title, self._console)
        return contextlib.nullcontext(_print_periodically(self._title))


Show = Callable[[int, int, str, bool], object]  # shows done, total and text; whether they are the last


@contextlib.contextmanager
def _open_bar(title: str, console: Console) -> Iterator[Show]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        tasks: list[TaskID] = []

        def show(done: int, total: int, text: str, is_last: bool) -> None:
            if not tasks:
                tasks.append(bar.add_task(title, total=total, text=text))
            bar.update(tasks[0], completed=done, total=total, text=text)

        yield show


def _show_in_notebook(title: str) -> Show:
    # rich needs ipywidgets for a live bar; IPython can replace displayed HTML without it.
    from IPython import display

    place: Any = display.display(display.HTML(""), display_id=True)

    def show(done: int, total: int, text: str, is_last: bool) -> None:
        place.update(display.HTML(progress_html(title, done, total, text)))

    return show


def _print_periodically(title: str) -> Show:
    printed_at, printed = 0.0, ""

    def show(done: int, total: int, text: str, is_last: bool) -> None:
        nonlocal printed_at, printed
        line = f"{title} {done:,}/{total:,}  {text}"
        if line != printed and (is_last or time.monotonic() - printed_at > LINE_EVERY_S):
            print(line, file=sys.stderr, flush=True)
            printed_at, printed = time.monotonic(), line

    return show


@final
class Pace:
    """Samples per second over about the last ten seconds, or over the last step if it took longer."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()  # (time, samples), only where samples changed

    def at(self, samples: int, now: float) -> float | None:
        """Return the pace after this number of samples of the run; None before the second step."""
        if self._seen and samples < self._seen[-1][1]:
            self._seen.clear()  # the run was resumed from a checkpoint
        if not self._seen or samples > self._seen[-1][1]:
            self._seen.append((now, samples))
        while len(self._seen) > 2 and now - self._seen[1][0] >= PACE_OVER_S:
            self._seen.popleft()
        (began, before), (last, _) = self._seen[0], self._seen[-1]
        # The pace of a stalled run decreases with time.
        return (samples - before) / max(last - began, now - last) if last > began else None


def rows_read(coordinator: Any, total: int) -> Reading:
    """Return a reader of the number of rows read so far."""

    def read() -> tuple[int, int, str] | None:
        rows = _call(coordinator.rows)
        return rows and (rows.num_rows, total, f"rows, {rows.num_invalid} invalid")

    return read


def steps_made(coordinator: Any) -> Reading:
    """Return a reader of the training step, with the pace."""
    pace = Pace()

    def read() -> tuple[int, int, str] | None:
        seen = _call(coordinator.progress)
        if not seen or "step" not in seen:
            return None
        return seen["step"], seen["num_steps"], _describe(seen, pace.at(seen["samples"], time.monotonic()))

    return read


def notices_of(coordinator: Any, *, when_waiting: str) -> Notices:
    """Return a reader of the notices for the user, among them ``when_waiting`` whenever no worker answers for 90 s."""
    began, told = time.monotonic(), False

    def read() -> list[str]:
        nonlocal told
        age = _call(coordinator.seconds_since_heartbeat)
        if age is not None:
            waits = min(age, time.monotonic() - began) > WAITING_S
            if waits and not told:
                _call(coordinator.add_notice, when_waiting)
            told = waits
        return _call(coordinator.notices) or []

    return read


def _describe(seen: dict[str, Any], pace: float | None) -> str:
    parts = [f"steps  epoch {seen['epoch']}  loss {seen['loss']:.4f}"]
    for metric, name in {"knn_top1": "kNN", "recall_at_10": "recall@10"}.items():
        if metric in seen:
            parts.append(f"{name} {seen[metric]:.3f}")
    if pace is not None:
        parts.append(f"{pace:,.0f} samples/s")
        if (num_views := seen.get("num_views", 2)) > 2:
            parts.append(f"{pace * num_views:,.0f} views/s")
    return "  ".join(parts)


def _call(method: Any, *arguments: Any) -> Any:
    """Call the coordinator, an actor or an object of this process.

    Returns None on failure, since the progress line must not end a run.
    """
    try:
        is_actor = hasattr(method, "remote")
        return ray.get(method.remote(*arguments), timeout=5.0) if is_actor else method(*arguments)
    except Exception:
        return None
