"""Export to model2vec: a bag of subwords becomes a table of token vectors."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from raycl.errors import ConfigError
from raycl.inference.encoder import load_encoder
from raycl.inference.export import export_encoder
from raycl.inference.preflight import Package
from raycl.models.specs import HeadSpec
from raycl.tokenization import Tokenizer
from tests.test_cli import run_raycl
from tests.test_export import MAX_LENGTH, TEXTS, TOKENIZERS, write_texts_run

model2vec = pytest.importorskip("model2vec")

TABLE = {"dim": 24, "hidden_dim": 0, "bias": False}
# model2vec reads the name of a special token as that token, and long texts whole.
SHORT = [" ".join(text.split()[:3]) for text in TEXTS if "[PAD]" not in text and len(text) < 200]
PLAIN = [text for text in [*SHORT, "é 🙂 ba"] if len(text.encode()) <= MAX_LENGTH]


def encoded(folder: Path, texts: list[str], **settings: Any) -> Tensor:
    return torch.from_numpy(model2vec.StaticModel.from_pretrained(folder, **settings).encode(texts)).float()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("lowercase", [True, False])
def test_model2vec_gives_the_same_vectors_as_raycl(weighted: bool, lowercase: bool, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["own" if lowercase else "own, as written"]()
    run = write_texts_run(tmp_path / "run", tokenizer=tokenizer, arguments=TABLE | {"weighted": weighted})
    code = export_encoder(run, tmp_path / "out", to="model2vec")
    assert code == f"model2vec.StaticModel.from_pretrained({str(tmp_path / 'out')!r})"
    expected = normalize(load_encoder(run).encode(PLAIN))
    assert len(PLAIN) >= 8
    assert expected.std(0).min() > 1e-3
    torch.testing.assert_close(encoded(tmp_path / "out", PLAIN), expected, rtol=1e-4, atol=1e-5)


def test_fewer_numbers_are_the_first_ones_and_int8_is_near(tmp_path: Path) -> None:
    run = write_texts_run(tmp_path / "run", arguments=TABLE)
    export_encoder(run, tmp_path / "out", to="model2vec")
    expected = load_encoder(run).encode(PLAIN)
    first = encoded(tmp_path / "out", PLAIN, dimensionality=8)
    torch.testing.assert_close(first, normalize(expected[:, :8]), rtol=1e-4, atol=1e-5)
    assert cosine_similarity(encoded(tmp_path / "out", PLAIN, quantize_to="int8"), expected).min() > 0.998


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"name": "transformer", "arguments": {"dim": 24, "num_layers": 1}}, "the encoder is transformer;"),
        ({"arguments": TABLE | {"hidden_dim": 40}}, "a network after the mean (encoder.kwargs.hidden_dim)"),
        ({"arguments": TABLE | {"bias": True}}, "has a bias (train with encoder.kwargs.bias=false)"),
        ({"arguments": TABLE | {"sublinear_tf": True}}, "less (encoder.kwargs.sublinear_tf)"),
        ({"arguments": TABLE, "prompts": {"query": "query: ", "key": ""}}, "the prompt 'query: '"),
        ({"arguments": TABLE, "tokenizer": "foreign"}, "adds special tokens to each text"),
        ({"arguments": TABLE, "tokenizer": "own, with a gap"}, "the tokenizer has unused ids"),
        ({"arguments": TABLE, "head": HeadSpec(num_layers=1, dim=7)}, "is bag_of_subwords with a projection head;"),
    ],
)  # fmt: skip
def test_an_encoder_that_is_no_table_is_refused(
    settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    name, gap, _ = settings.pop("tokenizer", "own").partition(", with a gap")
    tokenizer = TOKENIZERS[name]()
    if gap:
        content = json.loads(tokenizer.to_json())
        vocabulary = content["model"]["vocab"]
        vocabulary[max(vocabulary, key=vocabulary.get)] += 5
        tokenizer = Tokenizer(json.dumps(content))
    run = write_texts_run(tmp_path / "run", tokenizer=tokenizer, **settings)
    with pytest.raises(ConfigError) as error:
        export_encoder(run, tmp_path / "out", to="model2vec")
    assert reason in str(error.value) and str(error.value).endswith("export to sentence_transformers")
    assert not (tmp_path / "out").exists()


def test_the_help_names_all_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, output, _ = run_raycl(monkeypatch, capsys, "export", "--help")
    assert all(name in output for name in get_args(Package))


def test_the_command_prints_how_to_load_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_texts_run(tmp_path / "run", arguments=TABLE)
    arguments = ["export", "--run", run, "--output", tmp_path / "out", "--to", "model2vec"]
    status, output, _ = run_raycl(monkeypatch, capsys, *arguments)
    assert status == 0
    assert output == f"load it with model2vec.StaticModel.from_pretrained('{tmp_path / 'out'}')\n"
