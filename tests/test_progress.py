"""The throughput on the progress line, and the notice of a run that waits."""

from typing import Any

import pytest

from raycl import progress
from raycl.training.coordinator import RunCoordinator


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a view of a run that has processed this many samples after this many seconds."""
    now: dict[str, Any] = {}
    monkeypatch.setattr(progress.time, "monotonic", lambda: now["seconds"])
    monkeypatch.setattr(progress, "_call", lambda _: now["progress"])

    class FakeProgress:
        progress = None

    look = progress.steps_made(FakeProgress)

    def at(seconds: float, samples: int, **others: int) -> str:
        now["seconds"] = seconds
        now["progress"] = {"step": 1, "num_steps": 9, "samples": samples, "epoch": 0, "loss": 1.0} | others
        seen = look()
        assert seen is not None
        return seen[2].partition("loss 1.0000")[2].strip()

    return at


def test_the_pace_covers_the_last_seconds(at: Any) -> None:
    assert at(0, 64) == ""
    for second in range(1, 61):
        shown = at(second, 64 + 100 * second)
    assert shown == "100 samples/s"
    for second in range(1, 13):
        shown = at(60 + second, 6_064 + 10 * second)
    assert shown == "10 samples/s"


def test_the_pace_of_long_steps_covers_the_last_step(at: Any) -> None:
    at(0, 0)
    for second in range(60, 120):
        assert at(second, 600) == "10 samples/s"
    for second in range(120, 180):
        assert at(second, 1_200) == "10 samples/s"


def test_the_pace_drops_while_a_run_stalls_and_restarts_after_a_resume(at: Any) -> None:
    for second in range(11):
        shown = at(second, 100 * second)
    assert shown == "100 samples/s"
    assert at(110, 1_000) == "1 samples/s"
    assert at(120, 500) == ""
    assert at(121, 550) == "50 samples/s"


def test_the_pace_counts_views_if_a_sample_has_more_than_two(at: Any) -> None:
    at(0, 0, num_views=6)
    assert at(1, 1_000, num_views=6) == "1,000 samples/s  6,000 views/s"
    assert at(2, 2_000, num_views=2) == "1,000 samples/s"


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([(80, 80), (95, 200), (97, 200), (98, 1), (300, 100)], [0, 1, 1, 1, 2]),
        ([(60, 600)], [0]),  # reading the data took longer
    ],
)
def test_a_run_without_workers_says_once_that_it_waits(
    looks: list[tuple[float, float]], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, age, coordinator = [0.0], [0.0], RunCoordinator()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(coordinator, "seconds_since_heartbeat", lambda: age[0])
    read = progress.notices_of(coordinator, when_waiting="waits")
    for (now[0], age[0]), number in zip(looks, expected, strict=True):
        assert read() == ["waits"] * number


def test_a_log_shows_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    show = progress._print_periodically("embedding")
    for done, is_last in [(0, False), (5, False), (9, False), (9, True)]:
        show(done, 9, "rows", is_last)
    assert capsys.readouterr().err.splitlines() == ["embedding 0/9  rows", "embedding 9/9  rows"]
    show(9, 9, "rows", True)
    assert not capsys.readouterr().err
