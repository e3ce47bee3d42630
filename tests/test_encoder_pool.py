import asyncio
import os
from collections import deque
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    ObjectLostError,
    OwnerDiedError,
    RayActorError,
    RayError,
    RayTaskError,
)

from raycl.config.schema import PoolConfig
from raycl.training.encoder_pool import ActorLauncher, Encoded, EncoderActor, PoolActor, Request, start_pool


class Method:
    """A method of an actor: ``remote`` calls it."""

    def __init__(self, method: Any) -> None:
        self.remote = method


class FakeEncoder:
    """An encoder that is ready once ``starts`` is set, and answers once ``go`` is set, or dies."""

    def __init__(
        self,
        number: int,
        starts: asyncio.Event,
        go: asyncio.Event,
        *,
        dies: RayError | None,
        fails_at_start: bool,
    ) -> None:
        self.number, self.starts, self.go, self.loaded = number, starts, go, (-1, None)
        self.dies, self.fails_at_start, self.num_requests = dies, fails_at_start, 0
        self.ready, self.encode = Method(self._ready), Method(self._encode)

    async def _ready(self) -> None:
        await self.starts.wait()
        if self.fails_at_start:
            raise self.dies or RayActorError()

    async def _encode(self, version: int, weights: Any, rows: Any, how: Any) -> Any:
        self.num_requests += 1
        await self.go.wait()
        if self.dies:
            raise self.dies
        if isinstance(rows, Exception):
            raise rows
        if version != self.loaded[0]:  # as the actor
            self.loaded = version, weights
        return np.array([[self.number, self.loaded[1], rows]], np.float32)


class FakeLauncher:
    needs = "2 CPUs on one node"

    def __init__(
        self, *, dying: tuple[int, ...] = (), failing: tuple[int, ...] = (), death: RayError | None = None
    ) -> None:
        self.starts, self.go, self.dying, self.failing = asyncio.Event(), asyncio.Event(), dying, failing
        self.death = death or RayActorError()
        self.starts.set()
        self.go.set()
        self.num_started, self.running = 0, set[int]()

    def start(self, build: None) -> FakeEncoder:
        number = self.num_started
        self.num_started += 1
        self.running.add(number)
        dies = self.death if number in self.dying else None
        return FakeEncoder(number, self.starts, self.go, dies=dies, fails_at_start=number in self.failing)

    def stop(self, encoder: FakeEncoder) -> None:
        self.running.discard(encoder.number)


async def pool_of(launcher: FakeLauncher, least: int = 1, most: int = 1, **options: Any) -> PoolActor:
    """Return a pool with weights 7 of step 3 whose first encoders are ready."""
    pool = PoolActor(launcher, least, most, **options)  # type: ignore[arg-type]
    await begin(pool, 3, 7)
    await asyncio.sleep(0)
    return pool


async def begin(pool: PoolActor, step: int, weights: int) -> None:
    await pool.begin("attempt")
    await pool.publish("attempt", step, [weights, None])


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


def test_a_request_is_encoded_with_the_newest_weights_and_stamped_with_their_step() -> None:
    async def check() -> None:
        pool = PoolActor(FakeLauncher(), 1, 1)  # type: ignore[arg-type]
        await pool.publish("restarted", 3, [7, None])  # without begin, as after a restart of the pool
        await asyncio.sleep(0)
        first = await pool.encode([10], {})
        await pool.publish("restarted", 4, [8, None])
        second = await pool.encode([11], {})
        await pool.publish("restarted", 4, [9, None])  # as after a return to this step
        third = await pool.encode([12], {})
        assert first and second and third
        assert (first.step, first.embeddings.tolist()) == (3, [[0, 7, 10]])
        assert (second.step, second.embeddings.tolist()) == (4, [[0, 8, 11]])
        assert (third.step, third.embeddings.tolist()) == (4, [[0, 9, 12]])

    run(check())


