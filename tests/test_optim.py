"""Optimizers against their formulas in numpy, and schedules as functions of the step."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from raycl.errors import ConfigError
from raycl.optim import (
    build_optimizer,
    clip_gradient,
    constant,
    cosine,
    join,
    linear,
    set_learning_rate,
    step_down,
)

RATE, MOMENTUM, DECAY, TRUST = 0.3, 0.8, 0.05, 0.01


class Parameters(nn.Module):
    """A weight, a zero weight, a bias, and a weight that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
        self.zeros = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.unused = nn.Parameter(torch.randn(2, 3, dtype=torch.float64))


def test_lars_scales_the_step_by_the_ratio_of_weight_norm_to_gradient_norm() -> None:
    module = Parameters()
    optimizer = build_optimizer(
        "lars", module, momentum=MOMENTUM, weight_decay=DECAY, trust_coefficient=TRUST
    )
    set_learning_rate(optimizer, RATE)
    learned = {name: each for name, each in module.named_parameters() if name != "unused"}
    expected = {name: each.detach().numpy().copy() for name, each in learned.items()}
    velocity = {name: np.zeros_like(each) for name, each in expected.items()}
    rng = np.random.default_rng(0)
    for _ in range(3):
        for name, value in expected.items():
            gradient = rng.normal(size=value.shape)
            learned[name].grad = torch.from_numpy(gradient.copy())
            if name != "bias":
                gradient = gradient + DECAY * value
                length = np.linalg.norm(value)
                gradient = gradient * (TRUST * length / np.linalg.norm(gradient) if length else 1.0)
            velocity[name] = MOMENTUM * velocity[name] + gradient
            expected[name] = value - RATE * velocity[name]
        optimizer.step()
    for name, value in expected.items():
        assert learned[name].detach().numpy() == pytest.approx(value, rel=1e-12), name


def test_lars_leaves_parameters_without_a_gradient() -> None:
    module = Parameters()
    before = module.unused.detach().clone()
    optimizer = build_optimizer("lars", module, weight_decay=DECAY)
    set_learning_rate(optimizer, RATE)
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.step()
    assert module.unused.equal(before)
    assert not module.weight.equal(Parameters().weight)


@pytest.mark.parametrize("max_norm", [0.3, 1e3])
def test_a_gradient_is_clipped_as_by_torch(max_norm: float) -> None:
    ours, theirs = Parameters(), Parameters()
    ours.bias = nn.Parameter(ours.bias.detach().float())  # as a float32 temperature beside a float64 tower
    theirs.bias = nn.Parameter(theirs.bias.detach().float())
    optimizer = build_optimizer("sgd", ours)
    for module in (ours, theirs):
        (module.weight.square().sum() + module.bias.sum() + 3 * module.zeros.sum()).backward()
    norm = clip_gradient(optimizer, max_norm)
    assert float(norm) == pytest.approx(float(nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)), 1e-12)
    assert ours.unused.grad is None
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)


def test_constant_never_changes() -> None:
    assert {constant(0.3)(step) for step in range(5)} == {0.3}


def test_linear_changes_in_equal_steps_and_then_stays_constant() -> None:
    schedule = linear(0.0, 1.0, num_steps=4)
    assert [schedule(step) for step in (0, 1, 2, 4, 9)] == [0.0, 0.25, 0.5, 1.0, 1.0]


def test_cosine_is_halfway_in_the_middle_and_then_stays_constant() -> None:
    schedule = cosine(1.0, 0.0, num_steps=10)
    assert schedule(0) == 1.0
    assert schedule(5) == pytest.approx(0.5)
    assert schedule(2) == pytest.approx(0.5 * (1 + math.cos(0.2 * math.pi)))
    assert schedule(10) == schedule(20) == 0.0


def test_a_step_schedule_decays_at_each_of_its_steps() -> None:
    schedule = step_down(1.0, factor=0.1, steps=[3, 5])
    assert [schedule(step) for step in (0, 2, 3, 4, 5, 9)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_joined_schedules_count_steps_from_their_own_boundary() -> None:
    schedule = join([linear(0.0, 1.0, num_steps=2), cosine(1.0, 0.0, num_steps=4)], boundaries=[2])
    assert [schedule(step) for step in (0, 1, 2, 4, 6)] == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0])


@pytest.mark.parametrize("boundaries", [[], [1, 2], [3, 1, 2]])
def test_wrong_boundaries_are_refused(boundaries: list[int]) -> None:
    with pytest.raises(ConfigError, match="boundaries"):
        join([constant(1.0), constant(2.0)], boundaries=boundaries)
