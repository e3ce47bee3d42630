"""Remedies for BatchNorm leakage on one device against plain versions, and the leakage probe."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.models import resnet18, resnet50

from raycl.batchnorm import (
    SplitBatchNorm,
    encode_shuffled,
    leakage,
    replace_batchnorm,
    split_batchnorm,
    synchronize,
)
from raycl.batchnorm.shuffled import permutation
from raycl.errors import ConfigError
from raycl.models.image import build_image_encoder
from raycl.models.towers import Tower, build_projection_head
from tests.batchnorm_layers import KINDS, make_layer


def rows_of(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (rows * torch.linspace(0.5, 2, shape[1]).view(-1, *[1] * (len(shape) - 2)) + 1).to(dtype)


def small_network() -> nn.Sequential:
    torch.manual_seed(0)
    head = build_projection_head(24, num_layers=2, hidden_dim=8, dim=4)
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), head),
    ).double()


def resnet_tower() -> Tower:
    torch.manual_seed(0)
    encoder = build_image_encoder("resnet10", image_size=16, width=0.25)
    return Tower(encoder, build_projection_head(128, num_layers=2, hidden_dim=None, dim=8))


def normalized(rows: Tensor) -> Tensor:
    """Normalize [rows, ...] by their own statistics."""
    return (rows - rows.mean(0)) / (rows.var(0, unbiased=False) + 1e-5).sqrt()


class BatchNormAndRelu(nn.BatchNorm2d):
    """A BatchNorm with additional behavior."""


@pytest.mark.parametrize(
    ("change", "layer", "message"),
    [
        (
            lambda net: replace_batchnorm(net, "layer"),
            BatchNormAndRelu(3),
            "cannot replace 1: BatchNormAndRelu",
        ),
        (
            lambda net: replace_batchnorm(net, "group"),
            synchronize(nn.BatchNorm2d(3)),
            "1: SynchronizedBatchNorm",
        ),
        (
            lambda net: split_batchnorm(net, 2),
            synchronize(nn.BatchNorm2d(3)),
            "split 1: SynchronizedBatchNorm",
        ),
        (synchronize, split_batchnorm(nn.BatchNorm2d(3), 2), "cannot synchronize 1: SplitBatchNorm"),
    ],
)
def test_other_types_of_batchnorm_are_refused_before_any_layer_changes(
    change: Any, layer: nn.Module, message: str
) -> None:
    net = nn.Sequential(nn.BatchNorm2d(3), layer)
    with pytest.raises(ConfigError, match=message):
        change(net)
    assert type(net[0]) is nn.BatchNorm2d


# Split


def gradients(output: Tensor, rows: Tensor, module: nn.Module) -> list[Tensor]:
    weights = rows_of(*output.shape, seed=9, dtype=output.dtype).view_as(output)
    return list(torch.autograd.grad((output * weights).sum(), [rows, *module.parameters()]))


@pytest.mark.parametrize("num_groups", [1, 2, 3, 6])
@pytest.mark.parametrize("shape", [*KINDS, (12, 3, 7, 7)], ids=str)
def test_split_equals_a_forward_pass_for_each_group(shape: tuple[int, ...], num_groups: int) -> None:
    module = make_layer(KINDS[shape]) if shape in KINDS else small_network()
    rows = rows_of(*shape).requires_grad_()
    looped = torch.cat([module(chunk) for chunk in rows.chunk(num_groups)])
    expected = gradients(looped, rows, module)
    ours = split_batchnorm(module, len(rows) // num_groups)(rows)
    torch.testing.assert_close(ours, looped, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients(ours, rows, module), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_split_running_statistics_track_the_mean_of_the_groups(momentum: float | None) -> None:
    layer = split_batchnorm(make_layer(nn.BatchNorm2d, momentum=momentum), 4)
    mean, variance = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    for number in range(2):
        rows = rows_of(12, 5, 4, 3, seed=number) * (number + 1)
        layer(rows)
        values = rows.view(3, 4, 5, 12).transpose(1, 2).flatten(2)  # [num_groups, channels, values]
        rate = 1 / (number + 1) if momentum is None else momentum
        mean += rate * (values.mean(2).mean(0) - mean)
        variance += rate * (values.var(2, unbiased=True).mean(0) - variance)
    torch.testing.assert_close(layer.running_mean, mean)
    torch.testing.assert_close(layer.running_var, variance)
    assert layer.num_batches_tracked == 2


def test_split_with_one_group_or_in_eval_mode_equals_batchnorm() -> None:
    plain, rows = make_layer(nn.BatchNorm2d), rows_of(7, 5, 4, 3)
    one = split_batchnorm(copy.deepcopy(plain), 7)
    assert torch.equal(one(rows), plain(rows))
    torch.testing.assert_close(one.running_var, plain.running_var)
    torch.testing.assert_close(split_batchnorm(one, 4).eval()(rows), plain.eval()(rows))


def test_split_works_without_running_statistics_or_affine_parameters() -> None:
    layer = split_batchnorm(make_layer(nn.BatchNorm1d, affine=False, track_running_stats=False), 4)
    rows = rows_of(8, 5)
    torch.testing.assert_close(layer(rows), torch.cat([normalized(half) for half in rows.chunk(2)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_keeps_channels_last_under_autocast(dtype: torch.dtype) -> None:
    rows = rows_of(8, 5, 4, 3, dtype=dtype).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        output = split_batchnorm(make_layer(nn.BatchNorm2d).float(), 4)(rows)
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert output.dtype == dtype


def test_split_refuses_groups_that_do_not_divide_the_batch() -> None:
    with pytest.raises(ConfigError, match="12 rows do not split into groups of 8") as caught:
        split_batchnorm(small_network(), 8)(rows_of(12, 3, 7, 7))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="group_size must be at least 2 rows, got 1"):
        split_batchnorm(small_network(), 1)


def test_split_keeps_the_parameters_and_can_change_its_group_size() -> None:
    net = small_network()
    before = {name: id(each) for name, each in net.state_dict(keep_vars=True).items()}
    assert split_batchnorm(net, 2) is net
    split_batchnorm(net, 3)
    assert {name: id(each) for name, each in net.state_dict(keep_vars=True).items()} == before
    for network in (net, copy.deepcopy(net)):
        assert [each.group_size for each in network.modules() if isinstance(each, SplitBatchNorm)] == [3, 3]


# Shuffle on one worker (several workers: tests/workers/test_shuffle.py)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 200), st.integers(0, 2**70), st.integers(0, 10**9))
def test_the_permutation_is_valid_and_reproducible(num_rows: int, seed: int, step: int) -> None:
    order = permutation(num_rows, seed=seed, step=step)
    assert sorted(order.tolist()) == list(range(num_rows))
    assert torch.equal(order, permutation(num_rows, seed=seed, step=step))


def test_the_permutation_depends_on_seed_and_step() -> None:
    drawn = {tuple(permutation(20, seed=s, step=t).tolist()) for s in range(4) for t in range(4)}
    assert len(drawn) == 16


def test_shuffling_on_one_worker_returns_the_embeddings_in_order() -> None:
    for num_rows in (1, 2, 7, 30):
        rows = torch.arange(num_rows * 2).view(num_rows, 2)
        assert torch.equal(encode_shuffled(lambda x: x * 3, rows, seed=1, step=num_rows), rows * 3)


def test_shuffling_over_groups_uses_the_statistics_of_the_shuffled_groups() -> None:
    layer, rows = split_batchnorm(make_layer(nn.BatchNorm1d), 4), rows_of(12, 5)
    expected = torch.empty_like(rows)
    for part in permutation(12, seed=4, step=2).chunk(3):
        expected[part] = normalized(rows[part]) * layer.weight.detach() + layer.bias.detach()
    keys = encode_shuffled(layer, rows, seed=4, step=2)
    torch.testing.assert_close(keys.detach(), expected)
    with torch.no_grad():
        keys = encode_shuffled(layer, rows, seed=4, step=2)
    assert not keys.requires_grad and not keys.is_inference()


# Replace


@pytest.mark.parametrize("kind", ["layer", "group"])
@pytest.mark.parametrize("build", [resnet18, resnet50, resnet_tower])
def test_replaced_networks_learn_without_any_batchnorm(build: Any, kind: Any) -> None:
    net = build()
    parameters = {name: id(each) for name, each in net.named_parameters()}
    assert replace_batchnorm(net, kind) is net
    assert not any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in net.modules())
    assert {name: id(each) for name, each in net.named_parameters()} == parameters
    net(torch.rand(2, 3, 32, 32)).square().sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in net.parameters())


@pytest.mark.parametrize("kind", ["layer", "group"])
def test_a_replaced_network_encodes_a_single_row_as_in_a_batch(kind: Any) -> None:
    net, images = replace_batchnorm(resnet_tower(), kind).double(), rows_of(6, 3, 16, 16)
    alone = torch.cat([net(image) for image in images.split(1)])
    torch.testing.assert_close(net(images), alone, rtol=1e-5, atol=1e-6)
    # Constant embeddings would also pass the check above.
    assert (alone @ alone.T).fill_diagonal_(0).max() < 0.99999


def test_batchnorm_is_replaced_by_layernorm_or_groupnorm() -> None:
    layer = nn.BatchNorm1d(32, eps=1e-3).double()
    nn.init.uniform_(layer.weight)
    rows = rows_of(4, 32)
    replaced: Any = replace_batchnorm(copy.deepcopy(layer), "layer")
    torch.testing.assert_close(replaced(rows), F.layer_norm(rows, (32,), layer.weight, layer.bias, eps=1e-3))
    images = rows_of(2, 64, 3, 3)
    grouped: Any = replace_batchnorm(nn.BatchNorm2d(64).double(), "group")
    expected = normalized(images.view(2, 32, -1).movedim(2, 0)).movedim(0, 2)
    torch.testing.assert_close(grouped(images), expected.reshape(images.shape))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4096), st.sampled_from([nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]))
def test_groups_divide_the_channels_and_have_a_minimum_size(channels: int, kind: type[nn.Module]) -> None:
    smallest = 16 if kind is nn.BatchNorm1d else 2
    layer: Any = replace_batchnorm(kind(channels), "group")
    groups = layer.num_groups
    assert channels % groups == 0
    assert 1 <= groups <= 32
    assert groups == 1 or channels // groups >= smallest
    assert all(channels % number for number in range(groups + 1, min(32, channels // smallest) + 1))


@pytest.mark.parametrize(
    ("kind", "channels", "expected"),
    [
        (nn.BatchNorm2d, (64, 256, 2048, 96, 8, 7), [32, 32, 32, 32, 4, 1]),
        (nn.BatchNorm1d, (512, 128, 64, 32, 8), [32, 8, 4, 2, 1]),
    ],
)
def test_common_widths_get_the_expected_groups(
    kind: Any, channels: Sequence[int], expected: list[int]
) -> None:
    layers: list[Any] = [replace_batchnorm(kind(each), "group") for each in channels]
    assert [layer.num_groups for layer in layers] == expected


def test_a_shared_layer_stays_shared_and_keeps_its_mode_and_missing_weights() -> None:
    shared = nn.BatchNorm2d(4)
    bare = nn.BatchNorm2d(4, affine=False).eval()
    net = replace_batchnorm(nn.Sequential(shared, nn.Sequential(shared, bare)), "layer")
    assert net[0] is net[1][0]
    assert net[0].training and not net[1][1].training
    assert list(net[1][1].parameters()) == []


# The probe


class Corner(nn.Module):
    """Embed only the marked corner, blank in all images, after BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(8)

    def forward(self, images: Tensor) -> Tensor:
        return self.bn(images)[:, :, 0, 0]


