"""Texts: cut into tokens by Ray Data tasks, held as tokens, padded when a batch is taken."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raycl.tokens.batches import PADDING
from raycl.tokens.tokenizer import BrokenTextError, Tokenizer, read_text


@final
@dataclass(frozen=True)
class Tokens:
    """The tokens of some texts one after the other, and how many each text has [batch]."""

    values: NDArray[np.int32]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    def joined(self, other: Self) -> Self:
        """Return these texts with the other's after them."""
        return type(self)(
            np.concatenate([self.values, other.values]), np.concatenate([self.lengths, other.lengths])
        )

    def padded(self) -> NDArray[np.int64]:
        """Return [batch, length of the longest], with padding at the end."""
        places = np.arange(self.lengths.max(initial=0))
        batch = np.full((len(self), len(places)), PADDING, np.int64)
        batch[places < self.lengths[:, None]] = self.values
        return batch


@final
@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """Texts as at most ``max_length`` tokens of a tokenizer."""

    tokenizer: Tokenizer
    max_length: int

    def decode_all(self, values: Sequence[Any]) -> list[NDArray[np.int32] | BrokenTextError]:
        """Return the tokens of each text, or why it cannot be used."""
        texts = [_text_or_error(value) for value in values]
        tokens = iter(
            self.tokenizer.encode([text for text in texts if isinstance(text, str)], self.max_length)
        )
        return [next(tokens) if isinstance(text, str) else text for text in texts]

    def store(self, decoded: Sequence[NDArray[np.int32]]) -> dict[str, pa.Array]:
        """Return the column ``tokens``, a list a text."""
        offsets = np.cumsum([0, *map(len, decoded)])
        values = np.concatenate([np.empty(0, np.int32), *decoded])
        return {
            "tokens": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, pa.int32()))
        }

    def read(self, parts: Sequence[pa.RecordBatch], prefix: str) -> "StoredTexts":
        """Return the texts of these columns, without a copy."""
        return StoredTexts(tuple(_Part.of(part.column(f"{prefix}tokens")) for part in parts))


@final
@dataclass(frozen=True)
class StoredTexts:
    """Tokens in the object store, as views of its memory; parts are Arrow's record batches."""

    parts: Sequence["_Part"]

    def take(self, part: NDArray[np.int64], row: NDArray[np.int64]) -> Tokens:
        """Copy the tokens at these rows of these parts."""
        rows = [self.parts[each].tokens(at) for each, at in zip(part, row, strict=True)]
        return Tokens(
            np.concatenate([np.empty(0, np.int32), *rows]), np.array([len(each) for each in rows], np.int64)
        )


@final
@dataclass(frozen=True)
class _Part:
    values: NDArray[np.int32]
    offsets: NDArray[np.int64]

    @staticmethod
    def of(column: pa.ListArray) -> "_Part":
        """Return a column's lists, whose buffers it may share with rows before and after."""
        lengths = pc.list_value_length(column).to_numpy()  # pyright: ignore[reportAttributeAccessIssue]
        return _Part(column.flatten().to_numpy(), np.cumsum([0, *lengths]))

    def tokens(self, row: int) -> NDArray[np.int32]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]


def _text_or_error(value: Any) -> str | BrokenTextError:
    try:
        return read_text(value)
    except BrokenTextError as error:
        return error
