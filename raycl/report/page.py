"""The page: one HTML file without scripts that loads nothing from elsewhere."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from raycl.errors import ConfigError
from raycl.report import sections
from raycl.report.notes import make_notes
from raycl.report.plots import NUM_HUES, NUM_STYLES, SVG_DASHES
from raycl.report.run import Run
from raycl.report.sections import EVALUATION_METRICS
from raycl.report.snapshots import NeighborSearch, QueryNeighbors, choose_queries
from raycl.report.tables import differing_settings, event_table, final_metrics, run_facts, skipped_rows


def render_run(run: Run) -> str:
    """Return the page of one run."""
    return _render(
        "run.html.jinja",
        title=run.name,
        run=run,
        notes=make_notes(run),
        facts=run_facts(run),
        headline=_headline(run),
        learning=sections.learning_panels(run),
        similarities=list(sections.similarity_panels(run)),
        collapse=sections.collapse_panels(run),
        speed=sections.speed_panels(run),
        maps=list(sections.map_panels(run)),
        events=event_table(run),
        skipped=skipped_rows(run),
        neighbors=query_neighbors(run),
        right={
            name: None if search is None else search.right_fraction()
            for name, search in _searches(run).items()
        },
        of_pairs=run.config.has_two_towers,
        step_now=None if run.latest is None else run.latest.step,
    )


def render_comparison(runs: Sequence[Run]) -> str:
    """Return a page with the curves of several runs in one drawing each; raises ``ConfigError`` for too many."""
    if len(runs) > NUM_STYLES:
        raise ConfigError(
            f"{len(runs)} runs are more than the {NUM_STYLES} that colors and dashes can show; give fewer"
        )
    names = Counter(run.name for run in runs)
    runs = [run if names[run.name] == 1 else replace(run, name=run.address) for run in runs]
    # Runs with different batch sizes are compared by the samples that they have seen.
    batches = {tuple(stage.batch_size for stage in run.config.stages) for run in runs}
    over = "step" if len(batches) == 1 else "samples"
    return _render(
        "comparison.html.jinja",
        title=f"{len(runs)} runs compared",
        runs=[
            (run, [note for note in make_notes(run) if note.is_bad or run.status != "finished"][:2])
            for run in runs
        ],
        over=over,
        panels=list(sections.compared_panels(runs, over)),
        final=final_metrics(runs),
        settings=differing_settings(runs),
        hues=NUM_HUES,
        dashes=SVG_DASHES,
    )


def query_neighbors(run: Run) -> list[QueryNeighbors]:
    """Return some queries with their nearest neighbors before training and now."""
    if run.probes is None:
        return []
    searches = _searches(run)
    queries = choose_queries(run.probes, [snapshot for _, snapshot in run.snapshots()])
    before, now = (
        [None] * len(queries) if search is None else search.cards(queries) for search in searches.values()
    )
    cards = next((search for search in searches.values() if search is not None), None)
    if cards is None:
        return []
    return [
        QueryNeighbors(query=cards.card(int(query)), before=before[number], now=now[number])
        for number, query in enumerate(queries)
    ]


def _searches(run: Run) -> dict[str, NeighborSearch | None]:
    return {
        when: None
        if run.probes is None or snapshot is None
        else NeighborSearch(run.probes, snapshot, run.class_name)
        for when, snapshot in (("before", run.first), ("now", run.latest))
    }


def _headline(run: Run) -> list[tuple[str, str, str]]:
    """Return the few metrics that matter first: name, value, and the value at the start."""
    headline = []
    for name, text, form in [
        *((*each, ".1%") for each in EVALUATION_METRICS.items()),
        ("loss", "loss", ".4g"),
    ]:
        values = run.history[name].finite
        if len(values):
            first = f"{values[0]:{form}} at first" if len(values) > 1 else ""
            headline.append((text, f"{values[-1]:{form}}", first))
    rates = run.history["samples_per_second"].finite
    if len(rates):
        headline.append(("samples/s", f"{np.median(rates):,.0f}", "median"))
    return headline


def _render(name: str, **values: Any) -> str:
    # Names, labels, texts and errors come from users: everything but our drawings is escaped.
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
