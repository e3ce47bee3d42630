"""The normalizing constant Z of InstDisc (Wu et al., 2018), estimated rather than summed."""

import math
from typing import final

import torch
from torch import Tensor

from raycl.errors import ConfigError, RunError


@final
class NormalizingConstant:
    """Estimate log Z from the first batch; then hold it, or let Z follow the batches.

    Z is num_samples times the mean of exp(query . slot / temperature) over queries and noise.

    Args:
        num_samples: how many slots the bank has.
        momentum: None holds the first estimate (Wu et al., 2018); a number in [0, 1), usually
            0.99, is what a new batch leaves of the old Z: an exponential moving average.

    Raises:
        ConfigError: ``num_samples`` or ``momentum`` is out of range.
    """

    def __init__(self, num_samples: int, *, momentum: float | None = None) -> None:
        if num_samples < 1:
            raise ConfigError(
                f"the bank has no slots: num_samples is {num_samples}; pass how many samples it holds"
            )
        if momentum is not None and not 0 <= momentum < 1:
            raise ConfigError(
                f"the momentum of the normalizing constant is not in [0, 1): it is {momentum:g}; "
                "0.99 is usual, None holds the first estimate"
            )
        self._num_samples, self._momentum = num_samples, momentum
        self._log_normalizer: float | None = None

    @property
    def is_settled(self) -> bool:
        """Whether further batches change nothing, so that their mass need not be summed."""
        return self._momentum is None and self._log_normalizer is not None

    @property
    def log_normalizer(self) -> float:
        """Log Z, natural; RunError before the first batch."""
        if self._log_normalizer is None:
            raise RunError(
                "the normalizing constant is not known: no batch came; call update before the first loss"
            )
        return self._log_normalizer

    def update(self, masses: Tensor) -> None:
        """Take in a batch: :func:`noise_mass` of each worker, [num_workers, 2].

        All workers pass the same rows (``gather_detached(noise_mass(...)[None])``), so that all
        hold the same Z, whatever their number.

        Raises:
            ConfigError: the masses are not [num_workers, 2], or no query has any noise.
        """
        if masses.ndim != 2 or masses.shape[1] != 2:
            raise ConfigError(
                f"the masses are not [num_workers, 2]: they came as {list(masses.shape)}; "
                "gather noise_mass(...)[None]"
            )
        if self.is_settled:
            return
        num_pairs = masses[:, 1].sum().item()
        if num_pairs == 0:
            raise ConfigError(
                "there is nothing to estimate the normalizing constant from: 0 pairs of query and noise "
                "came; draw noise, and see that it has other ids than the queries"
            )
        log_mean = masses[:, 0].logsumexp(0).item() - math.log(num_pairs)
        self._follow(math.log(self._num_samples) + log_mean)

    def state_dict(self) -> dict[str, float | None]:
        """Return what a checkpoint keeps."""
        return {"log_normalizer": self._log_normalizer}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Go on from what a checkpoint kept."""
        self._log_normalizer = state["log_normalizer"]

    def _follow(self, estimate: float) -> None:
        if self._log_normalizer is None or self._momentum is None:
            self._log_normalizer = estimate
            return
        # Z itself is averaged, in logarithms: at temperature 0.01 it overflows float32.
        parts = torch.tensor([self._log_normalizer, estimate], dtype=torch.float64)
        weights = torch.tensor([self._momentum, 1 - self._momentum], dtype=torch.float64)
        self._log_normalizer = (parts + weights.log()).logsumexp(0).item()
