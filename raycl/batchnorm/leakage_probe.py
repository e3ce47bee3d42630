"""The leakage probe: how much a network gains from statistics that query and key share."""

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
    """Pretext accuracies: shares of rows whose positive is the nearest of the candidates."""

    shared: float  # a query and its key normalized in the same company
    apart: float  # the keys regrouped at random

    @property
    def advantage(self) -> float:
        """What sharing the statistics brings."""
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
    """Measure how far the statistics of BatchNorm give the positive away.

    Rows are put into random groups, each of which is normalized by itself, as a worker or group
    does. A query's candidates are its positive and the keys of all other groups, which stand for a
    queue or for other workers. Once the keys are encoded in the groups of the queries, once in
    others. Only the company differs: without BatchNorm the advantage is 0, and with it the smaller
    the group, the more the statistics say. A leak is learned: an untrained network has almost none,
    so measure again while it trains. A network that never could read the mark keeps a small
    advantage, since a pair normalized alike is more alike: compare with a shuffled run.

    BatchNorm runs as in training, by group; all other layers run as in evaluation,
    so that dropout adds no noise. Modes and running statistics are put back. Synchronized layers make it collective.

    Args:
        query_encoder: Rows to embeddings, [batch, ...] to [batch, dim], of any length.
        key_encoder: The same for keys; may be the same module.
        view_a: Rows for the queries, [batch, ...].
        view_b: Rows for the keys, [batch, ...], each the positive of the row of ``view_a``.
        group_size: Rows normalized together, at most half of the batch. Each grouping leaves the
            rows out that make no full group.
        num_groupings: How many random groupings to average over.
        seed: Of the groupings.

    Returns:
        The two accuracies; their difference, ``advantage``, is the figure.

    Raises:
        ConfigError: The views are of different lengths, the groups are too small for BatchNorm or
            fewer than two, or there is no grouping.
    """
    if len(view_a) != len(view_b):
        raise ConfigError(
            f"the two views are not of the same rows: {len(view_a)} and {len(view_b)} came; "
            "pass one row per sample in each"
        )
    if num_groupings < 1:
        raise ConfigError(f"num_groupings must be at least 1, came {num_groupings}; 8 is usual")
    if not 2 <= group_size <= len(view_a) // 2:
        raise ConfigError(
            f"group_size must lie in [2, half of the batch], came {group_size} for {len(view_a)} rows; "
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
    """Let BatchNorm take the statistics of the batch, and put modes and buffers back afterwards."""
    modes = {layer: layer.training for encoder in encoders for layer in encoder.modules()}
    buffers = [(buffer, buffer.clone()) for encoder in encoders for buffer in encoder.buffers()]
    group_sizes = {layer: layer.group_size for layer in modes if isinstance(layer, SplitBatchNorm)}
    try:
        for layer in group_sizes:
            layer.group_size = None
        for encoder in encoders:
            encoder.train()  # by its own method, which may keep frozen layers in evaluation mode
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
    """Return the share of queries with no key of another group as near as their own."""
    similarity = queries @ keys.T  # [num_rows, num_rows]
    group = torch.arange(len(queries), device=queries.device) // group_size
    negatives = similarity.masked_fill(group[:, None] == group, -torch.inf)
    return (similarity.diagonal() > negatives.amax(dim=1)).float().mean()
