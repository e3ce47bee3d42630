"""The page: one HTML file without scripts that loads nothing from elsewhere."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from raycl.errors import ConfigError
from raycl.records import NOT_EVALUATED, ROLLBACK
from raycl.report import sections
from raycl.report.plots import NUM_HUES, NUM_STYLES, SVG_DASHES
from raycl.report.render import render_template
from raycl.report.run import Run
from raycl.report.sections import EVALUATION_METRICS
from raycl.report.snapshots import NeighborSearch, QueryNeighbors, choose_queries
from raycl.report.tables import differing_settings, event_table, final_metrics, run_facts, skipped_rows


def render_run(run: Run) -> str:
    """Return the page of one run."""
    return render_template(
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
    sizes = {tuple(dict.fromkeys(stage.batch_size for stage in run.config.stages)) for run in runs}
    over = "step" if len(sizes) == 1 else "samples"
    return render_template(
        "comparison.html.jinja",
        title=f"{len(runs)} runs compared",
        runs=[(run, _compared_notes(run)) for run in runs],
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
    rate = run.samples_per_second
    if rate is not None:
        headline.append(("samples/s", f"{rate:,.0f}", "on average"))
        if run.history.has("views_per_second"):
            headline.append(("views/s", f"{rate * run.config.num_views:,.0f}", "on average"))
    return headline


@final
@dataclass(frozen=True)
class Note:
    """One or two sentences; ``is_bad`` marks a warning."""

    text: str
    is_bad: bool = False


def make_notes(run: Run) -> list[Note]:
    """Return the notes of a run: that it failed or collapsed, why a section is missing, and so on."""
    return [*_run_notes(run), *_snapshot_notes(run)]


def _run_notes(run: Run) -> list[Note]:
    """Return the notes that need no embedding snapshots, which a comparison does not read."""
    return [*_status_notes(run), *_history_notes(run), *_missing_notes(run)]


def _compared_notes(run: Run) -> list[Note]:
    """Return the notes of a run in a comparison: all warnings, and the first two others of an unfinished run."""
    notes = _run_notes(run)
    others = [note for note in notes if not note.is_bad and run.status != "finished"]
    return [note for note in notes if note.is_bad or note in others[:2]]


def _status_notes(run: Run) -> Iterator[Note]:
    last = int(run.history["step"].last or 0)
    if run.status == "running":
        yield Note(
            f"The run is still going or was killed: this page ends at step {last:,}. Write it again for more."
        )
    elif run.status == "stopped":
        yield Note(f"The run was stopped at about step {last:,}; raycl train --resume continues it.")
    elif run.status == "failed":
        error = run.result.get("error", "the reason is not recorded")
        yield Note(f"The run failed at about step {last:,}: {error}", is_bad=True)
    elif run.status != "finished":
        yield Note("It is unknown whether the run is over: it has no result.json.", is_bad=True)


def _history_notes(run: Run) -> Iterator[Note]:
    history = run.history
    bad = [f"{name} {series.num_bad:,} times" for name, series in history.series.items() if series.num_bad]
    if bad:
        yield Note(f"Some metrics were NaN or infinite: {', '.join(bad)}.", is_bad=True)
    if history.num_unreadable:
        yield Note(f"Damaged lines of metrics.jsonl were skipped: {history.num_unreadable:,}.", is_bad=True)
    kinds = [event.kind for event in history.events]
    if "collapse" in kinds:
        yield Note("The embeddings collapsed; see Events below.", is_bad=True)
    if num_rollbacks := kinds.count(ROLLBACK):
        times = "once" if num_rollbacks == 1 else f"{num_rollbacks} times"
        yield Note(f"The run was rolled back {times}: undone steps are drawn dotted and count nowhere else.")


def _missing_notes(run: Run) -> Iterator[Note]:
    num_steps = run.history.num_steps()
    if num_steps == 0:
        yield Note("No step has been logged.")
    elif num_steps == 1:
        yield Note("One step has been logged: a point instead of a curve.")
    if not any(run.history.has(name) for name in EVALUATION_METRICS):
        yield Note(f"The run has no periodic evaluation: {_why_not_evaluated(run)}.")


def _snapshot_notes(run: Run) -> Iterator[Note]:
    if run.probes is None:
        yield Note(f"The report has no embeddings: {_why_no_snapshots(run)}.")
        return
    if run.latest is None:
        yield Note("The embeddings are from the untrained encoder: there has been no evaluation since.")
    elif run.first is None:
        yield Note("An embedding snapshot from before training is missing.")
    if run.latest is not None and _is_undone(run, run.latest.step):
        yield Note(f"The latest embeddings are from step {run.latest.step:,}, which a rollback undid.")
    if not run.probes.held_out:
        yield Note("Embeddings, neighbors and maps show training samples: the run holds none out.")


def _is_undone(run: Run, step: int) -> bool:
    """Whether a rollback undid a step, and the run has not reached it again."""
    steps = run.history["step"]
    return bool((steps.dropped().value >= step).any()) and not (steps.kept().value >= step).any()


def _why_not_evaluated(run: Run) -> str:
    if run.config.evaluation.every_epochs == 0:
        return "evaluation.every_epochs is 0"
    for notice in run.result.get("notices") or []:
        reason, separator, _ = str(notice).partition(NOT_EVALUATED)
        if separator:
            return reason
    reason = "too few pairs were held out"
    if not run.config.has_two_towers:
        reason = "the samples have no labels, or too few were held out"
    if run.status == "running":
        return f"{reason}, or the first evaluation is yet to come"
    return reason if run.status == "finished" else f"{reason}, or the run ended before the first evaluation"


def _why_no_snapshots(run: Run) -> str:
    if run.config.evaluation.num_snapshot_samples < 2:
        return f"evaluation.num_snapshot_samples is {run.config.evaluation.num_snapshot_samples}"
    if run.data.get("streamed"):
        return "the data are streamed and no rows are held out"
    return "the run has not reached its first snapshot"
