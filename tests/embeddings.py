"""Synthetic embeddings with ids, and the part of them on each worker."""

import torch
import torch.nn.functional as F
from torch import Tensor


def make_views(batch: int, dim: int, *, noise: float = 0.3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    view_a = F.normalize(torch.randn(batch, dim, generator=generator), dim=1)
    view_b = view_a + noise * torch.randn(batch, dim, generator=generator)
    return view_a, F.normalize(view_b, dim=1)


def make_rows(num_rows: int, dim: int, seed: int = 1) -> Tensor:
    return F.normalize(torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


def make_pair_ids(
    batch: int, num_negatives: int, num_ids: int, seed: int = 3
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return hashed ids of queries, keys and negatives, with duplicates."""
    generator = torch.Generator().manual_seed(seed)
    query_id, key_id, negative_id = (
        torch.randint(num_ids, (count,), generator=generator) * 2**40 - 2**42
        for count in (batch, batch, num_negatives)
    )
    return (query_id, key_id), negative_id


def named_ids(pair_ids: tuple[Tensor, Tensor], own: slice | None) -> dict[str, Tensor]:
    """Return pair ids as arguments of a loss: of all rows, or of local and gathered rows."""
    ids = {"query_id": pair_ids[0], "key_id": pair_ids[1]}
    return ids if own is None else of_worker(ids, own)


def of_worker(batch: dict[str, Tensor], own: slice) -> dict[str, Tensor]:
    """Return the arguments of a loss on one worker: its local rows and all gathered rows."""
    return {name: each[own] for name, each in batch.items()} | {
        f"gathered_{name}": each for name, each in batch.items()
    }


def worker_spans(batch_size: int, num_workers: int) -> list[slice]:
    """Return the rows of the batch on each worker."""
    local = batch_size // num_workers
    return [slice(rank * local, (rank + 1) * local) for rank in range(num_workers)]
