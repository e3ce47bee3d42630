"""A learned temperature, as in CLIP (Radford et al., 2021)."""

import math
from typing import final

import torch
from torch import Tensor, nn

from raycl.errors import ConfigError
from raycl.loss_specs import MIN_TEMPERATURE


@final
class LearnedTemperature(nn.Module):
    """A temperature with a learned logarithm, at least 0.01 (CLIP clips its scale at 100).

    ``bias`` is where the bias of the logits begins, if the loss learns one (SigLIP: Zhai et al., 2023).
    Raises ``ConfigError`` for a smaller start.
    """

    def __init__(self, start: float, *, bias: float | None = None) -> None:
        super().__init__()
        if start < MIN_TEMPERATURE:
            raise ConfigError(
                f"a learned temperature is at least {MIN_TEMPERATURE}, came {start}; start there"
            )
        self.log_temperature = nn.Parameter(torch.tensor(math.log(start)))
        self.bias = None if bias is None else nn.Parameter(torch.tensor(bias))

    def forward(self) -> Tensor:
        """Return the temperature, a scalar with gradient."""
        return self.log_temperature.exp()

    @torch.no_grad()
    def clamp_(self) -> None:
        """Clamp the temperature to the minimum; call it after the step, so that it cuts no gradient."""
        self.log_temperature.clamp_(min=math.log(MIN_TEMPERATURE))
