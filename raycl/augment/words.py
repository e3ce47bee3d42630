"""Words as runs of tokens: find them in texts, and assemble texts from them."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from raycl.tokenization import PADDING


@final
@dataclass(frozen=True, kw_only=True)
class Words:
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


def find_words(rows: Tensor, *, begins_word: Tensor | None, is_special: Tensor) -> Words:
    """Cut rows of tokens [num_rows, length], padded with 0 at the end, into words.

    ``begins_word`` [num_tokens] is true for tokens that begin a word; ``None`` makes each token a word.
    ``is_special`` is [num_rows, length].
    """
    real = rows != PADDING
    begins = real.clone()
    if begins_word is not None:
        begins[:, 1:] &= begins_word[rows[:, 1:]] | is_special[:, 1:] | is_special[:, :-1]
    row, column = begins.nonzero(as_tuple=True)
    word_of_token = begins.flatten().cumsum(0)[real.flatten()] - 1
    is_special = is_special[row, column]
    ordinary = (~is_special).long()
    counts = torch.zeros(len(rows), dtype=torch.int64, device=rows.device).index_add(0, row, ordinary)
    before = counts.cumsum(0) - counts
    return Words(
        row=row,
        start=row * rows.shape[1] + column,
        length=torch.bincount(word_of_token, minlength=len(row)),
        number=(ordinary.cumsum(0) - 1 - before[row]).clamp(min=0),
        is_special=is_special,
        counts=counts,
    )


def assemble(rows: Tensor, words: Words, index: Tensor, length: Tensor) -> Tensor:
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
