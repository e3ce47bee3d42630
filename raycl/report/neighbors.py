"""Neighbors before and now: for some samples, those whose embeddings are nearest."""

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from raycl.embedding_snapshot import EmbeddingSnapshot, ProbeSet

NUM_QUERIES, NUM_NEIGHBORS = 8, 6
_TEXT_LENGTH = 130  # characters of a text that are shown
_PIXELS = 96  # at most, of a side


@final
@dataclass(frozen=True, kw_only=True)
class Sample:
    """A picture, a text, or a picture with its caption; ``label`` is its class by name, None where there is none."""

    picture: str | None = None
    text: str | None = None
    label: str | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Neighbor:
    """A sample found; ``is_right`` says that it has the query's label, or is its own key, where one can know."""

    sample: Sample
    cosine: float
    is_right: bool | None


@final
@dataclass(frozen=True, kw_only=True)
class Neighborhood:
    """A query, and what is nearest to it before training and now, best first; None without a portrait."""

    query: Sample
    before: list[Neighbor] | None
    now: list[Neighbor] | None


def neighborhoods(
    gallery: ProbeSet,
    first: EmbeddingSnapshot | None,
    latest: EmbeddingSnapshot | None,
    class_name: Callable[[int], str] = str,
) -> list[Neighborhood]:
    """Return a few queries with their neighbors: one of each of the first labels, or spread over the samples."""
    queries = _chosen(gallery, first, latest)
    shown = partial(_shown, gallery, class_name)
    before, now = (
        None if each is None else _nearest(gallery, each, queries, shown) for each in (first, latest)
    )
    return [
        Neighborhood(
            query=shown(int(query), is_key=False),
            before=None if before is None else before[place],
            now=None if now is None else now[place],
        )
        for place, query in enumerate(queries)
    ]


def right_fraction(gallery: ProbeSet, portrait: EmbeddingSnapshot) -> float | None:
    """Return how many of the neighbors of all labeled samples have their label, or of pairs how many keys are found."""
    everyone = np.flatnonzero(_is_sound(portrait))
    found, _ = _search(portrait, everyone, NUM_NEIGHBORS)
    if portrait.key is not None:
        key = _key_number(gallery)
        return float((key[found] == key[everyone, None]).any(1).mean()) if len(everyone) else None
    labeled = gallery.label[everyone] >= 0
    if not labeled.any():
        return None
    return float((gallery.label[found[labeled]] == gallery.label[everyone[labeled], None]).mean())


def _is_sound(portrait: EmbeddingSnapshot) -> NDArray[np.bool_]:
    sound = np.asarray(np.isfinite(portrait.embedding).all(1))
    return sound if portrait.key is None else sound & np.asarray(np.isfinite(portrait.key).all(1))


def _chosen(
    gallery: ProbeSet, first: EmbeddingSnapshot | None, latest: EmbeddingSnapshot | None
) -> NDArray[np.int64]:
    sound = np.ones(len(gallery.sample_id), np.bool_)
    for portrait in filter(None, (first, latest)):
        sound &= _is_sound(portrait)
    places = np.flatnonzero(sound)
    labels = np.unique(gallery.label[places])
    labels = labels[labels >= 0]
    if len(labels) > 1:
        spread = labels[np.linspace(0, len(labels) - 1, min(NUM_QUERIES, len(labels))).astype(int)]
        return np.array([places[gallery.label[places] == label][0] for label in spread])
    return (
        places[np.linspace(0, len(places) - 1, min(NUM_QUERIES, len(places))).astype(int)]
        if len(places)
        else places
    )


def _search(
    portrait: EmbeddingSnapshot, queries: NDArray[np.int64], number: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the nearest samples [num_queries, number] and their cosines; without keys, never the query itself."""
    rows = portrait.embedding.astype(np.float32)
    keys = rows if portrait.key is None else portrait.key.astype(np.float32)
    with np.errstate(invalid="ignore"):
        cosines = rows[queries] @ keys.T
    cosines[np.isnan(cosines)] = -np.inf
    if portrait.key is None:
        cosines[np.arange(len(queries)), queries] = -np.inf
        number = min(number, len(rows) - 1)
    found = np.argsort(-cosines, axis=1, kind="stable")[:, :number]
    return found, np.take_along_axis(cosines, found, 1)


def _nearest(
    gallery: ProbeSet, portrait: EmbeddingSnapshot, queries: NDArray[np.int64], shown: Callable[..., Sample]
) -> list[list[Neighbor]]:
    found, cosines = _search(portrait, queries, NUM_NEIGHBORS)
    has_keys = portrait.key is not None
    rows = []
    for query, places, values in zip(queries, found, cosines, strict=True):
        rows.append(
            [
                Neighbor(
                    sample=shown(int(place), is_key=has_keys),
                    cosine=float(cosine),
                    is_right=_is_right(gallery, int(query), int(place), has_keys),
                )
                for place, cosine in zip(places, values, strict=True)
                if np.isfinite(cosine)
            ]
        )
    return rows


def _is_right(gallery: ProbeSet, query: int, place: int, has_keys: bool) -> bool | None:
    if has_keys:
        key = _key_number(gallery)
        return bool(key[query] == key[place])
    labels = gallery.label[[query, place]]
    return bool(labels[0] == labels[1]) if (labels >= 0).all() else None


def _key_number(gallery: ProbeSet) -> NDArray[np.int64]:
    """Return a number for each sample's key, the same for equal ones."""
    keys = gallery.contents.get("document") or gallery.contents["caption"]
    return np.unique(np.array(keys, object), return_inverse=True)[1]


def _shown(gallery: ProbeSet, class_name: Callable[[int], str], place: int, *, is_key: bool) -> Sample:
    """Return a sample as a query, or of pairs as a key."""
    contents = gallery.contents
    if is_key:
        texts = contents.get("document") or contents["caption"]
        return Sample(text=_cut(texts[place]))
    texts = contents.get("query") or contents.get("text")
    label = int(gallery.label[place])
    return Sample(
        picture=_address_of(contents["image"][place]) if "image" in contents else None,
        text=None if texts is None else _cut(texts[place]),
        label=class_name(label) if label >= 0 else None,
    )


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT_LENGTH else f"{text[:_TEXT_LENGTH].rstrip()}…"


def _address_of(content: bytes) -> str:
    """Return a picture as an address that holds it; what is no picture, or a large one, is drawn anew."""
    with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as image:
        kind = str(image.format).lower()
        if max(image.size) > _PIXELS:
            image.thumbnail((_PIXELS, _PIXELS))
            stream = io.BytesIO()
            image.convert("RGB").save(stream, "JPEG", quality=80)
            content, kind = stream.getvalue(), "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
