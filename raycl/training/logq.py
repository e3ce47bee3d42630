"""How common each document is among those that a run trains on."""

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
    """The logarithms of how often documents occur, as keys and, where taken, as explicit negatives; ids ascend."""

    text_id: NDArray[np.int64]
    log_count: NDArray[np.float32]

    @classmethod
    def of(cls, rows: InMemoryDataset, *, explicit: bool) -> Self:
        """Count the documents of all rows; explicit negatives as well where the run takes them."""
        found = [np.empty(0, np.int64)]
        for batch in rows.batches(BATCH_SIZE):
            found.append(tokens_of(batch, "document").text_id)
            if explicit and "negatives" in batch.contents:
                found.append(texts_of(batch, "negatives").tokens.text_id)
        text_id, counts = np.unique(np.concatenate(found), return_counts=True)
        return cls(text_id, np.log(counts).astype(np.float32))

    def __call__(self, text_id: Tensor) -> Tensor:
        """Return the logarithm of the count of each, float32 [n]; 0 for one that was never seen."""
        asked = text_id.cpu().numpy()
        place = np.searchsorted(self.text_id, asked).clip(max=max(len(self.text_id) - 1, 0))
        found = np.zeros(len(asked), np.float32)
        if len(self.text_id):
            found = np.where(self.text_id[place] == asked, self.log_count[place], 0).astype(np.float32)
        return torch.from_numpy(found).to(text_id.device)
