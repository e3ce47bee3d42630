"""Export of a bag of subwords to model2vec."""

import json

import safetensors.torch
import tokenizers
import torch

from raycl.errors import ConfigError
from raycl.inference.export.sentence_transformers import raycl_ids, tokens_by_id
from raycl.models.encoder_io import TextEncoder
from raycl.models.text import BagOfSubwords


def model2vec_files(encoder: TextEncoder) -> dict[str, bytes]:
    """Return the files of a folder that ``StaticModel.from_pretrained(folder)`` loads, by name.

    Its vectors are those of ``encoder.encode``, divided by their lengths. Only the scale of a text's vector depends on
    more than the sum over its tokens, so the weights of the tokens and the LayerNorm become part of the token vectors.
    Three kinds of texts differ: model2vec reads texts longer than the encoder's maximum whole, skips unknown tokens, and
    reads the names of special tokens as such.
    Raises ``ConfigError`` for an encoder that is not such a sum.
    """
    bag = _bag_of(encoder)
    tokens = tokens_by_id(encoder.tokenizer)
    with torch.no_grad():
        vectors = bag.token_embedding.weight.double()
        if bag.log_weights is not None:
            vectors = vectors * bag.log_weights.double().exp()[:, None]
        vectors = (vectors - vectors.mean(1, keepdim=True)) * bag.norm.weight
        vectors = vectors[raycl_ids(tokens)].float().contiguous()
    config = {
        "model_type": "model2vec",
        "architectures": ["StaticModel"],
        "normalize": True,
        "max_length": None,  # any limit cuts its characters too, and texts below the limit differ
        "embedding_dtype": "float32",
        "hidden_dim": vectors.shape[1],
    }
    return {
        "model.safetensors": safetensors.torch.save({"embeddings": vectors}, {"format": "pt"}),
        "config.json": (json.dumps(config, indent=2) + "\n").encode(),
        "tokenizer.json": encoder.tokenizer.to_json().encode(),
    }


def _bag_of(encoder: TextEncoder) -> BagOfSubwords:
    """Return the bag of an encoder; raises ``ConfigError`` for anything that sums of token vectors cannot give."""
    spec, network = encoder.spec, encoder.network
    if not isinstance(network, BagOfSubwords):
        head = " with a projection head" if spec.projection_head is not None else ""
        reason = f"the encoder is {spec.name}{head}"
    elif network.network is not None:
        reason = "the bag has a network after the mean (encoder.kwargs.hidden_dim)"
    elif network.norm.bias is not None:
        reason = "the LayerNorm of the bag has a bias (train with encoder.kwargs.bias=false)"
    elif network.sublinear_tf:
        reason = "the bag counts repeated tokens less (encoder.kwargs.sublinear_tf)"
    elif spec.prompt:
        reason = f"the encoder puts the prompt {spec.prompt!r} before each text"
    elif tokenizers.Tokenizer.from_str(encoder.tokenizer.to_json()).get_vocab_size() != spec.num_tokens:
        reason = "the tokenizer has unused ids"
    elif encoder.tokenizer.adds_special_tokens:
        reason = "the tokenizer adds special tokens to each text"
    else:
        return network
    raise ConfigError(
        f"model2vec only sums the vectors of a text's tokens, and {reason}; export to sentence_transformers"
    )
