"""Pairs as samples: queries with their documents and explicit negatives, images with their captions."""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycl.config import RunConfig
from raycl.data.codecs import Format, Formats
from raycl.data.columns import ColumnNames
from raycl.data.ids import IdFormat
from raycl.data.in_memory import Batch, ids_of, texts_of, tokens_of
from raycl.data.texts import TextsFormat
from raycl.losses.example_ids import MatchKeys
from raycl.training.modality import ImageTowerBuilder, TowerBuilder
from raycl.training.texts import TextTowerBuilder, TextTransform
from raycl.training.views import Draft, ImageTransform, as_is


@final
@dataclass(frozen=True)
class PairModality:
    """Queries and documents, both texts; one tower for both unless they are separate."""

    side: TextTowerBuilder

    @property
    def _config(self) -> RunConfig:
        return self.side.config

    @property
    def sides(self) -> tuple[TowerBuilder, ...]:
        """The builders of the query tower and, if separate, the document tower."""
        return (self.side, self.side) if self._config.separate_towers else (self.side,)

    def formats(self, columns: ColumnNames) -> Formats:
        """Return the formats of query and document, and of negatives and ids if the data have them."""
        text = self._config.text
        length = text.max_document_length or text.max_length
        negatives = TextsFormat(
            tokenizer=self.side.vocabulary.tokenizer, max_length=length, may_be_empty=True
        )
        known: dict[str, Format] = {
            "query": self.side.text_format(max_length=text.max_length),
            "document": self.side.text_format(max_length=length),
            "negatives": negatives,
            "query_id": IdFormat(),
            "document_id": IdFormat(),
            "negative_ids": IdFormat(in_lists=True),
        }
        return {role: known[role] for role in columns.contents}

    def drawing(self) -> "PairTransform":
        """Return queries and documents unchanged."""
        return PairTransform(explicit=self._config.negatives.explicit)


@final
@dataclass(frozen=True)
class PairTransform:
    """Queries as view 0, their documents as view 1: tokens [batch, length], padded with 0 at the end."""

    explicit: bool = True

    def view(self, batch: Batch, number: int) -> Draft:
        """Return the queries or the documents."""
        return as_is(torch.from_numpy(tokens_of(batch, "document" if number else "query").padded()))

    def plain(self, batch: Batch) -> Draft:
        """Return the queries."""
        return self.view(batch, 0)

    def plain_key(self, batch: Batch) -> Draft:
        """Return the documents."""
        return self.view(batch, 1)

    def plain_key_id(self, batch: Batch) -> Tensor:
        """Return the text ids of the documents."""
        return torch.from_numpy(tokens_of(batch, "document").text_id)

    def negatives(self, batch: Batch) -> Tensor | None:
        """Return the negatives of all queries in order, or None."""
        if not self._has_negatives(batch):
            return None
        tokens = texts_of(batch, "negatives").tokens
        return torch.from_numpy(tokens.padded()) if len(tokens) else None

    def known(self, batch: Batch) -> MatchKeys:
        """Return text ids and, if the data have ids, these as well: [num_rows, 1] or [num_rows, 2]."""
        query = self._names(tokens_of(batch, "query").text_id, ids_of(batch, "query_id"))
        key = [tokens_of(batch, "document").text_id]
        document_id, negative_ids = ids_of(batch, "document_id"), ids_of(batch, "negative_ids")
        if document_id is not None:
            key.append(document_id.values)
        if not self._has_negatives(batch):
            return MatchKeys(query=query, key=self._stacked(key))
        texts = texts_of(batch, "negatives")
        negative = [texts.tokens.text_id]
        if document_id is not None:
            # Negatives without ids are identified by their texts alone.
            negative.append(negative[0] if negative_ids is None else negative_ids.values)
        return MatchKeys(query=query, key=self._stacked(key), negative=self._stacked(negative))

    def _has_negatives(self, batch: Batch) -> bool:
        return self.explicit and "negatives" in batch.contents

    def _names(self, text_id: NDArray[np.int64], ids: object) -> Tensor:
        values = getattr(ids, "values", None)
        return self._stacked([text_id] if values is None else [text_id, values])

    def _stacked(self, names: list[NDArray[np.int64]]) -> Tensor:
        return torch.from_numpy(np.stack(names, axis=1))


@final
@dataclass(frozen=True)
class ImageTextModality:
    """Images and their captions; if an image has several, each epoch uses another one."""

    image: ImageTowerBuilder
    text: TextTowerBuilder

    @property
    def sides(self) -> tuple[TowerBuilder, ...]:
        """The builders of the image tower and the caption tower."""
        return (self.image, self.text)

    def formats(self, columns: ColumnNames) -> Formats:
        """Return the formats of the roles ``image`` and ``caption``."""
        return {"image": self.image.image_format(), "caption": self.text.texts_format()}

    def drawing(self) -> "ImageTextTransform":
        """Return a random view of the image, and one of its captions."""
        return ImageTextTransform(self.image.drawing(), self.text.drawing("caption"))


@final
@dataclass(frozen=True)
class ImageTextTransform:
    """Images as view 0, a caption as view 1."""

    image: ImageTransform
    caption: TextTransform

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

    def negatives(self, batch: Batch) -> Tensor | None:
        """Return None: images have no explicit negatives."""
        return None

    def known(self, batch: Batch) -> MatchKeys:
        """Return the sample ids of images, and the text ids of captions, which images may share."""
        text_id = torch.from_numpy(self.caption.shown(batch, 1).text_id)
        return MatchKeys(query=self.image.known(batch).query, key=text_id[:, None])
