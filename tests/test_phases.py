"""Step time by phase: nested phases, threads, and the fractions of a logging interval; goodput and failures."""

import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from ray.exceptions import GetTimeoutError

from raycl.config.schema import CheckpointConfig
from raycl.distributed.step_timer import PAUSED, REST, StepTimer, counted, phase
from raycl.recipes import recipe
from raycl.records import MetricsLog, failures, read_metrics, wall_seconds
from raycl.storage import Place
from raycl.training import checkpoint
from raycl.training.checkpoint import Checkpointer, next_interval_s
from raycl.training.coordinator import RunCoordinator
from raycl.training.driver import _failure as lose_group
from raycl.training.job import Failure
from raycl.training.metrics_logger import Clock, MetricsLogger
from raycl.training.stages import Position


class ManualClock:
    """A clock that tests advance by hand."""

    now = 0.0

    def move(self, seconds: float) -> None:
        self.now += seconds

    def read(self) -> float:
        return self.now


@pytest.fixture
def manual_clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    manual_clock = ManualClock()
    stopped = SimpleNamespace(
        perf_counter=manual_clock.read, monotonic=manual_clock.read, time=manual_clock.read
    )
    monkeypatch.setattr("raycl.distributed.step_timer.time", stopped)
    monkeypatch.setattr("raycl.training.metrics_logger.time", stopped)
    monkeypatch.setattr("raycl.training.checkpoint.time", stopped)
    return manual_clock


def test_the_time_of_a_nested_phase_is_subtracted_from_the_outer_phase(manual_clock: ManualClock) -> None:
    timer = StepTimer()
    with counted(timer), phase("forward"):
        manual_clock.move(0.02)
        with phase("messages"):
            manual_clock.move(0.05)
        manual_clock.move(0.02)
    assert timer.seconds() == pytest.approx({REST: 0, "forward": 0.04, "messages": 0.05})


def test_reading_the_seconds_resets_them_even_within_a_phase(manual_clock: ManualClock) -> None:
    timer = StepTimer()
    with counted(timer), phase("loss"):
        manual_clock.move(0.02)
        assert timer.seconds()["loss"] == pytest.approx(0.02)
        manual_clock.move(0.01)
    assert timer.seconds()["loss"] == pytest.approx(0.01)
    assert timer.seconds() == {REST: 0}


def test_many_phases_need_few_marks(manual_clock: ManualClock) -> None:
    timer = StepTimer()
    with counted(timer):
        for _ in range(20_000):
            with phase("loss"):
                manual_clock.move(1)
    assert len(timer._marks) <= 4_097
    assert timer.seconds()["loss"] == 20_000


def test_an_error_ends_the_phase_and_without_a_timer_nothing_is_counted(manual_clock: ManualClock) -> None:
    timer = StepTimer()
    with counted(timer), pytest.raises(ValueError, match="failed"), phase("loss"):
        raise ValueError("failed")
    with phase("update"):
        manual_clock.move(0.01)
    assert timer.seconds() == pytest.approx({REST: 0.01, "loss": 0})


def test_the_timer_ignores_other_threads(manual_clock: ManualClock) -> None:
    timer = StepTimer()

    def work() -> None:
        with phase("data"):
            manual_clock.move(0.01)

    with counted(timer):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert "data" not in timer.seconds()


def test_messages_within_a_backward_pass_are_counted(manual_clock: ManualClock) -> None:
    class SimilaritySummary(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, rows: torch.Tensor) -> torch.Tensor:
            return rows.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            with phase("messages"):
                manual_clock.move(0.02)
            return grad

    timer = StepTimer()
    rows = torch.ones(2, requires_grad=True)
    with counted(timer), phase("backward"):
        SimilaritySummary.apply(rows).sum().backward()  # pyright: ignore[reportAttributeAccessIssue]
    assert timer.seconds()["messages"] == pytest.approx(0.02)


