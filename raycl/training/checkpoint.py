"""Checkpoints: all that a resumed run needs to go on as if nothing had happened.

Ray Train stores them below ``<output>/checkpoints``, keeps the latest and the best, and lists a
checkpoint only once it is there whole: a half-written one is never resumed from. Views, the order
of the samples and dropout are functions of (seed, epoch, step), so no random state is saved.
"""

import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import ray.train
import torch

from raycl.distributed import check_equal
from raycl.models.encoder_io import load_state
from raycl.storage import Place
from raycl.training.checkpoint_list import CHECKPOINTS
from raycl.training.stores import Store
from raycl.training.train_state import TrainState
from raycl.training.watch import Watch

STATE = "state.pt"
SCORE = "score"  # that the best checkpoints have most of
_STEP = re.compile(r"step-([0-9]{8,})")
_ORDER = ("rollbacks", "step", "stage")


@final
@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands: ``step`` steps made in all, ``epoch_step`` of them in ``epoch``.

    Of stage ``stage``, ``stage_step`` steps are made and ``stage_epoch`` epochs are over. After the last
    of ``rollbacks``, until step ``cross_entropy_until``, cross-entropy stands in for the hinge.
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

    def next_step(self, *, batch_size: int) -> "Position":
        """Return the position one step on."""
        return replace(
            self,
            step=self.step + 1,
            samples=self.samples + batch_size,
            epoch_step=self.epoch_step + 1,
            stage_step=self.stage_step + 1,
        )

    def next_epoch(self) -> "Position":
        """Return the beginning of the next epoch."""
        return replace(self, epoch=self.epoch + 1, epoch_step=0, stage_epoch=self.stage_epoch + 1)

    def next_stage(self) -> "Position":
        """Return the beginning of the next stage, which begins with an epoch of its own."""
        begun = self.next_epoch() if self.epoch_step else self
        return replace(begun, stage=self.stage + 1, stage_step=0, stage_epoch=0)


@final
@dataclass(frozen=True, kw_only=True)
class Restored:
    """Where a run goes on, its last metrics, and what was saved of the watch and of the workers' store."""

    position: Position
    metrics: Mapping[str, Any]
    store_state: Mapping[str, Any]
    watch_state: Mapping[str, Any]


def save_checkpoint(
    learner: TrainState,
    store: Store,
    watch: Watch,
    position: Position,
    metrics: Mapping[str, Any],
    *,
    judged: bool,
    score: float | None,
    is_writer: bool,
) -> None:
    """Store a checkpoint; every worker calls this, the writer alone writes.

    ``judged`` says that ``metrics`` are those of these very weights. Of all checkpoints those of the
    highest ``score`` are kept, and none without a score before them.
    """
    name = _name(position, judged=judged)
    reported: dict[str, Any] = {
        "step": position.step,
        "stage": position.stage,
        "rollbacks": position.rollbacks,
        "is_healthy": watch.is_healthy,
    }
    if score is not None:
        reported[SCORE] = score
    if not is_writer:
        ray.train.report(reported, checkpoint=None, checkpoint_dir_name=name)
        return
    with tempfile.TemporaryDirectory(prefix="raycl-") as folder:
        state = {
            "learner": learner.state_dict(),
            "store": store.state_dict(),
            "watch": watch.state_dict(),
            "position": asdict(position),
            "metrics": dict(metrics),
        }
        torch.save(state, Path(folder) / STATE)
        checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(reported, checkpoint=checkpoint, checkpoint_dir_name=name)


def saved_steps(output: Place) -> set[int]:
    """Return the steps of which there is a checkpoint, whole or not."""
    folder = output / CHECKPOINTS
    names = {path.split("/")[0] for path, _ in folder.files()} if folder.exists() else set()
    return {int(step[1]) for step in map(_STEP.match, names) if step}


def restore_checkpoint(learner: TrainState) -> Restored | None:
    """Load the latest checkpoint, if there is one, into the learner; return what else it held."""
    checkpoint = ray.train.get_checkpoint()
    return None if checkpoint is None else _restored(checkpoint, learner)


def restore_healthy_checkpoint(learner: TrainState) -> Restored | None:
    """Load the latest checkpoint that was made in health, if there is one; collective."""
    all_saved = ray.train.get_all_reported_checkpoints(
        consistency_mode=ray.train.CheckpointConsistencyMode.COMMITTED
    )
    healthy = [each for each in all_saved if each.metrics["is_healthy"]]
    # A step may have come again, after a rollback; and a stage ends and the next one begins at one step.
    latest = max(healthy, key=lambda each: [each.metrics[key] for key in _ORDER], default=None)
    check_equal(-1 if latest is None else latest.metrics["step"], "the step to go back to")
    return None if latest is None else _restored(latest.checkpoint, learner)


def _name(position: Position, *, judged: bool) -> str:
    """Return a name that no other checkpoint of the run has: Ray would delete one for the other."""
    stage = f"-stage{position.stage}" if position.stage else ""
    again = f"-again{position.rollbacks}" if position.rollbacks else ""
    return f"step-{position.step:08d}{stage}{again}{'-judged' if judged else ''}"


def _restored(checkpoint: ray.train.Checkpoint, learner: TrainState) -> Restored:
    with checkpoint.as_directory() as folder:
        content = (Path(folder) / STATE).read_bytes()
    state = load_state(content, f"{checkpoint.path}/{STATE}")
    learner.load_state_dict(state["learner"])
    return Restored(
        position=Position(**state["position"]),
        metrics=state["metrics"],
        store_state=state["store"],
        watch_state=state["watch"],
    )
