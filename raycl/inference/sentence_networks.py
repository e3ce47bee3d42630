"""Networks for texts as ``transformers`` reads them: configuration and weights, in its own names.

Our own kinds are written as kinds of that library which compute the same, so that nothing of raycl
is needed to load them. Rows of tokens are brought to the tokenizer's own numbers.
"""

import inspect
import json
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from raycl.models.bag_of_subwords import BagOfSubwords
from raycl.models.hugging_face import HuggingFaceEncoder
from raycl.models.text_transformer import TextTransformer

Files = dict[str, bytes]  # by their path in a folder
_WITHOUT_POOLER = {"add_pooling_layer": False}  # for models of BERT's kind: a layer on [CLS]


def weights_file(weights: dict[str, Tensor]) -> Files:
    """Return the file that holds the weights of a network."""
    copies = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    return {"model.safetensors": safetensors.torch.save(copies, {"format": "pt"})}


def config_file(name: str = "config.json", **values: Any) -> Files:
    """Return a file of JSON."""
    return {name: (json.dumps(values, indent=2) + "\n").encode()}


def hugging_face_files(encoder: HuggingFaceEncoder) -> tuple[Files, dict[str, Any]]:
    """Return the model's files, as its library saves them, and what to pass when it is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        encoder.model.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    # What raycl took away (see there) is not to come back with random weights.
    has_pooler = "add_pooling_layer" in inspect.signature(type(encoder.model)).parameters
    return files, _WITHOUT_POOLER if has_pooler else {}


def transformer_files(
    network: TextTransformer, numbers: Tensor, *, num_heads: int
) -> tuple[Files, dict[str, Any]]:
    """Return our transformer as an ESM, and what to pass when it is loaded.

    An ESM, too, normalizes before each part and after the last one, but not its embeddings.
    ``numbers`` [num_tokens] says for each number of the tokenizer which one it is here.
    """
    padding, (max_length, dim) = int(numbers[0]), network.position_embedding.weight.shape
    places = network.position_embedding.weight
    weights = {
        "embeddings.word_embeddings.weight": network.token_embedding.weight[numbers],
        # It counts places from behind the number of the padding.
        "embeddings.position_embeddings.weight": torch.cat([places.new_zeros(padding + 1, dim), places]),
        "contact_head.regression.weight": torch.zeros(1, len(network.layers) * num_heads),  # not used
        "contact_head.regression.bias": torch.zeros(1),
        **_named("encoder.emb_layer_norm_after", network.norm),
    }
    for number, layer in enumerate(network.layers):
        weights |= _layer_weights(f"encoder.layer.{number}.", layer)
    config = config_file(
        model_type="esm",
        architectures=["EsmModel"],
        vocab_size=len(numbers),
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
    return config | weights_file(weights), _WITHOUT_POOLER


def lookup_files(network: BagOfSubwords, numbers: Tensor, *, max_length: int) -> Files:
    """Return the vectors of a bag's tokens as a GPT without layers: it returns them as they are."""
    dim = network.token_embedding.embedding_dim
    weights = {
        "tokens_embed.weight": network.token_embedding.weight[numbers],
        "positions_embed.weight": torch.zeros(max_length, dim),
    }
    config = config_file(
        model_type="openai-gpt",
        architectures=["OpenAIGPTModel"],
        vocab_size=len(numbers),
        pad_token_id=int(numbers[0]),
        n_positions=max_length,
        n_embd=dim,
        n_layer=0,
        n_head=1,
        embd_pdrop=0.0,
        dtype="float32",
    )
    return config | weights_file(weights)


def _layer_weights(prefix: str, layer: Any) -> dict[str, Tensor]:
    weights = {
        **_named(f"{prefix}attention.LayerNorm", layer.attention_norm),
        **_named(f"{prefix}attention.output.dense", layer.mix),
        **_named(f"{prefix}LayerNorm", layer.norm),
        **_named(f"{prefix}intermediate.dense", layer.widen),
        **_named(f"{prefix}output.dense", layer.narrow),
    }
    for kind in ("weight", "bias"):
        asked = getattr(layer.ask, kind).chunk(3)
        for part, value in zip(("query", "key", "value"), asked, strict=True):
            weights[f"{prefix}attention.self.{part}.{kind}"] = value
    return weights


def _named(name: str, module: nn.Module) -> dict[str, Tensor]:
    return {f"{name}.{each}": value for each, value in module.state_dict().items()}
