"""A memory bank in actors, for a group of workers: one worker calls a shard, and passes its rows on to all."""

from typing import NamedTuple, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from raycl.distributed import RowExchange, gather_detached, num_workers, rank
from raycl.distributed.device_copy import Download, upload
from raycl.negatives.client import MemoryBankClient
from raycl.training.views import Views


@final
class GroupBank:
    """The slots that a group of workers reads and writes together; every method is collective.

    A shard gets one call a step, with the new rows of all workers and the slots that any of them reads. With
    ``prefetches``, the call for step t is made after step t - 2, and its rows travel to the workers after step
    t - 1: they lack the updates of that step, and no worker waits for a shard that answers within a step. Otherwise, and
    at the start of an epoch, the rows are asked for when they are needed, and lack no update.
    """

    def __init__(
        self, client: MemoryBankClient, *, num_negatives: int, prefetches: bool, device: torch.device
    ) -> None:
        self.client = client
        self._num_negatives, self._prefetches, self._device = num_negatives, prefetches, device
        self._following: NDArray[np.int64] | None = None  # the ids of this worker in the next step
        self._asked: NDArray[np.int64] | None = None  # the slots asked for, of all workers
        self._arriving: _Arriving | None = None  # the rows of the next step
        self._own_slots: Download | None = None  # of all workers, in the step after the next

    def fetch(self, views: Views, *, step: int) -> "Fetched":
        """Return own and drawn slots."""
        # A new iteration over an epoch has new arrays of ids, and may have other samples.
        if self._arriving is None or views.ids is not self._following:
            self.drop()
            self._arriving = self._ask_now(views, step)
        found = self._arriving.arrived()
        self._arriving = None
        if self._prefetches:
            self._following, after = (*views.next_ids, None, None)[:2]
            self._own_slots = None if after is None else self._gathered(after)
        return found

    def update(self, sample_id: NDArray[np.int64], rows: NDArray[np.float32], step: int) -> None:
        """Move the slots of ``sample_id`` towards ``rows``, both of all workers; prefetch the next two steps."""
        self.client.update(sample_id, rows, step)
        if self._asked is not None:
            self._arriving = self._answered()
        if self._own_slots is not None:
            self._ask(self._own_slots, step + 2)
            self._own_slots = None

    def as_sent(self, rows: Tensor) -> Tensor:
        """Return embeddings [n, dim] in the type of messages."""
        if self.client.sent_dtype == np.float32:
            return rows
        # Lengths do not matter, and small rows would underflow.
        return F.normalize(rows.detach().float(), dim=1).half()

    def drop(self) -> None:
        """Drop the rows on their way."""
        if self._arriving is not None:
            self._arriving.arrived()
        self._arriving = self._asked = self._own_slots = None

    def _ask_now(self, views: Views, step: int) -> "_Arriving":
        """Request the rows of this step and wait for them; request the rows of the next step."""
        own = self._gathered(views.ids)
        following = self._gathered(views.next_ids[0]) if self._prefetches and views.next_ids else None
        self._ask(own, step)
        arriving = self._answered()
        if following is not None:
            self._ask(following, step + 1)
        return arriving

    def _gathered(self, ids: NDArray[np.int64]) -> Download:
        """Start to send the slots of these samples of this worker to all workers."""
        (slots,) = upload([torch.from_numpy(self.client.slots_of(ids))], self._device)
        return Download(gather_detached(slots))

    def _ask(self, own_slots: Download, step: int) -> None:
        drawn = self.client.draw(self._num_negatives, step=step)
        self._asked = np.concatenate([own_slots.arrived()[0].numpy(), drawn])
        self.client.ask(self._asked)

    def _answered(self) -> "_Arriving":
        """Wait for the answers of this worker's shards, and start to send them to the workers."""
        assert self._asked is not None, "rows are asked for before they are answered"
        slots, self._asked = self._asked, None
        return _Arriving(self.client, slots, num_drawn=self._num_negatives, device=self._device)


class Fetched(NamedTuple):
    """Own and drawn slots, on the device."""

    rows: Tensor  # [local_batch + num_negatives, dim]
    step: Tensor  # [local_batch + num_negatives], int64
    negative_id: Tensor  # [num_negatives], the samples in the drawn slots


@final
class _Arriving:
    """Rows on their way from the workers that called their shards to those that need them.

    A worker receives the rows of its own slots and a share of the drawn ones. All workers then gather the drawn rows,
    so that no worker sends the same rows to every other one.
    """

    def __init__(
        self, client: MemoryBankClient, slots: NDArray[np.int64], *, num_drawn: int, device: torch.device
    ) -> None:
        """Wait for the client's part of the slots of all workers, the drawn ones last, and start the transfer."""
        first = len(slots) - num_drawn
        self._num_own, self._share = first // num_workers(), -(-num_drawn // num_workers())
        part = client.answer()
        self._type = part.rows.dtype, part.rows.shape[1]
        at = part.positions
        receivers = np.where(at < first, at // max(1, self._num_own), (at - first) // max(1, self._share))
        order = np.argsort(receivers, kind="stable")
        own, drawn = slots[:first], slots[first:]
        wanted = [each[rank() * size :][:size] for each, size in ((own, self._num_own), (drawn, self._share))]
        senders = client.callers_of(np.concatenate(wanted))
        # Rows arrive by sender; place[n] is where the row of this worker's slot n is among them.
        place = np.argsort(np.argsort(senders, kind="stable"), kind="stable")
        arrays = place, client.ids_at(drawn)
        host = _packed(part.rows[order], part.step[order]), *map(torch.from_numpy, arrays)
        records, self._place, self._drawn = upload(host, device)
        sent, received = (
            np.bincount(each, minlength=num_workers()).tolist() for each in (receivers, senders)
        )
        self._exchange = RowExchange(records, sent=sent, received=received)

    def arrived(self) -> Fetched:
        """Wait for own rows, and gather the drawn ones."""
        records = self._exchange.arrived()[self._place]
        if len(self._drawn):
            own, share = records[: self._num_own], records[self._num_own :]
            share = torch.cat([share, share.new_zeros(self._share - len(share), share.shape[1])])
            records = torch.cat([own, gather_detached(share)[: len(self._drawn)]])
        return Fetched(*_unpacked(records, *self._type), self._drawn)


def _packed(rows: np.ndarray, step: NDArray[np.int64]) -> Tensor:
    """Return rows and steps as bytes, uint8 [n, num_bytes]."""
    parts = [np.ascontiguousarray(each).view(np.uint8) for each in (rows, step[:, None])]
    return torch.from_numpy(np.concatenate(parts, axis=1))


def _unpacked(records: Tensor, dtype: np.dtype, dim: int) -> tuple[Tensor, Tensor]:
    """Return the rows [n, dim] and steps [n] in the bytes of ``_packed``."""
    num_bytes = dim * dtype.itemsize
    rows, step = records[:, :num_bytes].contiguous(), records[:, num_bytes:].contiguous()
    row_dtype = torch.float16 if dtype == np.float16 else torch.float32
    return rows.view(row_dtype), step.view(torch.int64)[:, 0]
