"""A temperature that is learned, as in CLIP (Radford et al., 2021)."""

import math
from typing import final

import torch
from torch import Tensor, nn

from raycl.errors import ConfigError

LEAST = 0.01


@final
class LearnedTemperature(nn.Module):
    """A positive number whose logarithm is learned; not below 0.01, as CLIP's scale is not above 100.

    Raises ``ConfigError`` for a start below that.
    """

    def __init__(self, start: float) -> None:
        super().__init__()
        if start < LEAST:
            raise ConfigError(f"a learned temperature stays at {LEAST} or above, came {start}; begin there")
        self.log_temperature = nn.Parameter(torch.tensor(math.log(start)))

    def forward(self) -> Tensor:
        """Return the temperature, a scalar with gradient."""
        return self.log_temperature.exp()

    @torch.no_grad()
    def clamp_(self) -> None:
        """Bring it back above the least; after a step, so that no gradient is cut."""
        self.log_temperature.clamp_(min=math.log(LEAST))
