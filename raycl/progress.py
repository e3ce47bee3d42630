"""The live progress line: what the logbook says, shown while the driver waits."""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
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


@final
class ProgressLine:
    """Show how far something is: a bar on a terminal or in a notebook, a line now and then in a log.

    ``look`` returns (done, total, text), or None while there is nothing to tell; ``notices`` returns
    all lines so far that people must see, and each is printed once.
    """

    def __init__(self, title: str, look: Reading, *, notices: Notices = list, quiet: bool = False) -> None:
        self._title, self._look, self._notices, self._quiet = title, look, notices, quiet
        self._num_told = 0
        self._console = Console(stderr=True)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        if not self._quiet:
            self._thread.join()

    def _watch(self) -> None:
        if self._console.is_jupyter:
            self._draw_in_notebook()
        elif self._console.is_terminal:
            self._draw_bar()
        else:
            self._print_lines()

    def _draw_bar(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console) as bar:
            task: TaskID | None = None
            while True:
                last = self._stopped.is_set()
                for notice in self._news():
                    bar.console.print(notice, markup=False, highlight=False)
                if seen := self._look():
                    done, total, text = seen
                    if task is None:
                        task = bar.add_task(self._title, total=total, text=text)
                    bar.update(task, completed=done, total=total, text=text)
                if last:
                    return
                self._stopped.wait(POLL_S)

    def _draw_in_notebook(self) -> None:
        # rich would need ipywidgets for a bar that moves; what shows results can replace them as well.
        from IPython import display as notebook

        place: Any = None
        while True:
            last = self._stopped.is_set()
            for notice in self._news():
                print(notice, file=sys.stderr, flush=True)
            if seen := self._look():
                bar = notebook.HTML(progress_html(self._title, *seen))
                if place is None:
                    place = notebook.display(bar, display_id=True)
                else:
                    place.update(bar)
            if last:
                return
            self._stopped.wait(POLL_S)

    def _print_lines(self) -> None:
        printed_at = 0.0
        while True:
            last = self._stopped.is_set()
            for notice in self._news():
                print(notice, file=sys.stderr, flush=True)
            if (last or time.monotonic() - printed_at > LINE_EVERY_S) and (seen := self._look()):
                done, total, text = seen
                print(f"{self._title} {done:,}/{total:,}  {text}", file=sys.stderr, flush=True)
                printed_at = time.monotonic()
            if last:
                return
            self._stopped.wait(POLL_S)

    def _news(self) -> list[str]:
        """Return the notices that were not printed yet."""
        notices = self._notices()[self._num_told :]
        self._num_told += len(notices)
        return notices


@final
class Pace:
    """Samples a second over about the last ten seconds, or over the last step if it took longer."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()  # (time, samples), only where samples changed

    def at(self, samples: int, now: float) -> float | None:
        """Return the pace after so many samples of the run; None before the second step."""
        if self._seen and samples < self._seen[-1][1]:
            self._seen.clear()  # the run was resumed from a checkpoint
        if not self._seen or samples > self._seen[-1][1]:
            self._seen.append((now, samples))
        while len(self._seen) > 2 and now - self._seen[1][0] >= PACE_OVER_S:
            self._seen.popleft()
        (began, before), (last, _) = self._seen[0], self._seen[-1]
        # A run that stands still slows down here, instead of keeping its last pace.
        return (samples - before) / max(last - began, now - last) if last > began else None


def rows_read(logbook: Any, total: int) -> Reading:
    """Look at how many rows have been read."""

    def look() -> tuple[int, int, str] | None:
        rows = _ask(logbook.rows)
        return rows and (rows.num_rows, total, f"rows, {rows.num_broken} broken")

    return look


def steps_made(logbook: Any) -> Reading:
    """Look at how far training is, and at which pace."""
    pace = Pace()

    def look() -> tuple[int, int, str] | None:
        seen = _ask(logbook.progress)
        if not seen or "step" not in seen:
            return None
        return seen["step"], seen["num_steps"], _describe(seen, pace.at(seen["samples"], time.monotonic()))

    return look


def notices_of(logbook: Any) -> Notices:
    """Ask for what people must see."""
    return lambda: _ask(logbook.notices) or []


def _describe(seen: dict[str, Any], pace: float | None) -> str:
    parts = [f"steps  epoch {seen['epoch']}  loss {seen['loss']:.4f}"]
    for metric, name in {"knn_top1": "kNN", "recall_at_10": "recall@10"}.items():
        if metric in seen:
            parts.append(f"{name} {seen[metric]:.3f}")
    if pace is not None:
        parts.append(f"{pace:,.0f} samples/s")
    return "  ".join(parts)


def _ask(method: Any) -> Any:
    """Ask the logbook; a progress line is never a reason to fail."""
    try:
        return ray.get(method.remote(), timeout=5.0)
    except Exception:
        return None
