"""The history of a run: ``metrics.jsonl`` as columns, with what happened in between."""

import hashlib
import json
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from raycl.records import ROLLBACK

Numbers = NDArray[np.float64]


@final
@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened: ``kind`` is that of a notice, or ``workers`` where their number changed."""

    step: int
    kind: str
    text: str


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Series:
    """One figure over the run, all [num_points]; a value that was no number is NaN.

    ``is_dropped`` marks what a rollback undid.
    """

    step: Numbers
    samples: Numbers
    value: Numbers
    is_dropped: NDArray[np.bool_]

    @property
    def num_bad(self) -> int:
        """How many values were no number."""
        return int(np.isnan(self.value).sum())

    @property
    def last(self) -> float | None:
        """The last value that was a number and that no rollback undid, None if there is none."""
        good = self.value[~np.isnan(self.value) & ~self.is_dropped]
        return float(good[-1]) if len(good) else None

    def kept(self) -> "Series":
        """Return it without what a rollback undid."""
        return self._where(~self.is_dropped)

    def dropped(self) -> "Series":
        """Return only what a rollback undid."""
        return self._where(self.is_dropped)

    def _where(self, chosen: NDArray[np.bool_]) -> "Series":
        return Series(
            step=self.step[chosen],
            samples=self.samples[chosen],
            value=self.value[chosen],
            is_dropped=self.is_dropped[chosen],
        )


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class History:
    """Every figure of a run by name, what happened, and how many lines could not be read."""

    series: dict[str, Series]
    events: list[Event]
    num_unreadable: int = 0

    def __getitem__(self, name: str) -> Series:
        """Return a figure; one that was never logged has no points."""
        return self.series.get(name) or _NOTHING

    def has(self, name: str) -> bool:
        """Whether a figure was logged at all."""
        return name in self.series

    def num_steps(self) -> int:
        """Return how many steps were logged."""
        return len(self["loss"].kept().step)


_AT_ONCE = 10_000  # lines
_LOOKED_AT = 100  # values, to see whether a column holds numbers
_EMPTY = np.empty(0)
_NOTHING = Series(step=_EMPTY, samples=_EMPTY, value=_EMPTY, is_dropped=np.empty(0, np.bool_))


def read_history(lines: Iterable[str]) -> History:
    """Sort the lines of ``metrics.jsonl`` into columns, one line at a time: there may be millions."""
    reading = _Reading()
    num_unreadable = 0
    for text in lines:
        try:
            reading.add(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            num_unreadable += 1
    return History(series=reading.series(), events=reading.events, num_unreadable=num_unreadable)


@final
class _Reading:
    """Lines on their way into columns, some thousands at a time: as objects, a million would fill the memory."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._step, self._samples = array("d"), array("d")
        self._waiting: dict[
            tuple[str, ...], list[tuple[Any, ...]]
        ] = {}  # values of lines that have the same names
        self._parts: dict[str, list[tuple[NDArray[np.int64], Numbers]]] = {}
        self._rollbacks: list[tuple[int, float]] = []  # the line, and the step that the run went back to
        self._workers: float | None = None

    def add(self, line: dict[str, Any]) -> None:
        step, samples = float(line["step"]), line.get("samples")
        if "event" in line:
            self._note(line, step)
        self._note_workers(line, step)
        self._waiting.setdefault(tuple(line), []).append((len(self._step), *line.values()))
        self._step.append(step)
        self._samples.append(samples if isinstance(samples, int | float) else math.nan)
        if len(self._step) % _AT_ONCE == 0:
            self._sort()

    def series(self) -> dict[str, Series]:
        self._sort()
        step, samples = np.array(self._step), np.array(self._samples)
        is_dropped = np.zeros(len(step), np.bool_)
        for number, back_to in self._rollbacks:
            is_dropped[:number] |= step[:number] > back_to
        found: dict[str, Series] = {}
        where: dict[bytes, tuple[Numbers, Numbers, NDArray[np.bool_]]] = {}
        while self._parts:
            name, parts = self._parts.popitem()
            line = np.concatenate([part[0] for part in parts])
            order = np.argsort(line, kind="stable")
            line, value = line[order], np.concatenate([part[1] for part in parts])[order]
            # Most figures have the same lines, and then share what says where these are.
            key = hashlib.sha256(line.tobytes()).digest()
            if key not in where:
                where[key] = step[line], samples[line], is_dropped[line]
            steps, seen, dropped = where[key]
            found[name] = Series(step=steps, samples=seen, value=value, is_dropped=dropped)
        return dict(reversed(found.items()))

    def _sort(self) -> None:
        for names, rows in self._waiting.items():
            numbers, *columns = zip(*rows, strict=True)
            line = np.array(numbers, np.int64)
            for name, values in zip(names, columns, strict=True):
                if (value := _as_numbers(values)) is not None:
                    self._parts.setdefault(name, []).append((line, value))
        self._waiting = {}

    def _note(self, line: dict[str, Any], step: float) -> None:
        if line["event"] == ROLLBACK:
            self._rollbacks.append((len(self._step), step))
        text = str(line.get("text", ""))
        self.events.append(Event(step=int(step), kind=str(line["event"]), text=text))

    def _note_workers(self, line: dict[str, Any], step: float) -> None:
        workers = line.get("workers")
        if workers is None:
            return
        if self._workers is not None and workers != self._workers:
            text = f"went on with {workers} workers, before with {self._workers}"
            self.events.append(Event(step=int(step), kind="workers", text=text))
        self._workers = workers


def _as_number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        return math.nan


def _as_numbers(values: Sequence[Any]) -> Numbers | None:
    """Return values with NaN for those that are no numbers; None for a column of something else, as texts."""
    try:
        found = np.array(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        found = np.array([_as_number(each) for each in values], np.float64)
    if not any(each is None or isinstance(each, int | float) for each in values[:_LOOKED_AT]):
        return None
    found[~np.isfinite(found)] = math.nan
    return found
