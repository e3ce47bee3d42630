"""Noise-contrastive estimation, the loss of InstDisc (Wu et al., 2018): tell data from noise."""

import math
from collections.abc import Iterator
from functools import partial
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from raycl.errors import ConfigError
from raycl.losses.checks import (
    check_columns,
    check_pair,
    check_sample_id,
    checked_ids,
    checked_temperature,
)
from raycl.losses.false_negatives import FalseNegatives
from raycl.losses.tiled import (
    STRIP_ROWS,
    Gradients,
    fused,
    product,
    spans,
    temperature_gradient,
    tile_size,
    working_precision,
)


def nce(
    query: Tensor,
    positive: Tensor,
    noise: Tensor,
    *,
    num_samples: int,
    temperature: float | Tensor,
    log_normalizer: float | Tensor,
    sample_id: Tensor | None = None,
    noise_id: Tensor | None = None,
) -> Tensor:
    """Tell each query's own slot from noise (Wu et al., 2018; Gutmann and Hyvarinen, 2010).

    With P(j | query) = exp(query . slot j / temperature) / Z and m noise rows, each slot as likely
    as another, h(j) = P / (P + m / num_samples) is how probably slot j came as data. The loss is
    -log h(own slot) - sum over noise of log(1 - h), the **mean** over the local_batch queries.
    Computed from logarithms, so that nothing over- or underflows.

    Args:
        query: [local_batch, dim], this worker's embeddings. Half precision is computed in float32.
        positive: [local_batch, dim], each query's own slot of the memory bank; no gradient.
        noise: [num_noise, dim], slots drawn uniformly, the same for all queries, in half
            precision too; no gradient. A slot that was drawn twice counts twice.
        num_samples: how many slots the bank has.
        temperature: above 0; a 0-d tensor that requires grad is learned, its gradient exact.
        log_normalizer: log Z, natural; no gradient. See :class:`NormalizingConstant`.
        sample_id: [local_batch] int64; a noise row with the query's id is masked, and m is then
            the number of noise rows that are left to that query.
        noise_id: [num_noise] int64, the ids of the noise rows.

    Returns:
        A scalar, float32 (float64 for float64 embeddings). It can be differentiated once.

    Raises:
        ConfigError: shapes or arguments do not agree, or the temperature is not above 0.
    """
    check_pair("query and positive", query, positive)
    _check_slots(num_samples, positive, noise)
    tiles = _NoiseTiles(query, noise, sample_id, noise_id)
    rows = working_precision(query)
    # log(m Z / num_samples): a logit above it is likelier data than noise.
    log_share = torch.as_tensor(log_normalizer, dtype=torch.float64).detach() - math.log(num_samples)
    threshold = tiles.num_left().to(rows).log() + log_share.to(rows)
    evaluate = partial(_evaluate, positive=positive.to(rows), tiles=tiles, threshold=threshold)
    return fused(evaluate, rows, checked_temperature(temperature, rows))


@torch.no_grad()
def noise_mass(
    query: Tensor,
    noise: Tensor,
    *,
    temperature: float | Tensor,
    sample_id: Tensor | None = None,
    noise_id: Tensor | None = None,
) -> Tensor:
    """Sum exp(query . slot / temperature) over all pairs of a query with its noise.

    Arguments are those of :func:`nce`.

    Returns:
        [2], float64: the logarithm of the sum, and the number of pairs. Stacked over workers,
        [num_workers, 2], they are what :meth:`NormalizingConstant.update` takes.

    Raises:
        ConfigError: shapes or arguments do not agree, or the temperature is not above 0.
    """
    tiles = _NoiseTiles(query, noise, sample_id, noise_id)
    rows = working_precision(query)
    scaled = rows / checked_temperature(temperature, rows)
    no_threshold = scaled.new_zeros(len(scaled))
    none = scaled.new_tensor(-math.inf, dtype=torch.float64)
    with torch.autocast(rows.device.type, enabled=False):
        logarithms = [
            tile.flatten().logsumexp(0).double()
            for span in spans(0, len(rows), STRIP_ROWS)
            for tile, _ in tiles.meet(scaled[span], span, no_threshold[span])
        ]
    return torch.stack([torch.stack([none, *logarithms]).logsumexp(0), tiles.num_left().sum().double()])


