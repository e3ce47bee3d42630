"""One shard of a bank, as a plain class: what its actor holds and its clients ask."""

import json
import os
from abc import ABC, abstractmethod

import numpy as np

from raycl.errors import RunError
from raycl.negatives.messages import Part, ShardInfo
from raycl.negatives.search import Neighbors, RowStats, nearest, take_census, written
from raycl.negatives.snapshot import (
    describe,
    read_current,
    read_metadata,
    shard_file,
    snapshot_folder,
    write_rows,
)
from raycl.negatives.spec import BankSpec
from raycl.negatives.store import Negatives, checked_ids
from raycl.negatives.throughput import RateMeter, Throughput
from raycl.storage import Place


class BankShard(ABC):
    """What both kinds of shard have in common: snapshots and questions.

    A new shard is what the snapshot in force says, or as new. Calls of workers of an earlier
    attempt are refused, since these should be gone.
    """

    def __init__(self, plan: BankSpec, shard: int) -> None:
        """Make the shard; raises what reading its snapshot raises."""
        self._plan, self._shard = plan, shard
        self._applied: dict[str, int] = {}  # client -> serial of its last update
        self._puts, self._reads = RateMeter(), RateMeter()
        current = read_current(plan)
        self._attempt = current.attempt
        self._become(current.step)

    def hello(self, attempt: int | None = None) -> ShardInfo:
        """Say what this is and how far it is, to a worker of this attempt or to anyone.

        Raises:
            RunError: The bank was restored since the worker joined.
        """
        if attempt is not None:
            self._admit(attempt)
        return ShardInfo(
            self._plan, self._attempt, os.getpid(), len(self._slots().step), self._first_missing()
        )

    def save(self, step: int) -> None:
        """Write the snapshot of a step, atomically; raises ``StorageError``."""
        mine = {"step": step, "sequence": self._sequence(), "attempt": self._attempt}
        metadata = describe(self._plan, self._shard) | {name: str(value) for name, value in mine.items()}
        metadata["applied"] = json.dumps(self._applied)
        file = snapshot_folder(self._plan, step) / shard_file(self._shard, self._plan.num_shards)
        write_rows(file, self._slots(), metadata)

    def restore(self, step: int, attempt: int) -> None:
        """Become what the snapshot of this step says, or as new at step 0, for a new attempt.

        Raises:
            StorageError: There is no such snapshot.
            ConfigError: It is of a bank of another shape.
        """
        self._become(step)
        self._attempt, self._applied = attempt, {}

    def read_slots(self, start: int, stop: int) -> Part:
        """Return rows by their place in this shard; numbers are those of the log, or slots of the bank."""
        mine = self._slice(start, stop)
        self._reads.count(len(mine))
        return Part(self._numbers()[start:stop], mine.rows, mine.sample_id, mine.step)

    def find(self, sample_id: np.ndarray) -> Part:
        """Return the rows of those of these samples that are here, in the order of slots."""
        mine = self._slots()
        found = np.flatnonzero(np.isin(mine.sample_id, checked_ids(sample_id)))
        return Part(self._numbers()[found], mine.rows[found], mine.sample_id[found], mine.step[found])

    def nearest(
        self, start: int, stop: int, queries: np.ndarray, k: int, without: int | None
    ) -> list[Neighbors]:
        """Return the k rows of these slots that are nearest to each unit query [n, dim]."""
        return nearest(self._slice(start, stop), queries, k, without=without)

    def census(self, start: int, stop: int) -> RowStats:
        """Count and measure the rows of these slots."""
        return take_census(self._slice(start, stop))

    def traffic(self) -> Throughput:
        """Return how much was written and read."""
        return Throughput(
            self._puts.total, self._reads.total, self._puts.per_second(), self._reads.per_second()
        )

    def totals(self) -> tuple[int, int, int]:
        """Return slots in use, rows written and rows read; another thread than the shard's may ask."""
        return len(self._slots().step), self._puts.total, self._reads.total

    def export(self, start: int, stop: int, uri: str) -> int:
        """Write those of these slots that were written into a file below ``uri``; return how many."""
        name = shard_file(self._shard, self._plan.num_shards, first_row=start)
        rows = written(self._slice(start, stop))
        return write_rows(Place(uri) / name, rows, describe(self._plan, self._shard)) if len(rows) else 0

    @abstractmethod
    def _become(self, step: int) -> None:
        """Be what the snapshot of a step says, or as new at step 0."""

    @abstractmethod
    def _slots(self) -> Negatives:
        """Lend all slots in use, of rows that are missing as well."""

    @abstractmethod
    def _numbers(self) -> np.ndarray:
        """Return the number of each of these slots in the whole bank."""

    @abstractmethod
    def _sequence(self) -> int:
        """How many rows this shard has seen."""

    @abstractmethod
    def _first_missing(self) -> int:
        """The number of the first row that is not here."""

    def _slice(self, start: int, stop: int) -> Negatives:
        mine = self._slots()
        return Negatives(mine.rows[start:stop], mine.sample_id[start:stop], mine.step[start:stop])

    def _metadata(self, step: int) -> dict[str, str]:
        metadata = read_metadata(self._plan, self._shard, step)
        # A client whose update is in the snapshot, but was never answered, sends it again.
        is_of_this_attempt = int(metadata["attempt"]) == self._attempt
        self._applied = json.loads(metadata["applied"]) if is_of_this_attempt else {}
        return metadata

    def _admit(self, attempt: int) -> None:
        if attempt != self._attempt:
            raise RunError(
                f"the bank {self._plan.name!r} was restored after this worker had joined it, so its rows came "
                "too late and were left out; end the worker, or make its client after bank.restore"
            )
