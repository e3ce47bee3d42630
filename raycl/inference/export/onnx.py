"""Export of encoders to ONNX: one graph, which needs neither torch nor raycl.

A graph has no batches of packed tokens, so texts pass through the same layers with their padding.
"""

import io
import json
import warnings
from contextlib import redirect_stderr
from typing import Any, final

import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raycl.errors import ConfigError, one_line
from raycl.inference.export.sentence_transformers import Files, argument, raycl_ids, tokens_by_id
from raycl.models.encoder_io import ImageEncoder, TextEncoder
from raycl.models.registry import TOKENIZER
from raycl.models.text import BagOfSubwords, TextTransformer
from raycl.tokenization import PADDING, Tokenizer

GRAPH = "model.onnx"
ABOUT = "model.json"
_OUTPUT = "representation"


def onnx_files(encoder: ImageEncoder | TextEncoder) -> Files:
    """Return the graph, a description of its input, and the tokenizer of an encoder of texts.

    The graph takes uint8 images [batch, image_size, image_size, channels], which it normalizes, or int64
    tokens [batch, length], the ids of ``tokenizer.json`` with its padding at the end. The batch has any
    size. The output is ``encoder.encode``'s, float32 [batch, dim]. Three kinds of texts differ: a text
    without tokens, which is [UNK] in raycl and only padding here, a long text with long runs of spaces
    (see ``Tokenizer.encode``), and one with the name of a special token that is [UNK] in raycl (see
    ``Tokenizer``). Raises ``ConfigError`` for a network that cannot be written as a graph.
    """
    if isinstance(encoder, ImageEncoder):
        size, channels = encoder.spec.image_size, encoder.spec.channels
        network, name, axes = _OfPixels(encoder), "images", {0: "batch"}
        example = torch.zeros(2, size, size, channels, dtype=torch.uint8)
        about: dict[str, Any] = {"image_size": size, "channels": channels}
        files = Files()
    else:
        names = tokens_by_id(encoder.tokenizer)
        ids = raycl_ids(names)
        network, name, axes = _of_tokens(encoder, ids), "tokens", {0: "batch", 1: "length"}
        example = torch.ones(2, 3, dtype=torch.int64)
        padding, max_tokens = int(ids[0]), encoder.spec.max_tokens
        about = {"padding": padding, "max_length": max_tokens, "prompt": encoder.spec.prompt}
        files = {TOKENIZER: _padding_tokenizer(encoder.tokenizer, names[padding], padding, max_tokens)}
    about = {"input": name, **about, "output": _OUTPUT, "dim": encoder.spec.representation_dim}
    files[ABOUT] = (json.dumps(about, indent=2) + "\n").encode()
    return files | {GRAPH: _graph(network, example, name, axes, of=encoder.spec.name)}


def _graph(network: nn.Module, example: Tensor, name: str, axes: dict[int, str], *, of: str) -> bytes:
    """Return the graph of a network whose input ``name`` has these axes of any length."""
    try:
        # It prints whole graphs if it fails.
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                network.eval(), (example,), input_names=[name], output_names=[_OUTPUT],
                dynamic_shapes=(axes,), dynamo=True, verbose=False,
            )  # fmt: skip
        assert program is not None
        return program.model_proto.SerializeToString()
    except Exception as error:  # the exporter raises whatever a network does
        cause = one_line(error.__cause__ or error)  # its own text is advice in color
        raise ConfigError(
            f"cannot export to ONNX: {of} cannot be written as a graph ({cause}); load it with raycl.load_encoder"
        ) from error


# Images


@final
class _OfPixels(nn.Module):
    """An encoder of images together with their normalization."""

    _mean: Tensor
    _std: Tensor

    def __init__(self, encoder: ImageEncoder) -> None:
        super().__init__()
        self._network = encoder.network
        self.register_buffer("_mean", torch.tensor(encoder.spec.mean))
        self.register_buffer("_std", torch.tensor(encoder.spec.std))

    def forward(self, images: Tensor) -> Tensor:
        """Encode uint8 [batch, size, size, channels] as ``ImageEncoder.encode`` does."""
        return self._network(((images.float() / 255 - self._mean) / self._std).permute(0, 3, 1, 2))


