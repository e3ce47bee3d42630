"""Samples by id, as a person sees them: a thumbnail, texts, a label."""

import base64
import io
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from raycl.config.overrides import config_from_yaml
from raycl.data.columns import ColumnNames
from raycl.data.discovery import find_source
from raycl.data.images import ImageFormat, InvalidImageError, image_sides
from raycl.data.labels import NO_LABEL
from raycl.data.sources import Fragment, Source, plain_values
from raycl.data.texts import ids_and_rows
from raycl.errors import ConfigError, DataError, InvalidValueError
from raycl.records import CONFIG
from raycl.serve.schemas import Sample, Text
from raycl.storage import Place
from raycl.tokenization import InvalidTextError, read_text

THUMBNAIL = 128  # pixels of the longer side
_CACHE_SIZE = 512
_MAX_PNG_SIDE = 64  # larger thumbnails are smaller as JPEG
_MAX_TEXT = 2_000  # characters
_TEXT_COLUMNS = ("text", "caption", "query", "document")

ReadIds = Callable[[Source], tuple[NDArray[np.int64], NDArray[np.int64]]]


class UnknownSampleError(ConfigError):
    """The bank or the data set has no sample of this id."""


@final
class SampleViewer:
    """Show samples of a data set, each read when needed.

    ``read_ids`` returns ids and the numbers of their rows, by default the ids of the data. Raises ``DataError`` and
    ``StorageError`` as :func:`find_source` does.
    """

    def __init__(
        self, uri: str, columns: ColumnNames, *, max_pixels: int, read_ids: ReadIds | None = None
    ) -> None:
        self.source = find_source(uri, columns)
        self._read_ids = read_ids
        if read_ids is None and self.source.columns.sample_id is not None:
            self._read_ids = _own_ids
        self._first_ids = np.array([fragment.first_id for fragment in self.source.fragments])
        self._max_pixels = max_pixels
        self._index: tuple[np.ndarray, np.ndarray] | None = None  # sorted ids, and their rows
        self._lock = threading.Lock()
        self.show = lru_cache(_CACHE_SIZE)(self._show)

    def _show(self, sample_id: int) -> Sample:
        """Return a sample; raises ``UnknownSampleError``, and ``DataError`` for an invalid image."""
        row = self._row_of(sample_id)
        number = int(np.searchsorted(self._first_ids, row, side="right")) - 1
        fragment = _one_row(self.source.fragments[number], row - int(self._first_ids[number]))
        rows = next(iter(self.source.read(fragment)))
        values = {role: column[0] for role, column in rows.values.items()}
        try:
            image = thumbnail(values["image"], max_pixels=self._max_pixels) if "image" in values else None
        except InvalidImageError as error:
            raise DataError(
                f"the image of sample {sample_id} is invalid: {error}; repair it in the data set"
            ) from None
        roles = [role for role in _TEXT_COLUMNS if role in values]
        texts = [Text(role=role, text=text) for role in roles for text in _texts_of(values[role])]
        label = int(rows.label[0])
        name = None if label == NO_LABEL else self.source.label_name(label)
        return Sample(sample_id=str(sample_id), image=image, texts=texts, label=name)

    def _row_of(self, sample_id: int) -> int:
        """Return the number of a sample's row: its id, or looked up among other ids."""
        row = sample_id
        if self._read_ids is not None:
            with self._lock:  # a page requests many images at once
                if self._index is None:
                    ids, rows = self._read_ids(self.source)
                    order = np.argsort(ids, kind="stable")
                    self._index = ids[order], rows[order]
            ids, rows = self._index
            at = int(np.searchsorted(ids, sample_id))
            row = int(rows[at]) if at < len(ids) and ids[at] == sample_id else -1
        if not 0 <= row < self.source.num_rows:
            raise UnknownSampleError(
                f"{self.source.uri} has no sample {sample_id}; give the training data of the run as --data"
            )
        return row


def rows_by_text(run: str, source: Source) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the id of each text of a run's keys in a data set, and the number of its row.

    It tokenizes the whole column of these texts, as the run did.
    """
    # As in QueryEncoder.
    from raycl.models.build import load_tokenizer
    from raycl.training.transforms import build_formats

    config = config_from_yaml((Place(run) / CONFIG).read_text(), name=run, trained=True)
    role, ids, numbers = config.key_text_role, [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    column = source.columns.contents.get(role)
    if column is None:
        return ids[0], numbers[0]
    text_format = build_formats(config, load_tokenizer(run), source.columns)[role]
    for fragment in source.fragments:
        for first, table in source.tables(fragment, [column]):
            decoded = text_format.decode_all(plain_values(table[column]))
            valid = [place for place, each in enumerate(decoded) if not isinstance(each, InvalidValueError)]
            texts = text_format.read(text_format.store([decoded[place] for place in valid]))
            text_ids, rows = ids_and_rows(texts)
            ids.append(text_ids)
            numbers.append(np.array(valid, np.int64)[rows] + first - fragment.start + fragment.first_id)
    return np.concatenate(ids), np.concatenate(numbers)


def _own_ids(source: Source) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    ids = source.sample_ids(source.fragments)
    return ids, np.arange(len(ids))


def _one_row(fragment: Fragment, offset: int) -> Fragment:
    first_id = fragment.first_id + offset
    if fragment.paths:
        return replace(fragment, paths=(fragment.paths[offset],), first_id=first_id)
    start = fragment.start + offset
    return replace(fragment, start=start, stop=start + 1, first_id=first_id)


def thumbnail(content: Any, *, max_pixels: int) -> str:
    """Return a thumbnail of an encoded image as a data: URL, in the image's aspect ratio.

    Raises ``InvalidImageError`` for an image that training would skip too.
    """
    decoder = ImageFormat(size=THUMBNAIL, max_pixels=max_pixels)
    pixels, _ = decoder.decode(content)
    width, height = image_sides(content)
    if max(width, height) < THUMBNAIL:
        pixels, _ = replace(decoder, size=max(width, height)).decode(content)
    scale = min(1.0, THUMBNAIL / max(width, height))
    sides = (max(1, round(width * scale)), max(1, round(height * scale)))
    picture = Image.fromarray(pixels).resize(sides, Image.Resampling.BILINEAR)
    kind = "PNG" if max(sides) <= _MAX_PNG_SIDE else "JPEG"
    stream = io.BytesIO()
    picture.save(stream, kind, quality=85)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(stream.getvalue()).decode()}"


def _texts_of(value: Any) -> list[str]:
    texts = []
    for each in value if isinstance(value, list | tuple | np.ndarray) else [value]:
        try:
            text = read_text(each)
        except InvalidTextError as error:
            text = f"({error})"
        texts.append(text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} …")
    return texts
