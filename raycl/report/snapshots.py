"""Embedding snapshots in a report: histograms of cosines, maps, and the nearest neighbors of some samples."""

import base64
import io
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from raycl.embedding_snapshot import EDGES, EmbeddingSnapshot, ProbeSet, Similarities
from raycl.report.plots import HUES, INK, MARKERS, MUTED, NUM_HUES, PAPER, Drawing

NUM_QUERIES, NUM_NEIGHBORS = 8, 6
_MAX_GROUPS = 10  # colors of a map, for the most frequent labels; the other labels share one
_MAP_HEIGHT = 340  # pixels
_QUERIES_PER_BLOCK = 512  # of a search, whose similarities are in memory at once
_MIN_ROWS_OF_TSNE = 30
_MIN_DEVIATION = 1e-3  # of embeddings: below it a map would show rounding
_MAX_CHARACTERS = 130  # of a text
_MAX_PIXELS = 96  # of an image's side


@final
@dataclass(frozen=True)
class SimilaritySummary:
    """The mean cosine of positives and of other pairs, and how often the positive is the closer of the two."""

    positives: float
    negatives: float
    positive_is_closer: float


def summarize(similarities: Similarities) -> SimilaritySummary | None:
    """Return the summary of a histogram, None if either side is empty."""
    sides = (similarities.positives, similarities.negatives)
    if not all(side.sum() for side in sides):
        return None
    centers = (EDGES[1:] + EDGES[:-1]) / 2
    positives, negatives = (side / side.sum() for side in sides)
    below = np.cumsum(negatives) - negatives / 2  # within a bin, each is the closer one half of the time
    return SimilaritySummary(float(positives @ centers), float(negatives @ centers), float(positives @ below))


def draw_similarities(similarities: Similarities, *, label: str) -> Markup:
    """Return the histogram of cosines, as shares of the positives and of the other pairs."""
    with Drawing(label) as drawing:
        axes = drawing.axes
        for name, counts, color, dashes in (
            ("other pairs", similarities.negatives, HUES[1], (0, (4, 1.5))),
            ("positives", similarities.positives, HUES[0], "-"),
        ):
            if total := counts.sum():
                style: dict[str, Any] = {"edgecolor": color, "facecolor": (color, 0.3), "linestyle": dashes}
                axes.stairs(counts / total, EDGES, fill=True, linewidth=1.5, label=name, **style)
        axes.set(xlim=(-1, 1), xticks=[-1, -0.5, 0, 0.5, 1])
        axes.set_ylim(bottom=0)
        axes.set(xlabel="cosine of two embeddings", ylabel="share of pairs")
        axes.legend(loc="upper left", handlelength=2.4)
        return drawing.to_svg()


