"""Checkpoints: all the state that a resumed run needs to continue exactly.

Ray Train stores them below ``<output>/checkpoints``, keeps the latest and the best ones, and lists a
checkpoint only once it is complete. Views, the order of the samples and dropout are functions of
(seed, epoch, step), so checkpoints hold no random state.
"""

import math
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import ray.train
import torch

from raycl.display import format_bytes
from raycl.distributed import all_sum, check_equal, rank
from raycl.errors import NonFiniteLossError
from raycl.models.encoder_io import load_state
from raycl.negatives.bank import Bank
from raycl.negatives.placement import ShardAtRisk, reserved_memory
from raycl.records import CHECKPOINTS, STATE, backup_manifest
from raycl.storage import Place
from raycl.training.collapse_monitor import CollapseMonitor
from raycl.training.job import Job
from raycl.training.metrics_logger import MetricsLogger
from raycl.training.mined import MinedNegatives
from raycl.training.run_chain import RunChain
from raycl.training.stages import Position
from raycl.training.stores import Store, wait_for_all
from raycl.training.train_state import TrainState

SCORE = "score"  # Ray Train keeps the checkpoints with the highest ones
_MAX_COST = 0.01  # of the time, for checkpoints whose interval is not configured
_INTERVALS_S = 2.0, 300.0  # the shortest and the longest of these
_CHECK_S = 1.0  # between two checks of the time and of the nodes
# Runs of earlier versions have names with -judged.
_NAME = re.compile(r"step-([0-9]{8,})(?:-stage([0-9]+))?(?:-again([0-9]+))?(?:-evaluated|-judged)?")
_ORDER = ("rollbacks", "step", "stage")


@final
@dataclass(frozen=True, kw_only=True)
class Restored:
    """The content of a checkpoint; ``is_evaluated`` if its weights were evaluated."""

    position: Position
    is_evaluated: bool = False
    metrics: Mapping[str, Any]
    train_state: dict[str, Any]
    store_state: Mapping[str, Any]
    mined_state: Mapping[str, Any]
    monitor_state: Mapping[str, Any]
    chain_state: Mapping[str, Any]


