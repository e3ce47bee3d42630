"""Checkpoints: all that a resumed run needs to go on as if nothing had happened.

Ray Train stores them below ``<output>/checkpoints``, keeps the latest and the best, and lists a
checkpoint only once it is there whole: a half-written one is never resumed from. Views, the order
of the samples and dropout are functions of (seed, epoch, step), so no random state is saved.
"""

import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import ray.train
import torch
from torch import nn

from raycl.config import RunConfig
from raycl.distributed import all_sum, check_equal, rank
from raycl.errors import NonFiniteLossError
from raycl.models.encoder_io import load_state, save_encoder
from raycl.models.registry import KEY
from raycl.models.specs import EncoderSpec, HeadSpec, TextEncoderSpec
from raycl.models.towers import Towers
from raycl.storage import Place
from raycl.training.job import Job
from raycl.training.metrics_logger import Clock, MetricsLogger
from raycl.training.modality import Modality
from raycl.training.resume import CHECKPOINTS, backup_manifest
from raycl.training.stages import Position
from raycl.training.stores import Store
from raycl.training.train_state import TrainState
from raycl.training.watch import Watch

STATE = "state.pt"
SCORE = "score"  # that the best checkpoints have most of
_STEP = re.compile(r"step-([0-9]{8,})")
_ORDER = ("rollbacks", "step", "stage")


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


@final
class Checkpointer:
    """Save what a resumed run needs; all workers call it together, the first one writes."""

    def __init__(
        self, job: Job, learner: TrainState, watch: Watch, clock: Clock, recorder: MetricsLogger
    ) -> None:
        self._job, self._learner, self._watch = job, learner, watch
        self._clock, self._recorder = clock, recorder
        self._is_writer = rank() == 0
        self._leaving: frozenset[int] = frozenset()  # ranks whose nodes will be taken away

    def begin_at(self, position: Position) -> None:
        """Count from here: the run has just been restored, or begins."""
        self.step, self._saved_at = position.step, time.monotonic()

    def is_due(self, position: Position, device: torch.device) -> bool:
        """Whether to save after this step: by number, by time, or because the run is to move.

        A node that is about to be taken away is saved from once, when its notice comes.
        """
        every = self._job.config.checkpoints.every_steps
        by_number = every is not None and position.step % every == 0
        if position.step % self._job.config.log_every_steps:
            return by_number
        # Clocks differ between workers: the first one decides.
        late = time.monotonic() - self._saved_at > self._job.config.checkpoints.every_s
        is_late = bool(all_sum(torch.tensor(late and self._is_writer, device=device).long()))
        return by_number or is_late or self._is_newly_preempted()

    def _is_newly_preempted(self) -> bool:
        info = ray.train.get_preemption_info()
        leaving = frozenset() if info is None else frozenset(info.preempted_ranks)
        is_new, self._leaving = bool(leaving - self._leaving), leaving
        return is_new

    def save(
        self,
        position: Position,
        store: Store,
        metrics: Mapping[str, Any],
        *,
        judged: bool = False,
        always: bool = False,
    ) -> None:
        """Store a checkpoint, unless this step has one and neither was ``judged`` since nor begins a stage.

        Raises:
            NonFiniteLossError: The weights are no numbers.
        """
        if position.step == self.step and not (judged or always):
            return
        with self._clock.paused():
            # A finite loss may have had a gradient that is not: never keep what it did.
            if not self._learner.is_finite():
                raise NonFiniteLossError(
                    f"the weights are no numbers after step {position.step}; the last checkpoint "
                    f"(step {self.step}) is kept: lower stages.{position.stage}.learning_rate"
                )
            self._job.check_lease()
            self._recorder.flush()
            self._learner.average_statistics()
            self._save_bank(position, store)
            if self._is_writer:
                backup_manifest(self._job.output)
            with (self._job.output / CHECKPOINTS).explaining("save a checkpoint in"):
                save_checkpoint(
                    self._learner,
                    store,
                    self._watch,
                    position,
                    metrics,
                    judged=judged,
                    score=self._score(position, metrics, judged=judged),
                    is_writer=self._is_writer,
                )
        self.begin_at(position)

    def _score(self, position: Position, metrics: Mapping[str, Any], *, judged: bool) -> float | None:
        """Return the judgment of weights that were judged, or of a run without a judge the time.

        What a sign of collapse hangs over has none, or it would crowd out what a run can go back to.
        """
        if not self._watch.is_healthy:
            return None
        if self._job.judged:
            return metrics.get(self._job.config.judged_by) if judged else None
        return position.seconds

    def _save_bank(self, position: Position, store: Store) -> None:
        """Write the bank's snapshot, before the checkpoint that will need it is there."""
        store.save(step=position.step)
        if self._job.bank is not None and self._is_writer:
            self._job.bank.prune([position.step, *saved_steps(self._job.output)])


def encoder_specs(
    config: RunConfig, modality: Modality, encoders: Sequence[nn.Module], *, own: bool
) -> list[EncoderSpec]:
    """Return the spec of each tower's encoder; ``own`` if it cannot be built by name."""
    head = None
    if config.has_two_towers and config.projection_head.num_layers:
        head = HeadSpec(**config.projection_head.model_dump())
    specs = [
        side.spec(encoder, own=own).model_copy(update={"projection_head": head})
        for side, encoder in zip(modality.sides, encoders, strict=True)
    ]
    if config.separate_towers and isinstance(specs[0], TextEncoderSpec):
        # The tower of queries never saw texts as long as documents.
        specs[0] = specs[0].model_copy(update={"cut_at": config.text.max_length})
    return specs


def save_towers(towers: Towers, job: Job, modality: Modality) -> None:
    """Write the encoder, and of two towers also their projection heads and the encoder of keys."""
    encoders = [tower.encoder for tower in towers.towers]
    specs = encoder_specs(job.config, modality, encoders, own=job.network is not None)
    saved = list(zip(towers.towers, specs, (job.output, job.output / KEY), strict=False))
    # The spec of the first one comes last: from then on the run has saved its encoder.
    for tower, spec, folder in reversed(saved):
        save_encoder(
            tower.encoder,
            spec,
            folder,
            projection_head=None if spec.projection_head is None else tower.projection_head,
            tokenizer=job.vocabulary.tokenizer
            if job.vocabulary and isinstance(spec, TextEncoderSpec)
            else None,
        )
