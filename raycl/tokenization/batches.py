"""Tokens of many texts: what pads their batches, and how common each token is."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

PADDING = 0


def padded(values: NDArray[np.integer], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return rows of tokens that stood one after the other, [len(lengths), longest], padded at the end."""
    places = np.arange(lengths.max(initial=0))
    batch = np.full((len(lengths), len(places)), PADDING, np.int64)
    batch[places < lengths[:, None]] = values
    return batch


def padded_rows(rows: Sequence[NDArray[np.integer]]) -> NDArray[np.int64]:
    """Return rows of tokens as one batch [len(rows), longest], padded at the end."""
    lengths = np.array([len(row) for row in rows], np.int64)
    return padded(np.concatenate([np.empty(0, np.int64), *rows]), lengths)


def inverse_document_frequency(rows: Iterable[NDArray[np.integer]], num_tokens: int) -> NDArray[np.float32]:
    """Return ln((1 + rows) / (1 + rows with the token)) + 1 of each token, [num_tokens]."""
    num_rows, counts = 0, np.zeros(num_tokens, np.int64)
    for row in rows:
        num_rows += 1
        counts[np.unique(row)] += 1
    return (np.log((1 + num_rows) / (1 + counts)) + 1).astype(np.float32)
