"""Runs that start from a pretrained model use its tokenizer."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors

from raycl.api import plan_examined
from raycl.config import RunConfig
from raycl.config.overrides import config_to_yaml, override
from raycl.errors import ConfigError
from raycl.models.build import build_encoder, encoder_specs
from raycl.recipes import recipe
from raycl.storage import Place
from raycl.tokenization import Tokenizer, Vocabulary, padded_rows, train_tokenizer
from raycl.training.data_module import known_tokenizer
from raycl.training.preflight import hash_of_settings, validate_run
from raycl.training.transforms import build_transform
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


def test_a_run_at_an_address_with_options_is_resumed_with_its_tokenizer(
    own_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "?scheme=http&endpoint_override=127.0.0.1:9000"
    files = {f"s3://bucket/run/tokenizer.json{options}": own_tokenizer.to_json()}
    monkeypatch.setattr(Place, "exists", lambda place: place.uri in files)
    monkeypatch.setattr(Place, "read_text", lambda place: files[place.uri])
    found = known_tokenizer(recipe("simcse"), Place(f"s3://bucket/run{options}"), resumed=True)
    assert found is not None and found.fingerprint == own_tokenizer.fingerprint


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


@pytest.mark.parametrize("side", ["encoder", "text_encoder"])
def test_a_model_without_a_tokenizer_is_refused_with_the_setting_of_its_tower(
    side: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    if side == "text_encoder":
        config = override(recipe("clip"), {"text_encoder.name": config.encoder.name})
    with pytest.raises(
        ConfigError, match=f"has no tokenizer.json beside it.* or set {side}.kwargs.pretrained=false"
    ):
        known(config, tmp_path)


def test_only_a_resumed_run_uses_the_tokenizer_in_its_output(
    own_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    _, other = other_tokenizer(tmp_path / "run" / "tokenizer.json")
    plain = recipe("simcse")
    assert known(plain, tmp_path) is None
    resumed = known(plain, tmp_path, resumed=True)
    assert resumed is not None
    assert resumed.fingerprint == other.fingerprint


@pytest.mark.parametrize("given", ["model", "./model", "~/model"])
def test_a_run_saves_the_absolute_path_of_its_model(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    output, absolute = tmp_path / "run", f"transformers:{tmp_path / 'model'}"
    sentences = override(recipe("simcse"), {"encoder.name": f"transformers:{given}"})
    with validate_run(sentences, output=str(output), resume=False) as run:
        assert run.config == override(sentences, {"encoder.name": absolute})
    assert plan_examined(sentences, {}, None, ()) == run.config
    captions = override(recipe("clip"), {"text_encoder.name": f"transformers:{given}"})
    with validate_run(captions, output=str(output), resume=False) as run:
        assert run.config == override(captions, {"text_encoder.name": absolute})
    images = override(recipe("simclr"), {"encoder.name": "transformers:build"})  # a function of this module
    with validate_run(images, output=str(output), resume=False) as run:
        assert run.config == images
    output.mkdir(exist_ok=True)
    copied = override(sentences, {"encoder.name": "transformers:elsewhere/model"})
    for saved in (
        sentences,
        override(sentences, {"encoder.name": absolute}),
        copied,
    ):  # by an older version, by this one, on another machine
        (output / "config.yaml").write_text(config_to_yaml(saved))
        with validate_run(sentences, output=str(output), resume=True) as run:
            assert run.config.encoder.name == absolute
        assert hash_of_settings(saved) == hash_of_settings(run.config)
    another = override(sentences, {"encoder.name": "transformers:other"})
    with (
        pytest.raises(ConfigError, match="--resume would change encoder.name"),
        validate_run(another, output=str(output), resume=True),
    ):
        pass


@pytest.mark.parametrize("change", ["deletion", "insertion"])
def test_changes_of_words_need_a_tokenizer_that_shows_them(change: str) -> None:
    theirs = tokenizers.Tokenizer(models.BPE({"<pad>": 0, "<unk>": 1, "b": 2, "a": 3, "ba": 4}, [("b", "a")]))
    theirs.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(theirs.to_str())
    for name in ("simcse", "esimcse"):  # which repeats tokens
        build_transform(recipe(name), tokenizer)
    with pytest.raises(ConfigError, match="do not show where words begin"):
        build_transform(override(recipe("simcse"), {f"text_augment.{change}": 0.1}), tokenizer)


def test_a_model_in_the_working_folder_of_a_job_keeps_its_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray deletes the copy of the submitted folder, and each submission has its own."""
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    given = override(recipe("simcse"), {"encoder.name": "transformers:model"})
    with validate_run(given, output=str(tmp_path / "run"), resume=False) as run:
        assert run.config == given


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])  # pad with 0 and with 1
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_a_model_receives_the_ids_of_its_tokenizer_file(kind: str, padding: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    names = ["<s>", "</s>", "<unk>", "so", "it", "goes"]
    names.insert(padding, "<pad>")
    library = tokenizers.Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>")
    )
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<pad>", "<s>", "</s>", "<unk>"])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[(name, names.index(name)) for name in ("<s>", "</s>")],
    )
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    model = transformers.AutoModel.from_config(
        getattr(transformers, f"{kind}Config")(vocab_size=len(names), max_position_embeddings=40, **sizes)
    ).eval()
    model.save_pretrained(tmp_path / "model")
    library.save(str(tmp_path / "model" / "tokenizer.json"))

    config = config_of(tmp_path)
    tokenizer = known(config, tmp_path)
    assert tokenizer is not None
    (spec,) = encoder_specs(config, tokenizer)
    encoder = build_encoder(config, spec, Vocabulary(tokenizer)).eval()
    texts = ["so it goes so", "it"]
    found = encoder(torch.from_numpy(padded_rows(tokenizer.encode(texts, max_length=32))))
    for text, vector in zip(texts, found, strict=True):
        ids = torch.tensor([library.encode(text).ids])
        expected = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0].mean(0)
        torch.testing.assert_close(vector, expected, rtol=0, atol=1e-6)
