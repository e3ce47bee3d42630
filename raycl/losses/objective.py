"""The interface of an objective, a loss over all workers; mixtures, sums over prefixes, means over pairs of views, and
the proximal term."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, NamedTuple, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor

from raycl.distributed import gather, gather_detached, gather_uneven, num_workers, rank
from raycl.loss_specs import LOSSES, MIXED
from raycl.losses.checks import check_pair, checked_weight
from raycl.losses.example_ids import ExampleIds
from raycl.losses.guide import Guide
from raycl.losses.tiled import working_precision


@final
@dataclass(eq=False)
class Partition:
    """The logarithms of the partition functions of a batch, [local_batch, 1], or [local_batch, 2] of the sides of pairs.

    ``stored`` is -inf for a sample without any. The loss appends the estimates from this batch alone, one for each pair
    of views.
    """

    stored: Tensor
    estimates: list[Tensor] = field(default_factory=list)

    def of_batch(self) -> Tensor:
        """Return the logarithm of the mean over the estimates."""
        if len(self.estimates) == 1:
            return self.estimates[0]
        return torch.stack(self.estimates).logsumexp(0) - math.log(len(self.estimates))


@final
@dataclass(frozen=True, kw_only=True)
class StoreBatch:
    """The rows of a store for one step: own slots [local_batch, dim], negatives [n, dim] with ids [n].

    ``negative_step`` are the steps of the stored negatives, int64 on the host, which follow explicit ones. A store
    indexes rows by names. ``for_batch`` replaces them by the ids of the batch and keeps them in
    ``negative_name`` [n], and adds the ``guide`` of all workers' rows, if the batch has one.
    """

    key: Tensor | None = None
    negatives: Tensor | None = None
    negative_id: Tensor | None = None
    negative_name: Tensor | None = None
    negative_step: Tensor | None = None
    partition: Partition | None = None
    guide: Guide | None = None

    def for_batch(self, ids: ExampleIds, explicit: Tensor | None) -> "StoreBatch":
        """Return a copy with the ids of the batch, the explicit negatives of all workers, and the guide of all rows.

        ``explicit`` are the embeddings [num_negatives, dim] of this worker's explicit negatives, if the batch has any;
        collective.
        """
        negatives, name, negative_id = self.negatives, self.negative_id, None
        if name is not None:
            negative_id = ids.of(name)
        if explicit is not None and ids.negative is not None:
            explicit_name = ids.negative if ids.negative_name is None else ids.negative_name
            rows = gather_uneven(explicit, ids.num_negatives)
            if negatives is None or name is None or negative_id is None:
                negatives, name, negative_id = rows, explicit_name, ids.negative
            else:
                negatives = torch.cat([rows, negatives.to(rows)])
                name = torch.cat([explicit_name, name])
                negative_id = torch.cat([ids.negative, negative_id])
        guide = None if ids.guide is None else ids.guide.gathered(ids.num_negatives)
        return replace(self, negatives=negatives, negative_id=negative_id, negative_name=name, guide=guide)


class Objective(Protocol):
    """A loss of queries and keys [local_batch, dim], their ids, and the rows of a store (``stored``).

    A loss of all views takes the second view and all further ones as keys, [(num_views - 1) * local_batch, dim].

    It averages over this worker's queries. The mean over workers is the loss of the global batch.
    """

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: ExampleIds) -> Tensor:
        """Return the loss, a scalar."""
        ...

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the loss if all embeddings were equal, or None if it is unknown."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class WeightedObjective:
    """The weighted mean of a cross-entropy and a hinge; ``hinge_weight`` is the weight of the hinge."""

    cross_entropy: Objective
    hinge: Objective
    hinge_weight: float

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: ExampleIds) -> Tensor:
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


@final
@dataclass(frozen=True, kw_only=True)
class Matryoshka:
    """The weighted sum of an objective over prefixes of the embeddings, normalized again (Kusupati et al., 2022).

    ``dims`` are the lengths of the prefixes, each at most dim. Rows of a store are cut in the same way.
    """

    objective: Objective
    dims: Sequence[int]
    weights: Sequence[float]

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: ExampleIds) -> Tensor:
        """Return the loss."""
        query = working_precision(query)
        loss = query.new_zeros(())
        for dim, weight in zip(self.dims, self.weights, strict=True):
            of_query, of_key, of_slots, of_negatives = (
                None if rows is None else F.normalize(rows[:, :dim].to(query.dtype), dim=1)
                for rows in (query, key, stored.key, stored.negatives)
            )
            assert of_query is not None, "every step has queries"
            prefixes = replace(stored, key=of_slots, negatives=of_negatives)
            loss = loss + weight * self.objective(of_query, of_key, prefixes, ids)
        return loss

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the weighted sum over the prefixes, or None if it is unknown."""
        value = self.objective.collapsed_loss(batch_size=batch_size, stored=stored)
        return None if value is None else value * sum(self.weights)


