"""Decide whether a claim holds: rules fixed before the runs, on medians over seeds and their range."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

# Of two equal settings, one exceeds the other once in 9 trials with 2 seeds, once in 32 with 3.
MIN_SEEDS = 3
SEEDS = f"{MIN_SEEDS} seeds of every setting it compares"
MARGIN = 0.01  # of kNN top-1: a smaller loss counts as none
NON_INFERIOR = (  # the rule of ``non_inferior``, as claims state it
    f"its median is at most {MARGIN:g} below the other's (failed: lower by more than the margin and the spread; open: "
    f"a spread wider than {MARGIN:g}, unless its median is higher by the excess)"
)
NARROW = f"{SEEDS}, and a spread within {MARGIN:g}"


@final
@dataclass(frozen=True)
class SeedValues:
    """The values of one number over the seeds of one setting; statistics of no value are NaN."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values) if self.values else float("nan")

    @property
    def min(self) -> float:
        return min(self.values, default=float("nan"))

    @property
    def max(self) -> float:
        return max(self.values, default=float("nan"))

    @property
    def spread(self) -> float:
        return self.max - self.min

    @property
    def is_enough(self) -> bool:
        return len(self.values) >= MIN_SEEDS

    def __format__(self, form: str) -> str:
        """Format the median; without a form, the median and the range."""
        if not self.values:
            return "no run"
        return format(self.median, form) if form else f"{self:.3g} ({self.min:.3g} to {self.max:.3g})"


@final
@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement, its rule and the evidence; ``held`` is None while the data needs ``takes``."""

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


def exceeds(high: SeedValues, low: SeedValues) -> bool | None:
    """Whether one median exceeds the other by more than the wider spread; None with too few seeds."""
    if not (high.is_enough and low.is_enough):
        return None
    return high.median - low.median > max(high.spread, low.spread)


def non_inferior(ours: SeedValues, theirs: SeedValues, *, margin: float = MARGIN) -> bool | None:
    """Whether one median is at most ``margin`` below the other; None with too few seeds or too wide a spread.

    False needs a loss above both margin and spread. A spread wider than the margin would hide a loss,
    so that the answer is None unless the median is better by the excess.
    """
    if not (ours.is_enough and theirs.is_enough):
        return None
    loss, spread = theirs.median - ours.median, max(ours.spread, theirs.spread)
    if loss > max(margin, spread):
        return False
    return True if spread <= margin or loss + spread <= margin else None


def all_hold(verdicts: Iterable[bool | None]) -> bool | None:
    """Whether all verdicts are true: False if one is false, None if one is unknown or none was given."""
    known = list(verdicts)
    if False in known:
        return False
    return None if None in known or not known else True
