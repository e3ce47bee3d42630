"""Checkpoints: all that a resumed run needs to go on as if nothing had happened.

Ray Train stores them below ``<output>/checkpoints``, keeps the latest and the best, and lists a
checkpoint only once it is there whole: a half-written one is never resumed from. Views, the order
of the samples and dropout are functions of (seed, epoch, step), so no random state is saved.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, final

import ray.train
import torch

from raycl.storage import Place
from raycl.training.learner import Learner
from raycl.training.stores import Store

CHECKPOINTS = "checkpoints"
STATE = "state.pt"


@final
@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands: ``step`` steps made in all, ``epoch_step`` of them in ``epoch``."""

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    seconds: float = 0.0

    def next_step(self) -> "Position":
        """Return the position one step on."""
        return replace(self, step=self.step + 1, epoch_step=self.epoch_step + 1)

    def next_epoch(self) -> "Position":
        """Return the beginning of the next epoch."""
        return replace(self, epoch=self.epoch + 1, epoch_step=0)


@final
@dataclass(frozen=True, kw_only=True)
class Restored:
    """Where a run goes on, its last metrics, and the state of a store that the workers hold."""

    position: Position = Position()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    store_state: Mapping[str, Any] | None = None


def save_checkpoint(
    learner: Learner,
    store: Store,
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
    name = f"step-{position.step:08d}{'-judged' if judged else ''}"
    if not is_writer:
        ray.train.report(reported, checkpoint=None, checkpoint_dir_name=name)
        return
    with tempfile.TemporaryDirectory(prefix="raycl-") as folder:
        state = {
            "learner": learner.state_dict(),
            "store": store.state_dict(),
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
    return {int(name.split("-")[1]) for name in names if name.startswith("step-")}


def restore_checkpoint(learner: Learner) -> Restored:
    """Load the latest checkpoint, if there is one, into the learner; return what else it held."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return Restored()
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder) / STATE, map_location="cpu", weights_only=True)
    learner.load_state_dict(state["learner"])
    return Restored(
        position=Position(**state["position"]), metrics=state["metrics"], store_state=state["store"]
    )