def test_fractions_of_an_interval_sum_to_1_without_evaluations(manual_clock: ManualClock) -> None:
    clock = Clock(Position())
    with clock.counting():
        with phase("data"):
            manual_clock.move(0.01)
        with phase("forward"):
            manual_clock.move(0.02)
        with clock.paused(), phase("messages"):
            manual_clock.move(0.1)
        _, metrics = clock.lap(samples=64)
    fractions = {name: value for name, value in metrics.items() if name.endswith("_fraction")}
    assert sum(fractions.values()) == pytest.approx(1)
    assert fractions.keys() & {f"{PAUSED}_fraction", "messages_fraction"} == set()
    assert metrics["data_wait_fraction"] == pytest.approx(1 / 3)
    assert metrics["forward_fraction"] == pytest.approx(2 / 3)
    assert metrics["samples_per_second"] == pytest.approx(64 / 0.03)


@pytest.mark.parametrize(("num_views", "rate"), [(2, None), (6, 600.0)])
def test_a_run_with_more_than_two_views_counts_views_per_second(
    manual_clock: ManualClock, num_views: int, rate: float | None
) -> None:
    clock = Clock(Position(), num_views=num_views)
    manual_clock.move(1.0)
    _, metrics = clock.lap(samples=100)
    assert metrics["samples_per_second"] == pytest.approx(100)
    assert metrics.get("views_per_second") == (None if rate is None else pytest.approx(rate))


def test_goodput_counts_no_step_of_a_lost_group(manual_clock: ManualClock, tmp_path: Path) -> None:
    def group(position: Position, failure: Failure | None = None) -> MetricsLogger:
        job = SimpleNamespace(
            config=recipe("simclr"),
            output=output,
            coordinator=None,
            began=100.0,
            failure=failure,
            check_lease=str,
        )
        resumes = position.step > 0
        return MetricsLogger(job, position, num_steps=90, resumes=resumes)  # pyright: ignore[reportArgumentType]

    def step(logger: MetricsLogger, number: int, seconds: float) -> None:
        manual_clock.move(seconds)
        logger.write_failure()
        logger.write(Position(step=number, seconds=logger.clock.seconds()), {"loss": 1.0})

    output = Place(str(tmp_path))
    manual_clock.move(100.0)
    logger = group(Position())
    step(logger, 10, 50.0)
    with logger.clock.paused():
        manual_clock.move(10.0)  # a checkpoint of step 10
    step(logger, 16, 30.0)  # ended at 190
    logger.flush()
    manual_clock.move(12.0)
    lost = Failure(text="worker 1 died", step=16, seconds=80.0, time=190.0)
    logger = group(Position(step=10, seconds=50.0), lost)
    step(logger, 11, 5.0)  # ends at 207
    step(logger, 20, 48.0)  # at 255
    logger.flush()

    text = "worker 1 died: resumed from step 10 after 17.0 s, repeating 6 steps: 47.0 s lost"
    assert failures(output) == [{"step": 10, "text": text, "lost_seconds": 47.0, "repeated_steps": 6}]
    # Training of 50 s before the checkpoint and 53 s after the failure, in 155 s.
    last = read_metrics(output)[-1]
    assert {line["num_steps"] for line in read_metrics(output)} == {90}
    assert (last["step"], last["wall_seconds"], last["seconds"]) == (20, 155.0, 103.0)
    assert last["goodput"] == pytest.approx(103 / 155, rel=1e-5)
    assert wall_seconds(output) == 155.0
    # The line stays if the next group resumes from the same checkpoint.
    logger = group(Position(step=10, seconds=50.0))
    logger.flush()
    assert [line["text"] for line in failures(output)] == [text]
    # A later group that knows the failure, for a stage with other workers or restarted by Ray Train, writes no other.
    manual_clock.move(3_600.0)
    logger = group(Position(step=20, seconds=103.0), lost)
    step(logger, 21, 5.0)
    logger.flush()
    assert [line["text"] for line in failures(output)] == [text]
    # A group that resumes from before the line has lost it, and writes it at once: it may be lost itself.
    logger = group(Position(step=9, seconds=45.0), lost)
    step(logger, 10, 5.0)
    assert [line["step"] for line in failures(output)] == [9]


