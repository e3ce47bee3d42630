"""Simulated workers for ``scale.py``: real clients of a bank, several in one process, a thread each.

Every row that they write follows from (sample, step), so that a reader can check it.
"""

import contextlib
import functools
import itertools
import math
import os
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, final

import numpy as np
import ray

from raycl.negatives.bank import Bank
from raycl.negatives.client import MemoryBankClient, Part, QueueClient
from raycl.negatives.store import Negatives

NUM_PATTERNS = 4_096
_NUM_CHECKED = 64  # of the rows of a step: checking all would cost more than the step
_FILLED_A_CALL = 16_384
# Where struct tcp_info of linux/tcp.h has the bytes acknowledged by the other side, then those received.
_TCP_BYTES = struct.Struct("=120x2Q")


@final
@dataclass(frozen=True, kw_only=True)
class Work:
    """The writes of the simulated workers, and the expected rows."""

    kind: str
    num_workers: int
    num_rows: int
    local_batch: int
    num_negatives: int
    dim: int

    @property
    def batch_size(self) -> int:
        """Rows of all workers in a step."""
        return self.num_workers * self.local_batch

    def ids(self, step: int, ranks: slice = slice(None)) -> np.ndarray:
        """Return the samples of a step, of all workers or some, int64: each once until all were there."""
        numbers = step * self.batch_size + np.arange(self.batch_size)
        return self.samples_of(numbers.reshape(self.num_workers, -1)[ranks].reshape(-1))

    def samples_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sample of each row that was ever made, counted from 0 over workers and steps."""
        return numbers % self.num_rows * self._stride() % self.num_rows

    def patterns(self) -> np.ndarray:
        """Return the rows that embeddings are taken from, unit length, float32 [NUM_PATTERNS, dim]."""
        drawn = np.random.default_rng(0).standard_normal((NUM_PATTERNS, self.dim), np.float32)
        return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)

    def _stride(self) -> int:
        """Return a step over the samples that meets each of them, far from the one before."""
        start = int(0.618 * self.num_rows)
        return next(each for each in itertools.count(start) if math.gcd(each, self.num_rows) == 1)


def pattern_of(sample_id: np.ndarray, step: np.ndarray | int) -> np.ndarray:
    """Return which pattern the embedding of each sample is at a step; -1 is before the first."""
    return (sample_id * 31 + (np.asarray(step) + 1) * 17) % NUM_PATTERNS


def num_wrong(found: Negatives, patterns: np.ndarray) -> int:
    """Count the rows that do not match their sample and step, to the rounding of float16."""
    right = patterns[pattern_of(found.sample_id, found.step)]
    return int((np.abs(found.rows - right).max(axis=1) > 2e-3).sum())


class Spent(NamedTuple):
    """The cost of some steps in one process."""

    waited_s: float  # summed over clients
    num_calls: int
    sent: int  # bytes of the arrays in calls, and in answers where they are counted
    received: int
    tcp_sent: int
    tcp_received: int
    num_wrong: int


def add_up(spent: Iterable[Spent]) -> Spent:
    """Return the sum of each."""
    return Spent._make(map(sum, zip(*spent, strict=True)))


@final
class CountedActor:
    """A shard's handle that counts the bytes sent through it."""

    def __init__(self, actor: Any) -> None:
        self._actor, self._actor_id = actor, actor._actor_id
        self.keeps_answers = False
        self.forget()

    def forget(self) -> None:
        """Reset the counters."""
        self.num_calls = self.sent = 0
        self.answers: list[Any] = []

    def received(self) -> int:
        """Return the bytes of the arrays in the answers that were kept."""
        return sum(array_bytes(ray.get(answer)) for answer in self.answers)

    def __getattr__(self, method: str) -> Any:
        """Return a remote method of the actor."""
        return SimpleNamespace(remote=functools.partial(self._call, method))

    def _call(self, method: str, *arguments: Any) -> Any:
        self.num_calls += 1
        self.sent += array_bytes(arguments)
        reference = getattr(self._actor, method).remote(*arguments)
        if self.keeps_answers:
            self.answers.append(reference)
        return reference


def array_bytes(message: Any) -> int:
    """Return the bytes of all arrays in nested tuples and rows of a store."""
    if isinstance(message, Negatives):
        return array_bytes(message.arrays())
    if isinstance(message, np.ndarray):
        return message.nbytes
    return sum(map(array_bytes, message)) if isinstance(message, tuple) else 0


def tcp_bytes() -> tuple[int, int]:
    """Return the bytes that this process's open connections have sent and received, as the kernel counts."""
    sent = received = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed, no socket, or none of TCP
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                facts = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_BYTES.size)
                acknowledged, came = _TCP_BYTES.unpack(facts)
                sent, received = sent + acknowledged, received + came
    return sent, received


def process_seconds(pid: int) -> float:
    """Return the CPU seconds of a process of this machine, to the nanosecond."""
    return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid has it


def thread_seconds(pid: int) -> dict[str, float]:
    """Return the CPU seconds of each thread of a process, to the kernel's tick."""
    tick, found = os.sysconf("SC_CLK_TCK"), {}
    for each in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # threads come and go
            fields = (each / "stat").read_text().rpartition(")")[2].split()
            found[each.name] = (int(fields[11]) + int(fields[12])) / tick
    return found


