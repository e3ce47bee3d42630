"""Frequencies of keys, for the logQ correction (Yi et al., 2019)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self, final

import numpy as np
import torch
from torch import Tensor


@final
@dataclass(frozen=True)
class Frequencies:
    """The logarithm of the number of occurrences of each key; ids ascend."""

    key_id: Tensor
    log_count: Tensor

    @classmethod
    def of(cls, ids: Iterable[np.ndarray]) -> Self:
        """Count the ids, int64 [n] each, of all candidates in the data."""
        key_id, counts = np.unique(np.concatenate([np.empty(0, np.int64), *ids]), return_counts=True)
        return cls(torch.from_numpy(key_id), torch.from_numpy(np.log(counts).astype(np.float32)))

    def to(self, device: torch.device) -> Self:
        """Return the frequencies on a device."""
        return type(self)(self.key_id.to(device), self.log_count.to(device))

    def __call__(self, key_id: Tensor) -> Tensor:
        """Return the log count of each key, float32 [n]; 0 for unknown keys."""
        if not len(self.key_id):
            return torch.zeros(key_id.shape, device=key_id.device)
        place = torch.searchsorted(self.key_id, key_id.contiguous()).clamp(max=len(self.key_id) - 1)
        return torch.where(self.key_id[place] == key_id, self.log_count[place], 0.0)