def test_the_progress_at_an_evaluation_and_at_the_end_is_that_of_the_last_step(
    manual_clock: ManualClock, tmp_path: Path
) -> None:
    coordinator = RunCoordinator()
    add_progress = SimpleNamespace(remote=coordinator.add_progress)
    job: Any = SimpleNamespace(
        config=recipe("simclr"),
        output=Place(str(tmp_path)),
        coordinator=SimpleNamespace(add_progress=add_progress),
        began=0.0,
        failure=None,
        check_lease=str,
    )
    manual_clock.move(100.0)
    logger = MetricsLogger(job, Position(), num_steps=9)
    logger.write_evaluation(Position(), {"knn_top1": 0.1})
    assert coordinator.progress() == {"knn_top1": 0.1}  # no line before the first step
    for number in range(1, 9):  # faster than they are shown
        logger.show_progress(Position(step=number, samples=4 * number), loss=1 / number)
    logger.write_evaluation(Position(step=8), {"knn_top1": 0.5})
    shown = coordinator.progress()
    assert (shown["step"], shown["samples"], shown["loss"], shown["knn_top1"]) == (8, 32, 0.125, 0.5)
    logger.show_progress(Position(step=9, samples=36), loss=0.1)
    logger.close(finished=True)
    shown = coordinator.progress()
    assert (shown["step"], shown["loss"], shown["knn_top1"]) == (9, 0.1, 0.5)


def test_a_group_lost_before_its_first_step_adds_to_the_failure_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = Place(str(tmp_path))

    def lose(text: str, failure: Failure | None, **progress: float) -> Failure:
        progress_of = SimpleNamespace(remote=lambda: progress)
        # A resumed run: it began at 20, without the time in which no driver ran.
        job: Any = SimpleNamespace(
            coordinator=SimpleNamespace(progress=progress_of), began=20.0, failure=failure, output=output
        )
        return lose_group(job, text, started=100.0)

    monkeypatch.setattr("raycl.training.driver.ray", SimpleNamespace(get=lambda value, timeout: value))
    monkeypatch.setattr("raycl.training.driver.time.time", lambda: 191.0)
    at_once = lose("no node", None)
    assert at_once == Failure(text="no node", step=0, seconds=0.0, time=100.0, after_s=91.0)
    first = lose("worker 1 died", at_once, step=16, seconds=80.0, time=190.0)
    assert first == Failure(text="worker 1 died", step=16, seconds=80.0, time=190.0, number=2, after_s=91.0)
    again = lose("no node", first, step=16, seconds=80.0, time=190.0)
    assert again == Failure(
        text="worker 1 died; no node", step=16, seconds=80.0, time=190.0, number=2, after_s=91.0
    )
    assert lose("no node", first) == again
    # The next group made a step and reported the failure; then the coordinator was restarted, and lost the progress.
    log = MetricsLog(output)
    log.write({"step": 10, "event": "failure", "failed_at": 190})
    log.flush()
    monkeypatch.setattr("raycl.training.driver.time.time", lambda: 250.0)
    assert lose("worker 0 died", again) == Failure(
        text="worker 0 died", step=0, seconds=0.0, time=250.0, number=3, after_s=150.0
    )


