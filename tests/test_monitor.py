"""The collapse monitor on readings of real runs, and on synthetic ones that isolate a rule."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raycl.training.collapse_monitor import CollapseMonitor

# Every tenth step of runs on digits of 8x8 pixels: a small convolutional network, batches of 64.
# dipped: NT-Xent, temperature 0.2, in 2 dims; near one point for 250 steps before it starts to learn
# untrained: NT-Xent, temperature 0.5, no BatchNorm; an untrained network maps everything to nearly one point
# slow: the same with a learning rate of 1e-4; almost no change after 400 steps
# switched: NT-Xent, and from the ninth reading the hinge with the hardest negative at a learning rate of 2
# sunk: the hinge with the hardest negative from the start, at a learning rate of 0.5
# few dims: NT-Xent without BatchNorm at a learning rate of 5; the loss falls, on two dims of 64
# queue: InfoNCE with a momentum encoder and a queue; collapsed to a point, but the loss is a quarter below
#     trivial, because the queue contains older points
RECORDED = json.loads((Path(__file__).parent / "monitored_runs.json").read_text())
SOFTMAX = 4.8442  # the trivial loss of equal embeddings: log(2 * 64 - 1)
HEALTHY = ("dipped", "untrained", "slow")


def recorded(name: str) -> list[dict[str, Any]]:
    """Return the readings of a recorded run."""
    columns = {key: values for key, values in RECORDED[name].items() if key != "dim"}
    rows = zip(*columns.values(), strict=True)
    return [
        reading(10 * index, dim=RECORDED[name]["dim"], **dict(zip(columns, row, strict=True)))
        for index, row in enumerate(rows)
    ]


def reading(
    step: int,
    *,
    embedding_std: float = 0.8,
    rank: float = 12.0,
    gap: float | None = 0.4,
    loss: float = 3.0,
    trivial: float | None = SOFTMAX,
    dim: int = 64,
    num_rows: int = 64,
) -> dict[str, Any]:
    """Return the arguments of one reading, by default healthy."""
    measures = {"num_rows": num_rows, "dim": dim, "embedding_std": embedding_std, "effective_rank": rank}
    if gap is not None:
        measures["positive_negative_gap"] = gap
    return {"step": step, "measures": measures, "loss": loss, "collapsed_loss": trivial}


def watch(monitor: CollapseMonitor, readings: Iterable[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return the steps and texts of the monitor's reports."""
    verdicts = [(each["step"], monitor.update(**each)) for each in readings]
    return [(step, verdict) for step, verdict in verdicts if verdict is not None]


def sequence(*figures: dict[str, Any], first: int = 0) -> Iterator[dict[str, Any]]:
    """Return readings at every tenth step."""
    return (reading(10 * index, **each) for index, each in enumerate(figures, first))


GOOD: dict[str, Any] = {}
POINT = {"embedding_std": 0.01, "rank": 1.2, "gap": 0.0001, "loss": SOFTMAX}
NARROW = {"rank": 1.9}
LOST = {"embedding_std": 0.5, "gap": 0.002, "loss": SOFTMAX}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_run_that_has_not_started_to_learn_has_not_collapsed(name: str) -> None:
    assert watch(CollapseMonitor(), recorded(name)) == []


@pytest.mark.parametrize(
    ("name", "step", "text"),
    [
        (
            "switched",
            110,
            "the embeddings collapsed to a point: the embedding std was 0.0954 at step 90 and 0.0341 at step 110 "
            "(healthy from 0.1), too low for 3 readings in a row; the loss 0.201 is no better than the trivial 0.2",
        ),
        (
            "sunk",
            210,
            "the run never started to learn, its embeddings are nearly one point: the embedding std was 0.0744 at step 20 "
            "and 0.0174 at step 210 (healthy from 0.1), too low for 20 readings in a row; the loss 0.2002 is no "
            "better than the trivial 0.2",
        ),
        (  # although its loss falls
            "few dims",
            300,
            "the embeddings collapsed to few dimensions: the effective rank was 1.77 at step 110 and 1.93 at "
            "step 300 (healthy from 2.3), too low for 20 readings in a row",
        ),
        (  # although older points of the queue keep the loss below its trivial value
            "queue",
            190,
            "the run never started to learn, its embeddings are nearly one point: the embedding std was 0.0243 at step 0 "
            "and 0.00289 at step 190 (healthy from 0.1), too low for 20 readings in a row",
        ),
    ],
)
def test_a_collapsed_run_is_reported_once_with_step_and_reason(name: str, step: int, text: str) -> None:
    monitor = CollapseMonitor()
    readings = [*recorded(name), *recorded(name)[-6:] * 6]
    assert watch(monitor, readings) == [(step, text)]
    assert not monitor.is_healthy


@pytest.mark.parametrize("patience", [1, 2, 3, 5])
@pytest.mark.parametrize(("bad", "text"), [(POINT, "to a point"), (NARROW, "to few dimensions")])
def test_a_collapse_of_a_healthy_run_is_reported_after_patience_readings(
    patience: int, bad: dict[str, Any], text: str
) -> None:
    monitor = CollapseMonitor(patience=patience)
    ((step, verdict),) = watch(monitor, sequence(*[GOOD] * 6, *[bad] * 8))
    assert step == 50 + 10 * patience
    assert text in verdict
    assert f"at step 60 and {'0.01' if bad is POINT else '1.9'} at step {step}" in verdict
    assert f"too low for {patience} readings in a row" in verdict


