"""One optimization step: embed, gather, loss, backward, update."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raycl.distributed import all_sum, gather, gather_detached, num_workers, rank
from raycl.errors import NonFiniteLossError
from raycl.losses import nt_xent
from raycl.optimizers import set_learning_rate
from raycl.training.process import autocast


@final
@dataclass(frozen=True, kw_only=True)
class Views:
    """Two views [local_batch, channels, size, size] of each image, and the images' ids."""

    view_a: Tensor
    view_b: Tensor
    sample_id: Tensor

    def __len__(self) -> int:
        return len(self.sample_id)


def train_step(
    tower: nn.Module,
    optimizer: Optimizer,
    views: Views,
    *,
    temperature: float,
    learning_rate: float,
    precision: str,
) -> float:
    """Make one step and return the loss of the global batch.

    Raises ``NonFiniteLossError`` on every worker before anything is changed.
    """
    set_learning_rate(optimizer, learning_rate)
    with autocast(precision, views.view_a.device):
        embedding = tower(torch.cat([views.view_a, views.view_b]))
    loss = gathered_nt_xent(embedding, views.sample_id, temperature=temperature)
    value = float(all_sum(loss)) / num_workers()
    if not math.isfinite(value):
        raise NonFiniteLossError(f"the loss became {value}")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return value


def gathered_nt_xent(embedding: Tensor, sample_id: Tensor, *, temperature: float | Tensor) -> Tensor:
    """NT-Xent over the embeddings of all workers; view_a's rows first, view_b's after them."""
    view_a, view_b = embedding.chunk(2)
    if num_workers() == 1:
        return nt_xent(view_a, view_b, temperature=temperature, sample_id=sample_id)
    gathered_a, gathered_b = gather(torch.stack([view_a, view_b], dim=1)).unbind(1)
    return nt_xent(
        view_a,
        view_b,
        temperature=temperature,
        gathered_a=gathered_a,
        gathered_b=gathered_b,
        offset=rank() * len(view_a),
        sample_id=sample_id,
        gathered_sample_id=gather_detached(sample_id),
    )
