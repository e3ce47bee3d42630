"""Split rows into training and held-out rows by a hash of the seed and the id."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from raycl.splitmix import INCREMENT, mix

MAX_FRACTION = 0.1
Keep = Callable[[NDArray[np.int64]], NDArray[np.bool_]]  # selects rows by their ids


@final
@dataclass(frozen=True, kw_only=True)
class Holdout:
    """Rows with a hash below ``test`` are held out; rows up to ``reference`` are references of the periodic kNN.

    Independent of the number of workers, of the order, and of restarts.
    """

    seed: int
    test: float = 0.0
    reference: float = 0.0

    def is_train(self, sample_id: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each row is a training row."""
        return _unit_hash(self.seed, sample_id) >= self.test

    def is_test(self, sample_id: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each row is held out."""
        return _unit_hash(self.seed, sample_id) < self.test

    def is_evaluated(self, sample_id: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each row takes part in the periodic kNN, as a query or as a reference."""
        return _unit_hash(self.seed, sample_id) < self.reference

    def is_reference(self, sample_id: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each row, a training row, is also a reference of the periodic kNN."""
        value = _unit_hash(self.seed, sample_id)
        return (value >= self.test) & (value < self.reference)


def make_split(
    num_rows: int, *, num_test: int, num_train: int, seed: int, max_fraction: float = MAX_FRACTION
) -> Holdout:
    """Hold out about ``num_test`` of ``num_rows`` rows, at most ``max_fraction``, and choose ``num_train`` references."""
    test = min(num_test / max(num_rows, 1), max_fraction)
    return Holdout(seed=seed, test=test, reference=min(test + num_train / max(num_rows, 1), 1.0))


def _unit_hash(seed: int, sample_id: NDArray[np.int64]) -> NDArray[np.float64]:
    """Hash to [0, 1)."""
    bits = mix(sample_id.astype(np.uint64) + np.uint64((seed * 2 + 1) * INCREMENT % 2**64))
    return (bits >> np.uint64(11)).astype(np.float64) / 2**53
