"""Bank clients with lost calls and crashed actors, without Ray: no update is lost or applied twice."""

import contextlib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from raycl.data.columns import ColumnNames
from raycl.errors import ConfigError, RayclError, RunError, ShardAwayError, StorageError
from raycl.negatives import KeyQueue, MemoryBank, Negatives, rpc, start
from raycl.negatives.actor import BankActor, MemoryBankActor, QueueActor
from raycl.negatives.averages import normalized
from raycl.negatives.bank import Bank, connect_bank
from raycl.negatives.client import MemoryBankClient, QueueClient
from raycl.negatives.rpc import ShardConnection
from raycl.negatives.search import checked_query, nearest
from raycl.negatives.snapshot import Current, read_current, shard_place, write_current, write_samples
from raycl.negatives.spec import BankSpec
from raycl.negatives.start import start_bank
from raycl.negatives.store import concatenate
from raycl.serve.target import ServeTarget
from raycl.storage import Place

DIM = 3
SETTINGS = settings(deadline=None, max_examples=150)
IDS = np.array([3, -5, 10, 11, 40, 41, 42])

# Faults of a call: none; the call is lost; its response is lost; the shard dies before or after it.
FAULTS = ("", "lost", "unanswered", "dies", "done, then dies")
faults = st.lists(st.sampled_from(FAULTS + ("",) * 4), max_size=40)
lost_calls = st.lists(st.sampled_from(("", "", "lost", "unanswered")), max_size=40)


class Cluster:
    """Actors in this process, and the outcome of each call to them."""

    def __init__(self, spec: BankSpec, fates: list[str] | None = None) -> None:
        self.fates = iter(fates or [])
        self.actors = [FakeActor(self, spec, shard) for shard in range(spec.num_shards)]
        self.bank = Bank(spec, self.actors)

    def heal(self) -> None:
        self.fates = iter(())


class FakeActor:
    """A stand-in for a Ray actor; ``on_death`` reports its restored state to the test."""

    def __init__(self, cluster: Cluster, spec: BankSpec, shard: int) -> None:
        self.cluster, self.spec, self.shard = cluster, spec, shard
        self.actor = self.start()
        self.on_call: Callable[[FakeActor, str, Any], None] = lambda *_: None
        self.on_death: Callable[[FakeActor], None] = lambda *_: None

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *arguments: self.remote(method, *arguments))

    def remote(self, *call: Any) -> Any:
        fate = next(self.cluster.fates, "")
        if fate == "dies":
            self.die()
        if fate in ("lost", "dies"):
            return ActorUnavailableError("gone", None)
        answer = self.run(*call)
        if fate == "done, then dies":
            self.die()
        return ActorUnavailableError("gone", None) if fate else answer

    def run(self, method: str, *arguments: Any) -> Any:
        # Copied as in Ray, so that the two sides share no memory.
        method, arguments = pickle.loads(pickle.dumps((method, arguments)))
        self.on_call(self, method, arguments)
        try:
            return pickle.loads(pickle.dumps(getattr(self.actor, method)(*arguments)))
        except RayclError as error:
            return RayTaskError(method, "traceback\nof many lines", error).as_instanceof_cause()

    def start(self) -> BankActor[Any]:
        kind = QueueActor if self.spec.kind == "queue" else MemoryBankActor
        return kind(self.spec, self.shard)

    def die(self) -> None:
        self.actor = self.start()
        self.on_death(self)


def fake_get(answer: Any, timeout: float) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


