"""Schedules: functions of the step."""

import math

import pytest

from raycl.errors import ConfigError
from raycl.schedules import constant, cosine, join, linear, step_down


def test_constant_never_changes() -> None:
    assert {constant(0.3)(step) for step in range(5)} == {0.3}


def test_linear_goes_in_equal_parts_and_stays() -> None:
    schedule = linear(0.0, 1.0, num_steps=4)
    assert [schedule(step) for step in (0, 1, 2, 4, 9)] == [0.0, 0.25, 0.5, 1.0, 1.0]


def test_cosine_is_half_way_in_the_middle_and_stays() -> None:
    schedule = cosine(1.0, 0.0, num_steps=10)
    assert schedule(0) == 1.0
    assert schedule(5) == pytest.approx(0.5)
    assert schedule(2) == pytest.approx(0.5 * (1 + math.cos(0.2 * math.pi)))
    assert schedule(10) == schedule(20) == 0.0


def test_a_step_schedule_falls_at_each_of_its_steps() -> None:
    schedule = step_down(1.0, factor=0.1, steps=[3, 5])
    assert [schedule(step) for step in (0, 2, 3, 4, 5, 9)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_joined_schedules_count_from_their_own_boundary() -> None:
    schedule = join([linear(0.0, 1.0, num_steps=2), cosine(1.0, 0.0, num_steps=4)], boundaries=[2])
    assert [schedule(step) for step in (0, 1, 2, 4, 6)] == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0])


@pytest.mark.parametrize("boundaries", [[], [1, 2], [3, 1, 2]])
def test_wrong_boundaries_are_refused(boundaries: list[int]) -> None:
    with pytest.raises(ConfigError, match="boundaries"):
        join([constant(1.0), constant(2.0)], boundaries=boundaries)
