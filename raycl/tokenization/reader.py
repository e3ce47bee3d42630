"""Tokens back to texts that people read."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders

from raycl.tokenization.tokenizer import Tokenizer


@final
class Reader:
    """Turn tokens into text: what an encoder sees, so lower-cased and cut where the tokenizer does that."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._numbered = tokenizer
        self._tokenizer: Any = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        if self._tokenizer.decoder is None:  # those that raycl trains write no decoder down
            self._tokenizer.decoder = decoders.ByteLevel()

    def read(self, texts: Sequence[NDArray[np.int32]]) -> list[str]:
        """Return each text, without special tokens."""
        # Twice swapped, padding and the token 0 are where the library has them.
        numbers = [self._numbered.swapped(text).tolist() for text in texts]
        return [" ".join(self._tokenizer.decode(text).split()) for text in numbers]
