"""Optimizers against their formulas in numpy, and schedules as functions of the step."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from raycl.optim import (
    build_optimizer,
    clip_gradient,
    constant,
    cosine,
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


def orthogonalized(matrix: np.ndarray) -> np.ndarray:
    """Apply the polynomial of Newton-Schulz to the singular values alone."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.linalg.norm(values)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left * values @ right


@pytest.mark.parametrize(
    ("shape", "memory_format"),
    [
        ((3, 4), torch.contiguous_format),
        ((6, 2), torch.contiguous_format),
        ((4, 3, 2, 2), torch.contiguous_format),
        ((4, 3, 2, 2), torch.channels_last),
    ],
)
def test_muon_steps_along_the_orthogonalized_momentum(
    shape: tuple[int, ...], memory_format: torch.memory_format
) -> None:
    rng = np.random.default_rng(0)
    weights = [
        nn.Parameter(torch.from_numpy(rng.normal(size=shape)).contiguous(memory_format=memory_format))
        for _ in range(2)
    ]
    optimizer = build_optimizer("muon", nn.ParameterList(weights), momentum=MOMENTUM, weight_decay=DECAY)
    set_learning_rate(optimizer, RATE)
    expected, buffers = [each.detach().numpy().copy() for each in weights], [np.zeros(shape)] * 2
    for _ in range(3):
        for i, weight in enumerate(weights):
            gradient = rng.normal(size=shape)
            weight.grad = torch.from_numpy(gradient.copy())
            buffers[i] = MOMENTUM * buffers[i] + (1 - MOMENTUM) * gradient
            ahead = MOMENTUM * buffers[i] + (1 - MOMENTUM) * gradient
            step = orthogonalized(ahead.reshape(len(ahead), -1)).reshape(shape)
            longest = max(len(ahead), ahead[0].size)
            expected[i] = (1 - RATE * DECAY) * expected[i] - RATE * 0.2 * longest**0.5 * step
        optimizer.step()
    for weight, value in zip(weights, expected, strict=True):
        assert weight.detach().numpy() == pytest.approx(value, rel=1e-9)


def test_muon_equals_torch_up_to_its_bfloat16() -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.randn(32, 48)) for _ in range(2))
    theirs.data.copy_(ours.data)
    optimizer = build_optimizer("muon", nn.ParameterList([ours]), momentum=0.95, weight_decay=0.1)
    set_learning_rate(optimizer, 0.01)
    peer = torch.optim.Muon(
        [theirs], lr=0.01, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    before = ours.detach().clone()
    for _ in range(5):
        ours.grad = torch.randn(32, 48)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        peer.step()
    assert (ours - theirs).norm().item() < 0.02 * (ours - before).norm().item()


def test_muon_moves_all_but_matrices_as_adamw() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
            self.positions, self.temperature = (
                nn.Parameter(torch.randn(1, 3, 4)),
                nn.Parameter(torch.ones(())),
            )
            self.unused = nn.Linear(2, 2)

    ours, theirs = Learned(), Learned()
    peer = build_optimizer("adamw", theirs, betas=(0.8, 0.95), weight_decay=DECAY)
    optimizer = build_optimizer("muon", ours, betas=(0.8, 0.95), weight_decay=DECAY)
    for rate in (0.1, 0.02, 0.1):
        for name, each in ours.named_parameters():
            if not name.startswith("unused"):
                each.grad = torch.randn_like(each)
                theirs.get_parameter(name).grad = each.grad.clone()
        for each in (optimizer, peer):
            set_learning_rate(each, rate)
            each.step()
    for name, each in ours.named_parameters():
        torch.testing.assert_close(each, theirs.get_parameter(name), rtol=1e-5, atol=1e-6, msg=name)


def test_muon_continues_from_its_saved_state() -> None:
    modules = [nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)) for _ in range(2)]
    optimizers = [build_optimizer("muon", each) for each in modules]
    for number in range(4):
        if number == 2:
            modules[1].load_state_dict(modules[0].state_dict())
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        for module, optimizer in zip(modules[: 1 if number < 2 else 2], optimizers, strict=False):
            set_learning_rate(optimizer, RATE)
            optimizer.zero_grad()
            module(torch.arange(8.0).reshape(2, 4) - number).square().sum().backward()
            optimizer.step()
    for ours, resumed in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert ours.equal(resumed)


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
