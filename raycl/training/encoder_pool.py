"""A pool of actors that encode rows with the newest published weights, and grows and shrinks with the demand.

The pool never ends a run: a request that no encoder answers returns None, and the caller encodes the rows itself.
"""

import asyncio
import contextlib
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import ObjectLostError, OwnerDiedError, RayError, RayTaskError

from raycl.ray_runtime import cause_of, helper_actor, kill_actors, without_stderr

if TYPE_CHECKING:  # the pool's own process needs no pydantic
    from raycl.config.schema import PoolConfig

# An encoder without an answer counts as lost after this time, or a multiple of the longest answer so far; Ray
# notices dead nodes earlier.
ANSWER_S, _MAX_ANSWER_S, _ANSWER_MARGIN = 300.0, 900.0, 4.0  # two tries end before a collective does
_MAX_REQUESTS = 100_000  # that wait for encoders
_NUM_TRIES = 2  # encoders that a request is sent to
# Fractions of the time that callers wait: the pool grows above, may shrink below.
_WAITING, _IDLE = 0.05, 0.01
_BUSY = 0.7  # of the time, the most that the encoders left after shrinking may work
_MAX_PATIENCE = 60  # intervals before a pool shrinks: fewer encoders may do the work, but too late
_MAX_DELAY_S = 60.0  # before an encoder is replaced, if the ones before failed too
_START_S = 60.0  # after which a pool without encoders reports that they wait

_RELEASED = "released"  # in place of an attempt

Weights = Mapping[str, NDArray[Any]]


class RowEncoder(Protocol):
    """An encoder as the actors of a pool hold it."""

    def load(self, weights: Weights) -> None:
        """Use these weights from now on."""
        ...

    @property
    def encode(self) -> Callable[..., NDArray[np.float32]]:
        """Return the embeddings of rows, the first argument; keyword arguments come from the request."""
        ...


class Encoded(NamedTuple):
    """Embeddings, the step of the weights that made them, and the encoders of the pool at that time."""

    embeddings: NDArray[np.float32]
    step: int
    num_encoders: int


class EncoderActor:
    """Encode rows, one request at a time."""

    def __init__(self, build: Callable[[], RowEncoder]) -> None:
        self._encoder, self._version = build(), -1

    def ready(self) -> None:
        """Answer once the encoder is built."""

    def encode(
        self, version: int, weights: Weights, rows: Any, how: Mapping[str, Any]
    ) -> NDArray[np.float32]:
        """Load these weights unless they are loaded, and encode the rows."""
        if version != self._version:
            self._encoder.load(weights)
            self._version = version
        return self._encoder.encode(rows, **how)


@final
@dataclass(frozen=True)
class ActorLauncher:
    """Starts encoders as actors with these options of Ray."""

    options: Mapping[str, Any]

    @property
    def needs(self) -> str:
        """Return the resources and the labels in these options."""
        amounts = {"CPUs": self.options["num_cpus"], "GPUs": self.options["num_gpus"]}
        needs = [f"{amount:g} {name}" for name, amount in amounts.items() if amount]
        labels = [f"{name}={value}" for name, value in self.options["label_selector"].items()]
        return " and ".join(needs) + (f" on a node labeled {', '.join(labels)}" if labels else " on one node")

    def start(self, build: Any) -> Any:
        """Return the handle of a new actor, which may have to wait; ``build`` refers to what builds the encoder."""
        return ray.remote(EncoderActor).options(**self.options).remote(build)

    def stop(self, encoder: Any) -> None:
        """Kill the actor."""
        ray.kill(encoder)


class _Published(NamedTuple):
    version: int
    step: int
    weights: Any  # reference, as the next one: the pool itself imports no encoder
    build: Any


