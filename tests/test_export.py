"""Export: other packages load the exported model and compute the same vectors."""

import json
import runpy
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torchvision
from tokenizers import models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn

import raycl
from raycl.batchnorm import replace_batchnorm
from raycl.errors import ConfigError, RayclError, StorageError
from raycl.inference.encoder import load_encoder
from raycl.inference.export import export_encoder
from raycl.inference.export.sentence_transformers import _move_padding
from raycl.models.encoder_io import KEY, OWN, save_encoder
from raycl.models.specs import HeadSpec, TextEncoderSpec
from raycl.models.towers import build_projection_head
from raycl.storage import Place
from raycl.tokenization import Tokenizer, train_tokenizer
from tests.encoders import perturbed, write_images_run
from tests.test_cli import run_raycl
from tests.test_floors import FILES, modules_imported_by
from tests.texts import invented_texts, with_cls


@pytest.fixture(scope="module", autouse=True)
def sentence_transformers() -> Any:
    """Import it here: each process of pytest imports all files of tests, and this takes 3 s."""
    return pytest.importorskip("sentence_transformers")


MAX_LENGTH = 16
CORPUS = invented_texts(400)
TEXTS = [
    *invented_texts(12, seed=1),
    " ".join(invented_texts(30, seed=2)),  # far longer than MAX_LENGTH
    "a",
    ".",
    "  Ba DE  ",
    "BADE bade BaDe",
    "[PAD] [UNK] [CLS] [SEP] <pad> <s>",
    "ünïcödé é ﬁ 漢字 🙂",
    "b" * 300,
]
SMALL = {"dim": 24, "hidden_dim": 40, "dropout": 0.1}
ENCODERS: dict[str, dict[str, Any]] = {
    "bag_of_subwords": SMALL,
    "bag_of_subwords, unweighted": SMALL | {"weighted": False},
    "bag_of_subwords, shallow": SMALL | {"hidden_dim": 0},
    "bag_of_subwords, no bias": SMALL | {"hidden_dim": 0, "bias": False},
    "transformer": SMALL | {"num_layers": 2, "num_heads": 3},
    "transformer, cls": SMALL | {"num_layers": 1, "pooling": "cls"},
}


@cache
def own_tokenizer(**settings: Any) -> Tokenizer:
    return train_tokenizer(CORPUS, vocabulary_size=600, **settings)


@cache
def foreign_tokenizer() -> Tokenizer:
    """Return a tokenizer like RoBERTa's: padding is 1, each text begins with <s> and ends with </s>.

    Its file also pads and cuts texts on the left, which raycl does not.
    """
    words = sorted({word for text in CORPUS for word in text.lower().strip(".!?").split()})
    names = ["<s>", "<pad>", "</s>", "<unk>", *".!?", *words]
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(names[:4])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.enable_padding(direction="left", pad_id=1, pad_token="<pad>")
    tokenizer.enable_truncation(8, direction="left")
    return Tokenizer(tokenizer.to_str())


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "own": own_tokenizer,
    "own, cls, wordpiece": lambda: with_cls(own_tokenizer(), is_wordpiece=True),
    "own, as written": lambda: own_tokenizer(lowercase=False),
    "foreign": foreign_tokenizer,
}


def write_texts_run(
    output: Path | str,
    name: str = "bag_of_subwords",
    *,
    tokenizer: Tokenizer | None = None,
    head: HeadSpec | None = None,
    norm: Any = "batch",
    seed: int = 0,
    arguments: dict[str, Any] | None = None,
    dim: int = 24,
    prompts: dict[Any, str] | None = None,
) -> str:
    """Write the files of a trained text encoder; return their folder."""
    tokenizer = tokenizer or TOKENIZERS["own"]()
    spec = TextEncoderSpec(
        name=name.split(",")[0],
        arguments=ENCODERS.get(name, {}) if arguments is None else arguments,
        num_tokens=tokenizer.num_tokens,
        max_length=MAX_LENGTH,
        tokenizer=tokenizer.fingerprint,
        representation_dim=dim,
        norm=norm,
        projection_head=head,
        prompts=prompts or {},
    )
    torch.manual_seed(seed)
    encoder = perturbed(spec.build(), seed)
    projection = (
        None if head is None else perturbed(build_projection_head(dim, **head.model_dump()), seed + 1)
    )
    if projection is not None and norm != "batch":
        projection = replace_batchnorm(projection, norm)
    save_encoder(encoder, spec, Place(str(output)), projection_head=projection, tokenizer=tokenizer)
    return str(output)


