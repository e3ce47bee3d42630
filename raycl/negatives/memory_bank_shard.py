"""A shard of a memory bank."""

from typing import final

import numpy as np

from raycl.negatives.bank_shard import BankShard
from raycl.negatives.memory_bank import MemoryBank
from raycl.negatives.messages import Update
from raycl.negatives.snapshot import has_snapshot, read_parts, read_samples
from raycl.negatives.store import Negatives


@final
class MemoryBankShard(BankShard):
    """A contiguous range of a memory bank's slots."""

    _bank: MemoryBank

    def exchange(
        self, attempt: int, updates: tuple[Update, ...], slots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Take in updates, each once, then return rows [n, dim] and steps [n] of ``slots``, int64 [n].

        Raises:
            RunError: The bank was restored since the client was made.
            ConfigError: Rows or slots are not of this shard.
        """
        self._admit(attempt)
        for update in updates:
            self._apply(update)
        read = self._bank.read(slots)
        self._reads.count(len(slots))
        return read.rows.astype(self._plan.sent_dtype, copy=False), read.step

    def fill(self, attempt: int, sample_id: np.ndarray, rows: np.ndarray) -> None:
        """Give samples their first rows; to do it twice does no harm. Raises what ``exchange`` raises."""
        self._admit(attempt)
        self._bank.fill(sample_id, rows)
        self._puts.count(len(rows))

    def _apply(self, update: Update) -> None:
        if update.serial <= self._applied.get(update.client, 0):
            return
        self._bank.update(update.sample_id, update.rows, update.step)
        self._applied[update.client] = update.serial
        self._puts.count(len(update.rows))

    def _become(self, step: int) -> None:
        plan = self._plan
        # Of step 0 there is a snapshot if the first rows were filled in.
        metadata = self._metadata(step) if step or has_snapshot(plan, self._shard, 0) else None
        vars(self).pop("_bank", None)  # its memory goes before that of the next one comes
        self._bank = MemoryBank(
            read_samples(plan, self._shard),
            plan.dim,
            seed=plan.seed,
            momentum=plan.momentum,
            dtype=plan.row_dtype,
            first_slot=int(plan.first_slots[self._shard]),
            num_slots=plan.capacity,
        )
        if metadata:
            for part in read_parts(plan, self._shard, step):
                self._bank.load_part(part)

    def _slots(self) -> Negatives:
        return self._bank.negatives()

    def _numbers(self) -> np.ndarray:
        return np.arange(len(self._bank)) + self._plan.first_slots[self._shard]

    def _sequence(self) -> int:
        return len(self._bank)

    def _first_missing(self) -> int:
        return 0
