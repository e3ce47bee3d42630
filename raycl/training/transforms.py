"""The rows of each kind of data as encoder inputs: their formats, random views, and names of duplicates."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from raycl.augment.images import ImageAugmentation, center_view
from raycl.augment.rng import EXPLICIT, SHOWN_TEXT, uniforms
from raycl.augment.text import TextAugmentation
from raycl.config import RunConfig
from raycl.config.schema import scaled_size
from raycl.data.codecs import Format, Formats
from raycl.data.columns import ColumnNames
from raycl.data.ids import IdFormat
from raycl.data.images import ImageFormat
from raycl.data.in_memory import Batch, InMemoryDataset, ids_of, pixels_of, texts_of, tokens_of
from raycl.data.texts import TextFormat, TextsFormat, Tokens
from raycl.data.weights import WeightFormat
from raycl.distributed.device_copy import upload
from raycl.errors import ConfigError
from raycl.losses.example_ids import ExampleIds
from raycl.losses.guide import Guide
from raycl.losses.logq import Frequencies
from raycl.tokenization import Tokenizer
from raycl.training.guide import GuideTables
from raycl.training.mined import MinedNegatives


def build_formats(config: RunConfig, tokenizer: Tokenizer | None, columns: ColumnNames) -> Formats:
    """Return the format of each column by role; texts need the tokenizer."""
    weight: dict[str, Format] = {} if columns.weight is None else {"weight": WeightFormat()}
    return _formats_of_contents(config, tokenizer, columns) | weight


def _formats_of_contents(
    config: RunConfig, tokenizer: Tokenizer | None, columns: ColumnNames
) -> dict[str, Format]:
    kind, text = config.data.kind, config.text
    if kind == "image":
        return {"image": image_format(config)}
    assert tokenizer is not None, "texts need a tokenizer"
    query: dict[str, Any] = {
        "tokenizer": tokenizer,
        "max_length": text.max_length,
        "prompt": text.query_prompt,
    }
    document: dict[str, Any] = query | {"prompt": text.document_prompt}
    if kind == "text":
        return {"text": TextsFormat(**query)}
    if kind == "image_text":
        return {"image": image_format(config), "caption": TextsFormat(**document)}
    document["max_length"] = text.max_document_length or text.max_length
    known: dict[str, Format] = {
        "query": TextFormat(**query),
        "document": TextFormat(**document),
        "negatives": TextsFormat(**document, may_be_empty=True),
        "query_id": IdFormat(),
        "document_id": IdFormat(),
        "negative_ids": IdFormat(in_lists=True),
    }
    return {role: known[role] for role in columns.contents if role in known}


def image_format(config: RunConfig) -> ImageFormat:
    """Return the format of decoded images."""
    data = config.data
    return ImageFormat(size=data.resolved_decode_size, channels=data.channels, max_pixels=data.max_pixels)


def build_transform(
    config: RunConfig,
    tokenizer: Tokenizer | None = None,
    guide: GuideTables | None = None,
    mined: MinedNegatives | None = None,
) -> "Transform":
    """Return the transform from rows to views; raises ``ConfigError`` for invalid settings."""
    kind = config.data.kind
    if kind == "image":
        return ImageTransform.of(config, guide)
    if kind == "pairs":
        return PairTransform(explicit=config.negatives.explicit, seed=config.seed, guide=guide, mined=mined)
    assert tokenizer is not None, "texts need a tokenizer"
    if kind == "text":
        return TextTransform("text", config, tokenizer, mined, guide)
    return ImageTextTransform(ImageTransform.of(config), TextTransform("caption", config, tokenizer, mined))


def count_documents(config: RunConfig, rows: InMemoryDataset, device: torch.device) -> Frequencies | None:
    """Count the documents of these rows, if a stage has the log-Q correction: explicit negatives, if used, too."""
    if all(stage.logq_correction == "none" for stage in config.stages):
        return None
    found = []
    for batch in rows.batches(4_096):
        found.append(tokens_of(batch, "document").text_id)
        if config.negatives.explicit and "negatives" in batch.contents:
            found.append(texts_of(batch, "negatives").tokens.text_id)
    return Frequencies.of(found).to(device)


@final
@dataclass(frozen=True)
class Draft:
    """A view drawn on the host: tensors, and the function that makes the view on a device."""

    tensors: tuple[Tensor, ...]
    make: Callable[..., Tensor] = lambda ready: ready

    def on(self, device: torch.device) -> Tensor:
        """Return the view [batch, ...] on a device."""
        return self.make(*upload(self.tensors, device))


class Transform(ABC):
    """Convert the rows of a batch to encoder inputs, on the host except for ``Draft.make``.

    A ``guide`` has the embeddings of all rows.
    """

    guide: GuideTables | None = None

    def with_image_size(self, size: int) -> "Transform":
        """Return the transform to images of another size, with the same random draws; texts stay as they are."""
        return self

    @abstractmethod
    def view(self, batch: Batch, number: int) -> Draft:
        """Draw a random view of every row, a function of seed, epoch, sample and ``number``."""

    @abstractmethod
    def plain(self, batch: Batch) -> Draft:
        """Return every row without augmentation, as for the periodic evaluation."""

    def plain_key(self, batch: Batch) -> Draft:
        """Return the key of every row without augmentation; for pairs, the other half."""
        return self.plain(batch)

    def plain_key_id(self, batch: Batch) -> Tensor:
        """Return the ids of these keys, int64 [batch]; equal ids mark equal keys."""
        return torch.from_numpy(batch.sample_id)

    def ids_and_negatives(self, batch: Batch) -> tuple[ExampleIds, Tensor | None]:
        """Return the ids of queries, keys and negatives, with the labels, and the negatives of all rows in order.

        By default, the ids are the sample ids, without negatives.
        """
        names = _columns([batch.sample_id])
        label, guide = torch.from_numpy(batch.label), self._guide_of_samples(batch)
        return ExampleIds(query=names, key=names, label=label, guide=guide), None

    def _guide_of_samples(self, batch: Batch) -> Guide | None:
        """Return the guide's embeddings of the samples, which both views have."""
        return None if self.guide is None else self.guide.of(batch.sample_id, batch.sample_id)


