"""The actors of a bank without Ray: pushes, snapshots and queries."""

import re
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raycl.errors import ConfigError, RunError, StorageError
from raycl.lease import writing_new
from raycl.negatives import KeyQueue, MemoryBank, snapshot, stats
from raycl.negatives.actor import BankActor, MemoryBankActor, QueueActor, Update
from raycl.negatives.bank import Bank
from raycl.negatives.saved_bank import SavedBank, read_saved_bank
from raycl.negatives.search import checked_query, merge
from raycl.negatives.snapshot import (
    Current,
    prune_snapshots,
    read_current,
    shape_metadata,
    shard_place,
    snapshot_folder,
    snapshot_steps,
    write_current,
    write_needs,
    write_rows,
    write_samples,
)
from raycl.negatives.spec import BankSpec
from raycl.negatives.stats import RateMeter, sum_up
from raycl.storage import Place
from tests.bank_snapshots import rows_in_snapshot
from tests.test_explorer import DirectConnection

DIM = 4
SETTINGS = settings(deadline=None, max_examples=60)
IDS = np.array([3, -5, 10, 11, 40, 41, 42])
NO_SLOTS = IDS[:0]


def a_spec(kind: Any = "queue", output: str | Path = ".", **changed: Any) -> BankSpec:
    size = {"capacity": 12 if kind == "queue" else len(IDS)}
    return BankSpec(**{"name": "bank", "kind": kind, "dim": DIM, "output": str(output), **size, **changed})


def some_rows(num: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num, DIM), np.float32)


def actors_of(spec: BankSpec) -> list[Any]:
    if spec.kind == "queue":
        return [QueueActor(spec)]
    write_samples(spec, np.sort(IDS))
    return [MemoryBankActor(spec, shard) for shard in range(spec.num_shards)]


def a_queue(spec: BankSpec, num_rows: int) -> KeyQueue:
    """Return a queue after pushing this many rows, five per step."""
    queue, rows, ids = KeyQueue(12, DIM, spec.row_dtype), some_rows(num_rows), 7 * np.arange(num_rows)
    for start in range(0, num_rows, 5):
        queue.push(rows[start : start + 5], ids[start : start + 5], start // 5)
    return queue


def a_queue_actor(spec: BankSpec, num_rows: int) -> tuple[QueueActor, KeyQueue]:
    actor, queue = QueueActor(spec), a_queue(spec, num_rows)
    actor.push(0, *queue.since(0))
    return actor, queue


def exported(actor: BankActor[Any], output: Path) -> int:
    with writing_new(str(output)) as place:
        return actor.export(0, 100, place.uri)


def contents(actor: BankActor[Any]) -> list[list[Any]]:
    return [array.tolist() for array in actor.store.negatives().arrays()]


def state_of(queue: Any) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in queue.state_dict().items()}


