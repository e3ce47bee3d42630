"""The memory bank of instance discrimination: one slot for every sample."""

from collections.abc import Mapping
from typing import NamedTuple, final

import numpy as np
from numpy.typing import DTypeLike

from raycl.arguments import check_type
from raycl.errors import ConfigError
from raycl.negatives.averages import AVERAGES, DRAWS, has_direction, normalized, random_stream
from raycl.negatives.store import Negatives, State, checked, checked_ids, empty_rows, named, negatives_in


@final
class MemoryBank:
    """Keep one row of length 1 for every sample, moved towards each new one (Wu et al., 2018).

    With ``kind`` ``partition``, a row holds log partition functions instead (Yuan et al., 2022): it has any
    length, is -inf until the first update, and u becomes momentum * u + (1 - momentum) * new u.

    Slots are in the order of the samples' ids. A shard of a bank is a contiguous range of slots, made
    with the ids of its range, ``first_slot`` and ``num_slots``. It numbers slots as the whole bank
    does, and holds the same rows, to the last bit.

    Whatever does not fit is refused with ``ConfigError``, and the bank is unchanged: samples and slots
    that are not here, other shapes and types, steps below 0, values that are NaN, infinite or above 65,504.
    """

    def __init__(
        self,
        sample_id: np.ndarray,
        dim: int,
        *,
        seed: int,
        momentum: float = 0.5,
        dtype: DTypeLike = np.float32,
        first_slot: int = 0,
        num_slots: int | None = None,
        kind: str = "memory_bank",
    ) -> None:
        """Make a bank of random rows for samples of any distinct ids, int64 [n], in any order.

        The rows are uniform on the sphere, a function of seed and slot. ``num_slots`` is the number
        of slots of the whole bank, by default up to the end of this shard.
        """
        check_type("seed", seed, int)
        check_type("momentum", momentum, float)
        if kind not in tuple(AVERAGES):
            raise ConfigError(f"unknown kind {kind!r} of a bank; choose {' or '.join(AVERAGES)}")
        if not 0 <= momentum < 1:
            raise ConfigError(f"the bank's momentum is not in [0, 1): it is {momentum:g}; the default is 0.5")
        self._samples = SampleIndex(sample_id)
        self._first_slot, self._stop = first_slot, first_slot + len(sample_id)
        self._num_slots = self._stop if num_slots is None else num_slots
        if not 0 <= first_slot <= self._stop <= self._num_slots:
            raise ConfigError(
                f"the shard is not in the bank: its slots are {first_slot} to {self._stop} of "
                f"{self._num_slots}; give the first slot of its range and the bank's number of slots"
            )
        self._seed, self._momentum, self._average = seed, momentum, AVERAGES[kind]
        self._rows = empty_rows(len(sample_id), dim, dtype)
        self._step = np.full(len(sample_id), -1)
        self._is_unsaved = np.ones(len(sample_id), bool)
        self._calls: list[_Call] = []  # of the latest step
        self._latest_step: int | None = None
        self._average.initialize(self._rows, first_slot, seed)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_bytes(self) -> int:
        """Memory of rows, ids and steps, in bytes; the calls of one step and a byte for each row come on top."""
        return self._rows.nbytes + self._samples.sample_id.nbytes + self._step.nbytes

    def slots_of(self, sample_id: np.ndarray) -> np.ndarray:
        """Return the slot of each sample, int64 [n]."""
        return self._samples.positions_of(sample_id) + self._first_slot

    def draw(self, num: int, *, step: int) -> np.ndarray:
        """Draw slots of the whole bank for one step: :func:`draw_slots` with this bank's seed."""
        return draw_slots(self._num_slots, num, seed=self._seed, step=step)

    def read(self, slots: np.ndarray) -> Negatives:
        """Return copies of the rows in ``slots``, int64 [n], in their order; -1 is the step of a first row."""
        check_slots(slots, self._first_slot, self._stop)
        return self._take(slots - self._first_slot)

    def negatives(self) -> Negatives:
        """Return all rows in the order of slots: the bank's memory, not a copy."""
        return Negatives(self._rows, self._samples.sample_id, self._step)

    def get(self, sample_id: np.ndarray) -> Negatives:
        """Return copies of the rows of the samples ``sample_id``, int64 [n], in their order."""
        return self._take(self._samples.positions_of(sample_id))

    def find(self, sample_id: np.ndarray) -> Negatives:
        """Return copies of the rows of those samples that are here, in the order of slots.

        ``sample_id`` are int64 [n]; unknown ids are skipped. Raises ``ConfigError`` for other types.
        """
        return self._take(self._samples.find(sample_id))

    def update(self, sample_id: np.ndarray, rows: np.ndarray, step: int) -> None:
        """Move the slots of ``sample_id`` [n] towards ``rows`` [n, dim], written at ``step``.

        A slot becomes normalize(momentum * slot + (1 - momentum) * normalize(row)), in float32. It
        stays unchanged if the result has no direction: the row is opposite to the slot, or zeros.

        Several rows of one sample count as one row in the direction of their sum, also if they come
        in several calls of one ``step``, for example from different workers. So a batch gives the
        same bank, to the last bit, in any order and however it is split, unless a call of another
        step comes in between. For this the bank keeps the rows of the latest step.
        """
        _check_step(step)
        rows, ids = checked(rows, sample_id, dim=self._rows.shape[1])
        positions, units = self._samples.positions_of(ids), self._average.prepare(rows)
        if step != self._latest_step:
            self._latest_step, self._calls = step, []
        owners, came = self._with_earlier(positions, units)
        distinct, means = self._average.mean(owners, came)
        before = np.take(self._rows, distinct, axis=0)
        self._calls.append(_Call(positions, units, distinct, before))
        self._rows[distinct] = self._average.move(before, means, self._momentum)
        self._step[distinct], self._is_unsaved[distinct] = step, True

    def replace(self, sample_id: np.ndarray, rows: np.ndarray, step: int) -> None:
        """Replace the slots of distinct samples [n] by these rows [n, dim], written at ``step``; rows are normalized.

        Unlike ``update``, it keeps no rows of the step, so that one step may replace the whole bank.
        """
        _check_step(step)
        rows, ids = checked(rows, sample_id, dim=self._rows.shape[1])
        positions = self._samples.positions_of(ids)
        self._rows[positions], self._step[positions] = normalized(rows), step
        self._is_unsaved[positions] = True
        self._calls = []

    def initialize(self, sample_id: np.ndarray, rows: np.ndarray) -> None:
        """Initialize the slots of the samples [n] with rows [n, dim]; rows are normalized.

        Their step is -1: never updated. Earlier rows are replaced, except by a row of zeros, which has
        no direction.
        """
        rows, ids = checked(rows, sample_id, dim=self._rows.shape[1])
        positions = self._samples.positions_of(ids)
        chosen = has_direction(rows)
        positions, rows = positions[chosen], rows[chosen]
        self._rows[positions], self._step[positions] = normalized(rows), -1
        self._is_unsaved[positions] = True
        self._calls = []

    def unsaved(self) -> np.ndarray:
        """Return the positions of the rows written since ``mark_saved``, of all rows before it, int64 [n], in order."""
        return np.flatnonzero(self._is_unsaved)

    def mark_saved(self) -> None:
        """Note that a snapshot has all rows."""
        self._is_unsaved[:] = False

    def state_dict(self) -> State:
        """Return rows, ids and steps.

        The arrays are the bank's memory: save or copy them before the next update. Seed and
        momentum are settings, not state.
        """
        return {"rows": self._rows, "sample_id": self._samples.sample_id, "step": self._step}

    def load_state_dict(self, state: Mapping[str, np.ndarray | int]) -> None:
        """Restore what ``state_dict`` returned."""
        kept = negatives_in(state, num_rows=len(self), dim=self._rows.shape[1], dtype=self._rows.dtype)
        if not np.array_equal(kept.sample_id, self._samples.sample_id):
            strangers = np.setdiff1d(kept.sample_id, self._samples.sample_id)
            raise ConfigError(
                f"the state is of other samples, such as {named(strangers)}; "
                "load it into a bank made with the ids of the same data"
            )
        self._rows[:], self._step[:], self._is_unsaved[:] = kept.rows, kept.step, True
        self._calls = []

    def load_part(self, part: Negatives) -> None:
        """Restore the slots of the samples in ``part`` of a state."""
        is_new = (part.step < 0) & np.isneginf(part.rows).all(
            1
        )  # without an estimate of a partition function
        rows = np.where(is_new[:, None], 0, part.rows)
        rows, ids = checked(rows, part.sample_id, dim=self._rows.shape[1], dtype=self._rows.dtype)
        rows[is_new] = -np.inf
        positions = self._samples.positions_of(ids)
        self._rows[positions], self._step[positions] = rows, part.step
        self._is_unsaved[positions] = True
        self._calls = []

    def _with_earlier(self, positions: np.ndarray, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return these rows and the rows of earlier calls of the step for the same slots, whose effect is undone."""
        if not (self._step[positions] == self._latest_step).any():
            return positions, units
        owners, came = [positions], [units]
        for call in self._calls:
            undone = np.isin(call.distinct, positions)
            self._rows[call.distinct[undone]] = call.before[undone]
            again = np.isin(call.positions, positions)
            owners.append(call.positions[again])
            came.append(call.units[again])
        return np.concatenate(owners), np.concatenate(came)

    def _take(self, positions: np.ndarray) -> Negatives:
        ids = self._samples.ids_at(positions)
        return Negatives(np.take(self._rows, positions, axis=0), ids, np.take(self._step, positions))


def _check_step(step: int) -> None:
    check_type("step", step, int)
    if step < 0:  # -1 marks rows that were never written
        raise ConfigError(f"a row cannot be of step {step}; steps count from 0")


class _Call(NamedTuple):
    """The rows of one call of ``update``, and the slots before its step."""

    positions: np.ndarray  # [n]
    units: np.ndarray  # [n, dim]
    distinct: np.ndarray  # [num_distinct], the positions without repetition
    before: np.ndarray  # [num_distinct, dim], as they were before the step


@final
class SampleIndex:
    """Distinct ids in ascending order; a sample's position is its index among them."""

    def __init__(self, sample_id: np.ndarray) -> None:
        """Sort ids, int64 [n], that come in any order; raises ``ConfigError`` for none or repeated ones."""
        self.sample_id = np.sort(checked_ids(sample_id))
        if len(self) == 0:
            raise ConfigError("the bank has no samples; make it with the ids of all training data")
        twice = self.sample_id[1:][self.sample_id[1:] == self.sample_id[:-1]]
        if len(twice):
            raise ConfigError(
                f"the bank's sample ids are not distinct: {named(twice)} came more than once; "
                "a bank has a slot for every sample"
            )
        self._is_gapless = int(self.sample_id[-1]) - int(self.sample_id[0]) == len(self) - 1

    def __len__(self) -> int:
        return len(self.sample_id)

    def positions_of(self, sample_id: np.ndarray) -> np.ndarray:
        """Return the position of each sample, int64 [n]; raises ``ConfigError`` for one not among these."""
        ids = checked_ids(sample_id)
        positions, unknown = self._search(ids)
        if unknown.any():
            raise ConfigError(
                f"the bank has no slot for the samples {named(ids[unknown])}: it holds {len(self)}, from "
                f"{self.sample_id[0]} to {self.sample_id[-1]}; make it with the ids of all training data"
            )
        return positions

    def find(self, sample_id: np.ndarray) -> np.ndarray:
        """Return the positions of those samples that are here, distinct and in ascending order."""
        positions, unknown = self._search(checked_ids(sample_id))
        return np.unique(positions[~unknown])

    def ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples at these positions, int64 [n]."""
        # Random reads of an array cost cache misses: compute the ids where that is possible.
        return positions + self.sample_id[0] if self._is_gapless else np.take(self.sample_id, positions)

    def _search(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the position of each id, and whether it is not here, both [n]."""
        if self._is_gapless:
            positions = ids - self.sample_id[0]
            return positions, (positions < 0) | (positions >= len(self))
        positions = np.searchsorted(self.sample_id, ids)
        return positions, np.take(self.sample_id, positions, mode="clip") != ids


def check_slots(slots: np.ndarray, first: int, stop: int) -> None:
    """Raise ``ConfigError`` unless all slots are among ``first`` to ``stop``."""
    outside = slots[(slots < first) | (slots >= stop)]
    if len(outside):
        raise ConfigError(
            f"the slots {named(outside)} are not here: these are {first} to {stop - 1}; ask for those"
        )


def draw_slots(num_slots: int, num: int, *, seed: int, step: int) -> np.ndarray:
    """Draw ``num`` of ``num_slots`` slots uniformly without replacement, int64 [num].

    It depends on its arguments only, so every worker draws the same slots. Their order is the same
    too, and not random. Raises ``ConfigError`` if ``num`` is below 0 or above ``num_slots``.
    """
    check_type("num", num, int)
    check_type("step", step, int)
    if not 0 <= num <= num_slots:
        raise ConfigError(
            f"cannot draw {num} slots of {num_slots} without replacement; ask for 0 to {num_slots} negatives"
        )
    return random_stream(seed, step, DRAWS).choice(num_slots, num, replace=False, shuffle=False)
