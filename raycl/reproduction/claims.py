"""Whether a claim held: rules stated before the runs, on medians over seeds and their spread."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

MIN_SEEDS = 2  # of one seed nobody knows the spread


@final
@dataclass(frozen=True)
class Sample:
    """A number over the seeds of one setting."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """NaN without a value."""
        return statistics.median(self.values) if self.values else float("nan")

    @property
    def least(self) -> float:
        """NaN without a value."""
        return min(self.values, default=float("nan"))

    @property
    def most(self) -> float:
        """NaN without a value."""
        return max(self.values, default=float("nan"))

    @property
    def spread(self) -> float:
        """Greatest minus least."""
        return self.most - self.least

    @property
    def is_enough(self) -> bool:
        """Whether there are seeds enough to know a spread."""
        return len(self.values) >= MIN_SEEDS

    def __format__(self, form: str) -> str:
        """Write the median in this form; without one, median, least and most."""
        if not self.values:
            return "no run"
        return format(self.median, form) if form else f"{self:.3g} ({self.least:.3g} to {self.most:.3g})"


@final
@dataclass(frozen=True, kw_only=True)
class Claim:
    """What is claimed, when it counts as held, and what the figures said; ``held`` None: they cannot say."""

    text: str
    rule: str
    held: bool | None
    evidence: str

    def sentence(self) -> str:
        """Return the sentence under the figure."""
        verdict = {True: "held here", False: "did not hold here", None: "cannot be said yet"}[self.held]
        reason = "" if self.held is not None else f"; it takes {MIN_SEEDS} seeds of every setting it compares"
        return f"“{self.text}” {verdict}: {self.evidence}{reason}."


def above(high: Sample, low: Sample) -> bool | None:
    """Whether the one median is above the other by more than the greater spread of both; None: too few seeds."""
    if not (high.is_enough and low.is_enough):
        return None
    return high.median - low.median > max(high.spread, low.spread)


def every(verdicts: Iterable[bool | None]) -> bool | None:
    """Whether all are true: False if one is not, else None if one is unknown, or none was given."""
    known: Sequence[bool | None] = list(verdicts)
    if False in known:
        return False
    return None if None in known or not known else True
