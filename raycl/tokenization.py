"""Texts to tokens, by a tokenizer trained on the user's corpus or read from any ``tokenizer.json``.

Trained tokenizers are byte-level: each word becomes its UTF-8 bytes before it is cut into subwords, and
every byte is a token, so every text can be encoded. A batch is tokens [batch, length], padded with 0 at
the end.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from typing import Any, Self, final

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from raycl.errors import ConfigError, DataError, InvalidValueError, one_line

PADDING = 0
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # ids 0 to 4
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())  # one printable character for each byte
_MAX_TOKEN_CHARACTERS = 16  # in a trained tokenizer
_SLACK = 64  # a word cut in half at the end lies beyond the last token that is kept
_LONGEST_KNOWN_WORD = 100  # characters; BERT's tokenizer reads longer ones as [UNK], but not a part of them
_TRAINING_CHARACTERS = 100_000
_PART = 1_000  # texts whose tokens are counted at a time
_IN_BRACKETS = re.compile(r"\[\w+\]|<\w+>")
_LONG_RUN = re.compile(r"\S{64}")  # training time grows faster than the square of the longest word


class InvalidTextError(InvalidValueError):
    """One text cannot be used."""


def read_text(value: Any) -> str:
    """Return a value as text; raises ``InvalidTextError``.

    ``value`` is a string, UTF-8 bytes, or the error that replaces the text. Arrow rejects a whole
    column of strings if one is invalid UTF-8: cast the column to binary and pass its bytes.
    """
    if isinstance(value, InvalidTextError):
        raise value
    if value is None or (isinstance(value, float) and value != value):  # NaN: pandas' missing value
        raise InvalidTextError("missing value")
    if not isinstance(value, str | bytes):
        raise InvalidTextError(f"{type(value).__name__} in place of a text")
    try:
        text = value.decode() if isinstance(value, bytes) else value
        if not text.isascii():
            text.encode()  # a string may hold unpaired surrogates, which have no bytes
    except UnicodeError:
        raise InvalidTextError("invalid UTF-8") from None
    if not text or text.isspace():
        raise InvalidTextError("empty text")
    return text


def padded(values: NDArray[np.integer], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Cut concatenated tokens into rows of these lengths, padded at the end: [len(lengths), longest]."""
    position = np.arange(lengths.max(initial=0))
    batch = np.full((len(lengths), len(position)), PADDING, np.int64)
    batch[position < lengths[:, None]] = values
    return batch


def padded_rows(rows: Sequence[NDArray[np.integer]]) -> NDArray[np.int64]:
    """Return rows of tokens as one batch [len(rows), longest], padded at the end."""
    lengths = np.array([len(row) for row in rows], np.int64)
    return padded(np.concatenate([np.empty(0, np.int64), *rows]), lengths)


@final
@dataclass(frozen=True, kw_only=True)
class _WordMarks:
    """How the tokens of a file show where words begin; an empty mark is unused."""

    beginning: str  # stands for the space before a word
    continuation: str  # of tokens that continue a word, as BERT's ##
    end: str  # of tokens that end a word, as CLIP's </w>
    tokens_are_words: bool
    unspaced: tuple[str, str]  # first and last of the characters that are written without spaces

    @classmethod
    def read(cls, text: str) -> Self:
        """Read the marks from the content of a ``tokenizer.json``."""
        content = json.loads(text)
        model, parts = content["model"], ("normalizer", "pre_tokenizer", "decoder")
        # Then each character of a token stands for a byte, and a space is written as Ġ.
        is_byte_level = '"ByteLevel"' in json.dumps([content.get(part) for part in parts])
        return cls(
            beginning="Ġ" if is_byte_level else "▁",
            continuation=model.get("continuing_subword_prefix") or "",
            end=model.get("end_of_word_suffix") or "",
            tokens_are_words=model.get("type") == "WordLevel",
            # The first bytes of Chinese and Japanese characters, or the characters themselves.
            unspaced=("ã", "é") if is_byte_level else ("\u3000", "\u9fff"),
        )

    def begins_word(self, token: str) -> bool:
        """Whether a token begins a word, wherever it stands."""
        if self.continuation:
            return not token.startswith(self.continuation)
        first, last = self.unspaced
        return self.tokens_are_words or token.startswith(self.beginning) or first <= token[:1] <= last

    def ends_word(self, token: str) -> bool:
        """Whether the token after this one begins a word."""
        return bool(self.end) and token.endswith(self.end)


