"""The collapse monitor on readings of real runs, and on synthetic ones that isolate a rule."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from raycl.training.collapse_monitor import CollapseMonitor

SOFTMAX, MARGIN = (
    4.8442,
    0.2,
)  # the trivial loss of equal embeddings: log(2 * 64 - 1), and the one of the hinge


@dataclass(frozen=True, kw_only=True)
class Run:
    """Every tenth step of a run on digits of 8x8 pixels, a small convolutional network, batch 64."""

    embedding_std: str
    rank: str
    gap: str
    loss: str
    trivial: tuple[float, ...]
    dim: int = 64

    def readings(self) -> Iterator[dict[str, Any]]:
        texts = (self.embedding_std, self.rank, self.gap, self.loss)
        columns = zip(*(map(float, text.split()) for text in texts), strict=True)
        for index, (spread, rank, gap, loss) in enumerate(columns):
            yield reading(
                10 * index,
                embedding_std=spread,
                rank=rank,
                gap=gap,
                loss=loss,
                trivial=self.trivial[min(index, len(self.trivial) - 1)],
                dim=self.dim,
            )


# NT-Xent, temperature 0.2, in 2 dims: near one point for 250 steps before it starts to learn.
DIPPED = Run(
    embedding_std="""
        0.747 0.0322 0.0326 0.0348 0.0335 0.0311 0.0308 0.0358 0.0403 0.036 0.0398 0.0388 0.0309 0.0423
        0.0419 0.0489 0.0385 0.0443 0.0546 0.0622 0.0593 0.0509 0.07 0.0625 0.0733 0.0824 0.0892 0.103
        0.103 0.13 0.164 0.172 0.212 0.308 0.301 0.379 0.312 0.324 0.386 0.434 0.45
    """,
    rank="""
        1.96 1.15 1.15 1.16 1.15 1.15 1.14 1.16 1.18 1.16 1.18 1.17 1.14 1.19 1.18 1.21 1.17 1.19 1.23
        1.25 1.24 1.21 1.27 1.25 1.28 1.31 1.33 1.37 1.37 1.43 1.51 1.52 1.6 1.75 1.73 1.83 1.75 1.77
        1.84 1.89 1.9
    """,
    gap="""
        -0.0021 0.00021 -3.5e-5 4.7e-5 -0.00012 8.6e-5 -4.9e-5 0.00039 0.00016 0.00019 0.00015 0.00025
        0.00012 -0.00017 0.0004 0.00012 0.00053 0.0008 0.0003 0.00027 0.00065 0.0011 7.5e-5 0.00047
        0.00035 0.0012 0.0018 0.0016 0.0046 0.0083 0.0083 0.0084 0.022 0.053 0.046 0.1 0.066 0.073
        0.11 0.13 0.16
    """,
    loss="""
        6.272 4.843 4.844 4.844 4.845 4.844 4.845 4.842 4.843 4.843 4.843 4.843 4.844 4.845 4.842 4.844
        4.842 4.84 4.843 4.843 4.841 4.839 4.844 4.842 4.843 4.839 4.837 4.838 4.825 4.808 4.812 4.815
        4.761 4.692 4.74 4.573 4.694 4.64 4.556 4.618 4.49
    """,
    trivial=(SOFTMAX,),
    dim=2,
)
# NT-Xent, temperature 0.5, without BatchNorm: an untrained network maps everything to nearly one point.
UNTRAINED = Run(
    embedding_std="""
        0.0271 0.0254 0.0285 0.0352 0.037 0.0362 0.0467 0.0522 0.0631 0.0776 0.127 0.203 0.351 0.599
        0.557 0.418 0.765 0.745 0.784 0.857 0.824 0.811 0.879 0.898
    """,
    rank="""
        1.55 1.52 1.58 1.66 1.67 1.68 1.8 1.88 1.98 2.15 2.66 3.32 4.38 6.25 5.62 5.19 7.41 7.4 7.56
        9.36 8.97 9.24 9.9 9.93
    """,
    gap="""
        -7.4e-5 3.2e-5 0.00018 0.00021 0.00021 0.00027 0.00036 0.00086 0.00023 0.0029 0.0089 0.012
        0.069 0.21 0.26 0.091 0.42 0.4 0.45 0.55 0.46 0.54 0.62 0.66
    """,
    loss="""
        4.844 4.844 4.844 4.844 4.844 4.844 4.843 4.843 4.844 4.839 4.827 4.823 4.747 4.657 4.565 4.724
        4.447 4.363 4.333 4.239 4.317 4.135 4.086 4.051
    """,
    trivial=(SOFTMAX,),
    dim=128,
)
# The same with a learning rate of 1e-4: almost no change after 400 steps.
SLOW = Run(
    embedding_std="""
        0.0234 0.021 0.0237 0.0241 0.024 0.0238 0.0256 0.0231 0.0252 0.0238 0.0249 0.0227 0.0245 0.026
        0.028 0.0229 0.0246 0.0277 0.0249 0.025 0.0242 0.0256 0.0275 0.0244 0.0261 0.0218 0.0227 0.024
        0.0258 0.0269 0.0249 0.0243 0.0252 0.0256 0.0254 0.025 0.0236 0.0255 0.0258 0.0259
    """,
    rank="""
        1.46 1.43 1.47 1.47 1.47 1.49 1.5 1.47 1.49 1.47 1.49 1.45 1.49 1.51 1.54 1.47 1.5 1.54 1.5 1.48
        1.48 1.51 1.53 1.48 1.51 1.45 1.46 1.47 1.51 1.52 1.49 1.47 1.49 1.49 1.5 1.49 1.47 1.51 1.5 1.5
    """,
    gap="""
        -2.9e-5 9.3e-6 2.2e-5 1.2e-7 3.6e-5 4.7e-5 0.00013 5.2e-5 -3.9e-5 6.5e-5 9.4e-5 1e-4 1e-4
        5.1e-5 0.00012 4.9e-5 8e-5 6.1e-5 -1.8e-6 0.00012 4.5e-5 7.6e-5 3.3e-5 1e-4 7.8e-5 6.8e-5
        6.7e-5 -2.2e-6 5.3e-5 7.9e-5 6.3e-5 3.3e-5 0.00015 6.1e-5 0.00011 0.00012 7.5e-5 0.00012
        0.00019 0.00014
    """,
    loss="""
        4.844 4.844 4.844 4.844 4.844 4.844 4.843 4.844 4.845 4.844 4.843 4.843 4.843 4.844 4.843 4.844
        4.843 4.844 4.844 4.843 4.844 4.843 4.844 4.843 4.843 4.844 4.844 4.844 4.844 4.843 4.844 4.844
        4.843 4.844 4.843 4.843 4.843 4.843 4.842 4.843
    """,
    trivial=(SOFTMAX,),
    dim=128,
)
# NT-Xent, and from the ninth reading the hinge with the hardest negative at a learning rate of 2.
SWITCHED = Run(
    embedding_std="""
        0.667 0.695 0.72 0.742 0.761 0.757 0.745 0.768 0.796 0.0954 0.0561 0.0341 0.0261 0.0255 0.0218
        0.0204 0.0225 0.019
    """,
    rank="12.2 12.3 12.5 13.2 13.2 13.4 13.5 13.4 13.8 2.64 1.92 1.62 1.51 1.48 1.42 1.4 1.42 1.36",
    gap="""
        0.38 0.4 0.42 0.44 0.49 0.48 0.45 0.51 0.46 0.0015 0.00011 0.00023 -1.3e-5 8.9e-7 6.7e-5
        7.1e-5 -9.7e-6 5.1e-5
    """,
    loss="""
        3.399 3.342 3.426 3.333 3.433 3.139 3.26 3.023 0.3222 0.2071 0.2036 0.201 0.2006 0.2006 0.2004
        0.2004 0.2005 0.2003
    """,
    trivial=(SOFTMAX,) * 8 + (MARGIN,),
)
# The hinge with the hardest negative from the start, at a learning rate of 0.5.
SUNK = Run(
    embedding_std="""
        0.804 0.106 0.0744 0.05 0.0414 0.0378 0.0272 0.032 0.0265 0.0243 0.0229 0.023 0.0211 0.0224
        0.0184 0.0204 0.0177 0.0171 0.016 0.0161 0.0157 0.0174 0.0174 0.0162 0.0143
    """,
    rank="""
        24 4.8 3.22 2.58 2.35 2.3 1.91 2.1 1.91 1.85 1.78 1.79 1.7 1.79 1.62 1.7 1.6 1.58 1.55 1.54 1.53
        1.61 1.62 1.55 1.49
    """,
    gap="""
        0.0085 0.00092 0.00076 0.00041 0.00012 0.00014 8.9e-5 0.00015 3.9e-5 3.8e-5 0.00011 3.6e-5
        4.7e-5 5.1e-5 2.5e-5 7.9e-6 4.7e-5 2.5e-5 2.7e-5 4.6e-5 2.8e-5 3.2e-5 1.8e-5 1.5e-5 4.5e-6
    """,
    loss="""
        0.6226 0.2089 0.2043 0.2017 0.2011 0.2008 0.2005 0.2006 0.2004 0.2004 0.2003 0.2003 0.2003
        0.2003 0.2002 0.2003 0.2002 0.2002 0.2001 0.2001 0.2001 0.2002 0.2002 0.2002 0.2001
    """,
    trivial=(MARGIN,),
)
# NT-Xent without BatchNorm at a learning rate of 5: the loss falls, on two dims of 64.
FEW_DIMS = Run(
    embedding_std="""
        0.0243 0.0883 0.0896 0.0967 0.0865 0.18 0.254 0.181 0.168 0.206 0.159 0.262 0.217 0.417 0.312
        0.318 0.309 0.351 0.344 0.404 0.324 0.301 0.366 0.406 0.319 0.42 0.512 0.299 0.324 0.353 0.409
        0.376
    """,
    rank="""
        1.47 1.44 1.41 1.43 1.39 1.65 1.77 1.64 1.6 1.68 1.59 1.77 1.7 1.95 1.83 1.85 1.81 1.88 1.86
        1.93 1.85 1.82 1.9 1.93 1.84 1.94 2 1.81 1.85 1.88 1.93 1.91
    """,
    gap="""
        -2.4e-5 0.0015 0.0039 0.0042 0.0034 0.027 0.056 0.023 0.028 0.039 0.032 0.079 0.056 0.19 0.12
        0.15 0.11 0.14 0.12 0.18 0.13 0.11 0.18 0.24 0.11 0.25 0.3 0.12 0.15 0.15 0.23 0.18
    """,
    loss="""
        4.844 4.838 4.82 4.813 4.819 4.734 4.733 4.726 4.661 4.672 4.69 4.595 4.543 4.459 4.481 4.349
        4.574 4.556 4.664 4.682 4.375 4.384 4.255 4.204 4.417 4.226 4.519 4.292 4.287 4.275 4.204 4.365
    """,
    trivial=(SOFTMAX,),
)
# InfoNCE with a momentum encoder and a queue: collapsed to a point, but the loss is a quarter below
# trivial, because the queue contains older points.
QUEUE = Run(
    embedding_std="""
        0.0243 0.0583 0.0336 0.0144 0.00775 0.00495 0.00441 0.0027 0.00258 0.00221 0.00312 0.00293
        0.00281 0.0018 0.00206 0.00152 0.00169 0.00186 0.0027 0.00289 0.00408 0.00284 0.00218 0.00263
    """,
    rank="""
        1.47 1.83 1.4 1.18 1.12 1.08 1.07 1.05 1.04 1.04 1.05 1.04 1.03 1.02 1.02 1.02 1.02 1.02 1.03
        1.03 1.04 1.03 1.03 1.03
    """,
    gap="""
        -2.4e-5 5.5e-5 0.00021 0.00017 3.7e-5 1.2e-5 2.5e-5 6.9e-6 -3.5e-6 2.7e-6 5e-6 9.5e-7 3e-6
        7.8e-7 3.2e-6 1.4e-6 1.9e-6 6e-7 9.5e-7 1.4e-6 1.1e-6 1.8e-6 7.8e-7 3.9e-6
    """,
    loss="""
        4.175 6.336 5.103 4.64 5.115 5.358 5.25 5.112 5.082 5.128 5.264 5.321 5.41 5.483 5.547 5.604
        5.671 5.747 5.803 5.82 5.801 5.774 5.726 5.615
    """,
    trivial=(4.1744, 6.5582, 6.9324),
)
HEALTHY = {"dipped": DIPPED, "untrained": UNTRAINED, "slow": SLOW}
COLLAPSED = {"switched": SWITCHED, "sunk": SUNK, "few dims": FEW_DIMS, "queue": QUEUE}
RUNS = HEALTHY | COLLAPSED


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


def watch(monitor: CollapseMonitor, readings: Iterator[dict[str, Any]]) -> list[tuple[int, str]]:
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


@pytest.mark.parametrize("run", HEALTHY.values(), ids=HEALTHY)
def test_a_run_that_has_not_started_to_learn_has_not_collapsed(run: Run) -> None:
    assert watch(CollapseMonitor(), run.readings()) == []


@pytest.mark.parametrize(
    ("run", "step", "text"),
    [
        (
            SWITCHED,
            110,
            "the embeddings collapsed to a point: the embedding std was 0.0954 at step 90 and 0.0341 at step 110 "
            "(healthy from 0.1), too low for 3 readings in a row; the loss 0.201 is no better than the trivial 0.2",
        ),
        (
            SUNK,
            210,
            "the run never started to learn, its embeddings are nearly one point: the embedding std was 0.0744 at step 20 "
            "and 0.0174 at step 210 (healthy from 0.1), too low for 20 readings in a row; the loss 0.2002 is no "
            "better than the trivial 0.2",
        ),
        (  # although its loss falls
            FEW_DIMS,
            300,
            "the embeddings collapsed to few dimensions: the effective rank was 1.77 at step 110 and 1.93 at "
            "step 300 (healthy from 2.3), too low for 20 readings in a row",
        ),
        (  # although older points of the queue keep the loss below its trivial value
            QUEUE,
            190,
            "the run never started to learn, its embeddings are nearly one point: the embedding std was 0.0243 at step 0 "
            "and 0.00289 at step 190 (healthy from 0.1), too low for 20 readings in a row",
        ),
    ],
    ids=COLLAPSED,
)
def test_a_collapsed_run_is_reported_once_with_step_and_reason(run: Run, step: int, text: str) -> None:
    monitor = CollapseMonitor()
    readings = [*run.readings(), *list(run.readings())[-6:] * 6]
    assert watch(monitor, iter(readings)) == [(step, text)]
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


def test_a_monitor_reports_only_once_despite_a_recovery() -> None:
    monitor = CollapseMonitor()
    assert len(watch(monitor, sequence(*([GOOD] * 5 + [POINT] * 5) * 4))) == 1


def test_a_reset_monitor_equals_a_new_one() -> None:
    used = CollapseMonitor()
    watch(used, SWITCHED.readings())
    watch(used, sequence(*[GOOD] * 5))
    used.reset()
    assert used.is_healthy
    assert used.state_dict() == CollapseMonitor().state_dict()


@pytest.mark.parametrize(
    "readings",
    [
        *(list(run.readings()) for run in RUNS.values()),
        list(sequence(*[GOOD] * 3, *[POINT] * 4, GOOD, *[LOST] * 3)),
    ],
    ids=[*RUNS, "made up"],
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
