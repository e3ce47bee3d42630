"""The sections of a report: the curves, histograms and maps of each, and how to read them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
from markupsafe import Markup

from raycl.report.history import Floats, History, Series
from raycl.report.plots import Curve, Plot, Timeline, draw_curves, draw_shares
from raycl.report.run import Run
from raycl.report.snapshots import draw_map, draw_similarities, project, summarize
from raycl.training.collapse_monitor import healthy_from

EVALUATION_METRICS = {
    "knn_top1": "kNN top-1 accuracy",
    "recall_at_10": "recall@10",
    "recall_at_1": "recall@1",
}
MAX_MAPPED = 400  # embeddings: the time of t-SNE grows with them
_MIN_SHARE = 0.001  # of the training time
# The phases of a step under the names that a reader knows, from the bottom up.
_PHASES = {
    "encoder": ("forward", "keys"),
    "backward": ("backward",),
    "loss": ("loss",),
    "messages": ("messages",),
    "views": ("views",),
    "wait for data": ("data_wait",),
    "bank": ("store",),
}


@final
@dataclass(frozen=True, kw_only=True)
class Panel:
    """A drawing with its title and a sentence on how to read it."""

    title: str
    drawing: Markup = Markup()
    caption: str = ""


PLOTS = {
    "loss": Plot("Loss", "loss", "lower is better", may_be_log=True),
    "knn_top1": Plot("kNN top-1 accuracy", "of held-out rows", percent=True),
    "recall_at_10": Plot("Recall@10 of held-out pairs", "of held-out pairs", percent=True),
    "recall_at_1": Plot("Recall@1 of held-out pairs", "of held-out pairs", percent=True),
    "learning_rate": Plot("Learning rate", "learning rate", from_zero=True),
    "grad_norm": Plot("Norm of the gradient", "L2 norm", "before clipping", from_zero=True),
    "guide_masked_fraction": Plot("Masked by the guide", "share of negatives", percent=True),
    "batch_size": Plot("Batch size", "rows per step, all workers", stairs=True, from_zero=True),
    "positive_negative_gap": Plot(
        "Gap of positives and other pairs",
        "difference of cosines",
        "mean cosine of positives minus the mean of all other pairs",
    ),
    "effective_rank": Plot("Effective rank", "dims in use", from_zero=True),
    "embedding_std": Plot("Standard deviation", "1: all over the sphere", "0 is one point", from_zero=True),
    "alignment": Plot("Alignment", "squared distance", "of positives; lower is closer", from_zero=True),
    "uniformity": Plot("Uniformity", "log of a mean", "lower is more evenly spread; 0 is one point"),
    "batchnorm_leakage": Plot(
        "BatchNorm leakage",
        "advantage",
        "how much easier the task is with shared statistics; up to 0.05 is noise",
    ),
    "samples_per_second": Plot("Throughput", "samples/s", "over all workers", from_zero=True),
    "data_wait_fraction": Plot("Waiting for data", "share of training time", percent=True),
    "negatives_age_mean": Plot(
        "Staleness of the negatives",
        "mean age in steps",
        "how many steps ago the negatives were embedded: older ones come from an older encoder",
        from_zero=True,
    ),
}
COMPARED = (
    "loss", "knn_top1", "recall_at_10", "recall_at_1", "learning_rate", "positive_negative_gap", "effective_rank",
    "embedding_std", "samples_per_second", "data_wait_fraction", "negatives_age_mean",
)  # fmt: skip

_COLLAPSE = (
    "positive_negative_gap", "effective_rank", "embedding_std", "alignment", "uniformity", "batchnorm_leakage",
)  # fmt: skip


def timeline_of(run: Run) -> Timeline:
    """Return the start of each stage with a logged step, and the events."""
    stage = run.history["stage"].kept()
    numbers = np.unique(stage.value[~np.isnan(stage.value)])
    stages = tuple((int(number), int(stage.step[stage.value == number][0])) for number in numbers)
    return Timeline(stages=stages, events=tuple(run.history.events))


def batch_sizes(run: Run) -> Series:
    """Return the rows per step over the run."""
    stage = run.history["stage"]
    sizes = np.array([stage.batch_size for stage in run.config.stages], np.float64)
    number = np.clip(np.nan_to_num(stage.value), 0, len(sizes) - 1).astype(np.int64)
    return replace(stage, value=sizes[number])


def learning_panels(run: Run) -> list[Panel]:
    """Return loss, evaluation, learning rate, and the batch size if it changes."""
    timeline, history = timeline_of(run), run.history
    panels = _plot_logged(history, timeline, ["loss"])
    evaluated = [name for name in EVALUATION_METRICS if history.has(name)]
    if evaluated:
        panels.append(_evaluation_panel(run, evaluated, timeline))
    panels += _plot_logged(history, timeline, ["learning_rate", "grad_norm", "guide_masked_fraction"])
    sizes = batch_sizes(run)
    if len(np.unique(sizes.value)) > 1:
        panels.append(_panel(PLOTS["batch_size"], [Curve(series=sizes)], timeline))
    return panels


def _plot_logged(history: History, timeline: Timeline, names: Sequence[str]) -> list[Panel]:
    """Return a panel for each of these metrics that was logged."""
    return [_plot(history[name], PLOTS[name], timeline) for name in names if history.has(name)]


def _plot(series: Series, plot: Plot, timeline: Timeline) -> Panel:
    if series.num_bad:
        count = f"{series.num_bad:,} of {len(series.value):,} values were not finite (marked by crosses)"
        plot = replace(plot, caption="; ".join(filter(None, [plot.caption, count])))
    return _panel(plot, [Curve(series=series)], timeline)


def _panel(plot: Plot, curves: Sequence[Curve], timeline: Timeline) -> Panel:
    drawing = draw_curves(curves, plot, label=f"{plot.title} over the steps", timeline=timeline)
    return Panel(title=plot.title, drawing=drawing, caption=plot.caption)


def _evaluation_panel(run: Run, names: Sequence[str], timeline: Timeline) -> Panel:
    history = run.history
    curves = [
        Curve(series=history[name], label=EVALUATION_METRICS[name], style=style)
        for style, name in enumerate(names)
    ]
    kept, caption = history[names[0]].kept(), ""
    if len(kept.finite):
        best = int(np.nanargmax(kept.value))
        caption = (
            f"best {kept.value[best]:.1%} at step {int(kept.step[best]):,}, last {kept.last:.1%}, "
            f"first {kept.finite[0]:.1%}"
        )
        if (baseline := history[f"baseline_{names[0]}"].last) is not None:
            caption += f", {run.config.baseline} {baseline:.1%}"
    title = EVALUATION_METRICS[names[0]] if len(names) == 1 else "Recall of held-out pairs"
    return _panel(Plot(title, "of held-out rows", caption, percent=True), curves, timeline)


def collapse_panels(run: Run) -> list[Panel]:
    """Return the metrics that distinguish a healthy run from a collapsed one."""
    history = run.history
    max_rank = min(history["num_rows"].last or 1.0, history["dim"].last or 1.0)
    limits = healthy_from(max_rank)
    captions = {"effective_rank": f"how many dims the embeddings fill, of {max_rank:g} at most"}
    panels = []
    for name in filter(history.has, _COLLAPSE):
        plot = PLOTS[name]
        caption = captions.get(name, plot.caption)
        plot = replace(plot, healthy_from=limits.get(name), caption=caption)
        panels.append(_plot(history[name], plot, timeline_of(run)))
    return panels


def speed_panels(run: Run) -> list[Panel]:
    """Return samples per second, the shares of the training time, and the age of a queue's or bank's rows, or of mined negatives."""
    timeline, history = timeline_of(run), run.history
    panels = _plot_logged(history, timeline, ["samples_per_second"])
    if len(history["data_wait_fraction"].finite):
        panels.append(_time_panel(history, timeline))
    if history.has("negatives_age_max"):
        plot = replace(PLOTS["negatives_age_mean"], unit="age in steps")
        curves = [
            Curve(series=history["negatives_age_mean"], label="mean"),
            Curve(series=history["negatives_age_max"], label="oldest", style=1),
        ]
        label = "Age of the stored or mined negatives, in steps, over the steps"
        drawing = draw_curves(curves, plot, label=label, timeline=timeline)
        panels.append(Panel(title=plot.title, drawing=drawing, caption=plot.caption))
    return panels


def _time_panel(history: History, timeline: Timeline) -> Panel:
    whole = history["data_wait_fraction"].kept()
    shares: dict[str, Floats] = {}
    rest = np.ones(len(whole.step))
    for name, phases in _PHASES.items():
        value = sum((_at_steps(history[f"{each}_fraction"].kept(), whole) for each in phases), np.zeros(1))
        if value.max() >= _MIN_SHARE:
            shares[name] = np.clip(value, 0, 1)
            rest = rest - shares[name]
    shares["all else" if len(shares) > 2 else "the step itself"] = np.clip(rest, 0, 1)
    parts = [(name, replace(whole, value=value)) for name, value in shares.items()]
    drawing = draw_shares(parts, label="Shares of the training time over the steps", timeline=timeline)
    means = sorted(((series.mean or 0.0, name) for name, series in parts), reverse=True)
    caption = ", ".join(f"{name} {mean:.1%}" for mean, name in means)
    return Panel(title="Training time by phase", drawing=drawing, caption=caption)


def _at_steps(series: Series, whole: Series) -> Floats:
    """Return the values at the steps of another metric, 0 where there is none."""
    found = dict(zip(series.step.tolist(), np.nan_to_num(series.value).tolist(), strict=True))
    return np.array([found.get(step, 0.0) for step in whole.step.tolist()])


def similarity_panels(run: Run) -> Iterator[Panel]:
    """Yield the histograms of cosines before training and now."""
    for when, snapshot in run.snapshots():
        summary = summarize(snapshot.similarities)
        if summary is None:
            continue
        label = f"Histogram of cosines {when}: positives and other pairs"
        caption = (
            f"positives {summary.positives:.2f} on average, other pairs {summary.negatives:.2f}; the positive is "
            f"closer in {summary.positive_is_closer:.1%} of cases"
        )
        drawing = draw_similarities(snapshot.similarities, label=label)
        yield Panel(title=f"Cosines {when}", drawing=drawing, caption=caption)


def map_panels(run: Run) -> Iterator[Panel]:
    """Yield the maps before training and now, colored by label, or by side for pairs."""
    probes = run.probes
    if probes is None:
        return
    for when, snapshot in run.snapshots():
        title = f"Map {when}"
        if snapshot.key is None:
            rows = snapshot.embedding[:MAX_MAPPED]
            labels = probes.label[:MAX_MAPPED].tolist()
            groups = [run.class_name(label) if label >= 0 else "no label" for label in labels]
            colored = "by label" if any(label >= 0 for label in labels) else ""
        else:
            rows = np.concatenate([side[: MAX_MAPPED // 2] for side in (snapshot.embedding, snapshot.key)])
            sides = ("query", "document") if "document" in probes.contents else ("image", "caption")
            groups = [side for side in sides for _ in range(len(rows) // 2)]
            colored = "by side"
        finite = np.asarray(np.isfinite(rows).all(1))
        skipped = f"; {(~finite).sum():,} that were not finite are skipped" if not finite.all() else ""
        points = project(rows[finite].astype(np.float32))
        if points is None:
            yield Panel(title=title, caption=f"all embeddings are nearly one point: no map{skipped}")
            continue
        drawing = draw_map(
            points,
            [group for group, good in zip(groups, finite, strict=True) if good],
            label=f"{title}: {len(points)} embeddings {colored}".strip(),
            named=colored == "by label",
        )
        yield Panel(title=title, drawing=drawing, caption=f"{len(points):,} embeddings {colored}{skipped}")


def compared_panels(runs: Sequence[Run], over: str) -> Iterator[Panel]:
    """Yield the curves of several runs in one drawing each, ``over`` step or samples; undone steps are skipped."""
    for name in COMPARED:
        plot = PLOTS[name]
        curves = [
            Curve(series=run.history[name].kept(), style=style)
            for style, run in enumerate(runs)
            if run.history.has(name)
        ]
        if curves:
            num_missing = len(runs) - len(curves)
            yield Panel(
                title=plot.title,
                drawing=draw_curves(curves, replace(plot, over=over), label=f"{plot.title} by {over}"),
                caption=f"not logged by {num_missing} of the runs" if num_missing else "",
            )
