"""Losses over all workers: the functions of ``raycl.losses`` on gathered inputs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, final

import torch
from torch import Tensor

from raycl.distributed import exceeds_gather_limit, gather, gather_detached, num_workers, rank
from raycl.distributed.ring import ring_info_nce, ring_nt_xent
from raycl.loss_specs import LOSSES, MIXED, LossSettings
from raycl.losses import (
    NormalizingConstant,
    clip,
    hinge,
    info_nce,
    nce,
    noise_mass,
    nt_xent,
    proximal_term,
)
from raycl.training.example_ids import Ids


@final
@dataclass(frozen=True, kw_only=True)
class StoreBatch:
    """The rows of a store for one step: own slots [local_batch, dim], negatives [n, dim] with ids [n].

    A store returns names as ``negative_id``. ``identified`` replaces them by the ids of the batch and
    keeps them in ``negative_name`` [n].
    """

    key: Tensor | None = None
    negatives: Tensor | None = None
    negative_id: Tensor | None = None
    negative_name: Tensor | None = None

    def identified(self, ids: Ids) -> "StoreBatch":
        """Return a copy with the ids of the batch in place of names."""
        if self.negative_id is None:
            return self
        return replace(self, negative_id=ids.of(self.negative_id), negative_name=self.negative_id)

    def joined(
        self, negatives: Tensor, negative_id: Tensor, negative_name: Tensor | None = None
    ) -> "StoreBatch":
        """Return a copy with explicit negatives before the stored ones; their names default to their ids."""
        negative_name = negative_id if negative_name is None else negative_name
        if self.negatives is not None and self.negative_id is not None:
            own_name = self.negative_id if self.negative_name is None else self.negative_name
            negatives = torch.cat([negatives, self.negatives.to(negatives)])
            negative_id = torch.cat([negative_id, self.negative_id])
            negative_name = torch.cat([negative_name, own_name])
        return replace(self, negatives=negatives, negative_id=negative_id, negative_name=negative_name)


class Objective(Protocol):
    """A loss of queries and keys [local_batch, dim], their ids, and the rows of a store (``stored``).

    It averages over this worker's queries. The mean over workers is the loss of the global batch.
    """

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: Ids) -> Tensor:
        """Return the loss, a scalar."""
        ...

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the loss if all embeddings were equal, or None if it is unknown."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class NtXent:
    """Each view against all other views of the global batch."""

    temperature: float | Tensor

    @classmethod
    def build(cls, settings: LossSettings) -> Self:
        """Return the loss with these settings."""
        return cls(
            temperature=settings.temperature,
        )

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: Ids) -> Tensor:
        """Return the loss; NT-Xent uses no store."""
        assert key is not None, "the configuration gives NT-Xent two views"
        return gathered_nt_xent(query, key, ids.query, temperature=self.temperature)

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the logarithm of the number of candidates."""
        return math.log(2 * batch_size - 1)


