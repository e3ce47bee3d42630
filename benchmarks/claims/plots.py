"""Draw the panels of a figure: medians along an axis, one dot per seed, curves over samples or steps.

Colors are those of Okabe and Ito, safe for color-blind readers; each line also has a marker and its name.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from claims.figure import Panel
from claims.results import MetricCurve, Results
from claims.rules import SeedValues

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
TITLES = {
    "dots": "one dot per seed, bar: median",
    "lines": "median over seeds, bars: range",
    "curves": "median over seeds, band: range",
}
_GREY = "#666666"


def draw(results: Results, picture: Figure) -> None:
    """Draw all panels side by side."""
    panels = results.figure.panels
    picture.set_size_inches(*results.figure.size)
    for number, panel in enumerate(panels, 1):
        axes = picture.add_subplot(1, len(panels), number)
        axes.set_title(panel.title or TITLES[panel.kind], fontsize=9.5, loc="left")
        axes.set_xlabel(panel.x, fontsize=9)
        axes.set_ylabel(panel.y, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if panel.limit is not None:
            axes.axhline(panel.limit, color=_GREY, lw=0.8, ls=":")
        _DRAW[panel.kind](axes, results, panel)


def draw_lines(axes: Axes, results: Results, panel: Panel) -> None:
    """Draw medians over a logarithmic x with bars over the range, each line named at its end."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(sorted({setting.x for setting in results.settings if setting.x is not None}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.tick_params(axis="x", labelrotation=30)
    ends = {}
    lines = dict.fromkeys(setting.line for setting in results.settings if setting.line)
    for number, label in enumerate(lines):
        points = results.points(label, str(panel.values))
        if not points:
            continue
        x = [place * 1.04**number for place in points]  # bars at the same place would overlap
        median = [each.median for each in points.values()]
        low = [each.median - each.min for each in points.values()]
        high = [each.max - each.median for each in points.values()]
        style: Any = {"color": COLORS[number], "marker": MARKERS[number], "lw": 1.6, "ms": 5, "capsize": 3}
        axes.errorbar(x, median, yerr=[low, high], **style)
        ends[label] = (x[-1], median[-1], COLORS[number])
    if results.baseline is not None:
        axes.axhline(results.baseline, color=_GREY, lw=0.8, ls=":")
        axes.text(
            0.01,
            results.baseline,
            "raw pixels",
            fontsize=8,
            color=_GREY,
            transform=axes.get_yaxis_transform(),
        )
    name_ends(axes, ends)


def draw_dots(axes: Axes, results: Results, panel: Panel) -> None:
    """Draw one row per setting from the top: every seed as a dot, the median as a bar with its value."""
    samples: Mapping[str, SeedValues] = results.by_label(str(panel.values))
    grey: dict[str, Any] = {"fontsize": 8, "color": _GREY}
    for row, sample in enumerate(samples.values()):
        color, marker = COLORS[row % len(COLORS)], MARKERS[row % len(MARKERS)]
        if not sample.values:
            axes.text(0.02, row, "no run yet", va="center", transform=axes.get_yaxis_transform(), **grey)
            continue
        axes.plot([sample.min, sample.max], [row, row], color=color, lw=2, alpha=0.4)
        axes.plot(sample.values, [row] * len(sample.values), marker, color=color, ms=5, alpha=0.65, mew=0)
        axes.plot([sample.median], [row], "|", color=color, ms=16, mew=2.2)
        _annotate(axes, f"{sample:.3f}", (sample.median, row), (0, 9), color, fontsize=8, ha="center")
    if panel.values == "knn_top1" and results.baseline is not None:
        axes.axvline(results.baseline, color=_GREY, lw=0.8, ls=":")
        at = axes.get_xaxis_transform()
        axes.text(results.baseline, 0.99, " raw pixels", va="top", transform=at, **grey)
    is_first = axes.get_subplotspec().is_first_col()  # pyright: ignore[reportOptionalMemberAccess]
    is_named = is_first or len(results.figure.panels) == 2
    axes.set_yticks(range(len(samples)), list(samples) if is_named else [""] * len(samples))
    axes.set_ylim(len(samples) - 0.5, -0.9)
    axes.margins(x=0.15)


def draw_curves(axes: Axes, results: Results, panel: Panel) -> None:
    """Draw the median over seeds with a band over the range; rolled-back attempts are thin lines."""
    ends, given = {}, panel.values
    drawn = results.curves_by_label(given) if isinstance(given, str) else given(results)
    for label, own in drawn.items():
        color = COLORS[list(results.labels.values()).index(label) % len(COLORS)]
        last_attempt = {curve.seed: curve.attempt for curve in own}
        kept = [curve for curve in own if curve.attempt == last_attempt[curve.seed]]
        for curve in own:
            if curve not in kept:
                axes.plot(getattr(curve, panel.over), curve.values, color=color, lw=0.7, alpha=0.6)
        x, values = _common_points(kept, panel.over)
        if not len(x):
            continue
        median = np.median(values, axis=0)
        axes.plot(x, median, color=color, lw=1.6)
        axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, lw=0)
        ends[label] = (x[-1], float(median[-1]), color)
    if panel.is_log:
        axes.set_yscale("log")
    if panel.over == "samples":
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e3:g}")
    name_ends(axes, ends)


_DRAW = {"lines": draw_lines, "dots": draw_dots, "curves": draw_curves}


def _common_points(
    curves: Sequence[MetricCurve], over: str
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the x that all curves share, and their values there [num_curves, num_points]."""
    maps = [dict(zip(getattr(curve, over), curve.values, strict=True)) for curve in curves]
    common = sorted(set.intersection(*map(set, maps))) if maps else []
    return np.array(common), np.array([[values[x] for x in common] for values in maps])


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