def load(folder: Path | str) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def vectors(folder: Path | str) -> Tensor:
    """Return the vectors of sentence-transformers, computed in small batches."""
    return torch.from_numpy(load(folder).encode(TEXTS, batch_size=6))


def assert_vectors(folder: Path | str, expected: Tensor) -> None:
    assert expected.std(0).min() > 1e-3  # the texts have different vectors
    model = load(folder)
    came = torch.from_numpy(model.encode(TEXTS, batch_size=6))
    torch.testing.assert_close(came, expected, rtol=1e-5, atol=1e-5)
    # Loading would initialize a layer without weights randomly each time.
    assert getattr(model[0].auto_model, "pooler", None) is None


def assert_exports(run: str, output: Path, **options: Any) -> None:
    """Export a run and compare the vectors of both packages."""
    export_encoder(run, str(output), **options)
    assert_vectors(output, load_encoder(run, **options).encode(TEXTS))


# Texts


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("name", ENCODERS)
def test_sentence_transformers_gives_the_same_vectors_as_raycl(
    name: str, tokenizer: str, tmp_path: Path
) -> None:
    run = write_texts_run(tmp_path / "run", name, tokenizer=TOKENIZERS[tokenizer]())
    assert_exports(run, tmp_path / "out")


@pytest.mark.parametrize(
    "head",
    [
        HeadSpec(num_layers=0, dim=24),
        HeadSpec(num_layers=1, dim=7),
        HeadSpec(num_layers=2, hidden_dim=11, dim=7),
        HeadSpec(num_layers=3, dim=7, batchnorm=False),
        HeadSpec(num_layers=2, dim=7, batchnorm="all"),
    ],
    ids=["none", "linear", "batchnorm", "three", "all"],
)
def test_the_projection_head_of_a_tower_is_exported(head: HeadSpec, tmp_path: Path) -> None:
    run = write_texts_run(tmp_path / "run", head=head)
    assert_exports(run, tmp_path / "out")
    assert load(tmp_path / "out").get_embedding_dimension() == head.dim


def test_each_tower_is_exported_by_its_side(tmp_path: Path) -> None:
    run = write_texts_run(tmp_path / "run", head=HeadSpec(num_layers=1, dim=7))
    assert_exports(run, tmp_path / "shared", side="key")  # one shared tower
    write_texts_run(tmp_path / "run" / KEY, "transformer", seed=3)
    for side in ("query", "key"):
        assert_exports(run, tmp_path / side, side=side)
    assert vectors(tmp_path / "query").shape != vectors(tmp_path / "key").shape
    own = write_own(tmp_path / "own")
    write_texts_run(tmp_path / "own" / KEY, seed=3)
    assert_exports(own, tmp_path / "beside a network of your own", side="key")


@pytest.mark.parametrize("name", ["bag_of_subwords", "transformer"])
@pytest.mark.parametrize("query", ["ask: ", ""])
def test_prompts_are_exported_for_queries_and_documents(query: str, name: str, tmp_path: Path) -> None:
    run = write_texts_run(tmp_path / "run", name, prompts={"query": query, "key": "a page - "})
    expected: dict[Any, Tensor] = {}
    for side in ("query", "key"):
        assert_exports(run, tmp_path / side, side=side)  # `encode` applies the prompt of its side
        expected[side] = load_encoder(run, side=side).encode(TEXTS)
    assert not torch.allclose(expected["query"], expected["key"], atol=1e-2)
    for folder in ("query", "key"):
        model = load(tmp_path / folder)
        for side, encode in (("query", model.encode_query), ("key", model.encode_document)):
            came = torch.from_numpy(encode(TEXTS, batch_size=6))
            torch.testing.assert_close(came, expected[side], rtol=1e-5, atol=1e-5)


