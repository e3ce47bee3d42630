"""Representations from a frozen encoder."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

ROWS_AHEAD = 4_096  # kept on the accelerator between two copies to the host


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
