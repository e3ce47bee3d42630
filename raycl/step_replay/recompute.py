"""The check of a run's losses: some of its steps are computed again in float64."""

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from raycl.chain import CHAIN, START
from raycl.errors import ConfigError, DataError
from raycl.gpus import available_cores
from raycl.losses.objective import Partition, StoreBatch
from raycl.progress import ProgressLine
from raycl.records import complete_checkpoints
from raycl.step_replay.check_history import ChainedHistory
from raycl.step_replay.restore import BeforeStep, train_until
from raycl.step_replay.rows import RunRows
from raycl.training.checkpoint import numbers_of
from raycl.training.process import prepared_process
from raycl.training.step_runner import StepRunner
from raycl.training.stores import Store
from raycl.training.views import Views
from raycl.training.virtual_workers import has_dropout

_EXACT = 1e-5  # relative difference of a loss in float32 right after a checkpoint
_AFTER_UPDATE = 2e-4  # of the loss after one update in float32
_ROUNDINGS = 5  # a loss after an update may differ by this multiple of the rounding of one process in float32
_BFLOAT16 = 2e-2  # of all losses of a run in bfloat16


@final
@dataclass(frozen=True, kw_only=True)
class RecomputedStep:
    """A step that was computed again in float64, after ``checkpoint`` (None for the start of the run).

    ``workers`` made it in the run. ``updates`` is the number of updates that were computed again before it.
    """

    step: int
    checkpoint: str | None
    workers: int
    updates: int
    loss: float
    recorded_loss: float
    relative_difference: float
    is_equal: bool


@final
class RecomputedSteps:
    """The steps of a run that can be computed again, and those that were."""

    def __init__(self, history: ChainedHistory, rows: RunRows) -> None:
        self._history, self._rows = history, rows
        self.steps: list[RecomputedStep] = []

    def check(self, num_steps: int) -> str:
        """Compute about this many steps again, chosen at random, and compare their losses with the recorded ones."""
        groups, refused = list(self._recomputable()), ""
        random.SystemRandom().shuffle(groups)
        there = sum(len(losses) for _, losses in groups)
        wanted = min(num_steps, there)

        def progress() -> tuple[int, int, str]:
            return len(self.steps), max(len(self.steps), wanted), "steps"  # successive ones may be one more

        with (
            prepared_process(available_cores()),
            ProgressLine("computing steps again", progress, quiet=not wanted),
        ):
            for start, losses in groups:
                if len(self.steps) < num_steps:
                    try:
                        self.steps += self._recompute(start, losses)
                    except ConfigError as error:  # one process cannot repeat these steps
                        refused = str(error)
        self.steps.sort(key=lambda each: each.step)
        wrong = [each for each in self.steps if not each.is_equal]
        if wrong:
            first = wrong[0]
            raise DataError(
                f"step {first.step:,} has loss {first.recorded_loss:.8g} in {CHAIN}, and {first.loss:.8g} when it is computed "
                "again"
            )
        if refused and not self.steps:
            raise ConfigError(refused)
        return f"{len(self.steps)} of {there} steps next to a checkpoint that is left, or to the start"

    def _recomputable(self) -> Iterator[tuple[dict[str, Any], dict[int, float]]]:
        """Yield the start link and the recorded losses of successive steps whose state before them is left."""
        saved = [
            numbers
            for name in complete_checkpoints(self._history.run.output)
            if (numbers := numbers_of(name))
        ]
        start = self._history.starts[-1]
        now, kept = start["settings"], {link["hash"] for link in self._history.kept}
        # A rollback may undo the start of the group that made the steps after it.
        for link in self._history.links:
            if link["kind"] == START:
                start = link
            if link["hash"] not in kept:
                continue
            losses = {int(step): loss for step, loss in link.get("losses", {}).items()}
            # With other settings, for example more epochs, the learning rate was another one.
            if not losses or start["settings"] != now:
                continue
            first = min(losses)
            before = [rollbacks for step, _, rollbacks in saved if step == first - 1]
            before += [0] if first == 1 else []
            if any(self._history.run.is_kept(first, rollbacks=rollbacks) for rollbacks in before):
                yield start, losses

    def _recompute(self, start: Mapping[str, Any], losses: Mapping[int, float]) -> list[RecomputedStep]:
        """Compute successive steps again; raises ``ConfigError`` if one process cannot repeat them."""
        first, number = min(losses), len(losses)
        before = train_until(self._rows, first, workers=start["workers"])
        if before.first_step != first:
            raise ConfigError(f"the state before step {first:,} cannot be read")
        if start["device"] != "cpu" and has_dropout(before.runner.state):
            raise ConfigError("the run drew dropout on a GPU, whose random numbers a CPU does not repeat")
        found = []
        for updates, loss in enumerate(losses_in_float64(before, number)):
            recorded = losses[first + updates]
            difference = abs(loss - recorded) / max(abs(recorded), 1.0)
            limit = _AFTER_UPDATE if updates else _EXACT
            if updates and difference > limit and start["precision"] == "float32":
                # An update of a network whose gradient rounding changes much, such as an untrained one.
                again = train_until(self._rows, first, workers=start["workers"])
                rounded = losses_of(again, number)[updates]
                limit = max(limit, _ROUNDINGS * abs(loss - rounded) / max(abs(recorded), 1.0))
            step = RecomputedStep(
                step=first + updates,
                checkpoint=before.checkpoint,
                workers=start["workers"],
                updates=updates,
                loss=loss,
                recorded_loss=recorded,
                relative_difference=difference,
                is_equal=difference <= (limit if start["precision"] == "float32" else _BFLOAT16),
            )
            found.append(step)
        return found


