"""Text encoders: padding has no effect and little cost, and outputs equal the documented formulas."""

import math
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from raycl.errors import ConfigError
from raycl.gradient_cache import embed_in_chunks
from raycl.losses import nt_xent
from raycl.models import packed
from raycl.models.build import build_encoder, build_towers, encoder_specs
from raycl.models.text import BagOfSubwords, TextTransformer, build_text_encoder, text_representation_dim
from raycl.models.towers import Tower
from raycl.recipes import recipe
from raycl.tokenization import Vocabulary

NUM_TOKENS, MAX_LENGTH = 50, 24
SMALL = {"dim": 32, "hidden_dim": 64}
KINDS: dict[str, dict[str, Any]] = {
    "transformer": SMALL | {"num_layers": 3, "num_heads": 4},
    "transformer, copies": SMALL | {"num_layers": 3, "num_heads": 4},  # with some packed duplicates
    "transformer, cls": SMALL | {"num_layers": 3, "num_heads": 4, "pooling": "cls"},
    "bag_of_subwords": SMALL,
    "bag_of_subwords, unweighted": SMALL | {"weighted": False},
}


def build(kind: str, **arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    encoder = build_text_encoder(
        kind.split(",")[0], num_tokens=NUM_TOKENS, max_length=MAX_LENGTH, arguments=KINDS[kind] | arguments
    )
    for parameter in encoder.parameters():  # weights far from their initial values, where many are equal
        parameter.data += 0.1 * torch.randn_like(parameter)
    return encoder


def rows_of(*lengths: int, seed: int = 1) -> Tensor:
    """Draw tokens [len(lengths), longest], padded with 0."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, NUM_TOKENS, (len(lengths), max(lengths)), generator=generator)
    return tokens * (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if "copies" in request.param:  # which a batch this small would not have
        monkeypatch.setattr(packed, "_round_up", lambda number: number + 5)
    return request.param


# Padding


def test_a_row_alone_equals_the_row_beside_longer_rows(kind: str) -> None:
    encoder, tokens = build(kind).eval(), rows_of(1, 5, 24, 2, 17, 5)
    together = encoder(tokens)
    for row, length, expected in zip(tokens, (1, 5, 24, 2, 17, 5), together, strict=True):
        torch.testing.assert_close(encoder(row[None, :length])[0], expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(encoder(row[None])[0], expected, rtol=0, atol=1e-6)


def test_padding_neither_gets_nor_affects_gradients(kind: str) -> None:
    tokens = rows_of(3, 9, 1)
    gradients = []
    for batch in (tokens, F.pad(tokens, (0, 7))):
        encoder = build(kind, dropout=0.0)
        encoder(batch).square().sum().backward()
        gradients.append([each.grad for each in encoder.parameters()])
        assert not encoder.token_embedding.weight.grad[0].any()  # pyright: ignore
    for short, wide in zip(*gradients, strict=True):
        torch.testing.assert_close(short, wide, rtol=1e-5, atol=1e-7)


def test_layers_skip_padding_and_attention_ends_at_the_longest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, seen, attended = build("transformer"), [], []
    for layer in encoder.layers:  # pyright: ignore
        for part in (layer.ask, layer.mix, layer.widen, layer.narrow, layer.norm):
            part.register_forward_hook(lambda _module, rows, _output: seen.append(len(rows[0])))
    attend = F.scaled_dot_product_attention

    def watched(query: Tensor, *others: Any, **keywords: Any) -> Tensor:
        attended.append(query.shape[2])
        return attend(query, *others, **keywords)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    encoder(F.pad(rows_of(3, 11, 1), (0, 40)))
    assert set(seen) == {15}
    assert attended == [11, 11, 11]


def test_the_transformer_uses_few_sizes_for_any_number_of_tokens() -> None:
    encoder, tokens, seen = build("transformer", dim=4, hidden_dim=4).eval(), rows_of(*[24] * 50), {}
    layer = encoder.layers[0].ask  # pyright: ignore
    for left_out in range(1, 300, 3):
        tokens.flatten()[-left_out:] = 0
        hook = layer.register_forward_hook(
            lambda _, rows, __, n=1_200 - left_out: seen.update({n: len(rows[0])})
        )
        with torch.no_grad():
            encoder(tokens)
        hook.remove()
    assert {*seen.values()} == {*range(904, 1_025, 8), *range(1_040, 1_201, 16)}
    assert all(number <= size <= number * 65 / 64 for number, size in seen.items())


def test_packed_duplicates_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients, tokens = [], rows_of(5, 24, 8)
    for num_copies in (0, 40):
        monkeypatch.setattr(packed, "_round_up", lambda number, more=num_copies: number + more)
        encoder = build("transformer", dropout=0.0)
        encoder(tokens).square().sum().backward()
        gradients.append([each.grad for each in encoder.parameters()])
    for plain, with_copies in zip(*gradients, strict=True):
        torch.testing.assert_close(with_copies, plain, rtol=1e-5, atol=1e-5)


def test_an_all_padding_row_is_finite_and_does_not_affect_other_rows(kind: str) -> None:
    encoder, tokens = build(kind).eval(), rows_of(4, 6)
    came = encoder(torch.cat([torch.zeros(1, 6, dtype=torch.int64), tokens]))
    assert came.isfinite().all()
    torch.testing.assert_close(came[1:], encoder(tokens), rtol=0, atol=1e-6)


# Outputs


@pytest.mark.parametrize("num_copies", [0, 5])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_transformer_equals_torchs_with_the_same_weights(
    pooling: str, num_copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_round_up", lambda number: number + num_copies)
    encoder = build("transformer", pooling=pooling, dropout=0.0)
    assert isinstance(encoder, TextTransformer)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, F.gelu, batch_first=True, norm_first=True)
    theirs = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(32), enable_nested_tensor=False)
    for ours, copy in zip(encoder.layers, theirs.layers, strict=True):
        renamed = {
            "self_attn.in_proj_": ours.ask,
            "self_attn.out_proj.": ours.mix,
            "linear1.": ours.widen,
            "linear2.": ours.narrow,
            "norm1.": ours.attention_norm,
            "norm2.": ours.norm,
        }
        copy.load_state_dict(
            {
                f"{name}{each}": getattr(part, each)
                for name, part in renamed.items()
                for each in ("weight", "bias")
            }
        )
    theirs.norm.load_state_dict(encoder.norm.state_dict())  # pyright: ignore

    tokens = rows_of(24, 3, 1, 10)
    values = encoder.token_embedding(tokens) + encoder.position_embedding.weight[:24]
    values = theirs(values, src_key_padding_mask=tokens == 0)
    real = (tokens != 0)[:, :, None]
    expected = values[:, 0] if pooling == "cls" else (values * real).sum(1) / real.sum(1)
    torch.testing.assert_close(encoder(tokens), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("sublinear", [False, True])
def test_the_bag_of_subwords_is_a_weighted_mean_and_a_network(weighted: bool, sublinear: bool) -> None:
    encoder = build("bag_of_subwords", weighted=weighted, sublinear_tf=sublinear).eval()
    assert isinstance(encoder, BagOfSubwords)
    assert encoder.network is not None
    rows = [rows_of(7)[0], rows_of(1)[0], torch.tensor([3, 3, 9]), torch.tensor([5, 2, 5, 5, 2])]
    together = encoder(pad_sequence(rows, batch_first=True))
    for row, found in zip(rows, together, strict=True):
        weights = torch.ones(NUM_TOKENS) if encoder.log_weights is None else encoder.log_weights.exp()
        weights = weights.double()
        for token, count in Counter(row.tolist()).items():
            weights[token] *= 1 + math.log(count) if sublinear else count
        tokens = row.unique()
        total = sum(weights[token] * encoder.token_embedding.weight[token] for token in tokens)
        mean = encoder.norm((total / weights[tokens].sum()).float())
        expected = mean + encoder.network(mean)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(encoder(row[None])[0], expected, rtol=1e-5, atol=1e-6)


def test_the_order_of_tokens_matters_only_to_the_transformer() -> None:
    tokens = rows_of(9, 9)
    for kind, is_same in (("transformer", False), ("bag_of_subwords", True)):
        encoder = build(kind).eval()
        assert torch.allclose(encoder(tokens), encoder(tokens.flip(1)), atol=1e-5) == is_same


def test_initial_token_weights_are_used_and_trained() -> None:
    first = torch.linspace(0.5, 9.0, NUM_TOKENS).tolist()
    encoder = build_text_encoder(
        "bag_of_subwords", num_tokens=NUM_TOKENS, max_length=9, arguments={"first_weights": first, "dim": 8}
    )
    assert isinstance(encoder, BagOfSubwords)
    assert encoder.log_weights is not None
    torch.testing.assert_close(encoder.log_weights.exp(), torch.tensor(first))
    tokens = rows_of(5, 3)
    encoder(tokens)[:, 0].sum().backward()
    assert encoder.log_weights.grad is not None
    assert set(encoder.log_weights.grad.nonzero().flatten().tolist()) == set(tokens.flatten().tolist()) - {0}


def test_tokens_that_are_spelled_alike_start_near_each_other() -> None:
    spellings = ["", " dog", " dogs", " hot", "dog", " doghouse", "s", " dogs", "houses", " cat"]
    torch.manual_seed(2)
    encoder = build_text_encoder(
        "bag_of_subwords",
        num_tokens=len(spellings),
        max_length=9,
        arguments={"dim": 200_000, "hidden_dim": 0, "weighted": False},
    )
    assert isinstance(encoder, BagOfSubwords)
    encoder.start_vectors(spellings)
    vectors = encoder.token_embedding.weight.detach()
    # The same by scikit-learn, whose inverse frequency is one larger: a column for each n-gram, and for each token.
    ngrams = TfidfVectorizer(
        analyzer="char", ngram_range=(3, 5), lowercase=False, binary=True, min_df=2, norm=None
    )
    found = ngrams.fit_transform(spellings).toarray()
    own = np.log((1 + len(spellings)) / 2) * np.eye(len(spellings))
    columns = np.concatenate([own, np.where(found > 0, found - 1, 0)], axis=1)
    columns /= np.linalg.norm(columns, axis=1, keepdims=True)
    expected = torch.tensor(columns @ columns.T, dtype=torch.float32)
    assert expected[1, 2] > 0.2
    torch.testing.assert_close(vectors[1:] @ vectors[1:].T / 200_000, expected[1:, 1:], rtol=0, atol=0.015)
    assert not vectors[0].any()
    before = vectors.clone()
    encoder.start_vectors(list("abcdefghij"))
    torch.testing.assert_close(encoder.token_embedding.weight.detach(), before)
    with pytest.raises(ConfigError, match="came 2 for 10 tokens; give one for each token"):
        encoder.start_vectors(spellings[:2])


def test_the_encoder_of_a_run_starts_from_spellings() -> None:
    config = recipe("two_tower")
    vocabulary = Vocabulary.of_texts(
        ["a walker walks and has walked", "another talker talks and has talked"] * 9,
        max_length=32,
        size=340,
        lowercase=True,
    )
    (spec,) = encoder_specs(config, vocabulary.tokenizer)
    encoders = [build_encoder(config, spec, vocabulary) for _ in range(2)]
    vectors = [F.normalize(each.token_embedding.weight, dim=1) for each in encoders]  # pyright: ignore
    assert torch.equal(*vectors)
    number_of = {spelling: number for number, spelling in enumerate(vocabulary.tokenizer.spellings)}
    own = spec.model_copy(update={"name": f"{__name__}:of_zeros"})
    unmixed = build_encoder(config, own, vocabulary)
    assert not unmixed.token_embedding.weight.any()  # pyright: ignore
    assert unmixed.log_weights.any()  # pyright: ignore
    unweighted = spec.model_copy(update={"arguments": {**spec.arguments, "weighted": False}})
    assert build_encoder(config, unweighted, vocabulary).log_weights is None
    walks, walked, talks = (vectors[0][number_of[name]] for name in (" walks", " walked", " talks"))
    assert walks @ walked > walks @ talks + 0.1 > 0.1


# Randomness and precision


def test_only_dropout_in_training_uses_the_random_state(kind: str) -> None:
    encoder, tokens = build(kind), rows_of(5, 24, 8)
    came = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        came.append(encoder(tokens))
    assert torch.equal(came[0], came[1])
    assert not torch.allclose(came[0], came[2], atol=1e-3)
    encoder.eval()
    assert torch.equal(encoder(tokens), encoder(tokens))


def test_the_transformer_applies_dropout_to_its_embeddings() -> None:
    encoder, tokens = build("transformer"), rows_of(5, 24, 8)
    for layer in encoder.layers:  # pyright: ignore
        for part in (layer.mix, layer.narrow):
            part.weight.data.zero_()
            part.bias.data.zero_()
    assert not torch.allclose(encoder(tokens), encoder(tokens), atol=1e-3)


@pytest.mark.parametrize("chunk_size", [1, 3, 8])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_batch_in_chunks_has_the_summed_gradient_of_its_chunks(
    kind: str, chunk_size: int, dropout: float
) -> None:
    tokens = rows_of(5, 24, 8, 1, 2, 3, 17, 4)
    gradients = []
    for embed in (
        lambda tower: embed_in_chunks(tower, tokens, chunk_size=chunk_size),
        lambda tower: torch.cat([tower(chunk) for chunk in tokens.split(chunk_size)]),
    ):
        encoder = build(kind, dropout=dropout)
        tower = Tower(encoder, nn.Linear(32, 16))
        tower.projection_head.load_state_dict({"weight": torch.eye(16, 32), "bias": torch.zeros(16)})
        torch.manual_seed(5)
        view_a, view_b = embed(tower).chunk(2)
        nt_xent(view_a, view_b, temperature=0.1).backward()
        gradients.append([each.grad for each in tower.parameters()])
    for accumulated, whole in zip(*gradients, strict=True):
        torch.testing.assert_close(accumulated, whole, rtol=1e-4, atol=1e-6)


def test_bfloat16_is_close_to_float32_and_trains(kind: str) -> None:
    encoder, tokens = build(kind, dropout=0.0), rows_of(5, 24, 8)
    exact = encoder(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        rough = encoder(tokens)
    assert not torch.equal(rough, exact)
    assert F.cosine_similarity(rough.float(), exact).min() > 0.999
    rough.float().square().sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in encoder.parameters())


# Building


def test_a_built_encoder_has_a_width_and_loads_the_weights_of_another(kind: str) -> None:
    first, second = build(kind), build(kind, dropout=0.3).eval()
    assert text_representation_dim(first) == 32
    assert first.training
    for parameter in second.parameters():
        parameter.data.add_(1.0)
    second.load_state_dict(first.state_dict())
    tokens = rows_of(5, 9)
    assert torch.equal(first.eval()(tokens), second(tokens))


def of_ones(*, num_tokens: int, max_length: int, width: int) -> nn.Module:
    """Build a user's own network."""

    class Ones(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return torch.full((len(tokens), width), num_tokens + max_length)

    return Ones()


def without_sizes(width: int = 2) -> nn.Module:
    return nn.Linear(1, width)


def no_network(**_: Any) -> str:
    return "a network"


def test_a_users_own_encoder_gets_sizes_and_arguments() -> None:
    encoder = build_text_encoder(f"{__name__}:of_ones", num_tokens=7, max_length=5, arguments={"width": 3})
    assert torch.equal(encoder(torch.ones(2, 4, dtype=torch.int64)), torch.full((2, 3), 12))
    assert text_representation_dim(encoder) == 3


def test_the_text_encoder_of_the_documents_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parent.parent / "docs/guides/encoders.md"
    module: Any = ModuleType("mynet")
    exec(page.read_text().split("```python\n", 1)[1].split("```")[0], vars(module))
    monkeypatch.setitem(sys.modules, "mynet", module)
    encoder = build_text_encoder("mynet:texts", num_tokens=7, max_length=5, arguments={"dim": 3})
    padded, alone = encoder(torch.tensor([[2, 4, 0], [2, 4, 6]])), encoder(torch.tensor([[2, 4]]))
    torch.testing.assert_close(padded[:1], alone)
    assert text_representation_dim(encoder) == 3


@pytest.mark.parametrize(
    ("name", "arguments", "match"),
    [
        (
            "bert",
            {},
            "unknown encoder.name 'bert'; there are transformer, bag_of_subwords, transformers:PATH",
        ),
        ("no.such.module:build", {}, "cannot find encoder.name 'no.such.module:build'"),
        (f"{__name__}:missing", {}, "cannot find encoder.name"),
        (f"{__name__}:of_ones", {}, "cannot build encoder.name.*width.*check encoder.kwargs"),
        (
            f"{__name__}:without_sizes",
            {},
            "'num_tokens'; check encoder.kwargs, and that the function takes num_tokens and max_length",
        ),
        (f"{__name__}:no_network", {}, "must return a torch.nn.Module, came str"),
        ("transformer", {"depth": 3}, "transformer takes no encoder.kwargs.depth, .*, pooling; remove it$"),
        (
            "bag_of_subwords",
            {"num_layers": 2},
            "^bag_of_subwords takes no encoder.kwargs.num_layers, only dim, .*; encoder.name=transformer does$",
        ),
        ("transformer", {"dim": 30, "num_heads": 4}, "dim=30, num_layers=4, num_heads=4"),
        ("transformer", {"pooling": "max"}, "unknown pooling 'max'; give mean or cls"),
        ("bag_of_subwords", {"dim": 0}, "dim=0"),
        ("bag_of_subwords", {"first_weights": [1.0] * 9}, r"weights do not fit, came \[9\]"),
        ("bag_of_subwords", {"first_weights": [0.0] * NUM_TOKENS}, "a positive number for each token"),
        ("transformers:/no/such/folder", {}, "there is no model at '/no/such/folder'"),
        ("transformer", {"num_tokens": 0}, "'num_tokens': 0"),
    ],
)
def test_an_encoder_that_cannot_be_built_is_a_one_line_error(
    name: str, arguments: dict[str, Any], match: str
) -> None:
    if name.startswith("transformers:"):
        pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=match) as caught:
        num_tokens = arguments.pop("num_tokens", NUM_TOKENS)
        build_text_encoder(name, num_tokens=num_tokens, max_length=9, arguments=arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("bert", "unknown text_encoder.name 'bert'"),
        ("no.such.module:build", "cannot find text_encoder.name 'no.such.module:build'"),
        (
            f"{__name__}:without_sizes",
            "cannot build text_encoder.name .*; check text_encoder.kwargs, and that",
        ),
    ],
)
def test_errors_of_the_texts_beside_images_name_their_settings(name: str, says: str) -> None:
    config = recipe("clip", image_size=32)
    named = {
        "encoder": replace_name(config.encoder, "resnet10"),
        "text_encoder": replace_name(config.text_encoder, name),
    }
    with pytest.raises(ConfigError, match=says):
        build_towers(config.model_copy(update=named), Vocabulary.stand_in())


