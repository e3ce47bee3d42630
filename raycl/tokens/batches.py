"""Tokens of many texts: what pads their batches, and how common each token is."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

PADDING = 0


def inverse_document_frequency(rows: Iterable[NDArray[np.integer]], num_tokens: int) -> NDArray[np.float32]:
    """Return ln((1 + rows) / (1 + rows with the token)) + 1 of each token, [num_tokens]."""
    num_rows, counts = 0, np.zeros(num_tokens, np.int64)
    for row in rows:
        num_rows += 1
        counts[np.unique(row)] += 1
    return (np.log((1 + num_rows) / (1 + counts)) + 1).astype(np.float32)