def project(rows: NDArray[np.float32]) -> NDArray[np.float64] | None:
    """Return points [num_rows, 2] by t-SNE, by PCA for few rows; None if all rows are nearly one point."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    if len(rows) < 3 or float(np.sqrt(rows.var(0).sum())) < _MIN_DEVIATION:
        return None
    components = PCA(min(50, *rows.shape), random_state=0).fit_transform(rows)
    if len(rows) < _MIN_ROWS_OF_TSNE or components.shape[1] < 2:
        return np.pad(components, ((0, 0), (0, 1)))[:, :2].astype(np.float64)
    perplexity = min(30.0, len(rows) / 4)
    tsne = TSNE(2, perplexity=perplexity, init="pca", max_iter=500, random_state=0, learning_rate="auto")
    return tsne.fit_transform(components).astype(np.float64)


def draw_map(points: NDArray[np.float64], groups: list[str], *, label: str, named: bool) -> Markup:
    """Return a map whose points have the colors and shapes of their groups, with names on it if ``named``."""
    with Drawing(label, height=_MAP_HEIGHT) as drawing:
        axes = drawing.axes
        axes.set(xticks=[], yticks=[], xlabel="the axes have no meaning: close points are similar")
        shown = [name for name, _ in Counter(groups).most_common(_MAX_GROUPS)]
        group = np.array(groups, dtype=object)
        axes.scatter(*points[~np.isin(group, shown)].T, s=10, c=MUTED, alpha=0.5, linewidths=0)
        names = sorted(shown, key=_natural_order)
        for number, (name, shortened) in enumerate(zip(names, _shortened_names(names), strict=True)):
            members, color = points[group == name], HUES[number % NUM_HUES]
            marker = MARKERS[number % len(MARKERS)]
            axes.scatter(*members.T, s=15, c=color, marker=marker, alpha=0.75, linewidths=0, label=name)
            if named:
                box = {
                    "boxstyle": "round,pad=0.15",
                    "facecolor": PAPER,
                    "edgecolor": "none",
                    "alpha": 0.8,
                }
                style: dict[str, Any] = {"color": INK, "weight": "bold", "fontsize": 13, "bbox": box}
                x, y = np.median(members, axis=0)
                axes.text(x, y, shortened, ha="center", va="center", **style)
        if not named and len(shown) > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, markerscale=1.8)
        return drawing.to_svg()


def _shortened_names(names: Sequence[str]) -> list[str]:
    """Shorten long names to 16 characters, in the middle or else at an end, where most names stay different."""
    ways = [
        [name if len(name) <= 16 else f"{name[:start]}…{name[len(name) - end :]}" for name in names]
        for start, end in ((7, 8), (15, 0), (0, 15))  # characters that are kept
    ]
    return max(ways, key=lambda shortened: len(set(shortened)))


def _natural_order(name: str) -> tuple[bool, float, str]:
    """Sort 2 before 10."""
    is_number = re.fullmatch(r"-?\d+", name) is not None
    return (not is_number, float(name) if is_number else 0.0, name)


@final
@dataclass(frozen=True, kw_only=True)
class SampleCard:
    """A sample as the page shows it: an image as a data URL, a text, or both, and its class name if it has one."""

    picture: str | None = None
    text: str | None = None
    label: str | None = None


@final
@dataclass(frozen=True, kw_only=True)
class NeighborCard:
    """A neighbor; ``is_right`` says that it has the query's label or is its own key, None if unknown."""

    sample: SampleCard
    cosine: float
    is_right: bool | None


@final
@dataclass(frozen=True, kw_only=True)
class QueryNeighbors:
    """A query and its nearest neighbors before training and now, nearest first; None without a snapshot."""

    query: SampleCard
    before: list[NeighborCard] | None
    now: list[NeighborCard] | None


