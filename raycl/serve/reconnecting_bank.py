"""A bank that may disappear and return while it is explored."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar, final

import numpy as np

from raycl.errors import ConfigError, RayclError, RunError
from raycl.negatives.bank import Bank
from raycl.negatives.search import Neighbors
from raycl.negatives.stats import BankStats
from raycl.negatives.store import Negatives

Answer = TypeVar("Answer")
_PAUSE_FACTOR, _MAX_PAUSE_S = 20.0, 60.0


class UnknownSampleError(ConfigError):
    """The bank holds no row of this sample."""


@final
class ReconnectingBank:
    """Query a bank from any thread, and reconnect after it was lost.

    All viewers share one statistics call per ``keep_s`` seconds; after a slow call the next one waits 20
    times its duration, a minute at most. Every method raises ``RunError`` while the bank is unreachable.
    """

    def __init__(self, connect: Callable[[], Bank], *, keep_s: float = 1.0) -> None:
        """``connect`` is called by the first query, and after each loss."""
        self._connect, self._keep_s = connect, keep_s
        self._bank: Bank | None = None
        self._connecting, self._measuring = threading.Lock(), threading.Lock()
        self._measured_at, self._took_s = -np.inf, 0.0
        self._last: BankStats | RunError = RunError("the bank was not queried yet; try again")
        self.num_answered = 0

    def stats(self) -> BankStats:
        """Return statistics of the bank, cached for a while."""
        with self._measuring:
            start = time.monotonic()
            pause = max(self._keep_s, min(_PAUSE_FACTOR * self._took_s, _MAX_PAUSE_S))
            if start - self._measured_at > pause:
                try:
                    self._last = self._ask(lambda bank: bank.stats())
                    self._took_s = time.monotonic() - start
                except RunError as error:
                    # Threads that wait for the lock get this error instead of waiting again.
                    self._last, self._took_s = error, 0.0
                self._measured_at = time.monotonic()
            if isinstance(self._last, RunError):
                raise RunError(str(self._last))
            return self._last

    def newest_step(self) -> int:
        """Return the newest step of the last statistics, however old; 0 if the bank was unreachable."""
        if self._measured_at == -np.inf:
            return self.stats().newest_step or 0
        last = self._last  # another thread may replace it
        return 0 if isinstance(last, RunError) else last.newest_step or 0

    def nearest_to_sample(self, sample_id: int, k: int) -> Neighbors:
        """Return the rows nearest to the newest row of a sample, without its own rows."""
        return self._counted(self._ask(lambda bank: _known(lambda: bank.nearest_of(sample_id, k))))

    def nearest(self, query: np.ndarray, k: int) -> Neighbors:
        """Return the rows nearest to an embedding [dim]; raises ``ConfigError`` for another dim."""
        return self._counted(self._ask(lambda bank: bank.nearest(query, k)[0]))

    def rows_of(self, sample_id: int) -> Negatives:
        """Return all rows of a sample, at least one; raises ``UnknownSampleError``."""
        found = self._ask(lambda bank: _known(lambda: bank.get(np.array([sample_id]))))
        if not len(found):
            raise UnknownSampleError(f"the bank holds no row of sample {sample_id} now; give another id")
        return self._counted(found)

    def norms_of(self, found: Neighbors) -> list[float | None]:
        """Return the norms of these rows, None for a row that was replaced since."""
        if not len(found):
            return []
        rows = self._ask(lambda bank: bank.get(np.unique(found.sample_id)))
        norms = np.linalg.norm(rows.rows.astype(np.float32), axis=1).tolist()
        known = dict(zip(zip(rows.sample_id.tolist(), rows.step.tolist(), strict=True), norms, strict=True))
        return [known.get(row) for row in zip(found.sample_id.tolist(), found.step.tolist(), strict=True)]

    def _ask(self, question: Callable[[Bank], Answer]) -> Answer:
        with self._connecting:
            if self._bank is None:
                try:
                    self._bank = self._connect()
                except RayclError as error:
                    raise RunError(str(error)) from error
            bank = self._bank
        try:
            return question(bank)
        except ConfigError:  # a wrong query, not a lost bank
            raise
        except RayclError as error:
            self._bank = None
            raise RunError(str(error)) from error

    def _counted(self, answer: Answer) -> Answer:
        self.num_answered += 1
        return answer


def _known(ask: Callable[[], Answer]) -> Answer:
    """Run a query in which only the sample's id can be wrong."""
    try:
        return ask()
    except ConfigError as error:
        raise UnknownSampleError(str(error)) from error
