"""Towers: an encoder with its projection head, for one side or for both."""

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@final
class Tower(nn.Module):
    """Encode examples and project them onto the unit sphere."""

    def __init__(self, encoder: nn.Module, projection_head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection_head = projection_head

    @property
    def towers(self) -> tuple["Tower", ...]:
        """Return itself, as the only tower."""
        return (self,)

    def forward(self, rows: Tensor) -> Tensor:
        """Return embeddings [batch, dim] of unit length, at least in float32, also under autocast."""
        projected = self.projection_head(self.encoder(rows))
        return F.normalize(projected.to(torch.promote_types(projected.dtype, torch.float32)), dim=1)


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
