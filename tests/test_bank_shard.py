"""Shards of a bank without Ray: put together they are the store, come back from snapshots, and answer."""

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
from raycl.negatives import KeyQueue, MemoryBank, Negatives, throughput
from raycl.negatives.bank_shard import BankShard
from raycl.negatives.bank_stats import sum_up
from raycl.negatives.memory_bank_shard import MemoryBankShard
from raycl.negatives.messages import Part, Update
from raycl.negatives.queue_shard import QueueShard, place_part
from raycl.negatives.sample_index import SampleIndex
from raycl.negatives.search import checked_query, merge
from raycl.negatives.snapshot import (
    Current,
    prune_snapshots,
    read_current,
    snapshot_steps,
    write_current,
    write_samples,
)
from raycl.negatives.spec import BankSpec
from raycl.negatives.throughput import RateMeter
from raycl.storage import Place

DIM = 4
SETTINGS = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**32 - 1)
IDS = np.array([3, -5, 10, 11, 40, 41, 42])


def a_plan(kind: Any = "queue", output: str | Path = "unused", **changed: Any) -> BankSpec:
    size = {"capacity": 12 if kind == "queue" else len(IDS)}
    return BankSpec(**{"name": "bank", "kind": kind, "dim": DIM, "output": str(output), **size, **changed})


def some_rows(num: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num, DIM), np.float32)


def queue_shards(plan: BankSpec) -> list[QueueShard]:
    return [QueueShard(plan, shard) for shard in range(plan.num_shards)]


def bank_shards(plan: BankSpec) -> list[MemoryBankShard]:
    write_samples(plan, SampleIndex(IDS).sample_id)
    return [MemoryBankShard(plan, shard) for shard in range(plan.num_shards)]


def fill_queue(shards: list[QueueShard], num_rows: int, *, skipped: int = -1) -> KeyQueue:
    """Push rows into the shards and into one queue, all but one."""
    plan = shards[0].hello().plan
    queue = KeyQueue(plan.capacity, plan.dim, plan.row_dtype)
    rows = np.random.default_rng(0).standard_normal((num_rows, plan.dim), np.float32)
    numbers = np.arange(num_rows)
    for number in numbers[numbers != skipped]:
        part = Part(numbers[[number]], rows[[number]], 7 * numbers[[number]], numbers[[number]] // 2)
        shards[number % len(shards)].push(0, part)
        place_part(queue, part)
    return queue


def together(shards: list[QueueShard]) -> KeyQueue:
    plan = shards[0].hello().plan
    queue = KeyQueue(plan.capacity, plan.dim, plan.row_dtype)
    for shard in shards:
        place_part(queue, shard.read_slots(0, plan.capacity))
    return queue


def image_of(queue: KeyQueue) -> tuple[int, list[list[Any]]]:
    """All that may be seen of a queue: what lies in a slot whose row is missing does not count."""
    slots = np.flatnonzero(np.asarray(queue.state_dict()["step"]) >= 0)
    seen = queue.negatives()
    return queue.sequence, [array.tolist() for array in (slots, seen.rows, seen.sample_id, seen.step)]


def contents(shard: BankShard) -> list[list[Any]]:
    return [np.asarray(array).tolist() for array in shard.read_slots(0, 10**6)]


@SETTINGS
@given(st.integers(1, 3), st.lists(st.integers(0, 9), max_size=8), st.data())
def test_parts_of_several_workers_in_any_order_make_the_queue_of_one(
    num_shards: int, sizes: list[int], data: st.DataObject
) -> None:
    plan, first = a_plan(num_shards=num_shards), 0
    shards, queue = queue_shards(plan), KeyQueue(plan.capacity, DIM)
    parts: list[tuple[int, Part]] = []
    for step, size in enumerate(sizes):
        rows, ids = some_rows(size, seed=step), np.arange(size) + 100 * step
        queue.push(rows, ids, step)
        owner = np.array(data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)), int)
        for shard in range(num_shards):
            for worker in (0, 1):
                own = np.flatnonzero((owner == worker) & ((first + np.arange(size)) % num_shards == shard))
                parts.append((shard, Part(first + own, rows[own], ids[own], np.full(len(own), step))))
        first += size
    again = data.draw(st.lists(st.sampled_from(parts), max_size=4)) if parts else []
    for shard, part in data.draw(st.permutations([*parts, *again])):
        shards[shard].push(0, part)
    assert image_of(together(shards)) == image_of(queue)


