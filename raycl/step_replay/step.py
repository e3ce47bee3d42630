"""``raycl replay``: make one step of a run again, and explain its loss."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from raycl.display import Displayable, Table
from raycl.errors import ConfigError, NonFiniteLossError
from raycl.gpus import available_cores
from raycl.step_replay.record import RecordedRun, check_queue, read_record
from raycl.step_replay.restore import BeforeStep, train_until
from raycl.step_replay.rows import read_rows
from raycl.step_replay.samples import RenderedSample, StepSamples
from raycl.step_replay.softmax import (
    Candidate,
    SideWeights,
    WatchedObjective,
    check_config,
    check_loss,
    explain,
)
from raycl.storage import Place
from raycl.training.process import prepared_process

NUM_SHOWN, NUM_ON_PAGE = 4, 24  # queries in a terminal, and on the page
_NOTABLE = 1e-3  # relative difference of losses: sums in another order differ by less
_MAX_CHARACTERS = 45  # of a text in a terminal


@final
@dataclass(frozen=True, kw_only=True)
class Negative:
    """A candidate that is not a positive of a query.

    Attributes:
        sample: the sample.
        source: ``batch``, ``queue``, ``bank`` or ``explicit``.
        similarity: its cosine with the query.
        weight: its softmax weight: how strongly it pushes the query, and how much of the gradient at the query's
            logits it has.
        share: its part of all that pushes the query, weight / (1 - weight of the positive).
        age: for stored rows, the steps since it was encoded.
    """

    sample: RenderedSample
    source: str
    similarity: float
    weight: float
    share: float
    age: int | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Query:
    """A query of the step.

    Attributes:
        sample: the sample and its view.
        positive: the sample and the view that belongs to it.
        loss: its cross-entropy, -log of the positive's softmax weight.
        similarity: the cosine with the positive.
        pull: how strongly the positive pulls it, 1 minus the positive's softmax weight; equal to the sum over the
            weights of all negatives.
        num_negatives: the candidates that push it, without false negatives.
        negatives: the most similar ones, the most similar first.
    """

    sample: RenderedSample
    positive: RenderedSample
    loss: float
    similarity: float
    pull: float
    num_negatives: int
    negatives: list[Negative]


@final
@dataclass(frozen=True, kw_only=True)
class ReplayedStep(Displayable):
    """A step of a run, made again.

    Attributes:
        run: the address of the run.
        recipe: its recipe.
        step: the number of the step, from 1 on.
        epoch: its epoch, from 0 on.
        stage: its stage, from 0 on.
        batch_size: the samples of the batch.
        workers: the workers of the run at this step; this process stood for all of them.
        checkpoint: the name of the checkpoint that the replay began from, None for the start of the run.
        first_step: the first step that was made again.
        objective: the loss of the stage.
        temperature: the temperature at this step.
        learning_rate: the learning rate at this step.
        loss: the loss, NaN if it was not finite.
        logged_loss: the loss that ``metrics.jsonl`` has for this step, None if it was not logged.
        relative_difference: abs(loss - logged_loss) / abs(logged_loss).
        notes: what makes the replay less certain, a sentence each.
        queries: all queries of the batch, the largest loss first.
    """

    run: str
    recipe: str
    step: int
    epoch: int
    stage: int
    batch_size: int
    workers: int
    checkpoint: str | None
    first_step: int
    objective: str
    temperature: float
    learning_rate: float
    loss: float
    logged_loss: float | None
    relative_difference: float | None
    notes: list[str]
    queries: list[Query]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON: without pictures, and with null for numbers that are not finite."""
        values = {name: _finite(value) for name, value in vars(self).items() if name != "queries"}
        return {**values, "queries": [_query_dict(each) for each in self.queries]}

    def to_table(self) -> Table:
        """Show the losses, and the queries with the largest ones."""
        logged = "not logged" if self.logged_loss is None else f"{self.logged_loss:.6g}"
        if self.relative_difference is not None:
            logged += f" (relative difference {self.relative_difference:.1e})"
        facts: dict[str, object] = {
            "epoch, stage": f"{self.epoch}, {self.stage}",
            "batch": f"{self.batch_size:,} samples on {self.workers} workers",
            "replayed from": f"{self.checkpoint or 'the start of the run'}, step {self.first_step:,} on",
            self.objective: f"temperature {self.temperature:.4g}, learning rate {self.learning_rate:.4g}",
            "loss": f"{self.loss:.6g}",
            "logged loss": logged,
            **{f"note {number}": text for number, text in enumerate(self.notes, 1)},
        }
        rows = [row for each in self.queries[:NUM_SHOWN] for row in _rows(each)]
        return Table(
            title=f"step {self.step:,} of {self.run}",
            facts=facts,
            columns=("query", "loss", "positive", "pulls", "hardest negatives", "cosine", "pushes"),
            rows=rows,
        )

    def write_html(self, place: Place) -> None:
        """Write the page of the step: one file that loads nothing from elsewhere."""
        from raycl.report.render import render_template

        logged = "not logged" if self.logged_loss is None else f"logged {self.logged_loss:.6g}"
        if self.relative_difference is not None:
            logged += f", differs by {self.relative_difference:.1e}"
        largest = f"{self.queries[0].loss:.4g}"
        page = render_template(
            "replay.html.jinja",
            command="replay",
            title=f"step {self.step:,} of {self.run}",
            found=self,
            headline=[
                ("loss", f"{self.loss:.6g}", logged),
                ("largest loss of a query", largest, f"of {len(self.queries):,} queries"),
                ("temperature", f"{self.temperature:.4g}", self.objective),
                ("learning rate", f"{self.learning_rate:.4g}", f"epoch {self.epoch}, stage {self.stage}"),
            ],
            queries=self.queries[:NUM_ON_PAGE],
        )
        place.write_text(page)


