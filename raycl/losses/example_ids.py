"""Ids of the rows of all workers: duplicates, which share a name, get the same id."""

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from raycl.distributed import gather_detached, gather_uneven, rank


@final
@dataclass(frozen=True, kw_only=True)
class MatchKeys:
    """Names of queries, keys and explicit negatives, int64 [num_rows, num_names] each.

    A name is an id of a row or of its content. Rows that share a name in the same column are duplicates;
    with ``shared_id_space``, in any column, for queries and for keys. The store of negatives indexes keys
    by the first column. ``negative`` is None unless the batch has explicit negatives.
    """

    query: Tensor
    key: Tensor
    negative: Tensor | None = None
    shared_id_space: bool = False


class Names(NamedTuple):
    """Names of keys and negatives, which do not depend on the batch, and the batch's id of each name.

    ``key`` [local_batch] and ``negative`` [num_negatives] belong to this worker. ``all`` holds the names of
    all workers in ascending order, and ``id`` the id of each.
    """

    key: Tensor
    negative: Tensor | None
    all: Tensor
    id: Tensor


class Ids(NamedTuple):
    """Ids of this worker's queries and keys [local_batch], and of its explicit negatives, if any.

    Equal ids mark duplicate queries, or duplicate keys; negatives count as keys. Without ``names``, ids
    and names are equal.
    """

    query: Tensor
    key: Tensor
    negative: Tensor | None = None
    names: Names | None = None

    @property
    def key_name(self) -> Tensor:
        """The names by which a store indexes the keys, [local_batch]."""
        return self.key if self.names is None else self.names.key

    def of_negatives(self) -> tuple[Tensor, ...]:
        """Return the ids of this worker's explicit negatives and, if they differ, their names."""
        assert self.negative is not None, "the batch has no explicit negatives"
        if self.names is None or self.names.negative is None:
            return (self.negative,)
        return self.negative, self.names.negative

    def of(self, name: Tensor) -> Tensor:
        """Return the ids of stored keys with these names, both [num_rows]."""
        if self.names is None:
            return name
        place = torch.searchsorted(self.names.all, name.contiguous()).clamp(max=len(self.names.all) - 1)
        return torch.where(self.names.all[place] == name, self.names.id[place], name)


def assign_example_ids(known: MatchKeys) -> Ids:
    """Return the ids of a batch, the same on all workers; collective if rows have several names.

    Duplicates are transitive: rows share an id if a chain of shared names connects them. The id is the
    least of their first names.
    """
    negative = known.negative
    if known.key.shape[1] == 1:
        of_negatives = None if negative is None else negative[:, 0]
        return Ids(_identify_queries(known), known.key[:, 0], of_negatives)
    key, of_negatives, names = _identify_keys(known)
    return Ids(_identify_queries(known), key, of_negatives, names)


def _identify_queries(known: MatchKeys) -> Tensor:
    names = known.query
    if names.shape[1] == 1:
        return names[:, 0]
    ids = merge_ids(gather_detached(names), shared_id_space=known.shared_id_space)
    return ids[rank() * len(names) :][: len(names)]


def _identify_keys(known: MatchKeys) -> tuple[Tensor, Tensor | None, Names]:
    key, negative = known.key, known.negative
    rows, own = gather_detached(key), slice(rank() * len(key), (rank() + 1) * len(key))
    owner = torch.empty(0, dtype=torch.int64, device=key.device)
    if negative is not None:
        # The number of negatives differs between workers.
        others, owner = gather_uneven(negative, torch.full((len(negative),), rank(), device=key.device))
        rows = torch.cat([rows, others])
    ids = merge_ids(rows, shared_id_space=known.shared_id_space)
    is_own = owner == rank()
    names = Names(
        key[:, 0].contiguous(),
        None if negative is None else negative[:, 0].contiguous(),
        *_table(rows, ids, shared_id_space=known.shared_id_space),
    )
    num_keys = len(rows) - len(owner)
    return ids[own], None if negative is None else ids[num_keys:][is_own], names


def _table(rows: Tensor, ids: Tensor, *, shared_id_space: bool) -> tuple[Tensor, Tensor]:
    """Return all names by which a store may index a key, ascending, and their ids."""
    called = rows if shared_id_space else rows[:, :1]
    order = called.flatten().argsort()
    return called.flatten()[order], ids[:, None].expand_as(called).flatten()[order]


def merge_ids(names: Tensor, *, shared_id_space: bool = False) -> Tensor:
    """Return ids [num_rows] for names [num_rows, num_names]; rows that share a name share the id.

    The id is the least first name or, with ``shared_id_space``, the least of all names.
    """
    if shared_id_space:
        ids = names.amin(1)
        groups = torch.unique(names, return_inverse=True)[1]
    else:
        ids = names[:, 0]
        # Number the names of each column separately, so that columns never match.
        columns = [torch.unique(column, return_inverse=True)[1] for column in names.unbind(1)]
        groups = torch.stack([each + number * len(names) for number, each in enumerate(columns)], dim=1)
    largest = torch.iinfo(ids.dtype).max
    while True:
        least = torch.full((names.numel(),), largest, dtype=ids.dtype, device=ids.device)
        least = least.scatter_reduce(0, groups.flatten(), ids[:, None].expand_as(groups).flatten(), "amin")
        now = least[groups].amin(1) if len(names) else ids
        if torch.equal(now, ids):
            return now
        ids = now
