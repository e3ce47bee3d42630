"""Notes at the top of a report: warnings, and reasons for missing sections."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from raycl.records import ROLLBACK
from raycl.report.run import Run
from raycl.report.sections import EVALUATION_METRICS


@final
@dataclass(frozen=True)
class Note:
    """One or two sentences; ``is_bad`` marks a warning."""

    text: str
    is_bad: bool = False


def make_notes(run: Run) -> list[Note]:
    """Return the notes of a run: that it failed or collapsed, why a section is missing, and so on."""
    return [*_status_notes(run), *_history_notes(run), *_missing_notes(run)]


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
        yield Note(f"{history.num_unreadable:,} lines of metrics.jsonl could not be read.", is_bad=True)
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
    if run.probes is None:
        yield Note(f"The report has no embeddings: {_why_no_snapshots(run)}.")
        return
    if run.latest is None:
        yield Note("The embeddings are from the untrained encoder: there has been no evaluation since.")
    elif run.first is None:
        yield Note("An embedding snapshot from before training is missing.")
    if not run.probes.held_out:
        yield Note("Embeddings, neighbors and maps show training samples: the run holds none out.")


def _why_not_evaluated(run: Run) -> str:
    if run.config.evaluation.every_epochs == 0:
        return "evaluation.every_epochs is 0"
    if run.config.has_two_towers:
        return "too few pairs were held out, or the first evaluation is yet to come"
    return "the samples have no labels, or the first evaluation is yet to come"


def _why_no_snapshots(run: Run) -> str:
    if run.config.evaluation.num_snapshot_samples < 2:
        return f"evaluation.num_snapshot_samples is {run.config.evaluation.num_snapshot_samples}"
    if run.data.get("streamed"):
        return "the data are streamed and no rows are held out"
    return "the run has not reached its first snapshot"