def test_weights_of_a_new_attempt_are_used_although_the_call_that_began_it_was_lost() -> None:
    async def check() -> None:
        launcher = FakeLauncher()
        pool = await pool_of(launcher)
        await pool.publish("next", 2, [8, None])  # as after a rollback
        await pool.publish("attempt", 4, [9, None])
        found = await pool.encode([10], {})
        assert found and (found.step, found.embeddings.tolist()) == (2, [[0, 8, 10]])
        await pool.release()
        await pool.publish("next", 3, [8, None])
        assert not launcher.running
        await pool.publish("last", 3, [8, None])
        assert launcher.running

    run(check())


def test_an_actor_loads_weights_of_another_version_and_no_others() -> None:
    loaded: list[Any] = []
    encoder = SimpleNamespace(load=loaded.append, encode=lambda rows, scale: rows * scale)
    actor = EncoderActor(lambda: encoder)  # type: ignore[arg-type,return-value]
    # A restarted pool counts from one again.
    versions: list[tuple[int, Any]] = [(2, "b"), (2, "b"), (3, "c"), (1, "d"), (1, "d")]
    assert [actor.encode(*version, 5, {"scale": 2}) for version in versions] == [10] * 5
    assert loaded == ["b", "c", "d"]


def test_a_pool_without_weights_or_encoders_answers_none_at_once() -> None:
    async def check() -> None:
        launcher = FakeLauncher()
        assert await PoolActor(launcher, 1, 1).encode([10], {}) is None  # type: ignore[arg-type]
        assert launcher.num_started == 0
        pool = PoolActor(FakeLauncher(), 1, 1)  # type: ignore[arg-type]
        await begin(pool, 3, 7)
        assert await pool.encode([10], {}) is None  # the encoder still starts

    run(check())


def test_weights_of_an_earlier_attempt_are_ignored() -> None:
    async def check() -> None:
        pool = PoolActor(FakeLauncher(), 1, 1)  # type: ignore[arg-type]
        await pool.begin("earlier")
        await begin(pool, 3, 7)
        await pool.publish("earlier", 9, [6, None])
        await asyncio.sleep(0)
        found = await pool.encode([10], {})
        assert found and found.step == 3

    run(check())


def test_more_requests_than_encoders_wait_and_are_answered_in_order() -> None:
    async def check() -> None:
        launcher = FakeLauncher()
        launcher.go.clear()
        pool = await pool_of(launcher, 2, 2)
        requests = [asyncio.create_task(pool.encode([number], {})) for number in range(5)]
        await asyncio.sleep(0.01)
        launcher.go.set()
        found = [each for each in await asyncio.gather(*requests) if each]
        assert [each.embeddings[0, 2] for each in found] == [0, 1, 2, 3, 4]
        assert {each.embeddings[0, 0] for each in found} == {0, 1}

    run(check())


def test_a_request_that_waits_gets_an_encoder_as_soon_as_it_has_started() -> None:
    async def check() -> None:
        launcher = FakeLauncher()
        pool = await pool_of(launcher, 1, 2)
        launcher.go.clear()
        requests = [asyncio.create_task(pool.encode([number], {})) for number in range(2)]
        await asyncio.sleep(0)
        pool._target = 2
        pool._resize()
        await asyncio.sleep(0.01)
        assert [encoder.num_requests for encoder in pool._ready] == [1, 1]
        launcher.go.set()
        assert all(await asyncio.gather(*requests))

    run(check())


def test_an_idle_encoder_wakes_one_of_many_requests_and_a_new_attempt_ends_all() -> None:
    class Counted(deque[Any]):
        num_looks = 0

        def __bool__(self) -> bool:
            Counted.num_looks += 1
            return len(self) > 0

    async def check() -> None:
        launcher, number = FakeLauncher(), 300
        pool = await pool_of(launcher)
        pool._idle = Counted(pool._idle)
        found = await asyncio.gather(*(pool.encode([each], {}) for each in range(number)))
        assert [each and each.embeddings[0, 2] for each in found] == list(range(number))
        assert Counted.num_looks < 10 * number
        launcher.go.clear()
        requests = [asyncio.create_task(pool.encode([each], {})) for each in range(3)]
        await asyncio.sleep(0)
        await pool.begin("another")
        assert await asyncio.gather(*requests[1:]) == [None, None]
        launcher.go.set()
        assert await requests[0]
        assert await pool.encode([10], {}) is None
        await pool.publish("another", 5, [8, None])
        assert await pool.encode([10], {})  # the request without weights has taken no encoder

    run(check())