class FrozenCorner(Corner):
    """Overrides ``train`` to keep its layer in eval mode."""

    def train(self, mode: bool = True) -> "FrozenCorner":
        super().train(mode)
        self.bn.eval()
        return self


def views_of(num_rows: int = 96) -> tuple[Tensor, Tensor]:
    images = torch.rand(num_rows, 8, 4, 4, generator=torch.Generator().manual_seed(0))
    images[:, :, 0, 0] = 0
    noise = torch.rand(num_rows, 8, 4, 4, generator=torch.Generator().manual_seed(1))
    return images, images + 0.01 * noise * (images > 0)


def test_the_probe_finds_a_network_that_reads_only_batch_statistics() -> None:
    encoder = Corner()
    found = leakage(encoder, encoder, *views_of(), group_size=8)
    assert found.shared > 0.95
    assert found.apart < 0.2
    assert found.advantage == found.shared - found.apart
    # Layers frozen by the network's own train() do not count.
    assert leakage(FrozenCorner(), FrozenCorner(), *views_of(), group_size=8, num_groupings=2).advantage == 0


@pytest.mark.parametrize("norm", [nn.Identity(), nn.LayerNorm(16), nn.GroupNorm(4, 16)], ids=repr)
def test_the_advantage_is_zero_without_batch_statistics(norm: nn.Module) -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(128, 16), norm, nn.Dropout(0.5), nn.Linear(16, 8))
    view_a, view_b = views_of()
    found = leakage(encoder, encoder, view_a, view_b + 0.3 * view_a.flip(0), group_size=8)
    assert found.advantage == 0
    assert 0.1 < found.shared < 1  # difficult enough to leave room for an advantage