@pytest.fixture(autouse=True, scope="module")
def without_ray() -> Iterator[None]:
    """Connect to the actors in this process without sleeping; snapshots have several row groups and increments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpc, "ray", SimpleNamespace(get=fake_get))
        patch.setattr(rpc, "time", Clock())
        patch.setattr("raycl.negatives.snapshot.ROWS_PER_GROUP", 5)
        patch.setattr("raycl.negatives.snapshot.INCREMENT_SHARE", 1.5)
        patch.setattr("raycl.negatives.snapshot.MAX_INCREMENTS", 3)
        yield


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def a_spec(kind: Any, output: Path, **changed: Any) -> BankSpec:
    if kind == "memory_bank":
        changed["capacity"] = len(IDS)
    usual = {"name": "bank", "kind": kind, "dim": DIM, "output": str(output), "capacity": 30}
    spec = BankSpec(**{**usual, **changed})
    output.mkdir(exist_ok=True)
    if kind == "memory_bank":
        write_samples(spec, np.sort(IDS))
    return spec


def a_queue(output: Path) -> tuple[Cluster, QueueClient]:
    cluster = Cluster(a_spec("queue", output))
    return cluster, QueueClient(cluster.bank)


def assert_same_queue(cluster: Cluster, client: QueueClient) -> None:
    assert state_of(cluster.bank.read_queue()) == state_of(client.queue)


def a_batch(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.standard_normal((size, DIM), np.float32), random.integers(0, 99, size)


def state_of(queue: KeyQueue) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in queue.state_dict().items()}


def rows_of(negatives: Negatives) -> list[Any]:
    return [array.tolist() for array in negatives.arrays()]


def all_rows(cluster: Cluster, client: MemoryBankClient) -> list[Any]:
    client.flush()
    return rows_of(cluster.bank.negatives())


def as_sent(rows: np.ndarray, spec: BankSpec) -> np.ndarray:
    return rows if spec.sent_dtype == np.float32 else normalized(rows).astype(spec.sent_dtype)


wire = st.sampled_from([None, "float16"])
actions = st.lists(
    st.integers(0, 9) | st.just(70) | st.sampled_from(["save", "restore", "flush"]), max_size=12
)


@SETTINGS
@given(
    st.integers(1, 3),
    st.sampled_from(["float32", "float16"]),
    actions,
    faults,
    st.randoms(use_true_random=False),
)
def test_queues_of_workers_and_bank_stay_equal_despite_lost_calls_and_crashes(
    tmp_path_factory: pytest.TempPathFactory,
    num_workers: int,
    dtype: Any,
    actions: list[Any],
    fates: list[str],
    order: Any,
) -> None:
    spec = a_spec("queue", tmp_path_factory.mktemp("bank"), dtype=dtype)
    cluster, queue = Cluster(spec, fates), KeyQueue(spec.capacity, DIM, dtype)
    saved: dict[int, Any] = {0: KeyQueue(spec.capacity, DIM, dtype).state_dict()}

    def join() -> list[QueueClient]:
        return [QueueClient(cluster.bank, rank=rank) for rank in range(num_workers)]

    workers = join()
    for step, action in enumerate(actions, start=1):
        if action == "save":
            for worker in order.sample(workers, num_workers):
                worker.save(step)
            saved[step] = pickle.loads(pickle.dumps(queue.state_dict()))
        elif action == "restore":
            back_to = order.choice(sorted(saved))
            cluster.bank.restore(back_to)
            queue.load_state_dict(saved[back_to])
            workers = join()
        elif action == "flush":
            order.choice(workers).flush()
        else:
            rows, ids = a_batch(action, step)
            queue.push(rows, ids, step)
            for worker in order.sample(workers, num_workers):
                worker.push(rows, ids, step)
    cluster.heal()
    workers[0].flush()
    for worker in workers:
        assert state_of(worker.queue) == state_of(queue)
    assert state_of(cluster.bank.read_queue()) == state_of(queue)


class Deaths:
    """The expected memory bank with crashing shards: each restarts from its part of a snapshot."""

    def __init__(self, cluster: Cluster, bank: MemoryBank) -> None:
        self.bank, self.num_deaths = bank, 0
        self.saved = {(0, actor.shard): self.part(actor) for actor in cluster.actors}
        for actor in cluster.actors:
            actor.on_call, actor.on_death = self.note, self.go_back

    def part(self, actor: FakeActor) -> Negatives:
        first, stop = actor.spec.first_slots[actor.shard : actor.shard + 2]
        return self.bank.read(np.arange(first, stop))

    def note(self, actor: FakeActor, method: str, arguments: Any) -> None:
        if method == "save":
            self.saved[arguments[0], actor.shard] = self.part(actor)
        if method == "restore":
            self.bank.load_part(self.saved[arguments[0], actor.shard])

    def go_back(self, actor: FakeActor) -> None:
        self.num_deaths += 1
        self.bank.load_part(self.saved[read_current(actor.spec).step, actor.shard])


@example(2, "float32", [7, "save", "initialize", "save"], [])
@settings(SETTINGS, max_examples=60)
@given(
    st.integers(1, 3),
    st.sampled_from(["float32", "float16"]),
    st.lists(
        st.integers(1, 7) | st.sampled_from(["save", "save", "restore", "initialize", "prune"]), max_size=14
    ),
    faults,
)
def test_a_memory_bank_restored_from_increments_has_the_rows_of_a_full_copy_and_applies_each_update_once(
    tmp_path_factory: pytest.TempPathFactory,
    num_shards: int,
    dtype: Any,
    actions: list[Any],
    fates: list[str],
) -> None:
    spec = a_spec("memory_bank", tmp_path_factory.mktemp("bank"), num_shards=num_shards, dtype=dtype)
    cluster, bank = Cluster(spec, fates), MemoryBank(IDS, DIM, seed=0, dtype=dtype)
    deaths = Deaths(cluster, bank)
    client = MemoryBankClient(cluster.bank, IDS)
    for step, action in enumerate(actions, start=1):
        if action == "save":
            client.save(step)
        elif action == "restore":
            steps = sorted({saved for saved, _ in deaths.saved})
            cluster.bank.restore(steps[step % len(steps)])
            client = MemoryBankClient(cluster.bank, IDS)
        elif action == "prune":
            kept = {0, *sorted({saved for saved, _ in deaths.saved})[step % 2 :: 2], read_current(spec).step}
            cluster.bank.prune(sorted(kept))
            deaths.saved = {key: rows for key, rows in deaths.saved.items() if key[0] in kept}
        elif action == "initialize":
            rows = a_batch(3, step)[0]
            client.initialize(IDS[2:5], rows)
            bank.initialize(IDS[2:5], as_sent(rows, spec))
        else:
            rows, choice = a_batch(action, step)
            client.update(IDS[choice % 7], rows, step)
            client.flush()
            bank.update(IDS[choice % 7], as_sent(rows, spec), step)
    cluster.heal()
    assert all_rows(cluster, client) == rows_of(bank.negatives())
    for saved in {step for step, _ in deaths.saved}:
        cluster.bank.restore(saved)
        parts = [deaths.saved[saved, shard] for shard in range(num_shards)]
        assert rows_of(cluster.bank.negatives()) == rows_of(concatenate(parts))


def test_every_question_is_answered_and_right_while_shards_die_20_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"Address": {"NodeID": "a node", "IPAddress": "127.0.0.1"}, "NumRestarts": 0}
    monkeypatch.setattr("raycl.negatives.bank.actor_facts", lambda actor: facts)
    cluster = Cluster(a_spec("memory_bank", tmp_path, num_shards=3))
    bank, random = MemoryBank(IDS, DIM, seed=0), np.random.default_rng(0)
    deaths, client = Deaths(cluster, bank), MemoryBankClient(cluster.bank, IDS)
    step = 0
    while deaths.num_deaths < 20:
        cluster.heal()
        step += 1
        rows, choice = a_batch(3, step)
        client.update(IDS[choice % 7], rows, step)
        client.flush()
        bank.update(IDS[choice % 7], rows, step)
        if step % 3 == 0:
            client.save(step)
        cluster.fates = iter(random.choice(FAULTS + ("",) * 15, 40).tolist())
        found, query = cluster.bank.get(IDS), a_batch(1, -step % 99)[0]
        assert [found.rows.tolist(), found.step.tolist()] == rows_of(bank.get(IDS))[::2]
        assert found.newest_step == bank.negatives().step.max()
        (near,) = cluster.bank.nearest(query, k=4)
        (expected,) = nearest(bank.negatives(), checked_query(query, 4, dim=DIM), 4, without=None)
        assert near.sample_id.tolist() == expected.sample_id.tolist()
        assert near.step.tolist() == expected.step.tolist()
        assert near.newest_step == expected.newest_step
        stats = cluster.bank.stats()
        written = bank.negatives().step[bank.negatives().step >= 0]
        assert (stats.filled, stats.newest_step) == (len(written), max(written, default=None))


def test_connecting_waits_for_a_shard_that_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = a_spec("memory_bank", tmp_path)
    answers = iter([ActorUnavailableError("gone", None), spec])
    actor = SimpleNamespace(spec=SimpleNamespace(remote=lambda: next(answers)))
    monkeypatch.setattr("raycl.negatives.bank.list_banks", lambda address: ["bank"])
    monkeypatch.setattr("raycl.negatives.bank.ambiguous_rays", lambda address: [])
    monkeypatch.setattr("raycl.negatives.bank.ray", SimpleNamespace(get_actor=lambda *name: actor))
    found = connect_bank("bank")
    assert (found.spec, found.actors) == (spec, [actor])


def test_the_explorer_waits_shorter_for_a_shard_that_reads_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, timeouts = a_spec("memory_bank", tmp_path), list[float]()

    def get(answer: Any, timeout: float) -> Any:
        timeouts.append(timeout)
        return answer

    actor = SimpleNamespace(spec=SimpleNamespace(remote=lambda: spec))
    monkeypatch.setattr(rpc, "ray", SimpleNamespace(get=get))
    monkeypatch.setattr("raycl.negatives.bank.list_banks", lambda address: ["bank"])
    monkeypatch.setattr("raycl.negatives.bank.ambiguous_rays", lambda address: [])
    monkeypatch.setattr("raycl.negatives.bank.ray", SimpleNamespace(get_actor=lambda *name: actor))
    names: dict[str, Any] = {"bank": "bank", "run": str(tmp_path), "data": None, "token": "", "trusted": ""}
    target = ServeTarget(**names, queries=(), columns=ColumnNames(), max_pixels=1)
    waits = target.explorer().bank.ask(lambda bank: cast("Bank", bank).timeout_s())
    assert waits == 8 < connect_bank("bank").timeout_s() == spec.timeout_s
    assert timeouts == pytest.approx([8, 30])


class FailingStorage:
    """Count the moments of writing files, and fail at one of them: before, during or after a file."""

    def __init__(self, patch: pytest.MonkeyPatch, fails_at: int) -> None:
        self.create, self.moments, self.fails_at = Place.create, 0, fails_at
        patch.setattr(Place, "create", lambda place: self.write(place))

    @contextlib.contextmanager
    def write(self, place: Place) -> Iterator[Any]:
        self.pass_moment()
        with self.create(place) as stream:
            yield stream
            self.pass_moment()
        self.pass_moment()

    def pass_moment(self) -> None:
        self.moments += 1
        if self.moments == self.fails_at:
            raise StorageError("the disk is gone")


@pytest.mark.parametrize("dies", [False, True])
def test_a_snapshot_that_fails_at_any_moment_leaves_the_previous_one_and_the_next_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    def kill_all(cluster: Cluster) -> None:
        for actor in cluster.actors:
            actor.die()

    # Files of two shards, needs.json and current.json: the last moment is after the snapshot is current.
    num_moments = 3 * 4
    for fails_at in range(1, num_moments + 2):
        cluster = Cluster(a_spec("memory_bank", tmp_path / str(fails_at), num_shards=2))
        client, seen = MemoryBankClient(cluster.bank, IDS), {}
        for step in (1, 2, 3):
            client.update(IDS[step : step + 2], a_batch(2, step)[0], step)
            seen[step] = all_rows(cluster, client)
            if step < 3:
                client.save(step)
        with monkeypatch.context() as patch:
            FailingStorage(patch, fails_at)
            with pytest.raises(StorageError) if fails_at <= num_moments else contextlib.nullcontext():
                client.save(3)
        if dies:
            kill_all(cluster)
            assert all_rows(cluster, client) == seen[3 if fails_at >= num_moments else 2]
        cluster.bank.prune([])
        client.update(IDS[:2], a_batch(2, 4)[0], 4)
        expected = all_rows(cluster, client)
        client.save(4)
        cluster.bank.prune([])
        kill_all(cluster)
        assert all_rows(cluster, client) == expected


@SETTINGS
@given(
    st.integers(1, 3), wire, st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=10), lost_calls
)
def test_late_updates_arrive_once_and_in_order_despite_lost_calls(
    tmp_path_factory: pytest.TempPathFactory,
    num_shards: int,
    wire_dtype: Any,
    steps: list[tuple[int, bool]],
    fates: list[str],
) -> None:
    spec = a_spec(
        "memory_bank", tmp_path_factory.mktemp("bank"), num_shards=num_shards, wire_dtype=wire_dtype
    )
    cluster, bank = Cluster(spec, fates), MemoryBank(IDS, DIM, seed=0)
    client = MemoryBankClient(cluster.bank, IDS)
    for step, (size, is_asked_early) in enumerate(steps):
        slots = client.draw(4, step=step)
        expected = bank.read(slots)
        if is_asked_early:
            client.ask(slots)
        rows, choice = a_batch(size, step)
        client.update(IDS[choice % 7], rows, step)
        bank.update(IDS[choice % 7], as_sent(rows, spec), step)
        if not is_asked_early:
            client.ask(slots)
            expected = bank.read(slots)
        part = client.answer()
        assert part.positions.tolist() == [0, 1, 2, 3]
        assert part.rows.tolist() == expected.rows.astype(spec.sent_dtype).tolist()
        assert part.step.tolist() == expected.step.tolist()
        assert client.ids_at(slots).tolist() == expected.sample_id.tolist()
    assert all_rows(cluster, client) == rows_of(bank.negatives())


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_each_shard_is_called_by_one_worker_of_the_group_with_the_rows_of_all(
    tmp_path: Path, num_workers: int
) -> None:
    cluster, bank = Cluster(a_spec("memory_bank", tmp_path, num_shards=3)), MemoryBank(IDS, DIM, seed=0)
    calls: list[int] = []
    for actor in cluster.actors:
        actor.on_call = lambda actor, method, _: calls.append(actor.shard) if method == "push_pull" else None
    group = [
        MemoryBankClient(cluster.bank, IDS, rank=rank, num_workers=num_workers) for rank in range(num_workers)
    ]
    for step in range(3):
        rows, choice = a_batch(20, step)
        bank.update(IDS[choice % 7], rows, step)
        slots = np.concatenate([np.arange(7), bank.draw(4, step=step)])
        for client in group:
            client.update(IDS[choice % 7], rows, step)
            client.ask(slots)
        parts = [client.answer() for client in group]
        for rank, part in enumerate(parts):
            assert part.positions.tolist() == np.flatnonzero(group[0].callers_of(slots) == rank).tolist()
            assert part.rows.tolist() == bank.read(slots[part.positions]).rows.tolist()
        assert sorted(np.concatenate([part.positions for part in parts])) == list(range(11))
    assert sorted(calls) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for client in group:
        client.flush()
    assert rows_of(cluster.bank.negatives()) == rows_of(bank.negatives())


def test_callers_may_overwrite_passed_and_returned_arrays_immediately(tmp_path: Path) -> None:
    specs = [a_spec("memory_bank", tmp_path), a_spec("queue", tmp_path / "queue")]
    bank, queue = MemoryBank(IDS, DIM, seed=0), KeyQueue(30, DIM)
    clusters = [Cluster(spec, ["", "", "", "lost", "lost"]) for spec in specs]
    slots_client, keys = MemoryBankClient(clusters[0].bank, IDS), QueueClient(clusters[1].bank)
    rows, ids, slots = a_batch(3, 0)[0], IDS[:3].copy(), np.arange(3)
    bank.update(ids, rows, 0)
    queue.push(rows, ids, 0)
    slots_client.update(ids, rows, 0)
    slots_client.ask(slots)
    keys.push(rows, ids, 0)
    rows[:], ids[:], slots[:] = 9, 9, 9
    slots_client.ask(np.arange(7))
    for array in slots_client.answer():
        array[:] = 9
    assert all_rows(clusters[0], slots_client) == rows_of(bank.negatives())
    keys.flush()
    assert rows_of(clusters[1].bank.negatives()) == rows_of(queue.negatives())


@pytest.mark.parametrize("restarts", [False, True])
def test_workers_of_an_earlier_attempt_are_refused_even_by_a_restarted_actor(
    tmp_path: Path, restarts: bool
) -> None:
    clusters = Cluster(a_spec("memory_bank", tmp_path)), Cluster(a_spec("queue", tmp_path / "queue"))
    late_slots, late_keys = MemoryBankClient(clusters[0].bank, IDS), QueueClient(clusters[1].bank)
    for cluster in clusters:
        cluster.bank.restore(0)
        if restarts:
            cluster.actors[0].die()
    before = rows_of(clusters[0].bank.negatives())
    late_keys.push(*a_batch(3, 0), 0)
    for call in (
        late_keys.flush,
        lambda: late_keys.save(1),
        lambda: late_slots.initialize(IDS[:2], a_batch(2, 0)[0]),
        *[lambda: (late_slots.ask(np.arange(7)), late_slots.answer())] * 2,
        late_slots.flush,
    ):
        with pytest.raises(RunError, match="restored after this worker had joined") as error:
            call()
        assert "\n" not in str(error.value)
    assert len(clusters[1].bank.negatives()) == 0
    assert rows_of(clusters[0].bank.negatives()) == before


def test_a_restarted_actor_gets_all_rows_again(tmp_path: Path) -> None:
    cluster, client = a_queue(tmp_path)
    for step in range(4):
        client.push(*a_batch(7, step), step)
        if step == 1:
            client.save(2)
    cluster.actors[0].die()
    cluster.fates = iter(["lost", "", "unanswered"])
    client.flush()
    assert client.restarts == 1
    assert_same_queue(cluster, client)


def test_only_rank_0_writes(tmp_path: Path) -> None:
    cluster, calls = Cluster(a_spec("queue", tmp_path)), []
    other = QueueClient(cluster.bank, rank=1)
    cluster.actors[0].on_call = lambda _, method, __: calls.append(method)
    other.push(*a_batch(7, 0), 0)
    other.flush()
    other.save(1)
    assert (calls, len(other.queue)) == ([], 7)


def test_an_actor_that_dies_while_saving_leaves_no_incomplete_snapshot(tmp_path: Path) -> None:
    cluster, client = a_queue(tmp_path)
    client.push(*a_batch(20, 0), 0)
    client.flush()
    cluster.fates = iter(["", "dies"])  # the flush and the save
    client.save(1)
    cluster.bank.restore(1)
    assert_same_queue(cluster, client)


def test_restoring_a_step_without_a_snapshot_leaves_the_bank_unchanged(tmp_path: Path) -> None:
    cluster, client = a_queue(tmp_path)
    client.push(*a_batch(5, 0), 0)
    client.save(1)
    with pytest.raises(RayclError, match="no complete snapshot"):
        cluster.bank.restore(7)
    cluster.actors[0].die()
    assert_same_queue(cluster, client)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda client: client.ask(np.array([3, 7, -1])), "slots -1, 7 are not here: these are 0 to 6"),
        (lambda client: client.slots_of(np.array([4])), "no slot for the samples 4"),
        (lambda client: client.update(IDS[:2], np.full((2, DIM), np.nan), 0), "not embeddings"),
        (lambda client: client.update(IDS[:2], np.ones((3, DIM)), 0), "3 rows came with 2 ids"),
        (lambda client: client.update(IDS[:2] + 100, np.ones((2, DIM)), 0), "no slot for the samples"),
        (lambda client: client.initialize(IDS[:2], np.ones((3, DIM))), "3 rows came with 2 ids"),
    ],
)
def test_invalid_calls_are_refused_in_one_line_without_writing(
    tmp_path: Path, make: Callable[[MemoryBankClient], object], message: str
) -> None:
    cluster = Cluster(a_spec("memory_bank", tmp_path))
    client = MemoryBankClient(cluster.bank, IDS)
    with pytest.raises(ConfigError, match=message) as error:
        make(client)
    assert "\n" not in str(error.value)
    assert all_rows(cluster, client) == rows_of(MemoryBank(IDS, DIM, seed=0).negatives())


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (ActorUnavailableError("gone\nfar", None), ShardAwayError, "did not answer 'info': The actor None is unavailable: gone; check"),
        (GetTimeoutError("slow"), ShardAwayError, "no answer within 5 s"),
        (ActorDiedError(), ShardAwayError, "did not answer 'info': The actor died unexpectedly"),
        (ActorDiedError(RayTaskError("__init__", "a\nKeyError: 'k'", KeyError("k"))), ShardAwayError, "did not answer 'info': KeyError: 'k'; check"),
        (RayTaskError("call", "a\nb", KeyError("k")), RunError, r"^the bank's shard 'bank/0' failed in 'info' with KeyError\('k'\); its log"),
    ],
)  # fmt: skip
def test_a_permanently_lost_shard_is_an_error_in_one_line(
    monkeypatch: pytest.MonkeyPatch, answer: Exception, kind: type[RunError], message: str
) -> None:
    monkeypatch.setattr(rpc, "actor_facts", lambda actor: {"State": "DEAD"})
    actor = SimpleNamespace(info=SimpleNamespace(remote=lambda: answer))
    connection = ShardConnection(actor, "bank/0", timeout_s=5)
    with pytest.raises(RunError, match=message) as error:
        connection.ask(BankActor.info)
    assert type(error.value) is kind
    assert "\n" not in str(error.value) and "'bank/0'" in str(error.value)
    assert connection.waited_s <= 5


def test_clients_wait_for_a_shard_that_ray_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "actor_facts", lambda actor: {"State": "RESTARTING"})
    (actor,) = Cluster(a_spec("queue", tmp_path)).actors
    answers = iter([ActorDiedError(), actor.info.remote()])
    restarting = SimpleNamespace(info=SimpleNamespace(remote=lambda: next(answers)))
    connection = ShardConnection(restarting, "bank/0", timeout_s=5)
    assert connection.ask(BankActor.info).attempt == 0
    assert connection.waited_s > 0


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Start banks whose actors never answer; keeps the time that they got and the actors that were killed."""
    seen = SimpleNamespace(error=GetTimeoutError("slow"), timeout_s=0.0, killed=[], node="")

    def get(answers: Any, timeout: float) -> None:
        seen.timeout_s = timeout
        raise seen.error

    actor = SimpleNamespace(info=SimpleNamespace(remote=lambda: None))
    for name in ("_check_memory", "_stop_predecessor"):
        monkeypatch.setattr(start, name, lambda _: None)
    monkeypatch.setattr(start, "_create_actors", lambda _: [actor])
    monkeypatch.setattr(start, "actor_facts", lambda _: {"Address": {"IPAddress": seen.node}})
    monkeypatch.setattr(start.ray, "get", get)
    monkeypatch.setattr(start.ray, "kill", seen.killed.append)
    return seen


