"""Representations by a frozen encoder."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

ROWS_AHEAD = 4_096  # that may lie on an accelerator: the host waits for it only when so many are done


@torch.inference_mode()
def embed(encoder: nn.Module, inputs: Iterable[Tensor], *, precision: str = "float32") -> Tensor:
    """Return the representations [num_rows, dim] of batches that the encoder takes, in order.

    The encoder runs in evaluation mode, and is put back into the mode it was in. Returns float32 on
    the CPU, computed in ``precision``: ``float32`` or ``bfloat16``.
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
