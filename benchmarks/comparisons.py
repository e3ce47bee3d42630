"""Read comparisons from the results of benchmarks: raycl's number, a peer's, their ratio, and the aim.

A place in a result is a path: a word is a key, and ``{"name": "raycl"}`` selects the row of a list with this
value. Results come from other programs and other days, so absent numbers are reported, not raised.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Place = tuple[str | dict[str, Any], ...]
Results = Mapping[str, Any]  # by name of the benchmark


class AbsentError(LookupError):
    """A result lacks a number of a comparison."""


@dataclass(frozen=True)
class Number:
    """A median, with minimum and maximum where several runs are known."""

    median: float
    minimum: float | None = None
    maximum: float | None = None

    def __str__(self) -> str:
        if self.minimum is None or self.maximum is None or self.minimum == self.maximum:
            return short(self.median)
        return f"{short(self.median)} ({short(self.minimum)}-{short(self.maximum)})"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The places of two numbers and the aim of their ratio; without a peer, raycl's number alone."""

    what: str
    unit: str
    own: Place
    peer: str = ""
    other: Place = ()
    other_of: str | None = None  # the benchmark with the peer's number, if another one
    aim: float | None = None
    is_drawn: bool = True  # in the picture of programs that do the same work

    def read(self, results: Results, benchmark: str) -> "Measured":
        """Return the measured numbers; AbsentError names a missing one."""
        own = read_number(results, (benchmark, *self.own))
        other = read_number(results, (self.other_of or benchmark, *self.other)) if self.other else None
        return Measured(self, own, other)


@dataclass(frozen=True)
class Measured:
    """The measured numbers of a comparison."""

    of: Comparison
    own: Number
    other: Number | None

    @property
    def ratio(self) -> float | None:
        """How many times faster or smaller raycl is."""
        if self.other is None:
            return None
        # More is better for rates, less for time and memory.
        is_rate = self.of.unit.endswith("/s")
        better, worse = (self.own, self.other) if is_rate else (self.other, self.own)
        return better.median / worse.median

    @property
    def times(self) -> str:
        """The ratio for people."""
        ratio = self.ratio or 0.0
        return f"{ratio:.2f}" if ratio < 100 else short(ratio)

    @property
    def verdict(self) -> str:
        if self.of.aim is None or self.ratio is None:
            return ""
        return "met" if self.ratio >= self.of.aim else "missed"

    def __str__(self) -> str:
        text = f"{self.of.what}: {self.own} {self.of.unit}"
        if self.ratio is not None:
            text += f"; {self.of.peer} {self.other}; {self.times} times"
        return f"{text}; aim {self.of.aim:.2f} {self.verdict}" if self.verdict else text


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A script with its flags, the comparisons of its JSON, and its table and picture for the page."""

    name: str
    section: str
    script: str
    comparisons: Sequence[Comparison]
    flags: str = ""
    quick: str = ""  # flags of a quick try, which override the others
    table: Callable[[dict[str, Any]], str] | None = None  # of its result, beside the comparisons
    picture: str = ""  # alternative text of NAME.png in the folder of results, if it draws one

    def words(self, *, quick: bool) -> list[str]:
        """Return script and flags; ``{data}`` and ``{output}`` stand for folders."""
        return [self.script, *self.flags.split(), *(self.quick.split() if quick else ())]

    def measured(self, results: Results, *, is_evaluated: bool) -> Iterator[Measured | AbsentError]:
        """Yield measured or absent numbers; without ``is_evaluated`` there are no aims."""
        for comparison in self.comparisons:
            try:
                measured = comparison.read(results, self.name)
            except AbsentError as error:
                yield AbsentError(f"{comparison.what}: {error}")
            else:
                yield measured if is_evaluated else replace(measured, of=replace(comparison, aim=None))


def read_number(results: Results, place: Place) -> Number:
    """Return the number at a place: one, a summary of several, or a list."""
    value = find(results, place)
    numbers: list[Any]
    if isinstance(value, dict):
        numbers = [value.get(name) for name in ("median", "min", "max")]
    else:
        numbers = value if isinstance(value, list) else [value]
    for number in numbers or [None]:
        if not isinstance(number, int | float) or not 0 < number < math.inf:
            raise AbsentError(f"{spell(place)} is {number}, not a number above 0")
    if len(numbers) == 1:
        return Number(numbers[0])
    # The median of minimum, median and maximum is the median.
    return Number(statistics.median(numbers), min(numbers), max(numbers))


def find(results: Results, place: Place) -> Any:
    """Follow a path into results."""
    value: Any = results
    for number, step in enumerate(place, 1):
        try:
            if isinstance(step, dict):
                value = next(row for row in value if step.items() <= row.items())
            else:
                value = value[step]
        except (LookupError, TypeError, AttributeError, StopIteration) as error:
            raise AbsentError(f"there is no {spell(place[:number])}") from error
    return value


def spell(place: Place) -> str:
    """Write a path for people."""
    steps = [" ".join(map(str, step.values())) if isinstance(step, dict) else step for step in place]
    return " / ".join(steps)


def short(number: float) -> str:
    """Write three digits, or all before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