@pytest.mark.parametrize("initial_patience", [3, 7, 20])
def test_a_run_that_never_learned_is_reported_after_initial_patience_readings(initial_patience: int) -> None:
    falling = [POINT | {"embedding_std": 0.09 * 0.9**index} for index in range(30)]
    ((step, _),) = watch(CollapseMonitor(initial_patience=initial_patience), sequence(*falling))
    assert step == 10 * (initial_patience - 1)


def test_a_network_dead_from_the_first_step_never_started_to_learn() -> None:
    dead = [POINT | {"embedding_std": 1e-6}] * 25
    ((step, verdict),) = watch(CollapseMonitor(), sequence(*dead))
    assert step == 190
    assert "never started to learn" in verdict


def test_a_fall_after_a_long_plateau_is_detected_from_the_latest_readings() -> None:
    spreads = [*[0.05] * 60, *[0.05 * 0.93**index for index in range(20)]]
    monitor = CollapseMonitor()
    ((step, _),) = watch(monitor, sequence(*[POINT | {"embedding_std": spread} for spread in spreads]))
    assert 600 < step < 800
    assert len(monitor.state_dict()["streak"]["latest"]) == 20  # of 80: a checkpoint stays small


def test_one_past_fall_before_learning_is_not_a_collapse() -> None:
    fallen = [POINT | {"embedding_std": spread} for spread in (0.09, 0.06, 0.04, *[0.03] * 40)]
    assert watch(CollapseMonitor(), sequence(GOOD | {"gap": 0.01}, *fallen)) == []


def test_a_good_reading_ends_the_streak() -> None:
    monitor = CollapseMonitor()
    flickering = [*[POINT] * 2, GOOD] * 10
    assert watch(monitor, sequence(*[GOOD] * 4, *flickering)) == []
    assert watch(monitor, sequence(*[POINT] * 3, first=40))


def test_another_symptom_starts_a_new_streak() -> None:
    monitor = CollapseMonitor()
    ((step, verdict),) = watch(monitor, sequence(*[GOOD] * 4, *[NARROW] * 2, *[POINT] * 3))
    assert step == 80
    assert "0.01 at step 60 and 0.01 at step 80" in verdict


def test_a_single_good_reading_does_not_end_the_initial_patience() -> None:
    for num_good, reported in ((2, []), (3, [50])):
        verdicts = watch(CollapseMonitor(), sequence(*[GOOD] * num_good, *[POINT] * 15))
        assert [step for step, _ in verdicts] == reported


def test_a_gap_with_a_loss_above_trivial_does_not_count_as_learning() -> None:
    first_steps = [{"embedding_std": 0.6, "gap": 0.08, "loss": 1.1 * SOFTMAX}] * 5
    assert watch(CollapseMonitor(), sequence(*first_steps, *[POINT] * 30)) == []


@pytest.mark.parametrize("trivial", [SOFTMAX, None])
def test_a_lost_gap_is_reported_after_the_initial_patience(trivial: float | None) -> None:
    monitor = CollapseMonitor(initial_patience=6)
    readings = sequence(*[GOOD | {"trivial": trivial}] * 4, *[LOST | {"trivial": trivial}] * 8)
    ((step, verdict),) = watch(monitor, readings)
    assert step == 90
    assert verdict.startswith("the run lost its progress, positives are no nearer than other pairs")
    assert (
        "the positive negative gap was 0.002 at step 40 and 0.002 at step 90 (healthy from 0.01)" in verdict
    )
    assert ("trivial" in verdict) == (trivial is not None)


def test_a_gap_that_never_existed_is_not_reported_as_lost() -> None:
    monitor = CollapseMonitor(initial_patience=6)
    assert watch(monitor, sequence(*[LOST] * 30)) == []
    assert monitor.is_healthy


def test_a_low_gap_is_ignored_while_the_loss_is_well_below_trivial() -> None:
    monitor = CollapseMonitor(initial_patience=6)
    assert watch(monitor, sequence(*[GOOD] * 4, *[LOST | {"loss": 0.97 * SOFTMAX}] * 30)) == []
    assert monitor.is_healthy


def test_the_loss_shows_learning_in_runs_without_keys() -> None:
    good, bad = {"gap": None}, POINT | {"gap": None}
    assert watch(CollapseMonitor(), sequence(*[good] * 4, *[bad] * 3))
    unknown = {"trivial": None}
    readings = sequence(*[good | unknown] * 4, *[bad | unknown] * 30)
    assert watch(CollapseMonitor(), readings) == []  # there is no sign of earlier learning


def test_few_dims_of_an_untrained_network_are_not_reported() -> None:
    untrained = NARROW | {"embedding_std": 0.3, "gap": 0.02, "loss": SOFTMAX}
    assert watch(CollapseMonitor(), sequence(*[untrained] * 40)) == []


