"""The outbox of one tracker: points wait here while its server is slow or away."""

import textwrap
import threading
from collections.abc import Callable
from typing import final

from raycl.tracking.base import MetricsRecord, Tracker

EVERY_S = 5.0
MOST_WAITING = 10_000  # points; some megabytes


@final
class BackgroundTracker:
    """Hand points to a tracker from a thread of its own, every few seconds.

    What a tracker did not take is offered again with what came since; if more than ``MOST_WAITING``
    points wait, the oldest are lost.
    """

    def __init__(self, name: str, open_tracker: Callable[[], Tracker], *, every_s: float = EVERY_S) -> None:
        """``open_tracker`` is called in the thread, and again after it failed."""
        self._name, self._open_tracker, self._every_s = name, open_tracker, every_s
        self._tracker: Tracker | None = None
        self._lock = threading.Lock()
        self._waiting: list[MetricsRecord] = []
        self._num_put = self._num_delivered = 0
        self._news: list[str] = []
        self.num_failures = 0
        self._closing, self._finished = threading.Event(), False
        self._thread = threading.Thread(target=self._deliver, name=f"raycl {name}", daemon=True)
        self._thread.start()

    def put(self, point: MetricsRecord) -> None:
        """Take in a point; returns at once."""
        with self._lock:
            self._waiting.append(point)
            self._num_put += 1
            self._forget_the_oldest()

    def news(self) -> list[str]:
        """Return what people must be told, each once."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def begin_closing(self, *, finished: bool) -> None:
        """Hand over what still waits, and end."""
        self._finished = finished
        self._closing.set()

    def wait(self, patience_s: float) -> None:
        """Wait so long for the end; what did not arrive is told."""
        self._thread.join(patience_s)
        if num_missing := self._num_put - self._num_delivered:
            self._tell(
                f"{self._name} did not take the metrics of {num_missing} logged steps; metrics.jsonl has them"
            )

    def _deliver(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(self._every_s)
            try:
                tracker = self._hand_over()
                if closing:
                    tracker.close(finished=self._finished)
            except Exception as error:
                self._note(error)

    def _hand_over(self) -> Tracker:
        if self._tracker is None:
            self._tracker = self._open_tracker()
        with self._lock:
            points, self._waiting = self._waiting, []
        try:
            if points:
                self._tracker.write(points)
        except Exception:
            with self._lock:
                self._waiting = points + self._waiting
                self._forget_the_oldest()
            raise
        self._num_delivered += len(points)
        self._tracker.flush()
        return self._tracker

    def _forget_the_oldest(self) -> None:
        del self._waiting[: max(0, len(self._waiting) - MOST_WAITING)]

    def _note(self, error: Exception) -> None:
        self.num_failures += 1
        if self.num_failures == 1:
            why = textwrap.shorten(str(error) or type(error).__name__, 300, placeholder="...")
            self._tell(f"{self._name} takes no metrics: {why}; the run goes on, and they are offered again")

    def _tell(self, text: str) -> None:
        with self._lock:
            self._news.append(text)
