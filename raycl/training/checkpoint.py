"""Checkpoints: all that a resumed run needs to go on as if nothing had happened.

Ray Train stores them below ``<output>/checkpoints``, keeps the latest and the best, and lists a
checkpoint only once it is there whole: a half-written one is never resumed from. Views, the order
of the samples and dropout are functions of (seed, epoch, step), so no random state is saved.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import ray.train
import torch
from torch import nn
from torch.optim import Optimizer

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


def save_checkpoint(
    tower: nn.Module,
    optimizer: Optimizer,
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
            "tower": tower.state_dict(),
            "optimizer": optimizer.state_dict(),
            "position": asdict(position),
            "metrics": dict(metrics),
        }
        torch.save(state, Path(folder) / STATE)
        checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(reported, checkpoint=checkpoint, checkpoint_dir_name=name)


def restore_checkpoint(tower: nn.Module, optimizer: Optimizer) -> tuple[Position, dict[str, Any]]:
    """Load the latest checkpoint if there is one; return its position and metrics."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return Position(), {}
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder) / STATE, map_location="cpu", weights_only=True)
    tower.load_state_dict(state["tower"])
    optimizer.load_state_dict(state["optimizer"])
    return Position(**state["position"]), state["metrics"]
