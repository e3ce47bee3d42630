"""The plan of a stage: its length in steps, and its schedules."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from raycl.config import RunConfig, Stage
from raycl.optim import Schedule, constant, cosine, linear, step_down


@final
@dataclass(frozen=True, kw_only=True)
class Position:
    """The position of a run: ``step`` steps in total, ``epoch_step`` of them in ``epoch``.

    ``stage_step`` steps and ``stage_epoch`` epochs of stage ``stage`` are complete. After the last of
    ``rollbacks``, cross-entropy replaces the hinge until step ``cross_entropy_until``. ``data_set_steps`` are
    the steps on each of several data sets.
    """

    step: int = 0
    samples: int = 0
    epoch: int = 0
    epoch_step: int = 0
    stage: int = 0
    stage_step: int = 0
    stage_epoch: int = 0
    seconds: float = 0.0
    rollbacks: int = 0
    cross_entropy_until: int = 0
    data_set_steps: tuple[int, ...] = ()

    def next_step(self, *, batch_size: int, data_set: int = 0) -> "Position":
        """Return the position after one more step, on rows of this data set."""
        steps = list(self.data_set_steps)
        if steps:
            steps[data_set] += 1
        return replace(
            self,
            step=self.step + 1,
            samples=self.samples + batch_size,
            epoch_step=self.epoch_step + 1,
            stage_step=self.stage_step + 1,
            data_set_steps=tuple(steps),
        )

    def next_epoch(self) -> "Position":
        """Return the beginning of the next epoch."""
        return replace(self, epoch=self.epoch + 1, epoch_step=0, stage_epoch=self.stage_epoch + 1)

    def next_stage(self) -> "Position":
        """Return the beginning of the next stage, which starts a new epoch."""
        begun = self.next_epoch() if self.epoch_step else self
        return replace(begun, stage=self.stage + 1, stage_step=0, stage_epoch=0)


@final
@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """A stage of a run; its schedules count the steps of the stage.

    For a stream, ``num_steps`` may be slightly too high, since its invalid rows are not known beforehand.
    """

    stage: Stage
    steps_per_epoch: int
    num_steps: int
    learning_rate: Schedule
    hinge_weight: Schedule

    def is_over(self, *, steps: int, epochs: int) -> bool:
        """Whether the stage ends after so many steps or complete epochs."""
        # Count epochs, not expected steps: the invalid rows of a stream are known only at its end.
        if self.stage.steps is not None:
            return steps >= self.stage.steps
        return epochs >= (self.stage.epochs or 0)

    def has_epoch_after(self, position: Position) -> bool:
        """Whether the stage continues after the epoch of this position."""
        steps_left = max(0, self.steps_per_epoch - position.epoch_step)
        return not self.is_over(steps=position.stage_step + steps_left, epochs=position.stage_epoch + 1)


def stage_plans(config: RunConfig, *, num_train: Sequence[int]) -> list[StagePlan]:
    """Return the plans of all stages of a run on ``num_train`` rows of each data set."""
    total = sum(_num_steps(stage, num_train) * stage.batch_size for stage in config.stages)
    plans, samples_before = [], 0
    for stage in config.stages:
        steps_per_epoch, num_steps = _epoch_length(stage, num_train), _num_steps(stage, num_train)
        warmup = min(round(stage.warmup_epochs * steps_per_epoch), num_steps // 10)
        first, last = stage.hinge_weight, stage.final_hinge_weight
        plan = StagePlan(
            stage=stage,
            steps_per_epoch=steps_per_epoch,
            num_steps=num_steps,
            learning_rate=_learning_rate_over_run(stage, warmup, samples_before, total)
            if stage.learning_rate_scope == "run"
            else _learning_rate_over_stage(stage, warmup, num_steps),
            hinge_weight=constant(first) if last is None else linear(first, last, num_steps=num_steps - 1),
        )
        plans.append(plan)
        samples_before += num_steps * stage.batch_size
    return plans


def next_hinge_step(plans: Sequence[StagePlan], position: Position) -> int:
    """Return the first step, from this position on, of a stage with a hinge; the position's own step without one."""
    begin = position.step - position.stage_step
    for plan in plans[position.stage :]:
        if plan.stage.has_hinge:
            return max(begin, position.step)
        begin += plan.num_steps
    return position.step


def momentum_schedule(config: RunConfig, plans: Sequence[StagePlan]) -> Schedule:
    """Return the momentum of the momentum encoder by step of the run."""
    first, last = config.momentum_encoder.momentum, config.momentum_encoder.final_momentum
    if last is None:
        return constant(first)
    return cosine(first, last, num_steps=sum(plan.num_steps for plan in plans))


def _num_steps(stage: Stage, num_train: Sequence[int]) -> int:
    return stage.steps if stage.steps is not None else (stage.epochs or 0) * _epoch_length(stage, num_train)


def _epoch_length(stage: Stage, num_train: Sequence[int]) -> int:
    """Return the number of batches of an epoch, each with rows of one data set."""
    return sum(rows // stage.batch_size for rows in num_train)


def _learning_rate_over_stage(stage: Stage, warmup: int, num_steps: int) -> Schedule:
    """Return a linear warm-up, then half a cosine, a line, two steps down or a constant."""
    peak = stage.peak_learning_rate
    rest = {
        "constant": constant(peak),
        "cosine": cosine(peak, 0.0, num_steps=num_steps - warmup),
        "linear": linear(peak, 0.0, num_steps=num_steps - warmup),
        # At epochs 120 and 160 of 200, as in InstDisc and MoCo; never at the first step.
        "step": step_down(
            peak, factor=0.1, steps=[max(1, num_steps * part // 5) - warmup for part in (3, 4)]
        ),
    }[stage.learning_rate_schedule]
    # The first step must change the weights: start above zero.
    rise = linear(peak / (warmup + 1), peak, num_steps=warmup)
    return lambda step: rise(step) if step < warmup else rest(step - warmup)


def _learning_rate_over_run(stage: Stage, warmup: int, samples_before: int, total_samples: int) -> Schedule:
    """Return this stage's part of a schedule over the samples of all stages.

    Only the first stage warms up; later stages continue the schedule.
    """
    warmup = 0 if samples_before else warmup
    shape = {
        "constant": lambda progress: 1.0,
        "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
        "linear": lambda progress: 1.0 - progress,
        "step": lambda progress: 0.1 ** ((progress >= 3 / 5) + (progress >= 4 / 5)),
    }[stage.learning_rate_schedule]

    def value(step: int) -> float:
        progress = (samples_before + step * stage.batch_size) / max(1, total_samples)
        return stage.peak_learning_rate * shape(min(1.0, progress)) * min(1.0, (step + 1) / (warmup + 1))

    return value
