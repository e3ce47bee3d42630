"""Towers: an encoder with its projection head, which only the loss uses, for one side or for both; a learned temperature."""

import math
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raycl.errors import ConfigError
from raycl.loss_specs import MIN_TEMPERATURE
from raycl.models.whitening import Whitening


@final
class Tower(nn.Module):
    """Encode examples and project them, onto the unit sphere if ``normalize``.

    ``whitening`` collects the moments of the representations in training.
    """

    def __init__(
        self,
        encoder: nn.Module,
        projection_head: nn.Module,
        *,
        normalize: bool = True,
        whitening: Whitening | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection_head = projection_head
        self.whitening = whitening
        self._normalize = normalize

    @property
    def towers(self) -> tuple["Tower", ...]:
        """Return itself, as the only tower."""
        return (self,)

    @property
    def evaluated(self) -> nn.Module:
        """Return the encoder as it is evaluated and saved: with ``whitening``, followed by its layer."""
        if self.whitening is None:
            return self.encoder
        return nn.Sequential(self.encoder, self.whitening.layer()).train(self.encoder.training)

    def forward(self, rows: Tensor) -> Tensor:
        """Return embeddings [batch, dim], at least in float32, also under autocast."""
        representation = self.encoder(rows)
        if self.whitening is not None:
            representation = self.whitening(representation)
        projected = self.projection_head(representation)
        projected = projected.to(torch.promote_types(projected.dtype, torch.float32))
        return F.normalize(projected, dim=1) if self._normalize else projected


@final
class TwoTowers(nn.Module):
    """A query tower and a key tower, which may be the same one."""

    def __init__(self, query: Tower, key: Tower) -> None:
        super().__init__()
        self.query = query
        # The state dict would hold a shared module twice.
        self.key = None if key is query else key

    @property
    def towers(self) -> tuple[Tower, ...]:
        """Return the query tower, and the key tower if it is a different one."""
        return (self.query,) if self.key is None else (self.query, self.key)

    @property
    def key_tower(self) -> Tower:
        """Return the key tower."""
        return self.query if self.key is None else self.key

    def forward(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings [num_queries, dim] and [num_keys, dim], as a tower does."""
        return self.query(queries), self.key_tower(keys)


Towers = Tower | TwoTowers


def build_projection_head(
    in_dim: int,
    *,
    num_layers: int,
    hidden_dim: int | None,
    dim: int,
    batchnorm: bool | Literal["all"] = True,
) -> nn.Sequential:
    """Build SimCLR's head (Chen et al., 2020, section 4.2): [batch, in_dim] to [batch, dim].

    Hidden layers are as wide as the representation unless ``hidden_dim`` is given. Each is followed by
    BatchNorm (unless ``batchnorm`` is False, as in MoCo v2) and ReLU. With ``all`` the last layer has BatchNorm
    too, and no bias. One layer makes the head linear; zero layers make it the identity, a ``ConfigError`` unless
    ``in_dim`` equals ``dim``.
    """
    if num_layers == 0:
        if in_dim != dim:
            raise ConfigError(
                f"a head without layers keeps the representation's {in_dim} columns, but projection_head.dim is "
                f"{dim}; set it to {in_dim}, or projection_head.num_layers to 1"
            )
        return nn.Sequential()
    layers: list[nn.Module] = []
    width = hidden_dim or in_dim
    for _ in range(num_layers - 1):
        normalization = [nn.BatchNorm1d(width)] if batchnorm else []
        layers += [nn.Linear(in_dim, width, bias=not batchnorm), *normalization, nn.ReLU(inplace=True)]
        in_dim = width
    last = [nn.BatchNorm1d(dim)] if batchnorm == "all" else []
    return nn.Sequential(*layers, nn.Linear(in_dim, dim, bias=not last), *last)


@final
class LearnedTemperature(nn.Module):
    """A temperature with a learned logarithm, at least 0.01, as CLIP clips its scale at 100 (Radford et al., 2021).

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