@final
class PoolActor:
    """Send each request to an idle encoder; start and stop encoders, ``least`` to ``most``.

    Encoders exist only while there are weights. Their number is reconsidered every ``interval_s`` seconds: one more
    if a caller waited for its rows and all encoders are ready and busy, one fewer if the others could do the work: one
    that still starts, or an idle one. Each time that the pool grows again after it shrank, four times as many such
    intervals in a row must pass before it shrinks. A lost encoder is replaced.
    """

    def __init__(
        self,
        launcher: ActorLauncher,
        least: int,
        most: int,
        report: Callable[[str], object] = lambda _: None,
        interval_s: float = 10.0,
    ) -> None:
        self._launcher, self._least, self._most, self._report = launcher, least, most, report
        self._interval_s, self._target = interval_s, least
        self._patience, self._num_calm, self._has_shrunk = 1, 0, False  # intervals
        self._attempt: str | None = None
        self._begun: set[str] = set()  # attempts, this one and those before
        self._version = 0
        self._published: _Published | None = None
        self._starting: set[Any] = set()
        self._ready: set[Any] = set()
        self._idle: deque[Any] = deque()
        self._changed = asyncio.Condition()
        self._failures, self._not_before = 0, 0.0
        self._has_reported_wait = False
        self._longest_s = 0.0  # answer of an encoder, also one that came too late
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio holds no reference to a running task
        self._reset_window()

    async def limit(self, most: int) -> None:
        """Grow to so many encoders at most, but for the fewest: the cluster may have lost nodes, or got some."""
        self._most = max(self._least, most)
        self._target = min(self._target, self._most)
        if self._most == 0 and not self._has_reported_wait:
            self._has_reported_wait = True
            self._report(
                f"no encoder of the pool starts: each needs {self._launcher.needs}, which the workers and data tasks do "
                "not leave; lower --workers, cpus_per_actor or gpus_per_actor, or add a node"
            )

    async def release(self) -> None:
        """Stop all encoders until another attempt publishes weights: a new group of workers takes its resources first."""
        self._attempt, self._published, self._target = _RELEASED, None, self._least
        for encoder in [*self._starting, *self._ready]:
            self._remove(encoder)
        await self._notify()

    async def begin(self, attempt: str) -> None:
        """Begin a new attempt of the run, without weights."""
        self._begun.add(attempt)
        self._attempt, self._published = attempt, None
        await self._notify()

    async def publish(self, attempt: str, step: int, sent: Sequence[Any]) -> None:
        """Use these weights, unless another attempt has begun; ``sent`` refers to them and to ``build``."""
        if attempt not in self._begun:  # that call was lost, or a pool before this one got it
            await self.begin(attempt)
        if attempt == self._attempt:
            self._version += 1
            self._published = _Published(self._version, step, *sent)
            self._resize()

    async def num_encoders(self) -> int:
        """Return the number of encoders that are ready."""
        return len(self._ready)

    async def encode(
        self, rows: list[Any], how: Mapping[str, Any], waited_s: float = 0.0, caller: int = 0
    ) -> Encoded | None:
        """Return the embeddings of rows, a list of one reference, or None if no encoder is there.

        ``waited_s`` are the seconds that this caller, a worker, waited for earlier requests.
        """
        # Only the part since the number of encoders was reconsidered.
        self._waited_s[caller] += min(waited_s, time.monotonic() - self._since)
        self._resize()
        for _ in range(_NUM_TRIES):
            encoder = await self._idle_encoder()
            if encoder is None or self._published is None:
                self._num_missed += 1
                return None
            version, step, weights, _ = self._published
            began = time.monotonic()
            try:
                answer = encoder.encode.remote(version, weights, rows[0], how)
                embeddings = await asyncio.wait_for(answer, self._limit_s)
            except (RayError, TimeoutError) as error:
                if isinstance(error, TimeoutError):
                    self._longest_s = max(self._longest_s, time.monotonic() - began)
                if _is_input_lost(error):
                    await self._give_back(encoder)
                    return None
                await self._lose(encoder, error)
                continue
            finally:
                self._busy_s += time.monotonic() - began
            self._longest_s = max(self._longest_s / 2, time.monotonic() - began)
            self._failures = 0
            await self._give_back(encoder)
            return Encoded(embeddings, step, len(self._ready))
        return None

    async def _idle_encoder(self) -> Any:
        """Wait for an idle encoder and take it; return None if there is none at all."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._idle or not self._ready or self._published is None)
            return self._idle.popleft() if self._idle and self._published is not None else None

    async def _give_back(self, encoder: Any) -> None:
        if encoder in self._ready:
            self._idle.append(encoder)
            async with self._changed:
                self._changed.notify()  # one of thousands that may wait

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _resize(self) -> None:
        """Reconsider the number of encoders if it is time, and start or stop encoders."""
        if self._published is None:
            return
        elapsed = time.monotonic() - self._since
        if self._target == 0 and self._num_missed:
            self._target = min(1, self._most)
        elif elapsed > self._interval_s:
            self._reconsider(elapsed)
        while self._num_all > self._target and (self._starting or self._idle):
            # One that starts may wait for its resources forever.
            self._remove(next(iter(self._starting)) if self._starting else self._idle[-1])
        while self._num_all < self._target and time.monotonic() >= self._not_before:
            self._start(self._published.build)

    def _reconsider(self, elapsed: float) -> None:
        """Choose the number of encoders for the demand of these seconds."""
        # The worker that waits most holds up all others.
        waited, busy = max(self._waited_s.values(), default=0.0) / elapsed, self._busy_s / elapsed
        if waited >= _IDLE or self._num_missed or busy >= _BUSY * (self._target - 1):
            self._num_calm = 0
        else:
            self._shrink()
        if waited > _WAITING:
            if not self._idle and len(self._ready) >= self._target:
                self._grow()
            elif elapsed < 2 * self._interval_s:
                return  # the next request may find all encoders busy
        self._reset_window()

    def _grow(self) -> None:
        """Add an encoder, if there may be one more."""
        if self._has_shrunk:
            self._patience, self._has_shrunk = min(_MAX_PATIENCE, 4 * self._patience), False
        self._target, self._num_calm = min(self._most, self._target + 1), 0

    def _shrink(self) -> None:
        """Remove an encoder, if that many intervals in a row had too many."""
        self._num_calm += 1
        if self._num_calm >= self._patience and self._target > self._least:
            self._target, self._has_shrunk = self._target - 1, True

    def _reset_window(self) -> None:
        self._since, self._busy_s, self._num_missed = time.monotonic(), 0.0, 0
        self._waited_s = defaultdict[int, float](float)

    @property
    def _limit_s(self) -> float:
        """The seconds after which an encoder without an answer counts as lost."""
        return min(_MAX_ANSWER_S, max(ANSWER_S, _ANSWER_MARGIN * self._longest_s))

    @property
    def _num_all(self) -> int:
        return len(self._starting) + len(self._ready)

    def _start(self, build: Any) -> None:
        encoder = self._launcher.start(build)
        self._starting.add(encoder)
        task = asyncio.get_running_loop().create_task(self._admit(encoder))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _admit(self, encoder: Any) -> None:
        """Use an encoder once it is ready."""
        late = asyncio.get_running_loop().call_later(_START_S, self._report_wait, encoder)
        try:
            await encoder.ready.remote()
        except RayError as error:
            await self._lose(encoder, error)
        finally:
            late.cancel()
        if encoder in self._starting:
            self._starting.remove(encoder)
            self._ready.add(encoder)
            self._idle.append(encoder)
            self._has_reported_wait = False
            self._reset_window()  # callers have waited for its start
            await self._notify()

    def _report_wait(self, encoder: Any) -> None:
        """Report once that no encoder has started, if this one still does; one beside others may wait for its resources."""
        if encoder in self._starting and not self._ready and not self._has_reported_wait:
            self._has_reported_wait = True
            self._report(
                f"no encoder of the pool has started for {_START_S:g} s: each waits for {self._launcher.needs}, or is "
                "still being built; end other tasks, add a node, or lower cpus_per_actor or gpus_per_actor"
            )

    async def _lose(self, encoder: Any, error: Exception) -> None:
        """Remove an encoder that failed, unless it was removed, and replace it, after a delay if others failed before."""
        if encoder not in self._starting | self._ready:
            return
        self._remove(encoder)
        self._failures += 1
        if self._failures > 1:
            self._not_before = time.monotonic() + min(_MAX_DELAY_S, 2.0 ** min(self._failures, 9))
        self._report(f"an encoder of the pool failed ({cause_of(error)}); {self._num_all} are left")
        self._resize()
        await self._notify()

    def _remove(self, encoder: Any) -> None:
        self._starting.discard(encoder)
        self._ready.discard(encoder)
        with contextlib.suppress(ValueError):
            self._idle.remove(encoder)
        self._launcher.stop(encoder)


def _is_input_lost(error: Exception) -> bool:
    """Whether rows or weights are lost, such as a dead worker's: the encoder has not failed.

    The pool owns the answers: one lost with the node of its encoder raises an ``ObjectLostError`` that is no
    ``OwnerDiedError``.
    """
    if isinstance(error, RayTaskError):
        return isinstance(error.cause, ObjectLostError)
    return isinstance(error, OwnerDiedError)


@final
class Request:
    """A request in flight to a pool's actor."""

    def __init__(self, rows: Any, answer: Any, pool: Any) -> None:
        self._rows, self._answer, self._pool = rows, answer, pool  # the rows live as long as their reference
        self.waited_s = 0.0  # by the caller, for an answer that was not there yet

    @cached_property
    def encoded(self) -> Encoded | None:
        """The answer, once it is there; None if no encoder gave one."""
        began = time.monotonic()
        is_late = not ray.wait([self._answer], timeout=0)[0]
        try:
            # The pool limits the time of its encoders.
            while not ray.wait([self._answer], timeout=ANSWER_S)[0]:
                ray.get(self._pool.num_encoders.remote(), timeout=ANSWER_S)
            return ray.get(self._answer)
        except RayError:
            return None
        finally:
            self.waited_s = time.monotonic() - began if is_late else 0.0
            del self._rows, self._answer


