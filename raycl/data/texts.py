"""Texts: tokenized by Ray Data tasks, stored as tokens, padded in batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raycl.data.ids import content_id
from raycl.errors import BrokenValueError
from raycl.tokenization import BrokenTextError, Tokenizer, padded, read_text


@final
@dataclass(frozen=True)
class Tokens:
    """The concatenated tokens of some texts, with the length and the id of each text [batch].

    Texts with equal tokens have equal ``text_id``, since an encoder cannot distinguish them.
    """

    values: NDArray[np.int32]
    lengths: NDArray[np.int64]
    text_id: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    def joined(self, other: Self) -> Self:
        """Return these texts followed by the texts of ``other``."""
        return type(self)(
            np.concatenate([self.values, other.values]),
            np.concatenate([self.lengths, other.lengths]),
            np.concatenate([self.text_id, other.text_id]),
        )

    def padded(self) -> NDArray[np.int64]:
        """Return [batch, length of the longest], with padding at the end."""
        return padded(self.values, self.lengths)


@final
@dataclass(frozen=True)
class TokenLists:
    """Lists of texts: ``counts`` [batch] texts per row, possibly none; ``tokens`` of all texts."""

    tokens: Tokens
    counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.counts)

    def joined(self, other: Self) -> Self:
        """Return these rows followed by the rows of ``other``."""
        return type(self)(self.tokens.joined(other.tokens), np.concatenate([self.counts, other.counts]))

    def picked(self, number: NDArray[np.int64]) -> Tokens:
        """Return one text of each row, by its index [batch] in the list."""
        chosen = np.cumsum(self.counts) - self.counts + number
        ends = np.cumsum(self.tokens.lengths)
        lengths = self.tokens.lengths[chosen]
        values = [
            self.tokens.values[end - length : end] for end, length in zip(ends[chosen], lengths, strict=True)
        ]
        return Tokens(np.concatenate([np.empty(0, np.int32), *values]), lengths, self.tokens.text_id[chosen])


@final
@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """One text per row, as at most ``max_length`` tokens."""

    tokenizer: Tokenizer
    max_length: int

    def decode_all(self, values: Sequence[Any]) -> list[NDArray[np.int32] | BrokenTextError]:
        """Return the tokens of each text, or its error."""
        texts = [_text_or_error(value) for value in values]
        tokens = iter(
            self.tokenizer.encode([text for text in texts if isinstance(text, str)], self.max_length)
        )
        return [next(tokens) if isinstance(text, str) else text for text in texts]

    def store(self, decoded: Sequence[NDArray[np.int32]]) -> dict[str, pa.Array]:
        """Return the columns ``tokens``, one list per text, and ``id``."""
        return {"tokens": _lists(decoded), "id": pa.array(map(_text_id, decoded), pa.int64())}

    def read(self, parts: Sequence[pa.RecordBatch], prefix: str) -> "StoredTexts":
        """Return the texts of these columns, without a copy."""
        return StoredTexts(
            tuple(_Part.of(part.column(f"{prefix}tokens"), part.column(f"{prefix}id")) for part in parts)
        )


@final
@dataclass(frozen=True, kw_only=True)
class TextsFormat:
    """A list of texts per row; a single text counts as a list of one, unless lists may be empty."""

    tokenizer: Tokenizer
    max_length: int
    may_be_empty: bool = False

    def decode_all(self, values: Sequence[Any]) -> list[list[NDArray[np.int32]] | BrokenValueError]:
        """Return the tokens of each row's texts, or an error if any text of the row is invalid."""
        rows = [self._as_list(value) for value in values]
        texts = [text for row in rows for text in row]
        decoded = iter(TextFormat(tokenizer=self.tokenizer, max_length=self.max_length).decode_all(texts))
        found = [[next(decoded) for _ in row] for row in rows]
        return [self._valid_or_error(row) for row in found]

    def store(self, decoded: Sequence[list[NDArray[np.int32]]]) -> dict[str, pa.Array]:
        """Return the columns ``tokens``, lists of lists, and ``id``, a list per row."""
        texts = [text for row in decoded for text in row]
        offsets = _offsets(decoded)
        ids = pa.array(map(_text_id, texts), pa.int64())
        return {
            "tokens": pa.ListArray.from_arrays(offsets, _lists(texts)),
            "id": pa.ListArray.from_arrays(offsets, ids),
        }

    def read(self, parts: Sequence[pa.RecordBatch], prefix: str) -> "StoredTextLists":
        """Return the texts of these columns, without a copy."""
        columns = [(part.column(f"{prefix}tokens"), part.column(f"{prefix}id")) for part in parts]
        return StoredTextLists(
            tuple(_Part.of(tokens.flatten(), ids.flatten()) for tokens, ids in columns),
            tuple(_ends(tokens) for tokens, _ in columns),
        )

    def _as_list(self, value: Any) -> Sequence[Any]:
        if isinstance(value, list | tuple | np.ndarray):
            return list(value)
        return [] if value is None and self.may_be_empty else [value]

    def _valid_or_error(
        self, row: list[NDArray[np.int32] | BrokenTextError]
    ) -> list[NDArray[np.int32]] | BrokenValueError:
        valid = []
        for text in row:
            if isinstance(text, BrokenTextError):
                return text
            valid.append(text)
        return valid if valid or self.may_be_empty else BrokenTextError("empty list of texts")


