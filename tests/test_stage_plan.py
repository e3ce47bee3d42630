"""The values of a stage at each of its steps."""

import math

import pytest

import raycl
from raycl.training.stages import StagePlan, stage_plans

NUM_TRAIN = 1_024


def plans_of(**settings: object) -> list[StagePlan]:
    """Two epochs of 16 steps with batch size 64, then two epochs of 4 steps with batch size 256."""
    stages = {"stages.0.epochs": 2, "stages.0.batch_size": 64, "stages.0.learning_rate": 1.0}
    later = {"stages.1.batch_size": 256}
    config = raycl.override(raycl.recipe("simclr"), {**stages, **settings, **later})
    return stage_plans(config, num_train=[NUM_TRAIN])


def rates(plan: StagePlan) -> list[float]:
    return [plan.learning_rate(step) for step in range(plan.num_steps)]


def test_a_schedule_per_stage_restarts_with_each_stage() -> None:
    first, second = plans_of(**{"stages.0.warmup_epochs": 0})
    assert (first.num_steps, second.num_steps) == (32, 8)
    assert rates(first)[0] == pytest.approx(0.5)  # 1.0 at 256 rows, by the square root of the batch size
    assert rates(second)[0] == pytest.approx(1.0)
    assert rates(second)[4] == pytest.approx(0.5)


@pytest.mark.parametrize(("scaling", "of_64_rows"), [("none", 1.0), ("linear", 0.25), ("square_root", 0.5)])
def test_one_schedule_over_the_run_counts_samples(scaling: str, of_64_rows: float) -> None:
    over_run = {"stages.0.learning_rate_scope": "run", "stages.0.learning_rate_scaling": scaling}
    first, second = plans_of(**over_run, **{"stages.0.warmup_epochs": 0})
    shape = [0.5 * (1 + math.cos(math.pi * samples / 4_096)) for samples in range(0, 4_096, 64)]
    assert rates(first) == pytest.approx([of_64_rows * each for each in shape[:32]])
    assert rates(second) == pytest.approx(shape[32::4])  # all scalings agree at 256 rows


@pytest.mark.parametrize("scope", ["stage", "run"])
def test_a_linear_schedule_falls_to_zero(scope: str) -> None:
    first, second = plans_of(
        **{
            "stages.0.learning_rate_scope": scope,
            "stages.0.learning_rate_scaling": "none",
            "stages.0.learning_rate_schedule": "linear",
            "stages.0.warmup_epochs": 0,
        }
    )
    if scope == "stage":
        assert rates(first) == pytest.approx([1 - step / 32 for step in range(32)])
        assert rates(second) == pytest.approx([1 - step / 8 for step in range(8)])
    else:
        assert rates(first) == pytest.approx([1 - step / 64 for step in range(32)])
        assert rates(second) == pytest.approx([0.5 - step / 16 for step in range(8)])


def test_the_schedule_of_a_stage_begins_after_its_warmup() -> None:
    settings = {"learning_rate_scaling": "none", "learning_rate_schedule": "linear", "warmup_epochs": 1}
    first, _ = plans_of(**{f"stages.0.{name}": value for name, value in settings.items()})
    rise = [0.25, 0.5, 0.75]  # a tenth of the steps at most
    assert rates(first) == pytest.approx(rise + [1 - step / 29 for step in range(29)])


def test_one_schedule_over_the_run_warms_up_once_and_steps_down_twice() -> None:
    over_run = {"stages.0.learning_rate_scope": "run", "stages.0.learning_rate_schedule": "step"}
    first, second = plans_of(**over_run, **{"stages.0.learning_rate_scaling": "none"})
    # Warmup takes at most a tenth of the stage, three steps; then 1 until three fifths of the run.
    assert rates(first) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 29)
    assert rates(second) == pytest.approx([1.0] * 2 + [0.1] * 3 + [0.01] * 3, rel=1e-6)


@pytest.mark.parametrize("scope", ["stage", "run"])
def test_a_stage_of_one_step_has_its_peak_learning_rate(scope: str) -> None:
    schedule = {"stages.0.learning_rate_schedule": "step", "stages.0.learning_rate_scope": scope}
    config = raycl.override(
        raycl.recipe("simclr"), {**schedule, "stages.0.epochs": None, "stages.0.steps": 1}
    )
    (plan,) = stage_plans(config, num_train=[NUM_TRAIN])
    assert rates(plan) == [config.stages[0].peak_learning_rate]


def test_the_hinge_weight_reaches_its_end_at_the_last_step_of_the_stage() -> None:
    weights = {"stages.0.hinge_weight": 0.2, "stages.0.final_hinge_weight": 0.8}
    first, second = plans_of(**weights)
    for plan in (first, second):
        assert plan.hinge_weight(0) == pytest.approx(0.2)
        assert plan.hinge_weight(plan.num_steps - 1) == pytest.approx(0.8)
