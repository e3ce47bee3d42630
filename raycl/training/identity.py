"""Which rows of all workers are one thing, by any of their names."""

from typing import NamedTuple

import torch
from torch import Tensor

from raycl.distributed import gather_detached, gather_uneven, num_workers, rank
from raycl.training.views import Known


class Ids(NamedTuple):
    """Ids of this worker's queries and keys [local_batch], and of its explicit negatives, if it has any.

    Equal ids are the same query, or the same key; negatives are keys.
    """

    query: Tensor
    key: Tensor
    negative: Tensor | None = None


def identify(known: Known) -> Ids:
    """Return one id for each thing, the same on all workers; collective if there are several names.

    A document that came twice, once under another id and once in other words, is one thing with
    both: its id is the least of the first names of all that it came as.
    """
    negative = known.negative
    if known.key.shape[1] == 1:
        key, of_negatives = known.key[:, 0], None if negative is None else negative[:, 0]
    else:
        key, of_negatives = _identify_keys(known.key, negative)
    return Ids(_identify_queries(known.query), key, of_negatives)


def _identify_queries(names: Tensor) -> Tensor:
    if names.shape[1] == 1:
        return names[:, 0]
    ids = unified(gather_detached(names))
    return ids[rank() * len(names) :][: len(names)]


def _identify_keys(names: Tensor, negative: Tensor | None) -> tuple[Tensor, Tensor | None]:
    keys = gather_detached(names)
    if negative is None:
        return unified(keys)[rank() * len(names) :][: len(names)], None
    # Each worker has another number of them.
    whose = torch.full((len(negative),), rank(), device=negative.device)
    all_negatives, whose = gather_uneven(negative, whose) if num_workers() > 1 else (negative, whose)
    ids = unified(torch.cat([keys, all_negatives]))
    own = ids[rank() * len(names) :][: len(names)]
    return own, ids[len(keys) :][whose == rank()]


def unified(names: Tensor) -> Tensor:
    """Return one id a row, [num_rows], of names [num_rows, num_names]: rows with a common name share it."""
    ids = names[:, 0]
    groups = [torch.unique(column, return_inverse=True)[1] for column in names.unbind(1)]
    while True:
        before = ids
        for group in groups:
            least = torch.full_like(ids, torch.iinfo(ids.dtype).max).scatter_reduce(0, group, ids, "amin")
            ids = least[group]
        if torch.equal(ids, before):
            return ids
