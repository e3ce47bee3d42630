"""What clients and shards of a bank say to one another."""

from typing import Any, NamedTuple

import numpy as np

from raycl.negatives.spec import BankSpec


class Reply(NamedTuple):
    """An answer, and which life of the shard's process gave it."""

    incarnation: str
    value: Any


class ShardInfo(NamedTuple):
    """What a shard says of itself."""

    plan: BankSpec
    attempt: int
    pid: int
    num_slots: int  # that are in use, so that a reader knows how far to walk
    first_missing: int  # number of the first row that a queue lacks; 0 for a memory bank


class Part(NamedTuple):
    """Rows of a queue with their numbers in the log."""

    numbers: np.ndarray  # [n], ascending
    rows: np.ndarray  # [n, dim]
    sample_id: np.ndarray  # [n]
    step: np.ndarray  # [n]


class Update(NamedTuple):
    """Rows for a memory bank; ``serial`` rises with each update of one client."""

    client: str
    serial: int
    sample_id: np.ndarray  # [n]
    rows: np.ndarray  # [n, dim]
    step: int
