"""The trackers of a run: check their packages, open them, and write to all of them in threads of their own."""

import importlib.util
import math
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

from raycl.config import RunConfig
from raycl.errors import ConfigError
from raycl.storage import Place
from raycl.tracking.base import MetricsRecord, Tracker

FOLDER = "tensorboard"  # below the output
CLOSE_TIMEOUT_S = 30.0
INTERVAL_S = 5.0
MAX_WAITING = 10_000  # records of a tracker; some megabytes

_EXTRAS = ("mlflow", "wandb")  # names of settings, packages and extras
# Every tracker stores step and time beside the metrics; the planned number of steps and the time of a failure are not curves.
_AXES = ("step", "num_steps", "time", "failed_at")


@final
class BackgroundTracker:
    """Send records to a tracker every few seconds.

    Records that the tracker refuses are sent again with the next ones; beyond ``MAX_WAITING`` the oldest
    are dropped.
    """

    def __init__(
        self, name: str, open_tracker: Callable[[], Tracker], *, interval_s: float = INTERVAL_S
    ) -> None:
        """``open_tracker`` is called in the thread, and again after it failed."""
        self._name, self._open_tracker, self._interval_s = name, open_tracker, interval_s
        self._tracker: Tracker | None = None
        self._lock = threading.Lock()
        self._waiting: list[MetricsRecord] = []
        self._num_put = self._num_written = self._num_sent = 0
        self._messages: list[str] = []
        self.num_failures = 0
        self._closing, self._finished = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name=f"raycl {name}", daemon=True)
        self._thread.start()

    def put(self, record: MetricsRecord) -> None:
        """Queue a record; returns at once."""
        with self._lock:
            self._num_put += 1
            self._queue([*self._waiting, record])

    def messages(self) -> list[str]:
        """Return messages for the user, each once."""
        with self._lock:
            messages, self._messages = self._messages, []
        return messages

    def begin_closing(self, *, finished: bool) -> None:
        """Send the waiting records and close, without blocking."""
        self._finished = finished
        self._closing.set()

    def wait(self, timeout_s: float) -> None:
        """Wait for the end; records that were not sent in time are reported."""
        self._thread.join(timeout_s)
        if num_missing := self._num_put - self._num_sent:
            self._report(
                f"{self._name} did not store the metrics of {num_missing} logged steps; metrics.jsonl has them"
            )

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(self._interval_s)
            try:
                if self._tracker is None:
                    self._tracker = self._open_tracker()
                self._send(self._tracker)
                if closing:
                    self._tracker.close(finished=self._finished)
            except Exception as error:
                self.num_failures += 1
                if self.num_failures == 1:
                    reason = textwrap.shorten(str(error) or type(error).__name__, 300, placeholder="...")
                    effect = "" if closing else "; training continues, and raycl retries"
                    self._report(f"{self._name} failed: {reason}{effect}")

    def _send(self, tracker: Tracker) -> None:
        with self._lock:
            records, self._waiting = self._waiting, []
        try:
            if records:
                tracker.write(records)
        except Exception:
            with self._lock:
                self._queue(records + self._waiting)
            raise
        self._num_written += len(records)
        tracker.flush()
        self._num_sent = self._num_written

    def _queue(self, records: list[MetricsRecord]) -> None:
        self._waiting = records[-MAX_WAITING:]

    def _report(self, text: str) -> None:
        with self._lock:
            self._messages.append(text)


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
