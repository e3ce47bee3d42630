"""A look at some rows of a set by a task: sound or broken and why, how large, how long, which labels."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from raycl.data.click_logs import is_clicked, labels_as_given
from raycl.data.codecs import Formats, store_all
from raycl.data.coordinator import NUM_EXAMPLES
from raycl.data.decode import are_flat, row_error
from raycl.data.images import BrokenImageError, image_sides
from raycl.data.sources import Fragment, RawRows, Source
from raycl.errors import BrokenValueError


@final
@dataclass(kw_only=True)
class Extent:
    """The least, the greatest and the mean of some lengths."""

    least: int = 2**62
    most: int = 0
    total: int = 0
    count: int = 0

    def add(self, length: int) -> None:
        """Take a length in."""
        self.least, self.most = min(self.least, length), max(self.most, length)
        self.total, self.count = self.total + length, self.count + 1

    def join(self, other: "Extent") -> None:
        """Take in all lengths of another."""
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)
        self.total, self.count = self.total + other.total, self.count + other.count

    @property
    def mean(self) -> float:
        """The mean length."""
        return self.total / max(1, self.count)


@final
@dataclass(kw_only=True)
class Look:
    """What some rows are; ``decoded_bytes`` is what the sound ones take in the object store.

    ``characters`` and ``listed`` (texts of a list) are by role, ``labels`` by number, ``clicks`` by
    whether they are clicks, ``widths`` and ``heights`` those of images in pixels; all pixels of
    ``num_flat`` images have one value.
    """

    num_rows: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    labels: Counter[int] = field(default_factory=Counter)
    clicks: Counter[bool] = field(default_factory=Counter)
    widths: Extent = field(default_factory=Extent)
    heights: Extent = field(default_factory=Extent)
    characters: dict[str, Extent] = field(default_factory=dict)
    listed: dict[str, Extent] = field(default_factory=dict)
    decoded_bytes: int = 0
    num_flat: int = 0

    @property
    def num_sound(self) -> int:
        """Rows that can be used."""
        return self.num_rows - self.broken.total()

    def join(self, other: "Look") -> None:
        """Take in what another look saw."""
        self.num_rows += other.num_rows
        self.broken += other.broken
        self.examples = (self.examples + other.examples)[:NUM_EXAMPLES]
        self.labels += other.labels
        self.clicks += other.clicks
        self.widths.join(other.widths)
        self.heights.join(other.heights)
        for mine, others in ((self.characters, other.characters), (self.listed, other.listed)):
            for role, extent in others.items():
                mine.setdefault(role, Extent()).join(extent)
        self.decoded_bytes += other.decoded_bytes
        self.num_flat += other.num_flat


def look_at(source: Source, piece: str, formats: Formats, num_rows: int, *, clicks: bool) -> Look:
    """Decode the first rows of a piece as a run would; of ``clicks``, labels must be 0 or 1."""
    look = Look()
    for rows in source.read(Fragment.from_json(piece)):
        _add(look, rows, formats, num_rows - look.num_rows, source if clicks else None)
        if look.num_rows >= num_rows:
            break
    return look


def _add(look: Look, rows: RawRows, formats: Formats, num_rows: int, clicks: Source | None) -> None:
    count = min(num_rows, len(rows.sample_id))
    values = {role: rows.values[role][:count] for role in formats}
    decoded = {role: each.decode_all(values[role]) for role, each in formats.items()}
    look.num_rows += count
    look.labels.update(rows.label[:count].tolist())
    given = None if clicks is None else labels_as_given(rows, clicks)
    sound = []
    for place in range(count):
        error = row_error(decoded, place) or (given and _click_error(look, given[place]))
        if error is None:
            sound.append(place)
            continue
        look.broken[str(error)] += 1
        if len(look.examples) < NUM_EXAMPLES:
            look.examples.append(f"{rows.where[place]} ({error})")
    kept = {role: [each[place] for place in sound] for role, each in decoded.items()}
    look.num_flat += int(are_flat(formats, kept).sum())
    look.decoded_bytes += sum(column.nbytes for column in store_all(formats, kept).values())
    _measure(look, {role: [each[place] for place in sound] for role, each in values.items()})


def _measure(look: Look, values: Mapping[str, Sequence[Any]]) -> None:
    for image in values.get("image", ()):
        try:
            width, height = image_sides(image)
        except BrokenImageError:
            continue
        look.widths.add(width)
        look.heights.add(height)
    for role in {"text", "caption", "query", "document", "negatives"} & values.keys():
        for value in values[role]:
            texts = list(value) if isinstance(value, list | tuple | np.ndarray) else [value]
            texts = [text for text in texts if isinstance(text, str | bytes)]
            look.listed.setdefault(role, Extent()).add(len(texts))
            for text in texts:
                length = len(text.decode() if isinstance(text, bytes) else text)
                look.characters.setdefault(role, Extent()).add(length)


def _click_error(look: Look, label: Any) -> BrokenValueError | None:
    """Count a click or a document that was not clicked; return why a label is neither."""
    try:
        look.clicks[is_clicked(label)] += 1
    except BrokenValueError as error:
        return error
    return None
