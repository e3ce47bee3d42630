"""Restore the nearest checkpoint of a run, and train forward to a step."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import torch

from raycl.config import RunConfig
from raycl.errors import ConfigError, DataError, StorageError
from raycl.negatives.snapshot import read_queue
from raycl.progress import ProgressLine
from raycl.records import CHECKPOINTS, STATE, complete_checkpoints
from raycl.step_replay.record import RecordedRun
from raycl.step_replay.rows import RunRows
from raycl.training.checkpoint import Restored, numbers_of, read_checkpoint
from raycl.training.step_runner import StepRunner
from raycl.training.stores import bank_spec
from raycl.training.views import Views


@final
@dataclass(frozen=True, kw_only=True)
class BeforeStep:
    """A run before one of its steps: the runner that makes it, the views of its batch, and the views of ``coming`` steps.

    ``checkpoint`` is the name of the checkpoint that the runner began from, None for the start of the run.
    ``first_step`` is the number of the first step that the runner made, and ``learning_rates`` has the rate of
    each step that it made, by step.
    """

    runner: StepRunner
    views: Views
    coming: Iterator[Views]
    checkpoint: str | None
    first_step: int
    learning_rates: dict[int, float]


def train_until(rows: RunRows, step: int, *, workers: int | None = None) -> BeforeStep:
    """Train from the nearest checkpoint up to the step before ``step``, which counts from 1.

    ``workers`` is the number of workers that made these steps, by default as the log has it.

    This process makes the steps of all workers of the run: see :mod:`raycl.training.virtual_workers`. Nothing is
    written. One process computes the floating-point sums, so losses differ in the last digits from the losses of
    several workers, and the more so the more steps are made.

    Raises:
        ConfigError: The run has no such step, or one process cannot repeat its steps.
        NonFiniteLossError: The loss of an earlier step is not finite.
    """
    run = rows.run
    checkpoint, restored = nearest_checkpoint(run, step)
    config = _with_workers(run, 1 if restored is None else restored.position.step + 1, step, workers)
    job = replace(rows.job if restored else rows.with_counted_tokens(), config=config)
    try:
        runner = StepRunner(job, restored, torch.device("cpu"), alone=True)
    except (RuntimeError, KeyError) as error:  # of load_state_dict
        raise ConfigError(
            f"the weights of {run.output / CHECKPOINTS / (checkpoint or '')} do not fit the network of config.yaml: "
            "the run trained a network of its user's own, or with another version of raycl"
        ) from error
    if not 1 <= step <= runner.num_steps:
        raise ConfigError(f"the run has steps 1 to {runner.num_steps:,}, got --step {step}")
    if restored is None:
        _check_bank(config)
        runner.initialize_bank()
    rates: dict[int, float] = {}
    coming, begin = coming_views(runner), runner.position.step
    num_before = step - 1 - begin
    with ProgressLine(
        "training again", lambda: (runner.position.step - begin, num_before, "steps"), quiet=num_before < 2
    ):
        for views in coming:
            position = runner.position
            rates[position.step + 1] = runner.plan.learning_rate(position.stage_step)
            if position.step == step - 1:
                return BeforeStep(
                    runner=runner,
                    views=views,
                    coming=coming,
                    checkpoint=checkpoint,
                    first_step=min(rates),
                    learning_rates=rates,
                )
            runner.step(views)
    # The invalid rows of a stream are known only at its end.
    raise ConfigError(
        f"the run ends before step {step:,}: its data have fewer valid rows than it planned for"
    )


def _with_workers(run: RecordedRun, first: int, last: int, known: int | None) -> RunConfig:
    """Return the configuration with the workers that made these steps; ``--resume`` and the cluster may change them.

    ``known`` is their number, if it is. Raises ``ConfigError`` if their number changed in between.
    """
    config, seen = run.config, run.workers_between(first, last)
    is_configured = all(config.workers_of(config.stages[stage]) == workers for stage, workers in seen)
    if known is None and config.min_workers is None and is_configured:
        return config
    numbers = {workers for _, workers in seen} if known is None else {known}
    if len(numbers) > 1:
        raise ConfigError(
            f"the steps {first:,} to {last:,} were made by {' and '.join(map(str, sorted(numbers)))} workers, and one "
            "process repeats one number; choose a step nearer to its checkpoint"
        )
    workers = numbers.pop() if numbers else config.workers
    stages = tuple(stage.model_copy(update={"workers": None}) for stage in config.stages)
    return config.model_copy(update={"workers": workers, "min_workers": None, "stages": stages})


def _check_bank(config: RunConfig) -> None:
    """Raise ``ConfigError`` if several workers initialized the slots of a memory bank, each with its own dropout."""
    negatives, workers = config.negatives, config.workers_of(config.stages[0])
    if negatives.store == "memory_bank" and negatives.bank_init == "encoder" and workers > 1:
        raise ConfigError(
            f"the slots of the memory bank began as embeddings of {workers} workers, which one process does not repeat; "
            "replay a step after the first checkpoint that is left"
        )


def coming_views(runner: StepRunner) -> Iterator[Views]:
    """Yield the views of all steps that the run has left; the caller makes a step before it takes the next views."""
    while True:
        if runner.is_stage_over():
            if runner.position.stage == len(runner.plans) - 1:
                return
            runner.end_stage()
            continue
        for views in runner.views():
            yield views
            if runner.position.stage_step == runner.plan.stage.steps:
                break
        else:
            runner.end_epoch()


def nearest_checkpoint(run: RecordedRun, step: int) -> tuple[str | None, Restored | None]:
    """Return the name and the content of the last checkpoint before ``step``; None for the start of the run.

    Raises ``ConfigError`` if a rollback undid the steps that lead to it.
    """
    found = {name: numbers for name in complete_checkpoints(run.output) if (numbers := numbers_of(name))}
    usable = [
        (numbers, name)
        for name, numbers in found.items()
        if numbers[0] < step and run.is_kept(step, rollbacks=numbers[2])
    ]
    for _, name in sorted(usable, reverse=True):
        try:
            return name, _restore(run, name)
        except StorageError:
            continue  # a run that still trains deletes its older checkpoints
    if not run.is_kept(step, rollbacks=0):
        raise ConfigError(
            f"the run was rolled back {run.rollbacks} times, and no checkpoint between the last rollback and step "
            f"{step} is left; choose a later step"
        )
    return None, None


def _restore(run: RecordedRun, name: str) -> Restored:
    """Read a checkpoint, with the queue of the bank's snapshot if an actor held it."""
    place = run.output / CHECKPOINTS / name / STATE
    restored = read_checkpoint(place.read_bytes(), str(place))
    if run.config.negatives.store != "queue" or run.config.bank.location == "worker":
        return restored
    spec = bank_spec(run.config, output=run.output.uri, name="replayed", num_samples=None)
    try:
        return replace(restored, store_state=read_queue(spec, restored.position.step))
    except DataError as error:
        raise StorageError(str(error)) from error
