"""The metrics of a run: lines of ``metrics.jsonl``, trackers, Prometheus, and progress for the driver."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, final

from raycl.distributed import num_workers, rank
from raycl.distributed.step_timer import PAUSED, StepTimer, counted, phase
from raycl.errors import StorageError
from raycl.records import FAILURE, ROLLBACK, MetricsLog
from raycl.tracking.prometheus import Exporter, Reading
from raycl.tracking.trackers import Trackers, open_trackers
from raycl.training.job import Job
from raycl.training.stages import Position

_PROGRESS_INTERVAL_S = 0.3


@final
class MetricsLogger:
    """Log for all workers: the first one writes, the others do nothing."""

    def __init__(
        self,
        job: Job,
        position: Position,
        *,
        num_steps: int,
        resumes: bool = False,
        on_accelerator: bool = False,
    ) -> None:
        """``position`` is the start of the run, or the checkpoint that it ``resumes`` from."""
        self._num_views = job.config.num_views
        self.clock = Clock(position, num_views=self._num_views, on_accelerator=on_accelerator)
        self._coordinator, self._num_steps, self._position = job.coordinator, num_steps, position
        self._began, self._failure = job.began, job.failure
        self._log: MetricsLog | None = None
        self._trackers, self._progress_sent_at = Trackers([]), 0.0
        self._progress: dict[str, Any] = {}  # after the last step; empty before the first one
        self._latest: dict[str, Any] = {}  # exported to Prometheus, with the next two
        self._num_trained_steps = self._num_trained_samples = 0
        if rank() == 0:
            self._log = MetricsLog(
                job.output,
                resume_step=position.step if resumes else None,
                num_rollbacks=position.rollbacks,
                check=job.check_lease,
            )
            self._trackers = open_trackers(job.config, job.output, resume_step=position.step)
            self._exporter = Exporter({"run": job.output.name, "recipe": job.config.recipe}, self._readings)

    def write(self, position: Position, metrics: Mapping[str, Any]) -> None:
        """Add a line of metrics, measured at this position."""
        if self._log is None:
            return
        line = {
            "step": position.step,
            "num_steps": self._num_steps,
            "samples": position.samples,
            "epoch": position.epoch,
            "stage": position.stage,
            "workers": num_workers(),
            "time": int(time.time()),
            **metrics,
            "seconds": self.clock.seconds(),
            "wall_seconds": self._wall_seconds(),
            "goodput": self.goodput(),
        }
        if failures := self._trackers.num_failures:
            line["tracking_failures"] = failures
        # After a rollback the position is an earlier one; the counters never decrease.
        self._num_trained_steps += max(0, position.step - self._position.step)
        self._num_trained_samples += max(0, position.samples - self._position.samples)
        self._position, self._latest = position, self._latest | line
        self._log.write(line)
        self._trackers.write(position.step, line)
        for text in self._trackers.messages():
            self.notify(position, "tracking", text)

    def show_progress(self, position: Position, loss: float) -> None:
        """Update the driver's progress line, a few times a second at most."""
        if self._log is None:
            return
        self._progress = {
            "step": position.step,
            "num_steps": self._num_steps,
            "samples": position.samples,
            "num_views": self._num_views,
            "epoch": position.epoch,
            "loss": loss,
            "seconds": position.seconds,
            "time": time.time(),
        }
        if time.monotonic() - self._progress_sent_at > _PROGRESS_INTERVAL_S:
            self._send_progress()

    def write_failure(self) -> None:
        """After the first step of a group, add a line about the cost of the loss of a group before, unless one did."""
        failure, self._failure, resumed = self._failure, None, self._position
        if self._log is None or failure is None or int(failure.time) in self._log.failed_at:
            return
        pause = max(0.0, time.time() - failure.time)
        repeated = max(0, failure.step - resumed.step)
        lost = pause + max(0.0, failure.seconds - resumed.seconds)
        text = (
            f"{failure.text}: resumed from step {resumed.step} after {pause:.1f} s, repeating {repeated} steps: "
            f"{lost:.1f} s lost"
        )
        # At the step of the checkpoint: a group that resumes from it later keeps the line.
        costs = {"lost_seconds": lost, "repeated_steps": repeated, "failed_at": int(failure.time)}
        self.write(resumed, {"event": FAILURE, "text": text, **costs})
        self.flush()  # the driver forgets this failure if the group is lost, too

    def write_evaluation(self, position: Position, metrics: Mapping[str, float]) -> None:
        """Add a line of metrics and show it in the progress line at once, with the last step."""
        self.write(position, metrics)
        if self._log is not None:
            self._send_progress(metrics)

    def notify(self, position: Position, event: str, text: str) -> None:
        """Print an event in the driver at once, and add it as a line."""
        self.write(position, {"event": event, "text": text})
        self.flush()
        if self._log is not None:
            self._coordinator.add_notice.remote(f"step {position.step}: {text}")

    def roll_back(self, position: Position, text: str) -> None:
        """Notify of a rollback to this position; the trackers drop later steps."""
        self._trackers.roll_back(position.step)
        self._progress = {}  # of a step that is undone
        self.notify(position, ROLLBACK, text)

    def goodput(self) -> float:
        """Return the training time over all time since the run began.

        Steps that a lost group made in vain do not count, those that a rollback undid do.
        """
        return self.clock.seconds() / self._wall_seconds()

    def head(self) -> dict[str, Any]:
        """Return the number of lines and their hash; nothing on other workers than the first."""
        return {} if self._log is None else self._log.head()

    def flush(self) -> None:
        """Write the buffered lines to storage; raises ``StorageError``."""
        if self._log is not None:
            self._log.flush()

    def close(self, *, finished: bool) -> None:
        """Show the last step and send the last metrics to the trackers.

        ``finished`` is false if the run failed or will be continued.
        """
        if self._log is None:
            return
        self._send_progress()
        self._trackers.close(finished=finished)
        self._exporter.close()
        # An error here must not hide the one that ended the run.
        with contextlib.nullcontext() if finished else contextlib.suppress(StorageError):
            for text in self._trackers.messages():
                self.notify(self._position, "tracking", text)

    def _send_progress(self, metrics: Mapping[str, float] | None = None) -> None:
        self._progress_sent_at = time.monotonic()
        self._coordinator.add_progress.remote({**self._progress, **(metrics or {})})

    def _wall_seconds(self) -> float:
        """Return the time since the run began; the clocks of two nodes may differ a little."""
        return max(time.time() - self._began, self.clock.seconds(), 1e-9)

    def _readings(self) -> Iterator[Reading]:
        yield Reading("trained_steps", self._num_trained_steps)
        yield Reading("trained_samples", self._num_trained_samples)
        for name, value in self._latest.items():
            if isinstance(value, int | float):
                yield Reading(name, value)


