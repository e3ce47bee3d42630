"""Export of text encoders to sentence-transformers.

The folder uses only networks of ``transformers`` and modules of sentence-transformers that compute the
same as raycl's, so loading it needs neither raycl nor ``trust_remote_code``.
"""

import copy
import inspect
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import safetensors.torch
import tokenizers
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_linear_bn_eval

from raycl.errors import ConfigError
from raycl.models.encoder_io import TextEncoder
from raycl.models.registry import SideName
from raycl.models.specs import TextEncoderSpec
from raycl.models.text import BagOfSubwords, HuggingFaceEncoder, TextTransformer
from raycl.tokenization import PADDING, Tokenizer

Files = dict[str, bytes]  # by path in a folder

_PACKAGE = "sentence_transformers.models"  # the name of its modules in all versions
_PADDINGS, _UNKNOWNS = ("[PAD]", "<pad>"), ("[UNK]", "<unk>")
_IDENTITY, _RELU = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.ReLU"
_GELU = "torch.nn.modules.activation.GELU"
_SIDES: dict[str, SideName] = {"query": "query", "document": "key"}  # by the name of the prompt
_WITHOUT_POOLER = {"add_pooling_layer": False}  # omits the layer on [CLS] of models like BERT


@final
@dataclass(frozen=True)
class _Module:
    """A module of sentence-transformers: its class there and its files."""

    kind: str
    files: Files


def sentence_folder(encoder: TextEncoder) -> Files:
    """Return the files of a folder that ``SentenceTransformer(folder)`` loads.

    Its vectors equal ``encoder.encode``, not normalized; the folder names cosine as the similarity. Three
    kinds of texts differ: a text without tokens, which is [UNK] here, a long text with long runs of
    spaces (see ``Tokenizer.encode``), and one with the name of a special token that is [UNK] in raycl (see
    ``Tokenizer``). Raises ``ConfigError`` if no such module computes the encoder or
    its head.
    """
    modules = _modules(encoder)
    names = [f"{place}_{module.kind}" if place else "" for place, module in enumerate(modules)]
    files = {
        f"{name}/{file}".lstrip("/"): content
        for name, module in zip(names, modules, strict=True)
        for file, content in module.files.items()
    }
    listed = [
        {"idx": place, "name": str(place), "path": name, "type": f"{_PACKAGE}.{module.kind}"}
        for place, (name, module) in enumerate(zip(names, modules, strict=True))
    ]
    files["modules.json"] = json.dumps(listed, indent=2).encode()
    return files | _config_file(
        "config_sentence_transformers.json",
        model_type="SentenceTransformer",
        similarity_fn_name="cosine",
        **_prompts(encoder.spec),
    )


def _prompts(spec: TextEncoderSpec) -> dict[str, Any]:
    """Return the prompts of ``encode_query`` and ``encode_document``; ``encode`` applies the encoder's own."""
    if not spec.prompts:
        return {}
    prompts = {name: spec.for_side(side).prompt for name, side in _SIDES.items()}
    return {"prompts": prompts, "default_prompt_name": "query" if spec.side == "query" else "document"}


def _modules(encoder: TextEncoder) -> list[_Module]:
    """Return the modules in order: the tokenizer with the network, pooling, and a projection head."""
    spec, network, head_layers = encoder.spec, encoder.network, nn.Sequential()
    if spec.projection_head is not None:
        network, head_layers = network.children()
    tokens = tokens_by_id(encoder.tokenizer)
    model_arguments: dict[str, Any] = {}
    if isinstance(network, HuggingFaceEncoder):
        files, model_arguments = _hugging_face_files(network, raycl_ids(tokens))
        modules = [_pooling(network.model.config.hidden_size, argument(spec, HuggingFaceEncoder, "pooling"))]
    elif isinstance(network, TextTransformer):
        num_heads = argument(spec, TextTransformer, "num_heads")
        files, model_arguments = _transformer_files(network, raycl_ids(tokens), num_heads=num_heads)
        dim = network.token_embedding.embedding_dim
        modules = [_pooling(dim, argument(spec, TextTransformer, "pooling"))]
    elif isinstance(network, BagOfSubwords):
        if network.sublinear_tf:
            raise ConfigError(
                "sentence-transformers has no module for sublinear_tf of a bag of subwords; export to onnx, or load it "
                "with raycl.load_encoder"
            )
        files = _lookup_files(network, raycl_ids(tokens), max_length=spec.max_length)
        modules = list(_bag(network, tokens, raycl_ids(tokens)))
    else:
        raise ConfigError(
            f"{spec.name} is a network of your own, which sentence-transformers does not know; "
            "load it with raycl.load_encoder"
        )
    files |= _config_file("sentence_bert_config.json", model_args=model_arguments)
    files |= _tokenizer_files(encoder.tokenizer, tokens, spec.max_tokens)
    return [_Module("Transformer", files), *modules, *_head(head_layers)]


def argument(spec: TextEncoderSpec, build: type[nn.Module], name: str) -> Any:
    """Return an argument that the encoder was built with."""
    return spec.arguments.get(name, inspect.signature(build).parameters[name].default)