@final
@dataclass(frozen=True, kw_only=True)
class InfoNce:
    """Cross-entropy of each query's key, or own slot, against gathered and stored negatives.

    ``of_pairs`` means that queries and keys differ in kind and have separate ids.
    """

    temperature: float | Tensor
    in_batch: bool
    of_pairs: bool = False
    proximal_weight: float = 0.0

    @classmethod
    def build(cls, settings: LossSettings) -> Self:
        """Return the loss with these settings."""
        return cls(
            temperature=settings.temperature,
            in_batch=settings.in_batch,
            of_pairs=settings.pairs,
            proximal_weight=settings.proximal_weight,
        )

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: Ids) -> Tensor:
        """Return the loss."""
        positive = _positive(key, stored)
        loss = gathered_info_nce(
            query,
            positive,
            ids,
            stored,
            temperature=self.temperature,
            in_batch=self.in_batch,
            of_pairs=self.of_pairs,
        )
        return _add_proximal_term(loss, query, stored, self.proximal_weight)

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the logarithm of the number of candidates."""
        num_stored = 0 if stored.negatives is None else len(stored.negatives)
        return math.log(num_stored + (batch_size if self.in_batch else 1))


@final
@dataclass(frozen=True, kw_only=True)
class Bidirectional:
    """Cross-entropy in both directions: queries against keys and other negatives, keys against queries.

    ``log_frequency`` maps the names [n] of keys to log counts for the logQ correction, if it is enabled.
    """

    temperature: float | Tensor
    log_frequency: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def build(cls, settings: LossSettings) -> Self:
        """Return the loss with these settings."""
        return cls(
            temperature=settings.temperature,
            log_frequency=settings.log_frequency,
        )

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: Ids) -> Tensor:
        """Return the loss."""
        assert key is not None, "the configuration gives the symmetric cross-entropy a key for each query"
        rows: dict[str, Any] = {"query_id": ids.query, "key_id": ids.key}
        if self.log_frequency is not None:
            rows["key_log_frequency"] = self.log_frequency(ids.key_name)
        if num_workers() > 1:
            rows |= {f"gathered_{name}": gather_detached(value) for name, value in rows.items()}
            rows |= {
                "gathered_query": gather(query),
                "gathered_key": gather(key),
                "offset": rank() * len(query),
            }
        if stored.negatives is not None and stored.negative_id is not None:
            rows |= {"negatives": stored.negatives, "negative_id": stored.negative_id}
            if self.log_frequency is not None and stored.negative_name is not None:
                rows["negative_log_frequency"] = self.log_frequency(stored.negative_name)
        return clip(query, key, temperature=self.temperature, **rows)

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the logarithm of the number of candidates, the mean of both directions."""
        num_stored = 0 if stored.negatives is None else len(stored.negatives)
        return (math.log(batch_size + num_stored) + math.log(batch_size)) / 2


@final
@dataclass(frozen=True, kw_only=True)
class Nce:
    """Each query's own slot against noise from the memory bank, which has ``num_samples`` slots."""

    temperature: float
    num_samples: int
    normalizer: NormalizingConstant
    proximal_weight: float = 0.0

    @classmethod
    def build(cls, settings: LossSettings) -> Self:
        """Return the loss with these settings."""
        assert settings.num_samples is not None, "the configuration gives NCE a memory bank"
        assert settings.normalizer is not None, "the train state of NCE estimates the normalizing constant"
        return cls(
            temperature=settings.temperature,
            num_samples=settings.num_samples,
            normalizer=settings.normalizer,
            proximal_weight=settings.proximal_weight,
        )

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: Ids) -> Tensor:
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
        return _add_proximal_term(loss, query, stored, self.proximal_weight)

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return None: the value depends on the normalizing constant."""
        return None


@final
@dataclass(frozen=True, kw_only=True)
class Hinge:
    """Margin loss of each query's positive against gathered and stored negatives."""

    margin: float
    hardest: bool
    in_batch: bool
    bidirectional: bool
    proximal_weight: float = 0.0

    @classmethod
    def build(cls, settings: LossSettings) -> Self:
        """Return the loss with these settings."""
        return cls(
            margin=settings.margin,
            hardest=settings.hardest,
            in_batch=settings.in_batch,
            bidirectional=settings.learns_keys,
            proximal_weight=settings.proximal_weight,
        )

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: Ids) -> Tensor:
        """Return the loss."""
        loss = gathered_hinge(
            query,
            _positive(key, stored),
            ids,
            stored,
            margin=self.margin,
            hardest=self.hardest,
            in_batch=self.in_batch,
            bidirectional=self.bidirectional and self.in_batch,
        )
        return _add_proximal_term(loss, query, stored, self.proximal_weight)

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the margin."""
        return self.margin


@final
@dataclass(frozen=True, kw_only=True)
class WeightedObjective:
    """The weighted mean of a cross-entropy and a hinge; ``hinge_weight`` is the weight of the hinge."""

    cross_entropy: Objective
    hinge: Objective
    hinge_weight: float

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: Ids) -> Tensor:
        """Return the loss."""
        entropy = self.cross_entropy(query, key, stored, ids)
        return entropy.lerp(self.hinge(query, key, stored, ids), self.hinge_weight)

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the weighted mean of both values, or None if one is unknown."""
        parts = [
            part.collapsed_loss(batch_size=batch_size, stored=stored)
            for part in (self.cross_entropy, self.hinge)
        ]
        if parts[0] is None or parts[1] is None:
            return None
        return parts[0] + self.hinge_weight * (parts[1] - parts[0])


