"""Chunks in lockstep against one forward and backward pass of the whole batch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raycl.batchnorm import SynchronizedBatchNorm, split_batchnorm, synchronize
from raycl.batchnorm.chunked import ChunkedBatchNorm
from raycl.batchnorm.chunked.segments import Network
from raycl.errors import ConfigError
from raycl.models.heads import build_projection_head
from raycl.models.image import build_image_encoder, representation_dim
from raycl.models.towers import Tower
from tests.batchnorm_layers import SETTINGS

pytestmark = pytest.mark.usefixtures("one_thread")

_KEPT = [None, 1, 2]


def _rows(num_rows: int = 24, channels: int = 3, size: int = 8, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, channels, size, size, generator=generator, dtype=torch.float64)
    return (rows + torch.linspace(0, 2, channels)[:, None, None]).to(dtype)


def _head(in_dim: int) -> nn.Sequential:
    return build_projection_head(in_dim, num_layers=3, hidden_dim=8, dim=4)


def _small(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        norm(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 5, 3),
        norm(5),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        _head(5),
    ).double()


def _image_tower(name: str, *, size: int, width: float) -> Tower:
    torch.manual_seed(0)
    encoder = build_image_encoder(name, image_size=size, width=width)
    return Tower(encoder, _head(representation_dim(encoder, image_size=size, channels=3)))


def _ask(embeddings: Tensor) -> Tensor:
    """Return the gradient of a contrastive loss at the embeddings."""
    leaf = embeddings.detach().requires_grad_()
    query, key = F.normalize(leaf, dim=1).tensor_split(2)
    logits = query @ key.T / 0.2
    F.cross_entropy(logits, torch.arange(len(query)) % len(key)).backward()
    assert leaf.grad is not None
    return leaf.grad


def _whole(tower: nn.Module, rows: Tensor) -> Tensor:
    embeddings = tower(rows)
    embeddings.backward(_ask(embeddings))
    return embeddings.detach()


def _in_chunks(
    tower: nn.Module, rows: Tensor, chunk_size: int, activation_checkpoint_every: int | None = None
) -> Tensor:
    lockstep = ChunkedBatchNorm(
        tower, chunk_size=chunk_size, activation_checkpoint_every=activation_checkpoint_every
    )
    embeddings = lockstep.embed(rows)
    lockstep.backward(_ask(embeddings))
    return embeddings


def _gradient(tower: nn.Module) -> Tensor:
    gradients = [each.grad for each in tower.parameters() if each.grad is not None]
    return torch.cat([each.flatten() for each in gradients]).double()


def _assert_alike(ours: nn.Module, true: nn.Module, tolerance: float) -> None:
    for (name, parameter), expected in zip(ours.named_parameters(), true.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None), name
    error = (_gradient(ours) - _gradient(true)).norm() / _gradient(true).norm()
    assert error < tolerance
    for name, buffer in true.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer, rtol=tolerance, atol=tolerance)


def _assert_equal_to_whole(
    tower: nn.Module,
    rows: Tensor,
    *,
    chunk_size: int = 7,
    activation_checkpoint_every: int | None = None,
    tolerance: float = 1e-10,
    reference: nn.Module | None = None,
) -> None:
    reference = reference or copy.deepcopy(tower)
    true = _whole(reference, rows)
    ours = _in_chunks(tower, rows, chunk_size, activation_checkpoint_every)
    torch.testing.assert_close(ours, true, rtol=10 * tolerance, atol=10 * tolerance)
    _assert_alike(tower, reference, tolerance)


# Equal to the whole batch


@pytest.mark.parametrize("activation_checkpoint_every", _KEPT)
@pytest.mark.parametrize("chunk_size", [1, 5, 8, 23, 24, 100])
def test_chunks_of_any_size_equal_the_whole_batch(
    chunk_size: int, activation_checkpoint_every: int | None
) -> None:
    _assert_equal_to_whole(
        _small(), _rows(), chunk_size=chunk_size, activation_checkpoint_every=activation_checkpoint_every
    )


@pytest.mark.parametrize(
    ("name", "activation_checkpoint_every"),
    [
        ("resnet18", None),
        ("resnet18", 1),
        ("resnet18", 2),
        ("resnet50", None),
        ("resnet50", 1),
        ("vit_tiny", None),
    ],
)
def test_image_towers_equal_the_whole_batch(name: str, activation_checkpoint_every: int | None) -> None:
    # A tower's embeddings are float32 in any case, and so is the gradient that enters it.
    tower = _image_tower(name, size=8, width=0.125).double()
    _assert_equal_to_whole(tower, _rows(), activation_checkpoint_every=activation_checkpoint_every)


def _errors_of_float32(tower: nn.Module, rows: Tensor) -> tuple[float, float]:
    """Return how far the gradients in chunks and of the whole batch are from those in float64."""
    in_chunks, whole, exact = tower, copy.deepcopy(tower), copy.deepcopy(tower).double()
    gradient = _ask(exact(rows.double()))
    lockstep = ChunkedBatchNorm(in_chunks, chunk_size=7)
    lockstep.embed(rows)
    lockstep.backward(gradient.float())
    whole(rows).backward(gradient.float())
    exact(rows.double()).backward(gradient)
    true = _gradient(exact)
    first, second = ((_gradient(each) - true).norm() / true.norm() for each in (in_chunks, whole))
    return float(first), float(second)


def test_float32_is_exact_to_its_precision() -> None:
    ours, _ = _errors_of_float32(_small().float(), _rows(dtype=torch.float32))
    assert ours < 1e-6
    # The deeper the network, the more it makes of the same rounding, whichever way it is run.
    tower = _image_tower("resnet18", size=16, width=0.25)
    ours, whole = _errors_of_float32(tower, _rows(size=16, dtype=torch.float32))
    assert ours < max(1e-5, 3 * whole)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_mean_what_they_mean_to_batchnorm(settings: dict[str, Any]) -> None:
    tower = _small(lambda channels: nn.BatchNorm2d(channels, **settings))
    reference = copy.deepcopy(tower)
    for factor in (1, 2, 3):
        _assert_equal_to_whole(tower, _rows() * factor, reference=reference)


def test_layers_without_running_statistics_take_the_batch_s_in_eval_mode_too() -> None:
    tower = _small(lambda channels: nn.BatchNorm2d(channels, track_running_stats=False)).eval()
    _assert_equal_to_whole(tower, _rows())


def test_synchronized_layers_are_taken_as_well() -> None:
    tower = _small()
    _assert_equal_to_whole(synchronize(copy.deepcopy(tower)), _rows(), reference=tower)


def test_batchnorm_at_the_very_start_and_end_equals_the_whole_batch() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4, affine=False)
    tower = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(192, 4), norm).double()
    _assert_equal_to_whole(tower, _rows())


def test_training_follows_that_on_the_whole_batch() -> None:
    tower = _small()
    reference = copy.deepcopy(tower)
    lockstep = ChunkedBatchNorm(tower, chunk_size=7)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (tower, reference)]
    for factor in (1, 2, 3):
        rows = _rows() * factor
        for optimizer in optimizers:
            optimizer.zero_grad()
        lockstep.backward(_ask(lockstep.embed(rows)))
        _whole(reference, rows)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(tower.state_dict(), reference.state_dict(), rtol=1e-9, atol=1e-9)
    assert tower.state_dict()["1.num_batches_tracked"] == 3


def test_gradients_are_added_to_those_that_are_there() -> None:
    tower = _small()
    reference = copy.deepcopy(tower)
    for parameter in tower.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    _in_chunks(tower, _rows(), 7)
    _whole(reference, _rows())
    torch.testing.assert_close(_gradient(tower) - 3, _gradient(reference), rtol=1e-8, atol=1e-10)


def _forget_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.zero_()


def test_what_a_hook_does_to_a_gradient_stays_with_its_parameter() -> None:
    tower, reference = _small(), _small()
    for each in (tower, reference):
        each.get_parameter("4.weight").register_post_accumulate_grad_hook(_forget_gradient)
    _assert_equal_to_whole(tower, _rows(), reference=reference)


class _Twice(nn.Module):
    """One BatchNorm in two places, and two BatchNorms of one value; one that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.again = nn.Conv2d(4, 4, 3, padding=1)
        self.shared, self.other, self.unread = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, images: Tensor) -> Tensor:
        values = self.conv(images)
        later = self.again(self.other(values).relu() * 2)
        self.unread(later)
        # Called against the order in which the values are made, which running statistics show.
        return (self.shared(later) + self.shared(values) * self.other(later)).mean((2, 3))


