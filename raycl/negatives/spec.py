"""The specification of a bank: kind, size, shards and output."""

from dataclasses import dataclass
from typing import Literal, final

import numpy as np

from raycl.errors import ConfigError
from raycl.storage import Place, absolute

Kind = Literal["queue", "memory_bank", "partition"]
Precision = Literal["float32", "float16"]


@final
@dataclass(frozen=True, kw_only=True)
class BankSpec:
    """The specification of a bank.

    One actor holds a queue. A memory bank, of rows or of partition functions, may have several shards, one
    actor each; a shard is a contiguous range of slots.

    Attributes:
        name: Identifies the bank; unique in a cluster, without ``/``.
        output: Address of the run; the snapshots are in its folder ``bank``.
        capacity: Keys of the queue, or samples of the memory bank.
        dtype: Type of the stored rows.
        wire_dtype: Type of the rows of a memory bank in messages; None for ``dtype``.
        momentum: Momentum of the slots of a memory bank.
        detached: Whether the bank outlives the driver that started it.
        has_text_ids: Whether the ids of its rows are hashes of texts, not sample ids.
        timeout_s: How long to wait for a place in the cluster, and for a shard that is away.

    Raises ``ConfigError`` if there are more shards than samples.
    """

    name: str
    kind: Kind
    dim: int
    output: str
    capacity: int
    dtype: Precision = "float32"
    wire_dtype: Precision | None = None
    seed: int = 0
    momentum: float = 0.5
    num_shards: int = 1
    detached: bool = False
    has_text_ids: bool = False
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        """Validate, and make the output absolute: Ray's processes run in other folders."""
        object.__setattr__(self, "output", absolute(self.output))
        assert "/" not in self.name
        if self.num_shards > self.capacity:
            raise ConfigError(
                f"{self.num_shards} shards cannot share {self.capacity} samples; lower bank.shards"
            )

    @property
    def place(self) -> Place:
        """Folder of the snapshots."""
        return Place(self.output) / "bank"

    @property
    def row_dtype(self) -> np.dtype:
        """Type of the stored rows."""
        return np.dtype(self.dtype)

    @property
    def sent_dtype(self) -> np.dtype:
        """Type of the rows in messages."""
        return np.dtype(self.wire_dtype or self.dtype)

    @property
    def first_slots(self) -> np.ndarray:
        """First slot of each shard of a memory bank, and then the capacity, int64 [num_shards + 1]."""
        return np.arange(self.num_shards + 1) * self.capacity // self.num_shards

    def rows_of(self, shard: int) -> int:
        """Return how many rows a shard holds when it is full."""
        return int(np.diff(self.first_slots)[shard])

    def bytes_of(self, shard: int) -> int:
        """Return the memory of a full shard, in bytes: rows, and 8 each for id and step."""
        return self.rows_of(shard) * (self.dim * self.row_dtype.itemsize + 16)

    def actor_name(self, shard: int) -> str:
        """Return the name of a shard's actor."""
        return f"{self.name}/{shard}"