# Texts


def _padding_tokenizer(tokenizer: Tokenizer, name: str, padding: int, max_tokens: int) -> bytes:
    """Return the tokenizer's file with the rules that make rows of one length."""
    own = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    own.enable_truncation(max_tokens)
    own.enable_padding(pad_id=padding, pad_token=name)
    return own.to_str().encode()


def _of_tokens(encoder: TextEncoder, ids: Tensor) -> nn.Module:
    """Return the network with its head; ``ids`` maps the tokenizer's ids to raycl's, [num_tokens]."""
    network, head = encoder.network, None
    if encoder.spec.projection_head is not None:
        network, head = network.children()
    if isinstance(network, TextTransformer):
        padded: nn.Module = _PaddedTransformer(
            network, ids, argument(encoder.spec, TextTransformer, "pooling")
        )
    elif isinstance(network, BagOfSubwords):
        padded = _PaddedBag(network, ids)
    else:
        raise ConfigError(
            f"cannot export to ONNX: of texts it takes transformer and bag_of_subwords, not {encoder.spec.name}; "
            "export to sentence_transformers, or load it with raycl.load_encoder"
        )
    return padded if head is None else nn.Sequential(padded, head)


@final
class _PaddedTokens:
    """A batch as ``PackedTokens`` has it, with the padding left in: [batch * length, ...]."""

    def __init__(self, real: Tensor) -> None:
        self._real = real  # [batch, length]

    def pack(self, values: Tensor) -> Tensor:
        return values.flatten(0, 1)

    def unpack(self, values: Tensor) -> Tensor:
        return values.unflatten(0, self._real.shape)

    def mask(self) -> Tensor:
        return self._real[:, None, None]


@final
class _PaddedTransformer(nn.Module):
    """A ``TextTransformer`` of the tokenizer's own ids."""

    def __init__(self, network: TextTransformer, ids: Tensor, pooling: str) -> None:
        super().__init__()
        self._network, self._padding, self._pooling = network, int(ids[0]), pooling
        self._vectors = nn.Parameter(network.token_embedding.weight.detach()[ids])

    def forward(self, tokens: Tensor) -> Tensor:
        """Encode tokens [batch, length] to [batch, dim]."""
        network, real = self._network, tokens != self._padding
        rows = _PaddedTokens(real)
        positions = network.position_embedding(torch.arange(tokens.shape[1], device=tokens.device))
        values = rows.pack(F.embedding(tokens, self._vectors) + positions)
        for layer in network.layers:
            values = layer(values, rows)
        values = rows.unpack(network.norm(values))
        if self._pooling == "cls":
            return values[:, 0]
        return torch.where(real[..., None], values, 0.0).sum(1) / real.sum(1, keepdim=True).clamp(min=1)


@final
class _PaddedBag(nn.Module):
    """A ``BagOfSubwords`` of the tokenizer's own ids."""

    def __init__(self, network: BagOfSubwords, ids: Tensor) -> None:
        super().__init__()
        self._norm, self._network, self._sublinear_tf = network.norm, network.network, network.sublinear_tf
        self._vectors = nn.Parameter(network.token_embedding.weight.detach()[ids])
        # Zero for the padding, so that it counts in neither sum.
        weights = (ids != PADDING).float()
        if network.log_weights is not None:
            weights = weights * network.log_weights.detach()[ids].exp()
        self._weights = nn.Parameter(weights[:, None])

    def forward(self, tokens: Tensor) -> Tensor:
        """Encode tokens [batch, length] to [batch, dim]."""
        weights = F.embedding(tokens, self._weights)  # [batch, length, 1]
        if self._sublinear_tf:
            count = (tokens[:, :, None] == tokens[:, None, :]).float().sum(2, keepdim=True)
            weights = weights * ((1 + count.log()) / count)
        total = (F.embedding(tokens, self._vectors) * weights).sum(1)
        mean = self._norm(total / weights.sum(1).clamp(min=torch.finfo(torch.float32).tiny))
        return mean if self._network is None else mean + self._network(mean)