def test_layers_in_two_places_and_values_read_twice_equal_the_whole_batch() -> None:
    torch.manual_seed(0)
    tower = _Twice().double()
    _assert_equal_to_whole(tower, _rows())
    assert tower.shared.num_batches_tracked == 2
    assert tower.unread.num_batches_tracked == 1


class _OwnTensors(nn.Module):
    """Arithmetic on parameters and buffers, sizes as numbers, keywords."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 81).view(3, 3, 3, 3))
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.linspace(0, 1, 3))
        self.norm, self.last = nn.BatchNorm2d(3), nn.BatchNorm1d(3)

    def forward(self, images: Tensor) -> Tensor:
        weight = (self.weight - self.weight.mean()) / self.weight.std()
        num_rows = images.shape[0]
        values = self.norm(input=F.conv2d(images, weight)) * self.scale.exp()[:, None, None]
        values = self.last(values.amax((2, 3))) * (1 - self.mask) + self.weight.sum((1, 2, 3))
        return values.view(num_rows, -1)


@pytest.mark.parametrize("activation_checkpoint_every", _KEPT)
def test_networks_with_tensors_of_their_own_equal_the_whole_batch(
    activation_checkpoint_every: int | None,
) -> None:
    tower = _OwnTensors().double()
    lockstep = ChunkedBatchNorm(tower, chunk_size=7, activation_checkpoint_every=activation_checkpoint_every)
    with torch.no_grad():
        tower.mask.mul_(0.5)  # nothing may have been computed once and for all
        tower.weight.mul_(1.5)
    reference = copy.deepcopy(tower)
    lockstep.backward(_ask(lockstep.embed(_rows())))
    _whole(reference, _rows())
    _assert_alike(tower, reference, 1e-10)


# Modes and frozen layers


@pytest.mark.parametrize("activation_checkpoint_every", [None, 1])
@pytest.mark.parametrize("frozen", ["0", "01", "13", "013", "01348"])
def test_frozen_layers_are_left_without_gradient(
    frozen: str, activation_checkpoint_every: int | None
) -> None:
    tower = _small()
    for name in frozen:
        tower.get_submodule(name).requires_grad_(False)
    tower.get_submodule("8.6").requires_grad_(True)
    _assert_equal_to_whole(tower, _rows(), activation_checkpoint_every=activation_checkpoint_every)


def test_what_is_frozen_from_the_start_is_not_run_again() -> None:
    tower, calls = _small(), []
    for name in "0134":
        layer = tower.get_submodule(name).requires_grad_(False)
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda layer, *_: calls.append(layer))
    _in_chunks(tower, _rows(), 8)
    assert [calls.count(layer) for layer in (tower[0], tower[3])] == [3, 3]


def test_layers_frozen_in_eval_mode_use_their_running_statistics() -> None:
    tower = _small()
    _whole(tower, _rows())
    tower.zero_grad()
    tower[1].eval()
    _assert_equal_to_whole(tower, _rows())
    assert tower[1].num_batches_tracked == 1


class _Moody(nn.Module):
    """Does in training mode what a trace taken in eval mode would not show."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _small()

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images * 2 if self.training else images)


