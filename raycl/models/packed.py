"""Batches of tokens, checked and with the padding removed where it would cost time."""

import copy
from typing import Self, final

import torch
from torch import Tensor

from raycl.errors import ConfigError
from raycl.tokenization import PADDING


@final
class PackedTokens:
    """A batch of tokens in two layouts: packed [num_packed, ...] and padded [batch, length, ...].

    ``length`` is the length of the longest row; wider padding is dropped.
    """

    def __init__(self, tokens: Tensor, num_real: int) -> None:
        """Pack ``tokens`` [batch, length], of which ``num_real`` are real."""
        self.batch, self.length = tokens.shape
        self.real = tokens != PADDING  # [batch, length]
        # None without padding: then both layouts are views of each other.
        self._index = None if num_real == tokens.numel() else _true_positions(self.real.flatten(), num_real)
        self._packed_index = self._index  # rounded rows append copies of the first token
        self.tokens = self.pack(tokens)  # [num_packed]

    @classmethod
    def checked(cls, tokens: Tensor, *, num_tokens: int, max_length: int) -> Self:
        """Pack a batch [batch, any length]; raises ``ConfigError`` unless the encoder can take it."""
        if tokens.ndim != 2 or tokens.is_floating_point() or not tokens.numel():
            raise ConfigError(
                f"not a batch of tokens, came {tokens.dtype} {list(tokens.shape)}; "
                "give int64 [batch, length] with at least one token"
            )
        # The only read from the device.
        is_real = tokens != PADDING
        last = (is_real * torch.arange(1, tokens.shape[1] + 1, device=tokens.device)).amax()
        smallest, largest, length, num_real = torch.stack(
            [tokens.amin(), tokens.amax(), last, is_real.sum()]
        ).tolist()
        if smallest < 0 or largest >= num_tokens:
            raise ConfigError(
                f"tokens from {smallest} to {largest} came to an encoder of {num_tokens} tokens; "
                "use the tokenizer that it was trained with"
            )
        if length > max_length:
            raise ConfigError(
                f"a row has {length} tokens, the encoder takes {max_length}; cut texts at max_length"
            )
        return cls(tokens[:, : max(length, 1)], num_real)

    def rounded(self) -> Self:
        """Append copies of the first token until the number of packed tokens is round.

        oneDNN caches up to a thousand kernels by matrix size: a different number of tokens in each batch
        would cost a worker gigabytes. ``unpack`` drops the copies, so they get no gradient. Do not use
        this for an embedding bag, which would count the copies in its last row.
        """
        if self._index is None or not len(self._index):
            return self
        extra = _round_up(len(self._index)) - len(self._index)
        rows = copy.copy(self)
        rows._packed_index = torch.cat([self._index, self._index[:1].expand(extra)])
        rows.tokens = torch.cat([self.tokens, self.tokens[:1].expand(extra)])
        return rows

    def pack(self, values: Tensor) -> Tensor:
        """Select the values of real tokens: [batch, length, ...] to [num_packed, ...]."""
        flat = values.flatten(0, 1)
        return flat if self._packed_index is None else flat.index_select(0, self._packed_index)

    def unpack(self, values: Tensor) -> Tensor:
        """Invert ``pack``: [num_packed, ...] to [batch, length, ...], zeros at the padding."""
        if self._index is not None:
            zeros = values.new_zeros(self.batch * self.length, *values.shape[1:])
            values = zeros.index_copy(0, self._index, values[: len(self._index)])
        return values.unflatten(0, (self.batch, self.length))

    def positions(self) -> Tensor:
        """Return the position of each token in its row, [num_packed]."""
        position = torch.arange(self.length, device=self.real.device)
        return self.pack(position.expand(self.batch, -1))

    def counts(self) -> Tensor:
        """Return how often each token occurs in its row, float32 [num_packed]."""
        tokens = self.unpack(self.tokens)
        ordered = tokens.sort(dim=1).values
        count = torch.searchsorted(ordered, tokens, right=True) - torch.searchsorted(ordered, tokens)
        return self.pack(count).float()

    def mask(self) -> Tensor | None:
        """Return the attention mask [batch, 1, 1, length], True at real tokens; None without padding."""
        return None if self._index is None else self.real[:, None, None]

    def mean(self, values: Tensor) -> Tensor:
        """Average values [num_packed, dim] over the tokens of each row, to float32 [batch, dim]."""
        total = self.unpack(values.to(torch.promote_types(values.dtype, torch.float32))).sum(1)
        return total / self.real.sum(1, keepdim=True).clamp(min=1)


def _true_positions(flags: Tensor, count: int) -> Tensor:
    """Return the positions of the ``count`` true flags; unlike ``nonzero``, does not wait for the device."""
    place = torch.where(flags, flags.cumsum(0) - 1, count)  # false ones share the last place
    positions = torch.empty(count + 1, dtype=torch.int64, device=flags.device)
    return positions.scatter_(0, place, torch.arange(len(flags), device=flags.device))[:count]


def _round_up(number: int) -> int:
    """Round up to seven significant binary digits, by a sixty-fourth at most."""
    step = 1 << max(0, number.bit_length() - 7)
    return -(-number // step) * step
