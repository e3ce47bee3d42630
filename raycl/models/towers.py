"""A tower: an encoder and the projection head of one side."""

from typing import final

import torch.nn.functional as F
from torch import Tensor, nn


@final
class Tower(nn.Module):
    """Encode images and project them onto the unit sphere."""

    def __init__(self, encoder: nn.Module, projection_head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection_head = projection_head

    def forward(self, images: Tensor) -> Tensor:
        """Return embeddings [batch, dim]: float32 rows of unit length, whatever the autocast."""
        return F.normalize(self.projection_head(self.encoder(images)).float(), dim=1)