def replay(
    run: str,
    step: int,
    *,
    top: int = 5,
    data: Sequence[str] = (),
    html: str | None = None,
) -> ReplayedStep:
    """Make a step again, as ``raycl.replay`` does."""
    if top < 1:
        raise ConfigError(f"--top must be at least 1, got {top}")
    record = read_record(run, data=data)
    check_config(record.config)
    check_queue(record)
    rows = read_rows(record)
    watched: list[WatchedObjective] = []

    def watch(objective: Any) -> WatchedObjective:
        check_loss(objective)
        watched.append(WatchedObjective(objective))
        return watched[0]

    loss = math.nan
    with prepared_process(available_cores()):  # the matrix products of a worker
        before = train_until(rows, step)
        runner, views = before.runner, before.views
        position, plan = runner.position, runner.plan
        with contextlib.suppress(NonFiniteLossError):
            loss = runner.step(views, watch=watch).loss
        sides, temperature = explain(watched[0], top=top)
    shown = {each.side.candidates[column] for each in sides for column in each.top.flatten().tolist()}
    samples = StepSamples(rows, views, watched[0].calls[0], shown)
    line = record.losses.get(step, {})
    logged = line.get("loss")
    difference = None
    if logged is not None and math.isfinite(loss):
        difference = abs(loss - logged) / max(abs(logged), 1e-12)
    found = ReplayedStep(
        run=run,
        recipe=record.config.recipe,
        step=step,
        epoch=position.epoch,
        stage=position.stage,
        batch_size=plan.stage.batch_size,
        workers=runner.config.workers_of(plan.stage),
        checkpoint=before.checkpoint,
        first_step=before.first_step,
        objective=plan.stage.loss,
        temperature=temperature,
        learning_rate=plan.learning_rate(position.stage_step),
        loss=loss,
        logged_loss=logged,
        relative_difference=difference,
        notes=[],
        queries=_queries(sides, samples, source=_source(record), step=step - 1),
    )
    found.notes.extend(_notes(record, before, found))
    if html is not None:
        found.write_html(Place(html))
    return found


def _queries(sides: Sequence[SideWeights], samples: StepSamples, *, source: str, step: int) -> list[Query]:
    """Return all queries, the largest loss first; NaN comes first of all."""
    queries = [
        _query(each, row, samples, source=source, step=step)
        for each in sides
        for row in range(len(each.loss))
    ]
    return sorted(queries, key=lambda each: (math.isnan(each.loss), each.loss), reverse=True)


