"""How many rows come and go."""

import time
from collections import deque
from typing import NamedTuple, final

# Rates are those of the last so many seconds.
_WINDOW_S = 10


class Throughput(NamedTuple):
    """Rows written and read since the shard started, and lately a second."""

    puts: int
    reads: int
    puts_per_second: float
    reads_per_second: float


@final
class RateMeter:
    """Count, altogether and over the last seconds."""

    def __init__(self) -> None:
        self.total = 0
        self._started = time.monotonic()
        self._recent: deque[list[float]] = deque()  # [second, count]

    def count(self, num: int) -> None:
        """Add to the count of this second."""
        self.total += num
        second = int(time.monotonic())
        if not self._recent or self._recent[-1][0] != second:
            self._recent.append([second, 0])
        self._recent[-1][1] += num
        self._forget(second)

    def per_second(self) -> float:
        """Return the mean of the last seconds, or of those since the start."""
        now = time.monotonic()
        self._forget(int(now))
        window = min(_WINDOW_S, max(now - self._started, 1.0))
        return sum(num for _, num in self._recent) / window

    def _forget(self, second: int) -> None:
        while self._recent and self._recent[0][0] <= second - _WINDOW_S:
            self._recent.popleft()
