"""Images as vectors of pixels: the baseline of an image encoder."""

import torch
from torch import Tensor

from raycl.augment.images import center_view
from raycl.data.in_memory import InMemoryDataset, pixels_of

BASELINE_SIZE = 32  # pixels per side, at most


def raw_pixels(rows: InMemoryDataset, *, channels: int, size: int) -> Tensor:
    """Return the pixels of all rows as float32 vectors [num_rows, channels * size**2], of their first channels."""
    unscaled = {"mean": (0.0,) * channels, "std": (1.0,) * channels}
    batches = rows.batches(1_024)
    images = (pixels_of(batch).images[..., :channels] for batch in batches)
    return torch.cat([center_view(each, size=size, **unscaled).flatten(1) for each in images])


def are_gray(*sets: InMemoryDataset) -> bool:
    """Whether all channels of each image are equal: then one of them gives the same cosines."""
    images = (pixels_of(batch).images for rows in sets for batch in rows.batches(1_024))
    return all((each == each[..., :1]).all() for each in images)
