"""The leakage probe: how much a network gains if query and key share BatchNorm statistics."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raycl.batchnorm.shuffled import permutation
from raycl.batchnorm.split import SplitBatchNorm
from raycl.errors import ConfigError


@final
@dataclass(frozen=True, kw_only=True)
class Leakage:
    """Pretext accuracies: fractions of queries whose positive is the nearest candidate."""

    shared: float  # query and key normalized in the same group
    apart: float  # keys in random groups

    @property
    def advantage(self) -> float:
        """The gain in accuracy from shared statistics."""
        return self.shared - self.apart


@torch.no_grad()
def leakage(
    query_encoder: nn.Module,
    key_encoder: nn.Module,
    view_a: Tensor,
    view_b: Tensor,
    *,
    group_size: int,
    num_groupings: int = 8,
    seed: int = 0,
) -> Leakage:
    """Measure how much BatchNorm statistics reveal of the positive.

    Rows form random groups, and each group is normalized by itself, as on a worker. The candidates of a
    query are its positive and the keys of all other groups, which stand for a queue or other workers.
    The keys are encoded twice: in the groups of their queries, and in other groups. Without BatchNorm
    the advantage is 0; with it, smaller groups reveal more. A leak is learned: an untrained network has
    almost none, so measure again during training. A network that cannot read the mark keeps a small
    advantage, since equal statistics make a pair more similar: compare with a shuffled run.

    BatchNorm runs in training mode, group by group. All other layers run in eval mode, so dropout adds
    no noise. Modes and running statistics are restored. Collective with synchronized layers.

    Args:
        query_encoder: Rows to embeddings, [batch, ...] to [batch, dim], of any length.
        key_encoder: The same for keys; may be the same module.
        view_a: Rows for the queries, [batch, ...].
        view_b: Rows for the keys, [batch, ...], each the positive of the row of ``view_a``.
        group_size: Rows normalized together, at most half of the batch. Rows beyond the last full group
            are not used.
        num_groupings: Number of random groupings to average over.
        seed: The seed of the groupings.

    Returns:
        The two accuracies; ``advantage`` is their difference.

    Raises:
        ConfigError: The views differ in length, the groups are too small for BatchNorm or fewer than
            two, or ``num_groupings`` is 0.
    """
    if len(view_a) != len(view_b):
        raise ConfigError(
            f"both views must have the same rows, got {len(view_a)} and {len(view_b)}; "
            "pass one row per sample in each"
        )
    if num_groupings < 1:
        raise ConfigError(f"num_groupings must be at least 1, got {num_groupings}; 8 is usual")
    if not 2 <= group_size <= len(view_a) // 2:
        raise ConfigError(
            f"group_size must lie in [2, half of the batch], got {group_size} for {len(view_a)} rows; "
            "give more rows or make the groups smaller"
        )
    num_rows = len(view_a) // group_size * group_size
    accuracies = torch.zeros(num_groupings, 2)
    with _batch_statistics(query_encoder, key_encoder):
        for row, accuracy in enumerate(accuracies):
            order = permutation(len(view_a), seed=seed, step=row)[:num_rows].to(view_a.device)
            other = permutation(num_rows, seed=seed, step=num_groupings + row).to(view_a.device)
            queries = _embed_groups(query_encoder, view_a[order], group_size)
            keys = _embed_groups(key_encoder, view_b[order], group_size)
            keys_apart = _embed_groups(key_encoder, view_b[order[other]], group_size)[other.argsort()]
            accuracy[0] = _accuracy(queries, keys, group_size)
            accuracy[1] = _accuracy(queries, keys_apart, group_size)
    shared, apart = accuracies.mean(0).tolist()
    return Leakage(shared=shared, apart=apart)


@contextlib.contextmanager
def _batch_statistics(*encoders: nn.Module) -> Iterator[None]:
    """Let BatchNorm use batch statistics; restore modes and buffers afterwards."""
    modes = {layer: layer.training for encoder in encoders for layer in encoder.modules()}
    buffers = [(buffer, buffer.clone()) for encoder in encoders for buffer in encoder.buffers()]
    group_sizes = {layer: layer.group_size for layer in modes if isinstance(layer, SplitBatchNorm)}
    try:
        for layer in group_sizes:
            layer.group_size = None
        for encoder in encoders:
            encoder.train()  # its own method may keep frozen layers in eval mode
        for layer in modes:
            layer.training = layer.training and isinstance(layer, _BatchNorm)
        yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode
        for layer, size in group_sizes.items():
            layer.group_size = size
        for buffer, before in buffers:
            buffer.copy_(before)


def _embed_groups(encoder: nn.Module, rows: Tensor, group_size: int) -> Tensor:
    return F.normalize(torch.cat([encoder(group) for group in rows.split(group_size)]).float(), dim=1)


def _accuracy(queries: Tensor, keys: Tensor, group_size: int) -> Tensor:
    """Return the fraction of queries nearer to their own key than to any key of another group."""
    similarity = queries @ keys.T  # [num_rows, num_rows]
    group = torch.arange(len(queries), device=queries.device) // group_size
    negatives = similarity.masked_fill(group[:, None] == group, -torch.inf)
    return (similarity.diagonal() > negatives.amax(dim=1)).float().mean()