@final
@dataclass(frozen=True)
class StoredTexts:
    """Texts in the object store, as views of its memory; parts are Arrow record batches."""

    parts: Sequence["_Part"]

    def take(self, part: NDArray[np.int64], row: NDArray[np.int64]) -> Tokens:
        """Copy the tokens at these rows of these parts."""
        rows = [self.parts[each].tokens(at) for each, at in zip(part, row, strict=True)]
        ids = [self.parts[each].text_id[at] for each, at in zip(part, row, strict=True)]
        return Tokens(
            np.concatenate([np.empty(0, np.int32), *rows]),
            np.array([len(each) for each in rows], np.int64),
            np.array(ids, np.int64),
        )

    def num_tokens(self, part: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens of each row."""
        return _at([np.diff(each.ends) for each in self.parts], part, row)


@final
@dataclass(frozen=True)
class StoredTextLists:
    """Lists of texts in the object store; ``ends`` are the boundaries of the lists of each part."""

    parts: Sequence["_Part"]
    ends: Sequence[NDArray[np.int64]]

    def take(self, part: NDArray[np.int64], row: NDArray[np.int64]) -> TokenLists:
        """Copy the texts at these rows of these parts."""
        places = [np.arange(*self.ends[each][at : at + 2]) for each, at in zip(part, row, strict=True)]
        counts = np.array([len(each) for each in places], np.int64)
        flat = np.concatenate([np.empty(0, np.int64), *places]).astype(np.int64)
        return TokenLists(StoredTexts(self.parts).take(np.repeat(part, counts), flat), counts)

    def num_tokens(self, part: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens of the longest text of each row; 0 for an empty list."""
        longest = [
            np.array([lengths[start:end].max(initial=0) for start, end in pairwise(ends)], np.int64)
            for lengths, ends in zip((np.diff(each.ends) for each in self.parts), self.ends, strict=True)
        ]
        return _at(longest, part, row)


@final
@dataclass(frozen=True)
class _Part:
    values: NDArray[np.int32]
    ends: NDArray[np.int64]
    text_id: NDArray[np.int64]

    @staticmethod
    def of(tokens: pa.ListArray, text_id: pa.Array) -> "_Part":
        return _Part(tokens.flatten().to_numpy(), _ends(tokens), text_id.to_numpy())

    def tokens(self, row: int) -> NDArray[np.int32]:
        return self.values[self.ends[row] : self.ends[row + 1]]


def _at(
    values: Sequence[NDArray[np.int64]], part: NDArray[np.int64], row: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the values at these rows of these parts."""
    starts = np.cumsum([0, *map(len, values)])
    return np.concatenate([np.empty(0, np.int64), *values])[starts[part] + row]


def _ends(column: pa.ListArray) -> NDArray[np.int64]:
    """Return the ends of a column's lists in its flattened values, after a 0.

    The offsets would not do: the buffers of a slice hold other rows as well.
    """
    lengths = pc.list_value_length(column).to_numpy()  # pyright: ignore[reportAttributeAccessIssue]
    return np.cumsum([0, *lengths])


def _offsets(lists: Sequence[Any]) -> pa.Array:
    return pa.array(np.cumsum([0, *map(len, lists)]), pa.int32())


def _lists(rows: Sequence[NDArray[np.int32]]) -> pa.ListArray:
    values = np.concatenate([np.empty(0, np.int32), *rows])
    return pa.ListArray.from_arrays(_offsets(rows), pa.array(values, pa.int32()))


def _text_id(tokens: NDArray[np.int32]) -> int:
    return content_id(tokens.astype("<i4").tobytes())


def _text_or_error(value: Any) -> str | BrokenTextError:
    try:
        return read_text(value)
    except BrokenTextError as error:
        return error
