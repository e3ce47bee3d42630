"""Representations by a frozen encoder."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


@torch.inference_mode()
def embed(encoder: nn.Module, inputs: Iterable[Tensor]) -> Tensor:
    """Return the representations [num_rows, dim] of batches that the encoder takes, in order.

    The encoder runs in evaluation mode, and is put back into the mode it was in. Returns float32 on
    the CPU.
    """
    was_training = encoder.training
    encoder.eval()
    parts = [encoder(batch).float().cpu() for batch in inputs]
    encoder.train(was_training)
    return torch.cat(parts)
