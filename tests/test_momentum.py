"""The momentum encoder against the plain formula in float64."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from raycl.config.overrides import override
from raycl.errors import ConfigError
from raycl.models.build import build_towers
from raycl.models.momentum import MomentumEncoder
from raycl.models.towers import Tower, build_projection_head
from raycl.recipes import recipe
from raycl.training.train_state import TrainState


class _Scaled(nn.Module):
    """A layer with a buffer that forward passes do not change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def _tower() -> Tower:
    torch.manual_seed(0)
    encoder = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), _Scaled(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    )
    return Tower(encoder, build_projection_head(32, num_layers=2, hidden_dim=16, dim=6))


def _moved(tower: nn.Module, seed: int = 1) -> nn.Module:
    """Return a tower with changed weights and buffers, as after training."""
    moved = copy.deepcopy(tower)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in [*moved.parameters(), *moved.buffers()]:
            noise = torch.rand(value.shape, generator=generator, dtype=torch.float64)
            value.add_((5 * noise).to(value.dtype))
    return moved


def _images(seed: int = 2) -> Tensor:
    return torch.rand(8, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def _assert_same(ours: Any, true: Any) -> None:
    torch.testing.assert_close(ours, true, rtol=0, atol=0)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_the_weights_are_an_exponential_moving_average(momenta: list[float]) -> None:
    tower = _tower()
    encoder = MomentumEncoder(tower)
    expected = {name: value.detach().double() for name, value in tower.named_parameters()}
    for number, momentum in enumerate(momenta):
        source = _moved(tower, seed=number)
        encoder.update(source, momentum)
        for name, value in source.named_parameters():
            expected[name] = momentum * expected[name] + (1 - momentum) * value.detach().double()
    for name, value in encoder.tower.named_parameters():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-6)


def test_momentum_0_copies_the_weights_and_1_keeps_them() -> None:
    tower = _tower()
    source = _moved(tower)
    encoder = MomentumEncoder(tower)
    encoder.update(source, 1.0)
    _assert_same(list(encoder.tower.parameters()), [each.detach() for each in tower.parameters()])
    encoder.update(source, 0.0)
    _assert_same(list(encoder.tower.parameters()), [each.detach() for each in source.parameters()])


@pytest.mark.parametrize("momentum", [-0.001, 1.001, float("nan")])
def test_momentum_out_of_range_is_refused_and_changes_nothing(momentum: float) -> None:
    tower = _tower()
    encoder = MomentumEncoder(tower)
    with pytest.raises(ConfigError, match=r"momentum must lie in \[0, 1\], came") as caught:
        encoder.update(_moved(tower), momentum)
    assert "\n" not in str(caught.value)
    _assert_same(_state(encoder.tower), _state(tower))


def test_the_encoder_starts_as_an_independent_copy_with_buffers_and_mode() -> None:
    tower = _tower()
    tower(_images())  # changes the running statistics from their defaults
    tower.projection_head.eval()
    encoder = MomentumEncoder(tower)
    before = _state(tower)
    _assert_same(_state(encoder.tower), before)
    assert encoder.tower.encoder.training and not encoder.tower.projection_head.training
    assert not any(each.requires_grad for each in encoder.parameters())
    assert all(each.requires_grad for each in tower.parameters())
    tower.train()(_images() * 9)
    tower.load_state_dict(_state(_moved(tower)))
    _assert_same(_state(encoder.tower), before)


def test_keys_of_a_network_that_comes_in_eval_mode_are_those_of_training() -> None:
    config = override(recipe("moco_v2", image_size=8), {"batchnorm": "local"})
    keys = []
    for training in (True, False):
        network = _tower().encoder.train(training)
        state = TrainState.build(config, build_towers(config, network=network), num_samples=None)
        assert state.momentum_encoder is not None
        keys.append(state.momentum_encoder(_images()))
    _assert_same(*keys)


