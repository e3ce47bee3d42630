"""Whether a claim held: rules stated before the runs, on medians over seeds and their spread."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

# Of two settings that are alike, one is ``above`` the other once in 9 times with 2 seeds, once in 32 with 3.
MIN_SEEDS = 3
SEEDS = f"{MIN_SEEDS} seeds of every setting it compares"
MARGIN = 0.01  # of kNN top-1: so much worse is still no worse
NO_WORSE = (  # the rule of ``no_worse``, as claims state it
    f"its median is at most {MARGIN:g} below the other's (failed: lower by more than that and the spread; open: a spread "
    f"wider than {MARGIN:g}, unless its median is above by what it is wider)"
)
NARROW = f"{SEEDS}, and a spread within {MARGIN:g}"


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
    """What is claimed, when it counts as held, and what the figures said.

    ``held`` None: they cannot say, for which it ``takes`` more.
    """

    text: str
    rule: str
    held: bool | None
    evidence: str
    takes: str = SEEDS

    def sentence(self) -> str:
        """Return the sentence under the figure."""
        verdict = {True: "held here", False: "did not hold here", None: "cannot be said yet"}[self.held]
        reason = "" if self.held is not None else f"; it takes {self.takes}"
        return f"“{self.text}” {verdict}: {self.evidence}{reason}."


def above(high: Sample, low: Sample) -> bool | None:
    """Whether the one median is above the other by more than the greater spread of both; None: too few seeds."""
    if not (high.is_enough and low.is_enough):
        return None
    return high.median - low.median > max(high.spread, low.spread)


def no_worse(ours: Sample, theirs: Sample, *, margin: float = MARGIN) -> bool | None:
    """Whether the one median is at most ``margin`` below the other; None: too few seeds, or too wide a spread.

    False takes a loss greater than margin and spread. Within a spread wider than the margin a greater
    loss would not be seen, so that nothing is said unless the median is better by what it is wider.
    """
    if not (ours.is_enough and theirs.is_enough):
        return None
    loss, spread = theirs.median - ours.median, max(ours.spread, theirs.spread)
    if loss > max(margin, spread):
        return False
    is_seen = spread <= margin or loss + spread <= margin
    return True if is_seen else None


def every(verdicts: Iterable[bool | None]) -> bool | None:
    """Whether all are true: False if one is not, else None if one is unknown, or none was given."""
    known: Sequence[bool | None] = list(verdicts)
    if False in known:
        return False
    return None if None in known or not known else True
