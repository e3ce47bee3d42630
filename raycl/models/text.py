"""Text encoders: tokens [batch, length] to representations [batch, dim]."""

import importlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raycl.errors import ConfigError, one_line
from raycl.models.custom import build_network, output_dim
from raycl.models.packed import PADDING, PackedTokens
from raycl.models.registry import HUGGING_FACE, check_encoder_name

_INIT_STD = 0.02  # as in BERT


def build_text_encoder(
    name: str,
    *,
    num_tokens: int,
    max_length: int,
    padding: int | None = None,
    arguments: Mapping[str, Any] | None = None,
    section: str = "encoder",
) -> nn.Module:
    """Build an encoder of tokens [batch, length], padded with 0 at the end.

    ``name`` is ``transformer`` or ``bag_of_subwords``, both untrained; ``transformers:PATH``, a model
    that Hugging Face's library saved in that folder; or ``package.module:function`` for your own. Each
    is called with ``num_tokens`` (the vocabulary size), ``max_length`` (tokens in the longest row) and
    ``arguments``. A model of Hugging Face also receives ``padding``, the padding id of its tokenizer. ``section`` has
    the settings of the encoder. Raises ``ConfigError`` for an unknown name or invalid arguments.
    """
    sizes: dict[str, Any] = {"num_tokens": num_tokens, "max_length": max_length}
    if min(num_tokens, max_length) < 1:
        raise ConfigError(
            f"an encoder cannot be built for {sizes}; give the tokenizer's num_tokens and 1 or more"
        )
    check_encoder_name(name, is_text=True, key=f"{section}.name")
    if name.startswith(HUGGING_FACE):
        sizes |= {"path": name.removeprefix(HUGGING_FACE), "padding": padding}
        return build_network(name, HuggingFaceEncoder, section, **{**sizes, **(arguments or {})})
    own: dict[str, Callable[..., nn.Module]] = {
        "transformer": TextTransformer,
        "bag_of_subwords": BagOfSubwords,
    }
    taken = {each: list(inspect.signature(build).parameters) for each, build in own.items()}
    for argument in arguments or {}:
        if name in own and argument not in taken[name]:
            others = [each for each in own if argument in taken[each]]
            remedy = f"{section}.name={others[0]} does" if others else "remove it"
            its = ", ".join(each for each in taken[name] if each not in sizes)
            raise ConfigError(f"{name} takes no {section}.kwargs.{argument}, only {its}; {remedy}")
    return build_network(
        name, own.get(name), section, "num_tokens and max_length", **{**sizes, **(arguments or {})}
    )


def text_representation_dim(encoder: nn.Module) -> int:
    """Return the width of the output; raises ``ConfigError`` unless it is [batch, dim]."""
    return output_dim(encoder, text_example(), inputs="tokens int64 [batch, length]")


def text_example() -> Tensor:
    """Return tokens [1, 1] that show the shape of an encoder's output."""
    return torch.ones(1, 1, dtype=torch.int64)


