"""Optimizers against their formulas in numpy."""

import numpy as np
import pytest
import torch
from torch import nn

from raycl.optimizers import build_optimizer, set_learning_rate

RATE, MOMENTUM, DECAY, TRUST = 0.3, 0.8, 0.05, 0.01


class Parameters(nn.Module):
    """A weight, one of zeros, a bias, and a weight that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
        self.zeros = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.unused = nn.Parameter(torch.randn(2, 3, dtype=torch.float64))


def test_lars_scales_the_step_of_a_weight_by_its_norm_over_that_of_its_gradient() -> None:
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


def test_lars_leaves_what_has_no_gradient() -> None:
    module = Parameters()
    before = module.unused.detach().clone()
    optimizer = build_optimizer("lars", module, weight_decay=DECAY)
    set_learning_rate(optimizer, RATE)
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.step()
    assert module.unused.equal(before)
    assert not module.weight.equal(Parameters().weight)
