"""A batch of clicks, the part of it that a worker has, and what a worker returns of its loss."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from raycl.distributed import gather_detached

BATCH = 24
# How many explicit negatives each worker has: one batch of clicks brings more of them than another.
NUM_NEGATIVES = {1: (16,), 2: (5, 11), 4: (3, 0, 9, 4)}


class Clicks(NamedTuple):
    """Rows of queries, clicked keys and keys without a click, with their ids and frequencies."""

    query: Tensor
    key: Tensor
    query_id: Tensor
    key_id: Tensor
    key_log_frequency: Tensor
    negative: Tensor
    negative_id: Tensor
    negative_log_frequency: Tensor


def make_clicks() -> Clicks:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2 * BATCH + 16, 7, generator=generator, dtype=torch.float64)
    # The first and the last pair, on different workers, have one query; the second and the last one key:
    # so the last key is a positive of the first query, and it is among the explicit negatives too.
    query_id, key_id = torch.arange(BATCH), torch.arange(BATCH)
    query_id[-1], key_id[-1] = 0, 1
    negative_id = torch.arange(100, 116)
    negative_id[[0, 9]], negative_id[15] = 1, 2
    frequencies = -5 * torch.rand(BATCH + 16, generator=generator, dtype=torch.float64)
    return Clicks(
        *(rows[:BATCH], rows[BATCH : 2 * BATCH], query_id, key_id, frequencies[:BATCH]),
        *(rows[2 * BATCH :], negative_id, frequencies[BATCH:]),
    )


def part_of(clicks: Clicks, rank: int, num_workers: int) -> Clicks:
    local, sizes = BATCH // num_workers, NUM_NEGATIVES[num_workers]
    pairs = slice(rank * local, (rank + 1) * local)
    negatives = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    return Clicks(*(each[pairs] for each in clicks[:5]), *(each[negatives] for each in clicks[5:]))


def mean_and_gradients(loss: Tensor, module: nn.Module) -> tuple[Tensor, list[Tensor]]:
    """Go back from this worker's loss; return the mean of all workers' and the gradients of the parameters."""
    loss.backward()
    mean = gather_detached(loss[None]).mean()
    return mean, [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
