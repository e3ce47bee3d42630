"""Random views of texts: words deleted, copied elsewhere, or repeated, as tokens and in plain torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from raycl.augment.checks import check_number
from raycl.augment.rng import uniforms
from raycl.augment.words import Words, assemble, find_words
from raycl.errors import ConfigError

# A sequence of draws each, far from the seeds of others. Append only, as for images.
_DELETION, _INSERTION, _CHOICE, _COUNT, _REPETITION = (number << 40 for number in range(1, 6))


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class TextAugmentation:
    """Change the words of texts, in this order.

    ``deletion`` is the probability that a word is left out; one word stays. ``insertion`` is the
    probability that a copy of another word of the same text follows a word, so that no meaning
    comes in that the text does not have. ``repetition`` is ESimCSE's (Wu et al., 2022): of a text's n
    tokens up to max(2, ``repetition`` * n) come twice, a number drawn uniformly; 0.32 in the paper.

    A word is a token that begins one and those that go on with it: ``begins_word`` [num_tokens] is the
    tokenizer's, ``None`` makes each token a word. ``special_tokens`` at a text's beginning and end stay
    there. A view is cut at ``max_length`` tokens.

    Raises ``ConfigError`` for a setting out of its range.
    """

    max_length: int
    deletion: float = 0.0
    insertion: float = 0.0
    repetition: float = 0.0
    begins_word: Tensor | np.ndarray | None = None
    special_tokens: Sequence[int] = (0, 1, 2, 3, 4)

    def __post_init__(self) -> None:
        for name in ("deletion", "insertion", "repetition"):
            check_number(name, getattr(self, name), maximum=1.0)
        if self.max_length < 1:
            raise ConfigError(f"max_length is too small, came {self.max_length}; give 1 or more")

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

        ``tokens`` is [n, length], padded likewise; ``sample_id`` int64 [n]. A view is a function of its
        own text, ``seed``, ``epoch``, ``sample_id`` and ``view``: other rows and padding do not matter.

        Raises ``ConfigError`` for arrays of a wrong type or shape.
        """
        rows = _integers(tokens)
        if rows.ndim != 2 or len(rows) != len(sample_id):
            raise ConfigError(
                f"sample_id does not fit the tokens, came {len(sample_id)} for {list(rows.shape)}; "
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
            rows = _delete(rows, words, draw(_DELETION, words.most), rate=self.deletion)
        if self.insertion:
            words = self._words(rows)
            is_followed = words.of_each(draw(_INSERTION, words.most)) < self.insertion
            rows = _insert(rows, words, is_followed, draw(_CHOICE, words.most))
        if self.repetition:
            words = self._words(rows, each_token=True)
            share = draw(_COUNT, 1)[:, 0]
            rows = _repeat(rows, words, share, draw(_REPETITION, words.most), rate=self.repetition)
        return self._cut(rows)

    def _words(self, rows: Tensor, *, each_token: bool = False) -> Words:
        begins_word = None if each_token else _lookup(self.begins_word, rows)
        return find_words(rows, begins_word=begins_word, is_special=self._are_special(rows))

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


def _delete(rows: Tensor, words: Words, chance: Tensor, *, rate: float) -> Tensor:
    """Leave out the words whose chance [n, most] is below the rate, but for the luckiest of each row."""
    beyond = torch.arange(chance.shape[1], device=rows.device) >= words.counts[:, None]
    luckiest = chance.masked_fill(beyond, -1.0).argmax(1)
    stays = words.is_special | (words.of_each(chance) >= rate) | (words.number == luckiest[words.row])
    index = stays.nonzero().squeeze(1)
    return assemble(rows, words, index, words.length[index])


def _insert(rows: Tensor, words: Words, is_followed: Tensor, choice: Tensor) -> Tensor:
    """Put a copy of another word of its row after each word that is to be followed."""
    num_others = words.of_each(words.counts) - 1
    other = (words.of_each(choice) * num_others).long()
    other += (other >= words.number).long()
    is_followed = is_followed & ~words.is_special & (num_others > 0)
    added = torch.arange(len(words.row), device=rows.device)
    added[is_followed] = words.index_of(words.row[is_followed], other[is_followed])
    return _add(rows, words, added, is_followed)


def _repeat(rows: Tensor, words: Words, share: Tensor, chance: Tensor, *, rate: float) -> Tensor:
    """Repeat a share [n] of the greatest number allowed: the tokens whose chance [n, most] is least."""
    greatest = (rate * words.counts.double()).long().clamp(min=2).minimum(words.counts)
    num_repeated = (share * (greatest + 1)).long()
    beyond = torch.arange(chance.shape[1], device=rows.device) >= words.counts[:, None]
    rank = chance.masked_fill(beyond, 2.0).argsort(dim=1, stable=True).argsort(dim=1)
    is_repeated = (words.of_each(rank) < words.of_each(num_repeated)) & ~words.is_special
    return _add(rows, words, torch.arange(len(words.row), device=rows.device), is_repeated)


def _add(rows: Tensor, words: Words, added: Tensor, where: Tensor) -> Tensor:
    """Put word number ``added`` [num_words] after each word, where that is true [num_words]."""
    index = torch.stack([torch.arange(len(added), device=rows.device), added], 1).flatten()
    length = torch.stack([words.length, words.length[added] * where], 1).flatten()
    return assemble(rows, words, index, length)


def _lookup(begins_word: Tensor | np.ndarray | None, rows: Tensor) -> Tensor | None:
    if begins_word is None:
        return None
    # A copy: arrays out of Arrow are read-only, which torch warns about.
    values = torch.tensor(begins_word) if isinstance(begins_word, np.ndarray) else begins_word
    if int(rows.amax()) >= len(values):
        raise ConfigError(
            f"begins_word does not fit the tokens, came {len(values)} for a token {int(rows.amax())}; "
            "give that of the tokenizer which made them"
        )
    return values.to(rows.device)


def _integers(tokens: Tensor | np.ndarray) -> Tensor:
    values = torch.tensor(tokens) if isinstance(tokens, np.ndarray) else tokens
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise ConfigError(f"tokens must be integers, came {values.dtype}; give int64 [n, length]")
    return values.to(torch.int64)
