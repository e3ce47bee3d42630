"""Losses over all workers: what a loss compares is gathered first, for losses know no ranks."""

from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor

from raycl.distributed import gather, gather_detached, num_workers, rank
from raycl.losses import NormalizingConstant, info_nce, nce, noise_mass, nt_xent, proximal_term


@final
@dataclass(frozen=True, kw_only=True)
class Lent:
    """What a store lends for one step: own slots [local_batch, dim], negatives [n, dim] with ids [n]."""

    key: Tensor | None = None
    negatives: Tensor | None = None
    negative_id: Tensor | None = None


class Contrast(Protocol):
    """A loss of queries and keys [local_batch, dim], of samples [local_batch], and what was lent.

    It is the mean over this worker's queries; the mean over workers is that of the global batch.
    """

    def __call__(self, query: Tensor, key: Tensor | None, lent: Lent, sample_id: Tensor) -> Tensor:
        """Return the loss, a scalar."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class NtXent:
    """Each view against all other views of the global batch."""

    temperature: float

    def __call__(self, query: Tensor, key: Tensor | None, lent: Lent, sample_id: Tensor) -> Tensor:
        """Return the loss; the store is none."""
        assert key is not None, "the configuration gives NT-Xent two views"
        return gathered_nt_xent(query, key, sample_id, temperature=self.temperature)


@final
@dataclass(frozen=True, kw_only=True)
class InfoNce:
    """Each query's key, or own slot, among the gathered keys and what the store lends."""

    temperature: float
    in_batch: bool
    proximal_weight: float = 0.0

    def __call__(self, query: Tensor, key: Tensor | None, lent: Lent, sample_id: Tensor) -> Tensor:
        """Return the loss."""
        positive = lent.key if key is None else key
        assert positive is not None, "the configuration gives every query a key or a slot"
        loss = gathered_info_nce(
            query, positive, sample_id, lent, temperature=self.temperature, in_batch=self.in_batch
        )
        return _pulled(loss, query, lent, self.proximal_weight)


@final
@dataclass(frozen=True, kw_only=True)
class Nce:
    """Each query's own slot against noise from the memory bank, of ``num_samples`` slots."""

    temperature: float
    num_samples: int
    normalizer: NormalizingConstant
    proximal_weight: float = 0.0

    def __call__(self, query: Tensor, key: Tensor | None, lent: Lent, sample_id: Tensor) -> Tensor:
        """Return the loss; the normalizing constant takes in the batch first, if it still moves."""
        assert lent.key is not None, "the configuration gives NCE a memory bank"
        assert lent.negatives is not None, "the configuration gives NCE a memory bank"
        if not self.normalizer.is_settled:
            mass = noise_mass(
                query.detach(),
                lent.negatives,
                temperature=self.temperature,
                sample_id=sample_id,
                noise_id=lent.negative_id,
            )
            self.normalizer.update(gather_detached(mass[None]))
        loss = nce(
            query,
            lent.key,
            lent.negatives,
            num_samples=self.num_samples,
            temperature=self.temperature,
            log_normalizer=self.normalizer.log_normalizer,
            sample_id=sample_id,
            noise_id=lent.negative_id,
        )
        return _pulled(loss, query, lent, self.proximal_weight)


def gathered_nt_xent(
    view_a: Tensor, view_b: Tensor, sample_id: Tensor, *, temperature: float | Tensor
) -> Tensor:
    """NT-Xent over the embeddings of all workers."""
    if num_workers() == 1:
        return nt_xent(view_a, view_b, temperature=temperature, sample_id=sample_id)
    gathered_a, gathered_b = gather(torch.stack([view_a, view_b], dim=1)).unbind(1)
    return nt_xent(
        view_a,
        view_b,
        temperature=temperature,
        gathered_a=gathered_a,
        gathered_b=gathered_b,
        offset=rank() * len(view_a),
        sample_id=sample_id,
        gathered_sample_id=gather_detached(sample_id),
    )


def gathered_info_nce(
    query: Tensor,
    key: Tensor,
    sample_id: Tensor,
    lent: Lent,
    *,
    temperature: float | Tensor,
    in_batch: bool,
) -> Tensor:
    """InfoNCE over the keys of all workers and what a store lends."""
    lent_rows: dict[str, Any] = {"negatives": lent.negatives, "negative_id": lent.negative_id}
    if num_workers() == 1 or not in_batch:
        return info_nce(
            query, key, temperature=temperature, in_batch=in_batch, sample_id=sample_id, **lent_rows
        )
    return info_nce(
        query,
        key,
        temperature=temperature,
        gathered_key=gather(key),
        offset=rank() * len(query),
        sample_id=sample_id,
        gathered_sample_id=gather_detached(sample_id),
        **lent_rows,
    )


def _pulled(loss: Tensor, query: Tensor, lent: Lent, weight: float) -> Tensor:
    """Add the proximal term, which pulls each embedding to its slot."""
    if not weight:
        return loss
    assert lent.key is not None, "the configuration gives a proximal term a memory bank"
    return loss + weight * proximal_term(query, lent.key)
