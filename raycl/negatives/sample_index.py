"""Positions of samples in the order of their ids."""

from typing import final

import numpy as np

from raycl.errors import ConfigError
from raycl.negatives.store import checked_ids


@final
class SampleIndex:
    """Distinct ids in ascending order; a sample's position is its index among them."""

    def __init__(self, sample_id: np.ndarray) -> None:
        """Sort ids, int64 [n], that come in any order.

        Raises:
            ConfigError: There are none, one comes twice, or they are not integers.
        """
        self.sample_id = _sorted_distinct(checked_ids(sample_id))
        self._is_gapless = int(self.sample_id[-1]) - int(self.sample_id[0]) == len(sample_id) - 1

    def __len__(self) -> int:
        return len(self.sample_id)

    def positions_of(self, sample_id: np.ndarray) -> np.ndarray:
        """Return the position of each sample, int64 [n].

        Raises:
            ConfigError: A sample is not among these.
        """
        ids = checked_ids(sample_id)
        if self._is_gapless:
            positions = ids - self.sample_id[0]
            unknown = (positions < 0) | (positions >= len(self))
        else:
            positions = np.searchsorted(self.sample_id, ids)
            unknown = np.take(self.sample_id, positions, mode="clip") != ids
        if unknown.any():
            raise ConfigError(
                f"the bank has no slot for the samples {named(ids[unknown])}: it holds {len(self)}, from "
                f"{self.sample_id[0]} to {self.sample_id[-1]}; make it with the ids of all training data"
            )
        return positions

    def ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples at these positions, int64 [n]."""
        # Random reads of an array cost cache misses: compute the ids where that is possible.
        return positions + self.sample_id[0] if self._is_gapless else np.take(self.sample_id, positions)


def named(numbers: np.ndarray) -> str:
    """Name up to three numbers."""
    distinct = np.unique(numbers)
    those = ", ".join(map(str, distinct[:3]))
    return f"{those} and others" if len(distinct) > 3 else those


def repeated(ordered: np.ndarray) -> np.ndarray:
    """Return the numbers that are equal to their predecessor."""
    return ordered[1:][ordered[1:] == ordered[:-1]]


def _sorted_distinct(sample_id: np.ndarray) -> np.ndarray:
    if len(sample_id) == 0:
        raise ConfigError("the bank has no samples; make it with the ids of all training data")
    ordered = np.sort(sample_id)
    twice = repeated(ordered)
    if len(twice):
        raise ConfigError(
            f"the bank's sample ids are not distinct: {named(twice)} came more than once; "
            "a bank has a slot for every sample"
        )
    return ordered
