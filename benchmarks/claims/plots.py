"""Panels of a figure: medians along an axis, one dot per seed, curves over samples or steps.

Colors are those of Okabe and Ito, safe for color-blind readers; each line also has a marker and its name.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from claims.results import MetricCurve
from claims.rules import SeedValues

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
BAND = "median over seeds, band: range"
DOTS = "one dot per seed, bar: median"
_GREY = "#666666"


def prepare(axes: Axes, *, title: str = "", x: str = "", y: str = "") -> None:
    """Label the axes and hide their frame."""
    axes.set_title(title, fontsize=9.5, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, lw=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw_lines(
    axes: Axes, lines: Mapping[str, Mapping[float, SeedValues]], *, baseline: float | None = None
) -> None:
    """Draw medians over a logarithmic x with bars over the range, each line named at its end."""
    ends = {}
    for number, (label, points) in enumerate(lines.items()):
        if not points:
            continue
        x = [place * 1.04**number for place in points]  # bars at the same place would overlap
        median = [each.median for each in points.values()]
        low = [each.median - each.min for each in points.values()]
        high = [each.max - each.median for each in points.values()]
        style: Any = {"color": COLORS[number], "marker": MARKERS[number], "lw": 1.6, "ms": 5, "capsize": 3}
        axes.errorbar(x, median, yerr=[low, high], **style)
        ends[label] = (x[-1], median[-1], COLORS[number])
    if baseline is not None:
        axes.axhline(baseline, color=_GREY, lw=0.8, ls=":")
        _write(axes, 0.01, baseline, "raw pixels", "bottom", axes.get_yaxis_transform())
    name_ends(axes, ends)


def draw_dots(
    axes: Axes, samples: Mapping[str, SeedValues], *, names: bool = True, baseline: float | None = None
) -> None:
    """Draw one row per setting from the top: every seed as a dot, the median as a bar with its value."""
    for row, sample in enumerate(samples.values()):
        color, marker = COLORS[row % len(COLORS)], MARKERS[row % len(MARKERS)]
        if not sample.values:
            _write(axes, 0.02, row, "no run yet", "center", axes.get_yaxis_transform())
            continue
        axes.plot([sample.min, sample.max], [row, row], color=color, lw=2, alpha=0.4)
        axes.plot(sample.values, [row] * len(sample.values), marker, color=color, ms=5, alpha=0.65, mew=0)
        axes.plot([sample.median], [row], "|", color=color, ms=16, mew=2.2)
        _annotate(axes, f"{sample:.3f}", (sample.median, row), (0, 9), color, fontsize=8, ha="center")
    if baseline is not None:
        axes.axvline(baseline, color=_GREY, lw=0.8, ls=":")
        _write(axes, baseline, 0.99, " raw pixels", "top", axes.get_xaxis_transform())
    axes.set_yticks(range(len(samples)), list(samples) if names else [""] * len(samples))
    axes.set_ylim(len(samples) - 0.5, -0.9)
    axes.margins(x=0.15)


def draw_curves(axes: Axes, curves: Mapping[str, Sequence[MetricCurve]], *, over: str = "samples") -> None:
    """Draw the median over seeds with a band over the range; rolled-back attempts are thin lines."""
    ends = {}
    for number, (label, own) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        last_attempt = {curve.seed: curve.attempt for curve in own}
        kept = [curve for curve in own if curve.attempt == last_attempt[curve.seed]]
        for curve in own:
            if curve not in kept:
                axes.plot(getattr(curve, over), curve.values, color=color, lw=0.7, alpha=0.6)
        x, values = _common_points(kept, over)
        if not len(x):
            continue
        median = np.median(values, axis=0)
        axes.plot(x, median, color=color, lw=1.6)
        axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, lw=0)
        ends[label] = (x[-1], float(median[-1]), color)
    name_ends(axes, ends)


def draw_thousands(axes: Axes) -> None:
    """Write the numbers of the x axis in thousands."""
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e3:g}")


def _common_points(
    curves: Sequence[MetricCurve], over: str
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the x that all curves share, and their values there [num_curves, num_points]."""
    maps = [dict(zip(getattr(curve, over), curve.values, strict=True)) for curve in curves]
    common = sorted(set.intersection(*map(set, maps))) if maps else []
    return np.array(common), np.array([[values[x] for x in common] for values in maps])


def _write(axes: Axes, x: float, y: float, text: str, va: Any, transform: Any) -> None:
    axes.text(x, y, text, fontsize=8, color=_GREY, va=va, transform=transform)


def _annotate(
    axes: Axes, text: str, at: tuple[float, float], offset: tuple[int, int], color: str, **how: Any
) -> None:
    axes.annotate(text, at, offset, textcoords="offset points", color=color, annotation_clip=False, **how)


def name_ends(axes: Axes, ends: Mapping[str, tuple[float, float, str]]) -> None:
    """Write each name beside the end of its line, without overlap."""
    axes.margins(y=0.08)
    axes.autoscale_view()
    bottom, top = axes.get_ylim()
    to_fraction, from_fraction = axes.transLimits.transform, axes.transLimits.inverted().transform
    order = sorted(ends, key=lambda label: ends[label][1])
    wanted = [float(to_fraction(axes.transScale.transform((1.0, ends[label][1])))[1]) for label in order]
    for label, fraction in zip(order, spread_apart(wanted), strict=True):
        x, _, color = ends[label]
        y = axes.transScale.inverted().transform(from_fraction((0.0, fraction)))[1]
        _annotate(axes, label, (x, y), (7, 0), color, fontsize=8.5, va="center")
    axes.set_ylim(bottom, top)


def spread_apart(places: Sequence[float], gap: float = 0.06) -> list[float]:
    """Move ascending places so that neighbors are at least ``gap`` apart, and keep their mean."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap) if moved else place)
    shift = (sum(places) - sum(moved)) / max(1, len(places))
    return [place + shift for place in moved]


def write_caption(picture: Figure, title: str, sentences: Sequence[str]) -> None:
    """Put the title above the panels and the sentences below them."""
    width = int(14.5 * picture.get_figwidth())  # letters per line
    lines = [line for sentence in sentences for line in textwrap.wrap(sentence, width)]
    height = picture.get_figheight() + 0.17 * len(lines)
    low = (0.17 * len(lines) + 0.12) / height
    picture.set_figheight(height)
    picture.tight_layout(rect=(0.0, low, 1.0, 1.0 - 0.34 / height))
    picture.text(0.012, 1.0 - 0.12 / height, title, fontsize=11.5, weight="bold", va="top")
    picture.text(0.012, low - 0.04 / height, "\n".join(lines), fontsize=8.5, va="top", color="#222222")