def test_a_bank_with_a_snapshot_gets_time_to_read_it(starting: SimpleNamespace, tmp_path: Path) -> None:
    spec = a_spec("queue", tmp_path, capacity=10**6)
    with pytest.raises(RunError, match="found no place within 120 s: 1 shards need"):
        start_bank(spec)
    assert starting.timeout_s == spec.timeout_s
    write_current(spec, Current(step=1))
    starting.node = "a"
    with pytest.raises(
        RunError,
        match=rf"not ready within 123 s, .* the speed of {tmp_path}/bank, which may hold a snapshot, or raise",
    ) as error:
        start_bank(spec)
    assert starting.timeout_s == spec.timeout_s + 3  # 28 MB at 10 MB a second
    write_current(spec, Current(step=0))  # whose slots were initialized
    shard_place(spec, 0, 0).write_text("rows")
    with pytest.raises(RunError, match="not ready within 123 s"):
        start_bank(spec)
    assert "\n" not in str(error.value)


def test_a_bank_that_cannot_be_built_is_refused_with_the_cause(
    starting: SimpleNamespace, tmp_path: Path
) -> None:
    starting.error = ActorDiedError(RayTaskError("__init__", "a\nMemoryError: 30 GiB", MemoryError("30 GiB")))
    with pytest.raises(RunError, match="^the bank did not start: MemoryError: 30 GiB; try again"):
        start_bank(a_spec("queue", tmp_path))