@final
@dataclass(frozen=True)
class EncoderPool:
    """A handle of a pool, for the driver and its workers."""

    actor: Any
    build: ray.ObjectRef  # a restarted pool gets it with the next weights

    def begin(self) -> str:
        """Begin a new attempt of the run, without weights; return its name."""
        attempt = uuid.uuid4().hex
        with contextlib.suppress(RayError):
            ray.get(self.actor.begin.remote(attempt), timeout=ANSWER_S)
        return attempt

    def publish(self, weights: Weights, *, step: int, attempt: str) -> ray.ObjectRef:
        """Send weights as they are before this step; return a reference to the pool's answer."""
        return self.actor.publish.remote(attempt, step, [ray.put(weights), self.build])

    def encode(self, rows: Any, *, waited_s: float = 0.0, caller: int = 0, **how: Any) -> Request:
        """Send rows, with arguments of ``RowEncoder.encode``, without waiting for their embeddings."""
        sent = ray.put(rows)
        return Request(sent, self.actor.encode.remote([sent], how, waited_s, caller), self.actor)


@contextlib.contextmanager
def start_pool(
    build: Callable[[], RowEncoder],
    pool: "PoolConfig",
    report: Callable[[str], object],
    *,
    actors: tuple[int, int],
) -> Iterator[EncoderPool]:
    """Start a pool with the fewest and the most ``actors``, each with the resources and on a node of the settings.

    ``build`` makes the encoder in its actor, and ``report`` is called in the pool's own process. The pool and its
    actors end with the context, or with the driver.
    """
    options: dict[str, Any] = {
        "num_cpus": pool.cpus_per_actor,
        "num_gpus": pool.gpus_per_actor,
        "label_selector": pool.labels,
    }
    # A worker sends several requests ahead: beyond 1,000 waiting ones, Ray would keep weights and releases waiting too.
    pool_actor = helper_actor(PoolActor, max_restarts=-1, max_concurrency=_MAX_REQUESTS)
    launcher = ActorLauncher(options)
    # Ray's core prints that arguments with references must live: they do, as long as this driver.
    with without_stderr():
        actor = pool_actor.remote(launcher, *actors, report)
    try:
        yield EncoderPool(actor, ray.put(build))
    finally:
        kill_actors(actor)
