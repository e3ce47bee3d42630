"""Samples by id, as a person sees them: a thumbnail, texts, a label."""

import base64
import io
import threading
from dataclasses import replace
from functools import lru_cache
from typing import Any, final

import numpy as np
from PIL import Image

from raycl.data.columns import ColumnNames
from raycl.data.images import ImageFormat, InvalidImageError, image_sides
from raycl.data.labels import NO_LABEL
from raycl.data.sources import Fragment, Source, find_source
from raycl.errors import ConfigError, DataError
from raycl.serve.schemas import Sample, Text
from raycl.tokenization import InvalidTextError, read_text

THUMBNAIL = 128  # pixels of the longer side
_CACHE_SIZE = 512
_MAX_PNG_SIDE = 64  # larger thumbnails are smaller as JPEG
_MAX_TEXT = 2_000  # characters
_TEXT_COLUMNS = ("text", "caption", "query", "document")


class NoSampleError(ConfigError):
    """The data set has no sample of this id."""


@final
class SampleViewer:
    """Show samples of a data set, each read when needed.

    Raises ``DataError`` and ``StorageError`` as :func:`find_source` does.
    """

    def __init__(self, uri: str, columns: ColumnNames, *, max_pixels: int) -> None:
        self._source = find_source(uri, columns)
        self._max_pixels = max_pixels
        self._positions: _Positions | None = None
        self._lock = threading.Lock()
        self.show = lru_cache(_CACHE_SIZE)(self._show)

    def _show(self, sample_id: int) -> Sample:
        """Return a sample; raises ``NoSampleError``, and ``DataError`` for an invalid image."""
        with self._lock:  # a page requests many images at once
            if self._positions is None:
                self._positions = _Positions(self._source)
        number, offset = self._positions.find(sample_id)
        rows = next(iter(self._source.read(_one_row(self._source.fragments[number], offset))))
        try:
            image = (
                thumbnail(rows.values["image"][0], max_pixels=self._max_pixels)
                if "image" in rows.values
                else None
            )
        except InvalidImageError as error:
            raise DataError(
                f"the image of sample {sample_id} is invalid: {error}; repair it in the data set"
            ) from None
        texts = [
            Text(role=role, text=text)
            for role in _TEXT_COLUMNS
            if role in rows.values
            for text in _texts_of(rows.values[role][0])
        ]
        label, classes = int(rows.label[0]), self._source.classes
        name = None if label == NO_LABEL else classes[label] if classes else str(label)
        return Sample(sample_id=str(sample_id), image=image, texts=texts, label=name)


@final
class _Positions:
    """The position of each id: counted, or looked up in a data set with its own ids."""

    def __init__(self, source: Source) -> None:
        self._first = np.array([fragment.first_id for fragment in source.fragments])
        self._num_rows, self._order = source.num_rows, None
        if source.columns.sample_id is not None:
            ids = source.sample_ids(source.fragments)
            self._order = np.argsort(ids, kind="stable")
            self._ids = ids[self._order]

    def find(self, sample_id: int) -> tuple[int, int]:
        """Return the number of the fragment and the row in it; raises ``NoSampleError``."""
        position = sample_id
        if self._order is not None:
            at = int(np.searchsorted(self._ids, sample_id))
            is_known = at < len(self._ids) and self._ids[at] == sample_id
            position = int(self._order[at]) if is_known else -1
        if not 0 <= position < self._num_rows:
            raise NoSampleError(
                f"the data set of --data has no sample {sample_id}; give the training data of the run"
            )
        number = int(np.searchsorted(self._first, position, side="right")) - 1
        return number, position - int(self._first[number])


def _one_row(fragment: Fragment, offset: int) -> Fragment:
    first_id = fragment.first_id + offset
    if fragment.paths:
        labels = fragment.labels[offset : offset + 1]
        return replace(fragment, paths=(fragment.paths[offset],), labels=labels, first_id=first_id)
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