def test_queue_shard_says_which_number_it_lacks(tmp_path: Path) -> None:
    shards = queue_shards(a_plan(output=tmp_path, num_shards=3))
    fill_queue(shards, 11, skipped=4)
    assert [shard.hello().first_missing for shard in shards] == [12, 4, 11]


@SETTINGS
@given(st.lists(st.tuples(st.integers(1, 2), st.booleans()), max_size=8), st.integers(1, 3))
def test_a_repeated_update_is_applied_once(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[int, bool]], num_shards: int
) -> None:
    plan = a_plan("memory_bank", tmp_path_factory.mktemp("bank"), num_shards=num_shards, seed=2)
    shards, bank = bank_shards(plan), MemoryBank(IDS, DIM, seed=2)
    serials = {1: 0, 2: 0}
    for step, (client, is_repeated) in enumerate(calls):
        ids, rows = IDS[[step % 7, (step + 3) % 7]], some_rows(2, seed=step)
        bank.update(ids, rows, step)
        serials[client] += 1
        homes = np.searchsorted(plan.first_slots[1:], bank.slots_of(ids), side="right")
        for number, shard in enumerate(shards):
            own = homes == number
            update = Update(f"client {client}", serials[client], ids[own], rows[own], step)
            slots = bank.slots_of(ids[own])
            found, steps = shard.exchange(0, (update,), slots)
            if is_repeated:
                found, steps = shard.exchange(0, (update,), slots)
            assert np.array_equal(found, bank.read(slots).rows)
            assert np.array_equal(steps, bank.read(slots).step)
    rows = np.concatenate([shard.read_slots(0, 9).rows for shard in shards])
    assert np.array_equal(rows, bank.negatives().rows)


def test_workers_of_another_attempt_are_refused_also_by_a_shard_that_came_back(tmp_path: Path) -> None:
    plans = a_plan(output=tmp_path / "queue"), a_plan("memory_bank", tmp_path / "bank")
    part = Part(np.arange(2), some_rows(2), np.arange(2), np.zeros(2, int))
    update = Update("client", 1, IDS[:2], some_rows(2), 0)
    shards: list[Any] = [QueueShard(plans[0], 0), *bank_shards(plans[1])]
    for plan, shard in zip(plans, shards, strict=True):
        shard.restore(0, 5)
        write_current(plan, Current(0, 5))
    for queue, bank in (shards, [type(shard)(plan, 0) for plan, shard in zip(plans, shards, strict=True)]):
        before = contents(queue), contents(bank)
        calls = [
            (queue, "push", (part,)),
            (queue, "hello", ()),
            (bank, "exchange", ((update,), IDS[:0])),
            (bank, "hello", ()),
        ]
        for shard, method, arguments in calls:
            for attempt in (4, 6):
                with pytest.raises(RunError, match="restored after this worker had joined") as error:
                    getattr(shard, method)(attempt, *arguments)
                assert "\n" not in str(error.value)
        assert (contents(queue), contents(bank)) == before
        queue.push(5, part)
        bank.exchange(5, (update,), IDS[:0])
        assert queue.hello(5).attempt == bank.hello().attempt == 5


