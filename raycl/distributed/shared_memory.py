"""Send small messages between the workers of one machine through memory that all of them map.

Synchronized BatchNorm waits for a message in every layer, forward and backward. A message takes half a
millisecond through gloo and the loopback network, and a hundredth of that through memory.
"""

import mmap
import os
import platform
import sys
import time
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from raycl.errors import RayclError

MAX_BYTES = 2**20  # of one worker's message
_FOLDER = Path("/dev/shm")
_LINE = 64  # bytes of a cache line; each worker's counter has its own
_NUM_YIELDS = 200
_NAP_S = 5e-5
_TIMEOUT_S = 1_800.0  # as long as gloo waits


@final
class SharedMemory:
    """A memory where every worker writes its message and reads the messages of all others.

    Messages alternate between two halves. A worker writes message n, then sets its counter to n. To
    write n it must have seen all counters at n - 1, and a counter reaches n - 1 only after its owner has
    read message n - 2. So no message is overwritten before all workers have read it.
    """

    def __init__(self, name: str, *, rank: int, num_workers: int) -> None:
        """Map the memory ``name``; create it unless another worker has.

        Raises:
            OSError: This machine has no shared memory, or too little.
        """
        # Without fences, "message before counter" holds only if stores become visible in order.
        if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
            raise OSError("stores become visible in order on x86 only")
        self._rank, self._num_workers = rank, num_workers
        self._path = _FOLDER / name
        header = -(-num_workers * _LINE // mmap.PAGESIZE) * mmap.PAGESIZE
        size = header + 2 * num_workers * MAX_BYTES
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Allocate now: a full /dev/shm would kill the process at a later write.
            os.posix_fallocate(file, 0, size)
            memory = mmap.mmap(file, size)
        finally:
            os.close(file)
        # Per worker: the number of its last message, and the sizes of the messages in both halves.
        self._counters = memoryview(memory)[:header].cast("q")
        self._messages = torch.frombuffer(memory, dtype=torch.uint8)[header:].view(2, num_workers, MAX_BYTES)
        self._number = 0

    def greet(self) -> None:
        """Set the first counter, which shows the other workers that they map the same memory."""
        self._number = 1
        self._set_counter(num_bytes=0)

    def met_all(self) -> bool:
        """Return whether every worker has set its first counter here."""
        return all(self._number_of(each) == 1 for each in range(self._num_workers))

    def unlink(self) -> None:
        """Remove the name, so that the memory is freed with the last worker that maps it."""
        self._path.unlink(missing_ok=True)

    def gather(self, rows: Tensor) -> Tensor:
        """Stack the rows of all workers, [num_workers * local_batch, ...]; at most ``MAX_BYTES`` each.

        Raises:
            RayclError: The messages differ in size, or one did not arrive within half an hour.
        """
        messages = self._exchange(rows)
        stacked = rows.new_empty(self._num_workers * rows.shape[0], *rows.shape[1:])
        stacked.view(self._num_workers, -1).view(torch.uint8).copy_(messages)
        return stacked

    def sum(self, value: Tensor, out: Tensor) -> Tensor:
        """Write the elementwise sum over all workers to ``out`` and return it.

        ``out`` is contiguous and may be ``value`` itself. Raises the errors of :meth:`gather`.
        """
        parts = self._exchange(value).view(value.dtype)
        # For two workers, torch.add takes half the time of torch.sum.
        if len(parts) == 2:
            torch.add(*parts, out=out.view(-1))
        else:
            torch.sum(parts, dim=0, dtype=value.dtype, out=out.view(-1))
        return out

    def _exchange(self, rows: Tensor) -> Tensor:
        """Return the bytes of all workers' rows, [num_workers, num_bytes], valid until the next message."""
        message = rows.detach().contiguous().view(-1).view(torch.uint8)
        num_bytes = message.numel()
        self._number += 1
        half = self._messages[self._number % 2]
        half[self._rank, :num_bytes] = message
        self._set_counter(num_bytes)
        for other in range(self._num_workers):
            self._wait_for(other, num_bytes)
        return half[:, :num_bytes]

    def _wait_for(self, other: int, num_bytes: int) -> None:
        num_tries, deadline = 0, None
        while self._number_of(other) < self._number:
            num_tries += 1
            if num_tries < _NUM_YIELDS:
                os.sched_yield()
                continue
            # The other worker is late: yield the core.
            time.sleep(_NAP_S)
            deadline = deadline or time.monotonic() + _TIMEOUT_S
            if time.monotonic() > deadline:
                raise RayclError(f"worker {other} sent nothing for {_TIMEOUT_S:.0f} s")
        if self._bytes_of(other) != num_bytes:
            raise RayclError(
                f"worker {self._rank} sends {num_bytes} bytes and worker {other} {self._bytes_of(other)}; "
                "all workers must send rows of the same shape and type"
            )

    def _set_counter(self, num_bytes: int) -> None:
        self._counters[self._line(self._rank) + 1 + self._number % 2] = num_bytes
        self._counters[self._line(self._rank)] = self._number

    def _number_of(self, rank: int) -> int:
        return self._counters[self._line(rank)]

    def _bytes_of(self, rank: int) -> int:
        return self._counters[self._line(rank) + 1 + self._number % 2]

    @staticmethod
    def _line(rank: int) -> int:
        return rank * _LINE // 8
