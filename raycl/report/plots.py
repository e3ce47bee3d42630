"""SVG drawings of a report: curves over the steps of a run, with its stages as bands and its events as marks.

Matplotlib draws with placeholder colors, which are replaced by variables of the page's style, so that drawings
follow the page from light to dark. The hues are the palette of Okabe and Ito, which color-blind readers can
distinguish.
"""

import io
import re
import string
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import matplotlib as mpl
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from raycl.records import ROLLBACK
from raycl.report.history import Event, Floats, Series

NUM_HUES = 8
HUES = tuple(f"#a1b2{number:02x}" for number in range(NUM_HUES))  # placeholders for --hue-0 to --hue-7
INK, MUTED, LINE, PAPER, BAND, WARNING = (f"#a1b3{number:02x}" for number in range(6))
_VARIABLES = {color: f"--hue-{number}" for number, color in enumerate(HUES)} | {
    INK: "--ink",
    MUTED: "--muted",
    LINE: "--line",
    PAPER: "--card",
    BAND: "--band",
    WARNING: "--warning",
}
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
SVG_DASHES = ("", "5 2", "1.5 1.5", "6 2 1.5 2")
NUM_STYLES = NUM_HUES * len(DASHES)
MARKERS = "os^Dv<>pP*"
_WIDTH, _HEIGHT = 380, 236  # in the units of the viewBox: pixels on a phone
_STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 12,
    "axes.titlesize": 12,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-4, 6),
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 11.5,
    "legend.labelcolor": INK,
}
MAX_POINTS = 320  # of a curve: about one per pixel
_MAX_MARKED = 40  # points of a curve that each get a mark
_LOG_RATIO = 50  # between largest and smallest value, from which on the axis is logarithmic
_LETTERS = string.ascii_uppercase
_SERIOUS = ("collapse", ROLLBACK)  # kinds of events


@final
class Drawing:
    """A drawing in progress: within ``with``, matplotlib uses the page's style; ``label`` describes it in words."""

    def __init__(self, label: str, *, height: int = _HEIGHT) -> None:
        self._label, self._size = label, (_WIDTH / 72, height / 72)
        # The label is the salt, so that two drawings never share the name of a shape.
        self._context = mpl.rc_context({**_STYLE, "svg.hashsalt": label})

    def __enter__(self) -> "Drawing":
        self._context.__enter__()
        self._figure = Figure(figsize=self._size, layout="constrained")
        FigureCanvasSVG(self._figure)
        self.axes: Axes = self._figure.add_subplot()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def to_svg(self) -> Markup:
        """Return the drawing as an element of a page."""
        stream = io.StringIO()
        with warnings.catch_warnings():
            # A page writes text as text, so the reader's font draws it.
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            # With a layout engine, savefig draws twice: once only to find the layout.
            engine = self._figure.get_layout_engine()
            assert engine is not None, "a drawing is laid out by constraints"
            engine.execute(self._figure)
            self._figure.set_layout_engine(None)
            self._figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
        svg = stream.getvalue()
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>", "", svg, flags=re.DOTALL)
        svg = re.sub(r"<[^<>]*>", _restyled, svg)  # only tags: the text between them is a user's
        svg = re.sub(r"\n\s*", "\n", svg)
        view = re.search(r'viewBox="([^"]*)"', svg)
        assert view is not None, "matplotlib writes the size of a drawing"
        head = f'<svg viewBox="{view[1]}" role="img" aria-label="{escape(self._label)}" '
        return Markup(head + 'xmlns:xlink="http://www.w3.org/1999/xlink"' + svg[svg.index(">") :])