@final
class TextTransformer(nn.Module):
    """A pre-norm transformer (Vaswani et al., 2017); padding costs time in the attention only.

    Encodes tokens [batch, length] to [batch, dim]. ``hidden_dim`` is the inner width of a layer.
    ``pooling`` takes the mean over a row's tokens or the first token, which then should be [CLS].
    ``dropout`` applies to embeddings, attention and layers.
    """

    def __init__(
        self,
        *,
        num_tokens: int,
        max_length: int,
        dim: int = 256,
        num_layers: int = 4,
        num_heads: int = 4,
        hidden_dim: int = 1_024,
        dropout: float = 0.1,
        pooling: Literal["mean", "cls"] = "mean",
    ) -> None:
        super().__init__()
        if min(dim, num_layers, num_heads, hidden_dim) < 1 or dim % num_heads:
            raise ConfigError(
                f"a transformer cannot have dim={dim}, num_layers={num_layers}, num_heads={num_heads}, "
                f"hidden_dim={hidden_dim}; give 1 or more, and a dim that is a multiple of num_heads"
            )
        _check_pooling(pooling)
        self._num_tokens, self._max_length, self._pooling = num_tokens, max_length, pooling
        self.token_embedding = nn.Embedding(num_tokens, dim, padding_idx=PADDING)
        self.position_embedding = nn.Embedding(max_length, dim)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            TransformerLayer(dim, num_heads, hidden_dim, dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim)
        self._initialize()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return representations [batch, dim]; raises ``ConfigError`` for tokens of another vocabulary."""
        rows = PackedTokens.checked(
            tokens, num_tokens=self._num_tokens, max_length=self._max_length
        ).rounded()
        values = self.token_embedding(rows.tokens) + self.position_embedding(rows.positions())
        values = self.dropout(values)  # [num_packed, dim]
        for layer in self.layers:
            values = layer(values, rows)
        values = self.norm(values)
        return rows.mean(values) if self._pooling == "mean" else rows.unpack(values)[:, 0]

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_INIT_STD)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        # Each layer adds to its input twice: the sum starts with the same variance at any depth.
        for layer in self.layers:
            for last in (layer.mix, layer.narrow):
                nn.init.normal_(last.weight, std=_INIT_STD / (2 * len(self.layers)) ** 0.5)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        nn.init.zeros_(self.token_embedding.weight[PADDING].detach())


@final
class TransformerLayer(nn.Module):
    """Self-attention and a feed-forward network."""

    def __init__(self, dim: int, num_heads: int, hidden_dim: int, dropout: float) -> None:
        super().__init__()
        self._num_heads, self._dropout = num_heads, dropout
        self.attention_norm, self.norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ask = nn.Linear(dim, 3 * dim)  # queries, keys and values
        self.mix = nn.Linear(dim, dim)
        self.widen, self.narrow = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: Tensor, rows: PackedTokens) -> Tensor:
        """Transform the values [num_packed, dim] of the tokens of ``rows``."""
        values = values + self.dropout(self.mix(self._attend(self.attention_norm(values), rows)))
        return values + self.dropout(self.narrow(F.gelu(self.widen(self.norm(values)))))

    def _attend(self, values: Tensor, rows: PackedTokens) -> Tensor:
        projected = rows.unpack(self.ask(values)).unflatten(2, (3, self._num_heads, -1))
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # [batch, num_heads, length, head_dim] each
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=rows.mask(), dropout_p=self._dropout if self.training else 0.0
        )
        return rows.pack(mixed.transpose(1, 2).flatten(2))


@final
class BagOfSubwords(nn.Module):
    """A fast encoder: the weighted mean of a text's subword vectors, and a small network.

    Encodes tokens [batch, length] to [batch, dim]; the order of the tokens does not matter.
    ``weighted`` learns a positive weight per token, starting from ``first_weights`` (inverse document
    frequencies work well) or from 1. With ``sublinear_tf``, a token that occurs c times in a text counts
    1 + ln(c) times, as in TF-IDF. ``hidden_dim=0`` omits the network, and ``bias=False`` the bias of the LayerNorm;
    model2vec can compute a bag without either.
    """

    def __init__(
        self,
        *,
        num_tokens: int,
        max_length: int,
        dim: int = 256,
        hidden_dim: int = 1_024,
        dropout: float = 0.1,
        weighted: bool = True,
        sublinear_tf: bool = False,
        bias: bool = True,
        first_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if dim < 1 or hidden_dim < 0:
            raise ConfigError(
                f"a bag of subwords cannot have dim={dim}, hidden_dim={hidden_dim}; give positive ones"
            )
        self._num_tokens, self._max_length, self.sublinear_tf = num_tokens, max_length, sublinear_tf
        self.token_embedding = nn.Embedding(num_tokens, dim, padding_idx=PADDING)
        self.log_weights = nn.Parameter(torch.zeros(num_tokens)) if weighted else None
        if first_weights is not None:
            self.start_weights(torch.as_tensor(first_weights))
        self.norm = nn.LayerNorm(dim, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.network: nn.Sequential | None = None
        if hidden_dim:
            self.network = nn.Sequential(
                nn.Linear(dim, hidden_dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden_dim, dim)
            )

    @torch.no_grad()
    def start_weights(self, weights: Tensor) -> None:
        """Set the token weights [num_tokens]; raises ``ConfigError`` unless they fit and are positive."""
        own = self.log_weights
        if own is None or weights.shape != own.shape or not bool((weights > 0).all()):
            raise ConfigError(
                f"weights do not fit, came {list(weights.shape)} from {weights.min():g} for "
                f"{self._num_tokens} tokens; give a positive number for each token and leave weighted on"
            )
        own.copy_(weights.log())

    @torch.no_grad()
    def start_vectors(self, spellings: Sequence[str]) -> None:
        """Move the vectors of tokens that are spelled alike toward each other, such as "run" and "runs".

        Each vector becomes a sum, of unit variance, of itself and a random vector for each n-gram of 3 to 5
        characters that the token shares with others. The n-gram's weight is its inverse frequency among tokens
        (n-grams as in fastText; Bojanowski et al., 2017). ``spellings`` has the characters of each token,
        [num_tokens], as :attr:`raycl.tokenization.Tokenizer.spellings`; raises ``ConfigError`` unless they fit.
        """
        if len(spellings) != self._num_tokens:
            raise ConfigError(
                f"spellings do not fit, came {len(spellings)} for {self._num_tokens} tokens; "
                "give one for each token"
            )
        ngrams = [_ngrams(each) for each in spellings]
        counts = Counter(chain.from_iterable(ngrams))
        shared = {ngram: column for column, ngram in enumerate(each for each in counts if counts[each] > 1)}
        pairs = [(token, shared[each]) for token, own in enumerate(ngrams) for each in own if each in shared]
        token, column = np.array(pairs, np.int64).reshape(-1, 2).T
        rarity = np.log((1 + len(ngrams)) / (1 + np.bincount(column)))[column]
        of_itself = math.log((1 + len(ngrams)) / 2)
        norm = np.sqrt(of_itself**2 + np.bincount(token, rarity**2, minlength=len(ngrams)))
        vectors = self.token_embedding.weight
        directions = torch.randn(len(shared), vectors.shape[1])
        share = torch.sparse_coo_tensor(
            torch.from_numpy(np.stack([token, column])),
            torch.tensor(rarity / norm[token], dtype=vectors.dtype),
            (len(ngrams), len(shared)),
            check_invariants=False,
        )
        vectors.mul_(torch.tensor(of_itself / norm, dtype=vectors.dtype)[:, None]).add_(share @ directions)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return representations [batch, dim]; raises ``ConfigError`` for tokens of another vocabulary."""
        rows = PackedTokens.checked(tokens, num_tokens=self._num_tokens, max_length=self._max_length)
        mean = self.dropout(self.norm(self._mean(rows)))
        return mean if self.network is None else mean + self.network(mean)

    def _mean(self, rows: PackedTokens) -> Tensor:
        lengths = rows.real.sum(1)
        starts = lengths.cumsum(0) - lengths
        if self.log_weights is None and not self.sublinear_tf:
            return F.embedding_bag(rows.tokens, self.token_embedding.weight, starts, mode="mean")
        if self.log_weights is None:
            weights = self.token_embedding.weight.new_ones(len(rows.tokens))
        else:
            # The parameter is a logarithm, so that every update leaves the weight positive.
            weights = self.log_weights.index_select(0, rows.tokens).exp()
        if self.sublinear_tf:
            count = rows.counts()
            weights = weights * ((1 + count.log()) / count).to(weights.dtype)
        total = F.embedding_bag(
            rows.tokens, self.token_embedding.weight, starts, mode="sum", per_sample_weights=weights
        )
        sum_of_weights = rows.unpack(weights).sum(1, keepdim=True)
        return total / sum_of_weights.clamp(min=torch.finfo(sum_of_weights.dtype).tiny)