@final
class Checkpointer:
    """Save checkpoints; all workers call the methods together, the first one writes."""

    def __init__(
        self,
        job: Job,
        train_state: TrainState,
        monitor: CollapseMonitor,
        logger: MetricsLogger,
        chain: RunChain,
        position: Position,
        mined: MinedNegatives | None,
        device: torch.device,
    ) -> None:
        """``position`` is the start of the run, or the checkpoint that it resumes from."""
        self._mined, self._chain, self._device = mined, chain, device
        self._job, self._train_state, self._monitor, self._logger = job, train_state, monitor, logger
        self._is_writer = rank() == 0
        self._preempted: frozenset[int] = frozenset()  # ranks whose nodes will be preempted
        self._at_risk: frozenset[ShardAtRisk] = frozenset()  # shards of the bank whose nodes will be removed
        self.saved_step, self._saved_at = position.step, time.monotonic()
        self._began = self._checked_at = self._saved_at
        self._bank_step = position.step or None  # of its current snapshot, which a new run does not have yet
        configured = job.config.checkpoints.interval_s
        self._interval_s = _INTERVALS_S[0] if configured is None else configured

    def wants_check(self) -> bool:
        """Whether all workers should check the time and the nodes after the next step: the first one asks once a second."""
        return self._is_writer and time.monotonic() - self._checked_at > _CHECK_S

    def is_due(self, position: Position, *, check: bool) -> bool:
        """Whether to save after this step: by step, by time, or before a node of workers or of the bank is removed.

        The last two are known only with ``check``, equal on all workers.
        """
        every = self._job.config.checkpoints.every_steps
        is_due_by_step = every is not None and position.step % every == 0
        if not check:
            return is_due_by_step
        self._checked_at = time.monotonic()
        # Clocks differ between workers: the first one decides.
        late = self._is_writer and (
            time.monotonic() - self._saved_at > self._interval_s or self._is_bank_newly_at_risk()
        )
        is_late = bool(all_sum(torch.tensor(late, device=self._device).long()))
        return is_due_by_step or is_late or self._is_newly_preempted()

    def roll_back(self, position: Position) -> None:
        """Continue from an earlier checkpoint of this run, which has restored the bank."""
        self._bank_step = position.step

    def save(
        self,
        position: Position,
        store: Store,
        metrics: Mapping[str, Any],
        *,
        evaluated: bool = False,
        always: bool = False,
    ) -> None:
        """Save a checkpoint; if this step has one, only for ``evaluated`` weights or ``always``.

        ``evaluated`` means that ``metrics`` were measured with these weights. Raises ``NonFiniteLossError``
        if a weight is not finite.
        """
        if position.step == self.saved_step and not (evaluated or always):
            return
        began = time.monotonic()
        with self._logger.clock.paused():
            self.check_weights(position)
            self._job.check_lease()
            self._logger.flush()
            self._train_state.average_statistics()
            self._chain.sum_draws()
            self._save_bank(position, store)
            if self._is_writer:
                backup_manifest(self._job.output)
                self._job.save_streamed_rows()  # before the checkpoint, which is resumed with them
            with (self._job.output / CHECKPOINTS).wrap_errors("save a checkpoint in"):
                self._report(position, store, metrics, evaluated=evaluated)
        self.saved_step, self._saved_at = position.step, time.monotonic()
        if self._job.config.checkpoints.interval_s is None:
            lost, since_s = self._job.failure, self._saved_at - self._began
            between_s = (lost.after_s + since_s) / lost.number if lost else math.inf
            self._interval_s = next_interval_s(
                self._interval_s, cost_s=self._saved_at - began, between_losses_s=between_s
            )

    def check_weights(self, position: Position) -> None:
        """Raise ``NonFiniteLossError`` if a weight is not finite: a finite loss may have had an infinite gradient."""
        if not self._train_state.is_finite():
            raise NonFiniteLossError(
                f"the weights are not finite after step {position.step}; the last checkpoint "
                f"(step {self.saved_step}) is kept: lower stages.{position.stage}.learning_rate"
            )

    def save_bank(self, position: Position, store: Store) -> None:
        """Write the bank's snapshot of this step; collective.

        The rows of a step are written once: a snapshot that continues a replaced one could not be restored.
        """
        if position.step != self._bank_step:
            store.save(step=position.step)
            self._bank_step = position.step

    def _save_bank(self, position: Position, store: Store) -> None:
        """Write the bank's snapshot before the checkpoint that needs it; move shards whose nodes will be removed."""
        self.save_bank(position, store)
        bank = self._job.bank
        if bank is None:
            return
        if self._is_writer:
            self._move_shards(bank)
            bank.prune([position.step, *saved_steps(self._job.output)])
        # Rows that reached a shard between its snapshot and its move would be lost.
        wait_for_all(self._device)

    def _move_shards(self, bank: Bank) -> None:
        """Move the shards whose nodes will be removed to other nodes with room, after a snapshot; report each."""
        for _ in range(bank.spec.num_shards):  # one by one: each takes room that the next one may count on
            moving = [each for each in bank.at_risk() if each.has_room]
            if not moving:
                return
            bank.move([moving[0].shard])  # if another run took the room, the next group waits for it
            self._notify(bank, moving[0], "moved away from")

    def _notify(self, bank: Bank, risk: ShardAtRisk, text: str) -> None:
        name, node = bank.spec.actor_name(risk.shard), f"node {risk.node_id[:8]}, which will be removed"
        self._job.coordinator.add_notice.remote(f"the bank's shard {name!r} {text} {node}")

    def _report(
        self, position: Position, store: Store, metrics: Mapping[str, Any], *, evaluated: bool
    ) -> None:
        """Pass the checkpoint to Ray Train, which waits for all workers."""
        name = _name(position, evaluated=evaluated)
        reported: dict[str, Any] = {
            "step": position.step,
            "stage": position.stage,
            "rollbacks": position.rollbacks,
            "is_healthy": self._monitor.is_healthy,
        }
        score = self._score(position, metrics, evaluated=evaluated)
        if score is not None:
            reported[SCORE] = score
        if not self._is_writer:
            ray.train.report(reported, checkpoint=None, checkpoint_dir_name=name)
            return
        with tempfile.TemporaryDirectory(prefix="raycl-") as folder:
            state = {
                "learner": self._train_state.state_dict(),
                "store": store.state_dict(),
                "mined": {} if self._mined is None else self._mined.state_dict(),
                "watch": self._monitor.state_dict(),
                "chain": self._chain.state_dict() | {"checkpoint": name},
                "position": asdict(position),
                "metrics": dict(metrics),
            }
            torch.save(state, Path(folder) / STATE)
            self._chain.checkpoint(name, position, Path(folder) / STATE)
            checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(reported, checkpoint=checkpoint, checkpoint_dir_name=name)

    def _score(self, position: Position, metrics: Mapping[str, Any], *, evaluated: bool) -> float | None:
        """Return the evaluation of these weights, or the training time in a run without evaluation.

        Checkpoints of a collapsing run get no score, so that they never displace a healthy one.
        """
        if not self._monitor.is_healthy:
            return None
        if self._job.is_evaluated:
            return metrics.get(self._job.config.evaluation_metric) if evaluated else None
        return position.seconds

    def _is_bank_newly_at_risk(self) -> bool:
        """Whether a node with a shard will be removed, and none of the last checkpoints was saved for that."""
        bank = self._job.bank
        if bank is None:
            return False
        at_risk = frozenset(bank.at_risk())
        new, self._at_risk = at_risk - self._at_risk, at_risk
        for each in sorted(new):
            if not each.has_room:
                need = format_bytes(reserved_memory(bank.spec)[each.shard])
                self._notify(
                    bank, each, f"finds no other node with {need} of free memory: add one; it stays on"
                )
        return bool(new)

    def _is_newly_preempted(self) -> bool:
        info = ray.train.get_preemption_info()
        preempted = frozenset() if info is None else frozenset(info.preempted_ranks)
        is_new, self._preempted = bool(preempted - self._preempted), preempted
        return is_new


