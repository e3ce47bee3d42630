"""An encoder of texts as a folder that the package sentence-transformers loads, without raycl."""

import inspect
import json
from typing import Any

import tokenizers
import torch
from torch import Tensor, nn

from raycl.errors import ConfigError
from raycl.inference.sentence_modules import Module, bag, head, pooling
from raycl.inference.sentence_networks import (
    Files,
    config_file,
    hugging_face_files,
    lookup_files,
    transformer_files,
)
from raycl.models.bag_of_subwords import BagOfSubwords
from raycl.models.encoder_io import TextEncoder
from raycl.models.hugging_face import HuggingFaceEncoder
from raycl.models.specs import TextEncoderSpec
from raycl.models.text_transformer import TextTransformer
from raycl.tokenization import PADDING, Tokenizer

_PACKAGE = "sentence_transformers.models"  # its modules' name in all of its versions
_PADDINGS, _UNKNOWNS = ("[PAD]", "<pad>"), ("[UNK]", "<unk>")


def sentence_folder(encoder: TextEncoder) -> Files:
    """Return the files of a folder that ``SentenceTransformer(folder)`` loads.

    Its vectors are those of ``encoder.encode``, not brought to unit length; the folder names cosine
    as their similarity. Only modules of that package are used, so that it needs neither raycl nor
    ``trust_remote_code``. Two kinds of texts come out otherwise: one without any token, which is
    [UNK] here, and a long one in which spaces are many (see ``Tokenizer.encode``). Raises
    ``ConfigError`` if the encoder or its head cannot be told in those modules.
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
    return files | config_file(
        "config_sentence_transformers.json", model_type="SentenceTransformer", similarity_fn_name="cosine"
    )


def _modules(encoder: TextEncoder) -> list[Module]:
    """Return what a text goes through: the tokenizer with the network, pooling, and a projection head."""
    spec, network, layers = encoder.spec, encoder.network, nn.Sequential()
    if spec.projection_head is not None:
        network, layers = network.children()
    vocabulary = _vocabulary(encoder.tokenizer)
    loading: dict[str, Any] = {}
    if isinstance(network, HuggingFaceEncoder):
        files, loading = hugging_face_files(network)
        behind = [pooling(network.model.config.hidden_size, _argument(spec, HuggingFaceEncoder, "pooling"))]
    elif isinstance(network, TextTransformer):
        num_heads = _argument(spec, TextTransformer, "num_heads")
        files, loading = transformer_files(network, _numbers(vocabulary), num_heads=num_heads)
        dim = network.token_embedding.embedding_dim
        behind = [pooling(dim, _argument(spec, TextTransformer, "pooling"))]
    elif isinstance(network, BagOfSubwords):
        files = lookup_files(network, _numbers(vocabulary), max_length=spec.max_length)
        behind = list(bag(network, vocabulary, _numbers(vocabulary)))
    else:
        raise ConfigError(
            f"{spec.name} is a network of your own, which sentence-transformers does not know; "
            "load it with raycl.load_encoder"
        )
    files |= config_file("sentence_bert_config.json", model_args=loading)
    files |= _tokenizer_files(encoder.tokenizer, vocabulary, spec.cut_at or spec.max_length)
    return [Module("Transformer", files), *behind, *head(layers)]


def _argument(spec: TextEncoderSpec, build: type[nn.Module], name: str) -> Any:
    """Return what an encoder was built with."""
    return spec.arguments.get(name, inspect.signature(build).parameters[name].default)


def _vocabulary(tokenizer: Tokenizer) -> list[str]:
    """Return the tokens, [num_tokens] of them, by the tokenizer's own numbers."""
    known = tokenizers.Tokenizer.from_str(tokenizer.to_json()).get_vocab()
    names = {number: token for token, number in known.items()}
    # A number that no token has needs a name of its own.
    return [names.get(number, f"{number} of no token") for number in range(tokenizer.num_tokens)]


def _numbers(vocabulary: list[str]) -> Tensor:
    """Return what each number of the tokenizer is to our encoders, where padding and 0 have changed places."""
    numbers, padding = torch.arange(len(vocabulary)), vocabulary.index(_first(_PADDINGS, vocabulary))
    numbers[padding], numbers[PADDING] = PADDING, padding
    return numbers


def _tokenizer_files(tokenizer: Tokenizer, vocabulary: list[str], max_length: int) -> Files:
    """Return the tokenizer as ``transformers`` reads it, cutting texts at ``max_length``."""
    config = config_file(
        "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=max_length,
        pad_token=_first(_PADDINGS, vocabulary),
        unk_token=_first(_UNKNOWNS, vocabulary),
        split_special_tokens=True,  # their names within a text are read as any other text
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    return config | {"tokenizer.json": tokenizer.to_json().encode()}


def _first(names: tuple[str, ...], vocabulary: list[str]) -> str:
    """Return that of the names which the tokenizer has; it could not be read without one."""
    return next(name for name in names if name in vocabulary)
