"""The loss of more than two views of a sample, and of views of several sizes (multi-crop)."""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from torch import Tensor

from raycl.losses.example_ids import ExampleIds
from raycl.losses.objective import Objective, StoreBatch


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