def test_modes_may_change_between_batches() -> None:
    tower = _Moody()
    reference = copy.deepcopy(tower)
    lockstep = ChunkedBatchNorm(tower.eval(), chunk_size=7)
    for training in (False, True, False):
        tower.train(training)
        reference.train(training)
        lockstep.backward(_ask(lockstep.embed(_rows())))
        _whole(reference, _rows())
    _assert_alike(tower, reference, 1e-10)


def test_without_gradient_nothing_is_kept_and_what_was_kept_stays() -> None:
    tower = _small()
    reference = copy.deepcopy(tower)
    lockstep = ChunkedBatchNorm(tower, chunk_size=7)
    embeddings = lockstep.embed(_rows())
    lockstep.embed(_rows() * 3, with_gradient=False)
    lockstep.backward(_ask(embeddings))
    _whole(reference, _rows())
    reference(_rows() * 3)
    _assert_alike(tower, reference, 1e-10)


def test_a_second_embed_takes_the_place_of_the_first() -> None:
    tower = _small()
    reference = copy.deepcopy(tower)
    lockstep = ChunkedBatchNorm(tower, chunk_size=7)
    lockstep.embed(_rows() * 3)
    lockstep.backward(_ask(lockstep.embed(_rows())))
    reference(_rows() * 3)
    _whole(reference, _rows())
    _assert_alike(tower, reference, 1e-10)


