"""A small transformer for texts, in plain torch; padding costs time in its attention only."""

from typing import Literal, final

import torch.nn.functional as F
from torch import Tensor, nn

from raycl.errors import ConfigError
from raycl.models.packed import PADDING, PackedTokens

_SPREAD = 0.02  # standard deviation of the first weights, as in BERT


@final
class TextTransformer(nn.Module):
    """Encode tokens [batch, length] to [batch, dim] (Vaswani et al., 2017; normalized before each part).

    ``hidden_dim`` is the inner width of a layer. ``pooling`` takes the mean over a row's tokens or its
    first one, which then should be [CLS]. ``dropout`` is that of embeddings, attention and layers.
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
        if pooling not in ("mean", "cls"):
            raise ConfigError(f"unknown pooling {pooling!r}; give mean or cls")
        self._num_tokens, self._max_length, self._pooling = num_tokens, max_length, pooling
        self.token_embedding = nn.Embedding(num_tokens, dim, padding_idx=PADDING)
        self.position_embedding = nn.Embedding(max_length, dim)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(_Layer(dim, num_heads, hidden_dim, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self._start()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return representations [batch, dim]; raises ``ConfigError`` for tokens of another vocabulary."""
        rows = PackedTokens.checked(
            tokens, num_tokens=self._num_tokens, max_length=self._max_length
        ).rounded()
        values = self.token_embedding(rows.tokens) + self.position_embedding(rows.places())
        values = self.dropout(values)  # [num_packed, dim]
        for layer in self.layers:
            values = layer(values, rows)
        values = self.norm(values)
        return rows.mean(values) if self._pooling == "mean" else rows.spread(values)[:, 0]

    def _start(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_SPREAD)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        # Each layer adds twice to its input: so the sum starts as wide with many layers as with few.
        for layer in self.layers:
            for last in (layer.mix, layer.narrow):
                nn.init.normal_(last.weight, std=_SPREAD / (2 * len(self.layers)) ** 0.5)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        nn.init.zeros_(self.token_embedding.weight[PADDING].detach())


@final
class _Layer(nn.Module):
    """Attention among the tokens of a row, then a network for each token."""

    def __init__(self, dim: int, num_heads: int, hidden_dim: int, dropout: float) -> None:
        super().__init__()
        self._num_heads, self._dropout = num_heads, dropout
        self.attention_norm, self.norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ask = nn.Linear(dim, 3 * dim)  # queries, keys and values
        self.mix = nn.Linear(dim, dim)
        self.widen, self.narrow = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: Tensor, rows: PackedTokens) -> Tensor:
        """Change the values [num_packed, dim] of the rows' tokens."""
        values = values + self.dropout(self.mix(self._attend(self.attention_norm(values), rows)))
        return values + self.dropout(self.narrow(F.gelu(self.widen(self.norm(values)))))

    def _attend(self, values: Tensor, rows: PackedTokens) -> Tensor:
        asked = rows.spread(self.ask(values)).unflatten(2, (3, self._num_heads, -1))
        query, key, value = asked.permute(2, 0, 3, 1, 4)  # [batch, num_heads, length, head_dim] each
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=rows.mask(), dropout_p=self._dropout if self.training else 0.0
        )
        return rows.packed(mixed.transpose(1, 2).flatten(2))