def test_serials_count_anew_in_each_attempt(tmp_path: Path) -> None:
    (shard,) = bank_shards(a_plan("memory_bank", tmp_path))
    shard.restore(0, 1)
    update = Update("client", 1, IDS[:2], some_rows(2), 0)
    shard.exchange(1, (update,), IDS[:0])
    once = contents(shard)
    shard.restore(0, 2)
    assert contents(shard) != once
    shard.exchange(2, (update,), IDS[:0])
    assert contents(shard) == once


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("num_rows", [0, 7, 12, 31])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_queue_comes_back_from_its_snapshot(
    tmp_path: Path, dtype: str, num_rows: int, num_shards: int
) -> None:
    plan = a_plan(output=tmp_path, dtype=dtype, num_shards=num_shards)
    shards = queue_shards(plan)
    queue = fill_queue(shards, num_rows, skipped=num_rows - 2)
    for shard in shards:
        shard.save(4)
    write_current(plan, Current(4, 0))
    again = queue_shards(plan)
    assert image_of(together(again)) == image_of(queue)
    assert [one.hello().first_missing for one in again] == [one.hello().first_missing for one in shards]
    for shard in again:
        shard.restore(0, 1)
    assert image_of(together(again)) == image_of(KeyQueue(plan.capacity, DIM, dtype))
    for shard in again:
        shard.restore(4, 2)
    assert image_of(together(again)) == image_of(queue)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_memory_bank_comes_back_from_its_snapshot(tmp_path: Path, dtype: str, num_shards: int) -> None:
    plan = a_plan("memory_bank", tmp_path, dtype=dtype, num_shards=num_shards)
    shards = bank_shards(plan)
    fresh = [contents(shard) for shard in shards]
    for shard in shards:
        own = shard.read_slots(0, 9).sample_id[:2]
        shard.exchange(0, (Update("client", 1, own, some_rows(len(own)), 3),), IDS[:0])
        shard.save(4)
    written = [contents(shard) for shard in shards]
    assert written != fresh
    assert [contents(shard) for shard in bank_shards(plan)] == fresh
    write_current(plan, Current(4, 0))
    assert [contents(shard) for shard in bank_shards(plan)] == written
    for shard, before in zip(shards, fresh, strict=True):
        shard.restore(0, 1)
        assert contents(shard) == before


def test_a_snapshot_remembers_which_updates_are_in_it(tmp_path: Path) -> None:
    plan = a_plan("memory_bank", tmp_path)
    (shard,) = bank_shards(plan)
    update = Update("client", 1, IDS[:2], some_rows(2), 0)
    shard.exchange(0, (update,), IDS[:0])
    shard.save(4)
    for attempt in (0, 1):
        write_current(plan, Current(4, attempt))
        (again,) = bank_shards(plan)
        again.exchange(attempt, (update,), IDS[:0])  # its answer was lost with the shard
        assert (contents(again) == contents(shard)) == (attempt == 0)


def test_snapshot_larger_than_a_group_of_rows_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycl.negatives.snapshot.ROWS_A_GROUP", 5)
    plan = a_plan(output=tmp_path)
    shards = queue_shards(plan)
    queue = fill_queue(shards, 31, skipped=22)
    shards[0].save(4)
    shards[0].restore(0, 1)
    shards[0].restore(4, 2)
    assert image_of(together(shards)) == image_of(queue)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_pandas_opens_a_snapshot_and_an_export(tmp_path: Path, dtype: str) -> None:
    shards = queue_shards(a_plan(output=tmp_path, dtype=dtype, num_shards=3))
    queue = fill_queue(shards, 31, skipped=25)
    shards[1].save(12)
    assert shards[1].export(0, 100, str(tmp_path / "export")) == 3
    snapshot = pd.read_parquet(tmp_path / "bank/step-00000012/shard-1-of-3.parquet")
    export = pd.read_parquet(tmp_path / "export/shard-1-of-3-from-0000000000.parquet")
    mine = Negatives(*(np.asarray(queue.state_dict()[name])[1::3] for name in ("rows", "sample_id", "step")))
    for frame, there in ((snapshot, slice(None)), (export, mine.step >= 0)):
        assert list(frame.columns) == ["sample_id", "step", "embedding"]
        assert frame.sample_id[frame.step >= 0].tolist() == mine.sample_id[mine.step >= 0].tolist()
        assert frame.step.tolist() == mine.step[there].tolist()
        assert np.array_equal(np.stack(frame.embedding.tolist())[frame.step >= 0], mine.rows[mine.step >= 0])
        assert frame.embedding[0].dtype == dtype


