"""``raycl replay --find``: the steps of a run that are worth a look."""

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

import numpy as np

from raycl.data.ids import stable_id
from raycl.data.in_memory import Batch
from raycl.data.sampler import BatchShard
from raycl.display import Displayable, Table
from raycl.errors import ConfigError, DataError
from raycl.step_replay.record import RecordedRun, read_record
from raycl.step_replay.rows import RunRows, read_rows
from raycl.training.stages import Position, stage_plans

KINDS = "max-loss, nan or sample=ID"
_FAILED_STEP = re.compile(r"(became|not finite).*?(?:at|after) step ([0-9]+)")


@final
@dataclass(frozen=True, kw_only=True)
class FoundSteps(Displayable):
    """Steps of a run, and why they were found.

    Attributes:
        run: the address of the run.
        find: the question, such as ``max-loss``.
        steps: a dictionary for each step, with ``step`` and ``epoch``, and for ``max-loss`` the ``loss`` and
            ``times_median``, its ratio to the median of the epoch's logged losses; for ``nan`` the ``metrics`` that
            were not finite; for ``sample=ID`` the ``row`` of the sample in the batch, and its ``data_set``, from 0 on, if
            the run has several.
    """

    run: str
    find: str
    steps: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {"run": self.run, "find": self.find, "steps": self.steps}

    def to_table(self) -> Table:
        """Show the steps."""
        columns = list(self.steps[0]) if self.steps else []
        rows = [tuple(each.values()) for each in self.steps]
        facts = {"found": f"{len(self.steps):,} steps"} if self.steps else {"found": "no step"}
        return Table(title=f"{self.find} in {self.run}", facts=facts, columns=columns, rows=rows)


def find_steps(run: str, find: str, *, top: int = 5, data: Sequence[str] = ()) -> FoundSteps:
    """Find steps, as ``raycl.find_steps`` does."""
    kind, _, value = find.partition("=")
    if find not in ("max-loss", "nan") and not (kind == "sample" and value):
        raise ConfigError(f"--find takes {KINDS}, got {find!r}")
    if top < 1:
        raise ConfigError(f"--top must be at least 1, got {top}")
    record = read_record(run, data=data)
    if kind == "sample":
        return FoundSteps(run=run, find=find, steps=list(_steps_of_sample(read_rows(record), value)))
    found = _largest(record, top) if find == "max-loss" else list(_not_finite(record))
    return FoundSteps(run=run, find=find, steps=found)


def drawn_batches(rows: RunRows) -> Iterator[tuple[Position, Batch]]:
    """Yield the position of the run before each of its steps, and the step's batch with its ids and labels only.

    Computed from the order of the rows alone; the steps are those that the configuration plans.
    """
    config, sampler = rows.run.config, rows.sampler_of_ids()
    plans = stage_plans(config, num_train=rows.job.num_train)
    position = Position()
    for number, plan in enumerate(plans):
        while not plan.is_over(steps=position.stage_step, epochs=position.stage_epoch):
            left = None if plan.stage.steps is None else plan.stage.steps - position.stage_step
            shard = BatchShard(
                batch_size=plan.stage.batch_size, num_workers=config.workers_of(plan.stage), is_whole=True
            )
            for batch in islice(sampler.epoch_batches(shard, epoch=position.epoch), left):
                yield position, batch
                position = position.next_step(batch_size=plan.stage.batch_size)
            if position.stage_step != plan.stage.steps:
                position = position.next_epoch()
        if number < len(plans) - 1:
            position = position.next_stage()


def _steps_of_sample(rows: RunRows, name: str) -> Iterator[dict[str, Any]]:
    """Yield the steps that draw a sample, up to the last logged one; raises ``DataError`` for an unknown sample."""
    sample_id = _drawn_id(rows, name)
    last = rows.run.num_logged
    for position, batch in drawn_batches(rows):
        if position.step >= last:
            return
        data_set = {"data_set": batch.data_set} if len(rows.sources) > 1 else {}
        for row in (batch.sample_id == sample_id).nonzero()[0].tolist():
            yield {"step": position.step + 1, "epoch": position.epoch, "row": row, **data_set}


def _drawn_id(rows: RunRows, name: str) -> int:
    """Return the id of a sample by its name in the data; raises ``DataError`` if it is not trained on."""
    ids = rows.train_ids()
    # Digits may be an integer, or text as in file names.
    possible = (
        [stable_id(int(name)), stable_id(name)] if re.fullmatch(r"-?[0-9]+", name) else [stable_id(name)]
    )
    for sample_id in possible:
        if sample_id in ids:
            return sample_id
    # Rows of a stream are held out by their fragment as well.
    sample_id = next((each for each in possible if any(each in where for where in rows.where)), possible[0])
    names = [where[sample_id] for where in rows.where if sample_id in where]
    if not names:
        raise DataError(
            f"the run trained on no sample {name}; its {len(ids):,} training samples have ids such as {ids.min()}"
        )
    is_test = bool(rows.job.holdout.is_test(np.array([sample_id]))[0])
    why = "is held out of training" if is_test else "is invalid, and was skipped"
    raise DataError(f"the sample {name} ({', '.join(names)}) {why}: no step draws it")


def _largest(record: RecordedRun, top: int) -> list[dict[str, Any]]:
    lines = [line for line in record.losses.values() if line["loss"] is not None]
    medians = {
        epoch: statistics.median(line["loss"] for line in lines if line.get("epoch") == epoch)
        for epoch in {line.get("epoch") for line in lines}
    }
    largest = sorted(lines, key=lambda line: line["loss"], reverse=True)[:top]
    return [
        {
            "step": line["step"],
            "epoch": line.get("epoch"),
            "loss": line["loss"],
            "times_median": round(line["loss"] / medians[line.get("epoch")], 3)
            if medians[line.get("epoch")]
            else None,
        }
        for line in largest
    ]


def _not_finite(record: RecordedRun) -> Iterator[dict[str, Any]]:
    """Yield logged steps with metrics that are not finite, and the step whose loss or weights ended the run."""
    for step, line in record.losses.items():
        if names := [name for name, value in line.items() if value is None]:
            yield {"step": step, "epoch": line.get("epoch"), "metrics": ", ".join(names)}
    failed = _FAILED_STEP.search(str(record.result.get("error", "")))
    if failed is not None:
        epoch = record.losses.get(record.num_logged, {}).get("epoch")
        # Weights are looked at before a checkpoint: they became so after the last one.
        metrics = "loss" if failed[1] == "became" else "weights"
        yield {"step": int(failed[2]), "epoch": epoch, "metrics": metrics}
