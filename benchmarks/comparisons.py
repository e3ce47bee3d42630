"""Read comparisons from the results of benchmarks: raycl's figure, a peer's, their ratio, and the aim.

Results come from other programs and other days, so absent figures are reported, not raised.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from measuring import middle, write_figure

Place = tuple[Mapping[str, Any], str]  # the words of a result's line, and the key of its figure
Results = Mapping[str, Any]  # by name of the benchmark


class AbsentError(LookupError):
    """A result lacks a figure of a comparison."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The places of two figures and the aim of their ratio; without a peer, raycl's figure alone."""

    what: str
    unit: str
    own: Place
    peer: str = ""
    other: Place | None = None
    other_of: str | None = None  # the benchmark with the peer's figure, if another one
    aim: float | None = None
    is_drawn: bool = True  # in the picture of programs that do the same work

    def read(self, results: Results, benchmark: str) -> "Measured":
        """Return the measured figures; AbsentError names a missing one."""
        own = read_figure(results, benchmark, self.own)
        other = read_figure(results, self.other_of or benchmark, self.other) if self.other else None
        return Measured(self, own, other)


@dataclass(frozen=True)
class Measured:
    """The measured figures of a comparison."""

    of: Comparison
    own: Any
    other: Any | None

    @property
    def ratio(self) -> float | None:
        """How many times faster or smaller raycl is."""
        if self.other is None:
            return None
        # More is better for rates, less for time and memory.
        is_rate = self.of.unit.endswith("/s")
        better, worse = (self.own, self.other) if is_rate else (self.other, self.own)
        return middle(better) / middle(worse)

    @property
    def times(self) -> str:
        """The ratio for people."""
        ratio = self.ratio or 0.0
        return f"{ratio:.2f}" if ratio < 100 else write_figure(ratio)

    @property
    def verdict(self) -> str:
        if self.of.aim is None or self.ratio is None:
            return ""
        return "met" if self.ratio >= self.of.aim else "missed"

    def __str__(self) -> str:
        text = f"{self.of.what}: {write_figure(self.own)} {self.of.unit}"
        if self.ratio is not None:
            text += f"; {self.of.peer} {write_figure(self.other)}; {self.times} times"
        return f"{text}; aim {self.of.aim:.2f} {self.verdict}" if self.verdict else text


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A script with its flags, the comparisons of its JSON, and its own table and picture for the page."""

    name: str
    section: str
    script: str
    comparisons: Sequence[Comparison]
    flags: str = ""
    quick: str = ""  # flags of a quick try, which override the others
    has_table: bool = False  # the function ``table`` of the script, of its lines
    picture: str = ""  # alternative text of NAME.png in the folder of results, if it draws one

    def words(self, *, quick: bool) -> list[str]:
        """Return script and flags; ``{data}`` and ``{output}`` stand for folders."""
        return [self.script, *self.flags.split(), *(self.quick.split() if quick else ())]

    def measured(self, results: Results, *, is_evaluated: bool) -> Iterator[Measured | AbsentError]:
        """Yield measured or absent figures; without ``is_evaluated`` there are no aims."""
        for comparison in self.comparisons:
            try:
                measured = comparison.read(results, self.name)
            except AbsentError as error:
                yield AbsentError(f"{comparison.what}: {error}")
            else:
                yield measured if is_evaluated else replace(measured, of=replace(comparison, aim=None))


def read_figure(results: Results, benchmark: str, place: Place) -> Any:
    """Return the figure at a place: a number, or a summary of several."""
    words, key = place
    path = f"{benchmark} / {' '.join(map(str, words.values()))} / {key}"
    try:
        lines = results[benchmark]["lines"]
        figure = next(line for line in lines if words.items() <= line.items())[key]
        numbers = (
            [figure[name] for name in ("median", "min", "max")] if isinstance(figure, dict) else [figure]
        )
    except (LookupError, TypeError, AttributeError, StopIteration) as error:
        raise AbsentError(f"there is no {path}") from error
    for number in numbers:
        if not isinstance(number, int | float) or not 0 < number < math.inf:
            raise AbsentError(f"{path} is {number}, not a number above 0")
    return figure