def build_objective(loss: str, *, hinge_weight: float, **settings: Any) -> Objective:
    """Return the loss of this name over all workers, mixed with a hinge of weight ``hinge_weight``.

    ``settings`` are the fields of :class:`~raycl.loss_specs.LossSettings`.
    """
    given = LossSettings(**settings)
    if hinge_weight in (0.0, 1.0):
        return LOSSES[MIXED if hinge_weight else loss].build(given)
    return WeightedObjective(
        cross_entropy=LOSSES[loss].build(given),
        hinge=LOSSES[MIXED].build(given),
        hinge_weight=hinge_weight,
    )


def gathered_nt_xent(
    view_a: Tensor, view_b: Tensor, sample_id: Tensor, *, temperature: float | Tensor
) -> Tensor:
    """NT-Xent over the embeddings of all workers."""
    if num_workers() == 1:
        return nt_xent(view_a, view_b, temperature=temperature, sample_id=sample_id)
    if exceeds_gather_limit(view_a, view_b):
        return ring_nt_xent(view_a, view_b, sample_id, temperature=temperature)
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
    ids: Ids,
    stored: StoreBatch,
    *,
    temperature: float | Tensor,
    in_batch: bool,
    of_pairs: bool = False,
) -> Tensor:
    """InfoNCE over the keys of all workers and the stored negatives."""
    stored_rows: dict[str, Any] = {"negatives": stored.negatives, "negative_id": stored.negative_id}
    # A single id for both sides is cheaper to compare.
    pair_ids = {"query_id": ids.query, "key_id": ids.key} if of_pairs else {"sample_id": ids.query}
    if num_workers() == 1 or not (in_batch or of_pairs):
        return info_nce(query, key, temperature=temperature, in_batch=in_batch, **pair_ids, **stored_rows)
    if in_batch and not of_pairs and exceeds_gather_limit(key):
        return ring_info_nce(query, key, ids.query, temperature=temperature, **stored_rows)
    gathered = {f"gathered_{name}": gather_detached(each) for name, each in pair_ids.items()}
    return info_nce(
        query,
        key,
        temperature=temperature,
        in_batch=in_batch,
        gathered_key=gather(key) if in_batch else None,
        offset=rank() * len(query),
        **pair_ids,
        **gathered,
        **stored_rows,
    )


def gathered_hinge(
    query: Tensor,
    key: Tensor,
    ids: Ids,
    stored: StoreBatch,
    *,
    margin: float,
    hardest: bool,
    in_batch: bool,
    bidirectional: bool,
) -> Tensor:
    """Hinge over the keys, and optionally the queries, of all workers and the stored negatives."""
    settings: dict[str, Any] = {
        "margin": margin,
        "hardest": hardest,
        "in_batch": in_batch,
        "bidirectional": bidirectional,
        "query_id": ids.query,
        "key_id": ids.key,
        "negatives": stored.negatives,
        "negative_id": stored.negative_id,
    }
    if num_workers() == 1:
        return hinge(query, key, **settings)
    # Gather ids even without in-batch negatives: a stored row may be the key of another worker's pair.
    return hinge(
        query,
        key,
        gathered_query=gather(query) if bidirectional else None,
        gathered_key=gather(key) if in_batch else None,
        offset=rank() * len(query),
        gathered_query_id=gather_detached(ids.query),
        gathered_key_id=gather_detached(ids.key),
        **settings,
    )


def _positive(key: Tensor | None, stored: StoreBatch) -> Tensor:
    """Return the positive of each query: its key, or its own slot."""
    positive = stored.key if key is None else key
    assert positive is not None, "the configuration gives every query a key or a slot"
    return positive


def _add_proximal_term(loss: Tensor, query: Tensor, stored: StoreBatch, weight: float) -> Tensor:
    """Add the proximal term, which pulls each embedding to its slot."""
    if not weight:
        return loss
    assert stored.key is not None, "the configuration gives a proximal term a memory bank"
    return loss + weight * proximal_term(query, stored.key)