@final
@dataclass(frozen=True, kw_only=True)
class ImageTransform(Transform):
    """Images [batch, channels, size, size]: cropped, colored and blurred at random, or whole.

    ``augmentations`` has one for each view. Whole images have the size of the first, and views beyond the number of a
    training step are drawn like the last: a snapshot shows two views even if the keys are slots of a memory bank.
    """

    augmentations: tuple[ImageAugmentation, ...]
    seed: int
    guide: GuideTables | None = None

    @classmethod
    def of(cls, config: RunConfig, guide: GuideTables | None = None) -> "ImageTransform":
        """Return the transform of a run."""
        mean, std = config.normalization
        settings = config.augment.model_dump(exclude={"views", "crop_scale", "mean", "std"})
        augmentations = [
            ImageAugmentation(
                size=views.size or config.data.image_size,
                crop_scale=views.crop_scale or config.augment.crop_scale,
                channels=config.data.channels,
                mean=mean,
                std=std,
                **settings,
            )
            for views in config.views
            for _ in range(views.count)
        ]
        return cls(augmentations=tuple(augmentations), seed=config.seed, guide=guide)

    def with_image_size(self, size: int) -> "ImageTransform":
        """Return the transform to images of another size; crop boxes, colors and blur in pixels are the same.

        Views of other sizes are scaled by the same factor.
        """
        full = self.augmentations[0].size
        scaled = [
            replace(each, size=scaled_size(each.size, full=full, new_full=size))
            for each in self.augmentations
        ]
        return replace(self, augmentations=tuple(scaled))

    def view(self, batch: Batch, number: int) -> Draft:
        """Draw a random view of every image."""
        pixels, last = pixels_of(batch), len(self.augmentations) - 1
        augmentation = self.augmentations[min(number, last)]
        drawn = augmentation.draw(
            batch.sample_id,
            shape=pixels.images.shape[1:3],
            seed=self.seed,
            epoch=batch.epoch,
            view=number,
            aspect=pixels.aspect,
        )
        return Draft((torch.from_numpy(pixels.images), drawn), augmentation.apply)

    def plain(self, batch: Batch) -> Draft:
        """Return whole images."""
        settings = self.augmentations[0]
        make = partial(center_view, size=settings.size, mean=settings.mean, std=settings.std)
        return Draft((torch.from_numpy(pixels_of(batch).images),), make)


