"""Checkpoints: all that a resumed run needs to go on as if nothing had happened.

Ray Train stores them below ``<output>/checkpoints``, keeps the latest and the best, and lists a
checkpoint only once it is there whole: a half-written one is never resumed from. Views, the order
of the samples and dropout are functions of (seed, epoch, step), so no random state is saved.
"""

import io
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, final

import ray.train
import torch

from raycl.distributed import all_sum, rank
from raycl.storage import Place
from raycl.training.learner import Learner
from raycl.training.stores import Store
from raycl.training.watch import Watch

CHECKPOINTS = "checkpoints"
STATE = "state.pt"


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

    position: Position = Position()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    store_state: Mapping[str, Any] | None = None
    watch_state: Mapping[str, Any] | None = None


def save_checkpoint(
    learner: Learner,
    store: Store,
    watch: Watch,
    position: Position,
    metrics: Mapping[str, Any],
    *,
    judged: bool,
    is_writer: bool,
) -> None:
    """Store a checkpoint; every worker calls this, the writer alone writes.

    ``judged`` says that ``metrics`` are those of these very weights, so that they may be the best.
    """
    # Ray ranks a checkpoint without the score below all others.
    reported = {"step": position.step, "epoch": position.epoch, **(metrics if judged else {})}
    # After a rollback, a step may come again.
    again = f"-again{position.rollbacks}" if position.rollbacks else ""
    name = f"step-{position.step:08d}{again}{'-judged' if judged else ''}"
    if not is_writer:
        ray.train.report(reported, checkpoint=None, checkpoint_dir_name=name)
        return
    with tempfile.TemporaryDirectory(prefix="raycl-") as folder:
        state = {
            "learner": learner.state_dict(),
            "store": store.state_dict(),
            "watch": watch.state_dict(),
            "is_healthy": watch.is_healthy,
            "position": asdict(position),
            "metrics": dict(metrics),
        }
        torch.save(state, Path(folder) / STATE)
        checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(reported, checkpoint=checkpoint, checkpoint_dir_name=name)


def saved_steps(output: Place) -> set[int]:
    """Return the steps of which there is a checkpoint, whole or not."""
    return set(map(_step_of, _checkpoints(output)))


def restore_checkpoint(learner: Learner) -> Restored:
    """Load the latest checkpoint, if there is one, into the learner; return what else it held."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return Restored()
    with checkpoint.as_directory() as folder:
        return _restored(_load((Path(folder) / STATE).read_bytes()), learner)


def restore_healthy_checkpoint(learner: Learner, output: Place, device: torch.device) -> Restored | None:
    """Load the latest checkpoint in which nothing spoke of a collapse, if there is one; collective."""
    # The first worker chooses: another one might see that Ray has deleted a folder meanwhile.
    chosen = _latest_healthy_step(output) if rank() == 0 else 0
    step = int(all_sum(torch.tensor(chosen, device=device)))
    if step < 0:
        return None
    name = max(name for name in _checkpoints(output) if _step_of(name) == step)
    return _restored(_load((output / CHECKPOINTS / name / STATE).read_bytes()), learner)


def _latest_healthy_step(output: Place) -> int:
    """Return -1 if there is none."""
    for name in sorted(_checkpoints(output), key=_step_of, reverse=True):
        if _load((output / CHECKPOINTS / name / STATE).read_bytes())["is_healthy"]:
            return _step_of(name)
    return -1


def _load(content: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _restored(state: Mapping[str, Any], learner: Learner) -> Restored:
    learner.load_state_dict(state["learner"])
    return Restored(
        position=Position(**state["position"]),
        metrics=state["metrics"],
        store_state=state["store"],
        watch_state=state["watch"],
    )


def _checkpoints(output: Place) -> set[str]:
    folder = output / CHECKPOINTS
    names = {path.split("/")[0] for path, _ in folder.files()} if folder.exists() else set()
    return {name for name in names if name.startswith("step-")}


def _step_of(name: str) -> int:
    return int(name.split("-")[1])
