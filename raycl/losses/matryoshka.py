"""Matryoshka: a loss on prefixes of the embeddings (Kusupati et al., 2022)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch.nn.functional as F
from torch import Tensor

from raycl.losses.example_ids import ExampleIds
from raycl.losses.objective import Objective, StoreBatch
from raycl.losses.tiled import working_precision


@final
@dataclass(frozen=True, kw_only=True)
class Matryoshka:
    """The weighted sum of an objective over prefixes of the embeddings, normalized again.

    ``dims`` are the lengths of the prefixes, each at most dim. Rows of a store are cut in the same way.
    """

    objective: Objective
    dims: Sequence[int]
    weights: Sequence[float]

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: ExampleIds) -> Tensor:
        """Return the loss."""
        query = working_precision(query)
        loss = query.new_zeros(())
        for dim, weight in zip(self.dims, self.weights, strict=True):
            of_query, of_key, of_slots, of_negatives = (
                None if rows is None else F.normalize(rows[:, :dim].to(query.dtype), dim=1)
                for rows in (query, key, stored.key, stored.negatives)
            )
            assert of_query is not None, "every step has queries"
            prefixes = replace(stored, key=of_slots, negatives=of_negatives)
            loss = loss + weight * self.objective(of_query, of_key, prefixes, ids)
        return loss

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the weighted sum over the prefixes, or None if it is unknown."""
        value = self.objective.collapsed_loss(batch_size=batch_size, stored=stored)
        return None if value is None else value * sum(self.weights)
