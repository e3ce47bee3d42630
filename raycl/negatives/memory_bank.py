"""The memory bank of instance discrimination: one slot for every sample."""

from collections.abc import Mapping
from typing import NamedTuple, final

import numpy as np
from numpy.typing import DTypeLike

from raycl.errors import ConfigError
from raycl.negatives.sample_index import SampleIndex, named, repeated
from raycl.negatives.store import (
    Negatives,
    NegativeStore,
    State,
    check_lengths,
    checked_ids,
    checked_rows,
    empty_rows,
    negatives_in,
)

# The first rows are drawn in blocks of this many slots of the whole bank, each by its own number,
# so that a shard draws its blocks only. Another size would give other rows.
_BLOCK = 4_096

# What a random stream is for: it never meets another of the same seed.
_FIRST_ROWS, _DRAWS = 0, 1

# Shorter sums of rows of length 1 are rounding errors, whose direction says nothing.
_NO_DIRECTION = 1e-6

# Rows of one sample are added up as multiples of this: whole numbers have the same sum in any order.
_GRAIN = 2.0**-40


@final
class MemoryBank(NegativeStore):
    """Keep one row of length 1 for every sample, moved towards each new one (Wu et al., 2018).

    Slots are the samples in the order of their ids. The bank may be cut into shards, contiguous
    ranges of slots: a shard is made with the ids of its range and with ``first_slot`` and
    ``num_slots``, speaks of slots as the whole bank does, and holds the same rows, to the last bit.
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
    ) -> None:
        """Make a bank of random rows for samples of any distinct ids, int64 [n], in any order.

        The rows are uniform on the sphere, a function of seed and slot. ``num_slots`` are those of
        the whole bank, which ends with this shard unless told.

        Raises:
            ConfigError: There are no ids, one comes twice, ``dim`` is below 1, ``dtype`` is neither
                float32 nor float16, ``momentum`` is not in [0, 1), or the shard does not lie in
                the bank.
        """
        if not 0 <= momentum < 1:
            raise ConfigError(
                f"the bank's momentum is not in [0, 1): it is {momentum:g}; the usual one is 0.5"
            )
        self._samples = SampleIndex(sample_id)
        self._first_slot, self._stop = first_slot, first_slot + len(sample_id)
        self._num_slots = self._stop if num_slots is None else num_slots
        if not 0 <= first_slot <= self._stop <= self._num_slots:
            raise ConfigError(
                f"the shard does not lie in the bank: its slots are {first_slot} to {self._stop} of "
                f"{self._num_slots}; give the first slot of its range and the bank's number of slots"
            )
        self._seed, self._momentum = seed, momentum
        self._rows = empty_rows(len(sample_id), dim, dtype)
        self._step = np.full(len(sample_id), -1)
        self._calls: list[_Call] = []  # of the latest step
        self._latest_step: int | None = None
        _draw_first_rows(self._rows, first_slot, seed)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_bytes(self) -> int:
        """Memory of rows, ids and steps, in bytes; the calls of one step come on top."""
        return self._rows.nbytes + self._samples.sample_id.nbytes + self._step.nbytes

    def slots_of(self, sample_id: np.ndarray) -> np.ndarray:
        """Return the slot of each sample, int64 [n].

        Raises:
            ConfigError: A sample has no slot here.
        """
        return self._samples.positions_of(sample_id) + self._first_slot

    def draw(self, num: int, *, step: int) -> np.ndarray:
        """Draw slots of the whole bank for one step: :func:`draw_slots` with this bank's seed."""
        return draw_slots(self._num_slots, num, seed=self._seed, step=step)

    def read(self, slots: np.ndarray) -> Negatives:
        """Return copies of the rows in ``slots``, int64 [n], in their order; -1 is the step of a first row.

        Raises:
            ConfigError: A slot is not one of this bank or shard.
        """
        positions = slots - self._first_slot
        if len(slots) and (positions.min() < 0 or positions.max() >= len(self)):
            outside = slots[(positions < 0) | (positions >= len(self))]
            raise ConfigError(
                f"the slots {named(outside)} are not here: these are {self._first_slot} to "
                f"{self._stop - 1}; ask the shard that holds them"
            )
        return self._take(positions)

    def negatives(self) -> Negatives:
        """Lend all rows in the order of slots: the bank's memory, not a copy."""
        return Negatives(self._rows, self._samples.sample_id, self._step)

    def get(self, sample_id: np.ndarray) -> Negatives:
        """Return copies of the rows of the samples ``sample_id``, int64 [n], in their order.

        Raises:
            ConfigError: A sample has no slot here.
        """
        return self._take(self._samples.positions_of(sample_id))

    def update(self, sample_id: np.ndarray, rows: np.ndarray, step: int) -> None:
        """Move the slots of ``sample_id`` [n] towards ``rows`` [n, dim], written at ``step``.

        A slot becomes normalize(momentum * slot + (1 - momentum) * row), the row being normalized
        before, all in float32. Where this has no direction (the row is opposite to the slot, or
        zeros) the slot keeps its own.

        Several rows of one sample count as one, the direction of their sum; and so do rows that
        come in several calls of one ``step``, as when they are of different workers. So a batch
        gives the same bank, to the last bit, whatever its order and however it is split, as long
        as no call of another step comes between. To that end the rows of the latest step are kept.

        Raises:
            ConfigError: Shapes or types do not fit, a sample has no slot here, or a value is NaN,
                infinite or above 65,504; the bank is as before.
        """
        rows = checked_rows(rows, dim=self._rows.shape[1], dtype=np.float32)
        check_lengths(rows, checked_ids(sample_id))
        positions, units = self._samples.positions_of(sample_id), normalized(rows)
        if step != self._latest_step:
            self._latest_step, self._calls = step, []
        owners, came = self._with_earlier(positions, units)
        distinct, directions = _directions(owners, came)
        before = np.take(self._rows, distinct, axis=0)
        self._calls.append(_Call(positions, units, distinct, before))
        self._rows[distinct] = _moved(before, directions, self._momentum)
        self._step[distinct] = step

    def fill(self, sample_id: np.ndarray, rows: np.ndarray) -> None:
        """Give the samples [n] first rows [n, dim] that are better than random ones, made unit length.

        Their steps are those of first rows, -1. What was written before is lost; a row of zeros has
        no direction and leaves the slot as it is.

        Raises:
            ConfigError: As for ``update``; the bank is as before.
        """
        rows = checked_rows(rows, dim=self._rows.shape[1], dtype=np.float32)
        check_lengths(rows, checked_ids(sample_id))
        positions = self._samples.positions_of(sample_id)
        there = _lengths(rows)[:, 0] > _NO_DIRECTION
        self._rows[positions[there]], self._step[positions[there]] = normalized(rows[there]), -1
        self._calls = []

    def state_dict(self) -> State:
        """Return rows, ids and steps.

        The arrays are the bank's memory: save or copy them before the next update. Seed and
        momentum are settings, not state.
        """
        return {"rows": self._rows, "sample_id": self._samples.sample_id, "step": self._step}

    def load_state_dict(self, state: Mapping[str, np.ndarray | int]) -> None:
        """Become the bank that ``state`` was taken from.

        Raises:
            ConfigError: It held other samples, or rows of another dim or type; the bank is as before.
        """
        kept = negatives_in(state, num_rows=len(self), dim=self._rows.shape[1], dtype=self._rows.dtype)
        if not np.array_equal(kept.sample_id, self._samples.sample_id):
            strangers = np.setdiff1d(kept.sample_id, self._samples.sample_id)
            raise ConfigError(
                f"the state is of other samples, such as {named(strangers)}; "
                "load it into a bank made with the ids of the same data"
            )
        self._rows[:], self._step[:] = kept.rows, kept.step
        self._calls = []

    def load_part(self, part: Negatives) -> None:
        """Become what ``part`` of a state says in the slots of its samples.

        Raises:
            ConfigError: A sample has no slot here, or the rows are of another dim.
        """
        positions = self._samples.positions_of(part.sample_id)
        rows = checked_rows(part.rows, dim=self._rows.shape[1], dtype=self._rows.dtype)
        self._rows[positions], self._step[positions] = rows, part.step
        self._calls = []

    def _with_earlier(self, positions: np.ndarray, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Add the rows that earlier calls of the step gave these slots, and undo what they did there."""
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


class _Call(NamedTuple):
    """What one call of ``update`` brought, and what it found."""

    positions: np.ndarray  # [n]
    units: np.ndarray  # [n, dim]
    distinct: np.ndarray  # [num_distinct], the positions without repetition
    before: np.ndarray  # [num_distinct, dim], as they were before the step


def draw_slots(num_slots: int, num: int, *, seed: int, step: int) -> np.ndarray:
    """Draw ``num`` of ``num_slots`` slots uniformly without replacement, int64 [num].

    A function of its arguments alone: every worker draws the same, in the same order, which is not
    itself random.

    Raises:
        ConfigError: ``num`` is below 0 or above ``num_slots``.
    """
    if not 0 <= num <= num_slots:
        raise ConfigError(
            f"cannot draw {num} slots of {num_slots} without replacement; ask for 0 to {num_slots} negatives"
        )
    return _generator(seed, step, _DRAWS).choice(num_slots, num, replace=False, shuffle=False)


def normalized(rows: np.ndarray) -> np.ndarray:
    """Return rows of length 1, [n, dim]; rows of zeros stay zeros."""
    # The smallest length is that of torch's normalize.
    return rows / np.maximum(_lengths(rows), 1e-12)


def _generator(seed: int, number: int, purpose: int) -> np.random.Generator:
    key = np.array([seed % 2**64, number % 2**64], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, purpose], np.uint64)))


def _draw_first_rows(rows: np.ndarray, first_slot: int, seed: int) -> None:
    """Fill ``rows``, whose first one is in ``first_slot`` of the whole bank."""
    stop = first_slot + len(rows)
    for start in range(first_slot // _BLOCK * _BLOCK, stop, _BLOCK):
        size = min(_BLOCK, stop - start)
        drawn = _generator(seed, start // _BLOCK, _FIRST_ROWS).standard_normal(
            (size, rows.shape[1]), np.float32
        )
        skipped = max(0, first_slot - start)
        rows[start + skipped - first_slot : start + size - first_slot] = normalized(drawn)[skipped:]


def _directions(owners: np.ndarray, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each owner once, with the direction of the sum of its rows (zeros if it has none)."""
    if len(repeated(np.sort(owners))) == 0:
        return owners, units
    distinct, index, count = np.unique(owners, return_inverse=True, return_counts=True)
    directions = np.empty((len(distinct), units.shape[1]), np.float32)
    directions[index] = units
    total = np.zeros(directions.shape, np.int64)
    np.add.at(total, index, np.rint(units / _GRAIN).astype(np.int64))
    sums = total[count > 1] * _GRAIN
    length = _lengths(sums)
    directions[count > 1] = np.where(length > _NO_DIRECTION, sums / np.maximum(length, _NO_DIRECTION), 0)
    return distinct, directions


def _moved(before: np.ndarray, directions: np.ndarray, momentum: float) -> np.ndarray:
    """Return rows moved towards their directions, normalized; where nothing is left, as before."""
    mixed = before.astype(np.float32)
    mixed *= momentum
    mixed += (1 - momentum) * directions
    length = _lengths(mixed)
    mixed /= np.maximum(length, _NO_DIRECTION)
    lost = length[:, 0] <= _NO_DIRECTION
    mixed[lost] = before[lost]
    return mixed


def _lengths(rows: np.ndarray) -> np.ndarray:
    return np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
