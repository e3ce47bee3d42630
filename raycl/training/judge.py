"""The periodic judge: weighted kNN on held-out rows while training goes on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from raycl.data.rows import Batch, Rows
from raycl.distributed import all_sum, gather_detached, num_workers, rank
from raycl.judging.embed import embed
from raycl.judging.knn import knn_predict

BATCH_SIZE = 256


@final
@dataclass(frozen=True, kw_only=True)
class Judge:
    """Held-out labeled rows (``test``) and trained-on rows that vote over them (``bank``).

    ``prepare`` turns rows into what the encoder takes, without any randomness.
    """

    bank: Rows
    test: Rows
    prepare: Callable[[Batch], Tensor]
    k: int = 200
    temperature: float = 0.07

    def knn_accuracy(self, encoder: nn.Module, device: torch.device) -> float:
        """Return the kNN top-1 accuracy; every worker encodes and judges its own share."""
        bank, bank_label = self._encode(encoder, self.bank, device)
        test, test_label = self._encode(encoder, self.test, device)
        bank, bank_label = gather_detached(bank), gather_detached(bank_label)
        predicted = knn_predict(test, bank, bank_label, k=self.k, temperature=self.temperature)
        counts = torch.tensor([(predicted == test_label).sum(), len(test_label)], device=device)
        num_right, num_judged = all_sum(counts).tolist()
        return num_right / num_judged

    def _encode(self, encoder: nn.Module, rows: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
        share = _own_share(len(rows))
        inputs = (self.prepare(rows.take(part)) for part in _batches(share))
        representation = embed(encoder, inputs)
        return representation.to(device), torch.from_numpy(rows.label[share]).to(device)


def _own_share(num_rows: int) -> NDArray[np.int64]:
    """Return this worker's rows: equally many on each worker, since a gather asks for that."""
    return np.arange(num_rows // num_workers()) * num_workers() + rank()


def _batches(positions: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(positions), BATCH_SIZE):
        yield positions[start : start + BATCH_SIZE]
