"""Curves over the steps of a run, with its stages as bands and its events as marks."""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from raycl.records import ROLLBACK
from raycl.report.history import Event, Numbers, Series
from raycl.report.theme import BAND, DASHES, HUES, INK, LINE, MUTED, NUM_HUES, WARNING, Drawing

COLUMNS = 320  # into which a long curve is cut: about one a pixel
_FEW = 40  # points, each of which gets a mark
_LOG_FROM = 50  # times between the least and the greatest value
_LETTERS = string.ascii_uppercase
_WEIGHTY = ("collapse", ROLLBACK)  # events
NUM_STYLES = NUM_HUES * len(DASHES)


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
    """What is drawn over what: the unit of the values, and how they are shown.

    ``over`` is step or samples. Values from ``healthy_from`` on are good.
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
    """What all drawings of a run share: where its stages begin, and what happened."""

    stage_starts: tuple[int, ...] = ()
    events: tuple[Event, ...] = ()

    def lettered(self) -> list[tuple[str, Event]]:
        """Return all events with the letter of their mark; where there are many, only the weightiest have one."""
        weighty = sorted(self.events, key=lambda event: event.kind not in _WEIGHTY)[: len(_LETTERS)]
        marked = {id(event) for event in weighty}
        letters = iter(_LETTERS)
        return [(next(letters) if id(event) in marked else "", event) for event in self.events]


NO_COURSE = Timeline()


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class DownsampledCurve:
    """A curve in so few points that a drawing shows them all: the mean, and between what it moved."""

    x: Numbers
    low: Numbers
    mean: Numbers
    high: Numbers
    is_whole: bool  # each point is one of the curve's own


def envelope(x: Numbers, value: Numbers, *, columns: int = COLUMNS) -> DownsampledCurve:
    """Cut a curve into columns of equal width; no extreme value gets lost, NaN is left out."""
    good = ~np.isnan(value) & ~np.isnan(x)
    if good.sum() <= 2 * columns:
        # A gap stays a gap.
        return DownsampledCurve(x=x, low=value, mean=value, high=value, is_whole=True)
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


def draw_curves(curves: Sequence[Curve], axis: Axis, *, label: str, course: Timeline = NO_COURSE) -> Markup:
    """Return a drawing of one or more curves; ``label`` describes it in words."""
    with Drawing() as drawing:
        axes = drawing.figure.add_subplot()
        _set_up(axes, axis, curves)
        for curve in curves:
            _draw(axes, curve, axis)
        _draw_limit(axes, axis)
        _draw_course(axes, course)
        if any(curve.label for curve in curves) and len(curves) > 1:
            axes.legend(loc="best", handlelength=2.4)
        return drawing.svg(label=label)


def draw_shares(parts: Sequence[tuple[str, Series]], *, label: str, course: Timeline = NO_COURSE) -> Markup:
    """Return how a whole is shared out, from the bottom up; the parts lie at the same steps."""
    cut = [envelope(series.step, series.value) for _, series in parts]
    with Drawing() as drawing:
        axes = drawing.figure.add_subplot()
        _set_up(axes, Axis(unit="share of training time", percent=True), [])
        values = [np.nan_to_num(each.mean) for each in cut]
        if len(cut[0].x) == 1:
            axes.bar(cut[0].x, [1.0], width=0.5, color="none", edgecolor="none")
        colors = [HUES[number] for number in range(len(parts))]
        kind: dict[str, Any] = {"colors": colors, "labels": [name for name, _ in parts], "linewidth": 0}
        axes.stackplot(_widened(cut[0].x), *[_twice_if_alone(value) for value in values], **kind)
        axes.set_ylim(0, 1)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, handlelength=1.2)
        _draw_course(axes, course)
        return drawing.svg(label=label)


def _set_up(axes: Axes, axis: Axis, curves: Sequence[Curve]) -> None:
    axes.set_xlabel(axis.over)
    axes.set_ylabel(axis.unit)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(_short)
    values = np.concatenate([np.empty(0), *(curve.series.value for curve in curves)])
    values = values[np.isfinite(values)]
    is_positive = len(values) > 0 and values.min() > 0
    if axis.may_be_log and is_positive and values.max() > _LOG_FROM * values.min():
        axes.set_yscale("log")
        return
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    if axis.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif len(values) and np.abs(values).max() >= 10_000:
        axes.yaxis.set_major_formatter(_short)
    if axis.from_zero and len(values):
        axes.set_ylim(0, max(values.max() * 1.08, 1e-9))


def _draw(axes: Axes, curve: Curve, axis: Axis) -> None:
    color, dashes = HUES[curve.style % NUM_HUES], DASHES[curve.style // NUM_HUES % len(DASHES)]
    kept, dropped = curve.series.kept(), curve.series.dropped()
    if len(dropped.value):
        cut = envelope(_x_of(dropped, axis), dropped.value)
        axes.plot(cut.x, cut.mean, color=MUTED, linewidth=1.0, linestyle=(0, (1, 1.5)))
    x = _x_of(kept, axis)
    cut = envelope(x, kept.value)
    if not cut.is_whole:
        axes.fill_between(cut.x, cut.low, cut.high, color=color, alpha=0.25, linewidth=0)
    style: dict[str, Any] = {"drawstyle": "steps-post"} if axis.stairs else {}
    if len(cut.x) <= _FEW and (not axis.stairs or len(cut.x) == 1):
        style |= {"marker": "o", "markersize": 3.2}
    axes.plot(cut.x, cut.mean, color=color, linestyle=dashes, label=curve.label or "_", **style)
    bad = x[np.isnan(kept.value)][:COLUMNS]
    if len(bad):
        transform = axes.get_xaxis_transform()
        axes.plot(bad, np.full(len(bad), 0.04), "x", color=WARNING, transform=transform, markersize=5)


def _draw_limit(axes: Axes, axis: Axis) -> None:
    if axis.healthy_from is None:
        return
    # A limit outside the axes would take the room of the drawing for its name.
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, axis.healthy_from), max(high, 1.08 * axis.healthy_from))
    axes.axhline(axis.healthy_from, color=WARNING, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.annotate(
        "healthy above",
        (1, axis.healthy_from),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=11,
        color=WARNING,
    )


def _draw_course(axes: Axes, course: Timeline) -> None:
    right = axes.get_xlim()[1]
    top: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "fontsize": 11}
    edges = [*course.stage_starts, right]
    for number, start in enumerate(course.stage_starts if len(course.stage_starts) > 1 else ()):
        if number % 2:
            axes.axvspan(start, max(start, edges[number + 1]), color=BAND, linewidth=0, zorder=0)
        axes.text(start, 1.01, f" stage {number + 1}", color=MUTED, va="bottom", **top)
    for letter, event in course.lettered():
        if not letter:
            continue
        color = MUTED if event.kind == "workers" else WARNING
        axes.axvline(event.step, color=color, linewidth=1.0, linestyle=(0, (3, 2)))
        axes.text(event.step, 0.98, f" {letter}", color=INK, va="top", weight="bold", **top)


def _x_of(series: Series, axis: Axis) -> Numbers:
    return series.samples if axis.over == "samples" else series.step


def _short(value: float, _: Any = None) -> str:
    """Return a number as an axis shows it: 12k, 1.5M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:g}"


def _widened(x: Numbers) -> Numbers:
    return x if len(x) > 1 else np.array([x[0] - 0.5, x[0] + 0.5])


def _twice_if_alone(value: NDArray[np.float64]) -> Numbers:
    return value if len(value) > 1 else np.repeat(value, 2)


__all__ = [
    "LINE",
    "NO_COURSE",
    "NUM_STYLES",
    "Axis",
    "Curve",
    "Timeline",
    "draw_curves",
    "draw_shares",
    "envelope",
]
