"""The clock of a run: training time, waiting time, and when to tell the driver."""

import time
from dataclasses import dataclass
from typing import Any, final

from raycl.training.checkpoint import Position


@final
class Clock:
    """Training time, without judgments and checkpoints, and how much of it waits for data."""

    def __init__(self, position: Position) -> None:
        self._started = time.monotonic() - position.seconds
        self._excluded = self._waited = 0.0
        self._lap_samples, self._lap_seconds, self._lap_waited = position.samples, position.seconds, 0.0
        self._told_at = 0.0

    def seconds(self) -> float:
        """Return the seconds of training so far, those before a restart included."""
        return time.monotonic() - self._started - self._excluded

    def paused(self) -> "Stopwatch":
        """Leave what happens within out of the training time."""
        return Stopwatch(self, "_excluded")

    def waiting(self) -> "Stopwatch":
        """Count what happens within as waiting for data."""
        return Stopwatch(self, "_waited")

    def lap(self, samples: int) -> "Lap":
        """Return what happened since the last lap; ``samples`` are those of the whole run."""
        seconds = self.seconds()
        made = samples - self._lap_samples
        spent = max(seconds - self._lap_seconds, 1e-9)
        waited = (self._waited - self._lap_waited) / spent
        self._lap_samples, self._lap_seconds, self._lap_waited = samples, seconds, self._waited
        return Lap(seconds=spent, samples_per_second=made / spent, wait_fraction=waited)

    def tell(self, logbook: Any, progress: dict[str, Any]) -> None:
        """Send progress to the driver, at most three times a second."""
        if time.monotonic() - self._told_at > 0.3:
            self._told_at = time.monotonic()
            logbook.add_progress.remote(progress)


@final
@dataclass(frozen=True, kw_only=True)
class Lap:
    """A stretch of training: how long it took, its pace, and the fraction spent waiting for data."""

    seconds: float
    samples_per_second: float
    wait_fraction: float


@final
class Stopwatch:
    """Add the seconds spent within to one account of a clock."""

    def __init__(self, clock: Clock, account: str) -> None:
        self._clock, self._account = clock, account

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        spent = time.monotonic() - self._since
        setattr(self._clock, self._account, getattr(self._clock, self._account) + spent)
