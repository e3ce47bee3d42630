"""Synchronized BatchNorm on several workers against nn.BatchNorm on the whole batch."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models.resnet import BasicBlock

from raycl.batchnorm import SynchronizedBatchNorm, synchronize
from raycl.errors import ConfigError
from tests.batchnorm_layers import KINDS, SETTINGS, make_layer
from tests.workers.processes import run_workers


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """The outputs, gradients and statistics of a layer."""

    output: Tensor
    grad_input: Tensor
    grad_parameters: list[Tensor]
    buffers: dict[str, Tensor]


def _rows(*shape: int, dtype: torch.dtype = torch.float64, offset: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    scale = torch.linspace(0.5, 2.0, shape[1]).view(-1, *[1] * (len(shape) - 2))
    return (torch.randn(shape, generator=generator).double() * scale + scale + offset).to(dtype)


def _run(layer: nn.Module, batches: list[Tensor], grads: list[Tensor]) -> _Outcome:
    """Take statistics from all batches, and the other results from the last batch."""
    for rows in batches[:-1]:
        layer(rows)
    rows = batches[-1].detach().requires_grad_()
    output = layer(rows)
    output.backward(grads[-1])
    assert rows.grad is not None
    return _Outcome(
        output=output.detach(),
        grad_input=rows.grad,
        grad_parameters=[parameter.grad for parameter in layer.parameters()],  # pyright: ignore[reportArgumentType]
        buffers=dict(layer.named_buffers()),
    )


def _share(
    rank: int,
    num_workers: int,
    layer: nn.Module,
    batches: list[Tensor],
    grads: list[Tensor],
    sizes: list[int],
) -> _Outcome:
    own = [[each.split(sizes)[rank] for each in rows] for rows in (batches, grads)]
    return _run(synchronize(layer), *own)


def _reference_and_shares(
    layer: nn.Module, batches: list[Tensor], sizes: list[int]
) -> tuple[_Outcome, list[_Outcome]]:
    grads = [_rows(*rows.shape).flip(0).sin().to(rows) for rows in batches]
    shares = run_workers(_share, len(sizes), copy.deepcopy(layer), batches, grads, sizes)
    return _run(layer, batches, grads), shares


def _assert_equal(whole: _Outcome, shares: list[_Outcome], tolerance: float) -> None:
    def assert_close(ours: Any, true: Any) -> None:
        torch.testing.assert_close(ours, true, rtol=tolerance, atol=tolerance)

    outputs = torch.cat([share.output for share in shares])
    assert_close(outputs, whole.output)
    grads = torch.cat([share.grad_input for share in shares])
    assert_close(grads, whole.grad_input)
    summed = [sum(each) for each in zip(*(share.grad_parameters for share in shares), strict=True)]
    assert_close(summed, whole.grad_parameters)
    for share in shares:
        assert_close(share.buffers, whole.buffers)


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("shape", KINDS, ids=str)
def test_workers_equal_batchnorm_on_the_whole_batch(
    shape: tuple[int, ...], dtype: torch.dtype, tolerance: float, num_workers: int
) -> None:
    batches = [_rows(*shape, dtype=dtype), _rows(*shape, dtype=dtype).flip(0) * 2]
    sizes = [12 // num_workers] * num_workers
    whole, shares = _reference_and_shares(make_layer(KINDS[shape], dtype), batches, sizes)
    _assert_equal(whole, shares, tolerance)
    assert shares[0].buffers["num_batches_tracked"] == 2


@pytest.mark.parametrize("sizes", [[9, 3], [1, 10, 1], [12, 0]], ids=str)
@pytest.mark.parametrize("shape", [(12, 5), (12, 5, 4, 3)], ids=str)
def test_workers_may_have_different_numbers_of_rows(shape: tuple[int, ...], sizes: list[int]) -> None:
    whole, shares = _reference_and_shares(make_layer(KINDS[shape]), [_rows(*shape)], sizes)
    _assert_equal(whole, shares, 1e-10)


@pytest.mark.parametrize("settings", [*SETTINGS, "without bias", "no longer tracked"], ids=str)
def test_settings_have_the_same_effect_as_in_batchnorm(settings: Any) -> None:
    batches = [_rows(8, 5, 3, 3) * factor for factor in (1, 2, 3)]
    layer = make_layer(nn.BatchNorm2d, **(settings if isinstance(settings, dict) else {}))
    if settings == "without bias":
        layer.register_parameter("bias", None)
    if settings == "no longer tracked":
        layer.track_running_stats = False
    _assert_equal(*_reference_and_shares(layer, batches, [4, 4]), 1e-10)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_large_mean_does_not_cost_accuracy(memory_format: torch.memory_format) -> None:
    rows = _rows(256, 5, 16, 16, dtype=torch.float32, offset=1e3)
    rows = rows.contiguous(memory_format=memory_format)
    layer = make_layer(nn.BatchNorm2d, torch.float32)
    _, shares = _reference_and_shares(copy.deepcopy(layer), [rows], [100, 156])
    exact, _ = _reference_and_shares(layer.double(), [rows.double()], [256])
    # Float32 has a spacing of 6e-5 at 1000, and the deviation is at least 0.5, so errors below 1e-4 are
    # impossible. With channels_last nn.BatchNorm itself is off by 0.4.
    output = torch.cat([share.output for share in shares]).double()
    torch.testing.assert_close(output, exact.output, rtol=0, atol=1e-3)
    grad = torch.cat([share.grad_input for share in shares]).double()
    torch.testing.assert_close(grad, exact.grad_input, rtol=0, atol=1e-3)
    variance = shares[0].buffers["running_var"].double()
    torch.testing.assert_close(variance, exact.buffers["running_var"], rtol=1e-5, atol=0)


def _gradient_between_layers(
    rank: int, num_workers: int, layer: nn.Module, rows: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    # With a hook, not at a leaf: torch may store .grad in another memory format.
    inner, seen = rows.chunk(num_workers)[rank].requires_grad_() * 1, []
    inner.register_hook(seen.append)
    output = synchronize(layer)(inner)
    output.backward(grad.chunk(num_workers)[rank])
    return output.detach(), seen[0]


@pytest.mark.parametrize("grad", ["of the same format", "contiguous", "expanded"])
@pytest.mark.parametrize(
    ("shape", "memory_format"),
    [((8, 5, 4, 3), torch.channels_last), ((8, 5, 2, 3, 2), torch.channels_last_3d)],
)
def test_the_memory_format_of_the_input_is_kept_for_any_format_of_the_gradient(
    shape: tuple[int, ...], memory_format: torch.memory_format, grad: str
) -> None:
    layer, gradient = make_layer(KINDS[(12, *shape[1:])]), _rows(*shape).sin()
    if grad == "of the same format":
        gradient = gradient.contiguous(memory_format=memory_format)
    elif grad == "expanded":
        gradient = gradient[:, :, :1].mean(tuple(range(2, len(shape))), keepdim=True).expand(shape)
    rows = _rows(*shape).contiguous(memory_format=memory_format)
    shares = run_workers(_gradient_between_layers, 2, copy.deepcopy(layer), rows, gradient)
    whole = _run(layer, [rows], [gradient])
    for ours, true in zip(zip(*shares, strict=True), (whole.output, whole.grad_input), strict=True):
        assert all(each.is_contiguous(memory_format=memory_format) for each in ours)
        torch.testing.assert_close(torch.cat(ours), true, rtol=1e-10, atol=1e-10)


def _share_under_autocast(rank: int, num_workers: int, net: nn.Module, rows: Tensor) -> dict[str, Tensor]:
    own = rows.chunk(num_workers)[rank].requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = synchronize(net)(own)
    assert output.dtype == torch.bfloat16
    output.float().square().mean().backward()
    return _state_with_gradients(net) | {"output": output.detach().float()}


def _state_with_gradients(net: nn.Module) -> dict[str, Tensor]:
    grads = {f"{name}.grad": each.grad for name, each in net.named_parameters()}
    return dict(net.state_dict()) | grads  # pyright: ignore[reportReturnType, reportOperatorIssue]


def test_bfloat16_autocast_computes_float32_statistics() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3))
    rows = torch.randn(16, 3, 10, 10)
    first, second = run_workers(_share_under_autocast, 2, copy.deepcopy(net), rows)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = net(rows)
    output.float().square().mean().backward()
    for name, true in _state_with_gradients(net).items():
        ours = (first[name] + second[name]) / 2 if name.endswith("grad") else first[name]
        tolerance = 0.02 * true.abs().max().item() if name.endswith("grad") else 1e-6
        assert ours.dtype == true.dtype
        torch.testing.assert_close(ours, true, rtol=0, atol=tolerance, msg=name)
    ours = torch.cat([first["output"], second["output"]])
    torch.testing.assert_close(ours, output.float(), rtol=0.02, atol=0.02)


def _in_bfloat16(rank: int, num_workers: int) -> list[torch.dtype]:
    layer = synchronize(make_layer(nn.BatchNorm2d, torch.bfloat16))
    outcome = _run(layer, [_rows(4, 5, 3, 3, dtype=torch.bfloat16)], [torch.ones(4, 5, 3, 3)])
    return [outcome.output.dtype, outcome.grad_parameters[0].dtype, outcome.buffers["running_mean"].dtype]


def test_a_bfloat16_layer_stays_bfloat16() -> None:
    assert run_workers(_in_bfloat16, 2) == [[torch.bfloat16] * 3] * 2


def _evaluate(rank: int, num_workers: int, layer: nn.Module, rows: Tensor) -> Tensor:
    return synchronize(layer).eval()(rows.chunk(num_workers)[rank])


def test_eval_mode_equals_batchnorm_with_the_running_statistics() -> None:
    layer = make_layer(nn.BatchNorm2d, torch.float32)
    layer(_rows(12, 5, 4, 3, dtype=torch.float32))
    rows = _rows(8, 5, 3, 3, dtype=torch.float32)
    output = torch.cat(run_workers(_evaluate, 2, layer, rows))
    assert torch.equal(output, layer.eval()(rows))


def _single_values(rank: int, num_workers: int, num_rows: int) -> Tensor:
    layer = synchronize(make_layer(nn.BatchNorm1d))
    return layer(_rows(num_rows, 5)[rank : rank + 1])


def test_a_single_value_per_channel_over_all_workers_is_refused() -> None:
    assert [len(rows) for rows in run_workers(_single_values, 2, 2)] == [1, 1]
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        run_workers(_single_values, 2, 1)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, bias=False),
        nn.BatchNorm2d(6),
        BasicBlock(6, 6),
        BasicBlock(6, 6),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 8, bias=False),
        nn.BatchNorm1d(8, affine=False),
    )


def test_synchronize_replaces_every_layer_and_keeps_its_state() -> None:
    net = _net()
    net[1].eval()
    before = {name: id(each) for name, each in net.state_dict(keep_vars=True).items()}
    names = [name for name, each in net.named_modules() if isinstance(each, nn.BatchNorm2d)]
    assert synchronize(net) is net
    assert {name: id(each) for name, each in net.state_dict(keep_vars=True).items()} == before
    synchronized = [n for n, each in net.named_modules() if type(each) is SynchronizedBatchNorm]
    assert synchronized == [*names, "7"]
    assert not net[1].training and net[2].training
    synchronize(net)  # a second call changes nothing
    _net().load_state_dict(net.state_dict())
    root = nn.BatchNorm1d(3, eps=0.1, momentum=None)
    assert type(synchronize(root)) is SynchronizedBatchNorm
    assert (root.eps, root.momentum) == (0.1, None)
    with pytest.raises(ConfigError, match="LazyBatchNorm1d"):
        synchronize(nn.LazyBatchNorm1d())


def test_without_a_group_the_layer_equals_batchnorm() -> None:
    rows, grads = [_rows(6, 5, 3, 3)], [_rows(6, 5, 3, 3).sin()]
    plain = _run(make_layer(nn.BatchNorm2d), rows, grads)
    alone = _run(synchronize(make_layer(nn.BatchNorm2d)), rows, grads)
    _assert_equal(plain, [alone], 0)


def _train(net: nn.Module, images: Tensor) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(images).sub(1).pow(4).mean().backward()
        optimizer.step()


def _train_share(rank: int, num_workers: int, images: Tensor) -> dict[str, Tensor]:
    net = synchronize(_net()).double()
    _train(DistributedDataParallel(net), images.chunk(num_workers)[rank])
    return dict(net.state_dict())


def test_a_network_under_ddp_trains_as_in_one_process() -> None:
    images = _rows(8, 3, 9, 9)
    net = _net().double()
    _train(net, images)
    for state in run_workers(_train_share, 2, images):
        torch.testing.assert_close(state, dict(net.state_dict()), rtol=1e-9, atol=1e-9)