def test_smaller_groups_leak_more() -> None:
    view_a, view_b = views_of()
    for seed, view in enumerate((view_a, view_b)):  # because the mark is read with an error
        torch.manual_seed(seed)
        view[:, :, 0, 0] = 0.05 * torch.rand(len(view), 8)
    small, large = (
        leakage(Corner(), Corner(), view_a, view_b, group_size=size).advantage for size in (4, 24)
    )
    assert small > 2 * large > 0


def test_the_probe_leaves_modes_and_buffers_unchanged() -> None:
    tower = resnet_tower()
    tower.encoder.eval()
    before = {name: value.clone() for name, value in tower.state_dict().items()}
    modes = [each.training for each in tower.modules()]
    images = torch.rand(8, 3, 16, 16)
    first = leakage(tower, copy.deepcopy(tower).eval(), images, images, group_size=4, num_groupings=2)
    assert leakage(tower, tower, images, images, group_size=4, num_groupings=2) == first
    with pytest.raises(RuntimeError):
        leakage(tower, tower, images, images[:, :1], group_size=4)
    torch.testing.assert_close(dict(tower.state_dict()), before, rtol=0, atol=0)
    assert [each.training for each in tower.modules()] == modes


@pytest.mark.parametrize(
    ("num_keys", "settings", "message"),
    [
        *((8, {"group_size": size}, rf"must lie in .* got {size} for 8 rows") for size in (0, 1, 5)),
        (6, {"group_size": 2}, "must have the same rows, got 8 and 6"),
        (8, {"group_size": 2, "num_groupings": 0}, "num_groupings must be at least 1, got 0"),
    ],
)
def test_the_probe_refuses_invalid_groups(num_keys: int, settings: dict[str, int], message: str) -> None:
    view_a, view_b = views_of(8)
    with pytest.raises(ConfigError, match=message):
        leakage(Corner(), Corner(), view_a, view_b[:num_keys], **settings)