@final
class ClientGroup:
    """Some of the workers; as an actor, so that they are where training's workers are."""

    def pid(self) -> int:
        """Return the number of this process."""
        return os.getpid()

    def join(self, bank: Bank, work: Work, ranks: list[int]) -> float:
        """Make the clients of these ranks; return the seconds that one took."""
        self._work, self._patterns, self._ranks = work, work.patterns(), ranks
        self._batch = self._patterns[:0], np.empty(0, np.int64)
        self._asked = self._asks = np.empty(0, np.int64)
        self._first_slots = bank.spec.first_slots.tolist()
        self._actors = [[CountedActor(actor) for actor in bank.actors] for _ in ranks]
        since = time.perf_counter()
        self._clients: list[Any] = []
        for rank, actors in zip(ranks, self._actors, strict=True):
            counted = Bank(bank.spec, actors)
            if work.kind == "queue":
                self._clients.append(QueueClient(counted, rank=rank))
            else:
                size: dict[str, Any] = {"rank": rank, "num_workers": work.num_workers}
                self._clients.append(MemoryBankClient(counted, np.arange(work.num_rows), **size))
                # The ids of one process's clients are held once: a real worker has a process of its own.
                self._clients[-1]._samples = self._clients[0]._samples
        return (time.perf_counter() - since) / max(len(ranks), 1)

    def fill(self) -> None:
        """Give the shards of this group their first rows, in the order of slots."""
        work = self._work
        for rank, client in zip(self._ranks, self._clients, strict=True):
            for shard in range(rank, len(self._first_slots) - 1, work.num_workers):
                first, stop = self._first_slots[shard : shard + 2]
                for start in range(first, stop, _FILLED_A_CALL):
                    ids = np.arange(start, min(start + _FILLED_A_CALL, stop))
                    client.initialize(ids, self._patterns[pattern_of(ids, -1)])

    def run(self, first_step: int, num_steps: int, *, keeps_answers: bool = False) -> Spent:
        """Make steps, all threads abreast; every step's rows are looked at."""
        if self._work.kind == "memory_bank":
            self._asks = self._slots(first_step + 1)
            for client in self._clients:
                client.ask(self._asks)  # the question of the step before the first
        for each in itertools.chain(*self._actors):
            each.forget()
            each.keeps_answers = keeps_answers
        waited_s, before = self._waited_s(), tcp_bytes()
        barrier = threading.Barrier(len(self._clients), action=self._prepare(first_step))
        step = self._queue_step if self._work.kind == "queue" else self._bank_step

        def make_steps(place: int) -> int:
            try:
                wrong = 0
                for number in range(first_step, first_step + num_steps):
                    barrier.wait()
                    wrong += step(place, number)
                return wrong
            except BaseException:
                barrier.abort()  # or the others would wait for this one for ever
                raise

        with ThreadPoolExecutor(len(self._clients)) as threads:
            wrong = sum(threads.map(make_steps, range(len(self._clients))))
        waited_s = self._waited_s() - waited_s
        sent, received = (after - then for after, then in zip(tcp_bytes(), before, strict=True))
        actors = list(itertools.chain(*self._actors))
        return Spent(
            waited_s=waited_s,
            num_calls=sum(each.num_calls for each in actors),
            sent=sum(each.sent for each in actors),
            received=sum(each.received() for each in actors),
            tcp_sent=sent,
            tcp_received=received,
            num_wrong=wrong,
        )

    def flush(self) -> int:
        """Wait until the bank has everything; return how many restarts the clients have seen."""
        for client in self._clients:
            client.flush()
        return sum(client.restarts for client in self._clients)

    def _prepare(self, first_step: int) -> Callable[[], None]:
        """Return the work of one step: the batch of all workers, which every process makes instead of gathering it."""
        numbers = itertools.count(first_step)

        def prepare() -> None:
            step = next(numbers)
            ids = self._work.ids(step)
            self._batch = self._patterns[pattern_of(ids, step)], ids
            if self._work.kind == "memory_bank":
                self._asked, self._asks = self._asks, self._slots(step + 2)

        return prepare

    def _queue_step(self, place: int, step: int) -> int:
        self._clients[place].push(*self._batch, step)
        return 0

    def _bank_step(self, place: int, step: int) -> int:
        """Write this step's rows, receive the next step's, and ask for those of the step after, as a group does."""
        client, (rows, ids) = self._clients[place], self._batch
        client.update(ids, rows, step)
        part = client.answer()
        client.ask(self._asks)
        return self._check(part, self._asked[part.positions], step)

    def _slots(self, step: int) -> np.ndarray:
        """Return the slots that all workers read in a step: their own, and the drawn ones."""
        client = self._clients[0]
        drawn = client.draw(self._work.num_negatives, step=step)
        return np.concatenate([client.slots_of(self._work.ids(step)), drawn])

    def _check(self, part: Part, ids: np.ndarray, step: int) -> int:
        """Count wrong rows among some of those that were written; slots are numbered as ids are."""
        some = np.random.default_rng(step).permutation(np.flatnonzero(part.step >= 0))[:_NUM_CHECKED]
        return num_wrong(Negatives(part.rows[some], ids[some], part.step[some]), self._patterns)

    def _waited_s(self) -> float:
        return sum(client.waited_s for client in self._clients)


def join(groups: list[Any], bank: Bank, work: Work) -> tuple[list[Any], float]:
    """Make the clients; return the groups that have some, and the seconds that one client took."""
    active = groups[: work.num_workers]
    shares = [list(range(first, work.num_workers, len(active))) for first in range(len(active))]
    seconds = ray.get(
        [group.join.remote(bank, work, ranks) for group, ranks in zip(active, shares, strict=True)]
    )
    return active, statistics.median(seconds)


def run(groups: list[Any], first_step: int, num_steps: int, **manner: bool) -> tuple[float, Spent]:
    """Let all groups make these steps; return the seconds and the total cost."""
    since = time.perf_counter()
    spent = ray.get([group.run.remote(first_step, num_steps, **manner) for group in groups])
    return time.perf_counter() - since, add_up(spent)
