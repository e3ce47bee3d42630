"""Texts to tokens: a tokenizer trained on the user's corpus, or read from any ``tokenizer.json``.

Byte-level: every word becomes its UTF-8 bytes before it is cut into subwords, and each byte is a
token, so no text lacks tokens. A batch is tokens [batch, length], padded with 0 at the end.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, Self, final

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors, trainers

from raycl.errors import BrokenValueError, ConfigError, DataError
from raycl.tokenization.batches import PADDING

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # ids 0 to 4
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())  # one printable character for each byte
_SPACE = "Ġ"  # that of the space, which byte-level cutting puts before each word
_CHINESE_OR_JAPANESE = tuple("ãäåæçèé")  # those of the first bytes of characters written without spaces

_CHARACTERS_A_TOKEN = 16  # at most, in a trained tokenizer
_SLACK = 64  # so that a word that the cut goes through is behind the last token that is kept
_TRAINING_CHARACTERS = 100_000
_LONG_RUN = re.compile(r"\S{64}")  # training takes time with more than the square of the longest word
_LONGEST_WORD = 32  # characters; looking for the longest subword takes time with the cube of it


class BrokenTextError(BrokenValueError):
    """One text cannot be used."""


def read_text(value: Any) -> str:
    """Return the text that a value is; raises ``BrokenTextError``.

    ``value`` is a string, UTF-8 bytes, or the error that came in the text's place. Arrow gives up on
    a whole column of strings if one is not UTF-8: cast such a column to binary and read its bytes.
    """
    if isinstance(value, BrokenTextError):
        raise value
    if value is None or (isinstance(value, float) and value != value):  # NaN: pandas' missing value
        raise BrokenTextError("missing value")
    if not isinstance(value, str | bytes):
        raise BrokenTextError(f"{type(value).__name__} in place of a text")
    try:
        text = value.decode() if isinstance(value, bytes) else value
        if not text.isascii():
            text.encode()  # a string may hold halves of surrogate pairs, which have no bytes
    except UnicodeError:
        raise BrokenTextError("invalid UTF-8") from None
    if not text or text.isspace():
        raise BrokenTextError("empty text")
    return text


@final
class Tokenizer:
    """Cut texts into tokens: numbers below ``num_tokens``, of which 0 is the padding.

    ``text`` is the content of a ``tokenizer.json``: one that :func:`train_tokenizer` made, or another's.
    Where padding is not 0 there, as in RoBERTa's, the two numbers are swapped. Names of special
    tokens within a text ("[SEP]") are read as any other text. Raises ``ConfigError`` if it is damaged.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises Exception itself
            raise ConfigError(
                f"the tokenizer is damaged: {' '.join(str(error).split())[:200]}; "
                "give the content of a tokenizer.json"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # as any other text
        self._vocabulary = self._tokenizer.get_vocab()
        self._padding = self._number_of("[PAD]", "<pad>")
        self._unknown = self._number_of("[UNK]", "<unk>")
        self._before, self._after = self._surroundings()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the tokenizer that ``to_json`` wrote."""
        return cls(text)

    def to_json(self) -> str:
        """Return the content of its ``tokenizer.json``, as it was read."""
        return self._text

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        return type(self), (self._text,)

    @cached_property
    def num_tokens(self) -> int:
        """Size of the vocabulary with the special tokens: one more than the greatest token."""
        return max(self._vocabulary.values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits of its content, to tell an encoder's tokenizer from others."""
        content = json.dumps(json.loads(self._text), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @cached_property
    def special_tokens(self) -> tuple[int, ...]:
        """Those that stand for no text: padding, the beginning of a text and the like."""
        added = self._tokenizer.get_added_tokens_decoder()
        special = np.array([number for number, token in added.items() if token.special], np.int64)
        return tuple(sorted(self.swapped(special).tolist()))

    @cached_property
    def begins_word(self) -> NDArray[np.bool_]:
        """Which tokens begin a word, [num_tokens]; the others go on with the one before.

        A word is a run of letters and digits, or of other marks; where characters are written
        without spaces, as in Chinese, each token that does not begin inside one is a word.
        """
        begins = np.zeros(self.num_tokens, np.bool_)
        # BERT's kind marks what goes on, the others mark what begins: byte-level ones by "Ġ".
        mark_of_rest = json.loads(self._text)["model"].get("continuing_subword_prefix")
        for token, number in self._vocabulary.items():
            if mark_of_rest:
                begins[number] = not token.startswith(mark_of_rest)
            else:
                begins[number] = token.startswith((_SPACE, "▁", *_CHINESE_OR_JAPANESE))
        return begins[self.swapped(np.arange(self.num_tokens))]

    def encode(self, texts: Sequence[str], max_length: int) -> list[NDArray[np.int32]]:
        """Return the tokens of each text: at least one and at most ``max_length`` of them.

        Of a long text only the first 16 * ``max_length`` characters are looked at: no token of a
        trained tokenizer is longer, so it matters only where spaces are many. A text without any
        tokens, as an empty one, is one [UNK]. A text's tokens depend on no other text.
        """
        room = max_length - len(self._before) - len(self._after)
        if room < 1:
            raise ConfigError(f"max_length leaves no room for a text, came {max_length}; 32 to 512 is usual")
        most = _CHARACTERS_A_TOKEN * room + _SLACK
        rows = []
        # One by one: the library's own loop over texts takes all cores, those of other tasks as well.
        for text in texts:
            text = text if len(text) <= most else text.lstrip()[:most]
            own = self._tokenizer.encode(text, add_special_tokens=False).ids[:room] or [self._unknown]
            rows.append(self.swapped(np.array(self._before + own + self._after, np.int32)))
        return rows

    def _number_of(self, *names: str) -> int:
        numbers = [self._vocabulary[name] for name in names if name in self._vocabulary]
        if not numbers:
            raise ConfigError(
                f"the tokenizer has no token {' or '.join(names)}; add one to its tokenizer.json"
            )
        return numbers[0]

    def _surroundings(self) -> tuple[list[int], list[int]]:
        """Return the special tokens before and after each text."""
        own = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a").ids
        starts = [at for at in range(len(whole)) if whole[at : at + len(own)] == own]
        if not starts:
            raise ConfigError(
                f"the tokenizer cuts 'a' into {own}, and with special tokens into {whole}; give one that puts "
                "them before or after the text"
            )
        return whole[: starts[0]], whole[starts[0] + len(own) :]

    def swapped(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Return the numbers with the library's padding and ``PADDING`` in each other's place; twice is as before."""
        if self._padding == PADDING:
            return numbers
        is_padding = numbers == self._padding
        return np.where(is_padding, PADDING, np.where(numbers == PADDING, self._padding, numbers)).astype(
            numbers.dtype
        )


def train_tokenizer(
    texts: Iterable[str],
    *,
    vocabulary_size: int = 16_384,
    lowercase: bool = True,
    kind: Literal["bpe", "wordpiece"] = "bpe",
    cls: bool = False,
) -> Tokenizer:
    """Train a tokenizer on sound texts (see :func:`read_text`).

    ``bpe`` joins subwords in the order that it learned (Sennrich et al., 2016), ``wordpiece`` takes
    the longest one that fits; both have the same vocabulary. Texts are brought to NFKC. With ``cls``
    each text begins with [CLS]. The same texts give the same tokenizer, to the byte; the library's
    third kind, unigram, comes out otherwise each time and is left out. Of each text the first 100,000
    characters are looked at, and what has no spaces is cut at 64. Raises ``ConfigError`` for impossible arguments, and
    ``DataError`` if there are no texts.
    """
    smallest = len(SPECIAL_TOKENS) + len(_BYTES)
    if kind not in ("bpe", "wordpiece") or vocabulary_size < smallest:
        raise ConfigError(
            f"cannot train a tokenizer of kind {kind!r} with vocabulary_size {vocabulary_size}; "
            f"give bpe or wordpiece, and at least {smallest}"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    steps: list[Any] = [normalizers.NFKC(), *([normalizers.Lowercase()] if lowercase else [])]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = _words_as_bytes(kind)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=_BYTES,
        max_token_length=_CHARACTERS_A_TOKEN,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_beginnings(texts), trainer)
    if kind == "wordpiece":
        tokenizer.model = models.WordPiece(
            tokenizer.get_vocab(),
            unk_token="[UNK]",
            continuing_subword_prefix="",
            max_input_chars_per_word=10 * _LONGEST_WORD,
        )
    if cls:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A", pair="[CLS] $A [SEP] $B", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    return Tokenizer(tokenizer.to_str())


def _words_as_bytes(kind: str) -> Any:
    """Cut at spaces and between letters and marks, then write each word as its bytes."""
    steps: list[Any] = [pre_tokenizers.Whitespace()]
    if kind == "wordpiece":
        steps.append(pre_tokenizers.Split(Regex(f".{{1,{_LONGEST_WORD}}}"), "isolated"))
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)])


def _beginnings(texts: Iterable[str]) -> Iterator[str]:
    is_empty = True
    for text in texts:
        is_empty = False
        yield _LONG_RUN.sub(r"\g<0> ", text[:_TRAINING_CHARACTERS])
    if is_empty:
        raise DataError("there are no texts to train a tokenizer on, none came; give the corpus of the run")