def test_ctrl_c_during_the_start_of_a_bank_ends_its_actors(starting: SimpleNamespace, tmp_path: Path) -> None:
    starting.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        start_bank(a_spec("queue", tmp_path, detached=True))
    assert len(starting.killed) == 1


def test_a_bank_that_does_not_answer_is_named_with_the_ways_to_remove_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(name: str) -> Bank:
        raise RunError(f"the bank {name!r} does not answer")

    monkeypatch.setattr(start, "list_banks", lambda: ["bank"])
    monkeypatch.setattr(start, "connect_bank", connect)
    message = "^a bank 'bank' exists and does not answer; .* from 'bank/0' on.* ray.kill .* set bank.name"
    with pytest.raises(RunError, match=message) as error:
        start._stop_predecessor(a_spec("queue", tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("error", [RunError("it does not answer"), ConfigError("there is no bank 'bank'")])
def test_a_bank_that_ends_while_it_is_asked_does_not_keep_another_from_starting(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = iter([["bank"], []])
    monkeypatch.setattr(start, "list_banks", lambda: next(listed))
    monkeypatch.setattr(start, "connect_bank", Mock(side_effect=error))
    start._stop_predecessor(a_spec("queue", tmp_path))


@pytest.mark.parametrize("kind", ["queue", "memory_bank"])
def test_clients_wait_for_a_shard_that_reads_its_snapshot(kind: str, tmp_path: Path) -> None:
    bank = Cluster(a_spec(kind, tmp_path, dim=1_000)).bank
    client = QueueClient(bank) if kind == "queue" else MemoryBankClient(bank, IDS)
    shard = client._actor if isinstance(client, QueueClient) else client._shards[0]
    assert shard.timeout_s == bank.timeout_s(for_storage=True) > bank.spec.timeout_s