def message_of(error: pytest.ExceptionInfo[Exception]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- pushes


@SETTINGS
@given(st.lists(st.integers(0, 30), max_size=8), st.data())
def test_a_queue_actor_stores_each_push_once_and_reports_how_many_rows_it_has_seen(
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
    assert actor.info().puts == num_new


def test_a_queue_actor_that_misses_earlier_rows_stores_nothing_and_reports_it() -> None:
    spec = a_spec()
    (actor, queue), other = a_queue_actor(spec, 10), QueueActor(spec)
    assert other.push(0, *queue.since(4)).sequence == 0
    assert len(other.store) == 0
    assert other.push(0, *queue.since(0)).sequence == 10
    assert other.push(0, queue.since(10)[0], 30).sequence == 10
    assert state_of(other) == state_of(actor)
    # The rows of a full queue replace all rows of the actor.
    far = a_queue(spec, 95)
    assert other.push(0, *far.since(95 - spec.capacity)).sequence == 95
    assert state_of(other) == state_of(far)


# ---- snapshots


@pytest.mark.parametrize("num_rows", [0, 1, 7, 12, 31])
def test_a_queue_is_restored_from_its_snapshot(tmp_path: Path, num_rows: int) -> None:
    actor, queue = a_queue_actor(a_spec(output=tmp_path), num_rows)
    actor.save(4, 0)
    restarted = QueueActor(a_spec(output=tmp_path))
    restarted.restore(4, 1)
    assert state_of(restarted) == state_of(queue)


def test_a_shard_on_a_node_without_the_folder_of_the_run_says_so(tmp_path: Path) -> None:
    actor = QueueActor(a_spec(output=tmp_path / "on another disk"))
    with pytest.raises(
        RunError, match="does not see the files in .* give a folder that all nodes share"
    ) as error:
        actor.info()
    message_of(error)


def test_a_queue_of_several_shards_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    spec = a_spec(output=tmp_path)
    QueueActor(replace(spec, num_shards=3)).save(4, 0)
    write_current(spec, Current(4, 0))
    for read in (partial(QueueActor(spec).restore, 4, 1), partial(read_saved_bank, str(tmp_path))):
        with pytest.raises(ConfigError, match="step-00000004 is of a queue with several shards") as error:
            read()
        message_of(error)


def test_a_snapshot_records_the_updates_it_contains(tmp_path: Path) -> None:
    spec = a_spec("memory_bank", tmp_path)
    (actor,) = actors_of(spec)
    update = Update("client", 1, IDS[:2], some_rows(2), 0)
    actor.push_pull(0, (update,), NO_SLOTS)
    actor.save(4, 0)
    for attempt in (0, 1):
        write_current(spec, Current(4, attempt))
        (restarted,) = actors_of(spec)
        restarted.push_pull(attempt, (update,), NO_SLOTS)  # its response was lost with the actor
        assert (contents(restarted) == contents(actor)) == (attempt == 0)


def bytes_of(spec: BankSpec, step: int) -> int:
    return sum(size for _, size in snapshot_folder(spec, step).files())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_increment_takes_the_bytes_of_the_rows_written_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    monkeypatch.setattr(snapshot, "MAX_INCREMENTS", 4)
    num_rows, footer, ids = 4_000, 5_000, np.arange(4_000)
    spec = a_spec("memory_bank", tmp_path, capacity=num_rows, dim=32, dtype=dtype)
    write_samples(spec, ids)
    # Parquet marks where the row of each sample begins: about a bit for each of its 32 values.
    actor, per_row = MemoryBankActor(spec), 32 * spec.row_dtype.itemsize + 32 // 8 + 16
    # Half of the rows fit behind a base, in at most four increments; 0 stands for a base here.
    sizes = [0, 7, 1_000, 7, 986, 0, 2_000, 0, 5, 5, 5, 5, 0]
    for step, size in enumerate(sizes, start=1):
        written = np.random.default_rng(step).choice(ids, size or 1, replace=False)
        rows = np.random.default_rng(step).standard_normal((len(written), 32), np.float32)
        for _ in range(2):  # a row written twice is saved once
            actor.store.update(written, rows, step)
        needed = actor.save(step, step - 1)
        assert len(needed) == 1 if size == 0 else needed[-1] == step
        expected = (size or num_rows) * per_row
        assert expected <= bytes_of(spec, step) <= expected + footer
        write_current(spec, Current(step, 0))
        restarted = MemoryBankActor(spec)
        for kept, found in zip(
            actor.store.negatives().arrays(), restarted.store.negatives().arrays(), strict=True
        ):
            assert np.array_equal(kept, found)
        if step % 3 == 0:
            actor = restarted  # it continues the chain


def test_a_snapshot_of_an_earlier_version_is_continued_by_increments(tmp_path: Path) -> None:
    spec = a_spec("memory_bank", tmp_path)
    (actor,) = actors_of(spec)
    actor.store.update(IDS[:2], some_rows(2), 3)
    metadata = {"step": "4", "attempt": "0", "sequence": "7", "applied": "{}"} | shape_metadata(spec, 0)
    write_rows(shard_place(spec, 0, 4), actor.store.negatives(), metadata)
    write_current(spec, Current(4, 0))
    (restarted,) = actors_of(spec)
    assert contents(restarted) == contents(actor)
    restarted.store.update(IDS[:1], some_rows(1, seed=1), 5)
    assert restarted.save(8, 4) == (4, 8)
    write_current(spec, Current(8, 0))
    assert contents(*actors_of(spec)) == contents(restarted)


def test_an_increment_of_a_replaced_or_missing_snapshot_is_refused_in_one_line(tmp_path: Path) -> None:
    spec = a_spec("memory_bank", tmp_path)
    (actor,) = actors_of(spec)
    for step, current in ((1, 0), (2, 1), (3, 2)):
        actor.store.update(IDS[step : step + 1], some_rows(1, seed=step), step)
        actor.save(step, current)
    with pytest.raises(
        ConfigError, match="cannot save step 2 again: its current snapshot, of step 3, continues"
    ) as error:
        actor.save(2, 3)
    message_of(error)
    actor.restore(1, 1)
    actor.save(2, 1)  # as after a rollback
    actor.restore(2, 2)
    with pytest.raises(
        StorageError, match="step-00000003 continues one of step 2 that was replaced; restore the"
    ) as error:
        actor.restore(3, 3)
    message_of(error)
    snapshot_folder(spec, 1).remove()
    with pytest.raises(
        StorageError, match="no complete snapshot .*step-00000001.* another --output"
    ) as error:
        actor.restore(2, 3)
    message_of(error)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_pandas_reads_a_snapshot_and_an_export(tmp_path: Path, dtype: str) -> None:
    actor, queue = a_queue_actor(a_spec(output=tmp_path, dtype=dtype), 31)
    actor.save(12, 0)
    assert exported(actor, tmp_path / "export") == 12
    held = queue.negatives()
    for path in ("bank/step-00000012/shard-0-of-1.parquet", "export/shard-0-of-1-from-0000000000.parquet"):
        frame = pd.read_parquet(tmp_path / path)
        assert list(frame.columns) == ["sample_id", "step", "embedding"]
        assert frame.sample_id.tolist() == held.sample_id.tolist()
        assert frame.step.tolist() == held.step.tolist()
        assert np.array_equal(np.stack(frame.embedding.tolist()), held.rows)
        assert frame.embedding[0].dtype == dtype


def test_failed_writes_leave_no_partial_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor, _ = a_queue_actor(a_spec(output=tmp_path), 7)
    actor.save(1, 0)

    def broken(*_: Any) -> None:
        raise OSError("no space left on device\nreally")

    monkeypatch.setattr("raycl.negatives.snapshot._table", broken)
    with pytest.raises(StorageError, match="no space left on device; check") as error:
        actor.save(2, 0)
    message_of(error)
    assert [path.name for path in (tmp_path / "bank").rglob("*.parquet")] == ["shard-0-of-1.parquet"]
    assert list((tmp_path / "bank/step-00000002").iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("queue", {"dim": 5}, "its dim is 4, this one's is 5; set projection_head.dim as it was"),
        ("queue", {"capacity": 24}, "its capacity is 12, this one's is 24; set negatives.capacity, or the data, as it was"),
        ("queue", {"dtype": "float16"}, "its dtype is float32, this one's is float16; set bank.dtype"),
        ("memory_bank", {"num_shards": 2}, "its num_shards is 1, this one's is 2; set bank.shards"),
        ("memory_bank", {"num_shards": 1}, "its num_shards is 3, this one's is 1; set bank.shards"),
    ],
)  # fmt: skip
def test_a_snapshot_with_another_shape_is_refused_in_one_line(
    tmp_path: Path, kind: str, changed: dict[str, Any], message: str
) -> None:
    for actor in actors_of(a_spec(kind, tmp_path, num_shards=3 if changed == {"num_shards": 1} else 1)):
        actor.save(4, 0)
    other = actors_of(a_spec(kind, tmp_path, **changed))[0]
    before = contents(other)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        other.restore(4, 1)
    assert str(tmp_path) in message_of(error)
    assert (contents(other), other.info().attempt) == (before, 0)


def test_a_snapshot_with_other_samples_is_refused(tmp_path: Path) -> None:
    spec = a_spec("memory_bank", tmp_path)
    actors_of(spec)[0].save(4, 0)
    write_samples(spec, np.sort(IDS) + 1)
    with pytest.raises(ConfigError, match="the bank has no slot for the samples -5, 3, 10 and others"):
        MemoryBankActor(spec).restore(4, 1)


def test_a_missing_snapshot_is_refused_with_a_list_of_existing_steps(tmp_path: Path) -> None:
    actor = QueueActor(a_spec(output=tmp_path))
    with pytest.raises(StorageError, match="the steps that have one: none"):
        actor.restore(4, 1)
    for step in (8, 20):
        actor.save(step, 0)
    with pytest.raises(
        StorageError, match="step-00000004 of the bank; the steps that have one: 8, 20;"
    ) as error:
        actor.restore(4, 1)
    message_of(error)


def test_a_damaged_snapshot_is_reported_in_one_line_until_it_is_repaired(tmp_path: Path) -> None:
    spec = a_spec(output=tmp_path)
    actor, queue = a_queue_actor(spec, 7)
    actor.save(4, 0)
    path = tmp_path / "bank/step-00000004/shard-0-of-1.parquet"
    kept = path.read_bytes()
    path.write_bytes(b"torn")
    write_current(spec, Current(4, 0))
    restarted = QueueActor(spec)
    assert restarted.spec() == spec
    for call in (lambda: actor.restore(4, 1), restarted.info, restarted.info):
        with pytest.raises(StorageError, match="cannot read") as error:
            call()
        message_of(error)
    path.write_bytes(kept)
    assert state_of(restarted) == state_of(queue)


def test_prune_keeps_the_given_steps_and_the_current_one(tmp_path: Path) -> None:
    spec = a_spec("memory_bank", tmp_path)
    (actor,) = actors_of(spec)
    prune_snapshots(spec, [])
    for step in (1, 2, 3, 4):
        actor.save(step, 0)
    write_current(spec, Current(2, 0))
    prune_snapshots(spec, [4, 99])
    assert snapshot_steps(spec) == [2, 4]
    assert read_current(spec).step == 2
    assert len(MemoryBankActor(spec).find(IDS)[0]) == len(IDS)  # the samples' ids stay


def test_prune_keeps_the_increments_and_the_base_of_a_kept_step(tmp_path: Path) -> None:
    spec = a_spec("memory_bank", tmp_path)
    (actor,) = actors_of(spec)
    saved: dict[int, Any] = {}
    for step in range(1, 7):
        actor.store.update(IDS[step % 2 :][:1], some_rows(1, seed=step), step)
        write_needs(spec, step, actor.save(step, step - 1))
        saved[step] = contents(actor)
        held = rows_in_snapshot(Place(spec.output), step)
        assert [held["sample_id"].tolist(), held["step"].tolist()] == contents(actor)[1:]
    assert actor.save(7, 0) == (7,)
    write_current(spec, Current(7, 0))
    # Half of seven rows: increments of three behind a base, so the bases are 1 and 5.
    for keep, left in (([3, 6], [1, 2, 3, 5, 6, 7]), ([3], [1, 2, 3, 7]), ([], [7])):
        prune_snapshots(spec, keep)
        assert snapshot_steps(spec) == left
        for step in keep:
            actor.restore(step, 0)
            assert contents(actor) == saved[step]
    (snapshot_folder(spec, 7) / "needs.json").write_text("{")
    with pytest.raises(StorageError, match="needs.json does not list the steps") as error:
        prune_snapshots(spec, [])
    message_of(error)


def test_snapshots_are_restored_from_s3(s3_server: str) -> None:
    slots = a_spec("memory_bank", "s3://raycl-test/slots-actor")
    (shard,) = actors_of(slots)
    for step in (1, 2):
        shard.store.update(IDS[step : step + 1], some_rows(1, seed=step), step)
        write_needs(slots, step, shard.save(step, step - 1))
    write_current(slots, Current(2, 0))
    prune_snapshots(slots, [])
    assert snapshot_steps(slots) == [1, 2]
    assert contents(*actors_of(slots)) == contents(shard)
    spec = a_spec(output="s3://raycl-test/bank-actor")
    actor, queue = a_queue_actor(spec, 31)
    actor.save(4, 0)
    write_current(spec, Current(4, 0))
    assert state_of(QueueActor(spec)) == state_of(queue)
    prune_snapshots(spec, [])
    assert snapshot_steps(spec) == [4]
    assert (Place(spec.output) / "bank").is_folder()


# ---- queries


@SETTINGS
@given(
    st.sampled_from(["float32", "float16"]),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
)
def test_nearest_is_exact_over_shards_and_slices_and_skips_unwritten_rows(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, num_shards: int, k: int, size: int, seed: int
) -> None:
    spec = a_spec("memory_bank", tmp_path_factory.mktemp("bank"), dtype=dtype, num_shards=num_shards)
    actors, bank = actors_of(spec), MemoryBank(IDS, DIM, seed=0, dtype=dtype)
    updated = np.setdiff1d(IDS, [10])
    bank.update(updated, some_rows(6), 3)
    for actor in actors:
        own = np.isin(updated, actor.store.negatives().sample_id)
        actor.push_pull(0, (Update("client", 1, updated[own], some_rows(6)[own], 3),), NO_SLOTS)
    queries, rows = some_rows(2, seed=seed), bank.negatives()
    units = rows.rows / np.linalg.norm(rows.rows.astype(np.float64), axis=1, keepdims=True)
    for without in (None, 40):
        parts = [
            actor.nearest(start, start + size, checked_query(queries, k, dim=DIM), k, without)
            for actor in actors
            for start in range(0, actor.info().num_slots, size)
        ]
        for query, answers in zip(queries, zip(*parts, strict=True), strict=True):
            similarity = units @ (query / np.linalg.norm(query))
            similarity[(rows.step < 0) | (rows.sample_id == without)] = -2
            expected = [at for at in np.lexsort((rows.sample_id, -similarity)) if similarity[at] > -2][:k]
            found = merge(answers, k)
            assert found.sample_id.tolist() == rows.sample_id[expected].tolist()
            assert found.step.tolist() == rows.step[expected].tolist()
            assert found.newest_step == 3
            np.testing.assert_allclose(found.similarity, similarity[expected], atol=1e-6)


@pytest.mark.parametrize("gap", [1, 3])
def test_the_rows_of_samples_are_found_without_a_scan_of_all_rows(tmp_path: Path, gap: int) -> None:
    spec = replace(a_spec("memory_bank", tmp_path), dim=1, capacity=100_000)
    write_samples(spec, gap * np.arange(spec.capacity))
    actor = MemoryBankActor(spec)
    actor.push_pull(0, (Update("client", 1, np.array([6]), some_rows(1)[:, :1], 3),), NO_SLOTS)
    tracemalloc.start()
    found, newest = actor.find(np.array([99_999, 6, -1, 3, 6, 2**62]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found.sample_id.tolist(), found.step.tolist(), newest) == ([3, 6, 99_999], [-1, 3, -1], 3)
    assert peak < spec.capacity  # a mask of all rows has a byte for each


def test_each_written_row_is_drawn_equally_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = a_spec("memory_bank", tmp_path, num_shards=2)
    actors, written = actors_of(spec), np.sort(IDS)[:4]
    for actor, ids in zip(actors, (written[:3], written[3:]), strict=True):
        actor.push_pull(0, (Update("client", 1, ids, some_rows(len(ids)), 1),), NO_SLOTS)
    monkeypatch.setattr(
        "raycl.negatives.bank.ask_all",
        lambda connections, method, *given: [method(each.actor, *given) for each in connections],
    )
    bank = Bank(spec, actors)
    drawn = np.stack([bank.draw(2) for _ in range(2_000)])
    assert (drawn[:, 0] != drawn[:, 1]).all()
    assert [np.mean((drawn == each).any(1)) for each in written] == pytest.approx([0.5] * 4, abs=0.06)
    assert sorted(bank.draw(9)) == written.tolist() and bank.draw(0).size == 0


@pytest.mark.parametrize(
    ("num", "says"), [(-1, "cannot draw -1 rows; ask for 0 or more"), (2.5, "num must be a whole number")]
)
def test_a_number_of_rows_that_cannot_be_drawn_is_refused(num: Any, says: str, tmp_path: Path) -> None:
    (actor,) = actors_of(spec := a_spec("queue", tmp_path))
    for bank in (actor, SavedBank(spec, actor.store.negatives(), "queue")):
        with pytest.raises(ConfigError, match=says):
            bank.draw(num)


def test_ties_are_ordered_by_newest_step_and_then_by_smallest_id() -> None:
    actor, queue = QueueActor(a_spec()), KeyQueue(12, DIM)
    same = np.ones((6, DIM), np.float32)
    queue.push(same[:3], np.array([5, 4, 3]), 0)
    queue.push(same[:3], np.array([9, 8, 7]), 1)
    actor.push(0, *queue.since(0))
    (found,) = actor.nearest(0, 12, checked_query(same[0], 4, dim=DIM), 4, None)
    assert found.sample_id.tolist() == [7, 8, 9, 3]


def test_unwritten_rows_are_not_exported(tmp_path: Path) -> None:
    (actor,) = actors_of(a_spec("memory_bank", tmp_path))
    actor.push_pull(0, (Update("client", 1, IDS[2:4], some_rows(2), 3),), NO_SLOTS)
    assert exported(actor, tmp_path / "export") == 2
    assert actor.export(0, 2, str(tmp_path / "none")) == 0
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("has_folder", [False, True])
def test_an_export_to_a_folder_that_the_node_of_a_shard_does_not_share_is_refused(
    tmp_path: Path, has_folder: bool
) -> None:
    actor, _ = a_queue_actor(a_spec(output=tmp_path), 5)
    output = tmp_path / "export"  # another folder than the one of the process that exports: without its claim
    if has_folder:
        output.mkdir()
    with pytest.raises(
        RunError, match="does not see the files in .*export; give a folder that all nodes"
    ) as error:
        actor.export(0, 100, str(output))
    message_of(error)
    assert not list(output.glob("*"))


def test_an_export_neither_joins_another_one_nor_leaves_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycl.negatives.bank.ShardConnection", DirectConnection)
    spec = a_spec("memory_bank", tmp_path, num_shards=2)
    actors, output = actors_of(spec), tmp_path / "export"
    for actor in actors:
        ids = actor.store.negatives().sample_id
        actor.push_pull(0, (Update("client", 1, ids, some_rows(len(ids)), 3),), NO_SLOTS)
    bank = Bank(spec, actors)
    with monkeypatch.context() as broken, pytest.raises(TypeError):
        broken.setattr(actors[1], "export", None)
        bank.export(str(output))
    assert not output.exists()
    assert bank.export(str(output)) == len(IDS)
    with pytest.raises(StorageError, match="exists already; give another --output"):
        bank.export(str(output))
    assert len(list(output.iterdir())) == 2


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
        (np.ones(4), 2.5, "k must be a whole number, came 2.5"),
        (np.ones(4), "3", "k must be a whole number, came '3'"),
        ([[1, 2, 3, 4], [1]], 3, "no array of numbers: setting an array element"),
        (torch.ones(4, requires_grad=True), 3, r"no array of numbers: .*give .detach\(\).cpu\(\).float\(\)"),
        (torch.ones(4, dtype=torch.bfloat16), 3, "no array of numbers: .*BFloat16"),
    ],
)
def test_invalid_queries_are_refused_in_one_line(query: Any, k: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        checked_query(query, k, dim=4)
    message_of(error)


@pytest.mark.parametrize("num_rows", [0, 1, 9, 40])
def test_statistics_cover_all_rows(num_rows: int) -> None:
    spec = a_spec()
    actor, queue = QueueActor(spec), KeyQueue(12, DIM)
    for start in range(0, num_rows, 5):
        queue = a_queue(spec, min(start + 5, num_rows))
        actor.push(0, *queue.since(start))
    rows = queue.negatives()
    row_parts = [actor.row_stats(start, start + 2) for start in range(0, 12, 2)]
    stats = sum_up(spec, [], row_parts, [actor.info()])
    assert (stats.rows, stats.filled, stats.puts, stats.reads) == (12, len(rows), num_rows, 0)
    if not num_rows:
        assert (stats.newest_step, stats.age_mean, stats.norm_max) == (None, None, None)
        assert stats.age_histogram == ()
        return
    ages, norms = rows.step.max() - rows.step, np.linalg.norm(rows.rows, axis=1)
    assert (stats.newest_step, stats.age_max) == (rows.step.max(), ages.max())
    assert stats.age_mean == pytest.approx(ages.mean())
    measured = stats.norm_mean, stats.norm_min, stats.norm_max
    assert measured == pytest.approx((norms.mean(), norms.min(), norms.max()))
    below = np.cumsum([num for _, num in stats.age_histogram])
    assert below.tolist() == [(ages < bound).sum() for bound, _ in stats.age_histogram]
    assert below[-1] == len(rows)


def test_rates_cover_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(stats.time, "monotonic", lambda: now[0])
    meter, rates = RateMeter(), []
    for second, num in ((100, 60), (103, 60), (111, 0), (200, 0)):
        now[0] = second
        for _ in range(num):
            meter.count(1)
        rates.append(meter.per_second())
    assert (rates, meter.total) == ([60, 40, 6, 0], 120)


def test_the_metrics_exporter_reads_calls_and_rows() -> None:
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


def test_shards_split_the_slots_and_report_their_memory() -> None:
    spec = a_spec("memory_bank", capacity=10, num_shards=3, dtype="float16")
    assert [spec.rows_of(shard) for shard in range(3)] == [3, 3, 4]
    assert spec.bytes_of(2) == 4 * (DIM * 2 + 16)
    assert a_spec().bytes_of(0) == KeyQueue(12, DIM).num_bytes
    with pytest.raises(ConfigError, match="3 shards cannot share 2 samples"):
        a_spec("memory_bank", capacity=2, num_shards=3)