def test_files_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = queue_shards(a_plan(output=tmp_path))
    fill_queue(shards, 7)
    shards[0].save(1)

    def broken(*_: Any) -> None:
        raise OSError("no space left on device\nreally")

    monkeypatch.setattr("raycl.negatives.snapshot._table", broken)
    with pytest.raises(StorageError, match="no space left on device; check") as error:
        shards[0].save(2)
    assert "\n" not in str(error.value)
    assert [path.name for path in (tmp_path / "bank").rglob("*.parquet")] == ["shard-0-of-1.parquet"]
    assert list((tmp_path / "bank/step-00000002").iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dim": 5}, "its dim is 4, this one's is 5; set projection_head.dim as it was"),
        (
            {"capacity": 24},
            "its capacity is 12, this one's is 24; set negatives.capacity, or the data, as it was",
        ),
        ({"dtype": "float16"}, "its dtype is float32, this one's is float16; set bank.dtype"),
        ({"num_shards": 2}, "its num_shards is 1, this one's is 2; set bank.shards"),
    ],
)
def test_snapshot_of_another_shape_is_refused_in_one_line(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    shards = queue_shards(a_plan(output=tmp_path))
    fill_queue(shards, 7)
    shards[0].save(4)
    other = queue_shards(a_plan(output=tmp_path, **changed))[0]
    fill_queue([other], 1)
    before = contents(other)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        other.restore(4, 1)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
    assert contents(other) == before


def test_snapshot_of_other_samples_is_refused(tmp_path: Path) -> None:
    plan = a_plan("memory_bank", tmp_path)
    (shard,) = bank_shards(plan)
    shard.save(4)
    write_samples(plan, SampleIndex(IDS + 1).sample_id)
    with pytest.raises(ConfigError, match="the bank has no slot for the samples -5, 3, 10 and others"):
        MemoryBankShard(plan, 0).restore(4, 1)


def test_missing_snapshot_is_refused_and_those_there_are_named(tmp_path: Path) -> None:
    plan = a_plan(output=tmp_path)
    (shard,) = queue_shards(plan)
    with pytest.raises(StorageError, match="the steps that have one: none"):
        shard.restore(4, 1)
    for step in (8, 20):
        shard.save(step)
    with pytest.raises(
        StorageError, match="step-00000004 of the bank; the steps that have one: 8, 20;"
    ) as error:
        shard.restore(4, 1)
    assert "\n" not in str(error.value)


def test_a_broken_snapshot_is_a_storage_error_in_one_line(tmp_path: Path) -> None:
    (shard,) = queue_shards(a_plan(output=tmp_path))
    shard.save(4)
    (tmp_path / "bank/step-00000004/shard-0-of-1.parquet").write_bytes(b"torn")
    with pytest.raises(StorageError, match="cannot read") as error:
        shard.restore(4, 1)
    assert "\n" not in str(error.value)


def test_prune_keeps_the_steps_named_and_the_one_in_force(tmp_path: Path) -> None:
    plan = a_plan("memory_bank", tmp_path)
    (shard,) = bank_shards(plan)
    prune_snapshots(plan, [])
    for step in (1, 2, 3, 4):
        shard.save(step)
    write_current(plan, Current(2, 0))
    prune_snapshots(plan, [4, 99])
    assert snapshot_steps(plan) == [2, 4]
    assert read_current(plan).step == 2
    assert len(bank_shards(plan)[0].find(IDS).rows) == len(IDS)  # the samples' ids stay


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
    st.sampled_from(["float32", "float16"]), st.integers(1, 3), st.integers(1, 15), st.integers(1, 9), seeds
)
def test_nearest_is_exact_over_shards_and_slices(
    dtype: str, num_shards: int, k: int, size: int, seed: int
) -> None:
    shards = queue_shards(a_plan(dtype=dtype, num_shards=num_shards))
    queue = fill_queue(shards, 17, skipped=13)
    queries = some_rows(2, seed=seed)
    for without in (None, 7 * 16):
        parts = [
            shard.nearest(start, start + size, checked_query(queries, k, dim=DIM), k, without)
            for shard in shards
            for start in range(0, shard.hello().num_slots, size)
        ]
        for query, answers in zip(queries, zip(*parts, strict=True), strict=True):
            found, expected = merge(answers, k), plain_nearest(queue.negatives(), query, k, without)
            assert found.sample_id.tolist() == [one[0] for one in expected]
            assert found.step.tolist() == [one[2] for one in expected]
            np.testing.assert_allclose(found.similarity, [one[1] for one in expected], atol=1e-6)


