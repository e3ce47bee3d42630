"""What a run writes down: lines of metrics for later, progress and notices for the driver."""

from collections.abc import Mapping
from typing import Any, final

from raycl.records import MetricsLog
from raycl.training.checkpoint import Position
from raycl.training.clock import Clock
from raycl.training.job import Job


@final
class Recorder:
    """Write for all workers; that of any but the first one does nothing."""

    def __init__(
        self, job: Job, position: Position, clock: Clock, *, num_steps: int, is_writer: bool
    ) -> None:
        self._logbook, self._clock, self._num_steps = job.logbook, clock, num_steps
        self._log = (
            MetricsLog(job.output, resume_step=position.step, num_rollbacks=position.rollbacks)
            if is_writer
            else None
        )

    def write(self, position: Position, metrics: Mapping[str, Any]) -> None:
        """Add a line of metrics, measured at this position."""
        if self._log is None:
            return
        where = {
            "step": position.step,
            "samples": position.samples,
            "epoch": position.epoch,
            "stage": position.stage,
        }
        self._log.write(where | dict(metrics) | {"seconds": self._clock.seconds()})

    def show(self, position: Position, metrics: Mapping[str, float], *, now: bool = False) -> None:
        """Let the progress line say where the run is; unless ``now``, a few times a second at most."""
        if self._log is None:
            return
        where = {"step": position.step, "num_steps": self._num_steps, "epoch": position.epoch}
        if now:
            self._logbook.add_progress.remote(dict(metrics))
        else:
            self._clock.tell(self._logbook, where | dict(metrics))

    def notify(self, position: Position, event: str, text: str) -> None:
        """Tell people of an event at once, and write it down."""
        self.write(position, {"event": event, "text": text})
        self.flush()
        if self._log is not None:
            self._logbook.add_notice.remote(f"step {position.step}: {text}")

    def flush(self) -> None:
        """Write out what has gathered; raises ``StorageError``."""
        if self._log is not None:
            self._log.flush()
