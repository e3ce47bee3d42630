"""What is known of the tokens of a run: how texts are cut, and how much each token tells."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from raycl.tokenization.batches import inverse_document_frequency
from raycl.tokenization.tokenizer import Tokenizer, train_tokenizer


@final
@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A tokenizer, and where texts were at hand the inverse document frequency of each token [num_tokens]."""

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
        """Count the tokens of texts, by a tokenizer trained on them unless there is one."""
        known = tokenizer or train_tokenizer(texts, vocabulary_size=size, lowercase=lowercase)
        return cls(known, inverse_document_frequency(known.encode(texts, max_length), known.num_tokens))

    @classmethod
    def stand_in(cls) -> "Vocabulary":
        """Return a small one, to try out settings before the real one is known."""
        return cls(train_tokenizer(["a"], vocabulary_size=261))