def test_the_log_says_when_a_group_was_lost_together_with_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_answer(_: Any, timeout: float) -> None:
        raise GetTimeoutError

    monkeypatch.setattr("raycl.training.driver.ray", SimpleNamespace(get=no_answer))
    monkeypatch.setattr("raycl.training.driver.time.time", lambda: 3_700.0)
    job: Any = SimpleNamespace(coordinator=MagicMock(), failure=None, output=Place(str(tmp_path)))
    log = MetricsLog(job.output)
    log.write({"step": 900, "seconds": 3_000.0, "time": 90})
    log.flush()
    # Another driver wrote this line.
    assert lose_group(job, "node lost", started=100.0).time == 100.0
    log.write({"step": 950, "seconds": 3_200.0, "time": 3_690})
    log.flush()
    lost = lose_group(job, "node lost", started=100.0)
    assert (lost.step, lost.seconds, lost.time) == (950, 3_200.0, 3_690)
    # The next group made no step.
    job.failure = lost
    assert lose_group(job, "no node", started=100.0).text == "node lost; no node"


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([0.01], 2.0),
        ([0.03], 3.0),
        # One slow write does not postpone the next checkpoint much.
        ([0.9, 0.03], 3.0),
        ([0.9], 4.0),
        ([0.4] * 10, 40.0),
        ([5.0] * 20, 300.0),
    ],
)
def test_checkpoints_take_at_most_1_percent_of_the_time(costs: list[float], expected: float) -> None:
    settings = SimpleNamespace(config=SimpleNamespace(checkpoints=CheckpointConfig()))
    given: Any = (settings, None, None, None, None, Position(), None, torch.device("cpu"))
    interval = Checkpointer(*given)._interval_s
    assert interval == 2.0
    for cost in costs:
        interval = next_interval_s(interval, cost_s=cost)
    assert interval == pytest.approx(expected)


@pytest.mark.parametrize(("cost", "between"), [(0.08, 120.0), (5.0, 3_600.0), (0.5, 600.0)])
def test_after_losses_checkpoints_are_so_frequent_that_least_time_is_lost(
    cost: float, between: float
) -> None:
    def lost_fraction(interval: float) -> float:
        return (
            cost / interval + interval / 2 / between
        )  # checkpoints, and half an interval repeated by each loss

    interval = next_interval_s(1e9, cost_s=cost, between_losses_s=between)
    assert lost_fraction(interval) < min(lost_fraction(0.9 * interval), lost_fraction(1.1 * interval))
    assert lost_fraction(interval) < 0.95 * lost_fraction(next_interval_s(1e9, cost_s=cost))
    # Rare losses change nothing.
    assert next_interval_s(1e9, cost_s=cost, between_losses_s=1e7) == min(300.0, 100 * cost)


def test_the_mean_time_between_losses_grows_while_none_follows(
    monkeypatch: pytest.MonkeyPatch, manual_clock: ManualClock
) -> None:
    lost = Failure(text="worker 1 died", step=16, seconds=80.0, time=190.0, number=3, after_s=60.0)
    job = MagicMock(config=SimpleNamespace(checkpoints=CheckpointConfig()), failure=lost, bank=None)
    asked: list[float] = []

    def next_interval(last_s: float, *, cost_s: float, between_losses_s: float) -> float:
        asked.append(between_losses_s)
        return last_s

    monkeypatch.setattr(checkpoint, "next_interval_s", next_interval)
    monkeypatch.setattr(checkpoint, "backup_manifest", lambda _: None)
    monkeypatch.setattr(Checkpointer, "_report", lambda *_, **__: None)
    given: Any = (job, MagicMock(), None, MagicMock(), MagicMock(), Position(), None, torch.device("cpu"))
    checkpointer = Checkpointer(*given)
    for step in (1, 2):
        manual_clock.move(30.0)
        checkpointer.save(Position(step=step), MagicMock(), {})
    job.failure = None
    checkpointer.save(Position(step=3), MagicMock(), {})
    assert asked == [30.0, 40.0, math.inf]


def test_an_interval_of_the_configuration_is_kept() -> None:
    settings = SimpleNamespace(config=SimpleNamespace(checkpoints=CheckpointConfig(interval_s=60.0)))
    given: Any = (settings, None, None, None, None, Position(), None, torch.device("cpu"))
    assert Checkpointer(*given)._interval_s == 60.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_execution_time_of_an_accelerator_is_counted() -> None:
    timer = StepTimer(on_accelerator=True)
    a = torch.randn(4_096, 4_096, device="cuda")
    with counted(timer):
        for _ in range(20):
            with phase("forward"):
                a = a @ a / 100
    # Launching the matrix products is far faster than executing them.
    assert timer.seconds()["forward"] > 0.005
