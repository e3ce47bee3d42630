"""A fast text encoder: the weighted mean of a text's subwords, and a small network."""

from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raycl.errors import ConfigError
from raycl.models.packed import PADDING, PackedTokens


@final
class BagOfSubwords(nn.Module):
    """Encode tokens [batch, length] to [batch, dim]; the order of a text's tokens does not matter.

    ``weighted`` learns a positive weight for each token; ``first_weights``, one a token, are where
    they start (inverse document frequencies do well), 1 otherwise. What is saved needs them no more:
    they are among the parameters. ``hidden_dim=0`` leaves the network out.
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
        first_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if dim < 1 or hidden_dim < 0:
            raise ConfigError(
                f"a bag of subwords cannot have dim={dim}, hidden_dim={hidden_dim}; give positive ones"
            )
        self._num_tokens, self._max_length = num_tokens, max_length
        self.token_embedding = nn.Embedding(num_tokens, dim, padding_idx=PADDING)
        self.log_weights = nn.Parameter(torch.zeros(num_tokens)) if weighted else None
        if first_weights is not None:
            self.start_weights(torch.as_tensor(first_weights))
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)
        self.network = (
            nn.Sequential(
                nn.Linear(dim, hidden_dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden_dim, dim)
            )
            if hidden_dim
            else None
        )

    @torch.no_grad()
    def start_weights(self, weights: Tensor) -> None:
        """Set the tokens' weights [num_tokens]; raises ``ConfigError`` unless there are such, all positive."""
        if (
            self.log_weights is None
            or weights.shape != self.log_weights.shape
            or not bool((weights > 0).all())
        ):
            raise ConfigError(
                f"weights do not fit, came {list(weights.shape)} from {weights.min():g} for "
                f"{self._num_tokens} tokens; give one positive number a token and leave weighted on"
            )
        self.log_weights.copy_(weights.log())

    def forward(self, tokens: Tensor) -> Tensor:
        """Return representations [batch, dim]; raises ``ConfigError`` for tokens of another vocabulary."""
        rows = PackedTokens.checked(tokens, num_tokens=self._num_tokens, max_length=self._max_length)
        mean = self.dropout(self.norm(self._mean(rows)))
        return mean if self.network is None else mean + self.network(mean)

    def _mean(self, rows: PackedTokens) -> Tensor:
        lengths = rows.real.sum(1)
        starts = lengths.cumsum(0) - lengths
        if self.log_weights is None:
            return F.embedding_bag(rows.tokens, self.token_embedding.weight, starts, mode="mean")
        # Logarithms are kept, so that a weight stays positive whatever the optimizer does.
        weights = self.log_weights.index_select(0, rows.tokens).exp()
        total = F.embedding_bag(
            rows.tokens, self.token_embedding.weight, starts, mode="sum", per_sample_weights=weights
        )
        whole = rows.spread(weights).sum(1, keepdim=True)
        return total / whole.clamp(min=torch.finfo(whole.dtype).tiny)
