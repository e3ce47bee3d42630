"""Actors of a memory bank in this process, without Ray."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from raycl.negatives import rpc
from raycl.negatives.actor import MemoryBankActor
from raycl.negatives.bank import Bank
from raycl.negatives.snapshot import write_samples
from raycl.negatives.spec import BankSpec


class Shard:
    """An actor, which notes its calls."""

    def __init__(self, spec: BankSpec, number: int) -> None:
        self.actor, self.calls = MemoryBankActor(spec, number), list[str]()

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self.calls.append(method)
            return getattr(self.actor, method)(*arguments)

        return SimpleNamespace(remote=remote)


@contextmanager
def bank_in_process(spec: BankSpec) -> Iterator[Bank]:
    """Start the bank of samples 0 to ``capacity`` in this process."""
    write_samples(spec, np.arange(spec.capacity))
    with patch.object(rpc, "ray", SimpleNamespace(get=lambda answer, timeout: answer)):
        yield Bank(spec, [Shard(spec, number) for number in range(spec.num_shards)])