def test_the_exported_folder_describes_its_model(tmp_path: Path, sentence_transformers: Any) -> None:
    run = write_texts_run(tmp_path / "run", "transformer")
    code = export_encoder(run, str(tmp_path / "out"))
    model = eval(code, {"sentence_transformers": sentence_transformers})
    assert model.max_seq_length == MAX_LENGTH
    assert model.similarity_fn_name == "cosine"
    assert not np.allclose(np.linalg.norm(model.encode(TEXTS), axis=1), 1, atol=0.1)
    assert np.array_equal(model.encode_query(TEXTS), model.encode(TEXTS))
    # Modules of other packages would require trust_remote_code.
    listed = json.loads((tmp_path / "out" / "modules.json").read_text())
    assert all(module["type"].startswith("sentence_transformers.") for module in listed)


@pytest.mark.parametrize("name", ["bag_of_subwords", "transformer"])
def test_an_exported_model_can_be_saved_by_sentence_transformers(name: str, tmp_path: Path) -> None:
    run = write_texts_run(tmp_path / "run", name, head=HeadSpec(num_layers=2, dim=7))
    export_encoder(run, str(tmp_path / "out"))
    load(tmp_path / "out").save(str(tmp_path / "again"), create_model_card=False)
    assert torch.equal(vectors(tmp_path / "again"), vectors(tmp_path / "out"))


@pytest.mark.parametrize(
    ("kind", "tokens", "padding"),
    [
        ("bert", "own, cls, wordpiece", 0),
        ("roberta", "foreign", 1),
        ("bert", "foreign", 0),
        ("roberta", "own, cls, wordpiece", 2),  # the id of [CLS], so that all positions would shift
        ("roberta", "foreign", 0),  # the id of <s>
    ],
    ids=["bert", "roberta", "bert, other padding", "roberta, lower padding", "roberta, higher padding"],
)
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_an_exported_transformers_model_does_not_need_its_original_folder(
    kind: str, tokens: str, padding: int, pooling: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = TOKENIZERS[tokens]()
    config = {"bert": transformers.BertConfig, "roberta": transformers.RobertaConfig}[kind](
        vocab_size=tokenizer.num_tokens, max_position_embeddings=40, hidden_size=24,
        num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, dtype="bfloat16", pad_token_id=padding,
    )  # fmt: skip
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    run = write_texts_run(
        tmp_path / "run", f"transformers:{tmp_path / 'model'}", tokenizer=tokenizer,
        arguments={"pooling": pooling}, head=HeadSpec(num_layers=1, dim=7),
    )  # fmt: skip
    export_encoder(run, str(tmp_path / "out"))
    expected = load_encoder(run).encode(TEXTS)
    shutil.rmtree(tmp_path / "model")
    assert_vectors(tmp_path / "out", expected)


def test_a_model_whose_positions_begin_after_a_fixed_id_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.MPNetModel(transformers.MPNetConfig(vocab_size=50, **sizes))
    _move_padding(model, 1)
    with pytest.raises(
        ConfigError, match="the positions of mpnet begin after its padding id 1, and the token"
    ):
        _move_padding(model, 0)


# Images


def of_one_layer() -> nn.Module:
    """Return a network that has its layer under two names."""
    layer = nn.Conv2d(3, 3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_a_network_that_uses_a_layer_twice_is_saved_and_loaded(tmp_path: Path) -> None:
    run = write_images_run(tmp_path, f"{__name__}:of_one_layer", representation_dim=3)
    torch.manual_seed(0)
    network = perturbed(of_one_layer())
    images = torch.rand(4, 3, 32, 32)
    expected = network(images)
    torch.testing.assert_close(load_encoder(run, trusted=["tests"])(images), expected)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("last", ["none", "head of 0", "head of 1", "whitened"])
@pytest.mark.parametrize(("name", "dim"), [("vit_tiny", 192), ("resnet18", 512)])
def test_the_named_network_loads_the_weights(name: str, dim: int, last: str, tmp_path: Path) -> None:
    num_layers = int(last[-1]) if last[-1].isdigit() else None
    head = None if num_layers is None else HeadSpec(num_layers=num_layers, dim=7 if num_layers else dim)
    stem = "standard" if dim == 512 else "auto"
    values = {"stem": stem, "representation_dim": dim, "whitened": last == "whitened"}
    run = write_images_run(tmp_path / "run", name, head=head, **values)
    assert "weights.pth" in export_encoder(run, str(tmp_path / "out"), to="torchvision")
    named = json.loads((tmp_path / "out" / "architecture.json").read_text())
    assert named["network"] == f"torchvision.models.{'VisionTransformer' if dim == 192 else name}"
    theirs = eval(named["network"], {"torchvision": torchvision})(**named["arguments"])
    if named["last_layer"] is None:
        setattr(theirs, "heads" if dim == 192 else "fc", nn.Identity())
    theirs.load_state_dict(torch.load(tmp_path / "out" / "weights.pth"))
    assert (named["image_size"], named["mean"], named["std"]) == (32, [0.5] * 3, [0.25] * 3)
    assert_same_images(theirs, run)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("resnet18", {}),
        ("resnet10", {"stem": "half", "width": 0.5, "representation_dim": 256, "channels": 1}),
        ("resnet10", {"stem": "half", "width": 0.5, "representation_dim": 256, "whitened": True}),
        ("resnet50", {"width": 0.125, "representation_dim": 256, "head": HeadSpec(num_layers=1, dim=7)}),
        ("vit_tiny", {"channels": 1, "representation_dim": 192}),
        ("vit_tiny", {"channels": 1, "representation_dim": 192, "head": HeadSpec(num_layers=1, dim=7)}),
    ],
    ids=[
        "small stem",
        "half stem, narrow, gray",
        "half stem, narrow, whitened",
        "bottlenecks, head",
        "gray",
        "gray, head",
    ],
)
def test_a_network_unknown_to_torchvision_is_built_by_the_exported_file(
    name: str, values: dict[str, Any], tmp_path: Path
) -> None:
    run = write_images_run(tmp_path / "run", name, **values)
    code = export_encoder(run, str(tmp_path / "out"))
    assert "raycl" not in (tmp_path / "out" / "model.py").read_text().partition("import torch\n")[2]
    theirs = eval(code, {"runpy": runpy})
    assert not (tmp_path / "out" / "architecture.json").exists()
    assert_same_images(theirs, run, atol=1e-6)


