"""Saved text encoders: loading restores the trained encoder, or names the damaged file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raycl.errors import ConfigError, DataError, StorageError
from raycl.inference.encoder import load_encoder
from raycl.models.encoder_io import HEAD_WEIGHTS, KEY, SPEC, TOKENIZER, WEIGHTS, TextEncoder
from raycl.models.towers import Tower
from raycl.tokenization import padded_rows, train_tokenizer
from raycl.training.transforms import build_transform
from tests.pairs import TRANSFORMER, noise_images, rows_of, small_config, vocabulary
from tests.texts import invented_texts
from tests.towers import save

TEXTS = [*invented_texts(7, seed=5), "one", "a word in other WORDS"]
HEAD = {"projection_head.num_layers": 2, "projection_head.dim": 12, "projection_head.batchnorm": True}
SEPARATE = {"separate_towers": True}
BY_TRANSFORMER: dict[str, Any] = {"encoder.name": "transformer", "encoder.kwargs": TRANSFORMER}


def load_texts(output: Path, side: Any = "query") -> TextEncoder:
    loaded = load_encoder(str(output), side=side)
    assert isinstance(loaded, TextEncoder)
    return loaded


def tokens_of(texts: list[str], max_length: int) -> Tensor:
    return torch.from_numpy(padded_rows(vocabulary().tokenizer.encode(texts, max_length)))


def projected(tower: Tower, rows: Tensor) -> Tensor:
    with torch.no_grad():
        return tower.projection_head(tower.encoder(rows))


@pytest.mark.parametrize("settings", [{}, {"encoder.name": "bag_of_subwords", "encoder.kwargs": {"dim": 16}}])
def test_a_run_with_one_tower_saves_only_its_encoder(settings: dict[str, Any], tmp_path: Path) -> None:
    tower = save(small_config("simcse", {**HEAD, **settings}), tmp_path)
    assert isinstance(tower, Tower)
    loaded = load_texts(tmp_path)
    with torch.no_grad():
        expected = tower.encoder(tokens_of(TEXTS, loaded.spec.max_length))
    assert not loaded.training
    assert torch.equal(loaded.encode(TEXTS), expected)
    assert loaded.spec.representation_dim == expected.shape[1] == 16
    assert loaded.spec.projection_head is None
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([SPEC, TOKENIZER, WEIGHTS])


@pytest.mark.parametrize("batchnorm", ["local", "layer"])
@pytest.mark.parametrize("head", [{}, HEAD], ids=["without a head", "with a head"])
@pytest.mark.parametrize("towers", [{}, SEPARATE], ids=["one tower", "two towers"])
@pytest.mark.parametrize("encoder", [{}, BY_TRANSFORMER], ids=["bag", "transformer"])
def test_each_side_of_a_pair_has_its_own_embeddings(
    encoder: dict[str, Any], towers: dict[str, Any], head: dict[str, Any], batchnorm: str, tmp_path: Path
) -> None:
    config = small_config(settings={**encoder, **towers, **head, "batchnorm": batchnorm})
    saved = save(config, tmp_path)
    for number, side in enumerate(("query", "key")):
        loaded = load_texts(tmp_path, side)
        is_query_alone = bool(towers) and side == "query"
        assert loaded.spec.cut_at == (config.text.max_length if is_query_alone else None)
        found, rows = loaded.encode(TEXTS), tokens_of(TEXTS, loaded.spec.cut_at or loaded.spec.max_length)
        with torch.no_grad():
            embedding = saved(rows, rows)[number]
        assert torch.allclose(found, projected(saved.towers[number % len(saved.towers)], rows), atol=1e-6)
        assert torch.allclose(F.normalize(found, dim=1), embedding, atol=1e-6)
        assert loaded.spec.representation_dim == config.projection_head.dim
        assert loaded.tokenizer.to_json() == vocabulary().tokenizer.to_json()
    assert (tmp_path / KEY).exists() == bool(towers)
    assert (tmp_path / HEAD_WEIGHTS).exists() == bool(head)
    assert torch.equal(*(load_texts(tmp_path, side).encode(TEXTS) for side in ("query", "key"))) != bool(
        towers
    )


def test_the_key_side_of_captioned_images_reads_texts(tmp_path: Path) -> None:
    config = small_config("clip")
    saved = save(config, tmp_path)
    captions = load_texts(tmp_path, "key")
    rows = tokens_of(TEXTS, captions.spec.max_length)
    assert torch.allclose(captions.encode(TEXTS), projected(saved.towers[1], rows), atol=1e-6)
    images = load_encoder(str(tmp_path))
    batch = rows_of(config, {"image": noise_images(3), "caption": TEXTS[:3]}).take(np.arange(3))
    plain = build_transform(config, vocabulary().tokenizer).plain(batch).on(torch.device("cpu"))
    assert torch.allclose(images(plain), projected(saved.towers[0], plain), atol=1e-6)
    assert not (tmp_path / TOKENIZER).exists()


def test_texts_are_encoded_in_batches_and_an_empty_list_has_no_rows(tmp_path: Path) -> None:
    save(small_config(), tmp_path)
    loaded = load_texts(tmp_path)
    at_once = loaded.encode(TEXTS)
    assert torch.allclose(loaded.encode(TEXTS, batch_size=2), at_once, atol=1e-6)
    assert torch.allclose(torch.cat([loaded.encode([text]) for text in TEXTS]), at_once, atol=1e-6)
    assert loaded.encode([]).shape == (0, 16)


@pytest.mark.parametrize(
    ("text", "cause"), [("", "empty text"), (None, "missing value"), (3, "int in place")]
)
def test_input_that_is_not_text_is_refused(text: Any, cause: str, tmp_path: Path) -> None:
    save(small_config(), tmp_path)
    with pytest.raises(DataError, match=f"text 2 cannot be used: {cause}.*; remove it"):
        load_texts(tmp_path).encode(["sound", "sound", text], batch_size=2)


def test_a_single_text_instead_of_a_list_is_refused(tmp_path: Path) -> None:
    save(small_config(), tmp_path)
    with pytest.raises(DataError, match="encode takes a list of texts, came str; put it into a list"):
        load_texts(tmp_path).encode("sound")
    with pytest.raises(DataError, match="encode takes a list of texts, came dict"):
        load_texts(tmp_path).encode({"sound": 1})
    with pytest.raises(ConfigError, match="batch_size must be a whole number, came 2.5"):
        load_texts(tmp_path).encode(["sound"], batch_size=2.5)


def test_texts_of_a_generator_are_encoded_as_a_list(tmp_path: Path) -> None:
    save(small_config(), tmp_path)
    encoder = load_texts(tmp_path)
    assert torch.equal(encoder.encode(text for text in TEXTS), encoder.encode(TEXTS))


def test_a_tokenizer_that_does_not_match_is_refused(tmp_path: Path) -> None:
    save(small_config(), tmp_path)
    other = train_tokenizer(TEXTS * 3, vocabulary_size=300)
    (tmp_path / TOKENIZER).write_text(other.to_json())
    with pytest.raises(StorageError) as caught:
        load_encoder(str(tmp_path))
    text = str(caught.value)
    assert f"{tmp_path / TOKENIZER} is not the tokenizer of the encoder beside it" in text
    assert other.fingerprint in text
    assert vocabulary().tokenizer.fingerprint in text


def test_the_order_of_keys_in_a_tokenizer_file_does_not_matter(tmp_path: Path) -> None:
    save(small_config(), tmp_path)
    file = tmp_path / TOKENIZER
    before = load_texts(tmp_path).encode(TEXTS)
    file.write_text(file.read_text().replace("\n", "").replace("  ", ""))
    assert torch.equal(load_texts(tmp_path).encode(TEXTS), before)


DAMAGE: dict[str, Any] = {
    "half of it": lambda content: content[: len(content) // 2],
    "nothing": lambda content: b"",
    "something else": lambda content: b"[]",
    "no text": lambda content: b"\xff\xfe" + content,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("folder", ["", KEY], ids=["query", "key"])
@pytest.mark.parametrize("name", [SPEC, WEIGHTS, HEAD_WEIGHTS, TOKENIZER])
def test_a_damaged_file_is_reported_in_one_line(name: str, folder: str, damage: str, tmp_path: Path) -> None:
    save(small_config(settings={**SEPARATE, **HEAD}), tmp_path)
    file = tmp_path / folder / name
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    with pytest.raises(StorageError) as caught:
        load_encoder(str(tmp_path), side="key" if folder else "query")
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    # The other side has its own file.
    load_encoder(str(tmp_path), side="query" if folder else "key")


@pytest.mark.parametrize("name", [WEIGHTS, HEAD_WEIGHTS, TOKENIZER])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    save(small_config(settings=HEAD), tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(StorageError, match=f"cannot read '{tmp_path / name}'"):
        load_encoder(str(tmp_path))


def test_an_output_without_an_encoder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"found no encoder at {tmp_path} .*give the --output"):
        load_encoder(str(tmp_path), side="key")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "settings",
    [
        BY_TRANSFORMER | HEAD,
        BY_TRANSFORMER | {"projection_head.num_layers": 0, "projection_head.dim": 16},
        HEAD | {"encoder.kwargs": {"dim": 16, "sublinear_tf": True}},
    ],
    ids=["transformer", "without a head", "bag"],
)
def test_a_loaded_encoder_works_in_other_precisions(
    settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    save(small_config(settings=settings), tmp_path)
    expected = load_texts(tmp_path).encode(TEXTS)
    found = load_texts(tmp_path).to(dtype).encode(TEXTS)
    assert found.dtype == torch.float32
    assert F.cosine_similarity(found, expected).min() > 0.999


@pytest.mark.parametrize("name", [WEIGHTS, HEAD_WEIGHTS])
def test_weights_of_another_network_are_refused(name: str, tmp_path: Path) -> None:
    save(small_config(settings=HEAD), tmp_path / "one")
    other = {"encoder.kwargs": {"dim": 24, "hidden_dim": 8}, **HEAD}
    save(small_config(settings=other), tmp_path / "other")
    (tmp_path / "one" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(StorageError, match="do not fit the network"):
        load_encoder(str(tmp_path / "one"))
