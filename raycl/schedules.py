"""Schedules, which map a step to a value."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from raycl.errors import ConfigError

Schedule = Callable[[int], float]


def constant(value: float) -> Schedule:
    """Return ``value`` at every step."""
    return lambda step: value


def linear(start: float, end: float, *, num_steps: int) -> Schedule:
    """Interpolate linearly from ``start`` to ``end`` over ``num_steps``, then stay at ``end``."""
    if num_steps <= 0:
        return constant(end)
    return lambda step: start + (end - start) * _progress(step, num_steps)


def cosine(start: float, end: float, *, num_steps: int) -> Schedule:
    """Decay from ``start`` to ``end`` along half a cosine, then stay (Loshchilov & Hutter, 2017)."""
    if num_steps <= 0:
        return constant(end)
    return lambda step: end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * _progress(step, num_steps)))


def step_down(start: float, *, factor: float, steps: Sequence[int]) -> Schedule:
    """Start at ``start``, and multiply the value by ``factor`` at each of ``steps``."""
    return lambda step: start * factor ** sum(step >= each for each in steps)


def join(schedules: Sequence[Schedule], *, boundaries: Sequence[int]) -> Schedule:
    """Concatenate schedules; each counts its steps from its own boundary.

    Raises ``ConfigError`` unless the boundaries ascend, with one between each two schedules.
    """
    if len(boundaries) != len(schedules) - 1 or any(a > b for a, b in pairwise(boundaries)):
        raise ConfigError(
            f"boundaries must ascend and number one less than the schedules, "
            f"got {list(boundaries)} for {len(schedules)} schedules; pass one between each two schedules"
        )

    def value(step: int) -> float:
        index = sum(step >= boundary for boundary in boundaries)
        return schedules[index](step - (boundaries[index - 1] if index else 0))

    return value


def _progress(step: int, num_steps: int) -> float:
    return min(max(step / num_steps, 0.0), 1.0)
