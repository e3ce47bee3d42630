"""The trackers of a run: check their packages, open them, and write to all of them."""

import importlib.util
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, final

from raycl.config import RunConfig
from raycl.errors import ConfigError
from raycl.storage import Place
from raycl.tracking.background import BackgroundTracker
from raycl.tracking.base import MetricsRecord, Tracker

FOLDER = "tensorboard"  # below the output
CLOSE_TIMEOUT_S = 30.0

_EXTRAS = ("mlflow", "wandb")  # names of settings, packages and extras
# Every tracker stores step and time beside the metrics, and the planned number of steps is no curve.
_AXES = ("step", "num_steps", "time")


@final
class Trackers:
    """Write to all trackers, without blocking or raising."""

    def __init__(self, trackers: Sequence[BackgroundTracker]) -> None:
        self._trackers = trackers

    @property
    def num_failures(self) -> int:
        """The number of failed writes."""
        return sum(tracker.num_failures for tracker in self._trackers)

    def write(self, step: int, line: Mapping[str, Any]) -> None:
        """Write the finite numbers of a line of metrics."""
        numbers = {
            name: float(value) for name, value in line.items() if name not in _AXES and _is_number(value)
        }
        self._put(MetricsRecord(step=step, time=time.time(), metrics=numbers))

    def roll_back(self, step: int) -> None:
        """Record that the run returned to this step."""
        self._put(MetricsRecord(step=step, time=time.time(), metrics={}, is_rollback=True))

    def messages(self) -> list[str]:
        """Return messages for the user, each once."""
        return [text for tracker in self._trackers for text in tracker.messages()]

    def close(self, *, finished: bool) -> None:
        """Send the waiting records, for some seconds; unless ``finished``, the run may be resumed."""
        for tracker in self._trackers:
            tracker.begin_closing(finished=finished)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for tracker in self._trackers:
            tracker.wait(max(0.0, deadline - time.monotonic()))

    def _put(self, record: MetricsRecord) -> None:
        for tracker in self._trackers:
            tracker.put(record)


def check_trackers(config: RunConfig) -> None:
    """Raise ``ConfigError`` if the package of a tracker is not installed here."""
    for name in _EXTRAS:
        if getattr(config.tracking, name) is not None and not _is_installed(name):
            raise ConfigError(
                f"tracking.{name} needs the package {name}, which is not installed: "
                f"pip install 'raycl[{name}]', or unset it"
            )


def open_trackers(config: RunConfig, output: Place, *, resume_step: int) -> Trackers:
    """Return the trackers of a run that resumes after ``resume_step``; they open in the background."""
    names = [name for name, address in config.tracking if address]
    openers = {name: partial(_open, name, config, output, resume_step) for name in names}
    return Trackers([BackgroundTracker(f"tracking.{name}", opener) for name, opener in openers.items()])


def _open(name: str, config: RunConfig, output: Place, resume_step: int) -> Tracker:
    # Imported in the tracker's own thread: some packages import slowly, and training must not wait.
    if name == "tensorboard":
        from raycl.tracking.tensorboard import EventFiles

        return EventFiles(output / FOLDER, resume_step=resume_step)
    if name == "mlflow":
        from raycl.tracking.mlflow import MlflowRun

        return MlflowRun(config, output)
    from raycl.tracking.wandb import WandbRun

    return WandbRun(config, output)


def _is_installed(package: str) -> bool:
    # W&B leaves a folder of this name where it ran, which Python takes for a namespace package.
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
