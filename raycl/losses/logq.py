"""Frequencies of keys, for the log-Q correction (Yi et al., 2019; Khrylchenko et al., 2025)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Self, final

import numpy as np
import torch
from torch import Tensor

from raycl.errors import ConfigError
from raycl.losses.checks import check_not_given
from raycl.losses.false_negatives import FalseNegativeMask
from raycl.losses.softmax import RowLoss, Softmax
from raycl.losses.tiled import LOG2_E


@final
@dataclass(frozen=True)
class Frequencies:
    """The logarithm of the number of occurrences of each key, and of all keys together; ids ascend."""

    key_id: Tensor
    log_count: Tensor
    log_total: float = 0.0

    @classmethod
    def of(cls, ids: Iterable[np.ndarray]) -> Self:
        """Count the ids, int64 [n] each, of all candidates in the data."""
        key_id, counts = np.unique(np.concatenate([np.empty(0, np.int64), *ids]), return_counts=True)
        log_count = torch.from_numpy(np.log(counts).astype(np.float32))
        return cls(torch.from_numpy(key_id), log_count, math.log(max(1, counts.sum())))

    def to(self, device: torch.device) -> Self:
        """Return the frequencies on a device."""
        return type(self)(self.key_id.to(device), self.log_count.to(device), self.log_total)

    def __call__(self, key_id: Tensor) -> Tensor:
        """Return log Q, float32 [n]: the log share of each key in all occurrences; unknown keys count once."""
        if not len(self.key_id):
            return torch.zeros(key_id.shape, device=key_id.device)
        place = torch.searchsorted(self.key_id, key_id.contiguous()).clamp(max=len(self.key_id) - 1)
        return torch.where(self.key_id[place] == key_id, self.log_count[place], 0.0) - self.log_total


def checked_log_frequency(
    own: Tensor | None,
    gathered: Tensor | None,
    of_negatives: Tensor | None,
    *,
    local_batch: int,
    batch: int | None,
    num_negatives: int | None,
) -> tuple[Tensor, Tensor | None] | None:
    """Return the log frequencies of all keys and of the negatives, or None if none are given."""
    names = ("key_log_frequency", "gathered_key_log_frequency", "negative_log_frequency")
    if batch is None:
        check_not_given(names[1], gathered, "gathered_key")
    if num_negatives is None:
        check_not_given(names[2], of_negatives, "negatives")
    expected = (local_batch, batch, num_negatives)
    given = [
        (name, each, size)
        for name, each, size in zip(names, (own, gathered, of_negatives), expected, strict=True)
        if size is not None
    ]
    if all(each is None for _, each, _ in given):
        return None
    for name, each, size in given:
        if each is None:
            raise ConfigError(f"log frequencies are missing: {name} is None; pass all of them or none")
        if each.shape != (size,):
            raise ConfigError(
                f"{name} does not match its rows: got {list(each.shape)} values for {size} rows; pass one per row"
            )
    of_keys = own if batch is None else gathered
    assert of_keys is not None, "checked above"
    return of_keys, of_negatives


def logit_biases(of_keys: Tensor, of_negatives: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the base-2 biases of the logits of keys and negatives, at most 0."""
    both = of_keys if of_negatives is None else torch.cat([of_keys, of_negatives])
    both = both.detach().to(torch.promote_types(both.dtype, rows.dtype))
    # A constant shift does not change the softmax, and biases up to 0 keep the bound of the logits valid.
    both = ((both.amin() - both) * LOG2_E).to(rows)
    return both[: len(of_keys)], both[len(of_keys) :]


def refined_logq(
    positive: Tensor,
    shift: Tensor,
    total: Tensor,
    block: slice,
    *,
    log_odds: Tensor,
    num_negatives: Tensor,
) -> Softmax:
    """Return the loss of rows with the refined log-Q correction (Khrylchenko et al., 2025, arXiv 2507.09331).

    The negatives of a row are drawn from Q without its positive, Q'(d) = Q(d) / (1 - Q(positive)), and the
    positive is not drawn. With the logits s, without gradient of the weight w,

        loss = w * (log sum exp(s(d) - log Q'(d)) - s(positive))
        w = 1 - p(positive) = sum / (sum + n * exp(s(positive)))

    over the n negatives d. A row without negatives has no loss.

    Args:
        positive: base-2 logits of the positives minus log Q, [block].
        shift: as for :class:`raycl.losses.softmax.RowLoss`, of logits minus log Q.
        total: as for :class:`raycl.losses.softmax.RowLoss`.
        block: the slice of rows.
        log_odds: log(Q / (1 - Q)) of the positive of each row, natural.
        num_negatives: n of each row.
    """
    logsumexp = shift + total.log2()
    excess = (logsumexp - positive) / LOG2_E - log_odds[block]
    weight = (excess - num_negatives[block].clamp(min=1).log()).sigmoid()
    is_alone = total == 0
    return Softmax(
        torch.where(is_alone, 0.0, weight * excess),
        torch.where(is_alone, 0.0, weight),
        torch.where(is_alone, 0.0, logsumexp - weight.log2()),
    )


def refined_row_loss(
    log_frequency: Tensor, mask: FalseNegativeMask | None, *, num_candidates: int, dtype: torch.dtype
) -> RowLoss:
    """Return :func:`refined_logq` of rows, given log Q of their positives and the mask of their false negatives."""
    log_frequency = log_frequency.to(torch.promote_types(log_frequency.dtype, dtype))
    log_odds = (log_frequency - torch.log1p(-log_frequency.exp())).to(dtype)
    matches = torch.ones_like(log_odds) if mask is None else mask.num_matches.to(dtype)
    return partial(refined_logq, log_odds=log_odds, num_negatives=num_candidates - matches)
