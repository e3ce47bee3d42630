"""Noise-contrastive estimation, the loss of InstDisc (Wu et al., 2018)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from raycl.distributed import gather_detached
from raycl.errors import ConfigError, RunError
from raycl.losses.checks import (
    check_columns,
    check_pair,
    check_sample_id,
    checked_ids,
    checked_temperature,
)
from raycl.losses.example_ids import ExampleIds
from raycl.losses.false_negatives import count_same, mask_same
from raycl.losses.objective import StoreBatch, add_proximal_term
from raycl.losses.tiled import (
    BLOCK_ROWS,
    Gradients,
    check_temperature,
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
    """Classify each query's own slot against noise (Wu et al., 2018; Gutmann and Hyvarinen, 2010).

    With P(j | query) = exp(query . slot j / temperature) / Z and m uniformly drawn noise rows,
    h(j) = P / (P + m / num_samples) is the probability that slot j is data. The loss is
    -log h(own slot) - sum over noise of log(1 - h), the **mean** over the local_batch queries.
    It is computed in log space, so that it cannot over- or underflow.

    Args:
        query: [local_batch, dim], this worker's embeddings. Half precision is computed in float32.
        positive: [local_batch, dim], each query's own slot of the memory bank; no gradient.
        noise: [num_noise, dim], slots drawn uniformly, shared by all queries; no gradient. Half
            precision is supported. A slot that is drawn twice counts twice.
        num_samples: number of slots of the memory bank.
        temperature: above 0; a 0-d tensor that requires grad is learned, with an exact gradient.
        log_normalizer: natural logarithm of Z; no gradient. See :class:`NormalizingConstant`.
        sample_id: [local_batch] int64; noise rows with the query's id are masked, and m is
            the number of the remaining noise rows of that query.
        noise_id: [num_noise] int64, ids of the noise rows.

    Returns:
        A scalar, float32 (float64 for float64 embeddings). It can be differentiated once.

    Raises:
        ConfigError: Shapes or arguments do not match, or the temperature is not above 0.
    """
    check_pair("query and positive", query, positive)
    _check_slots(num_samples, positive, noise)
    tiles = _NoiseTiles(query, noise, sample_id, noise_id)
    rows = working_precision(query)
    # log(m Z / num_samples): a logit above it is more likely data than noise.
    if isinstance(log_normalizer, Tensor):
        log_normalizer = log_normalizer.detach().double().to(rows.device)
    threshold = (tiles.num_unmasked().double().log() + (log_normalizer - math.log(num_samples))).to(rows)
    evaluate = partial(_evaluate, positive=positive.to(rows), tiles=tiles, threshold=threshold)
    return fused(evaluate, rows, _temperature(temperature, rows))


@torch.no_grad()
def noise_mass(
    query: Tensor,
    noise: Tensor,
    *,
    temperature: float | Tensor,
    sample_id: Tensor | None = None,
    noise_id: Tensor | None = None,
) -> Tensor:
    """Sum exp(query . slot / temperature) over all pairs of a query and its noise.

    Takes the same arguments as :func:`nce`.

    Returns:
        [2], float64: the logarithm of the sum, and the number of pairs. Stack it over workers,
        [num_workers, 2], for :meth:`NormalizingConstant.update`.

    Raises:
        ConfigError: Shapes or arguments do not match, or the temperature is not above 0.
    """
    tiles = _NoiseTiles(query, noise, sample_id, noise_id)
    rows = working_precision(query)
    scaled = rows / _temperature(temperature, rows)
    no_threshold = scaled.new_zeros(len(scaled))
    none = torch.full((), -math.inf, dtype=torch.float64, device=scaled.device)
    with torch.autocast(rows.device.type, enabled=False):
        logarithms = [
            tile.flatten().logsumexp(0).double()
            for span in spans(0, len(rows), BLOCK_ROWS)
            for tile, _ in tiles.tiles(scaled[span], span, no_threshold[span])
        ]
    return torch.stack([torch.stack([none, *logarithms]).logsumexp(0), tiles.num_unmasked().sum().double()])


@final
class _NoiseTiles:
    """Compute the logits of queries and noise tile by tile."""

    def __init__(
        self, query: Tensor, noise: Tensor, sample_id: Tensor | None, noise_id: Tensor | None
    ) -> None:
        check_columns("the noise rows", noise, query)
        check_sample_id(sample_id, query)
        ids = checked_ids(("sample_id", sample_id), ("noise_id", noise_id), len(noise))
        self._noise = noise
        self._spans = list(spans(0, len(noise), 2 * tile_size(noise)))
        self._ids, self._num_queries = ids, len(query)

    def tiles(self, scaled: Tensor, span: slice, threshold: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield logits minus the threshold, -inf where masked, and the noise rows of each tile."""
        for columns_span in self._spans:
            columns = self._noise[columns_span].to(scaled)
            tile = product(scaled, columns).sub_(threshold[:, None])
            if self._ids is not None:
                mask_same(tile, self._ids[0][span], self._ids[1][columns_span])
            yield tile, columns

    def num_unmasked(self) -> Tensor:
        """Return the number of unmasked noise rows of each query, [num_queries]."""
        drawn = torch.full((self._num_queries,), len(self._noise), device=self._noise.device)
        return drawn if self._ids is None else drawn - count_same(*self._ids)


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
    for span in spans(0, len(rows), BLOCK_ROWS):
        query, own, limit = rows[span] / temperature, positive[span], threshold[span]
        log_odds = (query * own).sum(1) - limit
        loss[span] = -F.logsigmoid(log_odds)
        gradient[span] = -(-log_odds).sigmoid()[:, None] * own
        for tile, columns in tiles.tiles(query, span, limit):
            loss[span] -= F.logsigmoid(-tile).sum(1)
            if with_gradient:
                gradient[span] += product(tile.sigmoid_(), columns.T)
    gradient.div_(temperature * len(rows))
    return loss.mean(), (gradient, temperature_gradient(rows, gradient, temperature))


