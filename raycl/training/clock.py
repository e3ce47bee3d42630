"""The clock of a run: training time, what of it goes where, and when to tell the driver."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from raycl.step_timer import PAUSED, StepTimer, counted, phase
from raycl.training.checkpoint import Position


@final
class Clock:
    """Training time, without judgments and checkpoints, and how much of it each phase of the steps takes."""

    def __init__(self, position: Position, *, on_accelerator: bool = False) -> None:
        self._started = time.monotonic() - position.seconds
        self._excluded = 0.0
        self._lap_samples, self._lap_seconds = position.samples, position.seconds
        self._account = StepTimer(on_accelerator=on_accelerator)
        self._told_at = 0.0

    def counting(self) -> contextlib.AbstractContextManager[None]:
        """Count the phases of what happens within."""
        return counted(self._account)

    def seconds(self) -> float:
        """Return the seconds of training so far, those before a restart included."""
        return time.monotonic() - self._started - self._excluded

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens within out of the training time."""
        since = time.monotonic()
        try:
            with phase(PAUSED):
                yield
        finally:
            self._excluded += time.monotonic() - since

    def lap(self, samples: int) -> "StepTiming":
        """Return what happened since the last lap; ``samples`` are those of the whole run."""
        seconds = self.seconds()
        made = samples - self._lap_samples
        spent = max(seconds - self._lap_seconds, 1e-9)
        self._lap_samples, self._lap_seconds = samples, seconds
        return StepTiming(seconds=spent, samples_per_second=made / spent, fractions=self._fractions())

    def tell(self, logbook: Any, progress: dict[str, Any]) -> None:
        """Send progress to the driver, at most three times a second."""
        if time.monotonic() - self._told_at > 0.3:
            self._told_at = time.monotonic()
            logbook.add_progress.remote(progress)

    def _fractions(self) -> dict[str, float]:
        parts = self._account.seconds()
        parts.pop(PAUSED, None)
        whole = max(sum(parts.values()), 1e-9)
        return {name: seconds / whole for name, seconds in parts.items()}


@final
@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """A stretch of training: how long it took, its pace, and the fraction that each phase took."""

    seconds: float
    samples_per_second: float
    fractions: Mapping[str, float]

    def metrics(self) -> dict[str, float]:
        """Return the pace and the fractions by the names of ``metrics.jsonl``."""
        waited = self.fractions.get("data", 0.0)
        fractions = {f"{name}_fraction": part for name, part in self.fractions.items() if name != "data"}
        return {"samples_per_second": self.samples_per_second, "data_wait_fraction": waited} | fractions