def assert_same_images(theirs: nn.Module, run: str, atol: float = 1e-5) -> None:
    encoder = load_encoder(run)
    shape = (3, encoder.spec.channels, 32, 32)  # pyright: ignore[reportAttributeAccessIssue]
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(theirs.eval()(images), encoder(images), rtol=0, atol=atol)


# Refusals


def of_ones(*, num_tokens: int, max_length: int) -> nn.Module:
    """Return a custom network."""
    return nn.EmbeddingBag(num_tokens, 24)


def write_own(output: Path) -> str:
    run = write_texts_run(output)
    spec = json.loads((output / "encoder.json").read_text())
    (output / "encoder.json").write_text(json.dumps(spec | {"name": OWN}))
    return run


def classifying_vit() -> nn.Module:
    """Return a custom network of torchvision's class: its last layer is not the one that whitens."""
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=16, num_layers=1, num_heads=1, hidden_dim=8, mlp_dim=8, num_classes=5
    )


HEAD = HeadSpec(num_layers=2, dim=7)
DEEP = HeadSpec(num_layers=2, dim=7, batchnorm=False)
IMAGES = partial(write_images_run, name="resnet18", stem="standard")
REFUSED: dict[str, tuple[Callable[[Path], str], dict[str, Any], str]] = {
    "images as texts": (
        IMAGES,
        {"to": "sentence_transformers"},
        "takes images, which .* not; use torchvision",
    ),
    "texts as images": (write_texts_run, {"to": "torchvision"}, "takes texts, which .* not; use sentence_tr"),
    "an unknown package": (write_texts_run, {"to": "keras"}, "to 'keras'; there are sentence_transformers"),
    "an unknown side": (write_texts_run, {"side": "left"}, "unknown side 'left'"),
    "a module": (write_own, {}, "a network of your own, which no other package knows"),
    "a function": (
        partial(write_texts_run, name=f"{__name__}:of_ones"),
        {},
        "of_ones is a network of your own, which sentence-transformers does not know",
    ),
    "a function of torchvision's class": (
        partial(write_images_run, name=f"{__name__}:classifying_vit", representation_dim=5),
        {"to": "torchvision"},
        "classifying_vit is your own; load it with raycl.load_encoder",
    ),
    "damped tokens": (
        partial(write_texts_run, arguments={"dim": 24, "sublinear_tf": True}),
        {},
        "no module for sublinear_tf of a bag of subwords; export to onnx",
    ),
    "a head of GroupNorm": (
        partial(write_texts_run, head=HEAD, norm="group"),
        {},
        "no module for the GroupNorm of the projection head",
    ),
    "another norm": (
        partial(IMAGES, norm="group"),
        {},
        "group normalization replaces resnet18's BatchNorm; load it with raycl.load_encoder",
    ),
    "a deep head": (
        partial(write_images_run, name="vit_tiny", representation_dim=192, head=DEEP),
        {},
        "the projection head has 2 layers, .* one at most; load it with raycl.load_encoder",
    ),
    "texts to timm": (write_texts_run, {"to": "timm"}, "takes texts, which timm does not; use sentence_tr"),
    "another norm in timm": (
        partial(IMAGES, norm="group"),
        {"to": "timm"},
        "cannot export to timm: group normalization replaces resnet18's BatchNorm; load it with raycl.load_enc",
    ),
    "a deep head in timm": (
        partial(write_images_run, name="vit_tiny", representation_dim=192, head=DEEP),
        {"to": "timm"},
        "cannot export to timm: .* 2 layers, and a network of timm one at most",
    ),
    "a small stem in timm": (
        partial(write_images_run, name="resnet18"),
        {"to": "timm"},
        "cannot export to timm: timm has resnet18 with the stem for large images only; use --to torchvision",
    ),
    "a narrow network in timm": (
        partial(IMAGES, width=0.5, representation_dim=256),
        {"to": "timm"},
        "timm has resnet18 at width 1 only, this one has 0.5; use --to torchvision",
    ),
    "the smallest network in timm": (
        partial(write_images_run, name="resnet10", stem="standard"),
        {"to": "timm"},
        "timm has no resnet10 like this; use --to torchvision",
    ),
    "no run": (str, {}, "found no encoder at"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_exports_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    write, options, message = REFUSED[case]
    run = write(tmp_path / "run")
    with pytest.raises(StorageError if case == "no run" else ConfigError, match=message) as caught:
        export_encoder(run, str(tmp_path / "out"), **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_existing_output_and_a_damaged_encoder_are_refused(tmp_path: Path) -> None:
    run = write_texts_run(tmp_path / "run")
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    with pytest.raises(StorageError, match="exists already"):
        export_encoder(run, run)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
    (tmp_path / "run" / "encoder.json").write_text("[1")
    with pytest.raises(RayclError, match="is damaged"):
        export_encoder(run, str(tmp_path / "out"))


# The command


def test_the_command_writes_the_folder_and_prints_how_to_load_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = write_texts_run(tmp_path / "run")
    write_texts_run(tmp_path / "run" / KEY, seed=3)
    arguments = ["export", "--run", run, "--output", tmp_path / "out", "--side", "key"]
    status, out, _ = run_raycl(monkeypatch, capsys, *arguments)
    assert (status, out) == (
        0,
        f"load it with sentence_transformers.SentenceTransformer('{tmp_path / 'out'}')\n",
    )
    again, out, err = run_raycl(monkeypatch, capsys, *arguments)
    assert (again, out, err.count("\n")) == (2, "", 1)
    assert "exists already" in err
    assert_vectors(tmp_path / "out", load_encoder(run, side="key").encode(TEXTS))


def test_raycl_never_imports_the_target_package() -> None:
    assert raycl.export_encoder is export_encoder
    imported = {module.split(".")[0] for path in FILES for module in modules_imported_by(path)}
    assert "torch" in imported
    assert not imported & {"sentence_transformers", "timm"}
