"""Towers: an encoder and the projection head of one side, or of both."""

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@final
class Tower(nn.Module):
    """Encode samples and project them onto the unit sphere."""

    def __init__(self, encoder: nn.Module, projection_head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection_head = projection_head

    @property
    def towers(self) -> tuple["Tower", ...]:
        """Itself."""
        return (self,)

    def forward(self, rows: Tensor) -> Tensor:
        """Return embeddings [batch, dim] of unit length, at least in float32, also under autocast."""
        projected = self.projection_head(self.encoder(rows))
        return F.normalize(projected.to(torch.promote_types(projected.dtype, torch.float32)), dim=1)


@final
class TwoTowers(nn.Module):
    """A tower for queries and one for keys, which may be the same."""

    def __init__(self, query: Tower, key: Tower) -> None:
        super().__init__()
        self.query = query
        # The same module twice would be saved twice.
        self.key = None if key is query else key

    @property
    def towers(self) -> tuple[Tower, ...]:
        """That of queries, and that of keys if it is another one."""
        return (self.query,) if self.key is None else (self.query, self.key)

    @property
    def key_tower(self) -> Tower:
        """The tower of keys."""
        return self.query if self.key is None else self.key

    def forward(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings [num_queries, dim] and [num_keys, dim], as a tower does."""
        return self.query(queries), self.key_tower(keys)


Towers = Tower | TwoTowers