def _restyled(tag: re.Match[str]) -> str:
    text = re.sub(r'<g id="[^"]*"', "<g", tag[0])
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = re.sub(r"font: (?:[a-z0-9]+ )*([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r"(\.\d\d)\d+", r"\1", text)  # a hundredth of a pixel is enough
    return re.sub(r"#a1b[23][0-9a-f]{2}", lambda found: f"var({_VARIABLES[found[0]]})", text)


@final
@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a drawing; the same ``style`` is the same color and dashes everywhere."""

    series: Series
    label: str = ""
    style: int = 0


@final
@dataclass(frozen=True)
class Plot:
    """The title of a drawing, the unit of its values, and how they are drawn, over ``step`` or ``samples``.

    Values from ``healthy_from`` on are healthy; ``caption`` explains how to read the drawing.
    """

    title: str
    unit: str
    caption: str = ""
    over: str = "step"
    percent: bool = False
    may_be_log: bool = False
    stairs: bool = False
    from_zero: bool = False
    healthy_from: float | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The background of all curves of a run: the number of each stage, from 0, with its first step, and the events."""

    stages: tuple[tuple[int, int], ...] = ()
    events: tuple[Event, ...] = ()

    def lettered(self) -> list[tuple[str, Event]]:
        """Return all events with their letters; if there are too many, the most serious ones get a letter."""
        by_weight = sorted(self.events, key=lambda event: event.kind not in _SERIOUS)
        marked = {id(event) for event in by_weight[: len(_LETTERS)]}
        letters = iter(_LETTERS)
        return [(next(letters) if id(event) in marked else "", event) for event in self.events]


_NO_TIMELINE = Timeline()


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class DownsampledCurve:
    """Mean, minimum and maximum of the values in each column of a drawing.

    ``is_whole`` says that every point of the curve has its own column.
    """

    x: Floats
    low: Floats
    mean: Floats
    high: Floats
    is_whole: bool


def downsample(x: Floats, value: Floats, *, columns: int = MAX_POINTS) -> DownsampledCurve:
    """Reduce a curve to columns of equal width without losing an extreme value; NaN is skipped."""
    good = ~np.isnan(value) & ~np.isnan(x)
    if good.sum() <= 2 * columns:
        return DownsampledCurve(x=x, low=value, mean=value, high=value, is_whole=True)  # gaps stay gaps
    x, value = x[good], value[good]
    span = max(float(x.max() - x.min()), 1e-9)
    column = np.minimum(((x - x.min()) / span * columns).astype(np.int64), columns - 1)
    order = np.argsort(column, kind="stable")
    _, starts = np.unique(column[order], return_index=True)
    sizes = np.diff([*starts, len(order)])
    x, value = x[order], value[order]
    return DownsampledCurve(
        x=np.add.reduceat(x, starts) / sizes,
        low=np.minimum.reduceat(value, starts),
        mean=np.add.reduceat(value, starts) / sizes,
        high=np.maximum.reduceat(value, starts),
        is_whole=False,
    )


def draw_curves(
    curves: Sequence[Curve], plot: Plot, *, label: str, timeline: Timeline = _NO_TIMELINE
) -> Markup:
    """Return a drawing of one or more curves; ``label`` describes it in words."""
    with Drawing(label) as drawing:
        _set_up(drawing.axes, plot, curves)
        for curve in curves:
            _draw_curve(drawing.axes, curve, plot)
        if plot.healthy_from is not None:
            _draw_limit(drawing.axes, plot.healthy_from)
        _draw_timeline(drawing.axes, timeline)
        if any(curve.label for curve in curves) and len(curves) > 1:
            drawing.axes.legend(loc="best", handlelength=2.4)
        return drawing.to_svg()


def draw_shares(
    parts: Sequence[tuple[str, Series]], *, label: str, timeline: Timeline = _NO_TIMELINE
) -> Markup:
    """Return the parts of a whole, stacked from the bottom up; all parts have the same steps."""
    curves = [downsample(series.step, series.value) for _, series in parts]
    x, values = curves[0].x, [np.nan_to_num(curve.mean) for curve in curves]
    with Drawing(label) as drawing:
        axes = drawing.axes
        _set_up(axes, Plot(title="", unit="share of training time", percent=True), [])
        if len(x) == 1:  # a point becomes as wide as a step
            x, values = np.array([x[0] - 0.5, x[0] + 0.5]), [np.repeat(value, 2) for value in values]
        style: dict[str, Any] = {"colors": list(HUES[: len(parts)]), "labels": [name for name, _ in parts]}
        axes.stackplot(x, *values, linewidth=0, **style)
        axes.set_ylim(0, 1)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, handlelength=1.2)
        _draw_timeline(axes, timeline)
        return drawing.to_svg()


