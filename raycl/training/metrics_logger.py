"""What a run writes down: lines of metrics for later, progress and notices for the driver."""

import contextlib
import time
from collections.abc import Mapping
from typing import Any, final

from raycl.distributed import num_workers
from raycl.errors import StorageError
from raycl.records import ROLLBACK, MetricsLog
from raycl.tracking import Trackers, open_trackers
from raycl.training.checkpoint import Position
from raycl.training.clock import Clock
from raycl.training.gauges import PrometheusGauges
from raycl.training.job import Job


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
        for text in self._trackers.news():
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
            self._trackers.go_back(position.step)
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
            for text in self._trackers.news():
                self.notify(self._position, "tracking", text)
