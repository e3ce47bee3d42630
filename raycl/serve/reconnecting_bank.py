"""A bank that may go and come back while it is looked at."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar, final

import numpy as np

from raycl.errors import ConfigError, RayclError, RunError
from raycl.negatives.bank import Bank
from raycl.negatives.bank_stats import BankStats
from raycl.negatives.search import Neighbors
from raycl.negatives.store import Negatives

Answer = TypeVar("Answer")
_REST = 20.0  # times as long as a count took
_LONGEST_REST_S = 60.0


class UnknownSampleError(ConfigError):
    """The bank holds no row of this sample."""


@final
class ReconnectingBank:
    """Ask a bank; look for it anew after it was gone. Many threads may ask at the same time.

    However many look on, the bank is counted and measured once in ``keep_s`` seconds at most; what takes long
    is followed by a rest of twenty times as long, a minute at most.
    Every question raises ``RunError`` while the bank is away.
    """

    def __init__(self, connect: Callable[[], Bank], *, keep_s: float = 1.0) -> None:
        """Take what finds the bank; it is called when the first question comes, and after each loss."""
        self._connect, self._keep_s = connect, keep_s
        self._bank: Bank | None = None
        self._looking = threading.Lock()
        self._counting = threading.Lock()
        self._last_look, self._took_s = -np.inf, 0.0
        self._last: BankStats | RunError = RunError("nobody has asked the bank yet; ask again")
        self.num_answered = 0

    def stats(self) -> BankStats:
        """Return the bank in numbers, those of the last count if that is not long ago."""
        with self._counting:
            began = time.monotonic()
            if began - self._last_look > max(self._keep_s, min(_REST * self._took_s, _LONGEST_REST_S)):
                try:
                    self._last = self._ask(lambda bank: bank.stats())
                    self._took_s = time.monotonic() - began
                except RunError as error:
                    # Those who wait for their turn need not wait for it again.
                    self._last, self._took_s = error, 0.0
                self._last_look = time.monotonic()
            if isinstance(self._last, RunError):
                raise RunError(str(self._last))
            return self._last

    def newest_step(self) -> int:
        """Return the newest step of the last count, however long ago; 0 if it found no bank."""
        if self._last_look == -np.inf:
            return self.stats().newest_step or 0
        last = self._last  # another thread may be counting
        return 0 if isinstance(last, RunError) else last.newest_step or 0

    def nearest_of(self, sample_id: int, k: int) -> Neighbors:
        """Return the rows nearest to the newest row of a sample, its own left out."""
        return self._count(self._ask(lambda bank: _known(lambda: bank.nearest_of(sample_id, k))))

    def nearest(self, query: np.ndarray, k: int) -> Neighbors:
        """Return the rows nearest to an embedding [dim]; raises ``ConfigError`` for another dim."""
        return self._count(self._ask(lambda bank: bank.nearest(query, k)[0]))

    def rows_of(self, sample_id: int) -> Negatives:
        """Return all rows of a sample, at least one."""
        found = self._ask(lambda bank: _known(lambda: bank.get(np.array([sample_id]))))
        if not len(found):
            raise UnknownSampleError(f"the bank holds no row of sample {sample_id} now; ask for another one")
        return self._count(found)

    def norms_of(self, found: Neighbors) -> list[float | None]:
        """Return the lengths of these rows, None for one that was replaced since it was found."""
        if not len(found):
            return []
        rows = self._ask(lambda bank: bank.get(np.unique(found.sample_id)))
        lengths = np.linalg.norm(rows.rows.astype(np.float32), axis=1).tolist()
        known = dict(zip(zip(rows.sample_id.tolist(), rows.step.tolist(), strict=True), lengths, strict=True))
        return [known.get(row) for row in zip(found.sample_id.tolist(), found.step.tolist(), strict=True)]

    def _ask(self, question: Callable[[Bank], Answer]) -> Answer:
        try:
            return question(self._found())
        except (ConfigError, UnknownSampleError):
            raise
        except RayclError as error:
            self._bank = None
            raise RunError(str(error)) from error

    def _found(self) -> Bank:
        with self._looking:
            if self._bank is None:
                try:
                    self._bank = self._connect()
                except ConfigError as error:
                    raise RunError(str(error)) from error
            return self._bank

    def _count(self, answer: Answer) -> Answer:
        self.num_answered += 1
        return answer


def _known(ask: Callable[[], Answer]) -> Answer:
    """Ask about a sample, whose id is all that can be wrong."""
    try:
        return ask()
    except ConfigError as error:
        raise UnknownSampleError(str(error)) from error
