"""The account of a step's time: phases within phases, threads, laps."""

import threading
from types import SimpleNamespace

import pytest
import torch

from raycl.distributed.step_timer import PAUSED, REST, StepTimer, counted, phase
from raycl.training.metrics_logger import Clock
from raycl.training.stages import Position


class Hands:
    """The hands of a clock that goes on only when somebody moves it."""

    now = 0.0

    def move(self, seconds: float) -> None:
        self.now += seconds

    def read(self) -> float:
        return self.now


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    hands = Hands()
    stopped = SimpleNamespace(perf_counter=hands.read, monotonic=hands.read)
    monkeypatch.setattr("raycl.distributed.step_timer.time", stopped)
    monkeypatch.setattr("raycl.training.metrics_logger.time", stopped)
    return hands


def test_a_phase_within_another_takes_its_time_off_it(hands: Hands) -> None:
    account = StepTimer()
    with counted(account), phase("forward"):
        hands.move(0.02)
        with phase("messages"):
            hands.move(0.05)
        hands.move(0.02)
    assert account.seconds() == pytest.approx({REST: 0, "forward": 0.04, "messages": 0.05})


def test_a_question_begins_a_new_lap_also_within_a_phase(hands: Hands) -> None:
    account = StepTimer()
    with counted(account), phase("loss"):
        hands.move(0.02)
        assert account.seconds()["loss"] == pytest.approx(0.02)
        hands.move(0.01)
    assert account.seconds()["loss"] == pytest.approx(0.01)
    assert account.seconds() == {REST: 0}


def test_many_phases_are_counted_with_few_marks(hands: Hands) -> None:
    account = StepTimer()
    with counted(account):
        for _ in range(20_000):
            with phase("loss"):
                hands.move(1)
    assert len(account._marks) <= 4_097
    assert account.seconds()["loss"] == 20_000


def test_an_error_ends_the_phase_and_no_account_counts_nothing(hands: Hands) -> None:
    account = StepTimer()
    with counted(account), pytest.raises(ValueError, match="broken"), phase("loss"):
        raise ValueError("broken")
    with phase("update"):
        hands.move(0.01)
    assert account.seconds() == pytest.approx({REST: 0.01, "loss": 0})


def test_another_thread_has_no_account(hands: Hands) -> None:
    account = StepTimer()

    def work() -> None:
        with phase("data"):
            hands.move(0.01)

    with counted(account):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert "data" not in account.seconds()


def test_what_a_backward_pass_says_to_other_workers_is_counted(hands: Hands) -> None:
    class SimilaritySummary(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, rows: torch.Tensor) -> torch.Tensor:
            return rows.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            with phase("messages"):
                hands.move(0.02)
            return grad

    account = StepTimer()
    rows = torch.ones(2, requires_grad=True)
    with counted(account), phase("backward"):
        SimilaritySummary.apply(rows).sum().backward()  # pyright: ignore[reportAttributeAccessIssue]
    assert account.seconds()["messages"] == pytest.approx(0.02)


def test_a_lap_tells_fractions_that_are_one_together_without_judgments(hands: Hands) -> None:
    clock = Clock(Position())
    with clock.counting():
        with phase("data"):
            hands.move(0.01)
        with phase("forward"):
            hands.move(0.02)
        with clock.paused(), phase("messages"):
            hands.move(0.1)
        _, metrics = clock.lap(samples=64)
    fractions = {name: value for name, value in metrics.items() if name.endswith("_fraction")}
    assert sum(fractions.values()) == pytest.approx(1)
    assert fractions.keys() & {f"{PAUSED}_fraction", "messages_fraction"} == set()
    assert metrics["data_wait_fraction"] == pytest.approx(1 / 3)
    assert metrics["forward_fraction"] == pytest.approx(2 / 3)
    assert metrics["samples_per_second"] == pytest.approx(64 / 0.03)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_accelerators_own_time_is_counted() -> None:
    account = StepTimer(on_accelerator=True)
    a = torch.randn(4_096, 4_096, device="cuda")
    with counted(account):
        for _ in range(20):
            with phase("forward"):
                a = a @ a / 100
    # It is given at once, and takes far longer.
    assert account.seconds()["forward"] > 0.005