@final
class Clock:
    """The training time, without evaluations and checkpoints, and the fraction of each phase of the steps."""

    def __init__(self, position: Position, *, num_views: int = 2, on_accelerator: bool = False) -> None:
        self._num_views = num_views
        self._started = time.monotonic() - position.seconds
        self._paused_s = 0.0
        self._lap_samples, self._lap_seconds = position.samples, position.seconds
        self._timer = StepTimer(on_accelerator=on_accelerator)

    def counting(self) -> contextlib.AbstractContextManager[None]:
        """Count the phases of the enclosed code."""
        return counted(self._timer)

    def seconds(self) -> float:
        """Return the seconds of training so far, including those before a restart."""
        return time.monotonic() - self._started - self._paused_s

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the enclosed code from the training time."""
        since = time.monotonic()
        try:
            with phase(PAUSED):
                yield
        finally:
            self._paused_s += time.monotonic() - since

    def lap(self, samples: int) -> tuple[float, dict[str, float]]:
        """Return the seconds since the last lap, and its throughput and fraction of each phase as metrics.

        ``samples`` counts the whole run.
        """
        seconds = self.seconds()
        elapsed = max(seconds - self._lap_seconds, 1e-9)
        throughput = (samples - self._lap_samples) / elapsed
        self._lap_samples, self._lap_seconds = samples, seconds
        phases = self._timer.seconds()
        phases.pop(PAUSED, None)
        total = max(sum(phases.values()), 1e-9)
        waited = phases.pop("data", 0.0) / total
        fractions = {f"{name}_fraction": spent / total for name, spent in phases.items()}
        metrics = {"samples_per_second": throughput, "data_wait_fraction": waited, **fractions}
        if self._num_views > 2:
            metrics["views_per_second"] = throughput * self._num_views
        return elapsed, metrics
