"""Representations from a frozen encoder, and images as vectors of pixels, the baseline of an image encoder."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from raycl.augment.images import center_view
from raycl.data.in_memory import InMemoryDataset, pixels_of

ROWS_AHEAD = 4_096  # kept on the accelerator between two copies to the host
BASELINE_SIZE = 32  # pixels per side, at most


# Not inference_mode: a network may keep tensors of this pass, and autograd refuses them in the next training step.
@torch.no_grad()
def embed(encoder: nn.Module, inputs: Iterable[Tensor], *, precision: str = "float32") -> Tensor:
    """Encode batches in order, to float32 representations [num_rows, dim] on the CPU.

    The encoder runs in evaluation mode and returns to its previous mode. ``precision`` is ``float32`` or
    ``bfloat16``.
    """
    was_training = encoder.training
    encoder.eval()
    done: list[Tensor] = []
    ahead: list[Tensor] = []
    for batch in inputs:
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            ahead.append(encoder(batch).float())
        if sum(map(len, ahead)) >= ROWS_AHEAD:
            done.append(torch.cat(ahead).cpu())
            ahead = []
    encoder.train(was_training)
    return torch.cat([*done, *([torch.cat(ahead).cpu()] if ahead else [])])


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
