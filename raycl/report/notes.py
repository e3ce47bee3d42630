"""What must be said of a run before anybody looks at its curves."""

from dataclasses import dataclass
from typing import final

from raycl.records import ROLLBACK
from raycl.report.figures import JUDGMENTS
from raycl.report.run import Run


@final
@dataclass(frozen=True)
class Note:
    """A sentence; ``is_bad`` if it warns."""

    text: str
    is_bad: bool = False


def remarks(run: Run) -> list[Note]:
    """Return what is special about a run: that it goes on, failed, collapsed, has no labels, and so on."""
    return [*_of_status(run), *_of_course(run), *_of_what_is_missing(run)]


def _of_status(run: Run) -> list[Note]:
    last = int(run.history["step"].last or 0)
    if run.status == "finished":
        return []
    if run.status == "running":
        return [
            Note(
                f"The run is still going, or was killed: this page knows of it up to step {last:,}. Write it again "
                "for more."
            )
        ]
    if run.status == "stopped":
        return [Note(f"The run was stopped at about step {last:,}; raycl train --resume goes on.")]
    if run.status == "failed":
        error = str(run.result.get("error", "nobody wrote down why"))
        return [Note(f"The run failed at about step {last:,}: {error}", is_bad=True)]
    return [Note("Nobody knows whether the run is over: it has no result.json.", is_bad=True)]


def _of_course(run: Run) -> list[Note]:
    history, found = run.history, []
    num_bad = {name: series.num_bad for name, series in history.series.items() if series.num_bad}
    if num_bad:
        named = ", ".join(f"{name} {count:,} times" for name, count in num_bad.items())
        found.append(Note(f"Some figures were no numbers (NaN or infinite): {named}.", is_bad=True))
    if history.num_unreadable:
        found.append(
            Note(f"{history.num_unreadable:,} lines of metrics.jsonl could not be read.", is_bad=True)
        )
    kinds = [event.kind for event in history.events]
    if "collapse" in kinds:
        found.append(Note("The embeddings collapsed; see What happened below.", is_bad=True))
    if num_rollbacks := kinds.count(ROLLBACK):
        times = "once" if num_rollbacks == 1 else f"{num_rollbacks} times"
        found.append(
            Note(
                f"The run was rolled back {times}: what that undid is drawn dotted, and counts nowhere else."
            )
        )
    return found


def _of_what_is_missing(run: Run) -> list[Note]:
    history, found = run.history, []
    num_steps = history.num_steps()
    if num_steps == 0:
        found.append(Note("No step has been logged."))
    elif num_steps == 1:
        found.append(Note("One step has been logged: a point, no curve."))
    if not any(history.has(name) for name in JUDGMENTS):
        found.append(Note(f"There is no periodic judgment: {_why_unjudged(run)}."))
    if run.gallery is None:
        found.append(Note(f"There are no embeddings to show: {_why_unportrayed(run)}."))
    elif run.latest is None:
        found.append(Note("Embeddings are those of the untrained encoder: nothing has been judged since."))
    elif run.first is None:
        found.append(Note("There is no picture of the encoder before training."))
    if run.gallery is not None and not run.gallery.held_out:
        found.append(
            Note("Embeddings, neighbors and maps are of samples that the run trained on: it holds none out.")
        )
    return found


def _why_unjudged(run: Run) -> str:
    if run.config.evaluation.every_epochs == 0:
        return "evaluation.every_epochs is 0"
    if run.config.has_two_towers:
        return "too few pairs were held out, or none was judged yet"
    return "the samples have no labels, or none was judged yet"


def _why_unportrayed(run: Run) -> str:
    if run.config.evaluation.portrait < 2:
        return f"evaluation.portrait is {run.config.evaluation.portrait}"
    if run.data.get("streamed"):
        return "the data are streamed, and no rows are held out to be looked at"
    return "the run has not come to it, or was made before there were portraits"
