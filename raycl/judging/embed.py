"""Representations of decoded images by a frozen encoder."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Prepare = Callable[[Tensor], Tensor]


@torch.inference_mode()
def embed(
    encoder: nn.Module,
    images: Iterable[NDArray[np.uint8]],
    prepare: Prepare,
    *,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the representations [num_images, dim] of batches of uint8 images, in order.

    The encoder runs in evaluation mode, and is put back into the mode it was in. ``prepare`` turns
    uint8 [batch, height, width, channels] into what the encoder takes. Returns float32 on the CPU.
    """
    was_training = encoder.training
    encoder.eval()
    parts = [encoder(prepare(torch.from_numpy(batch).to(device))).float().cpu() for batch in images]
    encoder.train(was_training)
    return torch.cat(parts)