def proximal_term(query: Tensor, own_slot: Tensor) -> Tensor:
    """Return the mean over rows of ||query - own_slot||^2 (InstDisc: Wu et al., 2018, eq. 10).

    Args:
        query: [local_batch, dim], this worker's embeddings.
        own_slot: [local_batch, dim], what the memory bank holds of the same samples.

    Returns:
        A scalar, at least float32, yet to be weighted.

    Raises:
        ConfigError: shapes do not agree.
    """
    check_pair("query and own_slot", query, own_slot)
    rows = working_precision(query)
    return (rows - own_slot.to(rows)).square().sum(1).mean()


@final
class _NoiseTiles:
    """Visit the logits of queries with noise, piece by piece."""

    def __init__(
        self, query: Tensor, noise: Tensor, sample_id: Tensor | None, noise_id: Tensor | None
    ) -> None:
        check_columns("the noise rows", noise, query)
        check_sample_id(sample_id, query)
        ids = checked_ids(("sample_id", sample_id), ("noise_id", noise_id), len(noise))
        self._noise = noise
        self._pieces = list(spans(0, len(noise), 2 * tile_size(noise)))
        self._false_negatives = None if ids is None else FalseNegatives(*ids, self._pieces)
        self._num_queries = len(query)

    def meet(self, scaled: Tensor, span: slice, threshold: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a strip's logits less its threshold, -inf where masked, with each piece of noise."""
        for k, piece in enumerate(self._pieces):
            columns = self._noise[piece].to(scaled)
            tile = product(scaled, columns).sub_(threshold[:, None])
            if self._false_negatives is not None:
                self._false_negatives.mask(tile, span, k)
            yield tile, columns

    def num_left(self) -> Tensor:
        """Return how many noise rows each query has, [num_queries]."""
        drawn = torch.full((self._num_queries,), len(self._noise), device=self._noise.device)
        return drawn if self._false_negatives is None else drawn - self._false_negatives.count()


def _evaluate(
    rows: Tensor,
    temperature: Tensor,
    *,
    positive: Tensor,
    tiles: _NoiseTiles,
    threshold: Tensor,
    with_gradient: bool,
) -> tuple[Tensor, Gradients]:
    """Return the mean loss, and the gradients of rows and temperature."""
    loss, gradient = torch.empty_like(threshold), torch.zeros_like(rows)
    for span in spans(0, len(rows), STRIP_ROWS):
        query, own, limit = rows[span] / temperature, positive[span], threshold[span]
        log_odds = (query * own).sum(1) - limit
        loss[span] = -F.logsigmoid(log_odds)
        gradient[span] = -(-log_odds).sigmoid()[:, None] * own
        for tile, columns in tiles.meet(query, span, limit):
            loss[span] -= F.logsigmoid(-tile).sum(1)
            if with_gradient:
                gradient[span] += product(tile.sigmoid_(), columns.T)
    gradient.div_(temperature * len(rows))
    return loss.mean(), (gradient, temperature_gradient(rows, gradient, temperature))


def _check_slots(num_samples: int, positive: Tensor, noise: Tensor) -> None:
    if num_samples < 1:
        raise ConfigError(
            f"the bank has no slots: num_samples is {num_samples}; pass how many samples it holds"
        )
    if positive.requires_grad or noise.requires_grad:
        name = "positive" if positive.requires_grad else "noise"
        raise ConfigError(
            f"{name} requires grad, but a bank's rows get none here; detach them, "
            "or compare embeddings by info_nce"
        )