@final
class NeighborSearch:
    """Nearest neighbors among the samples of a probe set, by an embedding snapshot.

    Queries of pairs search the keys, other samples search each other.
    """

    def __init__(
        self, probes: ProbeSet, snapshot: EmbeddingSnapshot, class_name: Callable[[int], str] = str
    ) -> None:
        self._probes, self._snapshot, self._class_name = probes, snapshot, class_name
        self._has_keys = snapshot.key is not None
        if self._has_keys:
            keys = probes.contents.get("document") or probes.contents["caption"]
            # Equal keys have the same number.
            self._key_number = np.unique(np.array(keys, object), return_inverse=True)[1]

    def search(
        self, queries: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.bool_]]:
        """Return neighbors, cosines, and whether each is right, [num_queries, NUM_NEIGHBORS] or narrower."""
        rows = self._snapshot.embedding.astype(np.float32)
        keys = rows if self._snapshot.key is None else self._snapshot.key.astype(np.float32)
        starts = range(0, max(1, len(queries)), _QUERIES_PER_BLOCK)
        blocks = [self._nearest(rows, keys, queries[start : start + _QUERIES_PER_BLOCK]) for start in starts]
        found, cosines = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        classes = self._key_number if self._has_keys else self._probes.label
        return found, cosines, classes[found] == classes[queries, None]

    def _nearest(
        self, rows: NDArray[np.float32], keys: NDArray[np.float32], queries: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the neighbors and their cosines of a block of queries."""
        with np.errstate(invalid="ignore"):
            cosines = rows[queries] @ keys.T
        cosines[np.isnan(cosines)] = -np.inf
        count = NUM_NEIGHBORS
        if not self._has_keys:
            cosines[np.arange(len(queries)), queries] = -np.inf  # the query itself
            count = min(count, len(rows) - 1)
        found = np.argsort(-cosines, axis=1, kind="stable")[:, :count].copy()  # not a view of all positions
        return found, np.take_along_axis(cosines, found, 1)

    def cards(self, queries: NDArray[np.int64]) -> list[list[NeighborCard]]:
        """Return the neighbors of each query, nearest first."""
        labels = self._probes.label
        return [
            [
                NeighborCard(
                    sample=self.card(int(neighbor), is_key=self._has_keys),
                    cosine=float(cosine),
                    is_right=bool(right)
                    if self._has_keys or min(labels[query], labels[neighbor]) >= 0
                    else None,
                )
                for neighbor, cosine, right in zip(*row, strict=True)
                if np.isfinite(cosine)
            ]
            for query, *row in zip(queries, *self.search(queries), strict=True)
        ]

    def right_fraction(self) -> float | None:
        """Return the fraction of labeled neighbors with the query's label, or of queries that find their key.

        Of each query, only as many neighbors count as there are other samples of its label. None if none count.
        """
        queries = np.flatnonzero(_is_finite(self._snapshot))
        if self._has_keys:
            is_right = np.asarray(self.search(queries)[2].any(1))
        else:
            label = self._probes.label
            queries = queries[label[queries] >= 0]
            found, cosines, is_right = self.search(queries)
            _, number, sizes = np.unique(label[queries], return_inverse=True, return_counts=True)
            is_counted = np.arange(found.shape[1]) < sizes[number, None] - 1
            is_right = is_right[is_counted & (label[found] >= 0) & np.isfinite(cosines)]
        return float(is_right.mean()) if len(is_right) else None

    def card(self, sample: int, *, is_key: bool = False) -> SampleCard:
        """Return the card of a sample, or of its key."""
        contents = self._probes.contents
        if is_key:
            return SampleCard(text=_shortened((contents.get("document") or contents["caption"])[sample]))
        texts, label = contents.get("query") or contents.get("text"), int(self._probes.label[sample])
        return SampleCard(
            picture=_data_url(contents["image"][sample]) if "image" in contents else None,
            text=None if texts is None else _shortened(texts[sample]),
            label=self._class_name(label) if label >= 0 else None,
        )


def choose_queries(probes: ProbeSet, snapshots: list[EmbeddingSnapshot]) -> NDArray[np.int64]:
    """Return samples that are finite in all snapshots: one of each of some labels, or evenly spaced ones.

    Labels of several samples come first.
    """
    finite = np.ones(len(probes.sample_id), np.bool_)
    for snapshot in snapshots:
        finite &= _is_finite(snapshot)
    samples = np.flatnonzero(finite)
    labeled = samples[probes.label[samples] >= 0]
    labels, counts = np.unique(probes.label[labeled], return_counts=True)
    if len(labels) > 1:
        chosen = [*_spaced(labels[counts > 1]), *_spaced(labels[counts == 1])][:NUM_QUERIES]
        return np.array([labeled[probes.label[labeled] == label][0] for label in chosen])
    return _spaced(samples)


def _spaced(values: NDArray[np.int64]) -> NDArray[np.int64]:
    if not len(values):
        return values
    return values[np.linspace(0, len(values) - 1, min(NUM_QUERIES, len(values))).astype(int)]


def _is_finite(snapshot: EmbeddingSnapshot) -> NDArray[np.bool_]:
    finite = np.asarray(np.isfinite(snapshot.embedding).all(1))
    return finite if snapshot.key is None else finite & np.asarray(np.isfinite(snapshot.key).all(1))


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS].rstrip()}…"


def _data_url(content: bytes) -> str:
    """Return an image as a data URL; a large one is scaled down."""
    with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as image:
        kind = str(image.format).lower()
        if max(image.size) > _MAX_PIXELS:
            image.thumbnail((_MAX_PIXELS, _MAX_PIXELS))
            stream = io.BytesIO()
            image.convert("RGB").save(stream, "JPEG", quality=80)
            content, kind = stream.getvalue(), "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
