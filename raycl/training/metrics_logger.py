"""What a run writes down: lines of metrics for later, progress and notices for the driver."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from raycl.distributed import num_workers
from raycl.errors import StorageError
from raycl.records import ROLLBACK, MetricsLog
from raycl.step_timer import PAUSED, StepTimer, counted, phase
from raycl.tracking import Trackers, open_trackers
from raycl.tracking.prometheus import Exporter, Reading
from raycl.training.job import Job
from raycl.training.stages import Position


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


@final
class PrometheusGauges:
    """Show the latest value of every number that was written down, and count steps and samples."""

    def __init__(self, job: Job, position: Position) -> None:
        self._position, self._line = position, {}
        self._num_steps = self._num_samples = 0
        self._exporter = Exporter({"run": job.output.name, "recipe": job.config.recipe}, self._readings)

    def show(self, position: Position, line: Mapping[str, Any]) -> None:
        """Take in a line of metrics, measured at this position."""
        # After a rollback the run is at an earlier step, and what it made is still made.
        self._num_steps += max(0, position.step - self._position.step)
        self._num_samples += max(0, position.samples - self._position.samples)
        self._position, self._line = position, {**self._line, **line}

    def close(self) -> None:
        """Show the last values."""
        self._exporter.close()

    def _readings(self) -> Iterator[Reading]:
        yield Reading("trained_steps", self._num_steps)
        yield Reading("trained_samples", self._num_samples)
        for name, value in self._line.items():
            if isinstance(value, int | float):
                yield Reading(name, value)


@final
class MetricsLogger:
    """Write for all workers; that of any but the first one does nothing."""

    def __init__(
        self, job: Job, position: Position, clock: Clock, *, num_steps: int, is_writer: bool
    ) -> None:
        self._logbook, self._clock, self._num_steps = job.logbook, clock, num_steps
        self._log = (
            MetricsLog(
                job.output,
                resume_step=position.step,
                num_rollbacks=position.rollbacks,
                check=job.check_lease,
            )
            if is_writer
            else None
        )
        self._trackers = (
            open_trackers(job.config, job.output, resume_step=position.step) if is_writer else Trackers([])
        )
        self._gauges = PrometheusGauges(job, position) if is_writer else None
        self._position = position

    def write(self, position: Position, metrics: Mapping[str, Any]) -> None:
        """Add a line of metrics, measured at this position."""
        if self._log is None or self._gauges is None:
            return
        where = {
            "step": position.step,
            "samples": position.samples,
            "epoch": position.epoch,
            "stage": position.stage,
            "workers": num_workers(),
            "time": int(time.time()),
        }
        line = where | dict(metrics) | {"seconds": self._clock.seconds()}
        if failures := self._trackers.num_failures:
            line["tracking_failures"] = failures
        self._position = position
        self._log.write(line)
        self._gauges.show(position, line)
        self._trackers.write(position.step, line)
        for text in self._trackers.messages():
            self.notify(position, "tracking", text)

    def show(self, position: Position, metrics: Mapping[str, float], *, now: bool = False) -> None:
        """Let the progress line say where the run is; unless ``now``, a few times a second at most."""
        if self._log is None:
            return
        where = {
            "step": position.step,
            "num_steps": self._num_steps,
            "samples": position.samples,
            "epoch": position.epoch,
        }
        if now:
            self._logbook.add_progress.remote(dict(metrics))
        else:
            self._clock.tell(self._logbook, where | dict(metrics))

    def notify(self, position: Position, event: str, text: str) -> None:
        """Tell people of an event at once, and write it down."""
        if event == ROLLBACK:
            self._trackers.roll_back(position.step)
        self.write(position, {"event": event, "text": text})
        self.flush()
        if self._log is not None:
            self._logbook.add_notice.remote(f"step {position.step}: {text}")

    def flush(self) -> None:
        """Write out what has gathered; raises ``StorageError``."""
        if self._log is not None:
            self._log.flush()

    def close(self, *, finished: bool) -> None:
        """Let the trackers have the last metrics; unless ``finished``, the run failed or goes on with others."""
        if self._gauges is None:
            return
        self._trackers.close(finished=finished)
        self._gauges.close()
        # What ends a run must not hide behind what the end of it meets.
        with contextlib.nullcontext() if finished else contextlib.suppress(StorageError):
            for text in self._trackers.messages():
                self.notify(self._position, "tracking", text)