def _set_up(axes: Axes, plot: Plot, curves: Sequence[Curve]) -> None:
    axes.set_xlabel(plot.over)
    axes.set_ylabel(plot.unit)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(_short)
    values = np.concatenate([np.empty(0), *(curve.series.value for curve in curves)])
    values = values[np.isfinite(values)]
    is_positive = len(values) > 0 and values.min() > 0
    if plot.may_be_log and is_positive and values.max() > _LOG_RATIO * values.min():
        axes.set_yscale("log")
        return
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    if plot.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif len(values) and np.abs(values).max() >= 10_000:
        axes.yaxis.set_major_formatter(_short)
    if plot.from_zero and len(values):
        axes.set_ylim(0, max(values.max() * 1.08, 1e-9))


def _draw_curve(axes: Axes, curve: Curve, plot: Plot) -> None:
    color, dashes = HUES[curve.style % NUM_HUES], DASHES[curve.style // NUM_HUES % len(DASHES)]
    kept, dropped = curve.series.kept(), curve.series.dropped()
    if len(dropped.value):
        points = downsample(_x(dropped, plot), dropped.value)
        axes.plot(points.x, points.mean, color=MUTED, linewidth=1.0, linestyle=(0, (1, 1.5)))
    x = _x(kept, plot)
    points = downsample(x, kept.value)
    if not points.is_whole:
        axes.fill_between(points.x, points.low, points.high, color=color, alpha=0.25, linewidth=0)
    style: dict[str, Any] = {"drawstyle": "steps-post"} if plot.stairs else {}
    if len(points.x) <= _MAX_MARKED and (not plot.stairs or len(points.x) == 1):
        style |= {"marker": "o", "markersize": 3.2}
    axes.plot(points.x, points.mean, color=color, linestyle=dashes, label=curve.label or "_", **style)
    bad = x[np.isnan(kept.value)][:MAX_POINTS]
    if len(bad):
        transform = axes.get_xaxis_transform()
        axes.plot(bad, np.full(len(bad), 0.04), "x", color=WARNING, transform=transform, markersize=5)


def _draw_limit(axes: Axes, limit: float) -> None:
    # A label outside the axes would shrink them.
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, limit), max(high, 1.08 * limit))
    axes.axhline(limit, color=WARNING, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.annotate(
        "healthy above",
        (1, limit),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=11,
        color=WARNING,
    )


def _draw_timeline(axes: Axes, timeline: Timeline) -> None:
    top: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "fontsize": 11}
    has_later = any(number for number, _ in timeline.stages)
    stages = timeline.stages if has_later else ()
    ends = [*(start for _, start in stages[1:]), axes.get_xlim()[1]]
    for (number, start), end in zip(stages, ends, strict=False):
        if number % 2:
            axes.axvspan(start, max(start, end), color=BAND, linewidth=0, zorder=0)
        axes.text(start, 1.01, f" stage {number + 1}", color=MUTED, va="bottom", **top)
    for letter, event in timeline.lettered():
        if letter:
            color = MUTED if event.kind == "workers" else WARNING
            axes.axvline(event.step, color=color, linewidth=1.0, linestyle=(0, (3, 2)))
            axes.text(event.step, 0.98, f" {letter}", color=INK, va="top", weight="bold", **top)


def _x(series: Series, plot: Plot) -> Floats:
    return series.samples if plot.over == "samples" else series.step


def _short(value: float, _: Any = None) -> str:
    """Return a number as an axis shows it: 12k, 1.5M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:g}"
