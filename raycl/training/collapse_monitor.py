"""Detection of collapse in the embeddings of a run.

A healthy run may start as a collapsed one ends: an untrained network without BatchNorm maps all inputs to
nearly one point, and on a hard task the first steps contract the embeddings before they separate them.
So a sign of collapse counts soon only if the run was healthy before. Before that, it must persist for
``initial_patience`` readings while the spread keeps falling.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, final

from raycl.errors import ConfigError

_MIN_ROWS = 8  # statistics of fewer rows are noise
_TRIVIAL = 0.98  # times the collapsed loss: a loss above that hardly distinguishes any pairs
_LEARNED_GAP = 0.05  # easy views give an untrained network the same gap, so the loss must agree
_FALLING = 0.9  # times the mean of the third of the readings before
_DEAD = 0.05  # times min_embedding_std: embeddings this close need not contract further

# Each sign of collapse, its metric, and its description.
_METRICS = {"point": "embedding_std", "dims": "effective_rank", "gap": "positive_negative_gap"}
_DESCRIPTIONS = {
    "point": "the embeddings collapsed to a point",
    "dims": "the embeddings collapsed to few dimensions",
    "gap": "the run lost its progress, positives are no nearer than other pairs",
}
_NEVER_STARTED = "the run never started to learn, its embeddings are nearly one point"


@final
@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of the metrics, and the number of consecutive readings beyond a limit.

    Args:
        min_embedding_std: embeddings with a lower spread are nearly one point.
        min_gap: with a lower gap, positives are as far apart as other pairs. This is a sign only if the
            loss has not fallen below the collapsed loss.
        min_effective_rank: the lowest effective rank, as a power of the highest possible one:
            0.2 means 2.3 of 64 dimensions, 3 of 256 and 1.15 of 2.
        patience: the number of readings if the run was healthy before.
        initial_patience: the number of readings if it was not.

    Raises:
        ConfigError: A limit is not between 0 and 1, ``patience`` is below 1, or ``initial_patience`` is below
            ``patience`` or 3.
    """

    min_embedding_std: float = 0.1
    min_gap: float = 0.01
    min_effective_rank: float = 0.2
    patience: int = 3
    initial_patience: int = 20

    def __post_init__(self) -> None:
        for name in ("min_embedding_std", "min_gap", "min_effective_rank"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(f"{name} must be between 0 and 1, got {value:g}; 0 disables its sign")
        if self.patience < 1:
            raise ConfigError(
                f"patience must be at least 1, got {self.patience}; 3 consecutive readings are usual"
            )
        if self.initial_patience < max(3, self.patience):
            raise ConfigError(
                f"initial_patience must be at least 3 and at least patience, got {self.initial_patience} and patience {self.patience}; "
                "20 consecutive readings are usual"
            )


@final
class CollapseMonitor:
    """Read the metrics of every logged step and report a collapse once.

    The monitor is deterministic: workers with equal metrics get equal results.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._streak: _Streak | None = None
        self._num_learned = 0  # consecutive readings that showed learning: a single one may be chance
        self._was_good: set[str] = set()  # the signs that were absent from those readings
        self._has_reported = False

    def reset(self) -> None:
        """Forget all readings, as after a rollback to a healthy checkpoint."""
        self._streak, self._num_learned, self._was_good, self._has_reported = None, 0, set(), False

    @property
    def is_healthy(self) -> bool:
        """Whether the last reading showed no sign of collapse, so that a checkpoint is worth a rollback."""
        return self._streak is None or (self._streak.sign == "gap" and "gap" not in self._was_good)

    def update(
        self, *, step: int, measures: Mapping[str, float], loss: float, collapsed_loss: float | None
    ) -> str | None:
        """Add a reading; return the reason when the run first counts as collapsed, else None.

        Args:
            step: the step of the reading; readings are equally spaced.
            measures: the metrics of :meth:`raycl.evaluation.embedding_metrics.Measures.known`, over rows of all workers.
                Readings of fewer than 8 rows are skipped.
            loss: the loss of the step.
            collapsed_loss: the loss if all embeddings were equal: the logarithm of the number of
                candidates, or the margin. None if the loss has no such value.
        """
        if measures["num_rows"] < _MIN_ROWS:
            return None
        reading = _Reading(self._limits, measures, loss, collapsed_loss)
        sign = reading.sign
        self._num_learned = self._num_learned + 1 if reading.has_learned else 0
        if self._num_learned >= self._limits.patience:
            self._was_good |= _METRICS.keys() - {sign}
        self._streak = None if sign is None else self._extended(sign, measures[_METRICS[sign]], step)
        if self._streak is None or self._has_reported or not self._is_collapse(self._streak):
            return None
        self._has_reported = True
        return self._describe(self._streak, reading, step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain values."""
        return {
            "streak": None if self._streak is None else asdict(self._streak),
            "num_learned": self._num_learned,
            "was_good": sorted(self._was_good),
            "has_told": self._has_reported,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._streak = None if state["streak"] is None else _Streak(**state["streak"])
        self._num_learned, self._was_good = state["num_learned"], set(state["was_good"])
        self._has_reported = state["has_told"]

    def _extended(self, sign: str, value: float, step: int) -> "_Streak":
        streak = self._streak
        if streak is None or streak.sign != sign:
            streak = _Streak(sign=sign, began=step, num_looks=0, first=value, latest=[])
        latest = [*streak.latest, value][-self._limits.initial_patience :]
        return replace(streak, num_looks=streak.num_looks + 1, latest=latest)

    def _is_collapse(self, streak: "_Streak") -> bool:
        was_good = streak.sign in self._was_good
        # The gap of few rows is noisy, and a run may continue without one for a while.
        is_urgent = was_good and streak.sign != "gap"
        if streak.num_looks < (self._limits.patience if is_urgent else self._limits.initial_patience):
            return False
        if streak.sign == "point":
            return was_good or streak.falls or max(streak.latest) < _DEAD * self._limits.min_embedding_std
        return was_good or streak.sign == "dims"  # a gap that never existed was not lost

    def _describe(self, streak: "_Streak", reading: "_Reading", step: int) -> str:
        never_started = streak.sign == "point" and streak.sign not in self._was_good
        text = (
            f"{_NEVER_STARTED if never_started else _DESCRIPTIONS[streak.sign]}: "
            f"the {_METRICS[streak.sign].replace('_', ' ')} was {streak.first:.3g} at step {streak.began} "
            f"and {streak.latest[-1]:.3g} at step {step} (healthy from {reading.limit_of(streak.sign):.3g}), "
            f"too low for {streak.num_looks} readings in a row"
        )
        if not reading.is_trivial:
            return text
        return (
            f"{text}; the loss {reading.loss:.4g} is no better than the trivial {reading.collapsed_loss:.4g}"
        )


@final
@dataclass(frozen=True, kw_only=True)
class _Streak:
    """Consecutive readings with one sign: the first value of its metric and the latest ones."""

    sign: str
    began: int  # a step
    num_looks: int
    first: float
    latest: list[float]

    @property
    def falls(self) -> bool:
        """Whether each third of the latest values is clearly below the one before.

        Noise before the start of learning and a single earlier fall do not meet this condition.
        """
        size = len(self.latest) // 3
        first, second, third = (sum(self.latest[at * size :][:size]) for at in range(3))
        return second <= _FALLING * first and third <= _FALLING * second


@final
@dataclass(frozen=True)
class _Reading:
    """The metrics of one logged step."""

    limits: Limits
    measures: Mapping[str, float]
    loss: float
    collapsed_loss: float | None

    @property
    def is_trivial(self) -> bool:
        """Whether the loss is as high as with equal embeddings; False if that loss is unknown."""
        return self.collapsed_loss is not None and self.loss >= _TRIVIAL * self.collapsed_loss

    @property
    def has_learned(self) -> bool:
        """Whether gap and loss, if known, separate positives from other pairs."""
        gap = self.measures.get("positive_negative_gap")
        if gap is None:
            return self.collapsed_loss is not None and not self.is_trivial
        return gap >= _LEARNED_GAP and not self.is_trivial

    @property
    def sign(self) -> str | None:
        """The strongest sign of collapse, if any."""
        if self._is_low("point"):
            return "point"
        # Untrained networks use few dimensions as well, so these count only after learning.
        if self.has_learned:
            return "dims" if self._is_low("dims") else None
        is_lost = self._is_low("gap") and (self.is_trivial or self.collapsed_loss is None)
        return "gap" if is_lost else None

    def limit_of(self, sign: str) -> float:
        """Return the lowest healthy value of the sign's metric."""
        max_rank = min(self.measures["num_rows"], self.measures["dim"])
        limits = self.limits
        return {
            "point": limits.min_embedding_std,
            "dims": max_rank**limits.min_effective_rank,
            "gap": limits.min_gap,
        }[sign]

    def _is_low(self, sign: str) -> bool:
        value = self.measures.get(_METRICS[sign])
        return value is not None and value < self.limit_of(sign)