# The tokenizer


def tokens_by_id(tokenizer: Tokenizer) -> list[str]:
    """Return the tokens [num_tokens] by the ids in the tokenizer's own file."""
    ids = tokenizers.Tokenizer.from_str(tokenizer.to_json()).get_vocab()
    names = {number: token for token, number in ids.items()}
    # An unused id needs a name of its own.
    return [names.get(number, f"{number} of no token") for number in range(tokenizer.num_tokens)]


def raycl_ids(tokens: Sequence[str]) -> Tensor:
    """Map the tokenizer's own ids [num_tokens] to raycl's, which swap the padding id with 0."""
    ids, padding = torch.arange(len(tokens)), tokens.index(_first(_PADDINGS, tokens))
    ids[padding], ids[PADDING] = PADDING, padding
    return ids


def _tokenizer_files(tokenizer: Tokenizer, tokens: Sequence[str], max_length: int) -> Files:
    """Return the tokenizer's files for ``transformers``, which cuts texts at ``max_length``."""
    config = _config_file(
        "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=max_length,
        pad_token=_first(_PADDINGS, tokens),
        unk_token=_first(_UNKNOWNS, tokens),
        split_special_tokens=True,  # read their names in a text as plain text
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    own = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    own.no_padding()  # raycl ignores the rules in the file, such as padding on the left; there they would act
    own.no_truncation()
    return config | {"tokenizer.json": own.to_str().encode()}


def _first(names: tuple[str, ...], tokens: Sequence[str]) -> str:
    """Return the first name that the tokenizer has; ``Tokenizer`` refuses a file without any."""
    return next(name for name in names if name in tokens)


# The network


def _hugging_face_files(encoder: HuggingFaceEncoder, ids: Tensor) -> tuple[Files, dict[str, Any]]:
    """Return the files of ``save_pretrained``, and the arguments for loading them.

    ``ids`` maps the tokenizer's ids to raycl's, [num_tokens]. The model's own are others if it pads with another token.
    """
    model, own = encoder.model, encoder.model_ids(ids)
    if not torch.equal(own, torch.arange(len(ids))):
        model = copy.deepcopy(model)
        with torch.no_grad():
            vectors = model.get_input_embeddings().weight
            vectors[: len(ids)] = vectors[own]
            _move_padding(model, int(ids[PADDING]))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    # The encoder removed the pooler; loading must not add a random one.
    has_pooler = "add_pooling_layer" in inspect.signature(type(encoder.model)).parameters
    return files, _WITHOUT_POOLER if has_pooler else {}


def _move_padding(model: Any, padding: int) -> None:
    """Make another id the padding of a model; RoBERTa's positions begin after it. Raises ``ConfigError`` if they cannot."""
    model.config.pad_token_id = padding
    positions = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    before = getattr(positions, "padding_idx", None)
    if positions is None or before is None:
        return
    used = positions.weight[before + 1 :]
    positions.weight = nn.Parameter(torch.cat([used.new_zeros(padding + 1, used.shape[1]), used]))
    model.config.max_position_embeddings = len(positions.weight)
    with torch.device("meta"):
        loaded = type(model)(model.config)
    if loaded.embeddings.position_embeddings.padding_idx != padding:
        raise ConfigError(
            f"the positions of {model.config.model_type} begin after its padding id {before}, and the tokenizer's is "
            f"{padding}; load it with raycl.load_encoder"
        )


def _transformer_files(
    network: TextTransformer, ids: Tensor, *, num_heads: int
) -> tuple[Files, dict[str, Any]]:
    """Return raycl's transformer as an ESM, and the arguments for loading it.

    ESM is a pre-norm transformer with a final norm, too; its norm of the embeddings is off. ``ids`` maps
    the tokenizer's ids to raycl's, [num_tokens].
    """
    padding, (max_length, dim) = int(ids[0]), network.position_embedding.weight.shape
    positions = network.position_embedding.weight
    weights = {
        "embeddings.word_embeddings.weight": network.token_embedding.weight[ids],
        # ESM counts positions from the padding id plus one.
        "embeddings.position_embeddings.weight": torch.cat(
            [positions.new_zeros(padding + 1, dim), positions]
        ),
        "contact_head.regression.weight": torch.zeros(1, len(network.layers) * num_heads),  # unused
        "contact_head.regression.bias": torch.zeros(1),
        **_prefixed("encoder.emb_layer_norm_after", network.norm),
    }
    for number, layer in enumerate(network.layers):
        weights |= _layer_weights(f"encoder.layer.{number}.", layer)
    config = _config_file(
        model_type="esm",
        architectures=["EsmModel"],
        vocab_size=len(ids),
        pad_token_id=padding,
        max_position_embeddings=max_length + padding + 1,
        hidden_size=dim,
        num_hidden_layers=len(network.layers),
        num_attention_heads=num_heads,
        intermediate_size=weights["encoder.layer.0.intermediate.dense.bias"].shape[0],
        layer_norm_eps=network.norm.eps,
        hidden_dropout_prob=network.dropout.p,
        attention_probs_dropout_prob=network.dropout.p,
        position_embedding_type="absolute",
        emb_layer_norm_before=False,
        token_dropout=False,
        dtype="float32",
    )
    return config | _weights_file(weights), _WITHOUT_POOLER


def _layer_weights(prefix: str, layer: Any) -> dict[str, Tensor]:
    weights = {
        **_prefixed(f"{prefix}attention.LayerNorm", layer.attention_norm),
        **_prefixed(f"{prefix}attention.output.dense", layer.mix),
        **_prefixed(f"{prefix}LayerNorm", layer.norm),
        **_prefixed(f"{prefix}intermediate.dense", layer.widen),
        **_prefixed(f"{prefix}output.dense", layer.narrow),
    }
    for kind in ("weight", "bias"):
        parts = getattr(layer.ask, kind).chunk(3)
        for part, value in zip(("query", "key", "value"), parts, strict=True):
            weights[f"{prefix}attention.self.{part}.{kind}"] = value
    return weights


def _lookup_files(network: BagOfSubwords, ids: Tensor, *, max_length: int) -> Files:
    """Return the token vectors of a bag as a GPT without layers, which returns them unchanged."""
    dim = network.token_embedding.embedding_dim
    weights = {
        "tokens_embed.weight": network.token_embedding.weight[ids],
        "positions_embed.weight": torch.zeros(max_length, dim),
    }
    config = _config_file(
        model_type="openai-gpt",
        architectures=["OpenAIGPTModel"],
        vocab_size=len(ids),
        pad_token_id=int(ids[0]),
        n_positions=max_length,
        n_embd=dim,
        n_layer=0,
        n_head=1,
        embd_pdrop=0.0,
        dtype="float32",
    )
    return config | _weights_file(weights)


# The modules after the network


def _pooling(dim: int, kind: str) -> _Module:
    """Return the pooling over tokens: their mean, or the first one (``cls``)."""
    config = _config_file(
        word_embedding_dimension=dim,
        pooling_mode_cls_token=kind == "cls",
        pooling_mode_mean_tokens=kind != "cls",
    )
    return _Module("Pooling", config)


def _bag(network: BagOfSubwords, tokens: Sequence[str], ids: Tensor) -> Iterator[_Module]:
    """Yield the modules of a bag after its token vectors; ``tokens`` and ``ids`` as in ``raycl_ids``."""
    if network.log_weights is not None:
        weights = network.log_weights.detach()[ids].exp().tolist()
        by_token = dict(zip(tokens, weights, strict=True))
        yield _Module("WordWeights", _config_file(vocab=list(tokens), word_weights=by_token))
    dim = network.norm.normalized_shape[0]
    yield _pooling(dim, "mean")
    norm = {"norm.bias": torch.zeros(dim), **_prefixed("norm", network.norm)}  # a bag may have no bias
    yield _Module("LayerNorm", _config_file(dimension=dim) | _weights_file(norm))
    if network.network is not None:
        widen, narrow = (layer for layer in network.network if isinstance(layer, nn.Linear))
        # The residual passes through the layers as two rows, since GELU(x) - GELU(-x) is x.
        residual = torch.eye(dim)
        weight = torch.cat([widen.weight, residual, -residual])
        yield _dense(weight, torch.cat([widen.bias, torch.zeros(2 * dim)]), _GELU)
        yield _dense(torch.cat([narrow.weight, residual, -residual], 1), narrow.bias, _IDENTITY)


def _head(layers: nn.Module) -> Iterator[_Module]:
    """Yield the layers of a projection head; raises ``ConfigError`` for a layer without a module."""
    linear: nn.Linear | None = None
    for layer in layers.children():
        if isinstance(layer, nn.Linear):
            if linear is not None:
                yield _dense(linear.weight, linear.bias, _IDENTITY)
            linear = layer
        elif isinstance(layer, nn.BatchNorm1d) and linear is not None:
            linear = fuse_linear_bn_eval(linear, layer)
        elif isinstance(layer, nn.ReLU) and linear is not None:
            yield _dense(linear.weight, linear.bias, _RELU)
            linear = None
        else:
            raise ConfigError(
                f"sentence-transformers has no module for the {type(layer).__name__} of the projection head; "
                "load the encoder with raycl.load_encoder"
            )
    if linear is not None:
        yield _dense(linear.weight, linear.bias, _IDENTITY)


def _dense(weight: Tensor, bias: Tensor, activation: str) -> _Module:
    """Return a linear layer, weight [out_features, in_features], followed by an activation."""
    out_features, in_features = weight.shape
    config = _config_file(
        in_features=in_features, out_features=out_features, bias=True, activation_function=activation
    )
    return _Module("Dense", config | _weights_file({"linear.weight": weight, "linear.bias": bias}))


# Files


def _config_file(name: str = "config.json", **values: Any) -> Files:
    return {name: (json.dumps(values, indent=2) + "\n").encode()}


def _weights_file(weights: dict[str, Tensor]) -> Files:
    copies = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    return {"model.safetensors": safetensors.torch.save(copies, {"format": "pt"})}


def _prefixed(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": value for name, value in module.state_dict().items()}
