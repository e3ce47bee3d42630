"""Detection of collapse in the embeddings of a run.

A healthy run may start as a collapsed one ends: an untrained network without BatchNorm maps all inputs to
nearly one point, and on a hard task the first steps contract the embeddings before they separate them.
So a sign of collapse counts soon only if the run was healthy before. Before that, it must persist for
``initial_patience`` readings while the spread keeps falling.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, final

_MIN_ROWS = 8  # statistics of fewer rows are noise
_MIN_EMBEDDING_STD = 0.1  # embeddings with a lower spread are nearly one point
_MIN_GAP = 0.01  # with a lower gap, positives are as far apart as other pairs
_MIN_EFFECTIVE_RANK = 0.2  # a power of the highest possible rank: 2.3 of 64 dimensions, 3 of 256, 1.15 of 2
_TRIVIAL = 0.98  # times the collapsed loss: a loss above that hardly distinguishes any pairs
_LEARNED_GAP = 0.05  # easy views give an untrained network the same gap, so the loss must agree
_FALLING = 0.9  # times the mean of the third of the readings before
_DEAD = 0.005  # embeddings with a lower spread need not contract further

# Each sign of collapse, its metric, and its description.
_METRICS = {"point": "embedding_std", "dims": "effective_rank", "gap": "positive_negative_gap"}
_DESCRIPTIONS = {
    "point": "the embeddings collapsed to a point",
    "dims": "the embeddings collapsed to few dimensions",
    "gap": "the run lost its progress, positives are no nearer than other pairs",
}
_NEVER_STARTED = "the run never started to learn, its embeddings are nearly one point"


def healthy_from(max_rank: float) -> dict[str, float]:
    """Return the lowest healthy value of each metric; ``max_rank`` is the highest possible effective rank."""
    return {
        "embedding_std": _MIN_EMBEDDING_STD,
        "effective_rank": max_rank**_MIN_EFFECTIVE_RANK,
        "positive_negative_gap": _MIN_GAP,
    }


@final
class CollapseMonitor:
    """Read the metrics of every logged step and report a collapse, once until the run recovers.

    A recovery is ``patience`` consecutive readings whose metrics are all high enough. A collapse is a sign in ``patience``
    consecutive readings of a run that was healthy before, or in ``initial_patience`` readings of another run. The monitor
    is deterministic: workers with equal metrics get equal results.
    """

    def __init__(self, *, patience: int = 3, initial_patience: int = 20) -> None:
        self._patience, self._initial_patience = patience, initial_patience
        self.reset()

    def reset(self) -> None:
        """Forget all readings, as after a rollback to a healthy checkpoint."""
        self._streak: _Streak | None = None
        self._num_learned = 0  # consecutive readings that showed learning: a single one may be chance
        self._was_good: set[str] = set()  # the signs that were absent from those readings
        self._num_healthy = 0  # consecutive readings without a low metric
        self._has_reported = False

    def report_again(self) -> None:
        """Report a collapse also if it was reported before, as when the response to it has changed."""
        self._has_reported = False

    @property
    def is_healthy(self) -> bool:
        """Whether the last reading showed no sign of collapse, so that a checkpoint is worth a rollback."""
        return self._streak is None or (self._streak.sign == "gap" and "gap" not in self._was_good)

    def update(
        self, *, step: int, measures: Mapping[str, float], loss: float, collapsed_loss: float | None
    ) -> str | None:
        """Add a reading; return the reason if a collapse is to be reported, else None.

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
        is_trivial = collapsed_loss is not None and loss >= _TRIVIAL * collapsed_loss
        gap = measures.get("positive_negative_gap")
        separates = collapsed_loss is not None if gap is None else gap >= _LEARNED_GAP
        has_learned = separates and not is_trivial
        limits = healthy_from(min(measures["num_rows"], measures["dim"]))
        low = {sign for sign, name in _METRICS.items() if name in measures and measures[name] < limits[name]}
        sign = _strongest_sign(low, has_learned, may_lose_gap=is_trivial or collapsed_loss is None)
        self._num_learned = self._num_learned + 1 if has_learned else 0
        if self._num_learned >= self._patience:
            self._was_good |= _METRICS.keys() - {sign}
        self._num_healthy = 0 if low else self._num_healthy + 1
        if self._num_healthy >= self._patience:
            self._has_reported = False
        if sign is None:
            self._streak = None
            return None
        metric = _METRICS[sign]
        streak = self._streak = self._extended(sign, measures[metric], step)
        if self._has_reported or not self._is_collapse(streak):
            return None
        self._has_reported = True
        never_started = sign == "point" and sign not in self._was_good
        trivial = (
            f"; the loss {loss:.4g} is no better than the trivial {collapsed_loss:.4g}" if is_trivial else ""
        )
        return (
            f"{_NEVER_STARTED if never_started else _DESCRIPTIONS[sign]}: the {metric.replace('_', ' ')} was "
            f"{streak.first:.3g} at step {streak.began} and {streak.latest[-1]:.3g} at step {step} (healthy from "
            f"{limits[metric]:.3g}), too low for {streak.num_looks} readings in a row{trivial}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain values."""
        return {
            "streak": None if self._streak is None else asdict(self._streak),
            "num_learned": self._num_learned,
            "was_good": sorted(self._was_good),
            "num_healthy": self._num_healthy,
            "has_told": self._has_reported,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._streak = None if state["streak"] is None else _Streak(**state["streak"])
        self._num_learned, self._was_good = state["num_learned"], set(state["was_good"])
        self._num_healthy = state.get("num_healthy", 0)  # earlier versions did not count them
        self._has_reported = state["has_told"]

    def _extended(self, sign: str, value: float, step: int) -> "_Streak":
        streak = self._streak
        if streak is None or streak.sign != sign:
            streak = _Streak(sign=sign, began=step, num_looks=0, first=value, latest=[])
        latest = [*streak.latest, value][-self._initial_patience :]
        return replace(streak, num_looks=streak.num_looks + 1, latest=latest)

    def _is_collapse(self, streak: "_Streak") -> bool:
        was_good = streak.sign in self._was_good
        # The gap of few rows is noisy, and a run may continue without one for a while.
        is_urgent = was_good and streak.sign != "gap"
        if streak.num_looks < (self._patience if is_urgent else self._initial_patience):
            return False
        if streak.sign == "point":
            return was_good or streak.falls or max(streak.latest) < _DEAD
        return was_good or streak.sign == "dims"  # a gap that never existed was not lost


def _strongest_sign(low: set[str], has_learned: bool, *, may_lose_gap: bool) -> str | None:
    """Return the strongest sign of collapse, if any, among the signs of the metrics that are too low."""
    if "point" in low:
        return "point"
    # Untrained networks use few dimensions as well, so these count only after learning.
    if has_learned:
        return "dims" if "dims" in low else None
    return "gap" if "gap" in low and may_lose_gap else None


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
