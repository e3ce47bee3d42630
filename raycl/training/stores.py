"""A worker's store: rows fetched before the loss, embeddings or partition functions stored after the update.

The download of the embeddings starts before the loss is read. The host waits for the loss anyway, so
the download costs no wait of its own.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycl.config import RunConfig
from raycl.distributed import all_sum, gather_detached, num_workers, rank
from raycl.distributed.device_copy import Download, upload
from raycl.losses.objective import Partition, StoreBatch
from raycl.negatives import KeyQueue, MemoryBank
from raycl.negatives.bank import Bank
from raycl.negatives.client import MemoryBankClient, QueueClient
from raycl.negatives.spec import BankSpec, Precision
from raycl.ray_runtime import NEW_NODE_S
from raycl.training.group_bank import GroupBank
from raycl.training.views import Views


def bank_spec(config: RunConfig, *, output: str, name: str, num_samples: int | None) -> BankSpec:
    """Return the spec of the run's bank; without a store, it is the memory bank of a miner's documents."""
    kind = "memory_bank" if config.negatives.store == "none" else config.negatives.store
    is_queue = kind == "queue"
    dim, dtype = _stored_row(config)
    return BankSpec(
        name=config.bank.name or name,
        kind=kind,
        dim=dim,
        output=output,
        capacity=config.negatives.capacity if is_queue else num_samples or 0,
        dtype=dtype,
        wire_dtype="float16" if kind == "memory_bank" and config.bank.max_staleness else None,
        seed=config.seed,
        momentum=config.negatives.bank_momentum,
        num_shards=1 if is_queue else config.bank.shards,
        detached=config.bank.detached,
        has_text_ids=config.has_text_ids,
        # With autoscaling, the replacement of a lost node takes minutes.
        timeout_s=max(config.bank.timeout_s, NEW_NODE_S if config.autoscaling else 0.0),
    )


def build_store(
    config: RunConfig, bank: Bank | None, sample_id: NDArray[np.int64] | None, device: torch.device
) -> "Store":
    """Return this worker's store: a client of ``bank``, or a local store without one."""
    negatives, (dim, dtype) = config.negatives, _stored_row(config)
    if negatives.store == "none":
        return Store()
    if negatives.store == "queue":
        queue = KeyQueue(negatives.capacity, dim, dtype) if bank is None else QueueClient(bank, rank=rank())
        return QueueStore(queue, capacity=negatives.capacity, device=device)
    assert sample_id is not None, "a memory bank needs the sample ids of the run"
    is_partition = negatives.store == "partition"
    num_negatives = 0 if is_partition else negatives.num_negatives
    if bank is None:
        momentum = negatives.bank_momentum
        settings: dict[str, Any] = {"momentum": momentum, "dtype": dtype, "kind": negatives.store}
        slots = MemoryBank(sample_id, dim, seed=config.seed, **settings)
    else:
        barrier = partial(wait_for_all, device)
        client = MemoryBankClient(bank, sample_id, rank=rank(), num_workers=num_workers(), barrier=barrier)
        prefetches = config.bank.max_staleness > 0
        slots = GroupBank(client, num_negatives=num_negatives, prefetches=prefetches, device=device)
    return BankStore(slots, num_negatives=num_negatives, device=device, holds_partitions=is_partition)


def _stored_row(config: RunConfig) -> tuple[int, Precision]:
    """Return dim and type of the stored rows: embeddings, or the partition functions of a sample or of a pair's sides."""
    if config.negatives.store == "partition":
        return (2 if config.has_two_towers else 1), "float32"
    return config.projection_head.dim, config.bank.dtype


def wait_for_all(device: torch.device) -> None:
    """Wait for all workers; collective."""
    # Read the result on the host: NCCL calls return before the other workers arrive.
    all_sum(torch.zeros(1, device=device)).item()


