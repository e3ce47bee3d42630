"""The bank on a real Ray cluster: clients equal stores, crashed shards restart, and any process may query."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import ray
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ray.util.placement_group import placement_group, remove_placement_group

from raycl.errors import ConfigError, RayclError, RunError
from raycl.negatives import KeyQueue, MemoryBank, Negatives
from raycl.negatives.bank import Bank, connect_bank, list_banks
from raycl.negatives.client import MemoryBankClient, QueueClient
from raycl.negatives.placement import nodes_for_a_bank
from raycl.negatives.search import SampleRows
from raycl.negatives.spec import BankSpec
from raycl.negatives.start import _has_place, start_bank
from tests.cluster.faults import alive, extra_node, wait_until

pytestmark = pytest.mark.usefixtures("ray_cluster")

DIM, CAPACITY, SEED = 8, 24, 3
IDS = np.random.default_rng(0).choice(1_000, CAPACITY, replace=False) - 500
SETTINGS = settings(
    deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def a_spec(output: Path, **changed: Any) -> BankSpec:
    usual = {"name": "test", "kind": "queue", "dim": DIM, "capacity": CAPACITY, "seed": SEED}
    return BankSpec(**{**usual, "output": str(output), **changed})


@pytest.fixture(scope="module")
def banks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Bank]]:
    """Start a queue, and memory banks of rows and of partition functions; tests begin with ``restore(0)``."""
    output = tmp_path_factory.mktemp("banks")
    slots = a_spec(output / "slots", name="memory bank", kind="memory_bank", num_shards=3)
    started = {
        "queue": start_bank(a_spec(output / "queue", name="queue")),
        "memory_bank": start_bank(slots, IDS),
        "partition": start_bank(
            replace(slots, name="partition", kind="partition", output=str(output / "u")), IDS
        ),
    }
    yield started
    for bank in started.values():
        bank.stop()


def client_of(bank: Bank, rank: int = 0) -> Any:
    if bank.spec.kind == "queue":
        return QueueClient(bank, rank=rank)
    return MemoryBankClient(bank, IDS)


def store_of(bank: Bank) -> Any:
    if bank.spec.kind == "queue":
        return KeyQueue(CAPACITY, DIM)
    return MemoryBank(IDS, DIM, seed=SEED, kind=bank.spec.kind)


def a_batch(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.standard_normal((size, DIM), np.float32), random.choice(IDS, size)


def write(store: Any, size: int, step: int) -> None:
    rows, ids = a_batch(size, step)
    if hasattr(store, "push"):
        store.push(rows, ids, step)
    else:
        store.update(ids, rows, step)
    if isinstance(store, MemoryBankClient):
        store.flush()


def plain(found: Negatives | SampleRows) -> list[Any]:
    return [array.tolist() for array in (found.rows, found.sample_id, found.step)]


def read(client: MemoryBankClient, slots: np.ndarray) -> list[Any]:
    """Return these rows as the only client of a bank reads them."""
    client.ask(slots)
    part = client.answer()
    return plain(Negatives(part.rows, client.ids_at(slots), part.step))


def rows_of(bank: Bank, client: Any) -> list[Any]:
    """Return all rows as a client reads them."""
    if isinstance(client, QueueClient):
        return plain(client.queue.negatives())
    client.flush()
    return plain(bank.negatives())


def kill(bank: Bank, shard: int) -> None:
    os.kill(bank.stats().shards[shard].pid, signal.SIGKILL)


KINDS = pytest.mark.parametrize("kind", ["queue", "memory_bank"])
ALL_KINDS = pytest.mark.parametrize("kind", ["queue", "memory_bank", "partition"])


@ALL_KINDS
def test_a_client_has_the_same_rows_as_a_local_store(banks: dict[str, Bank], kind: str) -> None:
    bank = banks[kind]
    bank.restore(0)
    client, store = client_of(bank), store_of(bank)
    asked = np.unique(IDS)[3:9]
    for step, size in enumerate([5, 0, 19, 1, 50, 7]):
        write(client, size, step)
        write(store, size, step)
        assert rows_of(bank, client) == plain(store.negatives())
        if isinstance(client, QueueClient):
            assert client.queue.sequence == store.sequence
            client.flush()
        else:
            slots = client.draw(9, step=step)
            assert np.array_equal(slots, store.draw(9, step=step))
            assert np.array_equal(client.slots_of(asked), store.slots_of(asked))
            assert read(client, slots) == plain(store.read(slots))
        assert plain(bank.get(asked)) == plain(store.get(asked))
        assert bank.get(asked).newest_step == store.negatives().step.max()
        assert plain(bank.negatives()) == plain(store.negatives())
    assert sum(bank.spec.bytes_of(shard) for shard in range(bank.spec.num_shards)) == store.num_bytes


def test_initial_rows_are_stored_in_the_bank(banks: dict[str, Bank]) -> None:
    bank = banks["memory_bank"]
    bank.restore(0)
    client, store = client_of(bank), store_of(bank)
    rows, ids = a_batch(9, 3)[0], IDS[4:13]
    for each in (client, store):
        each.initialize(ids, rows)
    assert rows_of(bank, client) == plain(store.negatives())
    assert (bank.get(ids).step == -1).all()


@ALL_KINDS
@settings(SETTINGS, max_examples=2)
@given(st.lists(st.sampled_from([5, 11, "save", "kill"]), min_size=4, max_size=8), st.integers(0, 2))
@example([5, "save", 11, "kill", 5, "kill", 11], 0)
def test_killed_shards_restart_with_their_rows(
    banks: dict[str, Bank], kind: str, actions: list[Any], shard: int
) -> None:
    bank = banks[kind]
    bank.restore(0)
    client, store = client_of(bank), store_of(bank)
    saved = {name: np.copy(value) for name, value in store.state_dict().items()}
    for step, action in enumerate(actions, start=1):
        if action == "save":
            client.save(step)
            saved = {name: np.copy(value) for name, value in store.state_dict().items()}
        elif action == "kill" and bank.spec.num_shards > shard:
            kill(bank, shard)
            if kind != "queue":
                first, stop = bank.spec.first_slots[shard : shard + 2]
                store.load_part(
                    Negatives(*(saved[name][first:stop] for name in ("rows", "sample_id", "step")))
                )
        elif not isinstance(action, str):
            write(client, action, step)
            write(store, action, step)
    client.flush()
    assert plain(bank.negatives()) == plain(store.negatives())


def test_a_queue_recovers_all_rows_after_its_actor_dies_between_two_pushes(banks: dict[str, Bank]) -> None:
    bank = banks["queue"]
    bank.restore(0)
    workers = [client_of(bank, rank) for rank in (0, 1)]
    restarts = bank.stats().restarts
    for step in range(9):
        for worker in workers:
            write(worker, 10, step)
        if step == 2:
            for worker in workers:
                worker.save(step)
        if step == 5:
            kill(bank, 0)
    workers[0].flush()
    assert plain(bank.negatives()) == rows_of(bank, workers[0]) == rows_of(bank, workers[1])
    assert len(bank.negatives()) == CAPACITY
    assert bank.stats().restarts == restarts + 1
    assert [worker.restarts for worker in workers] == [1, 0]
    assert workers[0].waited_s > 0


def test_two_workers_that_call_a_share_of_the_shards_equal_one_store(banks: dict[str, Bank]) -> None:
    bank, store = banks["memory_bank"], store_of(banks["memory_bank"])
    bank.restore(0)
    meetings: list[int] = []
    workers = [
        MemoryBankClient(bank, IDS, rank=rank, num_workers=2, barrier=lambda: meetings.append(1))
        for rank in (0, 1)
    ]
    for step in range(4):
        rows, ids = a_batch(12, step)
        store.update(ids, rows, step)
        slots = store.draw(10, step=step)
        for worker in workers:
            worker.update(ids, rows, step)
            worker.ask(slots)
        for part in (worker.answer() for worker in workers):
            assert part.rows.tolist() == store.read(slots[part.positions]).rows.tolist()
    for worker in reversed(workers):  # rank 0 writes the snapshot
        worker.save(4)
    assert len(meetings) == 4
    bank.restore(4)
    assert plain(bank.negatives()) == plain(store.negatives())


def test_only_a_bank_with_the_same_output_is_replaced(tmp_path: Path) -> None:
    first = start_bank(a_spec(tmp_path / "a", detached=True))
    client = client_of(first)
    write(client, 10, 1)
    client.save(1)
    with pytest.raises(
        ConfigError, match=f"'test' belongs to the run at {tmp_path / 'a'}; set bank.name"
    ) as error:
        start_bank(a_spec(tmp_path / "b"))
    assert "\n" not in str(error.value)
    assert plain(first.negatives()) == rows_of(first, client)
    second = start_bank(a_spec(tmp_path / "a"))
    assert plain(second.negatives()) == rows_of(second, client)
    with pytest.raises(RunError, match="did not answer") as error:
        client.flush()
    assert "\n" not in str(error.value)
    second.stop()
    wait_until(lambda: "test" not in list_banks(), timeout_s=10)


def test_a_bank_with_another_shape_does_not_start_from_the_snapshot(tmp_path: Path) -> None:
    bank = start_bank(a_spec(tmp_path))
    bank.save(1)
    bank.stop()
    with pytest.raises(ConfigError, match="its dim is 8, this one's is 9") as error:
        start_bank(a_spec(tmp_path, dim=9))
    assert "\n" not in str(error.value)
    assert "test" not in list_banks()


def test_a_shard_too_large_for_every_node_is_refused_before_the_bank_starts(tmp_path: Path) -> None:
    message = r"a shard of the bank needs 51,409.0 GiB of memory and the largest node for it has \d+\.\d GiB; set bank.dtype=float16"
    with pytest.raises(ConfigError, match=message) as error:
        start_bank(a_spec(tmp_path, capacity=10**12))
    assert "\n" not in str(error.value)
    assert "test" not in list_banks() and not (tmp_path / "bank").exists()


def test_a_bank_that_cannot_be_scheduled_is_refused_in_time(tmp_path: Path) -> None:
    have = int(max(node["Resources"]["memory"] for node in ray.nodes()))
    others = placement_group([{"memory": have // 2}])
    ray.get(others.ready(), timeout=30)
    # Few long rows: each of two shards needs 0.6 of the memory, of which half is free.
    rows, dim = 100, int(0.6 * have / 1.15 / 100 / 4)
    spec = a_spec(tmp_path, kind="memory_bank", capacity=2 * rows, dim=dim, num_shards=2, timeout_s=3.0)
    try:
        with pytest.raises(
            RunError, match="no place within 3 s: 2 shards need up to .* raise bank.shards"
        ) as error:
            start_bank(spec, np.arange(2 * rows))
    finally:
        remove_placement_group(others)
    assert "\n" not in str(error.value)
    assert "test" not in list_banks()


def test_an_actor_that_still_starts_has_a_place() -> None:
    class Slow:
        def __init__(self) -> None:
            time.sleep(60)

    kind: Any = ray.remote(Slow)
    slow, without = kind.options(num_cpus=0).remote(), kind.options(num_cpus=10**6).remote()
    try:
        wait_until(lambda: _has_place(slow))
        assert not _has_place(without)
    finally:
        ray.kill(slow)
        ray.kill(without)


def test_repeated_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not distinct: 0 came"):
        start_bank(a_spec(tmp_path, kind="memory_bank"), np.zeros(CAPACITY, int))


@KINDS
def test_queries_are_answered_exactly(
    banks: dict[str, Bank], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycl.negatives.bank._ROWS_PER_CALL", 5)
    monkeypatch.setattr("raycl.negatives.bank._QUERIES_PER_CALL", 2)
    bank = banks[kind]
    bank.restore(0)
    client, num_puts = client_of(bank), bank.stats().puts
    for step in range(3):
        write(client, 6, step)
    client.flush()
    seen = bank.negatives()
    written = np.flatnonzero(seen.step >= 0)
    units = seen.rows[written] / np.linalg.norm(seen.rows[written], axis=1, keepdims=True)

    queries = a_batch(3, 99)[0]
    for query, found in zip(queries, bank.nearest(queries, k=4), strict=True):
        similarities = units @ query / np.linalg.norm(query)
        best = np.argsort(-similarities)[:4]
        assert found.sample_id.tolist() == seen.sample_id[written][best].tolist()
        assert found.step.tolist() == seen.step[written][best].tolist()
        assert found.newest_step == 2
        np.testing.assert_allclose(found.similarity, similarities[best], atol=1e-6)
    assert len(bank.nearest(queries[0], k=500)[0]) == len(written)

    sample = int(seen.sample_id[written][0])
    assert sample not in bank.nearest_of(sample, k=500).sample_id
    newest = seen.rows[written][np.flatnonzero(seen.sample_id[written] == sample)]
    newest = newest[seen.step[written][seen.sample_id[written] == sample].argmax()]
    found = [one for one in bank.nearest(newest, k=500)[0].sample_id if one != sample]
    assert found == bank.nearest_of(sample, k=500).sample_id.tolist()

    if kind == "queue":
        assert plain(bank.get(IDS[2:7])) == plain(client.queue.get(IDS[2:7]))
    else:
        assert plain(bank.get(IDS[2:7])) == read(client, client.slots_of(IDS[2:7]))
    stats = bank.stats()
    assert (stats.rows, stats.filled, stats.newest_step, stats.puts) == (
        CAPACITY,
        len(written),
        2,
        num_puts + 18,
    )
    assert sum(num for _, num in stats.age_histogram) == len(written)
    assert stats.puts_per_second > 0 and stats.num_bytes == CAPACITY * (4 * DIM + 16)
    assert [shard.num_bytes for shard in stats.shards] == [stats.num_bytes // len(stats.shards)] * len(
        stats.shards
    )

    assert bank.export(str(tmp_path / "export")) == len(written)
    assert len(list((tmp_path / "export").iterdir())) >= bank.spec.num_shards
    frame = pd.concat(map(pd.read_parquet, (tmp_path / "export").iterdir()))
    assert sorted(frame.sample_id) == sorted(seen.sample_id[written])


@KINDS
def test_empty_banks_answer(banks: dict[str, Bank], kind: str) -> None:
    bank = banks[kind]
    bank.restore(0)
    (nothing,) = bank.nearest(np.ones(DIM))
    assert (len(nothing), nothing.newest_step) == (0, -1)
    assert (bank.stats().filled, bank.stats().age_max) == (0, None)
    with pytest.raises(ConfigError, match=rf"holds no row of sample {IDS[0]} now"):
        bank.nearest_of(int(IDS[0]))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda banks: banks["queue"].nearest(np.ones(3)), r"came as \[3\]; give \[8\]"),
        (lambda banks: banks["queue"].nearest_of(10**6), "holds no row of sample 1000000 now"),
        (
            lambda banks: banks["memory_bank"].get(np.array([IDS[0], 10**6])),
            "no slot for the samples 1000000",
        ),
        (lambda banks: banks["memory_bank"].nearest_of(10**6), "no slot for the samples 1000000"),
        (
            lambda banks: banks["partition"].nearest(np.ones(3)),
            "partition functions, which have no neighbors",
        ),
        (
            lambda _: connect_bank("missing"),
            "no bank 'missing': the banks here are 'memory bank', 'partition', 'queue'",
        ),
    ],
)
def test_unanswerable_queries_are_refused_in_one_line(
    banks: dict[str, Bank], ask: Callable[[dict[str, Bank]], object], message: str
) -> None:
    with pytest.raises(RayclError, match=message) as error:
        ask(banks)
    assert isinstance(error.value, ConfigError) and "\n" not in str(error.value)


def test_workers_write_to_a_pickled_bank(banks: dict[str, Bank]) -> None:
    bank = banks["queue"]
    bank.restore(0)

    def work(bank: Bank, rank: int, barrier: Any) -> list[Any]:
        worker = QueueClient(bank, rank=rank)
        ray.get(barrier.wait.remote())
        for step in range(3):
            random = np.random.default_rng(step)
            worker.push(random.standard_normal((7, 8), np.float32), np.arange(7) + 10 * step, step)
        worker.flush()
        return [array.tolist() for array in worker.queue.negatives().arrays()]

    class Meeting:
        def __init__(self) -> None:
            self.num_here = 0

        def wait(self) -> None:
            self.num_here += 1
            while self.num_here < 2:
                time.sleep(0.01)

    meetings: Any = ray.remote(Meeting)
    meeting = meetings.options(num_cpus=0, max_concurrency=2).remote()
    seen: Any = ray.get([ray.remote(work).options(num_cpus=0).remote(bank, rank, meeting) for rank in (0, 1)])
    assert seen[0] == seen[1] == plain(bank.negatives())
    assert len(bank.negatives()) == 21
    assert connect_bank("queue").spec == bank.spec


@pytest.mark.drill
def test_a_bank_is_placed_on_labeled_nodes_if_there_are_any(tmp_path: Path) -> None:
    with extra_node(1, **{"raycl.io/role": "gpu"}) as passing:
        with pytest.raises(ConfigError, match="none of them is for a bank; label one as memory or head"):
            start_bank(a_spec(tmp_path / "none"))
        assert nodes_for_a_bank() == []
        with extra_node(0, **{"raycl.io/role": "memory"}) as lasting:
            bank = start_bank(a_spec(tmp_path / "some"))
            assert [node["NodeID"] for node in nodes_for_a_bank()] == [lasting.id]
            assert all(lasting.has(shard.pid) for shard in bank.stats().shards)
            bank.stop()
        assert alive() >= {passing.id}
    assert {node["NodeID"] for node in nodes_for_a_bank()} == alive()
