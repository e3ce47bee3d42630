"""The loop of a worker between its steps, which are pretended: stops, collapses, checkpoints and their names."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from raycl.config import RunConfig
from raycl.config.overrides import override
from raycl.errors import CollapseError, NonFiniteLossError
from raycl.models.towers import LearnedTemperature
from raycl.recipes import recipe
from raycl.storage import Place
from raycl.training import checkpoint, loop
from raycl.training.controller import Finished, Stopped
from raycl.training.stages import Position, StagePlan, stage_plans
from raycl.training.train_state import TrainState

HINGE = {"stages.0.loss": "hinge", "monitor.on_collapse": "rollback"}


@dataclass
class Pretended:
    """A run of two epochs of four steps: the decisions of the test, and the actions of the loop."""

    config: RunConfig
    collapses: set[int] = field(default_factory=set)
    stop_requested: set[int] = field(default_factory=set)
    steps: list[int] = field(default_factory=list)
    epochs_read: list[tuple[int, int]] = field(default_factory=list)  # each with its first step
    is_evaluated: bool = False
    evaluated: list[int] = field(default_factory=list)  # the steps of the evaluations
    diverges_at: int | None = None  # the weights are not finite from this step on
    has_slots: bool = False  # of a memory bank, which begin as embeddings
    saved: list[str] = field(default_factory=list)
    scores: dict[str, float | None] = field(default_factory=dict)
    bank_snapshots: list[int] = field(default_factory=list)


@dataclass
class PretendedRunner:
    """Count steps without data and weights."""

    run: Pretended
    position: Position

    def __post_init__(self) -> None:
        self.config, self.rows, self.transform = self.run.config, None, None
        self.mined = self.miner = self.keys = None
        self.plans = stage_plans(self.config, num_train=[4 * self.config.stages[0].batch_size])
        self.num_steps = sum(plan.num_steps for plan in self.plans)
        self.state, self.epochs, self.store = MagicMock(), MagicMock(), MagicMock()
        self.state.is_finite = lambda: (
            self.run.diverges_at is None or self.position.step < self.run.diverges_at
        )
        self.store.save = lambda step: self.run.bank_snapshots.append(step)
        self.state.state_dict.return_value = self.store.state_dict.return_value = {}

    @property
    def plan(self) -> StagePlan:
        return self.plans[self.position.stage]

    def is_stage_over(self) -> bool:
        return self.plan.is_over(steps=self.position.stage_step, epochs=self.position.stage_epoch)

    def views(self) -> Iterator[Any]:
        self.run.epochs_read.append((self.position.epoch, self.position.epoch_step))
        for _ in range(self.position.epoch_step, 4):
            yield MagicMock()

    def step(self, views: Any, **_: Any) -> Any:
        self.position = self.position.next_step(batch_size=self.plan.stage.batch_size)
        self.run.steps.append(self.position.step)
        return SimpleNamespace(
            loss=1.0,
            collapsed_loss=None,
            stop_requested=self.position.step in self.run.stop_requested,
            check_requested=False,
            measure=dict,
        )

    def initialize_bank(self) -> bool:
        return self.run.has_slots

    def end_epoch(self) -> None:
        self.position = self.position.next_epoch()

    def end_stage(self) -> None:
        self.position = self.position.next_stage()

    def restore(self, restored: Any, position: Position) -> None:
        self.position = position


class PretendedMonitor:
    """Report a collapse once at each step that the test names."""

    is_healthy = True
    reports_again = False

    def __init__(self, run: Pretended) -> None:
        self._collapses = run.collapses

    def update(self, *, step: int, **_: Any) -> str | None:
        if step not in self._collapses:
            return None
        self._collapses.remove(step)
        return "the embeddings are one point"

    def reset(self) -> None:
        pass

    def report_again(self) -> None:
        self.reports_again = True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


Begin = Callable[..., tuple[loop.Trainer, Pretended]]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Begin:
    """Return a function that makes the trainer of a run with these settings and facts."""

    def trainer(settings: dict[str, Any] | None = None, restored: Any = None, **facts: Any) -> Any:
        rarely = {"log_every_steps": 1, "checkpoints.interval_s": 1e9, "stages.0.epochs": 2}
        run = Pretended(override(recipe("simclr"), rarely | (settings or {})), **facts)
        evaluator = MagicMock()
        evaluator.baseline.return_value = {}
        job = MagicMock(config=run.config, output=Place(str(tmp_path)), bank=None, workers=(1, 1))
        job.is_evaluated = run.is_evaluated
        job.workers_at.return_value = (1, 1)
        position = Position() if restored is None else restored.position
        runner = PretendedRunner(run, position)

        def measure(*_: Any) -> dict[str, float]:
            run.evaluated.append(runner.position.step)
            return {"knn_top1": 0.5}

        evaluator.measure = measure
        monitor, logger, chain = PretendedMonitor(run), MagicMock(), MagicMock()
        logger.clock.seconds.return_value = 1.0
        logger.clock.lap.return_value = (1.0, {})
        chain.state_dict.return_value = {}
        for name, made in {
            "StepRunner": runner,
            "CollapseMonitor": monitor,
            "MetricsLogger": logger,
            "RunChain": chain,
            "build_evaluator": evaluator if run.is_evaluated else None,
            "build_snapshot_writer": None,
            "save_towers": None,
        }.items():
            monkeypatch.setattr(loop, name, lambda *_, made=made, **__: made)

        def report(metrics: dict[str, Any], *, checkpoint: Any, checkpoint_dir_name: str) -> None:
            run.saved.append(checkpoint_dir_name)
            run.scores[checkpoint_dir_name] = metrics.get("score")

        monkeypatch.setattr("ray.train.report", report)
        monkeypatch.setattr("ray.train.get_preemption_info", lambda: None)
        monkeypatch.setattr(checkpoint.torch, "save", lambda state, path: None)
        return loop.Trainer(job, restored, torch.device("cpu"), Event()), run

    return trainer


@pytest.mark.parametrize(("reserved", "expected"), [(None, 4), (3.0, 3), (0.5, 1), (16.0, 4)])
def test_a_worker_uses_its_share_of_the_cores_up_to_its_reserved_cpus(
    reserved: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = MagicMock()
    ray.train.get_context.return_value.get_local_world_size.return_value = 2
    monkeypatch.setattr(loop, "ray", ray)
    monkeypatch.setattr(loop, "available_cores", lambda: 8)
    assert loop._num_threads(reserved) == expected


def test_a_warning_of_a_collapse_does_not_read_the_epoch_again(begin: Begin) -> None:
    trainer, run = begin({"checkpoints.every_steps": 2}, collapses={2})
    trainer.run()
    assert run.steps == [*range(1, 9)]
    assert run.epochs_read == [(0, 0), (1, 0)]
    assert run.saved[0] == "step-00000002"


def test_a_rollback_reads_the_epoch_again_from_the_restored_step(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, run = begin(HINGE | {"checkpoints.every_steps": 2}, collapses={3})
    position = Position(step=2, samples=2, epoch_step=2, stage_step=2)
    restored = SimpleNamespace(position=position, chain_state={})
    monkeypatch.setattr(loop, "load_healthy_checkpoint", lambda: restored)
    trainer.run()
    assert run.steps == [1, 2, 3, *range(3, 9)]
    assert run.epochs_read == [(0, 0), (0, 2), (1, 0)]
    assert run.saved[2] == "step-00000002-again1"
    # A snapshot of step 3 may continue that of step 2: the rollback does not replace it.
    assert run.bank_snapshots == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("restored_step", "stage", "until"), [(2, 0, 4 + 500), (4, 1, 4 + 500), (5, 1, 5 + 500)]
)
def test_the_cross_entropy_after_a_rollback_replaces_steps_with_a_hinge(
    restored_step: int, stage: int, until: int, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = {"stages.0.epochs": 1, "stages.1.loss": "hinge", "monitor.on_collapse": "rollback"}
    trainer, run = begin(stages, collapses={6})
    in_stage = restored_step - 4 * stage
    position = Position(
        step=restored_step, epoch=stage, epoch_step=in_stage, stage=stage, stage_step=in_stage
    )
    restored = SimpleNamespace(position=position, chain_state={})
    monkeypatch.setattr(loop, "load_healthy_checkpoint", lambda: restored)
    trainer.run()
    assert run.steps == [*range(1, 7), *range(restored_step + 1, 9)]
    assert trainer._position.cross_entropy_until == until
    roll_back: Any = trainer._logger.roll_back
    ((_, text), _) = roll_back.call_args
    assert text == f"rolled back from step 6; cross-entropy until step {until}"


def test_checkpoints_of_one_step_share_the_snapshot_of_the_bank(begin: Begin) -> None:
    trainer, run = begin({"checkpoints.every_steps": 4}, is_evaluated=True)
    trainer.run()
    assert run.saved[:2] == ["step-00000004", "step-00000004-evaluated"]
    assert run.bank_snapshots == [4, 8]


@pytest.mark.parametrize("settings", [{}, HINGE])
def test_the_initialized_slots_of_a_bank_are_written_once(begin: Begin, settings: dict[str, Any]) -> None:
    trainer, run = begin(settings | {"checkpoints.every_steps": 4}, has_slots=True)
    trainer.run()
    assert run.saved[0] == ("step-00000000" if settings else "step-00000004")
    assert run.bank_snapshots == [0, 4, 8]


@pytest.mark.parametrize("every", [4, 3])
def test_the_last_weights_get_a_score_also_after_another_checkpoint_of_their_step(
    begin: Begin, every: int
) -> None:
    trainer, run = begin({"checkpoints.every_steps": every}, is_evaluated=True)
    trainer.run()
    assert run.saved[-1] == "step-00000008-evaluated"
    assert run.scores["step-00000008-evaluated"] == 0.5


@pytest.mark.parametrize(("name", "saved"), [("", ["step-00000008-evaluated"]), ("-evaluated", [])])
def test_a_finished_run_that_is_started_again_keeps_its_evaluated_checkpoint(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, name: str, saved: list[str]
) -> None:
    position = Position(step=8, samples=8, epoch=2, stage_step=8, stage_epoch=2)
    content: Any = {"position": vars(position), "metrics": {}, "learner": {}, "store": {}, "watch": {}}
    monkeypatch.setattr(checkpoint, "load_state", lambda *_: content)
    restored = checkpoint.read_checkpoint(b"", f"checkpoints/step-00000008{name}/state.pt")
    trainer, run = begin(restored=restored, is_evaluated=True)
    trainer.run()
    assert run.saved == saved


@pytest.mark.parametrize("last", [4, 8])  # of an epoch, of the run
def test_weights_that_are_not_finite_are_reported_before_they_are_evaluated(begin: Begin, last: int) -> None:
    trainer, run = begin({"evaluation.every_epochs": 1}, is_evaluated=True, diverges_at=last)
    with pytest.raises(
        NonFiniteLossError,
        match=f"the weights are not finite after step {last}; .*lower stages.0.learning_rate",
    ):
        trainer.run()
    assert run.evaluated == list(range(0, last, 4))


def test_weights_that_are_not_finite_are_never_saved(begin: Begin) -> None:
    trainer, run = begin({"checkpoints.every_steps": 1}, diverges_at=3)
    with pytest.raises(
        NonFiniteLossError, match=r"not finite after step 3; the last checkpoint \(step 2\) is kept"
    ):
        trainer.run()
    assert run.saved == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("name", ["tower", "prediction_head", "temperature"])
def test_a_weight_that_is_not_finite_is_found_in_each_part(name: str) -> None:
    parts: dict[str, Any] = {"tower": torch.nn.Linear(2, 2), "prediction_head": torch.nn.Linear(2, 2)}
    parts["temperature"] = LearnedTemperature(0.1)
    state = TrainState(**parts, optimizer=MagicMock())
    assert state.is_finite()
    with torch.no_grad():
        next(parts[name].parameters()).view(-1)[-1] = torch.nan
    assert not state.is_finite()


def test_a_run_that_stops_on_collapse_keeps_its_last_checkpoint(begin: Begin) -> None:
    trainer, run = begin({"monitor.on_collapse": "stop", "checkpoints.every_steps": 2}, collapses={3})
    with pytest.raises(CollapseError, match=r"one point; the last checkpoint \(step 2\) is kept: lower"):
        trainer.run()
    assert run.steps == [1, 2, 3]
    assert run.saved == ["step-00000002"]


@pytest.mark.parametrize(
    ("on_collapse", "is_reported"), [("warn", False), ("stop", True), ("rollback", True)]
)
def test_a_resumed_run_responds_to_a_collapse_that_was_warned_of(
    on_collapse: str, is_reported: bool, begin: Begin
) -> None:
    restored = SimpleNamespace(
        position=Position(step=2), is_evaluated=False, metrics={}, monitor_state={}, chain_state={}
    )
    trainer, _ = begin(HINGE | {"monitor.on_collapse": on_collapse}, restored)
    assert trainer._monitor.reports_again == is_reported  # pyright: ignore[reportAttributeAccessIssue]


def test_a_worker_holds_no_checkpoint_while_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []

    class Watched(SimpleNamespace):
        def __init__(self, job: Any, restored: Any, *_: Any) -> None:
            super().__init__(restored=weakref.ref(restored))

        def run(self) -> None:
            held.append(self.restored())

    ray = MagicMock()
    monkeypatch.setattr(loop, "ray", ray)
    for name in ("prepare_process", "_keep_standbys", "send_heartbeats"):
        monkeypatch.setattr(loop, name, MagicMock())
    names = ("metrics", "train_state", "store_state", "mined_state", "monitor_state", "chain_state")
    empty: Any = {name: {} for name in names}
    monkeypatch.setattr(
        loop, "load_checkpoint", lambda: checkpoint.Restored(position=Position(step=3), **empty)
    )
    monkeypatch.setattr(loop, "Trainer", Watched)
    ray.train.get_context.return_value.get_local_world_size.return_value = 1
    ray.get.return_value = job = MagicMock(workers=(1, 1))
    job.workers_at.return_value = job.workers
    loop.run_worker({"job": MagicMock()})
    assert held == [None]


@pytest.mark.parametrize(
    "settings", [{}, {"stages.0.epochs": None, "stages.0.steps": 6}], ids=["epochs", "steps"]
)
def test_a_stop_in_the_last_step_is_too_late(begin: Begin, settings: dict[str, Any]) -> None:
    last = settings.get("stages.0.steps", 8)
    trainer, run = begin(settings, stop_requested={last})
    assert isinstance(trainer.run(), Finished)
    assert run.saved == [f"step-{last:08d}"]
    trainer, run = begin(settings, stop_requested={last - 1})
    assert trainer.run() == Stopped(last - 1)
    assert run.saved == [f"step-{last - 1:08d}"]


@pytest.mark.parametrize(("every", "is_added"), [(5, True), (3, False)])
def test_the_log_has_the_last_step_of_a_stopped_run(begin: Begin, every: int, is_added: bool) -> None:
    trainer, _ = begin({"log_every_steps": every}, stop_requested={3})
    assert trainer.run() == Stopped(3)
    lines = [(position.step, metrics) for (position, metrics), _ in trainer._logger.write.call_args_list]  # pyright: ignore[reportAttributeAccessIssue]
    assert [step for step, _ in lines] == [3]
    assert (lines[0][1] == {}) == is_added  # no loss, which the whole run does not log at this step
