"""Texts: tokenized by Ray Data tasks, stored as tokens, padded in batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Self, final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raycl.data.codecs import list_lengths, to_numpy
from raycl.data.ids import content_id
from raycl.errors import InvalidValueError
from raycl.tokenization import InvalidTextError, Tokenizer, padded, read_text


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

    def padded(self) -> NDArray[np.int64]:
        """Return [batch, length of the longest], with padding at the end."""
        return padded(self.values, self.lengths)

    def take(self, numbers: NDArray[np.int64]) -> Self:
        """Return the texts with these numbers, which may repeat."""
        rows = [self.values[self._ends[each] - self.lengths[each] : self._ends[each]] for each in numbers]
        values = np.concatenate([np.empty(0, np.int32), *rows])
        return replace(self, values=values, lengths=self.lengths[numbers], text_id=self.text_id[numbers])

    @classmethod
    def joined(cls, parts: Sequence["Tokens"]) -> "Tokens":
        """Return the texts of all parts, of which there is at least one."""
        names = ("values", "lengths", "text_id")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(self.lengths)


@final
@dataclass(frozen=True)
class TokenLists:
    """Lists of texts: ``counts`` [batch] texts per row, possibly none; ``tokens`` of all texts."""

    tokens: Tokens
    counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.counts)

    def picked(self, number: NDArray[np.int64]) -> Tokens:
        """Return one text of each row, by its index [batch] in the list."""
        return self.tokens.take(np.cumsum(self.counts) - self.counts + number)


@final
@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """One text per row after ``prompt``, as at most ``max_length`` tokens."""

    tokenizer: Tokenizer
    max_length: int
    prompt: str = ""

    def decode_all(self, values: Sequence[Any]) -> list[NDArray[np.int32] | InvalidTextError]:
        """Return the tokens of each text, or its error."""
        texts = [_text_or_error(value) for value in values]
        prompted = [self.prompt + text for text in texts if isinstance(text, str)]
        tokens = iter(self.tokenizer.encode(prompted, self.max_length))
        return [next(tokens) if isinstance(text, str) else text for text in texts]

    def store(self, decoded: Sequence[NDArray[np.int32]]) -> dict[str, pa.Array]:
        """Return the columns ``tokens``, one list per text, and ``id``."""
        return {"tokens": _lists(decoded), "id": pa.array(map(_text_id, decoded), pa.int64())}

    def read(self, columns: Mapping[str, Any]) -> Tokens:
        """Return the texts of these columns."""
        return _tokens(columns["tokens"], columns["id"])


@final
@dataclass(frozen=True, kw_only=True)
class TextsFormat:
    """A list of texts per row, each after ``prompt``.

    A single text counts as a list of one, unless lists may be empty.
    """

    tokenizer: Tokenizer
    max_length: int
    prompt: str = ""
    may_be_empty: bool = False

    def decode_all(self, values: Sequence[Any]) -> list[list[NDArray[np.int32]] | InvalidValueError]:
        """Return the tokens of each row's texts, or an error if any text of the row is invalid."""
        rows = [self._as_list(value) for value in values]
        texts = [text for row in rows for text in row]
        decoded = iter(self._one_per_row().decode_all(texts))
        return [self._valid_or_error([next(decoded) for _ in row]) for row in rows]

    def store(self, decoded: Sequence[list[NDArray[np.int32]]]) -> dict[str, pa.Array]:
        """Return the columns ``tokens``, lists of lists, and ``id``, a list per row."""
        stored = self._one_per_row().store([text for row in decoded for text in row])
        offsets = _offsets(decoded)
        return {name: pa.ListArray.from_arrays(offsets, column) for name, column in stored.items()}

    def read(self, columns: Mapping[str, Any]) -> TokenLists:
        """Return the texts of these columns."""
        tokens, text_id = columns["tokens"], columns["id"]
        return TokenLists(_tokens(tokens.flatten(), text_id.flatten()), list_lengths(tokens))

    def _one_per_row(self) -> TextFormat:
        return TextFormat(tokenizer=self.tokenizer, max_length=self.max_length, prompt=self.prompt)

    def _as_list(self, value: Any) -> Sequence[Any]:
        if isinstance(value, list | tuple | np.ndarray):
            return list(value)
        return [] if value is None and self.may_be_empty else [value]

    def _valid_or_error(
        self, row: list[NDArray[np.int32] | InvalidTextError]
    ) -> list[NDArray[np.int32]] | InvalidValueError:
        valid = []
        for text in row:
            if isinstance(text, InvalidTextError):
                return text
            valid.append(text)
        return valid if valid or self.may_be_empty else InvalidTextError("empty list of texts")


def ids_and_rows(texts: Tokens | TokenLists) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the id of each text, and the number of its row."""
    numbers = np.arange(len(texts))
    if isinstance(texts, Tokens):
        return texts.text_id, numbers
    return texts.tokens.text_id, np.repeat(numbers, texts.counts)


def num_tokens(rows: pa.RecordBatch) -> NDArray[np.int64]:
    """Return the number of tokens of each row, summed over its roles; the longest text of a list counts."""
    total = np.zeros(rows.num_rows, np.int64)
    for name in rows.schema.names:
        if name.endswith(".tokens"):
            total += _longest(rows.column(name))
    return total


def _longest(column: Any) -> NDArray[np.int64]:
    """Return the length of each row's text, or of the longest one of a list; 0 for an empty list."""
    if not pa.types.is_list(column.type.value_type):
        return list_lengths(column)
    lengths = list_lengths(column.flatten())
    ends = np.cumsum([0, *list_lengths(column)])
    return np.array([lengths[start:end].max(initial=0) for start, end in pairwise(ends)], np.int64)


def _tokens(tokens: Any, text_id: pa.Array) -> Tokens:
    return Tokens(to_numpy(tokens.flatten()), list_lengths(tokens), to_numpy(text_id))


def _lists(rows: Sequence[NDArray[np.int32]]) -> pa.ListArray:
    values = np.concatenate([np.empty(0, np.int32), *rows])
    return pa.ListArray.from_arrays(_offsets(rows), pa.array(values, pa.int32()))


def _offsets(lists: Sequence[Any]) -> pa.Array:
    return pa.array(np.cumsum([0, *map(len, lists)]), pa.int32())


def _text_id(tokens: NDArray[np.int32]) -> int:
    return content_id(tokens.astype("<i4").tobytes())


def _text_or_error(value: Any) -> str | InvalidTextError:
    try:
        return read_text(value)
    except InvalidTextError as error:
        return error
