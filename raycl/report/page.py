"""The page: one file of HTML without any script, that asks nobody for anything."""

from collections import Counter
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from raycl.errors import ConfigError
from raycl.report import figures
from raycl.report.curves import NUM_STYLES, Axis, Curve, draw_curves
from raycl.report.figures import JUDGMENTS, Figure
from raycl.report.neighbors import neighborhoods, right_fraction
from raycl.report.notes import Note, remarks
from raycl.report.run import Run
from raycl.report.tables import broken_rows, differing_settings, facts, final_figures
from raycl.report.theme import DASHES, NUM_HUES

_COMPARED = (
    ("loss", "Loss", Axis(unit="loss", may_be_log=True)),
    ("knn_top1", "kNN top-1 accuracy", Axis(unit="of held-out rows", percent=True)),
    ("recall_at_10", "Recall@10 of held-out pairs", Axis(unit="of held-out pairs", percent=True)),
    ("recall_at_1", "Recall@1 of held-out pairs", Axis(unit="of held-out pairs", percent=True)),
    ("learning_rate", "Learning rate", Axis(unit="learning rate", from_zero=True)),
    ("positive_negative_gap", "Gap of positives and other pairs", Axis(unit="difference of cosines")),
    ("effective_rank", "Effective rank", Axis(unit="dims in use", from_zero=True)),
    ("spread", "Spread", Axis(unit="1: all over the sphere", from_zero=True)),
    ("samples_per_second", "Throughput", Axis(unit="samples/s", from_zero=True)),
    ("data_wait_fraction", "Waiting for data", Axis(unit="share of training time", percent=True)),
    ("negatives_age_mean", "Staleness of the negatives", Axis(unit="mean age in steps", from_zero=True)),
)


def page_of(run: Run) -> str:
    """Return the page of one run."""
    return _render("run.html.jinja", title=run.name, **_content(run))


def comparison_of(runs: Sequence[Run]) -> str:
    """Return a page with the curves of several runs over each other; raises ``ConfigError`` for too many."""
    if len(runs) > NUM_STYLES:
        raise ConfigError(
            f"{len(runs)} runs are more than the {NUM_STYLES} that colors and dashes tell apart; give fewer"
        )
    title = f"{len(runs)} runs compared"
    return _render(
        "comparison.html.jinja",
        title=title,
        runs=[
            {
                "name": run.name,
                "address": run.address,
                "status": run.status,
                "style": style,
                "notes": _bad(run),
            }
            for style, run in enumerate(runs)
        ],
        over=_over(runs),
        figures=_compared(runs),
        final=final_figures(runs),
        settings=differing_settings(runs),
        hues=NUM_HUES,
        dashes=["", "5 2", "1.5 1.5", "6 2 1.5 2"][: len(DASHES)],
    )


def _content(run: Run) -> dict[str, Any]:
    gallery = run.gallery
    found = [] if gallery is None else neighborhoods(gallery, run.first, run.latest, run.class_name)
    right = {
        "before": None if gallery is None or run.first is None else right_fraction(gallery, run.first),
        "now": None if gallery is None or run.latest is None else right_fraction(gallery, run.latest),
    }
    return {
        "run": run,
        "remarks": remarks(run),
        "facts": facts(run),
        "headline": _headline(run),
        "learning": figures.learning(run),
        "similarities": figures.similarities(run),
        "measures": figures.measures(run),
        "pace": figures.pace(run),
        "maps": [] if gallery is None else figures.maps(run),
        "events": figures.course_of(run).lettered(),
        "broken": broken_rows(run),
        "neighborhoods": found,
        "right": right,
        "of_pairs": run.config.has_two_towers,
        "step_now": None if run.latest is None else run.latest.step,
    }


def _headline(run: Run) -> list[tuple[str, str, str]]:
    """Return the few figures that people ask for first: name, value, and what it was at the start."""
    found = []
    for name, text in JUDGMENTS.items():
        kept = run.history[name].kept()
        good = kept.value[~np.isnan(kept.value)]
        if len(good):
            found.append((text, f"{good[-1]:.1%}", f"{good[0]:.1%} at first" if len(good) > 1 else ""))
    kept = run.history["loss"].kept()
    good = kept.value[~np.isnan(kept.value)]
    if len(good):
        found.append(("loss", f"{good[-1]:.4g}", f"{good[0]:.4g} at first" if len(good) > 1 else ""))
    pace = run.history["samples_per_second"].kept().value
    pace = pace[~np.isnan(pace)]
    if len(pace):
        found.append(("samples/s", f"{np.median(pace):,.0f}", "median"))
    return found


def _bad(run: Run) -> list[Note]:
    return [remark for remark in remarks(run) if remark.is_bad or run.status != "finished"][:2]


def _over(runs: Sequence[Run]) -> str:
    """Runs of unlike batches are compared over the samples that they have seen."""
    sizes = {tuple(stage.batch_size for stage in run.config.stages) for run in runs}
    return "step" if len(sizes) == 1 else "samples"


def _compared(runs: Sequence[Run]) -> list[Figure]:
    over, found = _over(runs), []
    for name, title, axis in _COMPARED:
        curves = [
            Curve(series=run.history[name].kept(), style=style)
            for style, run in enumerate(runs)
            if run.history.has(name)
        ]
        if not curves:
            continue
        names = [run.name for run in runs if run.history.has(name)]
        label = (
            f"{title} over the {over}s seen, {len(curves)} runs" if over == "sample" else f"{title} by {over}"
        )
        drawing = draw_curves(curves, Axis(**{**vars(axis), "over": over}), label=label)
        left_out = "" if len(names) == len(runs) else f"not logged by {len(runs) - len(names)} of the runs"
        found.append(Figure(title=title, drawing=drawing, caption=left_out))
    return found


def distinct_names(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run that no other one has: as little of its address as that takes."""
    counts = Counter(run.name for run in runs)
    return [run.name if counts[run.name] == 1 else run.address for run in runs]


def _render(name: str, **values: Any) -> str:
    # Names, labels, texts and errors are a user's: each is escaped, unless it is a drawing of ours.
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = Markup(_template("style.css"))
    return environment.get_template(name).render(style=style, **values)


def _template(name: str) -> str:
    return resources.files("raycl.report").joinpath("templates", name).read_text("utf-8")
