"""Random views of texts: words deleted, inserted as copies, or repeated, on tokens in plain torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from raycl.augment.checks import check_number
from raycl.augment.rng import COPY, COUNT, DELETION, INSERTION, REPETITION, as_integers, uniforms
from raycl.errors import ConfigError
from raycl.tokenization import PADDING


@final
@dataclass(frozen=True, kw_only=True)
class _Words:
    """The words of all texts of a batch in their order, and the special tokens among them.

    A word is ``length`` tokens from ``start``, an index into the flattened batch. ``number`` counts the
    words of its ``row``; special tokens are not counted and share the number of the previous word.
    """

    row: Tensor  # [num_words], as the next four
    start: Tensor
    length: Tensor
    number: Tensor
    is_special: Tensor
    counts: Tensor  # [num_rows]: words that are not special

    @property
    def max_words(self) -> int:
        """The number of words of the longest text; at least 1."""
        return max(1, int(self.counts.amax()))

    def per_word(self, values: Tensor) -> Tensor:
        """Return one of the values [num_rows, max_words] or [num_rows] for each word, specials included."""
        return values[self.row] if values.ndim == 1 else values[self.row, self.number]

    def index_of(self, row: Tensor, number: Tensor) -> Tensor:
        """Return the indices of the words with these rows and numbers; all [any length]."""
        ordinary = (~self.is_special).nonzero().squeeze(1)
        return ordinary[(self.counts.cumsum(0) - self.counts)[row] + number]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class TextAugmentation:
    """Change the words of texts, in this order.

    ``deletion`` is the probability that a word is deleted; at least one word stays. ``insertion`` is
    the probability that a copy of another word of the same text follows a word, so no new meaning
    enters. ``repetition`` is from ESimCSE (Wu et al., 2022): up to max(2, ``repetition`` * n) of a
    text's n tokens are repeated, a number drawn uniformly; 0.32 in the paper.

    A word is a token that begins one and its continuation tokens: ``begins_word`` [num_tokens] comes
    from the tokenizer, ``None`` makes each token a word. The token after one of ``ends_word`` [num_tokens] begins a
    word too. ``special_tokens`` at a text's beginning and end stay there. A view is cut at ``max_length`` tokens.

    Raises ``ConfigError`` for a setting out of its range.
    """

    max_length: int
    deletion: float = 0.0
    insertion: float = 0.0
    repetition: float = 0.0
    begins_word: Tensor | np.ndarray | None = None
    ends_word: Tensor | np.ndarray | None = None
    special_tokens: Sequence[int] = (0, 1, 2, 3, 4)

    def __post_init__(self) -> None:
        for name in ("deletion", "insertion", "repetition"):
            check_number(name, getattr(self, name), maximum=1.0)
        if self.max_length < 1:
            raise ConfigError(f"max_length is too small, got {self.max_length}; give 1 or more")

    def __call__(
        self,
        tokens: Tensor | np.ndarray,
        sample_id: Tensor | np.ndarray,
        *,
        seed: int,
        epoch: int | Tensor | np.ndarray,
        view: int,
    ) -> Tensor:
        """Return one view of each text; int64 [n, as long as the longest], padded with 0 at the end.

        ``tokens`` is [n, length], padded likewise; ``sample_id`` int64 [n]. A view depends on its own
        text, ``seed``, ``epoch``, ``sample_id`` and ``view``, not on other rows or padding.

        Raises ``ConfigError`` for arrays of a wrong type or shape.
        """
        rows = as_integers(tokens, name="tokens")
        if rows.ndim != 2 or len(rows) != len(sample_id):
            raise ConfigError(
                f"sample_id does not fit the tokens, got {len(sample_id)} for {list(rows.shape)}; "
                "give tokens [n, length] and one id for each row"
            )

        def draw(kind: int, num: int) -> Tensor:
            return uniforms(
                sample_id, seed=seed + kind, epoch=epoch, view=view, num=num, device=rows.device
            ).double()

        if not rows.any():
            return rows
        if self.deletion:
            words = self._words(rows)
            rows = _delete(rows, words, draw(DELETION, words.max_words), rate=self.deletion)
        if self.insertion:
            words = self._words(rows)
            is_followed = words.per_word(draw(INSERTION, words.max_words)) < self.insertion
            rows = _insert(rows, words, is_followed, draw(COPY, words.max_words))
        if self.repetition:
            words = self._words(rows, each_token=True)
            share = draw(COUNT, 1)[:, 0]
            rows = _repeat(rows, words, share, draw(REPETITION, words.max_words), rate=self.repetition)
        return self._cut(rows)

    def _words(self, rows: Tensor, *, each_token: bool = False) -> _Words:
        begins = None if each_token else self._begin_words(rows)
        return _find_words(rows, begins=begins, is_special=self._are_special(rows))

    def _begin_words(self, rows: Tensor) -> Tensor | None:
        begins = _lookup("begins_word", self.begins_word, rows)
        ends = _lookup("ends_word", self.ends_word, rows)
        if begins is not None and ends is not None:
            begins[:, 1:] |= ends[:, :-1]
        return begins

    def _are_special(self, rows: Tensor) -> Tensor:
        return torch.isin(rows, torch.tensor(self.special_tokens, dtype=torch.int64, device=rows.device))

    def _cut(self, rows: Tensor) -> Tensor:
        """Keep ``max_length`` tokens; a special token at the end stays the last one."""
        cut = rows[:, : self.max_length]
        if rows.shape[1] > self.max_length > 1:
            lengths = (rows != 0).sum(1)
            last = rows.gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0]
            is_closed = (lengths > self.max_length) & self._are_special(last)
            cut = cut.clone()
            cut[:, -1] = torch.where(is_closed, last, cut[:, -1])
        return cut


def _delete(rows: Tensor, words: _Words, draws: Tensor, *, rate: float) -> Tensor:
    """Delete the words with draws [n, max_words] below the rate, except the highest draw of each row."""
    beyond = torch.arange(draws.shape[1], device=rows.device) >= words.counts[:, None]
    kept = draws.masked_fill(beyond, -1.0).argmax(1)
    stays = words.is_special | (words.per_word(draws) >= rate) | (words.number == kept[words.row])
    index = stays.nonzero().squeeze(1)
    return _assemble(rows, words, index, words.length[index])


def _insert(rows: Tensor, words: _Words, is_followed: Tensor, choice: Tensor) -> Tensor:
    """Insert a copy of another word of the row after each word where ``is_followed``."""
    num_others = words.per_word(words.counts) - 1
    other = (words.per_word(choice) * num_others).long()
    other += (other >= words.number).long()
    is_followed = is_followed & ~words.is_special & (num_others > 0)
    added = torch.arange(len(words.row), device=rows.device)
    added[is_followed] = words.index_of(words.row[is_followed], other[is_followed])
    return _add(rows, words, added, is_followed)


def _repeat(rows: Tensor, words: _Words, share: Tensor, draws: Tensor, *, rate: float) -> Tensor:
    """Repeat a share [n] of the maximum number allowed: the tokens with the smallest draws [n, max_words]."""
    max_repeated = (rate * words.counts.double()).long().clamp(min=2).minimum(words.counts)
    num_repeated = (share * (max_repeated + 1)).long()
    beyond = torch.arange(draws.shape[1], device=rows.device) >= words.counts[:, None]
    rank = draws.masked_fill(beyond, 2.0).argsort(dim=1, stable=True).argsort(dim=1)
    is_repeated = (words.per_word(rank) < words.per_word(num_repeated)) & ~words.is_special
    return _add(rows, words, torch.arange(len(words.row), device=rows.device), is_repeated)


def _add(rows: Tensor, words: _Words, added: Tensor, where: Tensor) -> Tensor:
    """Insert word number ``added`` [num_words] after each word where ``where`` [num_words] is true."""
    index = torch.stack([torch.arange(len(added), device=rows.device), added], 1).flatten()
    length = torch.stack([words.length, words.length[added] * where], 1).flatten()
    return _assemble(rows, words, index, length)


def _lookup(name: str, of_tokens: Tensor | np.ndarray | None, rows: Tensor) -> Tensor | None:
    """Return the value of each token of rows [num_rows, length]."""
    if of_tokens is None:
        return None
    # A copy: torch warns about read-only arrays from Arrow.
    values = torch.tensor(of_tokens) if isinstance(of_tokens, np.ndarray) else of_tokens
    if int(rows.amax()) >= len(values):
        raise ConfigError(
            f"{name} does not fit the tokens, got {len(values)} entries for token {int(rows.amax())}; "
            "pass the one of the same tokenizer"
        )
    return values.to(rows.device)[rows]


def _find_words(rows: Tensor, *, begins: Tensor | None, is_special: Tensor) -> _Words:
    """Cut rows of tokens [num_rows, length], padded with 0 at the end, into words.

    ``begins`` [num_rows, length] is true for tokens that begin a word; ``None`` makes each token a word.
    ``is_special`` is [num_rows, length].
    """
    real = rows != PADDING
    is_first = real.clone()
    if begins is not None:
        is_first[:, 1:] &= begins[:, 1:] | is_special[:, 1:] | is_special[:, :-1]
    row, column = is_first.nonzero(as_tuple=True)
    word_of_token = is_first.flatten().cumsum(0)[real.flatten()] - 1
    is_special = is_special[row, column]
    ordinary = (~is_special).long()
    counts = torch.zeros(len(rows), dtype=torch.int64, device=rows.device).index_add(0, row, ordinary)
    before = counts.cumsum(0) - counts
    return _Words(
        row=row,
        start=row * rows.shape[1] + column,
        length=torch.bincount(word_of_token, minlength=len(row)),
        number=(ordinary.cumsum(0) - 1 - before[row]).clamp(min=0),
        is_special=is_special,
        counts=counts,
    )


def _assemble(rows: Tensor, words: _Words, index: Tensor, length: Tensor) -> Tensor:
    """Return rows [num_rows, as long as the longest] of the words at ``index``, in that order.

    ``length`` is the number of tokens to take of each word; rows of the words must be ascending.
    """
    word = index.repeat_interleave(length)
    within = _count_up(length)
    row = words.row[word]
    sizes = torch.bincount(row)
    assembled = rows.new_zeros(len(rows), int(sizes.amax()))
    assembled[row, _count_up(sizes)] = rows.flatten()[words.start[word] + within]
    return assembled


def _count_up(lengths: Tensor) -> Tensor:
    """Return 0, 1, ... for each length, concatenated; [sum of lengths]."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device=lengths.device) - starts.repeat_interleave(lengths)
