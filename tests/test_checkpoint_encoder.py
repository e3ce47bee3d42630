"""The encoder of an unfinished run: choice of checkpoint and tower, and image preprocessing."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raycl.augment.images import center_view
from raycl.cli.bank import _embed
from raycl.config import RunConfig
from raycl.config.overrides import config_to_yaml
from raycl.errors import ConfigError, DataError, StorageError
from raycl.inference import encoder as saved
from raycl.inference.encoder import load_checkpoint_encoder
from raycl.models.build import build_towers
from raycl.models.momentum import MomentumEncoder
from raycl.recipes import recipe
from raycl.training.transforms import image_format
from tests.images import digit_files
from tests.settings import override_active

SMALL = {
    "data.channels": 1,
    "encoder.name": "tests.cluster.networks:small",
    "encoder.kwargs": {"channels": 1},
    "projection_head.dim": 8,
}


def small_config(name: str = "moco_v2", **settings: Any) -> RunConfig:
    return override_active(recipe(name, image_size=16), SMALL, settings)


def tower_of(config: RunConfig, *, seed: int) -> nn.Module:
    """Return a tower with non-initial weights and running statistics."""
    tower = build_towers(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in [*tower.parameters(), *tower.buffers()]:
            if value.is_floating_point():
                value.copy_(0.5 + torch.rand(value.shape, generator=generator))
    return tower.eval()


def write_checkpoint(run: Path, step: int, learner: dict[str, Any]) -> None:
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    torch.save({"learner": learner}, folder / "state.pt")


def list_checkpoint(run: Path, step: int) -> None:
    latest = {"checkpoint_dir_name": f"step-{step:08d}"}
    listed = run / "checkpoints" / "checkpoint_manager_snapshot.json"
    listed.write_text(json.dumps({"latest_checkpoint_result": latest}))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a MoCo run with a checkpoint at step 5."""
    config = small_config()
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    query_side, key_side = tower_of(config, seed=1), tower_of(config, seed=2)
    state = {"tower": query_side.state_dict(), "momentum_encoder": MomentumEncoder(key_side).state_dict()}
    write_checkpoint(tmp_path, 5, state)
    list_checkpoint(tmp_path, 5)
    return tmp_path


def expected(config: RunConfig, tower: nn.Module, image: bytes) -> np.ndarray:
    pixels, _ = image_format(config).decode(image)
    mean, std = config.normalization
    with torch.no_grad():
        return tower(center_view(pixels[None], size=16, mean=mean, std=std))[0].numpy()


def test_an_image_is_embedded_by_the_momentum_encoder_if_the_run_has_one(run: Path) -> None:
    (image,), _ = digit_files(1)
    found = load_checkpoint_encoder(str(run))
    embedding = found.embed("image", image)
    by_keys, by_queries = (
        expected(small_config(), tower_of(small_config(), seed=seed), image) for seed in (2, 1)
    )
    assert found.checkpoint == "step-00000005"
    assert (embedding.shape, embedding.dtype) == ((8,), np.float32)
    np.testing.assert_allclose(embedding, by_keys, atol=1e-6)
    assert not np.allclose(embedding, by_queries, atol=1e-3)


def test_statistics_are_of_the_tower_if_a_pool_encodes_the_keys(run: Path) -> None:
    config = small_config(**{"momentum_encoder.location": "actors"})
    (run / "config.yaml").write_text(config_to_yaml(config))
    key_side, statistics = tower_of(config, seed=2), dict(tower_of(config, seed=1).named_buffers())
    key_side.load_state_dict(key_side.state_dict() | statistics)
    (image,), _ = digit_files(1)
    embedding = load_checkpoint_encoder(str(run)).embed("image", image)
    np.testing.assert_allclose(embedding, expected(config, key_side, image), atol=1e-6)


