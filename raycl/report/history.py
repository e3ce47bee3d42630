"""The history of a run: the columns of ``metrics.jsonl``, and its events."""

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from raycl.records import ROLLBACK, read_line

Floats = NDArray[np.float64]


@final
@dataclass(frozen=True, kw_only=True)
class Event:
    """A notice of the run, by its kind; the kind is ``workers`` where the number of workers changed."""

    step: int
    kind: str
    text: str


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Series:
    """One metric over the run, all [num_points]; values that are not finite are NaN.

    ``seconds`` is the training time since the point before. ``is_dropped`` marks the points that a rollback undid.
    """

    step: Floats
    samples: Floats
    seconds: Floats
    value: Floats
    is_dropped: NDArray[np.bool_]

    @property
    def num_bad(self) -> int:
        """The number of values that are not finite."""
        return int(np.isnan(self.value).sum())

    @property
    def finite(self) -> Floats:
        """The finite values that no rollback undid."""
        return self.value[self._is_finite]

    @property
    def last(self) -> float | None:
        """The last finite value that no rollback undid, None if there is none."""
        return float(self.finite[-1]) if len(self.finite) else None

    @property
    def mean(self) -> float | None:
        """The mean of the finite values, weighted by their ``seconds``; None if there are none."""
        seconds = self.seconds[self._is_finite]
        weights = seconds if seconds.sum() > 0 else None  # older versions logged no seconds
        return float(np.average(self.finite, weights=weights)) if len(self.finite) else None

    @property
    def max(self) -> float | None:
        """The largest finite value, None if there is none."""
        return float(self.finite.max()) if len(self.finite) else None

    def kept(self) -> "Series":
        """Return the points that no rollback undid."""
        return self._select(~self.is_dropped)

    def dropped(self) -> "Series":
        """Return only the points that a rollback undid."""
        return self._select(self.is_dropped)

    @property
    def _is_finite(self) -> NDArray[np.bool_]:
        return ~np.isnan(self.value) & ~self.is_dropped

    def _select(self, chosen: NDArray[np.bool_]) -> "Series":
        return Series(**{name: values[chosen] for name, values in vars(self).items()})


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class History:
    """Every metric of a run by name, its events, and how many lines could not be read."""

    series: dict[str, Series]
    events: list[Event]
    num_unreadable: int = 0

    def __getitem__(self, name: str) -> Series:
        """Return a metric; one that was never logged has no points."""
        return self.series.get(name) or _EMPTY

    def has(self, name: str) -> bool:
        """Return whether a metric was logged at all."""
        return name in self.series

    def num_steps(self) -> int:
        """Return how many steps were logged."""
        return len(self["loss"].kept().step)


_NOTHING = np.empty(0)
_EMPTY = Series(
    step=_NOTHING, samples=_NOTHING, seconds=_NOTHING, value=_NOTHING, is_dropped=np.empty(0, np.bool_)
)


def read_history(lines: Iterable[str | bytes]) -> History:
    """Sort the lines of ``metrics.jsonl`` into columns.

    A run may have millions of lines, so that they are not kept as objects. pyarrow's reader of JSON does not fit:
    one line that was cut would hide all others, and a null (a value that is not finite) would be like a metric
    that was not logged.
    """
    places: defaultdict[str, array[int]] = defaultdict(
        lambda: array("i")
    )  # numbers of the lines with a metric
    values: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
    events: list[Event] = []
    rollbacks: list[tuple[int, int]] = []
    workers, num_lines, num_unreadable = None, 0, 0
    for text in lines:
        line = read_line(text)
        if line is None:
            num_unreadable += 1
            continue
        step = line["step"]
        for name, value in line.items():
            if value is None or isinstance(value, int | float):
                places[name].append(num_lines)
                values[name].append(_to_float(value))
        if "event" in line:
            events.append(Event(step=step, kind=str(line["event"]), text=str(line.get("text", ""))))
        if line.get("event") == ROLLBACK:
            rollbacks.append((num_lines, step))
        workers_now = line.get("workers") or workers
        if workers is not None and workers_now != workers:
            text = f"continued with {workers_now} workers, {workers} before"
            events.append(Event(step=step, kind="workers", text=text))
        workers = workers_now
        num_lines += 1
    series = _series(places, values, num_lines, rollbacks)
    return History(series=series, events=events, num_unreadable=num_unreadable)


def _series(
    places: Mapping[str, "array[int]"],
    values: Mapping[str, "array[float]"],
    num_lines: int,
    rollbacks: list[tuple[int, int]],
) -> dict[str, Series]:
    """Return each metric, given the numbers of the lines with it, and its values."""
    step_at, samples_at, seconds_at = np.full((3, num_lines), np.nan)
    for name, column in (("step", step_at), ("samples", samples_at), ("seconds", seconds_at)):
        if name in places:
            column[places[name]] = values[name]
    is_dropped = np.zeros(num_lines, np.bool_)
    for number, back_to in rollbacks:
        is_dropped[:number] |= step_at[:number] > back_to
    by_line = {"step": step_at, "samples": samples_at, "is_dropped": is_dropped}
    # Most metrics are logged on the same lines and share the arrays of these lines.
    shared: dict[bytes, dict[str, Any]] = {}
    series: dict[str, Series] = {}
    for name, at in places.items():
        key = at.tobytes()
        if key not in shared:
            shared[key] = {field: column[at] for field, column in by_line.items()}
            shared[key]["seconds"] = np.diff(seconds_at[at], prepend=0.0).clip(0)
        series[name] = Series(value=np.array(values[name]), **shared[key])
    return series


def _to_float(value: float | None) -> float:
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.nan
    return number if math.isfinite(number) else math.nan
