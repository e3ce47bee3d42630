"""Ids of the rows of a batch, which say what rows are the same example."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycl.distributed import all_sum, gather_detached, num_workers, rank
from raycl.distributed.device_copy import Download, upload
from raycl.losses.guide import Guide


@final
@dataclass(frozen=True, kw_only=True)
class ExampleIds:
    """Ids of this worker's queries and keys, int64 [local_batch]; equal ids mark the same query or key.

    A transform names rows instead, [rows, num_names]: a name is an id of a row or of its content. Rows that
    share a name in the same column are duplicates; with ``shared_id_space``, in any column. An
    :class:`IdExchange` replaces the names by ids that are the same on all workers.

    Attributes:
        query: ids of the queries.
        key: ids of the keys.
        negative: ids [num_negatives] of the explicit negatives of all workers, in the order of ranks, which count
            as keys; a transform names this worker's only. None if the batch has none.
        label: classes int64 [local_batch], None for pairs. An unlabeled row has -1 in a transform's names, and then
            a class of its own, which its duplicates share.
        weight: weights of the samples, [local_batch], or None; a transform reads them from the data; the ids of
            a batch have weights of mean 1 over all workers.
        shared_id_space: whether names of different columns are comparable.
        num_shown: the names of a key from this column on, with ``shared_id_space`` also of a query, are texts
            of its row that it does not show: negatives match by them, and two rows do not. None if all names are
            of shown texts.
        key_name: the names by which a store indexes the keys: the first ones.
        negative_name: the same for explicit negatives.
        num_negatives: the number of explicit negatives of each worker.
        names: all names by which a store may index a row of the batch, ascending, int64 [num_names]; None if names
            are ids.
        name_ids: the id of each of these names, int64 [num_names].
        guide: another encoder's embeddings of this worker's rows, which mask false negatives; None without a guide.
    """

    query: Tensor
    key: Tensor
    negative: Tensor | None = None
    label: Tensor | None = None
    weight: Tensor | None = None
    shared_id_space: bool = False
    num_shown: int | None = None
    key_name: Tensor | None = None
    negative_name: Tensor | None = None
    num_negatives: tuple[int, ...] = ()
    names: Tensor | None = None
    name_ids: Tensor | None = None
    guide: Guide | None = None

    @property
    def has_single_names(self) -> bool:
        """Whether each row has one name, which is its id."""
        return self.query.shape[1] == self.key.shape[1] == 1

    @property
    def stored_key(self) -> Tensor:
        """The names by which a store indexes the keys, [local_batch]."""
        return self.key if self.key_name is None else self.key_name

    def of(self, name: Tensor) -> Tensor:
        """Return the ids of stored rows with these names, both [num_rows]."""
        if self.names is None or self.name_ids is None:
            return name
        place = torch.searchsorted(self.names, name.contiguous()).clamp(max=len(self.names) - 1)
        return torch.where(self.names[place] == name, self.name_ids[place], name)

    def on(self, device: torch.device) -> Self:
        """Return the ids on a device, in one transfer, and in another one the guide's rows."""
        own = {name: each for name, each in vars(self).items() if isinstance(each, Tensor)}
        moved = dict(zip(own, upload([*own.values()], device), strict=True))
        guide = None if self.guide is None else self.guide.on(device)
        return replace(self, **moved, guide=guide)


def mean_one(weight: Tensor) -> Tensor:
    """Scale weights [local_batch] to a mean of 1 over all workers, in one small collective; zeros stay zeros.

    The mean of weight * loss over all rows is then the weighted mean, for any number of workers.
    """
    total = all_sum(weight.sum())
    return weight / torch.where(total > 0, total, 1.0) * (num_workers() * len(weight))


@final
class IdExchange:
    """Merges the names of all workers' rows into ids, on the host.

    The names of a batch travel during the previous step. The host waits for the device only for the first
    batch, and for a batch with more explicit negatives than there is room for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._capacity = device, 0

    def start(self, names: ExampleIds) -> Callable[[], ExampleIds]:
        """Send this worker's names; return a function that returns the ids of the batch. Both are collective."""
        if num_workers() == 1:
            return lambda: _merged(names, [_parts(names)])
        if names.has_single_names and names.negative is None:
            return lambda: _merged(names, [_parts(names)])
        sent = Download(self._gather(names))
        return lambda: self._receive(names, *sent.arrived())

    def _gather(self, names: ExampleIds) -> Tensor:
        """Return the message of each worker, [num_workers, size]: the number of negatives, and all names."""
        parts = [each.flatten() for each in (names.query, names.key)]
        count = 0
        if names.negative is not None:
            count, width = names.negative.shape
            padded = names.negative.new_zeros(self._capacity, width)
            fitting = names.negative[: self._capacity]
            padded[: len(fitting)] = fitting
            parts.append(padded.flatten())
        message = torch.cat([torch.tensor([count]), *parts])
        return gather_detached(upload([message[None]], self._device)[0])

    def _receive(self, names: ExampleIds, messages: Tensor) -> ExampleIds:
        most = int(messages[:, 0].max())
        if most > self._capacity:
            self._capacity = 1 << (most - 1).bit_length()  # seldom again
            messages = self._gather(names).cpu()
        sizes = [1, names.query.numel(), names.key.numel()]
        sizes.append(messages.shape[1] - sum(sizes))
        everyone = []
        for message in messages:
            count, query, key, padded = message.split(sizes)
            query, key = query.view_as(names.query), key.view_as(names.key)
            negative = None if names.negative is None else padded.view(-1, key.shape[1])[: int(count)]
            everyone.append((query, key, negative))
        return _merged(names, everyone)


