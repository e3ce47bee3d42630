"""Gradient accumulation over chunks gives the gradient of the whole batch."""

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raycl.batchnorm import replace_batchnorm, split_batchnorm
from raycl.errors import ConfigError, ReplayError
from raycl.gradient_cache import embed_in_chunks
from raycl.gradient_cache.recompute import RecomputeCheck
from raycl.losses import hinge, info_nce, nt_xent
from raycl.models.image import build_image_encoder
from raycl.models.towers import Tower, build_projection_head

Embed = Callable[..., Tensor]
BATCH = 24


def images(num_rows: int = BATCH, seed: int = 0) -> Tensor:
    return torch.rand(num_rows, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def resnet(norm: str) -> Tower:
    torch.manual_seed(0)
    encoder = build_image_encoder("resnet10", image_size=16, width=0.25)
    tower = Tower(encoder, build_projection_head(128, num_layers=2, hidden_dim=None, dim=8))
    if norm in ("layer", "group"):
        replace_batchnorm(tower, norm)  # pyright: ignore[reportArgumentType]
    elif norm == "frozen":
        with torch.no_grad():
            for rows in images(64).split(16):
                tower(rows)
        tower.eval()
    elif norm == "split":
        split_batchnorm(tower, 4)
    return tower


class _Transformer(nn.Module):
    """A small transformer with dropout, in training mode."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = self.layers(self.embedding(tokens), src_key_padding_mask=mask)
        return F.normalize((hidden * ~mask[..., None]).sum(1), dim=1)


def _tokens(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(50, (BATCH, 7), generator=generator)
    return tokens, torch.arange(7) >= torch.randint(2, 8, (BATCH, 1), generator=generator)


def gradient_of(*modules: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for m in modules for p in m.parameters() if p.grad is not None])


def _assert_same(ours: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert ours.shape == expected.shape
    assert expected.norm() > 0
    assert (ours - expected).norm() <= tolerance * expected.norm()


def _simclr(embed: Embed, tower: nn.Module) -> Tensor:
    rows = torch.cat([images(), images(seed=1)]).to(next(tower.parameters()))
    return nt_xent(*embed(tower, rows).chunk(2), temperature=0.2)


def _moco_with_hinge(embed: Embed, tower: nn.Module) -> Tensor:
    query = embed(tower, images().to(next(tower.parameters())))
    queue = F.normalize(torch.linspace(-1, 1, 240).sin().view(30, 8), dim=1).to(query)
    key = F.normalize(query.detach() + 0.3, dim=1)
    entropy = info_nce(query, key, temperature=0.1, in_batch=False, negatives=queue)
    return entropy + hinge(query, key, margin=0.3, hardest=True)


def _in_chunks(chunk_size: int, cached_chunks: int) -> Embed:
    return lambda tower, *rows: embed_in_chunks(
        tower, *rows, chunk_size=chunk_size, cached_chunks=cached_chunks
    )


def _whole(tower: nn.Module, *rows: Tensor) -> Tensor:
    return tower(*rows)


CHUNKS = [(20, 0), (20, 1), (8, 2), (8, 99), (1000, 1)]  # rows in a chunk, and cached chunks


@pytest.mark.parametrize(
    ("loss", "norm", "chunk_size", "cached_chunks"),
    [
        *[(_simclr, norm, *chunks) for norm in ("group", "batch") for chunks in CHUNKS],
        *[(_simclr, norm, 20, 1) for norm in ("layer", "frozen", "split")],
        *[(_moco_with_hinge, norm, 8, 2) for norm in ("layer", "group", "frozen", "split", "batch")],
    ],
)
def test_chunks_of_a_resnet_give_the_gradient_and_statistics_of_the_whole_batch(
    loss: Callable[[Embed, nn.Module], Tensor], norm: str, chunk_size: int, cached_chunks: int
) -> None:
    # In float32, rounding in another order may flip a ReLU, which changes the gradient by 0.1%.
    dtype = torch.float64 if norm == "batch" else torch.float32
    whole, chunked = resnet(norm).to(dtype), resnet(norm).to(dtype)
    expected = loss(_whole, whole)
    expected.backward()
    value = loss(_in_chunks(chunk_size, cached_chunks), chunked)
    value.backward()
    tolerance = 1e-9 if norm == "batch" else 1e-6
    assert float(value.detach()) == pytest.approx(float(expected.detach()), rel=tolerance)
    _assert_same(gradient_of(chunked), gradient_of(whole), 10 * tolerance)
    for (name, ours), theirs in zip(chunked.named_buffers(), whole.buffers(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize(("activation_checkpoint_every", "num_passes"), [(None, 2), (1, 3)])
def test_full_batch_normalization_costs_memory_or_a_second_pass(
    activation_checkpoint_every: int | None, num_passes: int
) -> None:
    whole, chunked = resnet("batch"), resnet("batch")
    _simclr(_whole, whole).backward()
    passed: list[int] = []
    convolution = next(each for each in list(chunked.modules())[::-1] if isinstance(each, nn.Conv2d))
    convolution.register_forward_hook(lambda *_: passed.append(1))
    embed = partial(embed_in_chunks, chunk_size=20, activation_checkpoint_every=activation_checkpoint_every)
    _simclr(embed, chunked).backward()
    _assert_same(gradient_of(chunked), gradient_of(whole))
    assert len(passed) == 3 * num_passes  # 48 rows are three chunks


def _two_towers(embed: Embed, towers: list[nn.Module], log_temperature: Tensor) -> Tensor:
    query, key = embed(towers[0], *_tokens()), embed(towers[1], *_tokens(seed=1))
    temperature = log_temperature.exp()
    directions = info_nce(query, key, temperature=temperature), info_nce(key, query, temperature=temperature)
    return (directions[0] + directions[1]) / 2


@pytest.mark.parametrize("cached_chunks", [0, 1, 2])
@pytest.mark.parametrize("is_shared", [False, True])
def test_chunks_of_two_towers_with_dropout_give_the_gradient_of_the_whole_batch(
    is_shared: bool, cached_chunks: int
) -> None:
    def gradients(embed: Embed) -> tuple[Tensor, Tensor]:
        query_tower = _Transformer()
        towers: list[nn.Module] = [query_tower, query_tower if is_shared else _Transformer(seed=1)]
        log_temperature = nn.Parameter(torch.tensor(-2.0))
        torch.manual_seed(5)
        loss = _two_towers(embed, towers, log_temperature)
        after_first = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), after_first)
        assert log_temperature.grad is not None
        return gradient_of(*dict.fromkeys(towers)), log_temperature.grad

    def all_graphs(tower: nn.Module, *rows: Tensor) -> Tensor:
        return torch.cat([tower(*chunk) for chunk in zip(*(each.split(8) for each in rows), strict=True)])

    expected, expected_of_temperature = gradients(all_graphs)
    ours, of_temperature = gradients(_in_chunks(8, cached_chunks))
    _assert_same(ours, expected)
    _assert_same(of_temperature, expected_of_temperature)


def test_the_second_pass_runs_under_the_autocast_of_the_first() -> None:
    whole, chunked = resnet("group"), resnet("group")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.cat([whole(chunk) for chunk in images().split(8)])
        ours = embed_in_chunks(chunked, images(), chunk_size=8)
    for embedding in (expected, ours):
        nt_xent(*embedding.chunk(2), temperature=0.2).backward()
    # The graph of all chunks adds up their gradients in bfloat16: autocast cast each weight once.
    _assert_same(gradient_of(chunked), gradient_of(whole), 5e-3)


def test_gradients_accumulate_and_frozen_parameters_get_none() -> None:
    tower = resnet("layer")
    tower.encoder.requires_grad_(False)
    _simclr(_in_chunks(8, 1), tower).backward()
    once = gradient_of(tower)
    _simclr(_in_chunks(8, 1), tower).backward()
    _assert_same(gradient_of(tower), 2 * once)
    assert all(parameter.grad is None for parameter in tower.encoder.parameters())


class _Marked(torch.autograd.Function):
    """Keep a mark alive as long as the graph."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, mark: "_Mark") -> Tensor:
        ctx.mark = mark
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None


class _Watched(nn.Module):
    """Count live graphs and forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.marks: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most_alive = self.num_passes = 0

    def forward(self, rows: Tensor) -> Tensor:
        self.num_passes += 1
        output = self.linear(rows)
        if output.requires_grad:
            mark = _Mark()
            self.marks.add(mark)
            self.most_alive = max(self.most_alive, len(self.marks))
            return _Marked.apply(output, mark)  # pyright: ignore[reportReturnType]
        return output


class _Mark:
    """An object that supports weak references."""


@pytest.mark.parametrize(
    ("cached_chunks", "alive", "passes"), [(0, 1, 10), (1, 1, 9), (3, 3, 7), (5, 5, 5), (9, 5, 5)]
)
def test_at_most_the_cached_graphs_are_alive_and_each_saves_a_pass(
    cached_chunks: int, alive: int, passes: int
) -> None:
    tower = _Watched()
    embed_in_chunks(tower, torch.rand(18, 4), chunk_size=4, cached_chunks=cached_chunks).sum().backward()
    assert (tower.most_alive, tower.num_passes, len(tower.marks)) == (alive, passes, 0)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_without_gradient_each_chunk_takes_one_pass(is_frozen: bool) -> None:
    tower = _Watched().requires_grad_(not is_frozen)
    with torch.set_grad_enabled(is_frozen):
        assert not embed_in_chunks(tower, torch.rand(18, 4), chunk_size=4).requires_grad
    assert (tower.most_alive, tower.num_passes) == (0, 5)


# Nondeterministic second passes


class _Noisy(nn.Module):
    """Noise from a generator outside torch's random state."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + 0.01 * torch.from_numpy(self.generator.standard_normal(rows.shape)).to(rows)


class _Counting(nn.Module):
    """A layer whose output changes with each call."""

    calls = 0

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        return rows * (1 - 0.5**self.calls)


class _Drawing(nn.Module):
    """Dropout from a separate generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, rows: Tensor) -> Tensor:
        return rows * torch.bernoulli(torch.full_like(rows, 0.5), generator=self.generator)


def _with_batchnorm(layer: nn.Module) -> nn.Sequential:
    layers = [nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), layer]
    return nn.Sequential(*layers, nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh())


@pytest.mark.parametrize(
    ("tower", "settings", "message"),
    [
        *(
            (nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.Tanh(), layer), nn.Linear(5, 3)), {}, message)
            for layer, message in (
                (_Noisy(), r"^chunk 0, at the layer 1\.1, gave other values"),
                (_Counting(), r"^chunk 0, at the layer 1\.1, gave other values"),
                (nn.Identity(), None),
            )
        ),
        *(
            (_with_batchnorm(layer), {"activation_checkpoint_every": every}, message)
            for every in (None, 1)
            for layer, message in (
                (_Drawing(), r"^a chunk, at one of the operations .*bernoulli.* gave other values"),
                (nn.Identity(), None),
            )
        ),
    ],
)
def test_a_nondeterministic_tower_is_refused_with_the_name_of_its_layer(
    tower: nn.Module, settings: dict[str, Any], message: str | None
) -> None:
    embedding = embed_in_chunks(tower, torch.rand(9, 4), chunk_size=4, **settings)
    if message is None:
        embedding.square().sum().backward()
        return
    with pytest.raises(ReplayError, match=message) as caught:
        embedding.square().sum().backward()
    assert "\n" not in str(caught.value)


def test_weight_changes_between_the_passes_are_refused() -> None:
    tower = nn.Linear(4, 3)
    embedding = embed_in_chunks(tower, torch.rand(9, 4), chunk_size=4)
    with torch.no_grad():
        tower.weight.mul_(1.1)
    with pytest.raises(ReplayError, match=r"^chunk 0 gave other values"):
        embedding.sum().backward()


NAN = [1.0, torch.nan, torch.inf]


@pytest.mark.parametrize(
    ("before", "now", "precision", "is_found"),
    [
        (NAN, NAN, torch.float32, False),
        ([1.0, 2.0], [1.0, torch.nan], torch.float32, True),
        ([1.0, 0.5], [1.0005, 0.5005], torch.float32, False),
        ([1.0, 0.5], [1.002, 0.502], torch.float32, True),
        ([1.0, 0.5], [1.02, 0.52], torch.bfloat16, False),
        ([1.0, 0.5], [1.05, 0.55], torch.bfloat16, True),
    ],
)
def test_passes_may_differ_by_rounding_and_nan_equals_nan(
    before: list[float], now: list[float], precision: torch.dtype, is_found: bool
) -> None:
    found = pytest.raises(ReplayError, match="^the second gave") if is_found else contextlib.nullcontext()
    with torch.autocast("cpu", precision, enabled=precision != torch.float32), found:
        check = RecomputeCheck()
        check.add(torch.tensor(NAN), torch.tensor(NAN), lambda: "the first")
        check.add(torch.tensor(now), torch.tensor(before), lambda: "the second")
        check.check()


# Refusals


def test_a_second_backward_pass_is_refused() -> None:
    embedding = embed_in_chunks(nn.Linear(4, 3), torch.rand(9, 4), chunk_size=4)
    embedding.sum().backward()
    with pytest.raises(RuntimeError, match="backpropagate once"):
        embedding.sum().backward()


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ((torch.rand(4, 2),), {"chunk_size": 0}, "chunk_size must be at least 1 .* got 0 and 1"),
        (
            (torch.rand(4, 2),),
            {"chunk_size": 2, "cached_chunks": -1},
            "cached_chunks at least 0, got 2 and -1",
        ),
        ((torch.rand(4, 2), torch.rand(3)), {"chunk_size": 2}, r"one length, got \[4, 3\]"),
        ((), {"chunk_size": 2}, "one length, got"),
        ((torch.rand(4, 2).requires_grad_(),), {"chunk_size": 2}, "one requires it"),
    ],
)
def test_unsupported_accumulation_is_refused(
    rows: tuple[Tensor, ...], settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        embed_in_chunks(nn.Identity(), *rows, **settings)
