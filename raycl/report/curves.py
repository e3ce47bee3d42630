"""Curves over the steps of a run, with its stages as bands and its events as marks."""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from raycl.records import ROLLBACK
from raycl.report.drawing import BAND, DASHES, HUES, INK, MUTED, NUM_HUES, WARNING, Drawing
from raycl.report.history import Event, Floats, Series

MAX_POINTS = 320  # of a curve: about one per pixel
_MAX_MARKED = 40  # points of a curve that each get a mark
_LOG_RATIO = 50  # between largest and smallest value, from which on the axis is logarithmic
_LETTERS = string.ascii_uppercase
_SERIOUS = ("collapse", ROLLBACK)  # kinds of events


@final
@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a drawing; the same ``style`` is the same color and dashes everywhere."""

    series: Series
    label: str = ""
    style: int = 0


@final
@dataclass(frozen=True, kw_only=True)
class Axis:
    """The unit of the values and how they are drawn, over ``step`` or ``samples``.

    Values from ``healthy_from`` on are healthy.
    """

    unit: str
    over: str = "step"
    percent: bool = False
    may_be_log: bool = False
    stairs: bool = False
    from_zero: bool = False
    healthy_from: float | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The background of all curves of a run: the steps at which its stages start, and its events."""

    stage_starts: tuple[int, ...] = ()
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
    curves: Sequence[Curve], axis: Axis, *, label: str, timeline: Timeline = _NO_TIMELINE
) -> Markup:
    """Return a drawing of one or more curves; ``label`` describes it in words."""
    with Drawing(label) as drawing:
        _set_up(drawing.axes, axis, curves)
        for curve in curves:
            _draw_curve(drawing.axes, curve, axis)
        if axis.healthy_from is not None:
            _draw_limit(drawing.axes, axis.healthy_from)
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
        _set_up(axes, Axis(unit="share of training time", percent=True), [])
        if len(x) == 1:  # a point becomes as wide as a step
            x, values = np.array([x[0] - 0.5, x[0] + 0.5]), [np.repeat(value, 2) for value in values]
        style: dict[str, Any] = {"colors": list(HUES[: len(parts)]), "labels": [name for name, _ in parts]}
        axes.stackplot(x, *values, linewidth=0, **style)
        axes.set_ylim(0, 1)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, handlelength=1.2)
        _draw_timeline(axes, timeline)
        return drawing.to_svg()


def _set_up(axes: Axes, axis: Axis, curves: Sequence[Curve]) -> None:
    axes.set_xlabel(axis.over)
    axes.set_ylabel(axis.unit)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(_short)
    values = np.concatenate([np.empty(0), *(curve.series.value for curve in curves)])
    values = values[np.isfinite(values)]
    is_positive = len(values) > 0 and values.min() > 0
    if axis.may_be_log and is_positive and values.max() > _LOG_RATIO * values.min():
        axes.set_yscale("log")
        return
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    if axis.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif len(values) and np.abs(values).max() >= 10_000:
        axes.yaxis.set_major_formatter(_short)
    if axis.from_zero and len(values):
        axes.set_ylim(0, max(values.max() * 1.08, 1e-9))


def _draw_curve(axes: Axes, curve: Curve, axis: Axis) -> None:
    color, dashes = HUES[curve.style % NUM_HUES], DASHES[curve.style // NUM_HUES % len(DASHES)]
    kept, dropped = curve.series.kept(), curve.series.dropped()
    if len(dropped.value):
        points = downsample(_x(dropped, axis), dropped.value)
        axes.plot(points.x, points.mean, color=MUTED, linewidth=1.0, linestyle=(0, (1, 1.5)))
    x = _x(kept, axis)
    points = downsample(x, kept.value)
    if not points.is_whole:
        axes.fill_between(points.x, points.low, points.high, color=color, alpha=0.25, linewidth=0)
    style: dict[str, Any] = {"drawstyle": "steps-post"} if axis.stairs else {}
    if len(points.x) <= _MAX_MARKED and (not axis.stairs or len(points.x) == 1):
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
    starts = timeline.stage_starts if len(timeline.stage_starts) > 1 else ()
    ends = [*starts[1:], axes.get_xlim()[1]]
    for number, (start, end) in enumerate(zip(starts, ends, strict=False)):
        if number % 2:
            axes.axvspan(start, max(start, end), color=BAND, linewidth=0, zorder=0)
        axes.text(start, 1.01, f" stage {number + 1}", color=MUTED, va="bottom", **top)
    for letter, event in timeline.lettered():
        if letter:
            color = MUTED if event.kind == "workers" else WARNING
            axes.axvline(event.step, color=color, linewidth=1.0, linestyle=(0, (3, 2)))
            axes.text(event.step, 0.98, f" {letter}", color=INK, va="top", weight="bold", **top)


def _x(series: Series, axis: Axis) -> Floats:
    return series.samples if axis.over == "samples" else series.step


def _short(value: float, _: Any = None) -> str:
    """Return a number as an axis shows it: 12k, 1.5M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:g}"
