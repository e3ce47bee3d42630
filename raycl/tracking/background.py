"""A tracker in a thread of its own; records wait in a queue while its server is slow or unreachable."""

import textwrap
import threading
from collections.abc import Callable
from typing import final

from raycl.tracking.base import MetricsRecord, Tracker

INTERVAL_S = 5.0
MAX_WAITING = 10_000  # records; some megabytes


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