def test_an_image_is_embedded_by_the_query_tower_if_memory_bank_slots_are_the_keys(tmp_path: Path) -> None:
    config = small_config("instance_discrimination")
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    write_checkpoint(tmp_path, 1, {"tower": tower_of(config, seed=3).state_dict()})
    list_checkpoint(tmp_path, 1)
    (image,), _ = digit_files(1)
    embedding = load_checkpoint_encoder(str(tmp_path)).embed("image", image)
    np.testing.assert_allclose(embedding, expected(config, tower_of(config, seed=3), image), atol=1e-6)


def test_an_unlisted_checkpoint_is_not_read(run: Path) -> None:
    (run / "checkpoints" / "step-00000009").mkdir()
    (run / "checkpoints" / "step-00000009" / "state.pt").write_bytes(b"half")
    assert load_checkpoint_encoder(str(run)).checkpoint == "step-00000005"


@pytest.mark.parametrize("listed", [None, '{"latest_checkpoint_result": null}'])
def test_a_run_without_a_checkpoint_is_refused(run: Path, listed: str | None) -> None:
    file = run / "checkpoints" / "checkpoint_manager_snapshot.json"
    file.unlink()
    if listed:
        file.write_text(listed)
    with pytest.raises(StorageError, match="no checkpoint yet; repeat the command"):
        load_checkpoint_encoder(str(run))


@pytest.mark.parametrize(
    ("name", "query", "answer"),
    [
        ("moco_v2", ("text", "hi"), "recipe moco_v2 has images and no texts; ask by --image"),
        ("simcse", ("image", b"png"), "recipe simcse has texts and no images; ask by --text"),
    ],
)
def test_a_query_of_another_kind_than_the_run_is_refused_before_its_first_checkpoint(
    name: str, query: Any, answer: str, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(config_to_yaml(recipe(name)))
    with pytest.raises(ConfigError, match=answer):
        _embed(str(tmp_path), *query)


def test_a_text_is_no_query_of_images(run: Path) -> None:
    with pytest.raises(ConfigError, match="recipe moco_v2 has images and no texts; ask by --image"):
        load_checkpoint_encoder(str(run)).embed("text", "hi")


def test_a_partly_written_list_is_read_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "checkpoints" / "checkpoint_manager_snapshot.json").write_text('{"latest')
    writer = threading.Timer(0.2, list_checkpoint, [run, 5])
    writer.start()
    assert load_checkpoint_encoder(str(run)).checkpoint == "step-00000005"
    writer.join()
    monkeypatch.setattr("raycl.records._LIST_WAIT_S", 0.01)
    (run / "checkpoints" / "checkpoint_manager_snapshot.json").write_text('{"latest')
    with pytest.raises(StorageError, match="list of checkpoints is damaged"):
        load_checkpoint_encoder(str(run))


def test_a_newer_checkpoint_replaces_one_deleted_during_loading(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(["step-00000004", "step-00000005"])
    monkeypatch.setattr(saved, "last_checkpoint", lambda output: next(names))
    assert load_checkpoint_encoder(str(run)).checkpoint == "step-00000005"


def test_a_deleted_checkpoint_without_a_newer_one_is_an_error(run: Path) -> None:
    (run / "checkpoints" / "step-00000005" / "state.pt").unlink()
    with pytest.raises(StorageError, match="cannot read"):
        load_checkpoint_encoder(str(run))


def test_a_missing_custom_network_is_refused_in_one_line(run: Path) -> None:
    config = small_config(**{"encoder.name": "resnet10", "encoder.kwargs": {}, "encoder.width": 0.25})
    (run / "config.yaml").write_text(config_to_yaml(config))
    with pytest.raises(ConfigError, match="network of its user's own.*--vector"):
        load_checkpoint_encoder(str(run))


def test_a_missing_run_and_an_invalid_image_are_errors(run: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot read"):
        load_checkpoint_encoder(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="not an image"):
        load_checkpoint_encoder(str(run)).embed("image", b"no picture")
