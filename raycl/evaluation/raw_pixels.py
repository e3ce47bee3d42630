"""Images as vectors of pixels: the baseline of an image encoder."""

import torch
from torch import Tensor

from raycl.augment.images import center_view
from raycl.data.in_memory import InMemoryDataset, pixels_of

BASELINE_SIZE = 32  # pixels per side, at most


def raw_pixels(rows: InMemoryDataset, *, channels: int, size: int) -> Tensor:
    """Return the pixels of all rows as float32 vectors [num_rows, channels * size**2]."""
    unscaled = {"mean": (0.0,) * channels, "std": (1.0,) * channels}
    batches = rows.batches(1_024)
    parts = [center_view(pixels_of(batch).images, size=size, **unscaled).flatten(1) for batch in batches]
    return torch.cat(parts)