# Randomness


class _ChunkedDropout(nn.Module):
    """Dropout of a whole batch that draws chunk by chunk."""

    def forward(self, values: Tensor) -> Tensor:
        return torch.cat([F.dropout(chunk, 0.4) for chunk in values.split(7)])


def _with_dropout(dropout: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(dropout(), nn.Flatten(), nn.Linear(192, 16), nn.BatchNorm1d(16)),
        *(dropout(), nn.Linear(16, 8), nn.BatchNorm1d(8), dropout(), nn.Linear(8, 4)),
    ).double()


@pytest.mark.parametrize("activation_checkpoint_every", _KEPT)
@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_is_repeated_as_it_was_drawn(inplace: bool, activation_checkpoint_every: int | None) -> None:
    tower = _with_dropout(lambda: nn.Dropout(0.4, inplace=inplace))
    reference = _with_dropout(_ChunkedDropout)
    torch.manual_seed(1)
    true = _whole(reference, _rows())
    expected = torch.rand(3)  # drawn after the batch
    torch.manual_seed(1)
    lockstep = ChunkedBatchNorm(tower, chunk_size=7, activation_checkpoint_every=activation_checkpoint_every)
    embeddings = lockstep.embed(_rows())
    first = torch.rand(3)
    lockstep.backward(_ask(embeddings))
    torch.testing.assert_close(embeddings, true)
    torch.testing.assert_close(first, expected, rtol=0, atol=0)
    _assert_alike(tower, reference, 1e-10)


def test_the_way_back_leaves_the_random_state_alone() -> None:
    lockstep = ChunkedBatchNorm(_with_dropout(lambda: nn.Dropout(0.4)), chunk_size=7)
    embeddings = lockstep.embed(_rows())
    before = torch.get_rng_state()
    lockstep.backward(_ask(embeddings))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_single_chunk_draws_as_the_whole_batch_does() -> None:
    tower = nn.Sequential(_with_dropout(lambda: nn.Dropout(0.4)), nn.Dropout1d(0.5), nn.Dropout(0.1)).double()
    reference = copy.deepcopy(tower)
    torch.manual_seed(1)
    true = _whole(reference, _rows())
    torch.manual_seed(1)
    torch.testing.assert_close(_in_chunks(tower, _rows(), 24), true)
    _assert_alike(tower, reference, 1e-10)


# Autocast