def replace_name(encoder: Any, name: str) -> Any:
    return encoder.model_copy(update={"name": name})


def of_zeros(**arguments: Any) -> BagOfSubwords:
    bag = BagOfSubwords(**arguments)
    bag.token_embedding.weight.data.zero_()
    return bag


@pytest.mark.parametrize(
    ("network", "match"),
    [
        (nn.Embedding(9, 4), r"must return \[batch, dim\], came \[1, 1, 4\]; flatten or pool its output"),
        (nn.Linear(3, 3), r"does not take tokens int64 \[batch, length\]"),
    ],
)
def test_a_network_with_another_signature_has_no_width(network: nn.Module, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        text_representation_dim(network)


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        (torch.tensor([[3, NUM_TOKENS]]), f"tokens from 3 to {NUM_TOKENS} came.*the tokenizer that it was"),
        (torch.tensor([[3, -1]]), "tokens from -1 to 3"),
        (torch.ones(2, MAX_LENGTH + 1, dtype=torch.int64), "25 tokens, the encoder takes 24; cut texts"),
        (torch.ones(4, dtype=torch.int64), "not a batch of tokens, came torch.int64"),
        (torch.ones(2, 3), "not a batch of tokens, came torch.float32"),
        (torch.ones(2, 0, dtype=torch.int64), "at least one token"),
    ],
)
def test_invalid_tokens_are_refused(kind: str, tokens: Tensor, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        build(kind)(tokens)


# Hugging Face's models


@pytest.fixture(scope="module", params=["bert", "roberta"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    configuration = {"bert": transformers.BertConfig, "roberta": transformers.RobertaConfig}[request.param]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(
        configuration(vocab_size=NUM_TOKENS, max_position_embeddings=40, **sizes)
    )
    model.save_pretrained(path)
    return path


def hugging_face(folder: Path, **arguments: Any) -> nn.Module:
    return build_text_encoder(
        f"transformers:{folder}", num_tokens=NUM_TOKENS, max_length=MAX_LENGTH, arguments=arguments
    )


def test_a_model_from_a_folder_returns_the_mean_of_the_librarys_outputs(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(folder).eval()
    padding = model.config.pad_token_id
    encoder, tokens = hugging_face(folder).eval(), rows_of(6, 24, 1)
    assert text_representation_dim(encoder) == 32
    for row, length, came in zip(tokens, (6, 24, 1), encoder(tokens), strict=True):
        # The model's own token ids: padding and 0 are exchanged.
        own = torch.tensor([0 if token == padding else int(token) for token in row[:length]])
        values = model(input_ids=own[None]).last_hidden_state[0]
        torch.testing.assert_close(came, values.mean(0), rtol=0, atol=1e-6)
        first = hugging_face(folder, pooling="cls").eval()(row[None])[0]
        torch.testing.assert_close(first, values[0], rtol=0, atol=1e-6)


def test_a_model_from_a_folder_is_loaded_without_a_progress_bar(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers").utils.logging.enable_progress_bar()
    hugging_face(folder)
    assert capfd.readouterr() == ("", "")


def test_a_model_from_a_folder_trains_and_may_start_untrained(folder: Path) -> None:
    trained, untrained, tokens = (
        hugging_face(folder),
        hugging_face(folder, pretrained=False),
        rows_of(6, 24, 1),
    )
    assert not torch.equal(trained(tokens), trained(tokens))
    trained(tokens).square().sum().backward()
    assert all(each.grad is not None for each in trained.parameters())
    assert [each.shape for each in trained.parameters()] == [each.shape for each in untrained.parameters()]
    assert not torch.allclose(trained.eval()(tokens), untrained.eval()(tokens), atol=1e-3)


def test_a_model_encodes_rows_of_its_maximum_length(folder: Path) -> None:
    # RoBERTa's positions start after the padding position, 1.
    longest = 40 if "bert0" in folder.name and "ro" not in folder.name else 38
    sizes = {"num_tokens": NUM_TOKENS, "max_length": longest}
    encoder = build_text_encoder(f"transformers:{folder}", **sizes)
    assert encoder(torch.full((2, longest), 7)).isfinite().all()
    with pytest.raises(ConfigError, match=f"rows of {longest}"):
        build_text_encoder(f"transformers:{folder}", **sizes | {"max_length": longest + 1})
    with pytest.raises(ConfigError, match=r"knows 50 tokens and rows of \d+.*tokenizer.json"):
        build_text_encoder(f"transformers:{folder}", **sizes | {"num_tokens": NUM_TOKENS + 1})


def test_a_missing_library_and_a_damaged_folder_are_one_line_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "no such kind"}')
    with pytest.raises(ConfigError, match="cannot read the model at"):
        hugging_face(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"not installed; pip install 'raycl\[transformers\]'"):
        hugging_face(tmp_path)