# An answer that is lost with the node of its encoder is an object of the pool, whose owner lives.
@pytest.mark.parametrize(
    ("death", "cause"),
    [
        (RayActorError(), "The actor experienced an error before finishing this task."),
        (ObjectLostError("0" * 56, None, ""), f"Failed to retrieve object {56 * '0'}."),
        (RayTaskError("encode", "Traceback:\nValueError: rows", ValueError("rows")), "ValueError: rows"),
    ],
    ids=["dead", "answer", "error"],
)
def test_the_request_of_a_dead_encoder_goes_to_another_one_and_the_dead_one_is_replaced(
    death: RayError, cause: str
) -> None:
    async def check() -> None:
        launcher, reports = FakeLauncher(dying=(0,), death=death), list[str]()
        pool = await pool_of(launcher, 2, 2, report=reports.append)
        found = await pool.encode([10], {})
        assert found and found.embeddings[0, 0] == 1
        await asyncio.sleep(0)
        assert launcher.running == {1, 2}
        assert await pool.num_encoders() == 2
        [line] = reports
        assert line.startswith(f"an encoder of the pool failed ({cause}")
        assert line.endswith("); 1 are left")

    run(check())


OWNER_DIED = OwnerDiedError("0" * 56, None, "")


@pytest.mark.parametrize(
    "error", [OWNER_DIED, RayTaskError("encode", "", OWNER_DIED)], ids=["raised", "cause"]
)
def test_requests_of_dead_workers_cost_no_encoder(error: RayError) -> None:
    async def check() -> None:
        launcher, reports = FakeLauncher(), list[str]()
        pool = await pool_of(launcher, 2, 2, report=reports.append)
        assert [await pool.encode([error], {}) for _ in range(3)] == [None] * 3
        assert sum(encoder.num_requests for encoder in pool._ready) == 3  # none is sent again
        assert (launcher.num_started, launcher.running, reports) == (2, {0, 1}, [])
        requests = [asyncio.create_task(pool.encode([number], {})) for number in range(4)]
        assert all(await asyncio.gather(*requests))

    run(check())


def test_waiting_requests_are_answered_none_once_the_last_encoder_dies() -> None:
    async def check() -> None:
        launcher = FakeLauncher(dying=(0, 1), failing=(2, 3))
        launcher.go.clear()
        pool = await pool_of(launcher, 2, 2)
        requests = [asyncio.create_task(pool.encode([number], {})) for number in range(4)]
        await asyncio.sleep(0.01)
        launcher.go.set()
        assert await asyncio.gather(*requests) == [None] * 4

    run(check())


def test_a_request_that_costs_two_encoders_is_not_sent_to_a_third() -> None:
    async def check() -> None:
        launcher = FakeLauncher(dying=(0, 1))
        pool = await pool_of(launcher, 3, 3)
        assert await pool.encode([10], {}) is None
        assert await pool.encode([10], {})

    run(check())


def test_an_encoder_that_fails_again_and_again_is_replaced_after_a_delay() -> None:
    async def check() -> None:
        launcher = FakeLauncher(failing=tuple(range(100)))
        pool = await pool_of(launcher)
        for _ in range(20):
            assert await pool.encode([10], {}) is None
            await asyncio.sleep(0)
        assert 1 < launcher.num_started < 5

    run(check())


def test_the_report_of_an_encoder_that_cannot_be_built_names_the_cause() -> None:
    async def check() -> None:
        cause = ModuleNotFoundError("No module named 'my_networks'")
        lines = 'Traceback (most recent call last):\n  File "a.py", line 3, in build\n'
        error = ActorDiedError(RayTaskError("__init__", f"{lines}ModuleNotFoundError: {cause}", cause))
        launcher, reports = FakeLauncher(dying=(0,), failing=(0,), death=error), list[str]()
        await pool_of(launcher, report=reports.append)
        await asyncio.sleep(0.01)
        assert reports == [
            "an encoder of the pool failed (ModuleNotFoundError: No module named 'my_networks'); 0 are left"
        ]

    run(check())


