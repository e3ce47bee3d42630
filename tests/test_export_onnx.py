"""Export to ONNX: a graph computes raycl's vectors, with neither torch nor raycl."""

import importlib.util
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raycl.inference.encoder import load_encoder
from raycl.inference.export import export_encoder
from raycl.models.encoder_io import KEY
from raycl.models.specs import HeadSpec
from tests.encoders import write_images_run
from tests.images import photograph
from tests.test_cli import run_raycl
from tests.test_export import ENCODERS, MAX_LENGTH, TEXTS, TOKENIZERS, write_texts_run

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

HEAD = HeadSpec(num_layers=2, hidden_dim=11, dim=7)


def graph_of(folder: Path) -> Any:
    """Return the graph, ready to run: by onnxruntime if it is installed, or by the reference of ONNX."""
    if importlib.util.find_spec("onnxruntime") is None:
        from onnx.reference import ReferenceEvaluator

        return ReferenceEvaluator(str(folder / "model.onnx"))
    import onnxruntime

    return onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])


def run_graph(folder: Path, values: np.ndarray) -> Tensor:
    about = json.loads((folder / "model.json").read_text())
    (output,) = graph_of(folder).run([about["output"]], {about["input"]: values})
    assert output.shape == (len(values), about["dim"])
    return torch.from_numpy(output)


def tokens_of(folder: Path, texts: list[str]) -> np.ndarray:
    """Return tokens as a user without raycl makes them."""
    prompt = json.loads((folder / "model.json").read_text())["prompt"]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return np.array([row.ids for row in tokenizer.encode_batch([prompt + text for text in texts])])


def assert_same(came: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    if len(expected) > 1:
        assert expected.std(0).mean() > 1e-3  # the rows have different vectors
    torch.testing.assert_close(came, expected, rtol=1e-5, atol=atol)
    assert F.cosine_similarity(came, expected).min() >= 0.9999


# Texts


@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [*((name, "own") for name in ENCODERS), ("transformer", "foreign"),
     ("bag_of_subwords", "foreign"), ("bag_of_subwords, damped", "own"),
     # test_export.py has these tokenizers too.
     *(pytest.param("transformer", each, marks=pytest.mark.drill) for each in list(TOKENIZERS)[1:-1])],
)  # fmt: skip
def test_a_graph_of_tokens_gives_the_same_vectors_as_raycl(name: str, tokenizer: str, tmp_path: Path) -> None:
    arguments = {"dim": 24, "sublinear_tf": True} if "damped" in name else None
    run = write_texts_run(tmp_path / "run", name, tokenizer=TOKENIZERS[tokenizer](), arguments=arguments)
    export_encoder(run, tmp_path / "out", to="onnx")
    expected, tokens = load_encoder(run).encode(TEXTS), tokens_of(tmp_path / "out", TEXTS)
    assert tokens.shape == (len(TEXTS), MAX_LENGTH)
    assert_same(run_graph(tmp_path / "out", tokens), expected)
    # A batch of one, each of its own length.
    rows = [run_graph(tmp_path / "out", tokens_of(tmp_path / "out", [text])) for text in TEXTS]
    assert_same(torch.cat(rows), expected)


@pytest.mark.parametrize("side", ["query", "key"])
def test_the_side_its_head_and_its_prompt_are_in_the_folder(side: Any, tmp_path: Path) -> None:
    prompts = {"query": "ask: ", "key": "a page - "}
    run = write_texts_run(tmp_path / "run", head=HEAD, prompts=prompts)
    write_texts_run(tmp_path / "run" / KEY, "transformer", head=HEAD, seed=3, prompts=prompts)
    export_encoder(run, tmp_path / "out", side=side, to="onnx")
    assert json.loads((tmp_path / "out" / "model.json").read_text()) == {
        "input": "tokens", "padding": 0, "max_length": MAX_LENGTH, "prompt": prompts[side],
        "output": "representation", "dim": 7,
    }  # fmt: skip
    expected = load_encoder(run, side=side).encode(TEXTS)
    assert_same(run_graph(tmp_path / "out", tokens_of(tmp_path / "out", TEXTS)), expected)


# Images


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("resnet18", {}),
        ("resnet10", {"width": 0.25, "representation_dim": 128, "whitened": True}),
        ("resnet10", {"width": 0.5, "representation_dim": 256, "channels": 1, "norm": "group"}),
        pytest.param(  # torch takes 15 s to write its graph
            *(
                "vit_tiny",
                {"representation_dim": 192, "head": HeadSpec(num_layers=3, dim=7, batchnorm=False)},
            ),
            marks=pytest.mark.drill,
        ),
    ],
    ids=["small stem", "narrow, whitened", "narrow, gray, GroupNorm", "ViT, deep head"],
)
def test_a_graph_of_pixels_gives_the_same_vectors_as_raycl(
    name: str, values: dict[str, Any], tmp_path: Path
) -> None:
    run = write_images_run(tmp_path / "run", name, **values)
    code = export_encoder(run, tmp_path / "out", to="onnx")
    assert code == f"onnxruntime.InferenceSession('{tmp_path / 'out' / 'model.onnx'}')"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.json", "model.onnx"]
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    channels = values.get("channels", 3)
    assert (about["image_size"], about["channels"]) == (32, channels)
    photo = photograph()[..., :channels]
    tiles = np.stack([photo[at : at + 32, at : at + 32] for at in range(0, 390, 30)])
    expected = load_encoder(run).encode(tiles)
    assert_same(run_graph(tmp_path / "out", tiles), expected, atol=1e-4)
    assert_same(run_graph(tmp_path / "out", tiles[:1]), expected[:1], atol=1e-4)


# Refusals


class Branching(nn.Module):
    """A network whose steps depend on the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(512))

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.flatten(1)
        return (pixels[:, :1] if pixels.sum() > 0 else pixels[:, 1:2]) * self.weight


def branching() -> nn.Module:
    return Branching()


def of_ones(*, num_tokens: int, max_length: int) -> nn.Module:
    return nn.EmbeddingBag(num_tokens, 24)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (partial(write_texts_run, name=f"{__name__}:of_ones"), "of texts it takes transformer and bag_of_"),
        (
            partial(write_images_run, name=f"{__name__}:branching"),
            r"branching cannot be written as a graph \(Could not",
        ),
    ],
    ids=["texts", "images"],
)
def test_a_network_that_is_no_graph_is_refused_in_one_line(
    write: Any,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    arguments = ["export", "--run", write(tmp_path / "run"), "--output", tmp_path / "out", "--to", "onnx"]
    status, out, err = run_raycl(monkeypatch, capfd, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert re.search(f"cannot export to ONNX: .*{message}", err)
    assert "\x1b" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", ["onnx", "onnxscript"])
def test_a_missing_package_is_named_in_one_line(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "raycl.inference.preflight.find_spec", lambda name: None if name == missing else find(name)
    )
    arguments = ["export", "--run", tmp_path, "--output", tmp_path / "out", "--to", "onnx"]
    status, out, err = run_raycl(monkeypatch, capsys, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"needs the package {missing}, which is not installed; pip install 'raycl[onnx]'" in err
