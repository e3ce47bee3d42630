"""Tokens of many texts: batches of them, and how common each token is."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

PADDING = 0


def pad_tokens(rows: Sequence[NDArray[np.integer]]) -> NDArray[np.int64]:
    """Return a batch [batch, length] as long as its longest row, padded with 0 at the end."""
    batch = np.full((len(rows), max(map(len, rows), default=0)), PADDING, np.int64)
    for out, row in zip(batch, rows, strict=True):
        out[: len(row)] = row
    return batch


def inverse_document_frequency(rows: Iterable[NDArray[np.integer]], num_tokens: int) -> NDArray[np.float32]:
    """Return ln((1 + rows) / (1 + rows with the token)) + 1 of each token, [num_tokens]."""
    num_rows, counts = 0, np.zeros(num_tokens, np.int64)
    for row in rows:
        num_rows += 1
        counts[np.unique(row)] += 1
    return (np.log((1 + num_rows) / (1 + counts)) + 1).astype(np.float32)
