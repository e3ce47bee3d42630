"""Tell a collapsed run from a healthy one, and from one that has not yet begun.

What a collapse looks like is also how many a healthy run begins: an untrained network without
BatchNorm maps everything to nearly one point, and where the task is hard the first steps pull
scattered embeddings together before they part them. So a bad sign counts at once only where the run
was good before. Elsewhere it must last long, and embeddings near one point must still draw closer.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, final

from raycl.errors import ConfigError

_FEWEST_ROWS = 8  # of fewer the figures are chance
_TRIVIAL = 0.98  # of the trivial loss: one that is above it tells next to nothing apart
_LEARNED_GAP = 0.05  # from here on; easy views give an untrained network as much, so the loss is asked too
_FALLING = 0.9  # of the third of the looks before: what is left where embeddings draw closer
_DEAD = 0.05  # of min_spread: embeddings this close need not draw closer any more

# Sign -> the figure that shows it, and what it means.
_FIGURES = {"point": "spread", "dims": "effective_rank", "gap": "positive_negative_gap"}
_STORIES = {
    "point": "the embeddings collapsed to a point",
    "dims": "the embeddings collapsed to few dimensions",
    "gap": "the run lost what it had learned, positives are no nearer than other pairs",
}
_NEVER_BEGAN = "the run never got going, its embeddings are nearly one point"


@final
@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a figure of a logged step is bad, and for how many looks in a row it must be.

    Args:
        min_spread: embeddings with less spread are nearly one point.
        min_gap: with less gap positives are no nearer than other pairs; a sign only where the loss
            is no better than a trivial one.
        min_effective_rank: the least effective rank, as a power of the greatest that is possible:
            0.2 asks for 2.3 of 64 dims, 3 of 256 and 1.15 of 2.
        patience: so many bad looks make a collapse of a run that was good before.
        grace: so many do where it never was.

    Raises:
        ConfigError: A limit is not between 0 and 1, ``patience`` is below 1, or ``grace`` is below
            ``patience`` or 3.
    """

    min_spread: float = 0.1
    min_gap: float = 0.01
    min_effective_rank: float = 0.2
    patience: int = 3
    grace: int = 20

    def __post_init__(self) -> None:
        for name in ("min_spread", "min_gap", "min_effective_rank"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(f"{name} is not between 0 and 1: it is {value:g}; 0 switches its sign off")
        if self.patience < 1:
            raise ConfigError(f"patience is below 1: it is {self.patience}; 3 looks in a row are usual")
        if self.grace < max(3, self.patience):
            raise ConfigError(
                f"grace is below 3 or below patience: it is {self.grace}, and patience {self.patience}; "
                "20 looks in a row are usual"
            )


@final
class CollapseMonitor:
    """Watch the measures of every logged step; say once that the run has collapsed.

    Pure logic: workers that show it the same figures hear the same from it.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.reset()

    def reset(self) -> None:
        """Forget all looks, as after a rollback to a good checkpoint."""
        self._streak: _Streak | None = None
        self._num_learned = 0  # looks in a row that showed something learned: one may do so by chance
        self._was_good: set[str] = set()  # the signs that a look then did not show
        self._has_told = False

    @property
    def is_healthy(self) -> bool:
        """Whether the last look showed no loss, so that a checkpoint made now is a good one."""
        return self._streak is None or (self._streak.sign == "gap" and "gap" not in self._was_good)

    def look(
        self, *, step: int, measures: Mapping[str, float], loss: float, collapsed_loss: float | None
    ) -> str | None:
        """Return why the run counts as collapsed, the first time it does, else None.

        Args:
            step: of this look; looks come at equal distances.
            measures: what :meth:`raycl.embedding_metrics.Measures.known` gives, of rows of all workers, so
                that all come to the same verdict. Looks at fewer than 8 rows are passed over.
            loss: of the step.
            trivial_loss: the loss if all embeddings were equal: the logarithm of the number of
                candidates, or the margin. None where there is no such value.
        """
        if measures["num_rows"] < _FEWEST_ROWS:
            return None
        seen = _Look(self._limits, measures, loss, collapsed_loss)
        sign = seen.sign
        self._num_learned = self._num_learned + 1 if seen.has_learned else 0
        if self._num_learned >= self._limits.patience:
            self._was_good |= _FIGURES.keys() - {sign}
        self._streak = None if sign is None else self._longer(sign, measures[_FIGURES[sign]], step)
        if self._streak is None or self._has_told or not self._is_over(self._streak):
            return None
        self._has_told = True
        return self._tell(self._streak, seen, step)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as plain values."""
        return {
            "streak": None if self._streak is None else asdict(self._streak),
            "num_learned": self._num_learned,
            "was_good": sorted(self._was_good),
            "has_told": self._has_told,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint kept."""
        self._streak = None if state["streak"] is None else _Streak(**state["streak"])
        self._num_learned, self._was_good = state["num_learned"], set(state["was_good"])
        self._has_told = state["has_told"]

    def _longer(self, sign: str, figure: float, step: int) -> "_Streak":
        streak = self._streak
        if streak is None or streak.sign != sign:
            streak = _Streak(sign=sign, began=step, num_looks=0, first=figure, latest=[])
        latest = [*streak.latest, figure][-self._limits.grace :]
        return replace(streak, num_looks=streak.num_looks + 1, latest=latest)

    def _is_over(self, streak: "_Streak") -> bool:
        was_good = streak.sign in self._was_good
        # Of few rows the gap is noisy, and a run without one does no harm for a while.
        is_urgent = was_good and streak.sign != "gap"
        if streak.num_looks < (self._limits.patience if is_urgent else self._limits.grace):
            return False
        if streak.sign == "point":
            return was_good or streak.falls or max(streak.latest) < _DEAD * self._limits.min_spread
        return was_good or streak.sign == "dims"  # a gap that never was is no loss

    def _tell(self, streak: "_Streak", seen: "_Look", step: int) -> str:
        never_began = streak.sign == "point" and streak.sign not in self._was_good
        text = (
            f"{_NEVER_BEGAN if never_began else _STORIES[streak.sign]}: "
            f"the {_FIGURES[streak.sign].replace('_', ' ')} was {streak.first:.3g} at step {streak.began} "
            f"and {streak.latest[-1]:.3g} at step {step} (healthy from {seen.limit_of(streak.sign):.3g}), "
            f"bad for {streak.num_looks} looks in a row"
        )
        if not seen.is_trivial:
            return text
        return f"{text}; the loss {seen.loss:.4g} is no better than the trivial {seen.collapsed_loss:.4g}"


@final
@dataclass(frozen=True, kw_only=True)
class _Streak:
    """A sign seen look after look: its first figure, and the latest ones."""

    sign: str
    began: int  # a step
    num_looks: int
    first: float
    latest: list[float]

    @property
    def falls(self) -> bool:
        """Whether each third of the latest figures is clearly below the one before.

        Neither the noise of a run that has not begun nor one fall that is over looks so.
        """
        size = len(self.latest) // 3
        first, second, third = (sum(self.latest[at * size :][:size]) for at in range(3))
        return second <= _FALLING * first and third <= _FALLING * second


@final
@dataclass(frozen=True)
class _Look:
    """One look, judged by itself."""

    limits: Limits
    measures: Mapping[str, float]
    loss: float
    collapsed_loss: float | None

    @property
    def is_trivial(self) -> bool:
        """Whether the loss is known to be no better than if all embeddings were equal."""
        return self.collapsed_loss is not None and self.loss >= _TRIVIAL * self.collapsed_loss

    @property
    def has_learned(self) -> bool:
        """Whether something shows that positives are told from other pairs, and nothing speaks against it."""
        gap = self.measures.get("positive_negative_gap")
        if gap is None:
            return self.collapsed_loss is not None and not self.is_trivial
        return gap >= _LEARNED_GAP and not self.is_trivial

    @property
    def sign(self) -> str | None:
        """What is bad, if anything is: the one sign that says most."""
        if self._is_low("point"):
            return "point"
        # Few dims mean something where they are in use; untrained networks have few as well.
        if self.has_learned:
            return "dims" if self._is_low("dims") else None
        is_lost = self._is_low("gap") and (self.is_trivial or self.collapsed_loss is None)
        return "gap" if is_lost else None

    def limit_of(self, sign: str) -> float:
        """Return from where on the sign's figure is good."""
        greatest_rank = min(self.measures["num_rows"], self.measures["dim"])
        limits = self.limits
        return {
            "point": limits.min_spread,
            "dims": greatest_rank**limits.min_effective_rank,
            "gap": limits.min_gap,
        }[sign]

    def _is_low(self, sign: str) -> bool:
        figure = self.measures.get(_FIGURES[sign])
        return figure is not None and figure < self.limit_of(sign)
