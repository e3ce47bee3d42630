"""Batches of tokens as encoders meet them: checked, and without the padding where it would cost time."""

import copy
from typing import Self, final

import torch
from torch import Tensor

from raycl.errors import ConfigError
from raycl.tokenization import PADDING


@final
class PackedTokens:
    """Rows of tokens, one after the other as [num_packed, ...] or one below the other as [batch, length, ...].

    ``length`` is that of the longest row, however far the batch is padded.
    """

    def __init__(self, tokens: Tensor) -> None:
        """``tokens`` [batch, length] whose last column is not padding in all rows."""
        self.batch, self.length = tokens.shape
        self.real = tokens != PADDING  # [batch, length]
        # None if there is no padding at all: then both forms are views of each other.
        index = self.real.flatten().nonzero().squeeze(1)
        self._index = None if len(index) == tokens.numel() else index
        self._taken = self._index  # what is packed: those, and in rounded rows copies of the first
        self.tokens = self.packed(tokens)  # [num_packed]

    @classmethod
    def checked(cls, tokens: Tensor, *, num_tokens: int, max_length: int) -> Self:
        """Return the rows of a batch [batch, any length]; raises ``ConfigError`` for what cannot be one."""
        if tokens.ndim != 2 or tokens.is_floating_point() or not tokens.numel():
            raise ConfigError(
                f"not a batch of tokens, came {tokens.dtype} {list(tokens.shape)}; "
                "give int64 [batch, length] with at least one token"
            )
        # One message from the accelerator, not three.
        place = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        ends = ((tokens != PADDING) * place).amax()
        least, greatest, length = torch.stack([tokens.amin(), tokens.amax(), ends]).tolist()
        if least < 0 or greatest >= num_tokens:
            raise ConfigError(
                f"tokens from {least} to {greatest} came to an encoder of {num_tokens} tokens; "
                "use the tokenizer that it was trained with"
            )
        if length > max_length:
            raise ConfigError(
                f"a row has {length} tokens, the encoder takes {max_length}; cut texts at max_length"
            )
        return cls(tokens[:, : max(length, 1)])

    def rounded(self) -> Self:
        """Return these rows with their first token packed again and again behind the last, up to a round number.

        oneDNN keeps what it made for each size of a matrix, up to a thousand sizes: where every batch has
        another number of tokens, a worker would grow by gigabytes. What becomes of the copies is never
        spread, so their gradient is zero. Only for what is spread again: a bag would count them in its last row.
        """
        if self._index is None or not len(self._index):
            return self
        extra = _round_up(len(self._index)) - len(self._index)
        rows = copy.copy(self)
        rows._taken = torch.cat([self._index, self._index[:1].expand(extra)])
        rows.tokens = torch.cat([self.tokens, self.tokens[:1].expand(extra)])
        return rows

    def packed(self, values: Tensor) -> Tensor:
        """Return the real ones of values [batch, length, ...], [num_packed, ...]: in rounded rows copies follow them."""
        flat = values.flatten(0, 1)
        return flat if self._taken is None else flat.index_select(0, self._taken)

    def spread(self, values: Tensor) -> Tensor:
        """Return what ``packed`` gave at its places, [batch, length, ...], with zeros elsewhere."""
        if self._index is not None:
            zeros = values.new_zeros(self.batch * self.length, *values.shape[1:])
            values = zeros.index_copy(0, self._index, values[: len(self._index)])
        return values.unflatten(0, (self.batch, self.length))

    def places(self) -> Tensor:
        """Return the place of each token in its row, [num_packed]."""
        place = torch.arange(self.length, device=self.real.device)
        return self.packed(place.expand(self.batch, -1))

    def mask(self) -> Tensor | None:
        """Return what attention may look at, [batch, 1, 1, length]; None if that is all."""
        return None if self._index is None else self.real[:, None, None]

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over each row's tokens, float32 [batch, dim], of values [num_packed, dim]."""
        total = self.spread(values.to(torch.promote_types(values.dtype, torch.float32))).sum(1)
        return total / self.real.sum(1, keepdim=True).clamp(min=1)


def _round_up(number: int) -> int:
    """Return the next number of seven binary digits and zeros, at most a sixty-fourth above."""
    step = 1 << max(0, number.bit_length() - 7)
    return -(-number // step) * step
