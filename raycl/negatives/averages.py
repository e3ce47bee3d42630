"""How a slot of a memory bank starts, and how the rows of a sample change it.

Embeddings of length 1 move on the sphere (Wu et al., 2018). Partition functions are averaged by their logarithms
(SogCLR: Yuan et al., 2022).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

# The initial rows are drawn in blocks of this many slots of the whole bank, each with its own seed,
# so that a shard draws its blocks only. Another size would give other rows.
_BLOCK = 4_096

# The purposes of random streams, which separate the streams of one seed.
_INITIAL_ROWS, DRAWS = 0, 1

# Shorter sums of rows of length 1 are rounding errors, and their direction is meaningless.
_MIN_LENGTH = 1e-6

# Rows of one sample are summed as multiples of this: integers have the same sum in any order.
_GRAIN = 2.0**-40


def normalized(rows: np.ndarray) -> np.ndarray:
    """Return rows of length 1, [n, dim]; rows of zeros stay zeros."""
    # torch's normalize has the same smallest length.
    return rows / np.maximum(_lengths(rows), 1e-12)


def has_direction(rows: np.ndarray) -> np.ndarray:
    """Whether each row is long enough to have a direction, [n]."""
    return _lengths(rows)[:, 0] > _MIN_LENGTH


def random_stream(seed: int, number: int, purpose: int) -> np.random.Generator:
    """Return the random numbers of a block or a step, for one purpose."""
    key = np.array([int(seed) % 2**64, int(number) % 2**64], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, purpose], np.uint64)))


def _draw_initial_rows(rows: np.ndarray, first_slot: int, seed: int) -> None:
    """Draw ``rows``, of which the first is in ``first_slot`` of the whole bank."""
    stop = first_slot + len(rows)
    for start in range(first_slot // _BLOCK * _BLOCK, stop, _BLOCK):
        size = min(_BLOCK, stop - start)
        drawn = random_stream(seed, start // _BLOCK, _INITIAL_ROWS).standard_normal(
            (size, rows.shape[1]), np.float32
        )
        skipped = max(0, first_slot - start)
        rows[start + skipped - first_slot : start + size - first_slot] = normalized(drawn)[skipped:]


def _directions(owners: np.ndarray, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each owner once, with the direction of the sum of its rows (zeros if it has none)."""
    distinct, index, count = np.unique(owners, return_inverse=True, return_counts=True)
    if len(distinct) == len(owners):
        return owners, units
    directions = np.empty((len(distinct), units.shape[1]), np.float32)
    directions[index] = units
    total = np.zeros(directions.shape, np.int64)
    np.add.at(total, index, np.rint(units / _GRAIN).astype(np.int64))
    sums = total[count > 1] * _GRAIN
    length = _lengths(sums)
    directions[count > 1] = np.where(length > _MIN_LENGTH, sums / np.maximum(length, _MIN_LENGTH), 0)
    return distinct, directions


def _moved(before: np.ndarray, directions: np.ndarray, momentum: float) -> np.ndarray:
    """Return rows moved towards their directions, normalized; unchanged if the result has no direction."""
    mixed = before.astype(np.float32)
    mixed *= momentum
    mixed += (1 - momentum) * directions
    length = _lengths(mixed)
    mixed /= np.maximum(length, _MIN_LENGTH)
    lost = length[:, 0] <= _MIN_LENGTH
    mixed[lost] = before[lost]
    return mixed


def _lengths(rows: np.ndarray) -> np.ndarray:
    return np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]


def _fill_unknown(rows: np.ndarray, first_slot: int, seed: int) -> None:
    """Set all rows to the logarithm of 0: no estimate."""
    rows[:] = -np.inf


def _log_mean(owners: np.ndarray, logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each owner [n] once, with log(mean(exp(logs))) of its rows [n, num_sides].

    Rows are added in ascending order, so the result does not depend on their order.
    """
    distinct, index, count = np.unique(owners, return_inverse=True, return_counts=True)
    if len(distinct) == len(owners):
        return owners, logs
    firsts = np.cumsum(count) - count
    columns = [column[np.lexsort((column, index))] for column in logs.astype(np.float64).T]
    sums = np.stack([np.logaddexp.reduceat(column, firsts) for column in columns], axis=1)
    return distinct, (sums - np.log(count)[:, None]).astype(np.float32)


def _moved_log(before: np.ndarray, logs: np.ndarray, momentum: float) -> np.ndarray:
    """Return log(momentum * u + (1 - momentum) * new u), given log u (-inf: no estimate) and the new log u."""
    if momentum == 0:
        return logs
    old, new = before.astype(np.float64) + np.log(momentum), logs.astype(np.float64) + np.log1p(-momentum)
    return np.where(np.isneginf(before), logs, np.logaddexp(old, new)).astype(np.float32)


class _Average(NamedTuple):
    """How a slot starts, and how the rows of a sample change it."""

    initialize: Callable[[np.ndarray, int, int], None]
    prepare: Callable[[np.ndarray], np.ndarray]
    mean: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
    move: Callable[[np.ndarray, np.ndarray, float], np.ndarray]


AVERAGES = {
    "memory_bank": _Average(_draw_initial_rows, normalized, _directions, _moved),
    "partition": _Average(_fill_unknown, np.copy, _log_mean, _moved_log),
}
