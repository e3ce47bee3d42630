"""Drawings of embeddings: how similar positives and other pairs are, and a map of the samples."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from raycl.embedding_snapshot import EDGES, Similarities
from raycl.report.theme import HUES, INK, MARKERS, MUTED, NUM_HUES, PAPER, Drawing

SHOWN_LABELS = 10  # of a map, the most frequent ones; the others share a color
_SIDE = 340  # pixels of a map
_FEWEST_FOR_TSNE = 30
_POINT = 1e-3  # of the spread: embeddings this close are one point, and a map would show rounding


@final
@dataclass(frozen=True)
class SimilaritySummary:
    """What a histogram of similarities says in figures: both means, and how often a positive is the nearer pair."""

    positives: float
    negatives: float
    nearer: float


def told(similarities: Similarities) -> SimilaritySummary | None:
    """Return the figures of a histogram, or None if it is empty on one side."""
    sides = (similarities.positives, similarities.negatives)
    if not all(side.sum() for side in sides):
        return None
    middles = (EDGES[1:] + EDGES[:-1]) / 2
    positives, negatives = (side / side.sum() for side in sides)
    # Of the same bin either may be the nearer one.
    below = np.cumsum(negatives) - negatives / 2
    return SimilaritySummary(float(positives @ middles), float(negatives @ middles), float(positives @ below))


def draw_similarities(similarities: Similarities, *, label: str) -> Markup:
    """Return the shares of pairs by their cosine."""
    with Drawing() as drawing:
        axes = drawing.figure.add_subplot()
        sides: Mapping[str, tuple[NDArray[np.int64], str, Any]] = {
            "other pairs": (similarities.negatives, HUES[1], (0, (4, 1.5))),
            "positives": (similarities.positives, HUES[0], "-"),
        }
        for name, (counts, color, dashes) in sides.items():
            if share := counts.sum():
                style: dict[str, Any] = {
                    "edgecolor": color,
                    "linestyle": dashes,
                    "linewidth": 1.5,
                    "label": name,
                }
                axes.stairs(counts / share, EDGES, fill=True, facecolor=(color, 0.3), **style)
        axes.set_xlim(-1, 1)
        axes.set_xticks([-1, -0.5, 0, 0.5, 1])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("cosine of two embeddings")
        axes.set_ylabel("share of pairs")
        axes.legend(loc="upper left", handlelength=2.4)
        return drawing.svg(label=label)


def place_on_map(rows: NDArray[np.float32]) -> NDArray[np.float64] | None:
    """Return a place [num_rows, 2] for each embedding, near those that are near; None if all are one point.

    By t-SNE, or of few rows by their two main components.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    if len(rows) < 3 or float(np.sqrt(rows.var(0).sum())) < _POINT:
        return None
    main = PCA(min(50, *rows.shape), random_state=0).fit_transform(rows)
    if len(rows) < _FEWEST_FOR_TSNE or main.shape[1] < 2:
        return np.pad(main, ((0, 0), (0, 1)))[:, :2].astype(np.float64)
    perplexity = min(30.0, len(rows) / 4)
    tsne = TSNE(2, perplexity=perplexity, init="pca", max_iter=500, random_state=0, learning_rate="auto")
    return tsne.fit_transform(main).astype(np.float64)


def draw_map(places: NDArray[np.float64], groups: list[str], *, label: str, named: bool) -> Markup:
    """Return a map whose points are colored and shaped by their groups, with a name on each where ``named``."""
    with Drawing(height=_SIDE) as drawing:
        axes = drawing.figure.add_subplot()
        axes.set(xticks=[], yticks=[])
        axes.set_xlabel("no axis has a meaning of its own: near is alike")
        shown = [name for name, _ in Counter(groups).most_common(SHOWN_LABELS)]
        group = np.array(groups, dtype=object)
        others = ~np.isin(group, shown)
        axes.scatter(*places[others].T, s=10, c=MUTED, alpha=0.5, linewidths=0, rasterized=False)
        for number, name in enumerate(sorted(shown, key=_natural)):
            points = places[group == name]
            marker = MARKERS[number % len(MARKERS)]
            color = HUES[number % NUM_HUES]
            axes.scatter(*points.T, s=15, c=color, marker=marker, alpha=0.75, linewidths=0, label=name)
            if named:
                _name(axes, name, np.median(points, axis=0))
        if not named and len(shown) > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, markerscale=1.8)
        return drawing.svg(label=label)


def _name(axes: Any, name: str, place: NDArray[np.float64]) -> None:
    box = {"boxstyle": "round,pad=0.15", "facecolor": PAPER, "edgecolor": "none", "alpha": 0.8}
    axes.text(*place, name[:16], color=INK, weight="bold", ha="center", va="center", fontsize=13, bbox=box)


def _natural(name: str) -> tuple[bool, float, str]:
    """Order 2 before 10."""
    is_number = name.lstrip("-").isdigit()
    return (not is_number, float(name) if is_number else 0.0, name)
