"""Where the time of a step goes: seconds by named phase, those of a phase within another one taken off.

A step consists of data, views, keys, forward, loss, backward, update and store, and of messages within them.
Nothing is counted in a thread without an account. An accelerator is not waited for: what it is given
carries marks, and its own clock is read when the account is asked.
"""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, final

import torch

REST = "rest"  # what is in no phase
PAUSED = "paused"  # no time of training: judgments and checkpoints

_MOST_MARKS = 4_096
_current = threading.local()


@final
class StepTimer:
    """The seconds of this thread by phase, of which those since the last question are told."""

    def __init__(self, *, on_accelerator: bool = False) -> None:
        """``on_accelerator`` counts the time of the work that a CUDA device is given, not that of giving it."""
        self._on_accelerator = on_accelerator
        self._phases = [REST]
        self._seconds: dict[str, float] = defaultdict(float)
        self._marks = [(REST, self._mark())]

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase since this was last asked."""
        self._note(self._phases[-1])
        self._count()
        found, self._seconds = dict(self._seconds), defaultdict(float)
        return found

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Count what happens within to this phase; within a pause all is the pause."""
        name = PAUSED if PAUSED in self._phases else name
        self._phases.append(name)
        self._note(name)
        try:
            yield
        finally:
            self._phases.pop()
            self._note(self._phases[-1])

    def _note(self, name: str) -> None:
        """Note that from now on the time is that of this phase."""
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
def counted(account: StepTimer) -> Iterator[None]:
    """Let the phases of this thread be counted to the account."""
    _current.account = account
    try:
        yield
    finally:
        _current.account = None


def phase(name: str) -> contextlib.AbstractContextManager[None]:
    """Count what happens within to this phase, if there is an account."""
    account: StepTimer | None = getattr(_current, "account", None)
    return contextlib.nullcontext() if account is None else account.within(name)
