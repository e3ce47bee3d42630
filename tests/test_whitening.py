"""Whitening: its layer beside the formula in float64, and where a run applies it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raycl import load_encoder
from raycl.config import RunConfig
from raycl.config.overrides import config_to_yaml, override
from raycl.errors import ConfigError
from raycl.evaluation.knn import knn_accuracy
from raycl.gradient_cache import embed_in_chunks
from raycl.models.build import build_towers, save_towers
from raycl.models.momentum import MomentumEncoder
from raycl.models.towers import Tower
from raycl.models.whitening import Whitening
from raycl.recipes import recipe
from raycl.storage import Place
from raycl.training.evaluators import KnnEvaluator, SnapshotWriter
from raycl.training.preflight import _check_encoder_names
from tests.test_checkpoint_encoder import list_checkpoint, write_checkpoint

DIM = 12


def rows(number: int = 4_000) -> Tensor:
    """Return rows with a mean, and variances from 0.04 to 100."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.linalg.qr(torch.randn(DIM, DIM, generator=generator)).Q
    scaled = torch.randn(number, DIM, generator=generator) * torch.logspace(-0.7, 1, DIM)
    return scaled @ directions + 2


def whitening_of(*batches: Tensor, shrinkage: float = 0.5) -> Whitening:
    whitening = Whitening(DIM, shrinkage=shrinkage)
    for batch in batches:
        whitening.update(batch)
    return whitening


def config_of(**settings: Any) -> RunConfig:
    small = {"encoder.name": "resnet10", "encoder.width": 0.125, "data.channels": 1, "encoder.whitening": 1.0}
    return override(recipe("simclr", image_size=16), small | settings)


def trained_tower(config: RunConfig) -> Tower:
    """Return a tower that has seen a few batches in training mode."""
    tower = cast("Tower", build_towers(config)).train()
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        tower(torch.randn(64, 1, 16, 16, generator=generator)).sum().backward()
    return tower.eval()


# The layer


@pytest.mark.parametrize("shrinkage", [0.01, 0.5, 3.0])
def test_the_layer_is_the_formula_in_float64(shrinkage: float) -> None:
    data = rows()
    layer = whitening_of(*data.split(40), shrinkage=shrinkage).layer()  # 100 batches count equally
    exact = data.double().numpy()
    covariance = np.cov(exact, rowvar=False, bias=True)
    ratio = (covariance / np.trace(covariance) * DIM + shrinkage * np.eye(DIM)) / (1 + shrinkage)
    weight = layer.weight.double().numpy()
    np.testing.assert_allclose(weight, weight.T, atol=1e-4)
    np.testing.assert_allclose(weight @ ratio @ weight, np.eye(DIM), atol=2e-3)
    assert (np.linalg.eigvalsh(weight) > 0).all()
    np.testing.assert_allclose(layer(data).mean(0).numpy(), 0, atol=1e-3)


def test_old_batches_are_forgotten() -> None:
    old, new = rows().split(2_000)
    followed = whitening_of(*(5 * old).split(40), *(new.split(40) * 20))
    torch.testing.assert_close(
        followed.layer().weight, whitening_of(*new.split(40)).layer().weight, rtol=0.05, atol=0.05
    )


@pytest.mark.parametrize("batches", [[], [torch.full((4, DIM), torch.nan)], [torch.full((64, DIM), 0.3)]])
def test_without_variances_the_layer_is_the_identity(batches: list[Tensor]) -> None:
    layer = whitening_of(*batches).layer()
    torch.testing.assert_close(layer(rows(5)), rows(5))


def test_the_layer_draws_no_random_numbers() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    whitening_of(rows()).layer()
    assert torch.equal(torch.get_rng_state(), before)


def test_neighbors_are_better_where_large_variances_hide_the_classes() -> None:
    data = rows(2_000)
    weak = torch.linalg.eigh(torch.cov(data.T)).eigenvectors[:, 0]  # of the smallest variance
    label = torch.arange(2_000) % 2
    data = data + (label * 2.0 - 1)[:, None] * weak
    layer = whitening_of(*data[:1_000].split(40), shrinkage=0.01).layer()

    def accuracy(values: Tensor) -> float:
        return knn_accuracy(values[1_000:], label[1_000:], values[:1_000], label[:1_000], k=20)

    assert accuracy(layer(data)) > accuracy(data) + 0.15


# In a run


def test_embeddings_and_gradients_are_those_of_a_run_without_it() -> None:
    with_it, without = (
        cast("Tower", build_towers(config_of(**{"encoder.whitening": value}))) for value in (1.0, None)
    )
    views = torch.randn(8, 1, 16, 16)
    for training in (True, False):
        found, expected = (tower.train(training)(views) for tower in (with_it, without))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        for embedding in (found, expected):
            embedding[:, 0].mean().backward()
    gradients, others = (
        {name: each.grad for name, each in tower.named_parameters()} for tower in (with_it, without)
    )
    assert all(each is not None for each in gradients.values())
    assert gradients["encoder.conv1.weight"].abs().max() > 0  # pyright: ignore[reportOptionalMemberAccess]
    torch.testing.assert_close(gradients, others, rtol=0, atol=0)


def test_the_moments_are_exact_under_autocast() -> None:
    data = rows(64)
    exact = whitening_of(data)
    with torch.autocast("cpu", torch.bfloat16):
        found = whitening_of(data)
    assert torch.equal(found.second_moment, exact.second_moment)