def next_interval_s(last_s: float, *, cost_s: float, between_losses_s: float = math.inf) -> float:
    """Return the seconds to the next checkpoint: so many that this one's cost is 1% of them, from 2 to 300.

    Where losses are frequent, less: the interval at which checkpoints and repeated steps together take the least time,
    for losses that are ``between_losses_s`` apart on average (Young, 1974). At most twice the last interval: one slow
    write, as the first one often is, says little about the next.
    """
    shortest, longest = _INTERVALS_S
    best = min(cost_s / _MAX_COST, math.sqrt(2 * cost_s * between_losses_s))
    return min(longest, max(shortest, min(best, 2.0 * last_s)))


def saved_steps(output: Place) -> set[int]:
    """Return the steps that have a checkpoint, complete or not."""
    folder = output / CHECKPOINTS
    names = {path.split("/")[0] for path, _ in folder.files()} if folder.exists() else set()
    return {found[0] for found in map(numbers_of, names) if found}


def numbers_of(name: str) -> tuple[int, int, int] | None:
    """Return the step, the stage and the number of rollbacks of the checkpoint of this name; None for other names."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2] or 0), int(found[3] or 0))


def resume_order(name: str) -> tuple[int, int, int]:
    """Return the rollbacks, the step and the stage of a checkpoint: the order in which a run resumes from the last one."""
    step, stage, rollbacks = numbers_of(name) or (0, 0, 0)
    return rollbacks, step, stage


def load_checkpoint() -> Restored | None:
    """Load the latest checkpoint of the run, if any."""
    checkpoint = ray.train.get_checkpoint()
    return None if checkpoint is None else _load(checkpoint)


def load_healthy_checkpoint() -> Restored | None:
    """Load the latest checkpoint without a sign of collapse, if any; collective."""
    all_saved = ray.train.get_all_reported_checkpoints(
        consistency_mode=ray.train.CheckpointConsistencyMode.COMMITTED
    )
    healthy = [each for each in all_saved if each.metrics["is_healthy"]]
    # Two checkpoints may have the same step: before and after a rollback, or between two stages.
    latest = max(healthy, key=lambda each: [each.metrics[key] for key in _ORDER], default=None)
    check_equal(-1 if latest is None else latest.metrics["step"], "the step to roll back to")
    return None if latest is None else _load(latest.checkpoint)


def _name(position: Position, *, evaluated: bool) -> str:
    """Return a unique name: Ray Train would delete one of two checkpoints with the same name."""
    stage = f"-stage{position.stage}" if position.stage else ""
    again = f"-again{position.rollbacks}" if position.rollbacks else ""
    return f"step-{position.step:08d}{stage}{again}{'-evaluated' if evaluated else ''}"


def _load(checkpoint: ray.train.Checkpoint) -> Restored:
    with checkpoint.as_directory() as folder:
        return read_checkpoint((Path(folder) / STATE).read_bytes(), f"{checkpoint.path}/{STATE}")


def read_checkpoint(content: bytes, name: str) -> Restored:
    """Return the content of the file ``name`` of a checkpoint; raises ``StorageError`` if it is damaged."""
    state = load_state(content, name)
    return Restored(
        position=Position(**state["position"]),
        is_evaluated=name.endswith((f"-evaluated/{STATE}", f"-judged/{STATE}")),
        metrics=state["metrics"],
        train_state=state["learner"],
        store_state=state["store"],
        mined_state=state.get("mined", {}),  # none in checkpoints of earlier versions
        monitor_state=state["watch"],
        chain_state=state.get("chain", {}),  # the same
    )
