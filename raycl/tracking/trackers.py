"""The trackers that a run asks for: whether they can be had, and all of them as one."""

import importlib.util
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

from raycl.config import RunConfig
from raycl.errors import ConfigError
from raycl.storage import Place
from raycl.tracking.background import BackgroundTracker
from raycl.tracking.base import MetricsRecord, Tracker

FOLDER = "tensorboard"  # below the output
PATIENCE_S = 30.0

_EXTRAS = ("mlflow", "wandb")  # settings, packages and extras of the same name
_AXES = ("step", "time")  # of a line of metrics: every tracker has them anyway


@final
class Trackers:
    """Write to all trackers; returns at once, and never raises."""

    def __init__(self, outboxes: Sequence[BackgroundTracker]) -> None:
        self._outboxes = outboxes

    @property
    def num_failures(self) -> int:
        """How often a tracker could not be written to."""
        return sum(outbox.num_failures for outbox in self._outboxes)

    def write(self, step: int, line: Mapping[str, Any]) -> None:
        """Hand on the numbers of a line of metrics; NaN and infinity are left out."""
        numbers = {
            name: float(value) for name, value in line.items() if name not in _AXES and _is_number(value)
        }
        self._put(MetricsRecord(step=step, time=time.time(), metrics=numbers))

    def go_back(self, step: int) -> None:
        """Tell that the run goes on from this step once more."""
        self._put(MetricsRecord(step=step, time=time.time(), metrics={}, goes_back=True))

    def news(self) -> list[str]:
        """Return what people must be told, each once."""
        return [text for outbox in self._outboxes for text in outbox.news()]

    def close(self, *, finished: bool) -> None:
        """Hand over what waits, for some seconds; unless ``finished``, the run may be resumed."""
        for outbox in self._outboxes:
            outbox.begin_closing(finished=finished)
        deadline = time.monotonic() + PATIENCE_S
        for outbox in self._outboxes:
            outbox.wait(max(0.0, deadline - time.monotonic()))

    def _put(self, point: MetricsRecord) -> None:
        for outbox in self._outboxes:
            outbox.put(point)


def check_trackers(config: RunConfig) -> None:
    """Raise ``ConfigError`` if the package of a tracker is not installed here."""
    for name in _EXTRAS:
        if getattr(config.tracking, name) is not None and not _is_installed(name):
            raise ConfigError(
                f"tracking.{name} needs the package {name}, which is not installed: "
                f"pip install 'raycl[{name}]', or leave it out"
            )


def open_trackers(config: RunConfig, output: Place, *, resume_step: int) -> Trackers:
    """Return the trackers of a run that goes on after ``resume_step``; they open in the background."""
    # Their packages are slow to import, and training must not wait: each is imported in its thread.
    openers: dict[str, Callable[[], Tracker]] = {}
    if config.tracking.tensorboard:
        openers["tensorboard"] = partial(_open_tensorboard, output / FOLDER, resume_step)
    if config.tracking.mlflow is not None:
        openers["mlflow"] = partial(_open_mlflow, config, output)
    if config.tracking.wandb is not None:
        openers["wandb"] = partial(_open_wandb, config, output)
    return Trackers([BackgroundTracker(f"tracking.{name}", opener) for name, opener in openers.items()])


def _open_tensorboard(folder: Place, resume_step: int) -> Tracker:
    from raycl.tracking.event_files import EventFiles

    return EventFiles(folder, resume_step=resume_step)


def _open_mlflow(config: RunConfig, output: Place) -> Tracker:
    from raycl.tracking.mlflow_run import MlflowRun

    return MlflowRun(config, output)


def _open_wandb(config: RunConfig, output: Place) -> Tracker:
    from raycl.tracking.wandb_run import WandbRun

    return WandbRun(config, output)


def _is_installed(package: str) -> bool:
    # A folder of that name, as W&B leaves it behind where it ran, passes for a package without a file.
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