def test_a_shared_parameter_is_updated_once_and_stays_shared() -> None:
    tower = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    tower[2].weight = tower[0].weight
    encoder = MomentumEncoder(tower)
    source = _moved(tower)
    encoder.update(source, 0.75)
    assert encoder.tower[2].weight is encoder.tower[0].weight
    expected = 0.75 * tower[0].weight + 0.25 * source[0].weight
    torch.testing.assert_close(encoder.tower[0].weight, expected.detach())


def _running(module: nn.Module) -> list[Tensor]:
    layers = [each for each in module.modules() if isinstance(each, nn.BatchNorm1d | nn.BatchNorm2d)]
    return [value.clone() for layer in layers for value in layer.buffers()]


def test_running_statistics_in_training_mode_come_from_the_encoders_own_forward_passes() -> None:
    tower = _tower()
    encoder, reference = MomentumEncoder(tower), copy.deepcopy(tower)
    source = copy.deepcopy(tower)
    source(_images() * 9)  # has other running statistics
    for step in range(3):
        encoder(_images(step))
        reference(_images(step))
        encoder.update(source, 1.0)
    _assert_same(_running(encoder), _running(reference))


def test_running_statistics_in_eval_mode_are_averaged_as_the_weights() -> None:
    tower = _tower()
    encoder = MomentumEncoder(tower).eval()
    source = _moved(tower)
    encoder.update(source, 0.75)
    for own, before, followed in zip(_running(encoder), _running(tower), _running(source), strict=True):
        expected = 0.75 * before + 0.25 * followed if own.is_floating_point() else followed
        torch.testing.assert_close(own, expected)
    encoder.update(source, 0.0)
    _assert_same(encoder(_images()), source.eval()(_images()).detach())


def test_only_frozen_layers_average_the_statistics_of_the_source() -> None:
    tower = _tower()
    tower.encoder.eval()
    encoder = MomentumEncoder(tower)
    source = _moved(tower)
    encoder.update(source, 0.5)
    expected = (_running(tower.encoder)[0] + _running(source.encoder)[0]) / 2
    torch.testing.assert_close(_running(encoder.tower.encoder)[0], expected)
    _assert_same(_running(encoder.tower.projection_head), _running(tower.projection_head))


@pytest.mark.parametrize("training", [True, False])
def test_other_buffers_are_copied_at_each_update(training: bool) -> None:
    tower = _tower()
    encoder = MomentumEncoder(tower).train(training)
    tower.encoder[3].scale.fill_(7)
    assert encoder.tower.encoder[3].scale == 1
    encoder.update(tower, 0.999)
    assert encoder.tower.encoder[3].scale == 7


def test_keys_get_no_gradient() -> None:
    tower = _tower()
    encoder = MomentumEncoder(tower)
    query, key = tower(_images()), encoder(_images(3))
    assert not key.requires_grad and not key.is_inference()
    # A product saves its factors, and torch refuses to save inference tensors.
    F.cross_entropy(query @ key.T, torch.arange(8)).backward()
    assert all(each.grad is not None for each in tower.parameters())
    assert all(each.grad is None for each in encoder.parameters())


def test_the_caller_chooses_channels_last_and_autocast() -> None:
    tower = _tower().to(memory_format=torch.channels_last)
    encoder = MomentumEncoder(tower)
    source = _moved(tower)
    encoder.update(source, 0.0)
    assert encoder.tower.encoder[0].weight.is_contiguous(memory_format=torch.channels_last)
    images = _images().contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, true = encoder(images), source(images)
    _assert_same(ours, true.detach())
    # A weight cached by autocast would be outdated after the update.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        encoder(images)
        encoder.update(_moved(tower, seed=5), 0.0)
        assert not torch.equal(encoder(images), ours)


def test_a_resumed_encoder_equals_an_uninterrupted_one() -> None:
    tower = _tower()
    encoder = MomentumEncoder(tower)
    encoder(_images())
    encoder.update(_moved(tower), 0.9)
    resumed = MomentumEncoder(_moved(tower, seed=9))
    resumed.load_state_dict(encoder.state_dict())
    for each in (encoder, resumed):
        each(_images(4))
        each.update(_moved(tower, seed=3), 0.9)
    _assert_same(_state(resumed), _state(encoder))
    _assert_same(resumed(_images()), encoder(_images()))
