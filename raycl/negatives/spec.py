"""What a bank is, as a value: its kind, its size, its shards and where its snapshots lie."""

from dataclasses import dataclass
from typing import Literal, final

import numpy as np

from raycl.errors import ConfigError
from raycl.storage import Place, absolute

Kind = Literal["queue", "memory_bank"]
Precision = Literal["float32", "float16"]


@final
@dataclass(frozen=True, kw_only=True)
class BankSpec:
    """A bank before it is started.

    Of a queue, row number n of the log lies in shard n % num_shards. Of a memory bank, each shard
    has a contiguous range of slots.

    Attributes:
        name: What others ask for it by; one bank of a name in a cluster.
        output: Address of the run; the snapshots lie below its ``bank``.
        capacity: Keys of the queue, or samples of the memory bank.
        dtype: Of the rows that are kept.
        wire_dtype: Of the rows that are sent; that of the rows kept unless told. A queue's rings
            hold what was sent, so that a ring filled anew is the same to the last bit.
        momentum: Of the slots of a memory bank.
        detached: Whether the bank outlives the driver that started it.
        timeout_s: How long to wait for a place in the cluster, and for a shard that is away.

    Raises:
        ConfigError: A value is impossible.
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
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        """Refuse what cannot be; make the output absolute, since Ray's processes run elsewhere."""
        object.__setattr__(self, "output", absolute(self.output))
        if not self.name or "/" in self.name:
            raise ConfigError(f"{self.name!r} cannot name a bank; set bank.name to a word without '/'")
        if self.kind not in ("queue", "memory_bank"):
            raise ConfigError(f"{self.kind!r} is no kind of bank; choose 'queue' or 'memory_bank'")
        for dtype in (self.dtype, self.wire_dtype or self.dtype):
            if dtype not in ("float32", "float16"):
                raise ConfigError(f"a bank has no rows of {dtype!r}; choose 'float32' or 'float16'")
        if min(self.dim, self.capacity, self.num_shards) < 1:
            raise ConfigError(
                f"a bank needs a dim, a capacity and shards of at least 1: came {self.dim}, {self.capacity} "
                f"and {self.num_shards}; give each of them"
            )
        if self.timeout_s <= 0:
            raise ConfigError(
                f"bank.timeout_s must be above 0, came {self.timeout_s:g}; the usual one is 120"
            )
        self._check_shards()

    @property
    def place(self) -> Place:
        """Where the bank keeps its snapshots."""
        return Place(self.output) / "bank"

    @property
    def row_dtype(self) -> np.dtype:
        """The type of the rows that are kept."""
        return np.dtype(self.dtype)

    @property
    def sent_dtype(self) -> np.dtype:
        """The type of the rows that are sent."""
        return np.dtype(self.wire_dtype or self.dtype)

    @property
    def first_slots(self) -> np.ndarray:
        """The first slot of each shard of a memory bank, and after them the capacity, int64 [num_shards + 1]."""
        return np.arange(self.num_shards + 1) * self.capacity // self.num_shards

    def rows_of(self, shard: int) -> int:
        """Return how many rows a shard holds when it is full."""
        if self.kind == "queue":
            return self.capacity // self.num_shards
        return int(np.diff(self.first_slots)[shard])

    def bytes_of(self, shard: int) -> int:
        """Return the memory of a full shard, in bytes: rows, and 8 each for id and step."""
        return self.rows_of(shard) * (self.dim * self.row_dtype.itemsize + 16)

    def actor_name(self, shard: int) -> str:
        """Return the name of a shard's actor."""
        return f"{self.name}/{shard}"

    def _check_shards(self) -> None:
        if self.kind == "queue" and self.capacity % self.num_shards:
            raise ConfigError(
                f"{self.capacity} keys cannot be shared evenly by {self.num_shards} shards; "
                "make negatives.capacity a multiple of bank.shards"
            )
        if self.num_shards > self.capacity:
            raise ConfigError(
                f"{self.num_shards} shards cannot share {self.capacity} samples; lower bank.shards"
            )
