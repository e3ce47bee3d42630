"""The parts that pictures are made of: points with their spread, lines over numbers, curves over samples.

The colors are those of Okabe and Ito, told apart by all eyes; each line has its own marker as well, and
its name beside it.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from raycl.reproduction.claims import Sample
from raycl.reproduction.outcomes import Curve

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_GREY = "#666666"


def prepare(axes: Axes, *, title: str = "", x: str = "", y: str = "") -> None:
    """Give axes their words and a quiet look."""
    axes.set_title(title, fontsize=9.5, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, lw=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw_lines(
    axes: Axes, lines: Mapping[str, Mapping[float, Sample]], *, floor: float | None = None
) -> None:
    """Draw medians over a logarithmic x with bars from the least to the most, each line named at its end."""
    ends = {}
    for number, (label, points) in enumerate(lines.items()):
        if not points:
            continue
        samples = list(points.values())
        x = [place * 1.04**number for place in points]  # bars at the same place would hide one another
        median = [sample.median for sample in samples]
        reach = [
            [sample.median - sample.least for sample in samples],
            [sample.most - sample.median for sample in samples],
        ]
        axes.errorbar(
            x, median, yerr=reach, color=COLORS[number], marker=MARKERS[number], lw=1.6, ms=5, capsize=3
        )
        ends[label] = (x[-1], median[-1], COLORS[number])
    if floor is not None:
        axes.axhline(floor, color=_GREY, lw=0.8, ls=":")
        axes.text(
            0.01,
            floor,
            "raw pixels",
            fontsize=8,
            color=_GREY,
            va="bottom",
            transform=axes.get_yaxis_transform(),
        )
    name_ends(axes, ends)


def draw_dots(
    axes: Axes,
    samples: Mapping[str, Sample],
    *,
    names: bool = True,
    form: str = "{:.3f}",
    floor: float | None = None,
) -> None:
    """Draw every seed as a dot and the median as a bar, a row a setting from the top, its median beside it."""
    for row, sample in enumerate(samples.values()):
        color, marker = COLORS[row % len(COLORS)], MARKERS[row % len(MARKERS)]
        if not sample.values:
            axes.text(
                0.02,
                row,
                "no run yet",
                fontsize=8,
                color=_GREY,
                va="center",
                transform=axes.get_yaxis_transform(),
            )
            continue
        axes.plot([sample.least, sample.most], [row, row], color=color, lw=2, alpha=0.4)
        axes.plot(sample.values, [row] * len(sample.values), marker, color=color, ms=5, alpha=0.65, mew=0)
        axes.plot([sample.median], [row], "|", color=color, ms=16, mew=2.2)
        axes.annotate(
            form.format(sample.median), (sample.median, row), (0, 9), textcoords="offset points", fontsize=8,
            ha="center", color=color,
        )  # fmt: skip
    if floor is not None:
        axes.axvline(floor, color=_GREY, lw=0.8, ls=":")
        axes.text(
            floor,
            0.99,
            " raw pixels",
            fontsize=8,
            color=_GREY,
            va="top",
            transform=axes.get_xaxis_transform(),
        )
    axes.set_yticks(range(len(samples)), list(samples) if names else [""] * len(samples))
    axes.set_ylim(len(samples) - 0.5, -0.9)
    axes.margins(x=0.15)


def draw_curves(axes: Axes, curves: Mapping[str, Sequence[Curve]], *, over: str = "samples") -> None:
    """Draw the median over seeds with a band from the least to the most; what was rolled back is thin."""
    ends = {}
    for number, (label, own) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        last = {curve.seed: curve.attempt for curve in own}
        for curve in own:
            if curve.attempt < last[curve.seed]:
                axes.plot(getattr(curve, over), curve.values, color=color, lw=0.7, alpha=0.6)
        kept = [curve for curve in own if curve.attempt == last[curve.seed]]
        x, values = _together(kept, over)
        if not len(x):
            continue
        median = np.median(values, axis=0)
        axes.plot(x, median, color=color, lw=1.6)
        axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, lw=0)
        ends[label] = (x[-1], float(median[-1]), color)
    name_ends(axes, ends)


def _together(curves: Sequence[Curve], over: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the places that all curves have, and the values there [num_curves, num_places]."""
    places = [set(getattr(curve, over)) for curve in curves]
    common = np.array(sorted(set.intersection(*places)) if places else [])
    values = [
        [dict(zip(getattr(curve, over), curve.values, strict=True))[x] for x in common] for curve in curves
    ]
    return common, np.array(values)


def name_ends(axes: Axes, ends: Mapping[str, tuple[float, float, str]]) -> None:
    """Write each name beside the end of its line, apart from one another."""
    axes.margins(y=0.08)
    axes.autoscale_view()
    bottom, top = axes.get_ylim()
    to_part, from_part = axes.transLimits.transform, axes.transLimits.inverted().transform
    if not ends:
        return
    order = sorted(ends, key=lambda label: ends[label][1])
    wanted = [float(to_part(axes.transScale.transform((1.0, ends[label][1])))[1]) for label in order]
    for label, part in zip(order, spread_apart(wanted), strict=True):
        x, _, color = ends[label]
        y = axes.transScale.inverted().transform(from_part((0.0, part)))[1]
        axes.annotate(
            label, (x, y), (7, 0), textcoords="offset points", color=color, fontsize=8.5, va="center",
            annotation_clip=False,
        )  # fmt: skip
    axes.set_ylim(bottom, top)


def spread_apart(places: Sequence[float], gap: float = 0.06) -> list[float]:
    """Move ascending places so that neighbors are at least ``gap`` apart, the middle of all where it was."""
    if not places:
        return []
    moved = [places[0]]
    for place in places[1:]:
        moved.append(max(place, moved[-1] + gap))
    shift = (sum(places) - sum(moved)) / len(places)
    return [place + shift for place in moved]


def write_caption(picture: Picture, title: str, sentences: Sequence[str]) -> None:
    """Put the claim above the panels, and below them what the figures said about it."""
    width = int(14.5 * picture.get_figwidth())  # letters a line
    lines = [line for sentence in sentences for line in textwrap.wrap(sentence, width)]
    height = picture.get_figheight() + 0.17 * len(lines)
    low = (0.17 * len(lines) + 0.12) / height
    picture.set_figheight(height)
    picture.tight_layout(rect=(0.0, low, 1.0, 1.0 - 0.34 / height))
    picture.text(0.012, 1.0 - 0.12 / height, title, fontsize=11.5, weight="bold", va="top")
    picture.text(0.012, low - 0.04 / height, "\n".join(lines), fontsize=8.5, va="top", color="#222222")