def _in_bfloat16(tower: nn.Module, rows: Tensor, gradient: Tensor, *, back_inside: bool) -> nn.Module:
    lockstep = ChunkedBatchNorm(tower, chunk_size=7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        embeddings = lockstep.embed(rows)
        if back_inside:
            lockstep.backward(gradient)
    if not back_inside:
        lockstep.backward(gradient)
    assert embeddings.dtype == torch.float32
    return tower


def test_bfloat16_autocast_is_as_near_the_truth_as_the_whole_batch() -> None:
    rows = _rows(size=16, dtype=torch.float32)
    tower = _image_tower("resnet10", size=16, width=0.125)
    exact, whole = copy.deepcopy(tower), copy.deepcopy(tower)
    gradient = _ask(exact(rows))
    exact(rows).backward(gradient)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        embeddings = whole(rows)
    embeddings.backward(gradient)
    ours, whole, true = map(_gradient, (_in_bfloat16(tower, rows, gradient, back_inside=False), whole, exact))
    assert (ours - true).norm() < 1.2 * (whole - true).norm()
    assert (ours - true).norm() > 1e-3 * true.norm()  # it did run in bfloat16
    assert all(each.grad is not None and each.grad.dtype == torch.float32 for each in tower.parameters())


def test_the_way_back_runs_under_the_autocast_of_the_way_there() -> None:
    rows, gradient = _rows(size=16, dtype=torch.float32), torch.randn(24, 4)
    tower = _image_tower("resnet10", size=16, width=0.125)
    inside = _in_bfloat16(copy.deepcopy(tower), rows, gradient, back_inside=True)
    outside = _in_bfloat16(tower, rows, gradient, back_inside=False)
    assert torch.equal(_gradient(inside), _gradient(outside))


def test_weights_that_change_under_one_autocast_are_seen() -> None:
    def run(*steps: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            outputs = []
            for step in steps:
                outputs.append(step(rows))
                tower.get_parameter("0.weight").mul_(1.5).add_(0.1)
        tower.load_state_dict(before)
        return outputs

    tower, rows = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), _rows(dtype=torch.float32)
    before = copy.deepcopy(tower.state_dict())
    lockstep = ChunkedBatchNorm(tower, chunk_size=7)
    first, second, third = run(lockstep.embed, lockstep.embed, lockstep.embed)
    # Between them, autocast casts weights for others and remembers them, as torch does.
    assert not torch.equal(first, second)
    torch.testing.assert_close(
        run(tower, lockstep.embed, tower), [first, second, third], rtol=0.02, atol=0.02
    )


def test_a_batch_without_autocast_goes_back_without_it() -> None:
    tower = _small().float()
    reference, rows = copy.deepcopy(tower), _rows(dtype=torch.float32)
    lockstep = ChunkedBatchNorm(tower, chunk_size=7)
    gradient = _ask(lockstep.embed(rows))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lockstep.backward(gradient)
    _whole(reference, rows)
    _assert_alike(tower, reference, 1e-5)


# Writes in place


class _Function(nn.Module):
    """A network around a convolution and a BatchNorm, which a test writes down as a function."""

    def __init__(self, function: Callable[["_Function", Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.last = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm1d(3)
        self.relu = nn.ReLU(inplace=True)
        self.function = function
        self.double()

    def forward(self, images: Tensor) -> Any:
        return self.function(self, images)


def _before_activation(net: _Function, images: Tensor) -> Tensor:
    shortcut = images + 0.5
    values = net.norm(net.conv(net.relu(shortcut)))
    return net.last((values + shortcut).mean((2, 3)))  # of a shortcut that has gone through the ReLU


def _added_to(net: _Function, images: Tensor) -> Tensor:
    values = net.norm(net.conv(images))
    kept = values
    values += 1.0
    values *= images
    return net.last((values + kept).mean((2, 3)))


def _by_methods_and_functions(net: _Function, images: Tensor) -> Tensor:
    values = net.norm(net.conv(images))
    values.add_(images)
    F.relu(values, True)
    return net.last(torch.sigmoid_(values * 2).mean((2, 3)) + values.amax((2, 3)))


@pytest.mark.parametrize("function", [_before_activation, _added_to, _by_methods_and_functions])
@pytest.mark.parametrize("activation_checkpoint_every", [None, 1])
def test_writes_in_place_are_seen_by_all_who_read_later(
    function: Callable[..., Tensor], activation_checkpoint_every: int | None
) -> None:
    _assert_equal_to_whole(
        _Function(function), _rows(), activation_checkpoint_every=activation_checkpoint_every
    )


def _spoiled_later(write: Callable[[Tensor], Tensor]) -> Callable[[_Function, Tensor], Tensor]:
    def function(net: _Function, images: Tensor) -> Tensor:
        first = net.conv(images)
        second = net.conv(net.norm(first))  # on the way back, this wants the first once more
        return net.last((net.norm(second) + write(first)).mean((2, 3)))

    return function


def _spoiled_under_another_name(write: Callable[[Tensor], Tensor]) -> Callable[[_Function, Tensor], Tensor]:
    return _spoiled_later(lambda values: write(values.view_as(values)))


def _spoiled_at_once(write: Callable[[Tensor], Tensor]) -> Callable[[_Function, Tensor], Tensor]:
    def function(net: _Function, images: Tensor) -> Tensor:
        values = net.conv(images)
        normalized = net.norm(values)  # called before the write, but computed after it
        return net.last((write(values) * images + normalized).mean((2, 3)))

    return function


@pytest.mark.parametrize("activation_checkpoint_every", [None, 1])
@pytest.mark.parametrize("spoiled", [_spoiled_later, _spoiled_under_another_name, _spoiled_at_once])
def test_values_that_wait_are_not_overwritten(
    spoiled: Callable[..., Any], activation_checkpoint_every: int | None
) -> None:
    # torch itself goes no way back through these: its BatchNorm wants its input again.
    tower, reference = _Function(spoiled(torch.relu_)), _Function(spoiled(torch.relu))
    _assert_equal_to_whole(
        tower, _rows(), activation_checkpoint_every=activation_checkpoint_every, reference=reference
    )


def test_the_rows_are_left_as_they_are() -> None:
    rows = _rows()
    _in_chunks(nn.Sequential(nn.ReLU(inplace=True), _small()), rows, 7)
    assert torch.equal(rows, _rows())


# What is kept, and for how long


class _Memory(TorchDispatchMode):
    """Counts the bytes of the tensors that operations have made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._at_most = 0
        self.peak = 0

    def now(self) -> int:
        self._made = {key: each for key, each in self._made.items() if not each[0].expired()}
        self._at_most = sum(size for _, size in self._made.values())
        return self._at_most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = {
            each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)
        }
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and (storage := each.untyped_storage())._cdata not in read:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self._at_most += storage.nbytes()
        if self._at_most > self.peak:  # looking at all of them takes time
            self.peak = max(self.peak, self.now())
        return result


def _memory_of(step: Callable[[], object]) -> int:
    with _Memory() as memory:
        step()
    return memory.peak


def test_memory_is_less_than_that_of_the_whole_batch() -> None:
    tower, rows = _image_tower("resnet18", size=8, width=0.125), _rows(96, dtype=torch.float32)
    whole = _memory_of(lambda: _whole(tower, rows))
    basic = _memory_of(lambda: _in_chunks(tower, rows, 12))
    less = _memory_of(lambda: _in_chunks(tower, rows, 12, activation_checkpoint_every=1))
    assert basic < 0.85 * whole
    assert less < 0.5 * whole


def test_no_output_of_a_batchnorm_waits() -> None:
    network = Network(_image_tower("resnet18", size=8, width=0.125))
    waiting = set[Any]().union(*map(network.crossing, range(len(network.segments))))
    assert len(waiting) > 20
    assert waiting.isdisjoint(network.trace.layers)


@pytest.mark.parametrize("activation_checkpoint_every", _KEPT)
def test_nothing_stays_after_the_way_back_but_gradients(activation_checkpoint_every: int | None) -> None:
    tower, rows = _image_tower("resnet10", size=8, width=0.125), _rows(dtype=torch.float32)
    lockstep = ChunkedBatchNorm(tower, chunk_size=7, activation_checkpoint_every=activation_checkpoint_every)
    with _Memory() as memory:
        embeddings = lockstep.embed(rows, with_gradient=False)
        assert memory.now() == embeddings.nbytes
        gradient = _ask(lockstep.embed(rows))
        waiting = memory.now()
        lockstep.backward(gradient)
        grads = sum(each.nbytes for each in tower.parameters())
        assert memory.now() <= grads + embeddings.nbytes + gradient.nbytes
    assert waiting > 3 * rows.nbytes


def test_what_waits_is_freed_on_the_way() -> None:
    tower = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(8)))
    rows = torch.randn(512, 64)
    lockstep = ChunkedBatchNorm(tower, chunk_size=32)
    with _Memory() as memory:
        embeddings = lockstep.embed(rows)
        waiting, memory.peak = memory.now(), 0
        lockstep.backward(torch.ones_like(embeddings))
    # A layer's gradients take the place of its values. Kept to the end, they would come on top.
    assert memory.peak < waiting + 2 * rows.nbytes


def test_channels_last_is_kept() -> None:
    tower = _image_tower("resnet10", size=8, width=0.125).to(memory_format=torch.channels_last)
    rows = _rows(dtype=torch.float32).contiguous(memory_format=torch.channels_last)
    seen: list[bool] = []

    def look(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
        if inputs[0].requires_grad:
            inputs[0].register_hook(look_at_gradient)

    def look_at_gradient(gradient: Tensor) -> None:
        seen.append(gradient.is_contiguous(memory_format=torch.channels_last))

    for module in tower.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(look)
    ours, _ = _errors_of_float32(tower, rows)
    assert ours < 1e-5
    assert len(seen) > 100
    assert all(seen)


def test_gradients_of_another_format_are_taken_in_the_format_of_the_values() -> None:
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4))
    tower = tower.to(memory_format=torch.channels_last)
    rows = _rows(dtype=torch.float32).contiguous(memory_format=torch.channels_last)
    ours, _ = _errors_of_float32(tower, rows)
    assert ours < 1e-6


def test_the_tower_stays_as_it_is() -> None:
    tower = _image_tower("resnet10", size=8, width=0.125)
    before = {name: id(each) for name, each in tower.state_dict(keep_vars=True).items()}
    modules = {name: (id(each), vars(each).keys()) for name, each in tower.named_modules()}
    calls: list[str] = []
    tower.get_submodule("encoder.conv1").register_forward_hook(lambda *_: calls.append("conv1"))
    _in_chunks(tower, _rows(dtype=torch.float32), 7)
    assert {name: id(each) for name, each in tower.state_dict(keep_vars=True).items()} == before
    assert {name: (id(each), vars(each).keys()) for name, each in tower.named_modules()} == modules
    assert all(each.inplace for each in tower.modules() if isinstance(each, nn.ReLU))
    assert calls == ["conv1"] * 8  # four chunks, there and back
    tower(_rows(dtype=torch.float32))
    copy.deepcopy(tower)


# Refusals


def _branches(net: _Function, images: Tensor) -> Tensor:
    return net.norm(images) if images.sum() > 0 else images


def _draws(net: _Function, images: Tensor) -> Tensor:
    return net.norm(images + torch.rand(3, 1, 1)).mean((2, 3))


def _normalizes(net: _Function, images: Tensor) -> Tensor:
    return F.batch_norm(net.norm(images), None, None, training=True).mean((2, 3))


def _two_results(net: _Function, images: Tensor) -> Any:
    return net.norm(images), images


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_branches, r"inner \(_Function\) cannot be: symbolically traced"),
        (_draws, "draws random numbers"),
        (_normalizes, "batch_norm normalizes by a function"),
        (_two_results, "got 1 arguments and a result of tuple"),
    ],
)
def test_networks_that_cannot_be_taken_apart_are_refused(function: Any, message: str) -> None:
    tower = nn.Sequential()
    tower.add_module("inner", _Function(function))
    with pytest.raises(ConfigError, match=message) as caught:
        ChunkedBatchNorm(tower, chunk_size=4)
    assert "\n" not in str(caught.value)
    assert "use batchnorm=group or batchnorm=layer, or remove chunk_size" in str(caught.value)


def test_tracing_draws_nothing() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ConfigError):
        ChunkedBatchNorm(_Function(_draws), chunk_size=4)
    assert torch.equal(torch.get_rng_state(), before)


def _writes_behind(net: _Function, images: Tensor) -> Tensor:
    values = net.conv(images)
    flat = values.flatten(2)
    values.relu_()
    return net.norm(values).mean((2, 3)) + flat.mean(2)


def _writes_unsaid(net: _Function, images: Tensor) -> Tensor:
    values = net.conv(images)
    torch.add(values, 1.0, out=values)
    return net.norm(values).mean((2, 3))


def _counts(net: _Function, images: Tensor) -> Tensor:
    number = images.shape[0]
    before = number
    number += 1
    return net.norm(images).mean((2, 3)) * number / before


def _pair(net: _Function, images: Tensor) -> Tensor:
    pair = net.conv(images).chunk(2)
    return net.norm(images).mean((2, 3)) + pair[0].mean()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_writes_behind, "relu_, which writes into a tensor that is read later under another name"),
        (_writes_unsaid, "add, which writes into its input, which its name does not show"),
        (_counts, "iadd, which counts in place under two names"),
        (_pair, "chunk, which returns a tuple of tensors"),
    ],
)
def test_operations_that_cannot_be_followed_are_refused(function: Any, message: str) -> None:
    lockstep = ChunkedBatchNorm(_Function(function), chunk_size=4)
    with pytest.raises(ConfigError, match=message) as caught:
        lockstep.embed(_rows())
    assert "\n" not in str(caught.value)


def test_other_kinds_of_batchnorm_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot embed in chunks through 1: SplitBatchNorm"):
        ChunkedBatchNorm(split_batchnorm(_small(), 2), chunk_size=4)
    assert any(type(each) is SynchronizedBatchNorm for each in synchronize(_small()).modules())


@pytest.mark.parametrize("name", ["", "8", "1"])
def test_hooks_that_would_not_be_called_are_refused(name: str) -> None:
    tower = _small()
    tower.get_submodule(name).register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=f"{name or 'the tower'} has hooks"):
        ChunkedBatchNorm(tower, chunk_size=4)


class _Counting(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, values: Tensor) -> Tensor:
        self.count.add_(1)
        return values


def test_layers_that_count_their_calls_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the forward pass changes 0\.count"):
        ChunkedBatchNorm(nn.Sequential(_Counting(), _small()), chunk_size=7)
    # One that torch.fx does not look into is found out when it runs.
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    lockstep = ChunkedBatchNorm(nn.Sequential(layer), chunk_size=7)
    with pytest.raises(ConfigError, match=r"the forward pass changes 0\.param"):
        lockstep.embed(torch.randn(8, 4))


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="chunk_size must be at least 1, got 0"):
        ChunkedBatchNorm(_small(), chunk_size=0)
    with pytest.raises(ConfigError, match="activation_checkpoint_every must be None or at least 1, got 0"):
        ChunkedBatchNorm(_small(), chunk_size=4, activation_checkpoint_every=0)


def test_a_way_back_needs_a_way_there_and_a_gradient_that_fits() -> None:
    lockstep = ChunkedBatchNorm(_small(), chunk_size=7)
    with pytest.raises(RuntimeError, match="no embeddings wait"):
        lockstep.backward(torch.zeros(24, 4))
    gradient = _ask(lockstep.embed(_rows()))
    with pytest.raises(ConfigError, match=r"shape of the embeddings, \[24, 4\], got \[23, 4\]"):
        lockstep.backward(gradient[1:])
    lockstep.backward(gradient)
    with pytest.raises(RuntimeError, match="no embeddings wait"):
        lockstep.backward(gradient)


def test_a_single_value_per_channel_is_refused() -> None:
    lockstep = ChunkedBatchNorm(_small(), chunk_size=7)
    assert len(lockstep.embed(_rows(2))) == 2
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        lockstep.embed(_rows(1))