def test_an_encoder_is_replaced_at_once_and_later_ones_after_twice_the_delay_of_the_last(
    clock: "Clock",
) -> None:
    async def check() -> None:
        launcher, delays = FakeLauncher(failing=tuple(range(100))), list[float]()
        pool = await pool_of(launcher, interval_s=1_000.0)
        for number in range(2, 8):
            await asyncio.sleep(0.001)
            assert launcher.num_started == number
            delays.append(pool._not_before - clock.now)
            clock.now = pool._not_before
            pool._resize()
        assert delays == [4.0, 8.0, 16.0, 32.0, 60.0, 60.0]

    run(check())


def test_a_pool_survives_any_number_of_failures() -> None:
    async def check() -> None:
        pool = await pool_of(FakeLauncher(dying=(0,)))
        pool._failures = 2_000
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("raycl.training.encoder_pool._MAX_DELAY_S", 0.0)
            assert await pool.encode([10], {}) is None
            await asyncio.sleep(0.01)
            assert await pool.encode([10], {}) is not None

    run(check())


@pytest.mark.parametrize(("least", "most"), [(1, 3), (0, 2), (2, 3)])
def test_the_pool_grows_while_callers_wait_for_busy_encoders_and_shrinks_while_they_do_not(
    least: int, most: int
) -> None:
    async def check() -> None:
        launcher = FakeLauncher()
        pool = await pool_of(launcher, least, most, interval_s=0.0)
        sizes = []
        for waited_s in [1.0] * 5 + [0.0] * 5:
            await requests_of(pool, waited_s, most + 1 if waited_s else 1)
            sizes.append(len(launcher.running))
        assert sizes == sorted(sizes[:5]) + sorted(sizes[5:], reverse=True)
        assert max(sizes) == most
        assert sizes[-1] == max(1, least)

    run(check())


async def requests_of(pool: PoolActor, waited_s: float, number: int) -> None:
    """Send requests at the same time, whose callers waited for earlier ones, and let new encoders start."""
    await asyncio.gather(*[asyncio.create_task(pool.encode([10], {}, waited_s)) for _ in range(number)])
    await asyncio.sleep(0)


def test_the_pool_does_not_grow_while_a_request_finds_an_idle_encoder() -> None:
    async def check() -> None:
        launcher = FakeLauncher()
        pool = await pool_of(launcher, 1, 3, interval_s=0.0)
        for _ in range(5):
            await requests_of(pool, 1.0, 1)  # a second encoder would be idle
        assert launcher.num_started == 1
        await requests_of(pool, 1.0, 2)
        assert launcher.num_started == 2

    run(check())


@pytest.mark.parametrize(("waited_s", "num_encoders"), [([0.01] * 100, 1), ([0.0] * 99 + [1.0], 2)])
def test_the_pool_grows_for_the_worker_that_waits_most(
    waited_s: list[float], num_encoders: int, clock: "Clock"
) -> None:
    async def check() -> None:
        launcher = FakeLauncher()
        pool = await pool_of(launcher, 1, 3)
        clock.now += 5.0
        for caller, each in enumerate(waited_s):
            await pool.encode([10], {}, each, caller)
        clock.now += 6.0
        await requests_of(pool, 0.0, 2)
        assert pool._target == num_encoders

    run(check())