class Store:
    """The interface of a training step to its store, and a store without rows: all negatives are in the batch."""

    def fetch(self, views: Views, *, step: int) -> StoreBatch:
        """Return the stored rows to compare with the queries of this batch."""
        return StoreBatch()

    def start_download(self, rows: Tensor, views: Views, key_step: Tensor | None = None) -> None:
        """Start to copy the rows [local_batch, dim] to store for these views to the host; collective.

        ``key_step`` are the steps of their weights, int64 [local_batch], if these differ from the current step.
        """

    def update(self, *, step: int) -> None:
        """Store the downloaded rows."""

    def save(self, *, step: int) -> None:
        """Write the bank's snapshot of this step, if actors hold the rows; collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; empty if actors hold the rows."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""

    def metrics(self, *, step: int, seconds: float) -> dict[str, float]:
        """Return the ages of the rows, in steps, and the fraction of ``seconds`` spent waiting for them.

        ``seconds`` is the time since the last call, and ``step`` is the last step. A queue reports its ages
        at the next step, a memory bank the ages of the last fetched rows.
        """
        return {}


@final
class QueueStore(Store):
    """The newest keys of all workers, the same on each of them."""

    def __init__(self, store: KeyQueue | QueueClient, *, capacity: int, device: torch.device) -> None:
        self._store, self._client = store, store if isinstance(store, QueueClient) else None
        self._queue = store.queue if isinstance(store, QueueClient) else store
        self._wait = _WaitMeter(self._client)
        self._on_device = None if device.type == "cpu" else _DeviceCopy(self._queue, capacity, device)

    def fetch(self, views: Views, *, step: int) -> StoreBatch:
        """Return all keys: the queue's own memory, on the host or on the device."""
        held = self._queue.negatives()
        steps = torch.from_numpy(held.step)
        if self._on_device is not None:
            return replace(self._on_device.fetch(len(self._queue)), negative_step=steps)
        rows, ids = torch.from_numpy(held.rows), torch.from_numpy(held.sample_id)
        return StoreBatch(negatives=rows, negative_id=ids, negative_step=steps)

    def start_download(self, rows: Tensor, views: Views, key_step: Tensor | None = None) -> None:
        """Gather the keys of all workers, in the order of ranks, and start to copy them to the host."""
        self._keys = gather_detached(rows), gather_detached(views.example_ids.stored_key)
        steps = () if key_step is None else (gather_detached(key_step),)
        self._download = Download(*self._keys, *steps)

    def update(self, *, step: int) -> None:
        """Push the keys."""
        if self._on_device is not None:
            self._on_device.write(*self._keys, first=self._queue.sequence)
        keys, ids, *steps = self._download.arrived()
        self._store.push(keys.numpy(), ids.numpy(), steps[0].numpy() if steps else step)

    def save(self, *, step: int) -> None:
        """Write the actor's snapshot, with the keys of all workers."""
        self._wait.save(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the queue, unless an actor holds it."""
        return {} if self._client else _as_tensors(self._queue.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the queue, unless an actor held it."""
        if not self._client:
            self._queue.load_state_dict(_as_arrays(state))
        if self._on_device is not None:
            self._on_device.copy(self._queue)

    def metrics(self, *, step: int, seconds: float) -> dict[str, float]:
        """Return ages, waiting time and restarts."""
        return _ages(self._queue.negatives().step, step + 1) | self._wait.metrics(seconds)


@final
class BankStore(Store):
    """A memory bank: the batch's own slots as keys or partition functions, and random slots as negatives.

    Every worker draws the same slots, and all queries of a step share them. Every worker has all new rows,
    and its own bank or a share of the bank in actors.
    """

    def __init__(
        self,
        bank: MemoryBank | GroupBank,
        *,
        num_negatives: int,
        device: torch.device,
        holds_partitions: bool = False,
    ) -> None:
        self._bank, self._num_negatives, self._device = bank, num_negatives, device
        self._client = bank.client if isinstance(bank, GroupBank) else None
        self._holds_partitions = holds_partitions
        self._wait = _WaitMeter(self._client)
        self._fetched_step = torch.empty(0, dtype=torch.int64)

    def fetch(self, views: Views, *, step: int) -> StoreBatch:
        """Return own and random slots; collective."""
        own = len(views)
        if isinstance(self._bank, GroupBank):
            rows, self._fetched_step, negative_id = self._bank.fetch(views, step=step)
        else:
            drawn = self._bank.draw(self._num_negatives, step=step)
            found = self._bank.read(np.concatenate([self._bank.slots_of(views.ids), drawn]))
            self._fetched_step = torch.from_numpy(found.step)
            rows, negative_id = upload([_tensor(found.rows), _tensor(found.sample_id[own:])], self._device)
        if self._holds_partitions:
            return StoreBatch(partition=Partition(rows))
        steps = self._fetched_step[own:]
        return StoreBatch(key=rows[:own], negatives=rows[own:], negative_id=negative_id, negative_step=steps)

    def initialize(self, rows: Tensor, sample_id: Tensor) -> None:
        """Set the slots of these samples [local_batch] to these embeddings; collective."""
        rows, sample_id = gather_detached(rows), gather_detached(sample_id)
        bank = self._bank.client if isinstance(self._bank, GroupBank) else self._bank
        bank.initialize(sample_id.cpu().numpy(), rows.cpu().numpy())

    def start_download(self, rows: Tensor, views: Views, key_step: Tensor | None = None) -> None:
        """Gather the embeddings of all workers, and start to copy them to the host."""
        if isinstance(self._bank, GroupBank):
            rows = self._bank.as_sent(rows)
        self._download = Download(gather_detached(views.sample_id), gather_detached(rows))

    def update(self, *, step: int) -> None:
        """Move the slots towards their new embeddings; collective."""
        ids, embeddings = self._download.arrived()
        self._bank.update(ids.numpy(), embeddings.numpy(), step)

    def save(self, *, step: int) -> None:
        """Write the actors' snapshot, with the updates of all workers.

        Prefetched rows are dropped, so that the next step reads the same rows as a resumed run.
        """
        if isinstance(self._bank, GroupBank):
            self._bank.drop()
        self._wait.save(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the bank, unless actors hold it."""
        return {} if isinstance(self._bank, GroupBank) else _as_tensors(self._bank.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the bank, unless actors held it."""
        if isinstance(self._bank, MemoryBank):
            self._bank.load_state_dict(_as_arrays(state))

    def metrics(self, *, step: int, seconds: float) -> dict[str, float]:
        """Return the ages of the fetched rows that were ever written, waiting time and restarts; collective."""
        fetched, measured = self._fetched_step.cpu().numpy(), self._wait.metrics(seconds)
        if self._client is not None:
            # Each worker knows of its own shards only, and a step waits for the slowest.
            values = gather_detached(torch.tensor([list(measured.values())], device=self._device))
            longest, restarts = values[:, 0].max().item(), values[:, 1].sum().item()
            measured = {"negatives_wait_fraction": longest, "bank_restarts": restarts}
        return _ages(fetched[fetched >= 0], step) | measured


@final
class _WaitMeter:
    """The time that steps wait for actors, except to write snapshots."""

    def __init__(self, client: QueueClient | MemoryBankClient | None) -> None:
        self._client = client
        self._excluded_s = self._reported_s = 0.0

    def save(self, step: int) -> None:
        """Write the snapshot of the actors, if any; collective."""
        if self._client is not None:
            before = self._client.waited_s
            self._client.save(step)
            self._excluded_s += self._client.waited_s - before

    def metrics(self, seconds: float) -> dict[str, float]:
        """Return the fraction of these seconds spent waiting, and the number of restarts."""
        if self._client is None:
            return {"negatives_wait_fraction": 0.0}
        waited_s = self._client.waited_s - self._excluded_s
        fraction, self._reported_s = (waited_s - self._reported_s) / max(seconds, 1e-9), waited_s
        return {"negatives_wait_fraction": fraction, "bank_restarts": float(self._client.restarts)}


@final
class _DeviceCopy:
    """The queue's rows on an accelerator, in the same slots."""

    def __init__(self, queue: KeyQueue, capacity: int, device: torch.device) -> None:
        held = queue.negatives()
        self._rows = torch.empty(capacity, held.rows.shape[1], dtype=_tensor(held.rows).dtype, device=device)
        self._ids = torch.empty(capacity, dtype=torch.int64, device=device)
        self.copy(queue)

    def copy(self, queue: KeyQueue) -> None:
        """Copy the whole queue."""
        held = queue.negatives()
        self._rows[: len(held)], self._ids[: len(held)] = upload(
            [_tensor(held.rows), _tensor(held.sample_id)], self._rows.device
        )

    def fetch(self, num_rows: int) -> StoreBatch:
        """Return the first slots."""
        return StoreBatch(negatives=self._rows[:num_rows], negative_id=self._ids[:num_rows])

    def write(self, keys: Tensor, ids: Tensor, *, first: int) -> None:
        """Write the keys to the slots of numbers ``first`` and up; beyond the capacity, the last keys stay."""
        capacity = len(self._rows)
        kept = slice(max(0, len(keys) - capacity), len(keys))
        slots = (torch.arange(len(keys), device=keys.device)[kept] + first) % capacity
        self._rows.index_copy_(0, slots, keys[kept].to(self._rows.dtype))
        self._ids.index_copy_(0, slots, ids[kept])


def _tensor(array: np.ndarray) -> Tensor:
    # An array from an actor may be read-only, which torch does not support.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _ages(steps: NDArray[np.int64], step: int) -> dict[str, float]:
    if not len(steps):
        return {}
    return {
        "negatives_age_mean": step - float(steps.mean()),
        "negatives_age_max": float(step - steps.min()),
    }


def _as_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in state.items()
    }


def _as_arrays(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in state.items()}