@final
class TextTransform(Transform):
    """Tokens [batch, length] of one text of each row, padded with 0 at the end.

    A row may hold a list of equivalent texts: two views show two texts of the list, or the same text twice.
    The words after the prompt change at random; without changes, views differ by dropout alone. ``mined`` negatives
    change in the same way.
    """

    def __init__(
        self,
        role: str,
        config: RunConfig,
        tokenizer: Tokenizer,
        mined: MinedNegatives | None = None,
        guide: GuideTables | None = None,
    ) -> None:
        self._role, self._seed, self._mined, self.guide = role, config.seed, mined, guide
        changes = config.text_augment.model_dump()
        if (changes["deletion"] or changes["insertion"]) and not tokenizer.marks_words:
            raise ConfigError(
                "text_augment.deletion and insertion change words, and the tokens of text.tokenizer do not show where "
                "words begin (by ##, Ġ, ▁ or </w>); set both to 0, or give another tokenizer"
            )
        self._num_prompt_tokens = tokenizer.num_prompt_tokens(config.text.prompt_of(role))
        self._augmentation = TextAugmentation(
            max_length=max(1, config.text.max_length - self._num_prompt_tokens),
            begins_word=tokenizer.begins_word,
            ends_word=tokenizer.ends_word,
            special_tokens=tokenizer.special_tokens,
            **changes,
        )
        self._changes = any(changes.values())
        # A memory bank indexes its slots by sample id.
        self._known_by_text = config.key != "memory_bank"

    def view(self, batch: Batch, number: int) -> Draft:
        """Return the texts of a view, with word changes."""
        return Draft((self._changed(self.shown(batch, number), batch, number),))

    def shown(self, batch: Batch, number: int) -> Tokens:
        """Return the texts of a view, before word changes."""
        texts = texts_of(batch, self._role)
        return texts.picked(self._choice(batch, texts.counts, number))

    def plain(self, batch: Batch) -> Draft:
        """Return the first text of each row."""
        return Draft((torch.from_numpy(self._first(batch).padded()),))

    def plain_key_id(self, batch: Batch) -> Tensor:
        """Return the id of that text."""
        return torch.from_numpy(self._first(batch).text_id)

    def ids_and_negatives(self, batch: Batch) -> tuple[ExampleIds, Tensor | None]:
        """Return the text ids of both views, the own text first, and mined negatives; for a memory bank, the sample ids."""
        if not self._known_by_text:
            return super().ids_and_negatives(batch)
        query = _columns([self.shown(batch, number).text_id for number in (0, 1)])
        ids = ExampleIds(
            query=query,
            key=query[:, [1, 0]],
            label=torch.from_numpy(batch.label),
            shared_id_space=True,
            guide=self._guide_of_samples(batch),
        )
        return self.with_mined(ids, batch)

    def with_mined(self, ids: ExampleIds, batch: Batch) -> tuple[ExampleIds, Tensor | None]:
        """Add the mined negatives to the ids; return both, the negatives with word changes, or None without any.

        Negatives are named by text, and all texts of a row are then names of it.
        """
        if self._mined is None or self._mined.corpus is None:
            return ids, None
        corpus, texts = self._mined.corpus, texts_of(batch, self._role)
        # The negatives belong to the text that is the query, or to the caption that is the key.
        number = self._choice(batch, texts.counts, int(self._role == "caption"))
        negatives = corpus.document.take(self._mined.draw(batch, number).document)
        # All workers have as many names as the row with the most texts.
        numbers = np.minimum(np.arange(corpus.most_texts), texts.counts[:, None] - 1)
        begin = np.cumsum(texts.counts) - texts.counts
        own = torch.from_numpy(texts.tokens.text_id[begin[:, None] + numbers])
        key, query = torch.cat([ids.key, own], 1), ids.query
        named = replace(
            ids,
            query=torch.cat([query, own], 1) if ids.shared_id_space else query,
            key=key,
            negative=torch.from_numpy(negatives.text_id)[:, None].repeat(1, key.shape[1]),
            num_shown=ids.key.shape[1],
        )
        # Each negative of a row has its own random changes, drawn after the changes of the two views.
        order = np.arange(len(negatives)).reshape(len(batch), -1).T
        parts = [self._changed(negatives.take(each), batch, 2 + place) for place, each in enumerate(order)]
        return named, pad_sequence([each.T for each in parts]).permute(2, 1, 0).flatten(0, 1)

    def _changed(self, texts: Tokens, batch: Batch, number: int) -> Tensor:
        """Return the texts of these rows with random word changes, int64 [batch, length]."""
        tokens = torch.from_numpy(texts.padded())
        if not self._changes:
            return tokens
        # On the host: each change reads the new lengths, which would synchronize with a device.
        prompt, words = tokens.tensor_split([self._num_prompt_tokens], dim=1)
        words = self._augmentation(words, batch.sample_id, seed=self._seed, epoch=batch.epoch, view=number)
        return torch.cat([prompt, words], 1)

    def _first(self, batch: Batch) -> Tokens:
        return texts_of(batch, self._role).picked(np.zeros(len(batch), np.int64))

    def _choice(self, batch: Batch, counts: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        """Return the index of the text that the view shows; views of a row show different texts if possible."""
        if int(counts.max(initial=0)) <= 1:
            return np.zeros(len(counts), np.int64)
        drawn = uniforms(batch.sample_id, seed=self._seed + SHOWN_TEXT, epoch=batch.epoch, view=0, num=2)
        first, step = drawn.double().numpy().T
        begin = (first * counts).astype(np.int64)
        stride = 1 + (step * np.maximum(counts - 1, 1)).astype(np.int64)
        return (begin + number * stride) % counts


@final
@dataclass(frozen=True)
class PairTransform(Transform):
    """Queries as view 0, their documents as view 1: tokens [batch, length], padded with 0 at the end.

    ``explicit`` is True for all explicit negatives of a pair, or the number that it draws of them in each epoch.
    """

    explicit: bool | int = True
    seed: int = 0
    guide: GuideTables | None = None
    mined: MinedNegatives | None = None

    def view(self, batch: Batch, number: int) -> Draft:
        """Return the queries or the documents."""
        tokens = tokens_of(batch, "document" if number else "query")
        return Draft((torch.from_numpy(tokens.padded()),))

    def plain(self, batch: Batch) -> Draft:
        """Return the queries."""
        return self.view(batch, 0)

    def plain_key(self, batch: Batch) -> Draft:
        """Return the documents."""
        return self.view(batch, 1)

    def plain_key_id(self, batch: Batch) -> Tensor:
        """Return the text ids of the documents."""
        return torch.from_numpy(tokens_of(batch, "document").text_id)

    def ids_and_negatives(self, batch: Batch) -> tuple[ExampleIds, Tensor | None]:
        """Return text ids and, if the data have ids, these as well: [num_rows, 1] or [num_rows, 2].

        The negatives are the explicit ones of all queries in order, and then the mined ones.
        """
        document_id = ids_of(batch, "document_id")
        query = _names(tokens_of(batch, "query"), ids_of(batch, "query_id"))
        key = _names(tokens_of(batch, "document"), document_id)
        negative, texts = [], None
        if drawn := list(self._negatives(batch)):
            texts = Tokens.joined([each for each, _ in drawn])
            negative = _names(
                texts, None if document_id is None else np.concatenate([ids for _, ids in drawn])
            )
        ids = ExampleIds(
            query=_columns(query),
            key=_columns(key),
            negative=_columns(negative) if negative else None,
            guide=None if self.guide is None else self.guide.of(query[1], key[1], *negative[1:]),
        )
        return ids, torch.from_numpy(texts.padded()) if texts else None

    def _negatives(self, batch: Batch) -> Iterator[tuple[Tokens, NDArray[np.int64]]]:
        """Yield the texts and ids of the explicit negatives, then of the mined ones; without ids, text ids."""
        if self.explicit and "negatives" in batch.contents:
            lists, ids = texts_of(batch, "negatives"), ids_of(batch, "negative_ids")
            texts, drawn = lists.tokens, self._drawn(batch, lists.counts)
            ids = texts.text_id if ids is None else ids
            yield (texts, ids) if drawn is None else (texts.take(drawn), ids[drawn])
        if self.mined is not None and self.mined.corpus is not None:
            corpus, drawn = self.mined.corpus, self.mined.draw(batch).document
            texts = corpus.document.take(drawn)
            yield texts, texts.text_id if corpus.document_id is None else corpus.document_id[drawn]

    def _drawn(self, batch: Batch, counts: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the places of this epoch's explicit negatives among all rows' negatives, ascending; None for all."""
        most = int(counts.max(initial=0))
        if self.explicit is True or most <= self.explicit:
            return None
        seed = self.seed + EXPLICIT
        drawn = uniforms(batch.sample_id, seed=seed, epoch=batch.epoch, view=0, num=most).numpy()
        drawn[np.arange(most) >= counts[:, None]] = 2.0  # rows with fewer
        order = np.sort(drawn.argsort(axis=1, kind="stable")[:, : self.explicit], axis=1)
        return (order + (np.cumsum(counts) - counts)[:, None])[order < counts[:, None]]


def _columns(names: list[NDArray[np.int64]]) -> Tensor:
    return torch.from_numpy(np.stack(names, axis=1))


def _names(texts: Tokens, ids: NDArray[np.int64] | None) -> list[NDArray[np.int64]]:
    return [texts.text_id] if ids is None else [texts.text_id, ids]


@final
@dataclass(frozen=True)
class ImageTextTransform(Transform):
    """Images as view 0, a caption as view 1; of several captions, each epoch uses another one."""

    image: ImageTransform
    caption: TextTransform

    def with_image_size(self, size: int) -> "ImageTextTransform":
        """Return the transform to images of another size, with the same captions."""
        return replace(self, image=self.image.with_image_size(size))

    def view(self, batch: Batch, number: int) -> Draft:
        """Return images, or tokens [batch, length]."""
        return self.caption.view(batch, 1) if number else self.image.view(batch, 0)

    def plain(self, batch: Batch) -> Draft:
        """Return whole images."""
        return self.image.plain(batch)

    def plain_key(self, batch: Batch) -> Draft:
        """Return the first caption of each image."""
        return self.caption.plain(batch)

    def plain_key_id(self, batch: Batch) -> Tensor:
        """Return the text ids of these captions."""
        return self.caption.plain_key_id(batch)

    def ids_and_negatives(self, batch: Batch) -> tuple[ExampleIds, Tensor | None]:
        """Return the sample ids of images, the text ids of captions, which images may share, and mined captions."""
        query, key = _columns([batch.sample_id]), _columns([self.caption.shown(batch, 1).text_id])
        return self.caption.with_mined(ExampleIds(query=query, key=key), batch)