def test_of_equal_rows_the_newest_are_nearest_then_those_of_small_ids() -> None:
    (shard,) = queue_shards(a_plan())
    same = np.ones((6, DIM), np.float32)
    shard.push(0, Part(np.arange(6), same, np.array([5, 4, 3, 9, 8, 7]), np.array([0, 0, 0, 1, 1, 1])))
    (found,) = shard.nearest(0, 12, checked_query(same[0], 4, dim=DIM), 4, None)
    assert found.sample_id.tolist() == [7, 8, 9, 3]


def test_rows_never_written_are_nobodys_neighbors(tmp_path: Path) -> None:
    (shard,) = bank_shards(a_plan("memory_bank", tmp_path))
    shard.exchange(0, (Update("client", 1, IDS[2:4], some_rows(2), 3),), IDS[:0])
    (found,) = shard.nearest(0, 9, checked_query(some_rows(1), 5, dim=DIM), 5, None)
    assert sorted(found.sample_id) == [10, 11]
    assert shard.export(0, 100, str(tmp_path / "export")) == 2


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
def test_broken_questions_are_refused_in_one_line(query: np.ndarray, k: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        checked_query(query, k, dim=4)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("num_rows", [0, 1, 9, 40])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_stats_are_those_of_all_rows(num_rows: int, num_shards: int) -> None:
    plan = a_plan(num_shards=num_shards)
    shards = queue_shards(plan)
    rows = fill_queue(shards, num_rows).negatives()
    census = [shard.census(start, start + 2) for shard in shards for start in range(0, 12, 2)]
    stats = sum_up(plan, [], census, [shard.traffic() for shard in shards])
    assert (stats.rows, stats.filled, stats.puts, stats.reads) == (12, len(rows), num_rows, 0)
    if not num_rows:
        assert (stats.newest_step, stats.age_mean, stats.norm_max, stats.age_histogram) == (
            None,
            None,
            None,
            (),
        )
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
    monkeypatch.setattr(throughput.time, "monotonic", lambda: now[0])
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: a_plan(capacity=10, num_shards=3), "10 keys cannot be shared evenly by 3 shards"),
        (lambda: a_plan("memory_bank", capacity=2, num_shards=3), "3 shards cannot share 2 samples"),
        (lambda: a_plan(name="a/b"), "'a/b' cannot name a bank"),
        (lambda: a_plan(name=""), "'' cannot name a bank"),
        (lambda: a_plan("heap"), "'heap' is no kind of bank"),
        (lambda: a_plan(dtype="float64"), "no rows of 'float64'"),
        (lambda: a_plan(wire_dtype="int8"), "no rows of 'int8'"),
        (lambda: a_plan(dim=0), "came 0, 12 and 1"),
        (lambda: a_plan(num_shards=0), "came 4, 12 and 0"),
        (lambda: a_plan(timeout_s=0), "timeout_s must be above 0, came 0"),
        (
            lambda: QueueShard(a_plan(num_shards=3), 1).push(
                0, Part(np.arange(2), some_rows(2), IDS[:2], IDS[:2])
            ),
            "rows of other shards came to shard 1 of 3",
        ),
    ],
)
def test_the_impossible_is_refused_in_one_line(make: Callable[[], object], message: str) -> None:
    with pytest.raises(RayclError, match=message) as error:
        make()
    assert isinstance(error.value, ConfigError) and "\n" not in str(error.value)


def test_shards_share_the_slots_and_count_their_memory() -> None:
    plan = a_plan("memory_bank", capacity=10, num_shards=3, dtype="float16")
    assert [plan.rows_of(shard) for shard in range(3)] == [3, 3, 4]
    assert plan.bytes_of(2) == 4 * (DIM * 2 + 16)
    assert a_plan(num_shards=3).bytes_of(0) == KeyQueue(4, DIM).num_bytes


def test_snapshots_lie_on_s3_alike(s3_server: str) -> None:
    plan = a_plan(output="s3://raycl-test/bank-shard", num_shards=3)
    shards = queue_shards(plan)
    queue = fill_queue(shards, 31)
    for shard in shards:
        shard.save(4)
    write_current(plan, Current(4, 0))
    assert image_of(together(queue_shards(plan))) == image_of(queue)
    prune_snapshots(plan, [])
    assert snapshot_steps(plan) == [4]
    assert (Place(plan.output) / "bank").is_folder()
