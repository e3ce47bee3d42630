"""The actors of a bank without Ray: together they are the store, restore snapshots, and answer questions."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycl.errors import ConfigError, RayclError, RunError, StorageError
from raycl.negatives import KeyQueue, MemoryBank, Negatives, stats
from raycl.negatives.actor import BankActor, MemoryBankActor, QueueActor, Update
from raycl.negatives.sample_index import SampleIndex
from raycl.negatives.search import checked_query, merge
from raycl.negatives.snapshot import (
    Current,
    prune_snapshots,
    read_current,
    shape_metadata,
    shard_file,
    snapshot_folder,
    snapshot_steps,
    write_current,
    write_rows,
    write_samples,
)
from raycl.negatives.spec import BankSpec
from raycl.negatives.stats import RateMeter, sum_up
from raycl.storage import Place

DIM = 4
SETTINGS = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**32 - 1)
IDS = np.array([3, -5, 10, 11, 40, 41, 42])
NO_SLOTS = IDS[:0]


def a_spec(kind: Any = "queue", output: str | Path = "unused", **changed: Any) -> BankSpec:
    size = {"capacity": 12 if kind == "queue" else len(IDS)}
    return BankSpec(**{"name": "bank", "kind": kind, "dim": DIM, "output": str(output), **size, **changed})


def some_rows(num: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num, DIM), np.float32)


def bank_actors(spec: BankSpec) -> list[MemoryBankActor]:
    write_samples(spec, SampleIndex(IDS).sample_id)
    return [MemoryBankActor(spec, shard) for shard in range(spec.num_shards)]


def a_queue(spec: BankSpec, num_rows: int) -> KeyQueue:
    """A queue to which so many rows were pushed, five a step."""
    queue = KeyQueue(spec.capacity, spec.dim, spec.row_dtype)
    rows, ids = (
        np.random.default_rng(0).standard_normal((num_rows, spec.dim), np.float32),
        np.arange(num_rows),
    )
    for start in range(0, num_rows, 5):
        queue.push(rows[start : start + 5], 7 * ids[start : start + 5], start // 5)
    return queue


def a_queue_actor(spec: BankSpec, num_rows: int) -> tuple[QueueActor, KeyQueue]:
    actor, queue = QueueActor(spec), a_queue(spec, num_rows)
    actor.push(0, *queue.since(0))
    return actor, queue


def contents(actor: BankActor[Any]) -> list[list[Any]]:
    return [array.tolist() for array in actor.store.negatives().arrays()]


def state_of(queue: Any) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in queue.state_dict().items()}


@SETTINGS
@given(st.lists(st.integers(0, 30), max_size=8), st.data())
def test_a_queue_actor_stores_a_push_once_and_says_how_much_it_has_seen(
    sizes: list[int], data: st.DataObject
) -> None:
    spec = a_spec()
    actor, queue, num_new = QueueActor(spec), KeyQueue(spec.capacity, DIM), 0
    for step, size in enumerate(sizes):
        before = queue.sequence
        queue.push(some_rows(size, seed=step), np.arange(size) + 100 * step, step)
        num_new += min(size, spec.capacity)
        for _ in range(data.draw(st.integers(1, 3))):
            assert actor.push(0, *queue.since(before)).sequence == queue.sequence
        late = data.draw(st.integers(0, before))
        assert actor.push(0, *queue.since(late)).sequence == queue.sequence
    assert state_of(actor) == state_of(queue)
    assert actor.throughput().puts == num_new


def test_a_queue_actor_that_lacks_earlier_rows_stores_nothing_and_says_so() -> None:
    spec = a_spec()
    (actor, queue), other = a_queue_actor(spec, 10), QueueActor(spec)
    assert other.push(0, *queue.since(4)).sequence == 0
    assert len(other.store) == 0
    assert other.push(0, *queue.since(0)).sequence == 10
    assert other.push(0, queue.since(10)[0], 30).sequence == 10
    assert state_of(other) == state_of(actor)
    # All rows of a full queue replace whatever the actor has.
    far = a_queue(spec, 95)
    assert other.push(0, *far.since(95 - spec.capacity)).sequence == 95
    assert state_of(other) == state_of(far)


@SETTINGS
@given(st.lists(st.tuples(st.integers(1, 2), st.booleans()), max_size=8), st.integers(1, 3))
def test_a_repeated_update_is_applied_once(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[int, bool]], num_shards: int
) -> None:
    spec = a_spec("memory_bank", tmp_path_factory.mktemp("bank"), num_shards=num_shards, seed=2)
    actors, bank = bank_actors(spec), MemoryBank(IDS, DIM, seed=2)
    serials = {1: 0, 2: 0}
    for step, (client, is_repeated) in enumerate(calls):
        ids, rows = IDS[[step % 7, (step + 3) % 7]], some_rows(2, seed=step)
        bank.update(ids, rows, step)
        serials[client] += 1
        shards = np.searchsorted(spec.first_slots[1:], bank.slots_of(ids), side="right")
        for number, actor in enumerate(actors):
            own = shards == number
            update = Update(f"client {client}", serials[client], ids[own], rows[own], step)
            slots = bank.slots_of(ids[own])
            pulled = actor.push_pull(0, (update,), slots)
            if is_repeated:
                pulled = actor.push_pull(0, (update,), slots)
            assert np.array_equal(pulled.rows, bank.read(slots).rows)
            assert np.array_equal(pulled.step, bank.read(slots).step)
    rows = np.concatenate([actor.read_slots(0, 9).rows for actor in actors])
    assert np.array_equal(rows, bank.negatives().rows)


def test_workers_of_another_attempt_are_refused_also_by_an_actor_that_restarted(tmp_path: Path) -> None:
    queue_spec, bank_spec = a_spec(output=tmp_path / "queue"), a_spec("memory_bank", tmp_path / "bank")
    rows, update = a_queue(queue_spec, 5).since(0), Update("client", 1, IDS[:2], some_rows(2), 0)
    actors = QueueActor(queue_spec), bank_actors(bank_spec)[0]
    for spec, actor in zip((queue_spec, bank_spec), actors, strict=True):
        actor.restore(0, 5)
        write_current(spec, Current(0, 5))
    for queue, bank in (actors, (QueueActor(queue_spec), MemoryBankActor(bank_spec))):
        before = contents(queue), contents(bank)
        calls: list[Callable[[int], object]] = [
            lambda attempt, queue=queue: queue.push(attempt, *rows),
            lambda attempt, bank=bank: bank.push_pull(attempt, (update,), NO_SLOTS),
            lambda attempt, bank=bank: bank.initialize(attempt, IDS[:2], some_rows(2)),
        ]
        for call in calls:
            for attempt in (4, 6):
                with pytest.raises(RunError, match="restored after this worker had joined") as error:
                    call(attempt)
                assert "\n" not in str(error.value)
        assert (contents(queue), contents(bank)) == before
        queue.push(5, *rows)
        bank.push_pull(5, (update,), NO_SLOTS)
        assert queue.info().attempt == bank.info().attempt == 5


def test_serials_start_again_in_each_attempt(tmp_path: Path) -> None:
    (actor,) = bank_actors(a_spec("memory_bank", tmp_path))
    actor.restore(0, 1)
    update = Update("client", 1, IDS[:2], some_rows(2), 0)
    actor.push_pull(1, (update,), NO_SLOTS)
    once = contents(actor)
    actor.restore(0, 2)
    assert contents(actor) != once
    actor.push_pull(2, (update,), NO_SLOTS)
    assert contents(actor) == once


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("num_rows", [0, 7, 12, 31])
def test_a_queue_is_restored_from_its_snapshot(tmp_path: Path, dtype: str, num_rows: int) -> None:
    spec = a_spec(output=tmp_path, dtype=dtype)
    actor, queue = a_queue_actor(spec, num_rows)
    actor.save(4)
    write_current(spec, Current(4, 0))
    again = QueueActor(spec)
    assert state_of(again) == state_of(queue)
    again.restore(0, 1)
    assert state_of(again) == state_of(KeyQueue(spec.capacity, DIM, dtype))
    again.restore(4, 2)
    assert state_of(again) == state_of(queue)


def write_sharded(spec: BankSpec, queue: KeyQueue, num_shards: int) -> None:
    """Write the snapshot of step 4 as raycl 0.1.0 did: row number n in shard n % num_shards."""
    capacity, held = spec.capacity // num_shards, queue.negatives()
    for shard in range(num_shards):
        sequence = len(range(shard, queue.sequence, num_shards))
        metadata = shape_metadata(spec, shard) | {"num_shards": str(num_shards)}
        metadata |= {"step": "4", "sequence": str(sequence), "attempt": "0", "applied": "{}"}
        rows = held[shard::num_shards]
        assert len(rows) == min(sequence, capacity)
        write_rows(snapshot_folder(spec, 4) / shard_file(shard, num_shards), rows, metadata)


@pytest.mark.parametrize("num_rows", [0, 1, 7, 12, 31])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_a_queue_is_restored_from_the_shards_of_an_earlier_version(
    tmp_path: Path, num_rows: int, num_shards: int
) -> None:
    spec = a_spec(output=tmp_path)
    queue = a_queue(spec, num_rows)
    write_sharded(spec, queue, num_shards)
    actor = QueueActor(spec)
    actor.restore(4, 1)
    assert state_of(actor) == state_of(queue)


def test_an_earlier_snapshot_that_is_incomplete_is_refused(tmp_path: Path) -> None:
    spec = a_spec(output=tmp_path)
    queue = a_queue(spec, 31)
    write_sharded(spec, queue, 3)
    path = Path((snapshot_folder(spec, 4) / shard_file(1, 3)).uri)
    kept = path.read_bytes()
    path.unlink()
    with pytest.raises(StorageError, match="no complete snapshot"):
        QueueActor(spec).restore(4, 1)
    path.write_bytes(kept)
    queue.negatives().step[5] = -1  # a row that had not come when the shard was saved
    write_sharded(spec, queue, 3)
    with pytest.raises(StorageError, match="lacks keys; resume from a checkpoint of another step"):
        QueueActor(spec).restore(4, 1)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_memory_bank_is_restored_from_its_snapshot(tmp_path: Path, dtype: str, num_shards: int) -> None:
    spec = a_spec("memory_bank", tmp_path, dtype=dtype, num_shards=num_shards)
    actors = bank_actors(spec)
    fresh = [contents(actor) for actor in actors]
    for actor in actors:
        own = actor.read_slots(0, 9).sample_id[:2]
        actor.push_pull(0, (Update("client", 1, own, some_rows(len(own)), 3),), NO_SLOTS)
        actor.save(4)
    updated = [contents(actor) for actor in actors]
    assert updated != fresh
    assert [contents(actor) for actor in bank_actors(spec)] == fresh
    write_current(spec, Current(4, 0))
    assert [contents(actor) for actor in bank_actors(spec)] == updated
    for actor, before in zip(actors, fresh, strict=True):
        actor.restore(0, 1)
        assert contents(actor) == before


def test_a_snapshot_remembers_which_updates_are_in_it(tmp_path: Path) -> None:
    spec = a_spec("memory_bank", tmp_path)
    (actor,) = bank_actors(spec)
    update = Update("client", 1, IDS[:2], some_rows(2), 0)
    actor.push_pull(0, (update,), NO_SLOTS)
    actor.save(4)
    for attempt in (0, 1):
        write_current(spec, Current(4, attempt))
        (again,) = bank_actors(spec)
        again.push_pull(attempt, (update,), NO_SLOTS)  # its answer was lost with the actor
        assert (contents(again) == contents(actor)) == (attempt == 0)


def test_a_snapshot_larger_than_a_group_of_rows_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycl.negatives.snapshot.ROWS_PER_GROUP", 5)
    actor, queue = a_queue_actor(a_spec(output=tmp_path), 31)
    actor.save(4)
    actor.restore(0, 1)
    actor.restore(4, 2)
    assert state_of(actor) == state_of(queue)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_pandas_opens_a_snapshot_and_an_export(tmp_path: Path, dtype: str) -> None:
    actor, queue = a_queue_actor(a_spec(output=tmp_path, dtype=dtype), 31)
    actor.save(12)
    assert actor.export(0, 100, str(tmp_path / "export")) == 12
    held = queue.negatives()
    for path in ("bank/step-00000012/shard-0-of-1.parquet", "export/shard-0-of-1-from-0000000000.parquet"):
        frame = pd.read_parquet(tmp_path / path)
        assert list(frame.columns) == ["sample_id", "step", "embedding"]
        assert (frame.sample_id.tolist(), frame.step.tolist()) == (
            held.sample_id.tolist(),
            held.step.tolist(),
        )
        assert np.array_equal(np.stack(frame.embedding.tolist()), held.rows)
        assert frame.embedding[0].dtype == dtype


def test_files_are_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor, _ = a_queue_actor(a_spec(output=tmp_path), 7)
    actor.save(1)

    def broken(*_: Any) -> None:
        raise OSError("no space left on device\nreally")

    monkeypatch.setattr("raycl.negatives.snapshot._table", broken)
    with pytest.raises(StorageError, match="no space left on device; check") as error:
        actor.save(2)
    assert "\n" not in str(error.value)
    assert [path.name for path in (tmp_path / "bank").rglob("*.parquet")] == ["shard-0-of-1.parquet"]
    assert list((tmp_path / "bank/step-00000002").iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("queue", {"dim": 5}, "its dim is 4, this one's is 5; set projection_head.dim as it was"),
        (
            "queue",
            {"capacity": 24},
            "its capacity is 12, this one's is 24; set negatives.capacity, or the data, as it was",
        ),
        ("queue", {"dtype": "float16"}, "its dtype is float32, this one's is float16; set bank.dtype"),
        ("memory_bank", {"num_shards": 2}, "its num_shards is 1, this one's is 2; set bank.shards"),
        ("memory_bank", {"num_shards": 1}, "its num_shards is 3, this one's is 1; set bank.shards"),
    ],
)
def test_a_snapshot_of_another_shape_is_refused_in_one_line(
    tmp_path: Path, kind: str, changed: dict[str, Any], message: str
) -> None:
    saved = a_spec(kind, tmp_path, num_shards=3 if changed == {"num_shards": 1} else 1)
    for actor in [QueueActor(saved)] if kind == "queue" else bank_actors(saved):
        actor.save(4)
    spec = a_spec(kind, tmp_path, **changed)
    other = QueueActor(spec) if kind == "queue" else bank_actors(spec)[0]
    before = contents(other)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        other.restore(4, 1)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
    assert (contents(other), other.info().attempt) == (before, 0)


def test_a_snapshot_of_other_samples_is_refused(tmp_path: Path) -> None:
    spec = a_spec("memory_bank", tmp_path)
    (actor,) = bank_actors(spec)
    actor.save(4)
    write_samples(spec, SampleIndex(IDS + 1).sample_id)
    with pytest.raises(ConfigError, match="the bank has no slot for the samples -5, 3, 10 and others"):
        MemoryBankActor(spec).restore(4, 1)


def test_a_missing_snapshot_is_refused_and_the_steps_that_have_one_are_named(tmp_path: Path) -> None:
    actor = QueueActor(a_spec(output=tmp_path))
    with pytest.raises(StorageError, match="the steps that have one: none"):
        actor.restore(4, 1)
    for step in (8, 20):
        actor.save(step)
    with pytest.raises(
        StorageError, match="step-00000004 of the bank; the steps that have one: 8, 20;"
    ) as error:
        actor.restore(4, 1)
    assert "\n" not in str(error.value)


def test_a_broken_snapshot_is_a_storage_error_in_one_line_until_it_is_mended(tmp_path: Path) -> None:
    spec = a_spec(output=tmp_path)
    actor, queue = a_queue_actor(spec, 7)
    actor.save(4)
    path = tmp_path / "bank/step-00000004/shard-0-of-1.parquet"
    kept = path.read_bytes()
    path.write_bytes(b"torn")
    with pytest.raises(StorageError, match="cannot read") as error:
        actor.restore(4, 1)
    assert "\n" not in str(error.value)
    write_current(spec, Current(4, 0))
    restarted = QueueActor(spec)
    assert restarted.spec() == spec
    for _ in range(2):
        with pytest.raises(StorageError, match="cannot read"):
            restarted.info()
    path.write_bytes(kept)
    assert state_of(restarted) == state_of(queue)


def test_prune_keeps_the_given_steps_and_the_one_in_force(tmp_path: Path) -> None:
    spec = a_spec("memory_bank", tmp_path)
    (actor,) = bank_actors(spec)
    prune_snapshots(spec, [])
    for step in (1, 2, 3, 4):
        actor.save(step)
    write_current(spec, Current(2, 0))
    prune_snapshots(spec, [4, 99])
    assert snapshot_steps(spec) == [2, 4]
    assert read_current(spec).step == 2
    assert len(bank_actors(spec)[0].find(IDS)) == len(IDS)  # the samples' ids stay


def plain_nearest(
    rows: Negatives, query: np.ndarray, k: int, without: int | None
) -> list[tuple[int, float, int]]:
    found = [
        (-float(row @ query / np.linalg.norm(row) / np.linalg.norm(query)), -int(step), int(sample_id))
        for row, sample_id, step in zip(rows.rows.astype(np.float64), rows.sample_id, rows.step, strict=True)
        if step >= 0 and sample_id != without
    ]
    return [(sample_id, -similarity, -step) for similarity, step, sample_id in sorted(found)[:k]]


@SETTINGS
@given(
    st.sampled_from(["float32", "float16"]), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), seeds
)
def test_nearest_is_exact_over_shards_and_slices(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, num_shards: int, k: int, size: int, seed: int
) -> None:
    spec = a_spec("memory_bank", tmp_path_factory.mktemp("bank"), dtype=dtype, num_shards=num_shards)
    actors, bank = bank_actors(spec), MemoryBank(IDS, DIM, seed=0, dtype=dtype)
    updated = np.setdiff1d(IDS, [10])
    bank.update(updated, some_rows(6), 3)
    for actor in actors:
        own = np.isin(updated, actor.store.negatives().sample_id)
        actor.push_pull(0, (Update("client", 1, updated[own], some_rows(6)[own], 3),), NO_SLOTS)
    queries = some_rows(2, seed=seed)
    for without in (None, 40):
        parts = [
            actor.nearest(start, start + size, checked_query(queries, k, dim=DIM), k, without)
            for actor in actors
            for start in range(0, actor.info().num_slots, size)
        ]
        for query, answers in zip(queries, zip(*parts, strict=True), strict=True):
            found, expected = merge(answers, k), plain_nearest(bank.negatives(), query, k, without)
            assert found.sample_id.tolist() == [one[0] for one in expected]
            assert found.step.tolist() == [one[2] for one in expected]
            np.testing.assert_allclose(found.similarity, [one[1] for one in expected], atol=1e-6)


def test_among_equal_rows_the_newest_are_nearest_then_those_of_small_ids() -> None:
    actor, queue = QueueActor(a_spec()), KeyQueue(12, DIM)
    same = np.ones((6, DIM), np.float32)
    queue.push(same[:3], np.array([5, 4, 3]), 0)
    queue.push(same[:3], np.array([9, 8, 7]), 1)
    actor.push(0, *queue.since(0))
    (found,) = actor.nearest(0, 12, checked_query(same[0], 4, dim=DIM), 4, None)
    assert found.sample_id.tolist() == [7, 8, 9, 3]


def test_rows_never_written_are_not_found_or_exported(tmp_path: Path) -> None:
    (actor,) = bank_actors(a_spec("memory_bank", tmp_path))
    actor.push_pull(0, (Update("client", 1, IDS[2:4], some_rows(2), 3),), NO_SLOTS)
    (found,) = actor.nearest(0, 9, checked_query(some_rows(1), 5, dim=DIM), 5, None)
    assert sorted(found.sample_id) == [10, 11]
    assert actor.export(0, 100, str(tmp_path / "export")) == 2


@pytest.mark.parametrize(
    ("query", "k", "message"),
    [
        (np.ones(5), 3, r"came as \[5\]; give \[4\] or \[n, 4\]"),
        (np.ones((2, 2, 4)), 3, r"came as \[2, 2, 4\]"),
        (np.array([1, np.nan, 0, 0]), 3, "not finite numbers"),
        (np.array([1, np.inf, 0, 0]), 3, "not finite numbers"),
        (np.array(["a"] * 4), 3, "not finite numbers"),
        (np.zeros(4), 3, "all zeros"),
        (np.ones(4), 0, "cannot look for 0 neighbors"),
    ],
)
def test_invalid_queries_are_refused_in_one_line(query: np.ndarray, k: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        checked_query(query, k, dim=4)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("num_rows", [0, 1, 9, 40])
def test_stats_are_those_of_all_rows(num_rows: int) -> None:
    spec = a_spec()
    actor, queue = QueueActor(spec), a_queue(spec, num_rows)
    for start in range(0, num_rows, 5):
        part = a_queue(spec, min(start + 5, num_rows))
        actor.push(0, *part.since(start))
    rows = queue.negatives()
    row_parts = [actor.row_stats(start, start + 2) for start in range(0, 12, 2)]
    stats = sum_up(spec, [], row_parts, [actor.throughput()])
    assert (stats.rows, stats.filled, stats.puts, stats.reads) == (12, len(rows), num_rows, 0)
    if not num_rows:
        assert (stats.newest_step, stats.age_mean, stats.norm_max) == (None, None, None)
        assert stats.age_histogram == ()
        return
    ages, norms = rows.step.max() - rows.step, np.linalg.norm(rows.rows, axis=1)
    assert (stats.newest_step, stats.age_max) == (rows.step.max(), ages.max())
    assert stats.age_mean == pytest.approx(ages.mean())
    assert (stats.norm_mean, stats.norm_min, stats.norm_max) == pytest.approx(
        (norms.mean(), norms.min(), norms.max())
    )
    below = np.cumsum([num for _, num in stats.age_histogram])
    assert below.tolist() == [(ages < bound).sum() for bound, _ in stats.age_histogram]
    assert below[-1] == len(rows)


def test_rates_are_those_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(stats.time, "monotonic", lambda: now[0])
    meter = RateMeter()
    meter.count(6)
    assert meter.per_second() == 6
    now[0] = 103
    meter.count(6)
    assert meter.per_second() == 4
    now[0] = 111
    assert (meter.per_second(), meter.total) == (0.6, 12)
    now[0] = 200
    assert (meter.per_second(), meter.total) == (0, 12)


def test_calls_and_rows_are_read_by_the_exporter() -> None:
    actor, _ = a_queue_actor(a_spec(), 5)
    actor.find(IDS)
    actor.find(IDS)
    readings = {(reading.name, reading.tag): reading.value for reading in actor._readings()}
    assert readings == {
        ("bank_bytes", ""): 12 * (DIM * 4 + 16),
        ("bank_calls", "push"): 1,
        ("bank_calls", "find"): 2,
        ("bank_rows", ""): 5,
        ("bank_rows_written", ""): 5,
        ("bank_rows_read", ""): 0,
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: a_spec(num_shards=3), "for a memory bank: one actor holds a queue; leave them out"),
        (lambda: a_spec(wire_dtype="float16"), "one actor holds a queue"),
        (lambda: a_spec("memory_bank", capacity=2, num_shards=3), "3 shards cannot share 2 samples"),
        (lambda: a_spec(name="a/b"), "'a/b' cannot name a bank"),
        (lambda: a_spec(name=""), "'' cannot name a bank"),
        (lambda: a_spec("heap"), "cannot be of kind 'heap'"),
        (lambda: a_spec(dtype="float64"), "no rows of 'float64'"),
        (lambda: a_spec("memory_bank", wire_dtype="int8"), "no rows of 'int8'"),
        (lambda: a_spec(dim=0), "came 0, 12 and 1"),
        (lambda: a_spec(num_shards=0), "came 4, 12 and 0"),
        (lambda: a_spec(timeout_s=0), "timeout_s must be above 0, came 0"),
    ],
)
def test_an_invalid_specification_is_refused_in_one_line(make: Callable[[], object], message: str) -> None:
    with pytest.raises(RayclError, match=message) as error:
        make()
    assert isinstance(error.value, ConfigError) and "\n" not in str(error.value)


def test_shards_share_the_slots_and_count_their_memory() -> None:
    spec = a_spec("memory_bank", capacity=10, num_shards=3, dtype="float16")
    assert [spec.rows_of(shard) for shard in range(3)] == [3, 3, 4]
    assert spec.bytes_of(2) == 4 * (DIM * 2 + 16)
    assert a_spec().bytes_of(0) == KeyQueue(12, DIM).num_bytes


def test_snapshots_on_s3_are_restored_alike(s3_server: str) -> None:
    spec = a_spec(output="s3://raycl-test/bank-actor")
    actor, queue = a_queue_actor(spec, 31)
    actor.save(4)
    write_current(spec, Current(4, 0))
    assert state_of(QueueActor(spec)) == state_of(queue)
    prune_snapshots(spec, [])
    assert snapshot_steps(spec) == [4]
    assert (Place(spec.output) / "bank").is_folder()
