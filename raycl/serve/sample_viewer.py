"""Samples by their id, as a person sees them: a thumbnail, or texts."""

import base64
import io
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, final

import numpy as np
from PIL import Image

from raycl.data.columns import ColumnNames
from raycl.data.images import BrokenImageError, ImageFormat, image_sides
from raycl.data.labels import NO_LABEL
from raycl.data.sources import Fragment, RawRows, Source, find_source
from raycl.errors import ConfigError, DataError
from raycl.tokenization import BrokenTextError, read_text

THUMBNAIL = 128  # pixels of the longer side
_NUM_KEPT = 512
_SMALL = 64  # pixels a side up to which PNG is about as small as JPEG
_LONGEST = 2_000  # characters of a text that are shown
_TEXTS = ("text", "caption", "query", "document")


class NoSampleError(ConfigError):
    """The set has no sample of this id."""


@final
@dataclass(frozen=True, kw_only=True)
class RenderedSample:
    """What there is to see of a sample: a data: URL of its image, its texts by role, its label."""

    image: str | None
    texts: tuple[tuple[str, str], ...]
    label: str | None


@final
class SampleViewer:
    """The samples at an address, read one by one when somebody asks.

    Raises ``DataError`` and ``StorageError`` as :func:`find_source` does.
    """

    def __init__(self, uri: str, columns: ColumnNames, *, max_pixels: int) -> None:
        self._source = find_source(uri, columns)
        self._max_pixels = max_pixels
        self._positions: _Positions | None = None
        self._looking = threading.Lock()
        self.show = lru_cache(_NUM_KEPT)(self._show)

    def _show(self, sample_id: int) -> RenderedSample:
        """Return a sample; raises ``NoSampleError``, and ``DataError`` for one that is broken."""
        rows = self._read(sample_id)
        image = rows.values["image"][0] if "image" in rows.values else None
        texts = [
            (role, text) for role in _TEXTS if role in rows.values for text in _texts_in(rows.values[role][0])
        ]
        label = int(rows.label[0])
        classes = self._source.classes
        return RenderedSample(
            image=None if image is None else self._thumbnail(image, sample_id),
            texts=tuple(texts),
            label=None if label == NO_LABEL else classes[label] if classes else str(label),
        )

    def _read(self, sample_id: int) -> RawRows:
        with self._looking:  # a page asks for many pictures at once
            if self._positions is None:
                self._positions = _Positions(self._source)
        piece, offset = self._positions.find(sample_id)
        return next(iter(self._source.read(_one_row(self._source.pieces[piece], offset))))

    def _thumbnail(self, content: Any, sample_id: int) -> str:
        try:
            return thumbnail(content, max_pixels=self._max_pixels)
        except BrokenImageError as error:
            raise DataError(
                f"the image of sample {sample_id} is broken: {error}; mend it in the set"
            ) from None


@final
class _Positions:
    """Where each id is: counted, or looked up where the set has ids of its own."""

    def __init__(self, source: Source) -> None:
        self._first = np.array([piece.first_id for piece in source.pieces])
        self._num_rows, self._sorted = source.num_rows, None
        if source.columns.sample_id is not None:
            ids = source.sample_ids(source.pieces)
            self._sorted = np.argsort(ids, kind="stable")
            self._ids = ids[self._sorted]

    def find(self, sample_id: int) -> tuple[int, int]:
        """Return the piece and the row in it; raises ``NoSampleError``."""
        position = sample_id if self._sorted is None else self._position(sample_id)
        if not 0 <= position < self._num_rows:
            raise NoSampleError(
                f"the set of --data has no sample {sample_id}; give the set that the run trains on"
            )
        piece = int(np.searchsorted(self._first, position, side="right")) - 1
        return piece, position - int(self._first[piece])

    def _position(self, sample_id: int) -> int:
        assert self._sorted is not None, "only ids of a set's own are looked up"
        at = int(np.searchsorted(self._ids, sample_id))
        return int(self._sorted[at]) if at < len(self._ids) and self._ids[at] == sample_id else -1


def _one_row(piece: Fragment, offset: int) -> Fragment:
    if piece.paths:
        labels = piece.labels[offset : offset + 1]
        return replace(piece, paths=(piece.paths[offset],), labels=labels, first_id=piece.first_id + offset)
    start = piece.start + offset
    return replace(piece, start=start, stop=start + 1, first_id=piece.first_id + offset)


def thumbnail(content: Any, *, max_pixels: int) -> str:
    """Return a small picture of an encoded image, as a data: URL, in its own aspect.

    Raises ``BrokenImageError`` for what training would not decode either.
    """
    decoder = ImageFormat(size=THUMBNAIL, max_pixels=max_pixels)
    pixels, _ = decoder.decode(content)
    width, height = image_sides(content)
    if max(width, height) < THUMBNAIL:
        pixels, _ = replace(decoder, size=max(width, height)).decode(content)
    scale = min(1.0, THUMBNAIL / max(width, height))
    sides = (max(1, round(width * scale)), max(1, round(height * scale)))
    picture = Image.fromarray(pixels).resize(sides, Image.Resampling.BILINEAR)
    kind = "PNG" if max(sides) <= _SMALL else "JPEG"
    stream = io.BytesIO()
    picture.save(stream, kind, quality=85)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(stream.getvalue()).decode()}"


def _texts_in(value: Any) -> Sequence[str]:
    values = value if isinstance(value, list | tuple | np.ndarray) else [value]
    return [_shortened(each) for each in values]


def _shortened(value: Any) -> str:
    try:
        text = read_text(value)
    except BrokenTextError as error:
        return f"({error})"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