def _temperature(temperature: float | Tensor, rows: Tensor) -> Tensor:
    if isinstance(temperature, Tensor) and temperature.ndim == 0:
        check_temperature(temperature.item())
    return checked_temperature(temperature, rows)


def _check_slots(num_samples: int, positive: Tensor, noise: Tensor) -> None:
    if num_samples < 1:
        raise ConfigError(
            f"num_samples must be at least 1, got {num_samples}; pass the number of slots of the memory bank"
        )
    if positive.requires_grad or noise.requires_grad:
        name = "positive" if positive.requires_grad else "noise"
        raise ConfigError(
            f"{name} requires grad, but rows of a memory bank get no gradient; detach them, "
            "or use info_nce to compare embeddings"
        )


@final
class NormalizingConstant:
    """Estimate log Z from the first batch; then keep it, or update it as a moving average.

    Z is num_samples times the mean of exp(query . slot / temperature) over queries and noise.

    Args:
        num_samples: number of slots of the memory bank.
        momentum: None keeps the first estimate (Wu et al., 2018). A number in [0, 1), usually
            0.99, is the momentum of an exponential moving average of Z.

    Raises:
        ConfigError: ``num_samples`` or ``momentum`` is out of range.
    """

    def __init__(self, num_samples: int, *, momentum: float | None = None) -> None:
        if num_samples < 1:
            raise ConfigError(
                f"num_samples must be at least 1, got {num_samples}; pass the number of slots of the memory bank"
            )
        if momentum is not None and not 0 <= momentum < 1:
            raise ConfigError(
                f"the momentum of the normalizing constant must be in [0, 1), got {momentum:g}; "
                "0.99 is usual, None keeps the first estimate"
            )
        self._num_samples, self._momentum = num_samples, momentum
        self._log_normalizer: float | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the estimate is final, so that :func:`noise_mass` is no longer needed."""
        return self._momentum is None and self._log_normalizer is not None

    @property
    def log_normalizer(self) -> float:
        """Natural logarithm of Z; raises ``RunError`` before the first batch."""
        if self._log_normalizer is None:
            raise RunError("the normalizing constant has no estimate yet; call update before the first loss")
        return self._log_normalizer

    def update(self, masses: Tensor) -> None:
        """Update the estimate with the :func:`noise_mass` of each worker, [num_workers, 2].

        All workers must pass the same values (``gather_detached(noise_mass(...)[None])``), so that
        they compute the same Z.

        Raises:
            ConfigError: The masses are not [num_workers, 2], or no query has noise rows.
        """
        if masses.ndim != 2 or masses.shape[1] != 2:
            raise ConfigError(
                f"the masses must be [num_workers, 2], got {list(masses.shape)}; gather noise_mass(...)[None]"
            )
        if self.is_settled:
            return
        log_mass, num_pairs = torch.stack([masses[:, 0].logsumexp(0), masses[:, 1].sum()]).tolist()
        if num_pairs == 0:
            raise ConfigError(
                "cannot estimate the normalizing constant: got 0 pairs of query and noise; "
                "draw noise with ids other than the ids of the queries"
            )
        log_mean = log_mass - math.log(num_pairs)
        self._average(math.log(self._num_samples) + log_mean)

    def state_dict(self) -> dict[str, float | None]:
        """Return the state for a checkpoint."""
        return {"log_normalizer": self._log_normalizer}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Restore the state from a checkpoint."""
        self._log_normalizer = state["log_normalizer"]

    def _average(self, estimate: float) -> None:
        if self._log_normalizer is None or self._momentum is None:
            self._log_normalizer = estimate
            return
        # Averages Z, not log Z, but in log space: at temperature 0.01 it overflows float32.
        parts = torch.tensor([self._log_normalizer, estimate], dtype=torch.float64)
        weights = torch.tensor([self._momentum, 1 - self._momentum], dtype=torch.float64)
        self._log_normalizer = (parts + weights.log()).logsumexp(0).item()


@final
@dataclass(frozen=True, kw_only=True)
class Nce:
    """Each query's own slot against noise from the memory bank, which has ``num_samples`` slots."""

    temperature: float
    num_samples: int
    normalizer: NormalizingConstant
    proximal_weight: float = 0.0

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: ExampleIds) -> Tensor:
        """Return the loss; the batch updates the normalizing constant first, until it is settled."""
        assert stored.key is not None, "the configuration gives NCE a memory bank"
        assert stored.negatives is not None, "the configuration gives NCE a memory bank"
        if not self.normalizer.is_settled:
            mass = noise_mass(
                query.detach(),
                stored.negatives,
                temperature=self.temperature,
                sample_id=ids.query,
                noise_id=stored.negative_id,
            )
            self.normalizer.update(gather_detached(mass[None]))
        loss = nce(
            query,
            stored.key,
            stored.negatives,
            num_samples=self.num_samples,
            temperature=self.temperature,
            log_normalizer=self.normalizer.log_normalizer,
            sample_id=ids.query,
            noise_id=stored.negative_id,
        )
        return add_proximal_term(loss, query, stored, self.proximal_weight)

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return None: the value depends on the normalizing constant."""
        return None
