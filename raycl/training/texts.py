"""Texts as samples: views differ by random word changes, or by dropout alone."""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from raycl.augment.rng import uniforms
from raycl.augment.text import TextAugmentation
from raycl.config import EncoderConfig, RunConfig
from raycl.data.codecs import Formats
from raycl.data.columns import ColumnNames
from raycl.data.in_memory import Batch, texts_of
from raycl.data.texts import TextFormat, TextsFormat, Tokens
from raycl.losses.example_ids import MatchKeys
from raycl.models.registry import OWN
from raycl.models.specs import TextEncoderSpec
from raycl.models.text import build_text_encoder, text_representation_dim
from raycl.tokenization import Vocabulary
from raycl.training.modality import TowerBuilder
from raycl.training.views import Draft, as_is

_CHOICE = 6 << 40  # a separate sequence of draws, after the sequences of the augmentations


@final
@dataclass(frozen=True, kw_only=True)
class TextTowerBuilder:
    """The text encoder of one tower, and the format of its tokens."""

    config: RunConfig
    settings: EncoderConfig
    vocabulary: Vocabulary

    def encoder(self) -> nn.Module:
        """Return the untrained encoder; a bag of subwords starts from the token weights of the vocabulary."""
        torch.manual_seed(self.config.seed)
        encoder = build_text_encoder(
            self.settings.name,
            num_tokens=self.vocabulary.tokenizer.num_tokens,
            max_length=self.config.text.longest,
            arguments=self.settings.kwargs,
        )
        start = getattr(encoder, "start_weights", None)
        if start is not None and self.vocabulary.weights is not None:
            start(torch.tensor(self.vocabulary.weights))
        return encoder

    def representation_dim(self, encoder: nn.Module) -> int:
        """Return the width of the encoder's output for one text."""
        return text_representation_dim(encoder)

    def spec(self, encoder: nn.Module, *, own: bool) -> TextEncoderSpec:
        """Return the encoder's name and sizes; its tokenizer is saved beside it."""
        tokenizer = self.vocabulary.tokenizer
        return TextEncoderSpec(
            name=OWN if own else self.settings.name,
            arguments=self.settings.kwargs,
            num_tokens=tokenizer.num_tokens,
            max_length=self.config.text.longest,
            tokenizer=tokenizer.fingerprint,
            representation_dim=self.representation_dim(encoder),
            norm=self.config.batchnorm if self.config.batchnorm in ("layer", "group") else "batch",
        )

    def text_format(self, *, max_length: int) -> TextFormat:
        """Return the format of single texts."""
        return TextFormat(tokenizer=self.vocabulary.tokenizer, max_length=max_length)

    def texts_format(self) -> TextsFormat:
        """Return the format of texts, or of lists of equivalent texts."""
        return TextsFormat(tokenizer=self.vocabulary.tokenizer, max_length=self.config.text.max_length)

    def drawing(self, role: str) -> "TextTransform":
        """Return texts of a role with random word changes, or unchanged."""
        return TextTransform(role=role, config=self.config, vocabulary=self.vocabulary)


@final
@dataclass(frozen=True, kw_only=True)
class TextModality:
    """Texts, or lists of equivalent texts: two views show two texts of a list, or the same text twice."""

    side: TextTowerBuilder

    @property
    def sides(self) -> tuple[TowerBuilder, ...]:
        """The builder of the only tower."""
        return (self.side,)

    def formats(self, columns: ColumnNames) -> Formats:
        """Return the format of the role ``text``."""
        return {"text": self.side.texts_format()}

    def drawing(self) -> "TextTransform":
        """Return texts with random word changes, or unchanged."""
        return self.side.drawing("text")


@final
class TextTransform:
    """One text of each row, with random word changes; without changes, views differ by dropout alone."""

    def __init__(self, *, role: str, config: RunConfig, vocabulary: Vocabulary) -> None:
        self._role, self._seed = role, config.seed
        changes = config.text_augment.model_dump()
        self._augmentation = TextAugmentation(
            max_length=config.text.max_length,
            begins_word=vocabulary.tokenizer.begins_word,
            special_tokens=vocabulary.tokenizer.special_tokens,
            **changes,
        )
        self._changes = any(changes.values())
        # A memory bank indexes its slots by sample id.
        self._known_by_text = config.key != "memory_bank"

    def view(self, batch: Batch, number: int) -> Draft:
        """Return tokens [batch, length], padded with 0 at the end."""
        tokens = torch.from_numpy(self.shown(batch, number).padded())
        if self._changes:
            # On the host: each change reads the new lengths, which would synchronize with a device.
            tokens = self._augmentation(
                tokens, batch.sample_id, seed=self._seed, epoch=batch.epoch, view=number
            )
        return as_is(tokens)

    def shown(self, batch: Batch, number: int) -> Tokens:
        """Return the texts of a view, before word changes."""
        texts = texts_of(batch, self._role)
        return texts.picked(self._choice(batch, texts.counts, number))

    def plain(self, batch: Batch) -> Draft:
        """Return the tokens [batch, length] of the first text of each row."""
        return as_is(torch.from_numpy(self._first(batch).padded()))

    def plain_key(self, batch: Batch) -> Draft:
        """Return the same as ``plain``."""
        return self.plain(batch)

    def plain_key_id(self, batch: Batch) -> Tensor:
        """Return the id of that text."""
        return torch.from_numpy(self._first(batch).text_id)

    def negatives(self, batch: Batch) -> Tensor | None:
        """Return None: texts have no explicit negatives."""
        return None

    def known(self, batch: Batch) -> MatchKeys:
        """Return the text ids of both views, the own text first; for a memory bank, the sample ids."""
        if not self._known_by_text:
            names = torch.from_numpy(batch.sample_id)[:, None]
            return MatchKeys(query=names, key=names)
        shown = [torch.from_numpy(self.shown(batch, number).text_id) for number in (0, 1)]
        query = torch.stack(shown, dim=1)
        return MatchKeys(query=query, key=query.flip(1), shared_id_space=True)

    def _first(self, batch: Batch) -> Tokens:
        return texts_of(batch, self._role).picked(np.zeros(len(batch), np.int64))

    def _choice(self, batch: Batch, counts: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        """Return the index of the text that the view shows; views of a row show different texts if possible."""
        if int(counts.max(initial=0)) <= 1:
            return np.zeros(len(counts), np.int64)
        drawn = uniforms(batch.sample_id, seed=self._seed + _CHOICE, epoch=batch.epoch, view=0, num=2)
        first, step = drawn.double().numpy().T
        begin = (first * counts).astype(np.int64)
        stride = 1 + (step * np.maximum(counts - 1, 1)).astype(np.int64)
        return (begin + number * stride) % counts
