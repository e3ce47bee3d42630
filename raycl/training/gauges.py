"""The last numbers of a run, for Prometheus."""

from collections.abc import Iterator, Mapping
from typing import Any, final

from raycl.tracking.prometheus import Exporter, Reading
from raycl.training.checkpoint import Position
from raycl.training.job import Job


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