@final
class Tokenizer:
    """Cut texts into token ids below ``num_tokens``; 0 is the padding.

    ``text`` is the content of a ``tokenizer.json``, made by :func:`train_tokenizer` or another tool. If
    its padding id (``padding``) is not 0, as in RoBERTa's, the two ids are swapped. Names of special tokens
    in a text ("[SEP]") are read as plain text, or as [UNK] if the file's model finds them whole, as XLM-R's does.
    Raises ``ConfigError`` if the file is damaged.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises Exception itself
            raise ConfigError(
                f"the tokenizer is damaged: {one_line(error)}; give the content of a tokenizer.json"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # read their names as plain text
        if self._tokenizer.decoder is None:  # raycl's own files have none
            self._tokenizer.decoder = decoders.ByteLevel()
        self._vocabulary = self._tokenizer.get_vocab()
        self.padding = self._id_of("[PAD]", "<pad>")
        self._unknown = self._id_of("[UNK]", "<unk>")
        self._before, self._after = self._added_tokens()

    def to_json(self) -> str:
        """Return the content of the ``tokenizer.json`` unchanged."""
        return self._text

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        return type(self), (self._text,)

    @cached_property
    def num_tokens(self) -> int:
        """The largest token id plus one; special tokens count."""
        return max(self._vocabulary.values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits of a hash of the content."""
        content = json.dumps(json.loads(self._text), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def adds_special_tokens(self) -> bool:
        """Whether special tokens come before or after each text, such as [CLS]."""
        return bool(self._before or self._after)

    @cached_property
    def special_tokens(self) -> tuple[int, ...]:
        """The ids of tokens that stand for no text, such as padding and [CLS]."""
        added = self._tokenizer.get_added_tokens_decoder()
        special = np.array([number for number, token in added.items() if token.special], np.int64)
        return tuple(sorted(self._swap_padding(special).tolist()))

    @cached_property
    def _ids_in_texts(self) -> NDArray[np.int32]:
        """The id for each token that the library finds in a text, [num_tokens]: [UNK] for special tokens."""
        ids = self._swap_padding(np.arange(self.num_tokens, dtype=np.int32))
        ids[np.isin(ids, [PADDING, *self.special_tokens])] = ids[self._unknown]
        return ids

    @cached_property
    def _marks(self) -> _WordMarks:
        return _WordMarks.read(self._text)

    @cached_property
    def marks_words(self) -> bool:
        """Whether the tokens show where words begin; if not, ``begins_word`` and ``ends_word`` are of no use."""
        marks = self._marks
        is_known = marks.tokens_are_words or bool(marks.continuation or marks.end)
        return is_known or any(token.startswith(marks.beginning) for token in self._vocabulary)

    @cached_property
    def begins_word(self) -> NDArray[np.bool_]:
        """Whether each token begins a word, [num_tokens]; the others continue one, but see ``ends_word``.

        A word is a run of letters and digits, or of other marks. In writing without spaces, such as
        Chinese, each token that does not start inside a character is a word.
        """
        return self._flags(self._marks.begins_word)

    @cached_property
    def ends_word(self) -> NDArray[np.bool_]:
        """Whether the token after each token begins a word, [num_tokens], as in tokenizers with ``</w>``."""
        return self._flags(self._marks.ends_word)

    def _flags(self, is_true: Callable[[str], bool]) -> NDArray[np.bool_]:
        flags = np.zeros(self.num_tokens, np.bool_)
        for token, number in self._vocabulary.items():
            flags[number] = is_true(token)
        return flags[self._swap_padding(np.arange(self.num_tokens))]

    @cached_property
    def spellings(self) -> list[str]:
        """The characters of each token, [num_tokens], a space before those that begin a word.

        Special tokens have none, nor have others in brackets, such as ``[unused1]`` and ``<0x41>``. A byte-level
        token has one character for each byte.
        """
        special, marks = set(self.special_tokens), self._marks
        spellings = [""] * self.num_tokens
        numbers = self._swap_padding(np.array(list(self._vocabulary.values()))).tolist()
        for token, number in zip(self._vocabulary, numbers, strict=True):
            if number not in special and not _IN_BRACKETS.fullmatch(token):
                text = token.lstrip(marks.beginning).removeprefix(marks.continuation).removesuffix(marks.end)
                spellings[number] = " " * bool(self.begins_word[number]) + text
        return spellings

    def encode(
        self, texts: Sequence[str], max_length: int, *, all_cores: bool = False
    ) -> list[NDArray[np.int32]]:
        """Return the tokens of each text, 1 to ``max_length`` of them.

        Of a long text, the first 16 * ``max_length`` characters are read, and more if they have fewer tokens, as those
        of long runs of spaces, or of words that another tool's tokenizer reads as [UNK]. A text without tokens,
        such as an empty one, becomes [UNK]. The tokens of a text do not depend on other texts. ``all_cores``
        encodes on all cores of the machine, and on one otherwise.
        """
        max_own = max_length - len(self._before) - len(self._after)
        if max_own < 1:
            raise ConfigError(f"max_length leaves no room for a text, came {max_length}; 32 to 512 is usual")
        max_characters = _MAX_TOKEN_CHARACTERS * max_own + _SLACK
        texts = [text if len(text) <= max_characters else text.lstrip() for text in texts]
        read = [text[:max_characters] for text in texts]
        encoded: Iterable[Any] = (
            self._tokenizer.encode_batch(read, add_special_tokens=False)  # takes all cores
            if all_cores
            else (self._tokenizer.encode(text, add_special_tokens=False) for text in read)
        )
        before, after = (self._swap_padding(np.array(each, np.int32)) for each in (self._before, self._after))
        found = map(self._first_ids, texts, read, encoded, repeat(max_own))
        own = (self._ids_in_texts[ids or [self._unknown]] for ids in found)
        return [np.concatenate([before, ids, after]) for ids in own]

    def _first_ids(self, text: str, part: str, encoding: Any, count: int) -> list[int]:
        """Return the first ``count`` ids of a text, of which more than the encoded ``part`` is read if they are not in it."""
        while len(part) < len(text) and (
            len(encoding) < count or encoding.token_to_chars(count - 1)[1] > len(part) - _LONGEST_KNOWN_WORD
        ):
            part = text[: 4 * len(part)]
            encoding = self._tokenizer.encode(part, add_special_tokens=False)
        return encoding.ids[:count]

    def num_prompt_tokens(self, prompt: str) -> int:
        """Return the number of tokens before the text itself, special tokens among them; 0 without a prompt.

        The space at the end of a prompt belongs to the next word.
        """
        own = self._tokenizer.encode(prompt.rstrip(), add_special_tokens=False).ids
        return len(self._before) + len(own) if prompt else 0

    def decode(self, rows: Sequence[NDArray[np.int32]]) -> list[str]:
        """Return the texts of rows of tokens, without special tokens, as the encoder sees them."""
        texts = (self._tokenizer.decode(self._swap_padding(row).tolist()) for row in rows)
        return [" ".join(text.split()) for text in texts]

    def _id_of(self, *names: str) -> int:
        numbers = [self._vocabulary[name] for name in names if name in self._vocabulary]
        if not numbers:
            raise ConfigError(
                f"the tokenizer has no token {' or '.join(names)}; add one to its tokenizer.json"
            )
        return numbers[0]

    def _added_tokens(self) -> tuple[list[int], list[int]]:
        """Return the special tokens before and after each text."""
        # A tokenizer of another script may drop an "a".
        texts = ("a", *self._vocabulary)
        text = next(
            (each for each in texts if self._tokenizer.encode(each, add_special_tokens=False).ids), "a"
        )
        own = self._tokenizer.encode(text, add_special_tokens=False).ids
        whole = self._tokenizer.encode(text).ids
        starts = [at for at in range(len(whole)) if whole[at : at + len(own)] == own]
        if not starts:
            raise ConfigError(
                f"the tokenizer cuts {text!r} into {own}, and with special tokens into {whole}; give one that puts "
                "them before or after the text"
            )
        return whole[: starts[0]], whole[starts[0] + len(own) :]

    def _swap_padding(self, ids: NDArray[Any]) -> NDArray[Any]:
        """Exchange the library's padding id and ``PADDING``; applied twice it changes nothing."""
        if self.padding == PADDING:
            return ids
        is_padding = ids == self.padding
        swapped = np.where(is_padding, PADDING, np.where(ids == PADDING, self.padding, ids))
        return swapped.astype(ids.dtype)


def train_tokenizer(
    texts: Iterable[str], *, vocabulary_size: int = 16_384, lowercase: bool = True
) -> Tokenizer:
    """Train a tokenizer on valid texts (see :func:`read_text`).

    It merges subwords in the order it learned them (Sennrich et al., 2016). Texts are normalized to NFKC. The same
    texts give the same tokenizer, byte for byte. Training reads the first 100,000 characters of each text and cuts
    longer runs without spaces at 64. Raises ``ConfigError`` for too small a vocabulary, and ``DataError`` without
    texts.
    """
    smallest = len(SPECIAL_TOKENS) + len(_BYTES)
    if vocabulary_size < smallest:
        raise ConfigError(
            f"cannot train a tokenizer with vocabulary_size {vocabulary_size}; give at least {smallest}"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    steps: list[Any] = [normalizers.NFKC(), *([normalizers.Lowercase()] if lowercase else [])]
    tokenizer.normalizer = normalizers.Sequence(steps)
    # Cut at spaces and between letters and marks, then write each word as its bytes.
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), as_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=_BYTES,
        max_token_length=_MAX_TOKEN_CHARACTERS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_beginnings(texts), trainer)
    return Tokenizer(tokenizer.to_str())


def _beginnings(texts: Iterable[str]) -> Iterator[str]:
    is_empty = True
    for text in texts:
        is_empty = False
        yield _LONG_RUN.sub(r"\g<0> ", text[:_TRAINING_CHARACTERS])
    if is_empty:
        raise DataError("found no texts to train a tokenizer on; give the corpus of the run")


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
        counted: bool = True,
    ) -> "Vocabulary":
        """Count the tokens of texts if ``counted``; without a tokenizer, train one on them."""
        tokenizer = tokenizer or train_tokenizer(texts, vocabulary_size=size, lowercase=lowercase)
        if not counted:
            return cls(tokenizer)
        # In parts, since the tokens of a million documents do not fit in memory.
        parts = (texts[start : start + _PART] for start in range(0, len(texts), _PART))
        rows = chain.from_iterable(tokenizer.encode(part, max_length, all_cores=True) for part in parts)
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