Parts = tuple[Tensor, Tensor, Tensor | None]


def _parts(names: ExampleIds) -> Parts:
    return names.query, names.key, names.negative


def _merged(own: ExampleIds, everyone: list[Parts]) -> ExampleIds:
    """Return the ids of this worker's rows, given the names of all workers, or only its own."""
    query = torch.cat([parts[0] for parts in everyone]).numpy()
    key = torch.cat([parts[1] for parts in everyone]).numpy()
    local = len(own.query)
    first = rank() * local if len(everyone) > 1 else 0
    ours = slice(first, first + local)
    negatives = [parts[2] for parts in everyone if parts[2] is not None]
    if own.num_shown is not None and negatives:
        shown, name = own.num_shown, torch.cat(negatives)[:, 0].numpy()
        if own.shared_id_space:
            query, key = np.split(_without_unmatched(np.concatenate([query, key]), shown, name), 2)
        else:
            key = _without_unmatched(key, shown, name)
        negatives = [each[:, : key.shape[1]] for each in negatives]
    rows = np.concatenate([key, *(each.numpy() for each in negatives)])
    if own.shared_id_space:  # queries are keys of the other view, so a negative may be the same as both
        both = merge_ids(np.concatenate([query, rows]), shared_id_space=True)
        query_ids, ids, called = both[: len(query)], both[len(query) :], rows
    else:
        query_ids, ids, called = merge_ids(query), merge_ids(rows), rows[:, :1]
    query_id = _tensor(query_ids[ours])
    label = own.label
    if label is not None:  # a class of its own is below 0
        label = torch.where(label >= 0, label, ~(query_id & torch.iinfo(torch.int64).max))
    merged = replace(
        own,
        query=query_id,
        key=_tensor(ids[ours]),
        label=label,
        negative=_tensor(ids[len(key) :]) if negatives else None,
        num_negatives=tuple(len(each) for each in negatives),
    )
    if rows.shape[1] == 1:
        return merged
    names, place = np.unique(called, return_index=True)
    return replace(
        merged,
        key_name=_tensor(key[ours, 0]),
        negative_name=_tensor(rows[len(key) :, 0]) if negatives else None,
        names=_tensor(names),
        name_ids=_tensor(ids[place // called.shape[1]]),
    )


def merge_ids(names: NDArray[np.int64], *, shared_id_space: bool = False) -> NDArray[np.int64]:
    """Return ids [num_rows] for names [num_rows, num_names]; rows that share a name share the id.

    Duplicates are transitive. The id is the least first name or, with ``shared_id_space``, the least of all
    names.
    """
    num_rows, num_names = names.shape
    if num_names == 1 or not num_rows:
        return names[:, 0] if num_names else np.empty(0, np.int64)
    if shared_id_space:
        ids = names.min(1)
        numbers = np.unique(names, return_inverse=True)[1].reshape(names.shape)
    else:
        ids = names[:, 0]
        # Number the names of each column separately, so that columns never match.
        columns = [np.unique(column, return_inverse=True)[1] for column in names.T]
        numbers = np.stack([each + place * num_rows for place, each in enumerate(columns)], axis=1)
    from scipy.sparse import coo_array  # not at the start of every worker
    from scipy.sparse.csgraph import connected_components

    size = num_rows + names.size  # rows, then names
    edges = np.repeat(np.arange(num_rows), num_names), num_rows + numbers.ravel()
    graph = coo_array((np.ones(names.size, bool), edges), shape=(size, size))
    component = connected_components(graph, directed=False)[1][:num_rows]
    least = np.full(size, np.iinfo(np.int64).max)
    np.minimum.at(least, component, ids)
    return least[component]


def _without_unmatched(
    names: NDArray[np.int64], num_shown: int, negative_name: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the names of rows without those that no negative has; the first name fills the shorter rows."""
    shown, others, first = names[:, :num_shown], names[:, num_shown:], names[:, :1]
    is_kept = np.isin(others, negative_name) & (others != first)
    order = np.argsort(~is_kept, axis=1, kind="stable")[:, : is_kept.sum(1).max(initial=0)]
    return np.concatenate([shown, np.take_along_axis(np.where(is_kept, others, first), order, 1)], axis=1)


def _tensor(array: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