@pytest.mark.parametrize(
    ("rows_and_dim", "rank", "reported"),
    [
        ((64, 64), 2.2, True),
        ((64, 64), 2.4, False),
        ((256, 256), 2.9, True),
        ((256, 2048), 3.2, False),  # 256 rows span at most 256 dims
        ((256, 2), 1.2, False),
        ((256, 2), 1.1, True),
        ((8, 128), 1.6, False),
    ],
)
def test_the_rank_threshold_depends_on_rows_and_dims(
    rows_and_dim: tuple[int, int], rank: float, reported: bool
) -> None:
    num_rows, dim = rows_and_dim
    good = {"num_rows": num_rows, "dim": dim, "rank": 0.9 * min(num_rows, dim)}
    monitor = CollapseMonitor()
    assert bool(watch(monitor, sequence(*[good] * 3, *[good | {"rank": rank}] * 3))) == reported


def test_readings_with_few_rows_are_ignored() -> None:
    monitor = CollapseMonitor()
    watch(monitor, sequence(*[GOOD] * 4, *[POINT] * 2))
    before = monitor.state_dict()
    assert watch(monitor, sequence(*[POINT | {"num_rows": 7}] * 30, first=6)) == []
    assert monitor.state_dict() == before
    assert watch(monitor, sequence(POINT | {"num_rows": 8}, first=36))


def test_the_last_reading_decides_whether_the_run_is_healthy() -> None:
    monitor = CollapseMonitor()
    assert monitor.is_healthy  # no bad reading so far
    expected = [
        (GOOD, True),
        (POINT, False),
        *[(GOOD, True)] * 3,
        (NARROW, False),
        (LOST, False),
        (GOOD, True),
    ]
    for step, (figures, healthy) in enumerate(expected):
        monitor.update(**reading(step, **figures))
        assert monitor.is_healthy == healthy


@pytest.mark.parametrize(("num_good", "reports"), [(2, 1), (3, 4)])
def test_a_collapse_is_reported_again_after_patience_healthy_readings(num_good: int, reports: int) -> None:
    monitor = CollapseMonitor(patience=3)
    watch(monitor, sequence(*[GOOD] * 5))
    assert len(watch(monitor, sequence(*([POINT] * 5 + [GOOD] * num_good) * 4))) == reports


def test_a_rank_that_stays_low_is_no_recovery() -> None:
    monitor = CollapseMonitor()
    begun = [*[GOOD] * 5, *[{"rank": 1.3, "gap": 0.06}] * 4]
    waits = [
        *[{"rank": 1.3, "gap": 0.04}] * 4,
        *[{"rank": 1.3, "gap": 0.06}] * 4,
    ]  # low ranks count after learning
    assert len(watch(monitor, sequence(*begun, *waits * 5))) == 1


def test_a_collapse_is_reported_again_if_asked() -> None:
    monitor = CollapseMonitor()
    assert len(watch(monitor, sequence(*[GOOD] * 5, *[POINT] * 5))) == 1
    monitor.report_again()
    assert [step for step, _ in watch(monitor, sequence(*[POINT] * 5, first=10))] == [100]


def test_the_state_of_an_earlier_version_is_restored() -> None:
    monitor, restored = CollapseMonitor(), CollapseMonitor()
    watch(monitor, sequence(*[GOOD] * 4, *[POINT] * 4))
    state = monitor.state_dict()
    del state["num_healthy"]
    restored.load_state_dict(state)
    assert restored.state_dict() == monitor.state_dict()


def test_a_reset_monitor_equals_a_new_one() -> None:
    used = CollapseMonitor()
    watch(used, recorded("switched"))
    watch(used, sequence(*[GOOD] * 5))
    used.reset()
    assert used.is_healthy
    assert used.state_dict() == CollapseMonitor().state_dict()


@pytest.mark.parametrize(
    "readings",
    [*map(recorded, RECORDED), list(sequence(*[GOOD] * 3, *[POINT] * 4, GOOD, *[LOST] * 3))],
    ids=[*RECORDED, "made up"],
)
def test_a_restored_monitor_continues_like_an_uninterrupted_one(readings: list[dict[str, Any]]) -> None:
    def reported(monitor: CollapseMonitor, readings: list[dict[str, Any]]) -> list[tuple[str | None, bool]]:
        return [(monitor.update(**each), monitor.is_healthy) for each in readings]

    uninterrupted = reported(CollapseMonitor(), readings)
    for cut in range(0, len(readings), 3):
        interrupted, restored = CollapseMonitor(), CollapseMonitor()
        begun = reported(interrupted, readings[:cut])
        restored.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
        assert restored.is_healthy == interrupted.is_healthy
        assert begun + reported(restored, readings[cut:]) == uninterrupted


def test_a_state_dict_is_a_copy() -> None:
    monitor = CollapseMonitor()
    watch(monitor, sequence(*[GOOD] * 4, *[POINT] * 2))
    state = monitor.state_dict()
    kept = json.dumps(state)
    watch(monitor, sequence(*[POINT] * 5, first=6))
    assert json.dumps(state) == kept