class Clock:
    """A time that the test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("raycl.training.encoder_pool.time", clock)
    return clock


# Of three encoders, between one and five, all ready; after 20 s, twice the interval.
@pytest.mark.parametrize(
    ("waited_s", "busy_s", "num_missed", "is_idle", "target"),
    [
        (1.1, 60.0, 0, False, 4),  # a caller waited for more than a twentieth of the time
        (1.0, 60.0, 0, False, 3),
        (1.1, 60.0, 0, True, 3),  # an idle encoder could have answered
        (0.2, 0.0, 0, True, 3),
        (0.1, 0.0, 0, True, 2),  # for less than a hundredth
        (0.1, 27.0, 0, True, 2),
        (0.1, 29.0, 0, True, 3),  # 1.45 of the two that would be left
        (0.0, 0.0, 1, True, 3),  # a caller got no answer
    ],
)
@pytest.mark.parametrize("seconds", [10.0, 20.0])
def test_the_number_of_encoders_follows_the_time_that_callers_wait_and_encoders_work(
    waited_s: float,
    busy_s: float,
    num_missed: int,
    is_idle: bool,
    target: int,
    seconds: float,
    clock: "Clock",
) -> None:
    async def check() -> None:
        pool = await pool_of(FakeLauncher(), 1, 5)
        pool._target = 3
        pool._resize()
        await asyncio.sleep(0)
        if not is_idle:
            pool._idle.clear()
        clock.now = seconds
        pool._waited_s[7], pool._busy_s, pool._num_missed = waited_s, busy_s, num_missed
        pool._resize()
        assert pool._target == (3 if seconds == 10.0 else target)
        # The next seconds count anew.
        kept = (waited_s, busy_s, num_missed) if seconds == 10.0 else (0.0, 0.0, 0)
        assert (pool._waited_s[7], pool._busy_s, pool._num_missed) == kept

    run(check())


def test_encoders_that_start_are_stopped_while_all_others_are_busy() -> None:
    async def check() -> None:
        launcher = FakeLauncher()
        pool = await pool_of(launcher, 2, 5)
        launcher.go.clear()
        launcher.starts.clear()
        requests = [asyncio.create_task(pool.encode([number], {})) for number in range(2)]
        await asyncio.sleep(0)
        for target, running in ((5, 5), (1, 2)):
            pool._target = target
            pool._resize()
            assert len(launcher.running) == running
        assert launcher.running == {0, 1}
        launcher.go.set()
        assert all(await asyncio.gather(*requests))

    run(check())


def test_a_pool_of_no_encoder_starts_one_for_the_first_request_that_is_missed() -> None:
    async def check() -> None:
        launcher = FakeLauncher()
        pool = await pool_of(launcher, 0, 4)
        await pool.publish("attempt", 4, [7, None])
        assert launcher.num_started == 0
        assert await pool.encode([10], {}) is None
        assert await pool.encode([10], {}) is None
        assert launcher.num_started == 1
        await asyncio.sleep(0)
        assert await pool.encode([10], {})
        assert launcher.num_started == 1

    run(check())


def test_the_time_of_answers_counts_as_work_and_limits_the_next_ones(clock: "Clock") -> None:
    async def check() -> None:
        launcher = FakeLauncher()
        pool, limits = await pool_of(launcher, interval_s=1_000.0), []
        for seconds in (20.0, 200.0, 0.0, 0.0, 290.0):
            launcher.go.clear()
            request = asyncio.create_task(pool.encode([10], {}))
            await asyncio.sleep(0)
            clock.now += seconds
            launcher.go.set()
            await request
            limits.append(pool._limit_s)
        # Four times the longest answer, which each later one halves; from 300 to 900 s.
        assert limits == [300.0, 800.0, 400.0, 300.0, 900.0]
        assert pool._busy_s == 510.0

    run(check())


def test_the_wait_for_a_starting_encoder_starts_no_other_one(clock: Clock) -> None:
    async def check() -> None:
        launcher = FakeLauncher()
        pool = await pool_of(launcher, 1, 3)
        launcher.starts.clear()
        clock.now = 11.0
        await requests_of(pool, 9.0, 2)
        assert launcher.num_started == 2
        clock.now = 22.0
        await requests_of(pool, 9.0, 3)
        assert launcher.num_started == 2  # the second one starts
        found = await pool.encode([10], {})
        assert found and found.num_encoders == 1
        launcher.starts.set()
        await asyncio.sleep(0.01)
        assert await pool.num_encoders() == 2
        await requests_of(pool, 9.0, 3)
        assert launcher.num_started == 2  # the callers have waited for its start
        clock.now = 33.0
        await requests_of(pool, 9.0, 3)
        assert launcher.num_started == 3

    run(check())


def test_the_pool_shrinks_while_an_encoder_waits_for_its_resources(clock: Clock) -> None:
    async def check() -> None:
        launcher = FakeLauncher()
        pool = await pool_of(launcher, 1, 4)

        async def interval(waited_s: float, number: int) -> None:
            clock.now += 11.0
            await requests_of(pool, waited_s, number)

        for size in (2, 3, 4):
            if size == 4:
                launcher.starts.clear()
            await interval(9.0, 5)
            assert len(launcher.running) == size
        await interval(9.0, 5)
        assert len(launcher.running) == 4  # it still waits, and so do the callers
        await interval(0.0, 1)  # ends the time in which they waited
        for size in (3, 2, 1, 1):
            await interval(0.0, 1)
            assert len(launcher.running) == await pool.num_encoders() == size
        launcher.starts.set()
        await interval(9.0, 5)
        assert await pool.num_encoders() == 2

    run(check())


def test_a_pool_that_grows_again_and_again_shrinks_ever_more_rarely(clock: Clock) -> None:
    """One of its two encoders could do the work, but too late: callers would wait, and another one be built."""

    async def check() -> None:
        launcher = FakeLauncher()
        pool = await pool_of(launcher, 1, 3)
        lasted = [0]  # intervals with two encoders
        for _ in range(200):
            clock.now += 11.0
            if len(launcher.running) == 1:
                await requests_of(pool, 9.0, 2)
                lasted.append(0)
            else:
                await requests_of(pool, 0.0, 1)
                lasted[-1] += 1
        assert lasted[1:5] == [1, 4, 16, 60]
        assert lasted[5] == 60

    run(check())


def test_a_pool_that_grows_twice_after_it_shrank_waits_only_four_times_as_long() -> None:
    async def check() -> None:
        pool, num_calm = PoolActor(FakeLauncher(), 1, 5), 0  # type: ignore[arg-type]
        for change in (pool._grow, pool._shrink, pool._grow, pool._grow):
            change()
        while pool._target == 3:
            pool._shrink()
            num_calm += 1
        assert num_calm == 4

    run(check())


@pytest.mark.parametrize(
    ("waited_s", "busy_s", "num_missed"),
    [(0.5, 0.0, 0), (5.0, 0.0, 0), (0.0, 19.0, 0), (0.0, 0.0, 1)],
    ids=["a short wait", "a wait beside an idle encoder", "busy", "no answer"],
)
def test_a_pool_shrinks_after_enough_calm_intervals_in_a_row(
    waited_s: float, busy_s: float, num_missed: int, clock: Clock
) -> None:
    async def check() -> None:
        pool, targets, calm = await pool_of(FakeLauncher(), 1, 3), [], (0.0, 0.0, 0)
        pool._target, pool._patience = 2, 3
        pool._resize()
        await asyncio.sleep(0)
        for interval in (calm, calm, (waited_s, busy_s, num_missed), calm, calm, calm):
            clock.now += 21.0
            pool._waited_s[7], pool._busy_s, pool._num_missed = interval
            pool._resize()
            targets.append(pool._target)
        assert targets == [2, 2, 2, 2, 2, 1]

    run(check())


def test_a_pool_that_has_no_room_starts_no_encoder() -> None:
    """Its encoder would take the CPU of a task that reads the rows which the workers await."""

    async def check() -> None:
        launcher = FakeLauncher()
        pool = await pool_of(launcher, 0, 0, interval_s=0.0)
        for _ in range(5):
            assert await pool.encode([10], {}, 1.0) is None
        assert launcher.num_started == 0

    run(check())


def test_a_pool_keeps_within_the_limit_of_a_smaller_cluster() -> None:
    async def check() -> None:
        launcher = FakeLauncher()
        pool = await pool_of(launcher, 1, 4, interval_s=0.0)
        for most, expected in ((4, 4), (2, 2), (0, 1), (3, 3)):
            await pool.limit(most)
            for _ in range(5):
                await requests_of(pool, 1.0, 5)
            assert len(launcher.running) == expected

    run(check())


def test_a_line_says_that_a_pool_has_no_room() -> None:
    async def check() -> None:
        launcher, reports = FakeLauncher(), list[str]()
        pool = await pool_of(launcher, 0, 1, report=reports.append)
        for most in (1, 0, 0):
            await pool.limit(most)
        (line,) = reports
        assert line.startswith(
            "no encoder of the pool starts: each needs 2 CPUs on one node, which the workers"
        )
        await pool.limit(1)
        for _ in range(2):
            await pool.encode([10], {})
            await asyncio.sleep(0)
        await pool.limit(0)
        assert reports == [line, line]

    run(check())


def test_a_wait_counts_only_since_the_number_of_encoders_was_reconsidered(clock: Clock) -> None:
    async def check() -> None:
        launcher = FakeLauncher()
        pool = await pool_of(launcher, 1, 3)
        await requests_of(pool, 9.0, 2)  # they waited for the start of the encoder
        clock.now = 11.0
        await requests_of(pool, 0.0, 2)
        assert launcher.num_started == 1

    run(check())


def test_a_lost_encoder_that_is_not_replaced_yet_leads_to_no_growth() -> None:
    async def check() -> None:
        launcher = FakeLauncher(failing=(1, 2, 3))
        pool = await pool_of(launcher, 2, 5, interval_s=0.0)
        for _ in range(5):
            await requests_of(pool, 1.0, 3)
        assert await pool.num_encoders() == 1
        assert pool._target == 2

    run(check())


@pytest.mark.parametrize("num_quick", [0, 5], ids=["at once", "after quick answers"])
@pytest.mark.parametrize("first_s", [0.15, 0.25], ids=["answers in time", "answers too late"])
def test_the_limit_of_an_answer_follows_the_longest_one(
    first_s: float, num_quick: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycl.training.encoder_pool.ANSWER_S", 0.2)

    async def check() -> None:
        launcher = FakeLauncher()
        pool = await pool_of(launcher)

        async def take(seconds: float) -> Encoded | None:
            launcher.go.clear()
            request = asyncio.create_task(pool.encode([10], {}))
            await asyncio.sleep(seconds)
            launcher.go.set()
            return await request

        await take(first_s)
        started = launcher.num_started
        assert await take(0.3) is not None
        assert launcher.num_started == started
        for _ in range(num_quick):
            await take(0.0)  # each halves the longest answer that counts
        if not num_quick:
            monkeypatch.setattr("raycl.training.encoder_pool._MAX_ANSWER_S", 0.1)
        await take(0.3)
        assert launcher.num_started == started + 1

    run(check())


def test_encoders_that_wait_for_resources_are_reported_once_until_one_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raycl.training.encoder_pool._START_S", 0.05)

    async def check() -> None:
        launcher, reports = FakeLauncher(), list[str]()
        launcher.starts.clear()
        pool = await pool_of(launcher, 2, 2, report=reports.append)
        assert not reports
        await asyncio.sleep(0.1)
        assert [line.split(":")[0] for line in reports] == ["no encoder of the pool has started for 0.05 s"]
        assert (
            "each waits for 2 CPUs on one node, or is still being built; end other tasks, add a node"
            in reports[0]
        )
        launcher.starts.set()
        await asyncio.sleep(0.01)
        assert await pool.num_encoders() == 2
        await pool.release()
        launcher.starts.clear()
        await begin(pool, 5, 8)
        await pool.release()  # no encoder waits any more
        await asyncio.sleep(0.1)
        assert len(reports) == 1
        await begin(pool, 6, 8)
        await asyncio.sleep(0.1)
        assert len(reports) == 2

    run(check())


def test_an_encoder_that_waits_beside_a_ready_one_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raycl.training.encoder_pool._START_S", 0.05)

    async def check() -> None:
        launcher, reports = FakeLauncher(), list[str]()
        pool = await pool_of(launcher, 1, 2, report=reports.append, interval_s=0.0)
        launcher.starts.clear()
        await requests_of(pool, 1.0, 2)
        assert launcher.num_started == 2
        await asyncio.sleep(0.1)
        assert not reports

    run(check())


@pytest.mark.parametrize(
    ("resources", "labels", "needs"),
    [
        ({"num_cpus": 2.0, "num_gpus": 0.0}, {}, "2 CPUs on one node"),
        ({"num_cpus": 0.5, "num_gpus": 0.5}, {"zone": "spot"}, "0.5 CPUs and 0.5 GPUs on a node labeled zone=spot"),
    ],
)  # fmt: skip
def test_the_report_names_what_an_encoder_reserves(
    resources: dict[str, float], labels: dict[str, str], needs: str
) -> None:
    assert ActorLauncher({**resources, "label_selector": labels}).needs == needs


def test_a_released_pool_holds_no_encoder_until_another_attempt_publishes_weights() -> None:
    async def check() -> None:
        launcher, reports = FakeLauncher(dying=(0,)), list[str]()
        launcher.go.clear()
        pool = await pool_of(launcher, 2, 3, report=reports.append)
        waiting = [asyncio.create_task(pool.encode([number], {})) for number in range(3)]
        await asyncio.sleep(0.01)
        pool._target = 3  # as after growth
        await pool.release()
        assert not launcher.running
        assert await waiting[2] is None
        assert await pool.encode([10], {}) is None
        # Weights of the group before, as from a miner that still embeds, start no encoder.
        await pool.publish("attempt", 4, [7, None])
        assert not launcher.running
        launcher.go.set()
        await asyncio.gather(*waiting[:2])
        assert not reports  # of the encoder that was stopped, and then raised its error
        await begin(pool, 5, 8)
        assert len(launcher.running) == 2
        await asyncio.sleep(0)
        found = await pool.encode([10], {})
        assert isinstance(found, Encoded)
        assert (found.step, found.embeddings[0, 0]) == (5, 2)  # by the first of the new encoders

    run(check())


@pytest.mark.parametrize(
    ("arrives_s", "answer", "pool_ends_s", "encoded", "waited_s"),
    [
        (0.0, "embeddings", 900.0, "embeddings", 0.0),
        (700.0, "embeddings", 900.0, "embeddings", 700.0),
        (700.0, "embeddings", 500.0, None, 600.0),  # the second question is not answered
        (0.0, RayActorError(), 900.0, None, 0.0),
    ],
)
def test_a_request_waits_as_long_as_the_pool_answers(
    arrives_s: float,
    answer: Any,
    pool_ends_s: float,
    encoded: str | None,
    waited_s: float,
    clock: "Clock",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wait(references: list[str], timeout: float) -> tuple[list[str], list[str]]:
        is_there = arrives_s <= clock.now + timeout
        clock.now = max(clock.now, arrives_s) if is_there else clock.now + timeout
        return (references, []) if is_there else ([], references)

    def get(reference: str, timeout: float | None = None) -> Any:
        if reference == "answer":
            if isinstance(answer, RayError):
                raise answer
            return answer
        if clock.now > pool_ends_s:
            assert timeout, "the request waits forever"
            raise GetTimeoutError
        return 1

    monkeypatch.setattr("raycl.training.encoder_pool.ray", SimpleNamespace(wait=wait, get=get))
    request = Request("rows", "answer", SimpleNamespace(num_encoders=Method(lambda: "number")))
    assert (request.encoded, request.waited_s) == (encoded, waited_s)
    assert not hasattr(request, "_rows")  # the object store may free them


def give_a_noisy_core(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Replace Ray by one whose core writes a line to stderr at the start of an actor."""

    def start(*_: Any) -> str:
        os.write(2, b"core_worker.cc: an actor has constructor arguments in the object store\n")
        return "actor"

    noisy = SimpleNamespace(
        remote=lambda **_: lambda _: SimpleNamespace(remote=start),
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "0" * 56),
        put=lambda value: value,
        get=None,
        kill=lambda _: None,
    )
    for name in (module, "raycl.ray_runtime"):
        monkeypatch.setattr(f"{name}.ray", noisy)


def test_a_pool_starts_without_lines_of_rays_core(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    give_a_noisy_core(monkeypatch, "raycl.training.encoder_pool")
    with start_pool(lambda: None, PoolConfig(), print, actors=(1, 1)) as pool:  # type: ignore[arg-type]
        os.write(2, b"later\n")
    assert pool.actor == "actor"
    assert capfd.readouterr().err == "later\n"
