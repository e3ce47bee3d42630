"""The drawings of a report by section: what is drawn, under which title, and how to read it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from raycl.embedding_snapshot import EmbeddingSnapshot
from raycl.report.curves import Axis, Curve, Timeline, draw_curves, draw_shares
from raycl.report.embeddings import (
    draw_map,
    draw_similarities,
    place_on_map,
    told,
)
from raycl.report.history import History, Series
from raycl.report.run import Run
from raycl.training.collapse_monitor import Limits


@final
@dataclass(frozen=True, kw_only=True)
class Figure:
    """A drawing with its title and a sentence on how to read it."""

    title: str
    drawing: Markup = Markup()
    caption: str = ""


MAPPED = 400  # embeddings, since the time that t-SNE takes grows with them
JUDGMENTS = {
    "knn_top1": "kNN top-1 accuracy",
    "recall_at_10": "recall@10",
    "recall_at_1": "recall@1",
}


def course_of(run: Run) -> Timeline:
    """Return where the stages of a run begin, as far as it came, and what happened."""
    stage = run.history["stage"].kept()
    starts = [
        float(stage.step[stage.value == number][0])
        for number in np.unique(stage.value[~np.isnan(stage.value)])
    ]
    return Timeline(stage_starts=tuple(int(start) for start in starts), events=tuple(run.history.events))


def batch_sizes(run: Run) -> Series:
    """Return the rows of a step, over the run."""
    stage = run.history["stage"]
    sizes = np.array([stage.batch_size for stage in run.config.stages], np.float64)
    number = np.clip(np.nan_to_num(stage.value), 0, len(sizes) - 1).astype(np.int64)
    return replace(stage, value=sizes[number])


def learning(run: Run) -> list[Figure]:
    """Return loss, judgments, learning rate and batch size."""
    course, history = course_of(run), run.history
    found = []
    if history.has("loss"):
        found.append(
            _figure(history, "loss", "Loss", Axis(unit="loss", may_be_log=True), course, "lower is better")
        )
    judged = [(name, text) for name, text in JUDGMENTS.items() if history.has(name)]
    if judged:
        found.append(_judgments(history, judged, course))
    if history.has("learning_rate"):
        axis = Axis(unit="learning rate", from_zero=True)
        found.append(_figure(history, "learning_rate", "Learning rate", axis, course))
    if history.has("stage"):
        curve = Curve(series=batch_sizes(run))
        axis = Axis(unit="rows a step, all workers", stairs=True, from_zero=True)
        drawing = draw_curves([curve], axis, label="Batch size over the steps", course=course)
        found.append(Figure(title="Batch size", drawing=drawing, caption=""))
    return found


def _judgments(history: History, judged: Sequence[tuple[str, str]], course: Timeline) -> Figure:
    curves = [
        Curve(series=history[name], label=text, style=number) for number, (name, text) in enumerate(judged)
    ]
    title = judged[0][1] if len(judged) == 1 else "Recall of held-out pairs"
    drawing = draw_curves(
        curves, Axis(unit="of held-out rows", percent=True), label=f"{title} over the steps", course=course
    )
    kept = history[judged[0][0]].kept()
    good = ~np.isnan(kept.value)
    if not good.any():
        return Figure(title=title, drawing=drawing)
    best = int(np.nanargmax(kept.value))
    caption = (
        f"best {kept.value[best]:.1%} at step {int(kept.step[best]):,}, last {kept.last:.1%}, "
        f"first {kept.value[good][0]:.1%}"
    )
    return Figure(title=title, drawing=drawing, caption=caption)


def measures(run: Run) -> list[Figure]:
    """Return what tells a healthy run from a collapsed one."""
    course, history, limits = course_of(run), run.history, Limits()
    found = []
    ranks = np.minimum(history["num_rows"].last or 1.0, history["dim"].last or 1.0)
    for name, title, axis, caption in (
        (
            "positive_negative_gap",
            "Gap of positives and other pairs",
            Axis(unit="difference of cosines", healthy_from=limits.min_gap),
            "mean cosine of positives minus that of all other pairs",
        ),
        (
            "effective_rank",
            "Effective rank",
            Axis(unit="dims in use", healthy_from=float(ranks) ** limits.min_effective_rank, from_zero=True),
            f"how many dims the embeddings fill, of {ranks:g} at most",
        ),
        (
            "spread",
            "Spread",
            Axis(unit="1: all over the sphere", healthy_from=limits.min_spread, from_zero=True),
            "0 is one point",
        ),
        (
            "alignment",
            "Alignment",
            Axis(unit="squared distance", from_zero=True),
            "of positives; lower is closer",
        ),
        (
            "uniformity",
            "Uniformity",
            Axis(unit="log of a mean"),
            "lower is more evenly spread; 0 is one point",
        ),
        (
            "leakage",
            "BatchNorm leakage",
            Axis(unit="advantage"),
            "how much easier the task is with shared statistics; up to 0.05 is none",
        ),
    ):
        if history.has(name):
            found.append(_figure(history, name, title, axis, course, caption))
    return found


_LEAST_SHOWN = 0.001  # of the training time

# What people see of a step's phases, from the bottom up; what is in none of them is the rest.
_PARTS = {
    "encoder": ("forward", "keys"),
    "backward": ("backward",),
    "loss": ("loss",),
    "messages": ("messages",),
    "views": ("views",),
    "wait for data": ("data_wait",),
    "bank": ("store",),
}


def pace(run: Run) -> list[Figure]:
    """Return samples a second, where the time goes, and how old the rows of a queue or bank are."""
    course, history = course_of(run), run.history
    found = []
    if history.has("samples_per_second"):
        axis = Axis(unit="samples/s", from_zero=True)
        found.append(_figure(history, "samples_per_second", "Throughput", axis, course, "over all workers"))
    if history.has("data_wait_fraction") and not np.isnan(history["data_wait_fraction"].kept().value).all():
        found.append(_shares(history, course))
    if history.has("negatives_age_max"):
        curves = [
            Curve(series=history["negatives_age_mean"], label="mean"),
            Curve(series=history["negatives_age_max"], label="oldest", style=1),
        ]
        drawing = draw_curves(
            curves,
            Axis(unit="age in steps", from_zero=True),
            label="Age of the rows of the queue or bank, in steps, over the steps",
            course=course,
        )
        caption = "how many steps ago the negatives were embedded: older ones come from an older encoder"
        found.append(Figure(title="Staleness of the negatives", drawing=drawing, caption=caption))
    return found


def _shares(history: History, course: Timeline) -> Figure:
    whole = history["data_wait_fraction"].kept()
    parts = []
    for name, phases in _PARTS.items():
        value = sum((_at_steps(history[f"{each}_fraction"].kept(), whole) for each in phases), np.zeros(1))
        if value.max() >= _LEAST_SHOWN:
            parts.append((name, np.clip(value, 0, 1)))
    rest = np.clip(1 - sum((value for _, value in parts), np.zeros(len(whole.step))), 0, 1)
    parts.append(("all else" if len(parts) > 2 else "the step itself", rest))
    shares = [
        (name, Series(step=whole.step, samples=whole.samples, value=value, is_dropped=whole.is_dropped))
        for name, value in parts
    ]
    drawing = draw_shares(shares, label="Shares of the training time over the steps", course=course)
    told = sorted(((value.mean(), name) for name, value in parts), reverse=True)
    caption = ", ".join(f"{name} {share:.1%}" for share, name in told)
    return Figure(title="Where the time goes", drawing=drawing, caption=caption)


def _at_steps(series: Series, whole: Series) -> np.ndarray:
    """Return the values at the steps of another figure, 0 where there is none."""
    found = dict(zip(series.step.tolist(), np.nan_to_num(series.value).tolist(), strict=True))
    return np.array([found.get(step, 0.0) for step in whole.step.tolist()])


def similarities(run: Run) -> list[Figure]:
    """Return the histograms before training and now."""
    found = []
    for when, portrait in portraits_of(run):
        figures = told(portrait.similarities)
        if figures is None:
            continue
        drawing = draw_similarities(
            portrait.similarities, label=f"Histogram of cosines {when}: positives and other pairs"
        )
        caption = (
            f"positives {figures.positives:.2f} on average, other pairs {figures.negatives:.2f}; a positive is the "
            f"nearer of the two in {figures.nearer:.1%} of cases"
        )
        found.append(Figure(title=f"Cosines {when}", drawing=drawing, caption=caption))
    return found


def maps(run: Run) -> list[Figure]:
    """Return the maps before training and now, colored by label, or by side for pairs."""
    found = []
    for when, portrait in portraits_of(run):
        points, title = _points(run, portrait), f"Map {when}"
        places = place_on_map(points.rows)
        lost = f"; {points.num_lost:,} that were no numbers are left out" if points.num_lost else ""
        if places is None:
            found.append(Figure(title=title, caption=f"all embeddings are nearly one point: no map{lost}"))
            continue
        what = "by label" if points.named else "by side" if portrait.key is not None else ""
        label = f"{title}: {len(points.rows)} embeddings {what}".strip()
        drawing = draw_map(places, points.groups, label=label, named=points.named)
        found.append(
            Figure(title=title, drawing=drawing, caption=f"{len(points.rows):,} embeddings {what}{lost}")
        )
    return found


def portraits_of(run: Run) -> list[tuple[str, EmbeddingSnapshot]]:
    """Return the portraits there are, with the time of each in words."""
    found = []
    if run.first is not None:
        found.append(("before training", run.first))
    if run.latest is not None:
        found.append((f"at step {run.latest.step:,}", run.latest))
    return found


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class _Points:
    """Embeddings to be mapped and the group of each; ``named`` if groups are labels."""

    rows: NDArray[np.float32]
    groups: list[str]
    named: bool
    num_lost: int


def _points(run: Run, portrait: EmbeddingSnapshot) -> _Points:
    """Return what a map shows: some of the samples, of pairs both sides."""
    assert run.gallery is not None, "a portrait has samples"
    num_sides = 1 if portrait.key is None else 2
    chosen = np.arange(len(portrait.embedding))[: MAPPED // num_sides]
    labels = run.gallery.label[chosen].tolist()
    named = portrait.key is None and any(label >= 0 for label in labels)
    if portrait.key is None:
        rows = portrait.embedding[chosen]
        groups = [run.class_name(label) if label >= 0 else "no label" for label in labels]
    else:
        rows = np.concatenate([portrait.embedding[chosen], portrait.key[chosen]])
        sides = ("query", "document") if "document" in run.gallery.contents else ("image", "caption")
        groups = [side for side in sides for _ in labels]
    sound = np.asarray(np.isfinite(rows).all(1))
    return _Points(
        rows=rows[sound].astype(np.float32),
        groups=[group for group, good in zip(groups, sound, strict=True) if good],
        named=named,
        num_lost=int((~sound).sum()),
    )


def _figure(
    history: History, name: str, title: str, axis: Axis, course: Timeline, caption: str = ""
) -> Figure:
    series = history[name]
    drawing = draw_curves([Curve(series=series)], axis, label=f"{title} over the steps", course=course)
    if series.num_bad:
        bad = f"{series.num_bad:,} of {len(series.value):,} values were no number (marked by crosses)"
        caption = f"{caption}; {bad}" if caption else bad
    return Figure(title=title, drawing=drawing, caption=caption)
