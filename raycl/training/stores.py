"""The step's side of a store of negatives: rows lent before the loss, keys taken after the update.

The copies of the keys begin before the loss is read, which the host waits for anyway: so it never waits for them.
"""

from collections.abc import Mapping
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycl.device_copy import Download, upload
from raycl.distributed import gather_detached
from raycl.negatives import KeyQueue, MemoryBank
from raycl.negatives.bank_client import MemoryBankClient, QueueClient
from raycl.training.objectives import StoreBatch
from raycl.training.views import Views


class Store(Protocol):
    """What a step asks of a store, whichever it is and wherever it is held."""

    def lend(self, views: Views, *, step: int) -> StoreBatch:
        """Return what the queries of this batch are compared with."""
        ...

    def fetch(self, rows: Tensor, views: Views, key_id: Tensor) -> None:
        """Begin to fetch the embeddings [local_batch, dim] of this batch, known by these ids; collective."""
        ...

    def take(self, *, step: int) -> None:
        """Keep the fetched embeddings."""
        ...

    def save(self, *, step: int) -> None:
        """Let an actor that holds the rows write its snapshot of this step; collective."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep: nothing, if an actor writes its own snapshot."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        ...

    def metrics(self, *, step: int, seconds: float) -> dict[str, float]:
        """Return how old the rows are, in steps, and the fraction of ``seconds`` spent waiting for them.

        The seconds are those since this was asked last; ``step`` was just made. A queue's ages are
        those at the next step, a bank's those of the rows lent last.
        """
        ...


@final
class NoStore:
    """All negatives are of the batch."""

    def lend(self, views: Views, *, step: int) -> StoreBatch:
        """Lend nothing."""
        return StoreBatch()

    def fetch(self, rows: Tensor, views: Views, key_id: Tensor) -> None:
        """Fetch nothing."""

    def take(self, *, step: int) -> None:
        """Take nothing."""

    def save(self, *, step: int) -> None:
        """Write nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load nothing."""

    def metrics(self, *, step: int, seconds: float) -> dict[str, float]:
        """Return nothing."""
        return {}


@final
class QueueStore:
    """The newest keys of all workers, the same on each of them."""

    def __init__(self, queue: KeyQueue | QueueClient, *, capacity: int, device: torch.device) -> None:
        self._queue, self._waiting = queue, _Waiting(queue)
        self._on_device = None if device.type == "cpu" else _DeviceCopy(queue, capacity, device)

    def lend(self, views: Views, *, step: int) -> StoreBatch:
        """Lend all keys there are, the queue's own memory."""
        if self._on_device is not None:
            return self._on_device.lend(len(self._queue))
        held = self._queue.negatives()
        return StoreBatch(negatives=torch.from_numpy(held.rows), negative_id=torch.from_numpy(held.sample_id))

    def fetch(self, rows: Tensor, views: Views, key_id: Tensor) -> None:
        """Begin to fetch the keys of all workers, in the order of ranks."""
        self._keys = gather_detached(rows), gather_detached(key_id)
        self._fetched = Download(*self._keys)

    def take(self, *, step: int) -> None:
        """Push the keys."""
        if self._on_device is not None:
            self._on_device.write(*self._keys, first=self._queue.sequence)
        keys, ids = self._fetched.arrived()
        self._queue.push(keys.numpy(), ids.numpy(), step)

    def save(self, *, step: int) -> None:
        """Let the actor write its snapshot, with the keys of all workers."""
        self._waiting.save(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the queue, unless an actor holds it."""
        return {} if isinstance(self._queue, QueueClient) else _as_tensors(self._queue.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Fill the queue, unless an actor held it."""
        if isinstance(self._queue, KeyQueue):
            self._queue.load_state_dict(_as_arrays(state))
        if self._on_device is not None:
            self._on_device.fill(self._queue)

    def metrics(self, *, step: int, seconds: float) -> dict[str, float]:
        """Return ages, waiting time and restarts."""
        return _ages(self._queue.negatives().step, step + 1) | self._waiting.metrics(seconds)


@final
class BankStore:
    """A slot for every sample: the batch's own slots as keys, slots drawn at random as negatives.

    Every worker draws the same slots, and all queries of a step share them.
    """

    def __init__(
        self, bank: MemoryBank | MemoryBankClient, *, num_negatives: int, device: torch.device
    ) -> None:
        self._bank, self._num_negatives, self._device = bank, num_negatives, device
        self._waiting = _Waiting(bank)
        self._lent_step: NDArray[np.int64] = np.empty(0, np.int64)

    def lend(self, views: Views, *, step: int) -> StoreBatch:
        """Lend own and drawn slots; ask for those of the next step, which then come meanwhile."""
        lent = self._bank.read(self._slots(views.ids, step))
        if isinstance(self._bank, MemoryBankClient) and views.next_ids is not None:
            self._bank.prefetch(self._slots(views.next_ids, step + 1))
        self._lent_step = lent.step
        rows, ids = upload([_tensor(lent.rows), _tensor(lent.sample_id)], self._device)
        own = len(views)
        return StoreBatch(key=rows[:own], negatives=rows[own:], negative_id=ids[own:])

    def fill(self, rows: Tensor, sample_id: Tensor) -> None:
        """Let the slots of these samples [local_batch] begin at these embeddings; collective."""
        if isinstance(self._bank, MemoryBank):
            rows, sample_id = gather_detached(rows), gather_detached(sample_id)
        self._bank.fill(sample_id.cpu().numpy(), rows.cpu().numpy())

    def fetch(self, rows: Tensor, views: Views, key_id: Tensor) -> None:
        """Begin to fetch the batch's embeddings, and those of other workers if each holds a bank."""
        if isinstance(self._bank, MemoryBankClient):
            self._fetched = Download(torch.from_numpy(views.ids), rows)
        else:
            self._fetched = Download(gather_detached(views.sample_id), gather_detached(rows))

    def take(self, *, step: int) -> None:
        """Move the slots towards their new embeddings."""
        ids, embeddings = self._fetched.arrived()
        self._bank.update(ids.numpy(), embeddings.numpy(), step)

    def save(self, *, step: int) -> None:
        """Let the actors write their snapshots, with the updates of all workers."""
        self._waiting.save(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the bank, unless an actor holds it."""
        return {} if isinstance(self._bank, MemoryBankClient) else _as_tensors(self._bank.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Fill the bank, unless an actor held it."""
        if isinstance(self._bank, MemoryBank):
            self._bank.load_state_dict(_as_arrays(state))

    def metrics(self, *, step: int, seconds: float) -> dict[str, float]:
        """Return ages, of the rows lent last that were ever written, waiting time and restarts."""
        return _ages(self._lent_step[self._lent_step >= 0], step) | self._waiting.metrics(seconds)

    def _slots(self, ids: NDArray[np.int64], step: int) -> NDArray[np.int64]:
        drawn = self._bank.draw(self._num_negatives, step=step)
        return np.concatenate([self._bank.slots_of(ids), drawn])


@final
class _Waiting:
    """How long steps were blocked on the actors, their snapshots left out."""

    def __init__(self, store: KeyQueue | QueueClient | MemoryBank | MemoryBankClient) -> None:
        self._client = store if isinstance(store, QueueClient | MemoryBankClient) else None
        self._excluded_s = self._told_s = 0.0

    def save(self, step: int) -> None:
        """Let the actors write their snapshots, if there are any; collective."""
        if self._client is not None:
            before = self._client.waited_s
            self._client.save(step)
            self._excluded_s += self._client.waited_s - before

    def metrics(self, seconds: float) -> dict[str, float]:
        """Return the fraction of these seconds spent waiting, and how often a shard came back."""
        if self._client is None:
            return {"negatives_wait_fraction": 0.0}
        waited_s = self._client.waited_s - self._excluded_s
        fraction, self._told_s = (waited_s - self._told_s) / max(seconds, 1e-9), waited_s
        return {"negatives_wait_fraction": fraction, "bank_restarts": float(self._client.restarts)}


@final
class _DeviceCopy:
    """The queue's rows on an accelerator, written slot by slot as the queue is."""

    def __init__(self, queue: KeyQueue | QueueClient, capacity: int, device: torch.device) -> None:
        held = queue.negatives()
        self._rows = torch.empty(capacity, held.rows.shape[1], dtype=_tensor(held.rows).dtype, device=device)
        self._ids = torch.empty(capacity, dtype=torch.int64, device=device)
        self.fill(queue)

    def fill(self, queue: KeyQueue | QueueClient) -> None:
        """Copy the whole queue."""
        held = queue.negatives()
        self._rows[: len(held)], self._ids[: len(held)] = upload(
            [_tensor(held.rows), _tensor(held.sample_id)], self._rows.device
        )

    def lend(self, num_rows: int) -> StoreBatch:
        """Lend the rows there are."""
        return StoreBatch(negatives=self._rows[:num_rows], negative_id=self._ids[:num_rows])

    def write(self, keys: Tensor, ids: Tensor, *, first: int) -> None:
        """Put the keys into the slots of the numbers from ``first`` on; of too many, the last."""
        capacity = len(self._rows)
        kept = slice(max(0, len(keys) - capacity), len(keys))
        slots = (torch.arange(len(keys), device=keys.device)[kept] + first) % capacity
        self._rows.index_copy_(0, slots, keys[kept].to(self._rows.dtype))
        self._ids.index_copy_(0, slots, ids[kept])


def _tensor(array: np.ndarray) -> Tensor:
    # What came from an actor may be read-only, and torch has no such tensors.
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
