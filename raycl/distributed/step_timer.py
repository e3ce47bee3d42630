"""The time of a step by named phase; a nested phase is not counted in the enclosing one.

The phases of a step are data, views, keys, forward, loss, backward, update and store, with messages nested
within them. Threads without a timer count nothing. On an accelerator the timer records events, and reads
them only when the seconds are requested, so it never waits within a step.
"""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, final

import torch

REST = "rest"  # time outside of all phases
PAUSED = "paused"  # evaluations and checkpoints, excluded from training time

_MOST_MARKS = 4_096
_current = threading.local()


@final
class StepTimer:
    """The seconds of this thread by phase, since they were last read."""

    def __init__(self, *, on_accelerator: bool = False) -> None:
        """``on_accelerator`` measures the execution time of CUDA work instead of its launch time."""
        self._on_accelerator = on_accelerator
        self._phases = [REST]
        self._seconds: dict[str, float] = defaultdict(float)
        self._marks = [(REST, self._mark())]

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call."""
        self._note(self._phases[-1])
        self._count()
        found, self._seconds = dict(self._seconds), defaultdict(float)
        return found

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Attribute the time within to this phase; nested phases of a pause count as the pause."""
        name = PAUSED if PAUSED in self._phases else name
        self._phases.append(name)
        self._note(name)
        try:
            yield
        finally:
            self._phases.pop()
            self._note(self._phases[-1])

    def _note(self, name: str) -> None:
        """Attribute the time from now on to this phase."""
        self._marks.append((name, self._mark()))
        if len(self._marks) > _MOST_MARKS:
            self._count()

    def _count(self) -> None:
        if self._on_accelerator:
            self._marks[-1][1].synchronize()
        for (name, since), (_, until) in pairwise(self._marks):
            self._seconds[name] += since.elapsed_time(until) / 1e3 if self._on_accelerator else until - since
        del self._marks[:-1]

    def _mark(self) -> Any:
        if not self._on_accelerator:
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark


@contextlib.contextmanager
def counted(timer: StepTimer) -> Iterator[None]:
    """Count the phases of this thread with the timer."""
    _current.timer = timer
    try:
        yield
    finally:
        _current.timer = None


def phase(name: str) -> contextlib.AbstractContextManager[None]:
    """Attribute the time within to this phase, if this thread has a timer."""
    timer: StepTimer | None = getattr(_current, "timer", None)
    return contextlib.nullcontext() if timer is None else timer.within(name)