def test_averaged_weights_have_averaged_moments() -> None:
    tower = trained_tower(config_of())
    average = MomentumEncoder(build_towers(config_of())).eval()
    for _ in range(2):
        average.update(tower, 0.5)
    assert tower.whitening is not None
    of_average: Any = average.tower.whitening
    torch.testing.assert_close(of_average.second_moment, 0.75 * tower.whitening.second_moment)
    assert of_average.num_batches == tower.whitening.num_batches


def test_periodic_knn_sees_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    tower, seen = trained_tower(config_of()), list[nn.Module]()

    def stop(_: KnnEvaluator, encoder: nn.Module, *__: object) -> None:
        seen.append(encoder)
        raise InterruptedError

    monkeypatch.setattr(KnnEvaluator, "_encode", stop)
    rows_of_run: Any = None
    with pytest.raises(InterruptedError):
        KnnEvaluator(bank=rows_of_run, test=rows_of_run, transform=rows_of_run).measure(
            tower, torch.device("cpu")
        )
    images = torch.randn(5, 1, 16, 16)
    torch.testing.assert_close(seen[0](images), tower.evaluated(images))


def test_snapshots_see_the_layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tower, seen = trained_tower(config_of()), list[nn.Module]()

    def stop(_: SnapshotWriter, encoder: nn.Module, *__: object) -> None:
        seen.append(encoder)
        raise InterruptedError

    monkeypatch.setattr(SnapshotWriter, "_embed", stop)
    rows_of_run, transform = cast("Any", None), cast("Any", SimpleNamespace(plain=None, plain_key=None))
    writer = SnapshotWriter(
        rows=rows_of_run,
        positions=np.arange(1),
        transform=transform,
        output=Place(str(tmp_path)),
        tokenizer=None,
        held_out=True,
        seed=0,
    )
    with pytest.raises(InterruptedError):
        writer.write(tower, torch.device("cpu"), step=0)
    images = torch.randn(5, 1, 16, 16)
    torch.testing.assert_close(seen[0](images), tower.evaluated(images))


def test_only_training_steps_count() -> None:
    tower = cast("Tower", build_towers(config_of()))
    assert tower.whitening is not None
    views = torch.randn(8, 1, 16, 16)
    tower.eval()(views)
    with torch.no_grad():  # as the first pass over chunks, or a momentum encoder
        tower.train()(views)
    assert tower.whitening.num_batches == 0
    tower(views)
    assert tower.whitening.num_batches == 1


@pytest.mark.parametrize("batchnorm", ["synchronized", "group"])
def test_chunks_count_each_row_once(batchnorm: str) -> None:
    tower = cast("Tower", build_towers(config_of(batchnorm=batchnorm))).train()
    views, seen = torch.randn(64, 1, 16, 16), list[Tensor]()
    assert tower.whitening is not None
    tower.whitening.update = seen.append  # pyright: ignore[reportAttributeAccessIssue]
    embed_in_chunks(tower, views, chunk_size=16, cached_chunks=2).sum().backward()
    in_chunks = torch.cat(seen)
    seen.clear()
    tower(views)
    assert len(in_chunks) == len(views)
    torch.testing.assert_close(in_chunks.sort(0).values, seen[0].sort(0).values, rtol=1e-3, atol=1e-4)


def test_the_saved_encoder_has_the_layer(tmp_path: Path) -> None:
    tower = trained_tower(config_of())
    save_towers(tower, config_of(), None, Place(str(tmp_path)))
    images = torch.randn(5, 1, 16, 16)
    found = load_encoder(str(tmp_path))(images)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(found, tower.evaluated(images))
    assert (found - tower.encoder(images)).abs().max() > 0.01


@pytest.mark.parametrize("averaged", [False, True])
def test_the_encoder_of_a_checkpoint_has_the_layer(averaged: bool, tmp_path: Path) -> None:
    config = config_of(ema_decay=0.99 if averaged else None)
    tower = trained_tower(config)
    state: dict[str, Any] = {"tower": tower.state_dict()}
    if averaged:
        state = {"tower": build_towers(config).state_dict(), "ema": MomentumEncoder(tower).state_dict()}
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    write_checkpoint(tmp_path, 5, state)
    list_checkpoint(tmp_path, 5)
    images = torch.randn(5, 1, 16, 16)
    found = load_encoder(str(tmp_path))(images)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(found, tower.evaluated(images))


def test_evaluated_keeps_the_mode_of_the_encoder() -> None:
    tower = trained_tower(config_of())
    assert not tower.evaluated.training
    assert tower.train().evaluated.training


def test_a_network_without_the_layer_is_refused(tmp_path: Path) -> None:
    tower = trained_tower(config_of())
    save_towers(tower, config_of(), None, Place(str(tmp_path)))
    with pytest.raises(ConfigError, match="a layer that whitens, which network= lacks; leave network out"):
        load_encoder(str(tmp_path), network=tower.encoder)


def test_an_encoder_of_the_users_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"encoder\.whitening acts only with .* set encoder\.whitening=null"
    ):
        _check_encoder_names(config_of(), own_encoder=True)
    with pytest.raises(
        ConfigError, match=r"encoder\.freeze_patches acts only .* encoder\.freeze_patches=false"
    ):
        _check_encoder_names(recipe("moco_v3", image_size=32), own_encoder=True)