def _query(weights: SideWeights, row: int, samples: StepSamples, *, source: str, step: int) -> Query:
    side = weights.side
    pull = 1.0 - float(weights.weight[row])
    negatives = []
    columns = zip(
        weights.top[row].tolist(),
        weights.top_similarity[row].tolist(),
        weights.top_weight[row].tolist(),
        strict=True,
    )
    for column, similarity, weight in columns:
        if similarity == -math.inf:  # fewer negatives than asked for
            continue
        candidate = side.candidates[column]
        negatives.append(
            Negative(
                sample=samples.of(candidate),
                source=source if candidate.place == "stored" else candidate.place,
                similarity=similarity,
                weight=weight,
                share=weight / pull if pull > 0 else 0.0,
                age=samples.age(candidate, step=step),
            )
        )
    return Query(
        sample=samples.of(Candidate("batch", row, side.view)),
        positive=samples.of(Candidate("batch", row, side.positive_view)),
        loss=float(weights.loss[row]),
        similarity=float(weights.similarity[row]),
        pull=pull,
        num_negatives=int(weights.num_negatives[row]),
        negatives=negatives,
    )


def _source(record: RecordedRun) -> str:
    return "queue" if record.config.negatives.store == "queue" else "bank"


def _notes(record: RecordedRun, before: BeforeStep, found: ReplayedStep) -> list[str]:
    """Return what makes the replay less certain."""
    notes = []
    if math.isnan(found.loss):
        notes.append("The loss is not finite: queries with NaN come first.")
    for step, rate in before.learning_rates.items():
        logged = record.losses.get(step, {}).get("learning_rate")
        if logged is not None and not math.isclose(logged, rate, rel_tol=1e-4, abs_tol=1e-12):
            notes.append(
                f"Step {step:,} was logged with learning rate {logged:.6g}, and the settings give {rate:.6g}: the run was "
                "resumed with others, and steps before that cannot be repeated exactly."
            )
            break
    if found.relative_difference is not None and found.relative_difference > _NOTABLE:
        again = found.step - found.first_step
        notes.append(
            f"The losses differ by {found.relative_difference:.1%} after {again:,} earlier steps that were made again. "
            "Rounding alone may grow to this in the first steps of a run or over hundreds of them; otherwise the network, "
            "the library or the device is another one."
        )
    if record.config.gpu:
        notes.append(f"The run computed on GPUs in {record.config.tower_precision}, and the replay on a CPU.")
    return notes


def _query_dict(query: Query) -> dict[str, Any]:
    positive = {
        **query.positive.to_dict(),
        "similarity": _finite(query.similarity),
        "pull": _finite(query.pull),
    }
    negatives = [
        {
            **each.sample.to_dict(),
            "source": each.source,
            **{name: _finite(getattr(each, name)) for name in ("similarity", "weight", "share")},
            **({} if each.age is None else {"age": each.age}),
        }
        for each in query.negatives
    ]
    return {
        **query.sample.to_dict(),
        "loss": _finite(query.loss),
        "num_negatives": query.num_negatives,
        "positive": positive,
        "negatives": negatives,
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _named(sample: RenderedSample) -> str:
    """Return a sample in a few words: its id and view, and its class or the beginning of its text."""
    words = [] if sample.sample_id is None else [str(sample.sample_id)]
    words += [] if sample.view is None else [sample.view]
    words += [] if sample.label is None else [f"({sample.label})"]
    if sample.text is not None:
        text = sample.text
        words.append(text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS].rstrip()}…")
    return " ".join(words)


def _rows(query: Query) -> Iterator[tuple[str, ...]]:
    """Yield a row for each negative of a query; the first one names the query."""
    named = (_named(query.sample), f"{query.loss:.3f}", f"{query.similarity:.3f}", f"{query.pull:.1%}")
    for negative in query.negatives:
        age = "" if negative.age is None else f" ({negative.source}, {negative.age} steps old)"
        yield (
            *named,
            f"{_named(negative.sample)}{age}",
            f"{negative.similarity:.3f}",
            f"{negative.weight:.1%}",
        )
        named = ("", "", "", "")
