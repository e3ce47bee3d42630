"""The vocabulary of a run: its tokenizer and the frequency of each token."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from raycl.tokenization.tokenizer import Tokenizer, train_tokenizer


@final
@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A tokenizer, and the inverse document frequency of each token [num_tokens] if it was counted."""

    tokenizer: Tokenizer
    weights: NDArray[np.float32] | None = None

    @classmethod
    def of_texts(
        cls,
        texts: Sequence[str],
        tokenizer: Tokenizer | None = None,
        *,
        max_length: int,
        size: int,
        lowercase: bool,
    ) -> "Vocabulary":
        """Count the tokens of texts; without a tokenizer, train one on them."""
        tokenizer = tokenizer or train_tokenizer(texts, vocabulary_size=size, lowercase=lowercase)
        rows = tokenizer.encode(texts, max_length)
        return cls(tokenizer, inverse_document_frequency(rows, tokenizer.num_tokens))

    @classmethod
    def stand_in(cls) -> "Vocabulary":
        """Return a small vocabulary that checks settings before the real one exists."""
        return cls(train_tokenizer(["a"], vocabulary_size=261))


def inverse_document_frequency(rows: Iterable[NDArray[np.integer]], num_tokens: int) -> NDArray[np.float32]:
    """Return ln((1 + rows) / (1 + rows with the token)) + 1 for each token, [num_tokens]."""
    num_rows, counts = 0, np.zeros(num_tokens, np.int64)
    for row in rows:
        num_rows += 1
        counts[np.unique(row)] += 1
    return (np.log((1 + num_rows) / (1 + counts)) + 1).astype(np.float32)
