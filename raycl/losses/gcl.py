"""The global contrastive loss of SogCLR (Yuan et al., 2022): the whole data set as negatives of a small batch.

Of two views of each sample, or of pairs as in FastCLIP (Wei et al., 2024).
"""

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from raycl.distributed import num_workers
from raycl.errors import ConfigError
from raycl.losses.clip import Clip
from raycl.losses.example_ids import ExampleIds
from raycl.losses.objective import Partition, StoreBatch
from raycl.losses.softmax import Softmax
from raycl.losses.tiled import LOG2_E
from raycl.losses.views import ViewBatch, ViewsObjective, softmax_of_views


def gcl(
    view_a: Tensor,
    view_b: Tensor,
    *,
    log_partition: Tensor,
    temperature: float | Tensor,
    momentum: float,
    num_samples: int,
    gathered_a: Tensor | None = None,
    gathered_b: Tensor | None = None,
    offset: int = 0,
    sample_id: Tensor | None = None,
    gathered_sample_id: Tensor | None = None,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compare the two views of each sample with the views of all other samples of the data (Yuan et al., 2022).

    As DCL, whose negatives are in the batch, but the sum over the negatives is an estimate of the sum over the data
    set. Each sample has a partition function u, the mean of exp(logit) over its negatives. A view's u is
    ``momentum`` * the sample's stored u + (1 - ``momentum``) * the mean over the view's negatives in the batch, and
    the batch's mean alone if none is stored. The loss of a row is -logit(positive) + log(u) +
    log(2 * num_samples - 2). The gradient weight of a negative is exp(logit) / u / (2 * batch - 2), so that
    the gradient is DCL's with ``momentum`` 0. Masked negatives count as 0 in the means; u of a row without any
    negatives is exp(-1 / temperature).

    Args:
        view_a: [local_batch, dim], this worker's embeddings of one view, usually of unit length. Half
            precision is computed in float32.
        view_b: [local_batch, dim], row i the positive of view_a's row i.
        log_partition: [local_batch, 1], the natural logarithm of the stored u; -inf if none is stored.
        temperature: above 0; a 0-d tensor that requires grad is learned, with u as a constant.
        momentum: weight of the stored u, in [0, 1); 1 minus the paper's gamma of 0.9.
        num_samples: number of samples of the data.
        gathered_a: [batch, dim], view_a of all workers, gathered with gradient.
        gathered_b: [batch, dim], view_b of all workers, gathered with gradient.
        offset: the index of this worker's first row in the gathered rows.
        sample_id: [local_batch] int64; rows with equal ids are the same sample, not negatives.
        gathered_sample_id: [batch] int64, ids of the gathered rows.
        weight: [local_batch], the weight of each sample's rows in the mean, which does not change u; of mean 1 over
            all workers for a weighted mean. No gradient.

    Returns:
        The **mean** over the 2 * local_batch rows, and the logarithm of the mean over each sample's negatives in the
        batch, [local_batch, 1], to move the stored u.

    Raises:
        ConfigError: Shapes do not match, or a number is out of range.
    """
    _check(log_partition, [len(view_a), 1], momentum, num_samples)
    partition = Partition(log_partition)
    loss = Gcl(
        temperature=temperature, bank_momentum=momentum, num_samples=num_samples, partition=partition
    ).checked_loss(
        (view_a, view_b),
        sample_id,
        {"gathered_a": gathered_a, "gathered_b": gathered_b},
        gathered_sample_id,
        offset,
        weight,
    )
    return loss, partition.of_batch()


@final
class _GlobalRows:
    """The row loss, which keeps the logarithm of the mean over the negatives of each row in the batch.

    ``stored`` [num_rows] is log u; ``num_in_batch`` and ``num_in_data`` are the numbers of negatives of a row. u is the
    mean of exp(logit), or of exp(logit - logit(positive)) if it ``is_relative``, as in FastCLIP (Wei et al., 2024,
    equation 1). Then a stale u scales the gradient of the whole row, of its positive too.
    """

    def __init__(
        self,
        stored: Tensor,
        temperature: float | Tensor,
        momentum: float,
        num_in_batch: int,
        num_in_data: int,
        *,
        is_relative: bool = False,
    ) -> None:
        self._stored, self._momentum, self._is_relative = stored, momentum, is_relative
        self._temperature = temperature.detach() if isinstance(temperature, Tensor) else temperature
        self._log_in_batch, self._log_in_data = (math.log(max(1, num)) for num in (num_in_batch, num_in_data))
        self.log_mean = torch.zeros_like(stored)

    def __call__(self, positive: Tensor, shift: Tensor, total: Tensor, block: slice) -> Softmax:
        """Return -logit(positive) + log(u * num_in_data), and the weights exp(logit) / u / num_in_batch.

        A relative u contains the positive, whose weight is the sum of the negatives' weights.
        """
        of_batch = (shift + total.log2()) / LOG2_E - self._log_in_batch
        of_batch = torch.where(total == 0, -1 / self._temperature, of_batch)
        if self._is_relative:
            of_batch = of_batch - positive / LOG2_E
        self.log_mean[block] = of_batch
        log_partition = moved_log_partition(self._stored[block], of_batch, self._momentum).to(of_batch)
        if self._is_relative:
            weight = torch.where(total == 0, 0.0, (of_batch - log_partition).exp())
            logsumexp = (log_partition + self._log_in_batch) * LOG2_E + positive
            return Softmax(log_partition + self._log_in_data, weight, logsumexp)
        loss = log_partition + self._log_in_data - positive / LOG2_E
        return Softmax(loss, torch.ones_like(loss), (log_partition + self._log_in_batch) * LOG2_E)


def moved_log_partition(stored: Tensor, new: Tensor, momentum: float) -> Tensor:
    """Return log(momentum * u + (1 - momentum) * new u), given their logarithms; the new one if none is stored."""
    if momentum == 0:
        return new
    mixed = torch.logaddexp(stored + math.log(momentum), new + math.log1p(-momentum))
    return torch.where(stored.isneginf(), new, mixed)


def _check(log_partition: Tensor, shape: list[int], momentum: float, num_samples: int) -> None:
    if list(log_partition.shape) != shape:
        raise ConfigError(
            f"log_partition must be {shape}, got {list(log_partition.shape)}; pass the stored log u of each row, "
            "-inf if there is none"
        )
    if not 0 <= momentum < 1:
        raise ConfigError(
            f"the momentum of the partition functions must be in [0, 1), got {momentum:g}; 0.1 is the paper's"
        )
    if num_samples < 2:
        raise ConfigError(f"num_samples must be at least 2, got {num_samples}; pass the number of samples")


@final
@dataclass(frozen=True, kw_only=True)
class Gcl(ViewsObjective):
    """Each view against all other samples of the data, by the partition functions of a store.

    ``pairs`` compares queries with keys of two towers instead, as :class:`~raycl.losses.clip.Clip`. Each pair has
    two partition functions: u_q of its query over all other keys and u_k of its key over all other queries. In a batch
    with the logits s, and with n keys beside the own one (Wei et al., 2024, algorithm 1),

        g_q = sum over other keys j of exp(s_ij - s_ii) / n    (a masked key counts as 0)
        u_q = momentum * stored u_q + (1 - momentum) * g_q     (g_q alone if none is stored)
        gradient = gradient of g_q / u_q, with u_q as a constant

    and likewise u_k; the loss is the mean of log(u_q) and log(u_k), plus log(num_samples - 1). The paper's gamma is
    1 - momentum. Its factor, the temperature, is left out, as in the other losses here; a learned temperature has the
    gradient of this loss, as in FastCLIP-v0.
    """

    bank_momentum: float
    num_samples: int
    pairs: bool = False
    partition: Partition | None = None

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: ExampleIds) -> Tensor:
        """Return the loss, and append the means over the batch to ``stored.partition``."""
        if self.pairs:
            return self._loss_of_pairs(query, key, stored, ids)
        return ViewsObjective.__call__(replace(self, partition=stored.partition), query, key, stored, ids)

    def loss(self, batch: ViewBatch) -> Tensor:
        """Return the loss of checked views, and append the means over the batch."""
        assert self.partition is not None, "the configuration gives the loss partition functions"
        rows = _GlobalRows(
            self.partition.stored.repeat(2, 1)[:, 0],
            self.temperature,
            self.bank_momentum,
            num_in_batch=2 * batch.num_samples - 2,
            num_in_data=2 * self.num_samples - 2,
        )
        loss = softmax_of_views(batch, temperature=self.temperature, row_loss=rows)
        self.partition.estimates.append(torch.logaddexp(*rows.log_mean.chunk(2))[:, None] - math.log(2))
        return loss

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the logarithm of the number of negatives, once the partition functions follow the collapse."""
        return math.log(self.num_samples - 1 if self.pairs else 2 * self.num_samples - 2)

    def _loss_of_pairs(
        self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: ExampleIds
    ) -> Tensor:
        """Return the mean of both directions, whose partition functions are the columns of the store."""
        assert stored.partition is not None, "the configuration gives the loss partition functions"
        of_query, of_key = (
            _GlobalRows(
                of_side,
                self.temperature,
                self.bank_momentum,
                num_in_batch=num_workers() * len(query) - 1,
                num_in_data=self.num_samples - 1,
                is_relative=True,
            )
            for of_side in stored.partition.stored.unbind(1)
        )
        loss = Clip(temperature=self.temperature, row_losses=(of_query, of_key))(query, key, stored, ids)
        stored.partition.estimates.append(torch.stack([of_query.log_mean, of_key.log_mean], dim=1))
        return loss