def losses_in_float64(before: BeforeStep, num_steps: int) -> list[float]:
    """Return the losses of the next steps, with weights, optimizer, embeddings and loss in float64.

    The views are the same as in training, in float32.
    """
    _widen(before.runner)
    wide = replace(before, views=_in_float64(before.views), coming=map(_in_float64, before.coming))
    return losses_of(wide, num_steps)


def losses_of(before: BeforeStep, num_steps: int) -> list[float]:
    """Return the losses of the next steps, in the precision of the state and the views."""
    views = itertools.chain([before.views], before.coming)
    return [before.runner.step(each).loss for each in itertools.islice(views, num_steps)]


def _widen(runner: StepRunner) -> None:
    """Convert the state of a runner to float64."""
    state = runner.state
    parts = (state.tower, state.prediction_head, state.temperature, state.momentum_encoder, state.ema)
    for part in [*parts, state.normalizer]:
        if isinstance(part, nn.Module):
            part.double()
    for moments in state.optimizer.state.values():
        moments.update({name: _wide(value) for name, value in moments.items() if name != "step"})
    runner.store = _WideStore(runner.store)


def _in_float64(views: Views) -> Views:
    """Return views of images in float64; tokens stay integers."""
    return replace(
        views,
        view_a=_wide(views.view_a),
        view_b=_wide(views.view_b),
        further=_wide(views.further),
        crops=_wide(views.crops),
        negatives=_wide(views.negatives),
        example_ids=replace(views.example_ids, weight=_wide(views.example_ids.weight)),
    )


@final
class _WideStore(Store):
    """A store whose rows are read in float64, and written in its own precision; it has no snapshots and no metrics."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def fetch(self, views: Views, *, step: int) -> StoreBatch:
        """Return the stored rows in float64."""
        stored = self._store.fetch(views, step=step)
        partition = stored.partition
        if partition is not None:
            partition = Partition(stored=_wide(partition.stored))
        wide = {each.name: _wide(getattr(stored, each.name)) for each in fields(stored)}
        return replace(stored, **wide | {"partition": partition})

    def start_download(self, rows: Tensor, views: Views, key_step: Tensor | None = None) -> None:
        """Start to copy the rows."""
        self._store.start_download(rows.float(), views, key_step)

    def update(self, *, step: int) -> None:
        """Store the rows."""
        self._store.update(step=step)


def _wide(value: Any) -> Any:
    """Return floating-point tensors in float64, other values unchanged."""
    if isinstance(value, tuple):
        return tuple(map(_wide, value))
    return value.to(torch.float64) if isinstance(value, Tensor) and value.is_floating_point() else value