@final
class HuggingFaceEncoder(nn.Module):
    """A model of Hugging Face's ``transformers``, read from the folder ``path``.

    Encodes tokens [batch, length] to [batch, dim]. Nothing is downloaded, and code in the folder does
    not run. ``pooling`` takes the mean over a row's tokens or the first token. ``pretrained=False``
    builds the same architecture untrained. ``padding`` is the padding id in the tokenizer's file, which swaps
    with 0 (see :class:`~raycl.tokenization.Tokenizer`); by default it is the model's own.

    Raises ``ConfigError`` if ``transformers`` is missing or the folder holds no such model.
    """

    def __init__(
        self,
        *,
        num_tokens: int,
        max_length: int,
        path: str,
        padding: int | None = None,
        pooling: Literal["mean", "cls"] = "mean",
        pretrained: bool = True,
    ) -> None:
        super().__init__()
        _check_pooling(pooling)
        self._num_tokens, self._max_length, self._pooling = num_tokens, max_length, pooling
        self.model = _load_transformers_model(path, pretrained=pretrained)
        sizes = self.model.config
        own_padding = getattr(sizes, "pad_token_id", None) or PADDING
        # An untrained model takes the tokenizer's padding for its own.
        self._padding = own_padding if padding is None or not pretrained else padding
        longest = _num_positions(self.model, max_length)
        if num_tokens > sizes.vocab_size or max_length > longest:
            raise ConfigError(
                f"the model at {path} knows {sizes.vocab_size} tokens and rows of {longest}, came a tokenizer of "
                f"{num_tokens} and max_length={max_length}; use the folder's tokenizer.json and a smaller max_length"
            )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return representations [batch, dim]; raises ``ConfigError`` for tokens of another vocabulary."""
        rows = PackedTokens.checked(tokens, num_tokens=self._num_tokens, max_length=self._max_length)
        tokens = tokens[:, : rows.length]
        output = self.model(
            input_ids=self.model_ids(tokens), attention_mask=rows.real.long()
        ).last_hidden_state
        return rows.mean(rows.pack(output)) if self._pooling == "mean" else output[:, 0]

    def model_ids(self, tokens: Tensor) -> Tensor:
        """Return the ids that the model was trained with: its padding id and ``PADDING`` are swapped."""
        if self._padding == PADDING:
            return tokens
        swapped = torch.where(tokens == self._padding, PADDING, tokens)
        return torch.where(tokens == PADDING, self._padding, swapped)


def _ngrams(spelling: str) -> list[str]:
    """Return the n-grams of 3 to 5 characters, sorted, each once."""
    return sorted(
        {spelling[at : at + length] for length in (3, 4, 5) for at in range(len(spelling) - length + 1)}
    )


def _check_pooling(pooling: str) -> None:
    if pooling not in ("mean", "cls"):
        raise ConfigError(f"unknown pooling {pooling!r}; give mean or cls")


def _num_positions(model: Any, default: int) -> int:
    """Return the longest row in tokens; RoBERTa's positions start after the padding index."""
    positions = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    padding = getattr(positions, "padding_idx", None)
    total = getattr(model.config, "max_position_embeddings", default)
    return total if padding is None else total - padding - 1


def _load_transformers_model(path: str, *, pretrained: bool) -> Any:
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            "an encoder transformers:PATH needs the package transformers, which is not installed; "
            "pip install 'raycl[transformers]'"
        ) from error
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"there is no model at {path!r} (no config.json); give a folder that save_pretrained wrote"
        )
    bars = library.utils.logging
    shows_bars = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        if pretrained:
            model = library.AutoModel.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        else:
            model = library.AutoModel.from_config(
                library.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False),
                trust_remote_code=False,
            )
    except Exception as error:  # a damaged file may raise anything
        raise ConfigError(f"cannot read the model at {path!r}: {one_line(error)}; save it again") from error
    finally:
        if shows_bars:
            bars.enable_progress_bar()
    if getattr(model, "pooler", None) is not None:
        # BERT's extra layer on [CLS] is unused here, and a parameter without gradient would stop DDP.
        model.pooler = None
    # A decoder would keep the keys and values of all tokens, and add to them in a pass that recomputes activations.
    model.config.use_cache = False
    return model.float().train()