class ViewPair(NamedTuple):
    """A view as query and another one as key, both [local_batch, dim], and the weight of their loss.

    The key is None if it is a slot of a bank. For a loss of all views, it has the rows of all other views, one view
    after the other.
    """

    query: Tensor
    key: Tensor | None
    weight: float = 1.0


def pair_views(full: Sequence[Tensor], crops: Sequence[Tensor]) -> list[ViewPair]:
    """Pair each view with each view of full size, as multi-crop does (Caron et al., 2020, equation 6).

    Args:
        full: The embeddings of F views of full size, [local_batch, dim] each. They are keys of all others.
        crops: The embeddings of other views, which are queries only.

    Returns:
        The pairs, each once. Two views of full size are a key of each other, so their pair has the weight 2.
    """
    among_full = [ViewPair(query, key, 2.0) for query, key in combinations(full, 2)]
    return among_full + [ViewPair(query, key) for query in crops for key in full]


def mean_over_pairs(
    objective: Objective, pairs: Sequence[ViewPair], stored: StoreBatch, ids: ExampleIds
) -> Tensor:
    """Return the weighted mean of a loss over pairs of views.

    With F views of full size among m views, this is the sum over all keys k of full size and all views v
    other than k of loss(v, k), divided by F * (m - 1); of two views of full size, the earlier one is the query.
    """
    if len(pairs) == 1:
        return objective(pairs[0].query, pairs[0].key, stored, ids)
    total = sum(pair.weight for pair in pairs)
    losses = [pair.weight / total * objective(pair.query, pair.key, stored, ids) for pair in pairs]
    return sum(losses[1:], losses[0])


def build_objective(loss: str, *, hinge_weight: float, **settings: Any) -> Objective:
    """Return the loss of this name over all workers, mixed with a hinge of weight ``hinge_weight``.

    ``settings`` are the fields of the losses; each uses its own.
    """
    if hinge_weight in (0.0, 1.0):
        return LOSSES[MIXED if hinge_weight else loss].build(**settings)
    return WeightedObjective(
        cross_entropy=LOSSES[loss].build(**settings),
        hinge=LOSSES[MIXED].build(**settings),
        hinge_weight=hinge_weight,
    )


def gathered(**own: Tensor | None) -> dict[str, Any]:
    """Return the arguments ``gathered_*`` and ``offset`` of a loss; none for one worker. Collective.

    ``own`` are this worker's rows by name, [local_batch, ...]: embeddings are gathered with gradient, ids without;
    None is skipped.
    """
    if num_workers() == 1:
        return {}
    rows = {name: each for name, each in own.items() if each is not None}
    everyone = {
        f"gathered_{name}": gather(each) if each.is_floating_point() else gather_detached(each)
        for name, each in rows.items()
    }
    first = next(iter(rows.values()))
    return {"offset": rank() * len(first), **everyone}


def positive_of(key: Tensor | None, stored: StoreBatch) -> Tensor:
    """Return the positive of each query: its key, or its own slot."""
    positive = stored.key if key is None else key
    assert positive is not None, "the configuration gives every query a key or a slot"
    return positive


def proximal_term(query: Tensor, own_slot: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the mean over rows of ||query - own_slot||^2 (InstDisc: Wu et al., 2018, eq. 10).

    Args:
        query: [local_batch, dim], this worker's embeddings.
        own_slot: [local_batch, dim], the slots of the same samples in the memory bank.
        weight: [local_batch], the weight of each row in the mean. No gradient.

    Returns:
        A scalar, at least float32, without the weight of the term.

    Raises:
        ConfigError: Shapes do not match.
    """
    check_pair("query and own_slot", query, own_slot)
    rows, weight = working_precision(query), checked_weight(weight, query)
    distance = (rows - own_slot.to(rows)).square().sum(1)
    return (distance if weight is None else distance * weight).mean()


def add_proximal_term(
    loss: Tensor, query: Tensor, stored: StoreBatch, weight: float, row_weight: Tensor | None = None
) -> Tensor:
    """Add the proximal term, which pulls each embedding to its slot; ``row_weight`` [num_queries] weights the rows."""
    if not weight:
        return loss
    assert stored.key is not None, "the configuration gives a proximal term a memory bank"
    return loss + weight * proximal_term(query, stored.key, row_weight)
