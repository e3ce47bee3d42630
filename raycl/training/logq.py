"""Document frequencies for the logQ correction."""

from dataclasses import dataclass
from typing import Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycl.data.in_memory import InMemoryDataset, texts_of, tokens_of

BATCH_SIZE = 4_096


@final
@dataclass(frozen=True)
class Frequencies:
    """Log counts of documents as keys and, if the run uses them, as explicit negatives; ids ascend."""

    text_id: NDArray[np.int64]
    log_count: NDArray[np.float32]

    @classmethod
    def of(cls, rows: InMemoryDataset, *, explicit: bool) -> Self:
        """Count the documents of all rows, and the explicit negatives if ``explicit``."""
        found = [np.empty(0, np.int64)]
        for batch in rows.batches(BATCH_SIZE):
            found.append(tokens_of(batch, "document").text_id)
            if explicit and "negatives" in batch.contents:
                found.append(texts_of(batch, "negatives").tokens.text_id)
        text_id, counts = np.unique(np.concatenate(found), return_counts=True)
        return cls(text_id, np.log(counts).astype(np.float32))

    def __call__(self, text_id: Tensor) -> Tensor:
        """Return the log count of each document, float32 [n]; 0 for unknown documents."""
        requested = text_id.cpu().numpy()
        place = np.searchsorted(self.text_id, requested).clip(max=max(len(self.text_id) - 1, 0))
        found = np.zeros(len(requested), np.float32)
        if len(self.text_id):
            found = np.where(self.text_id[place] == requested, self.log_count[place], 0).astype(np.float32)
        return torch.from_numpy(found).to(text_id.device)
