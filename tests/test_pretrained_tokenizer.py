"""Runs that start from a pretrained model use its tokenizer."""

from pathlib import Path
from typing import Any

import pytest

from raycl.config import RunConfig
from raycl.config.overrides import override
from raycl.errors import ConfigError
from raycl.recipes import recipe
from raycl.storage import Place
from raycl.tokenization import Tokenizer, train_tokenizer
from raycl.training.data_module import known_tokenizer
from tests.texts import invented_texts


@pytest.fixture
def own_tokenizer(tmp_path: Path) -> Tokenizer:
    """Write a tokenizer into a model's folder; return it."""
    tokenizer = train_tokenizer(invented_texts(50), vocabulary_size=300)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text(tokenizer.to_json())
    return tokenizer


def config_of(folder: Path, **settings: Any) -> RunConfig:
    return override(recipe("simcse"), {"encoder.name": f"transformers:{folder / 'model'}"} | settings)


def known(config: RunConfig, folder: Path, *, resumed: bool = False) -> Tokenizer | None:
    return known_tokenizer(config, Place(str(folder / "run")), resumed=resumed)


def other_tokenizer(path: Path) -> tuple[str, Tokenizer]:
    """Write another tokenizer; return its path and the tokenizer."""
    other = train_tokenizer(invented_texts(50, seed=9), vocabulary_size=280)
    path.parent.mkdir(exist_ok=True)
    path.write_text(other.to_json())
    return str(path), other


def test_the_tokenizer_is_read_from_the_models_folder(own_tokenizer: Tokenizer, tmp_path: Path) -> None:
    found = known(config_of(tmp_path), tmp_path)
    assert found is not None
    assert found.fingerprint == own_tokenizer.fingerprint
    captions = {"text_encoder.name": f"transformers:{tmp_path / 'model'}"}
    beside_images = known(override(recipe("clip"), captions), tmp_path)
    assert beside_images is not None
    assert beside_images.fingerprint == own_tokenizer.fingerprint


def test_another_tokenizer_is_refused_unless_the_model_starts_untrained(
    own_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    address, other = other_tokenizer(tmp_path / "other.json")
    with pytest.raises(ConfigError, match="is not the one that transformers:.* was trained with; remove it"):
        known(config_of(tmp_path, **{"text.tokenizer": address}), tmp_path)
    untrained = {"text.tokenizer": address, "encoder.kwargs": {"pretrained": False}}
    found = known(config_of(tmp_path, **untrained), tmp_path)
    assert found is not None
    assert found.fingerprint == other.fingerprint
    same = {"text.tokenizer": str(tmp_path / "model" / "tokenizer.json")}
    assert known(config_of(tmp_path, **same), tmp_path) is not None


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer.json beside it"):
        known(config_of(tmp_path), tmp_path)


def test_only_a_resumed_run_uses_the_tokenizer_in_its_output(
    own_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    _, other = other_tokenizer(tmp_path / "run" / "tokenizer.json")
    plain = recipe("simcse")
    assert known(plain, tmp_path) is None
    resumed = known(plain, tmp_path, resumed=True)
    assert resumed is not None
    assert resumed.fingerprint == other.fingerprint
