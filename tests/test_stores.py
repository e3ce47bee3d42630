"""The stores of negatives against plain lists and dictionaries, for any input in any order."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raycl.errors import ConfigError, RayclError, RunError
from raycl.negatives import KeyQueue, MemoryBank, Negatives, averages, draw_slots

DIM = 5
SETTINGS = settings(deadline=None, max_examples=100)
INT64 = st.integers(-(2**63), 2**63 - 1)

seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from([np.float32, np.float16])
capacities = st.integers(1, 9)
push_sizes = st.lists(st.integers(0, 25), max_size=8)
distinct_ids = st.lists(INT64, min_size=1, max_size=20, unique=True) | st.integers(-5, 5).flatmap(
    lambda first: st.integers(1, 20).map(lambda num: list(range(first, first + num)))
)

Push = tuple[np.ndarray, np.ndarray, int]


def some_pushes(sizes: list[int], seed: int) -> list[Push]:
    """Rows, ids with repetitions, and one step for each push."""
    random = np.random.default_rng(seed)
    return [
        (random.standard_normal((size, DIM), np.float32), random.integers(-9, 9, size), step)
        for step, size in enumerate(sizes, start=3)
    ]


def plain(negatives: Negatives) -> list[tuple[list[float], int, int]]:
    arrays = (negatives.rows.tolist(), negatives.sample_id.tolist(), negatives.step.tolist())
    return list(zip(*arrays, strict=True))


def plain_pushes(pushes: list[Push], dtype: Any = np.float32) -> list[tuple[list[float], int, int]]:
    """All rows ever pushed, in order."""
    return [
        (row.astype(dtype).tolist(), int(sample_id), step)
        for rows, ids, step in pushes
        for row, sample_id in zip(rows, ids, strict=True)
    ]


def image_of(store: KeyQueue | MemoryBank) -> dict[str, Any]:
    """Copy the state to plain values, which later writes do not change."""
    state = store.state_dict()
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in state.items()}


def copied(state: Mapping[str, np.ndarray | int]) -> dict[str, np.ndarray | int]:
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in state.items()}


@SETTINGS
@given(capacities, push_sizes, dtypes, seeds, st.data())
def test_a_queue_equals_a_list_of_its_newest_rows(
    capacity: int, sizes: list[int], dtype: Any, seed: int, data: st.DataObject
) -> None:
    queue, pushes = KeyQueue(capacity, DIM, dtype), some_pushes(sizes, seed)
    for num_pushes, push in enumerate(pushes, start=1):
        queue.push(*push)
        history = plain_pushes(pushes[:num_pushes], dtype)
        slots = {number % capacity: row for number, row in enumerate(history)}
        assert plain(queue.negatives()) == [slots[slot] for slot in sorted(slots)]
        assert (queue.sequence, len(queue)) == (len(history), min(len(history), capacity))
        assert queue.negatives().rows.dtype == dtype
        # A reader gets the rows that it has not seen, oldest first.
        seen = data.draw(st.integers(0, len(history)))
        delta, sequence = queue.since(seen)
        assert plain(delta) == history[max(seen, len(history) - capacity) :]
        assert sequence == len(history)
    asked = data.draw(st.lists(st.integers(-12, 12), max_size=5))
    found = queue.get(np.array(asked, np.int64))
    assert plain(found) == [row for row in plain(queue.negatives()) if row[1] in asked]


@SETTINGS
@given(capacities, st.lists(st.tuples(st.integers(0, 25), st.none() | st.integers(0, 40))), dtypes, seeds)
def test_a_replica_that_reads_occasionally_or_again_equals_the_queue_bit_for_bit(
    capacity: int, pushes_and_reads: list[tuple[int, int | None]], dtype: Any, seed: int
) -> None:
    queue, replica = KeyQueue(capacity, DIM, dtype), KeyQueue(capacity, DIM, dtype)
    pushes = some_pushes([size for size, _ in pushes_and_reads], seed)
    for push, (_, num_again) in zip(pushes, pushes_and_reads, strict=True):
        queue.push(*push)
        if num_again is not None:
            replica.apply(*queue.since(replica.sequence))
            assert image_of(replica) == image_of(queue)
            replica.apply(*queue.since(max(0, replica.sequence - num_again)))
            assert image_of(replica) == image_of(queue)


def test_reader_ahead_of_a_restored_queue_is_refused() -> None:
    queue, replica = KeyQueue(7, DIM), KeyQueue(7, DIM)
    first, second = some_pushes([5, 4], seed=0)
    queue.push(*first)
    older = copied(queue.state_dict())
    queue.push(*second)
    replica.apply(*queue.since(0))
    queue.load_state_dict(older)
    for seen in (replica.sequence, -1):
        with pytest.raises(RunError, match=f"seen {seen} rows and 5 were pushed; start the reader again"):
            queue.since(seen)
    with pytest.raises(RunError, match="does not continue this queue"):
        replica.apply(*queue.since(0))
    with pytest.raises(RunError, match="holds rows 2 to 5, and 0 were here"):
        KeyQueue(7, DIM).apply(*queue.since(2))


@SETTINGS
@given(capacities, push_sizes, push_sizes, dtypes, seeds)
def test_restored_queue_continues_like_the_original(
    capacity: int, before: list[int], after: list[int], dtype: Any, seed: int
) -> None:
    queue, restored = KeyQueue(capacity, DIM, dtype), KeyQueue(capacity, DIM, dtype)
    for push in some_pushes([11, *after], seed):
        restored.push(*push)  # replaces its earlier content
    for push in some_pushes(before, seed):
        queue.push(*push)
    restored.load_state_dict(queue.state_dict())
    for push in some_pushes(after, seed + 1):
        queue.push(*push)
        restored.push(*push)
    assert image_of(restored) == image_of(queue)
    assert plain(restored.since(0)[0]) == plain(queue.since(0)[0])


def some_bank(ids: list[int] | range, **changed: Any) -> MemoryBank:
    return MemoryBank(np.array(ids, np.int64), **({"dim": DIM, "seed": 1} | changed))


def direction(row: np.ndarray) -> np.ndarray:
    return row / np.sqrt((row * row).sum())


def plain_update(
    rows: dict[int, np.ndarray], momentum: float, batch: list[tuple[int, np.ndarray]]
) -> dict[int, np.ndarray]:
    """Update the bank for one step, one sample at a time in float64."""
    moved = dict(rows)
    for sample_id in {sample_id for sample_id, _ in batch}:
        came = sum(direction(row.astype(np.float64)) for other, row in batch if other == sample_id)
        moved[sample_id] = direction(momentum * rows[sample_id] + (1 - momentum) * direction(came))
    return moved


batch_lists = st.lists(st.lists(st.integers(0, 5), max_size=9), max_size=5)


@SETTINGS
@given(distinct_ids, batch_lists, st.floats(0, 0.95), dtypes, dtypes, seeds)
def test_bank_equals_a_dictionary_in_double_precision(
    ids: list[int], batches: list[list[int]], momentum: float, dtype: Any, row_dtype: Any, seed: int
) -> None:
    bank, random = some_bank(ids, momentum=momentum, dtype=dtype), np.random.default_rng(seed)
    steps = dict.fromkeys(ids, -1)
    for step, choice in enumerate(batches):
        batch_ids = [ids[index % len(ids)] for index in choice]
        rows = (3 * random.standard_normal((len(choice), DIM))).astype(row_dtype)
        before = {one: bank.get(np.array([one])).rows[0].astype(np.float64) for one in ids}
        bank.update(np.array(batch_ids, np.int64), rows, step)
        expected = plain_update(before, momentum, list(zip(batch_ids, rows, strict=True)))
        steps |= dict.fromkeys(batch_ids, step)
        stored = bank.negatives()
        assert stored.sample_id.tolist() == sorted(ids)
        assert stored.step.tolist() == [steps[one] for one in sorted(ids)]
        error = 2e-6 if dtype == np.float32 else 2.0**-12 + 2e-6  # half of float16's spacing
        rows = np.array([expected[one] for one in sorted(ids)])
        np.testing.assert_allclose(stored.rows, rows, rtol=0, atol=error)


some_batches = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=12), min_size=1, max_size=4)


@SETTINGS
@given(some_batches, dtypes, seeds, st.data())
def test_bank_does_not_depend_on_the_split_and_order_of_batches(
    batches: list[list[int]], dtype: Any, seed: int, data: st.DataObject
) -> None:
    whole, split = some_bank([7, 20, -3, 5, 6], dtype=dtype), some_bank([5, 6, 7, -3, 20], dtype=dtype)
    random = np.random.default_rng(seed)
    for step, choice in enumerate(batches):
        ids = np.array([-3, 5, 6, 7, 20])[choice]
        rows = random.standard_normal((len(ids), DIM), np.float32)
        whole.update(ids, rows, step)
        order = np.array(data.draw(st.permutations(range(len(ids)))))
        cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=3)))
        for part in np.split(order, cuts):
            split.update(ids[part], rows[part], step)
        assert image_of(split) == image_of(whole)


@settings(SETTINGS, max_examples=25)
@given(st.integers(1, 10_000), st.lists(st.integers(0, 10_000), max_size=4), dtypes, seeds)
def test_shards_start_with_the_rows_of_the_unsharded_bank(
    num_slots: int, cuts: list[int], dtype: Any, seed: int
) -> None:
    ids = np.arange(num_slots) * 3 - 50
    whole = MemoryBank(ids[::-1], 2, seed=seed, dtype=dtype)
    bounds = [0, *sorted(cut for cut in set(cuts) if 0 < cut < num_slots), num_slots]
    for first, stop in pairwise(bounds):
        shard = MemoryBank(ids[first:stop], 2, seed=seed, dtype=dtype, first_slot=first, num_slots=num_slots)
        slots = np.arange(first, stop)
        assert plain(shard.negatives()) == plain(whole.read(slots)) == plain(shard.read(slots))
        assert np.array_equal(shard.slots_of(ids[first:stop]), slots)
        assert np.array_equal(shard.draw(num_slots // 2, step=4), whole.draw(num_slots // 2, step=4))


def test_shards_together_equal_the_unsharded_bank_after_updates() -> None:
    ids = np.random.default_rng(0).choice(10**12, 9_000, replace=False)
    whole = MemoryBank(ids, DIM, seed=3)
    ids = np.sort(ids)
    firsts = [0, 100, 5_000]
    shards = [
        MemoryBank(ids[first:stop], DIM, seed=3, first_slot=first, num_slots=9_000)
        for first, stop in zip(firsts, [100, 5_000, 9_000], strict=True)
    ]
    for step, (rows, _, _) in enumerate(some_pushes([64] * 5, seed=1)):
        slots = whole.draw(64, step=step)
        whole.update(ids[slots], rows, step)
        home = np.searchsorted(firsts, slots, side="right") - 1
        for number, shard in enumerate(shards):
            shard.update(ids[slots[home == number]], rows[home == number], step)
    read = [
        shard.read(np.arange(shard.slots_of(shard.negatives().sample_id[:1])[0], stop))
        for shard, stop in zip(shards, [100, 5_000, 9_000], strict=True)
    ]
    assert [row for part in read for row in plain(part)] == plain(whole.negatives())


@SETTINGS
@given(distinct_ids, st.data())
def test_slots_are_in_the_order_of_sample_ids(ids: list[int], data: st.DataObject) -> None:
    bank = some_bank(ids)
    asked = data.draw(st.lists(st.sampled_from(ids), max_size=9))
    slots = bank.slots_of(np.array(asked, np.int64))
    assert slots.tolist() == [sorted(ids).index(one) for one in asked]
    assert plain(bank.read(slots)) == plain(bank.get(np.array(asked, np.int64)))
    assert bank.read(slots).sample_id.tolist() == asked


@SETTINGS
@given(distinct_ids, st.lists(INT64 | st.integers(-30, 30), min_size=1, max_size=9))
def test_unknown_samples_are_named(ids: list[int], asked: list[int]) -> None:
    unknown = sorted(set(asked) - set(ids))
    bank, before = some_bank(ids), image_of(some_bank(ids))
    if unknown:
        rows = np.ones((len(asked), DIM), np.float32)
        for ask in (bank.slots_of, bank.get, lambda those: bank.update(those, rows, 3)):
            with pytest.raises(ConfigError, match="no slot for the samples") as error:
                ask(np.array(asked, np.int64))
            named = ", ".join(map(str, unknown[:3])) + " and others" * (len(unknown) > 3)
            assert f"samples {named}: it holds {len(ids)}" in str(error.value)
    assert image_of(bank) == before


def test_initial_rows_are_uniform_on_the_sphere_and_depend_on_the_seed() -> None:
    bank, same, other = (MemoryBank(np.arange(20_000), 8, seed=seed) for seed in (5, 5, 6))
    rows = bank.negatives().rows
    assert np.array_equal(rows, same.negatives().rows)
    # Blocks repeat neither within a seed nor across seeds.
    assert len(np.unique(np.concatenate([rows, other.negatives().rows]), axis=0)) == 40_000
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(rows.mean(0), 0, atol=5 / np.sqrt(8 * 20_000))
    np.testing.assert_allclose(rows.T @ rows / 20_000, np.eye(8) / 8, atol=5 / 8 / np.sqrt(20_000))
    assert (bank.negatives().step == -1).all()


@SETTINGS
@given(st.integers(1, 300), seeds, st.integers(0, 10**6), st.data())
def test_draw_is_without_replacement_and_depends_only_on_seed_and_step(
    num_slots: int, seed: int, step: int, data: st.DataObject
) -> None:
    num = data.draw(st.integers(0, num_slots))
    drawn = draw_slots(num_slots, num, seed=seed, step=step)
    assert drawn.dtype == np.int64
    assert len(set(drawn.tolist())) == num and set(drawn.tolist()) <= set(range(num_slots))
    bank = some_bank(range(num_slots), seed=seed)
    bank.draw(num_slots, step=step + 1)
    bank.update(np.array([0]), np.ones((1, DIM), np.float32), step)
    assert np.array_equal(bank.draw(num, step=step), drawn)


@pytest.mark.parametrize(("num_slots", "num"), [(60, 20), (2_000, 20)])  # numpy has two sampling algorithms
def test_draw_is_uniform(num_slots: int, num: int) -> None:
    num_draws = 300_000 // num
    counts = np.zeros(num_slots)
    for step in range(num_draws):
        counts[draw_slots(num_slots, num, seed=1, step=step)] += 1
    expected = num_draws * num / num_slots
    spread = ((counts - expected) ** 2).sum() / (expected * (1 - num / num_slots))
    assert abs(spread - (num_slots - 1)) < 5 * np.sqrt(2 * num_slots)


def test_initial_rows_and_draws_do_not_share_random_numbers() -> None:
    purposes = averages._INITIAL_ROWS, averages.DRAWS
    streams = [averages.random_stream(0, 0, purpose) for purpose in purposes]
    assert not np.isin(*(stream.random(100) for stream in streams)).any()


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_rows_without_direction_leave_the_slot_unchanged(momentum: float) -> None:
    bank = some_bank([1, 2, 3], momentum=momentum)
    rows = bank.negatives().rows.copy()
    bank.update(np.array([1]), np.zeros((1, DIM), np.float32), 0)
    bank.update(np.array([2, 2]), np.stack([rows[0], -rows[0]]), 1)
    if momentum == 0.5:
        bank.update(np.array([3]), -rows[2:], 2)
    np.testing.assert_allclose(bank.negatives().rows, rows, atol=1e-6)


def test_initialized_slots_have_unit_length_and_step_minus_1_until_an_update() -> None:
    bank, other = some_bank(range(5)), some_bank(range(5))
    bank.update(np.array([1, 2]), with_value(3.0)[:2], step=4)
    rows = np.arange(3 * DIM, dtype=np.float32).reshape(3, DIM)
    rows[2] = 0.0
    bank.initialize(np.array([3, 1, 0]), rows)
    held, first = bank.negatives(), other.negatives()
    assert held.step.tolist() == [-1, -1, 4, -1, -1]
    assert held.rows[3] == pytest.approx(direction(rows[0]), abs=1e-6)
    assert held.rows[1] == pytest.approx(direction(rows[1]), abs=1e-6)
    assert np.array_equal(held.rows[[0, 4]], first.rows[[0, 4]])
    bank.update(np.array([3]), rows[1:2], step=5)
    halfway = direction(direction(rows[0]) + direction(rows[1]))
    assert bank.get(np.array([3])).rows[0] == pytest.approx(halfway, abs=1e-6)


def test_half_precision_rows_are_normalized_in_single_precision() -> None:
    # Squares of these rows overflow or underflow in float16.
    for size in (3e4, 1e-6):
        bank = some_bank([1], momentum=0.0, dtype=np.float16)
        bank.update(np.array([1]), np.full((1, DIM), size, np.float16), 0)
        np.testing.assert_allclose(bank.negatives().rows, np.full((1, DIM), DIM**-0.5), atol=1e-3)


@SETTINGS
@given(st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=2, max_size=4), dtypes, seeds)
def test_restored_bank_continues_like_the_original(batches: list[list[int]], dtype: Any, seed: int) -> None:
    bank, restored = (some_bank(range(5), seed=one, dtype=dtype) for one in (1, 2))
    random = np.random.default_rng(seed)
    calls = [(np.array(ids, np.int64), random.standard_normal((len(ids), DIM))) for ids in batches]
    restored.update(*calls[-1], step=1)  # replaces its earlier content
    bank.update(*calls[0], step=0)
    restored.load_state_dict(bank.state_dict())
    assert image_of(restored) == image_of(bank)
    for step, call in enumerate(calls[1:], start=1):
        bank.update(*call, step)
        restored.update(*call, step)
    assert image_of(restored) == image_of(bank)


def test_restored_bank_forgets_its_unfinished_step() -> None:
    bank, fresh = some_bank(range(5)), some_bank(range(5))
    bank.update(IDS, ROWS, 3)
    older = copied(bank.state_dict())
    fresh.load_state_dict(older)
    bank.update(IDS, np.eye(3, DIM, k=1, dtype=np.float32), 3)
    bank.load_state_dict(older)
    for store in (bank, fresh):
        store.update(IDS, np.eye(3, DIM, dtype=np.float32), 3)
    assert image_of(bank) == image_of(fresh)


STORES: dict[str, Callable[[], Any]] = {
    "queue": lambda: KeyQueue(7, DIM),
    "bank": lambda: MemoryBank(np.arange(7), DIM, seed=0),
    "partition": lambda: MemoryBank(np.arange(7), DIM, seed=0, kind="partition"),
}
WRITES: dict[str, Callable[[Any, np.ndarray, np.ndarray], None]] = {
    "queue": lambda store, rows, ids: store.push(rows, ids, 5),
    "bank": lambda store, rows, ids: store.update(ids, rows, 5),
    "partition": lambda store, rows, ids: store.update(ids, rows, 5),
}
ROWS, IDS = np.ones((3, DIM), np.float32), np.array([2, 3, 2])


def with_value(value: float) -> np.ndarray:
    rows = ROWS.astype(np.float64)
    rows[1, 2] = value
    return rows


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize(
    ("rows", "ids", "message"),
    [
        (np.ones((3, DIM + 1), np.float32), IDS, r"do not fit the store: they came as \[3, 6\]"),
        (np.ones(DIM, np.float32), IDS, r"came as \[5\]; give a row of 5 for each sample"),
        (np.ones((3, DIM), np.int64), IDS, "came as int64; give float32"),
        (ROWS, IDS[:2], "3 rows came with 2 ids"),
        (ROWS, IDS.astype(np.float64), r"came as float64 \[3\]; give int64"),
        (ROWS, IDS[:, None], r"came as int64 \[3, 1\]"),
        (ROWS, IDS == 2, "came as bool"),
        (ROWS, IDS.astype(np.uint64), "came as uint64"),
        *((with_value(value), IDS, "not embeddings") for value in (np.nan, np.inf, -np.inf, 1e5, -1e300)),
    ],
)
def test_invalid_rows_are_refused_in_one_line_and_nothing_is_written(
    kind: str, rows: np.ndarray, ids: np.ndarray, message: str
) -> None:
    store = STORES[kind]()
    WRITES[kind](store, ROWS, IDS)
    before = image_of(store)
    with pytest.raises(ConfigError, match=message) as error:
        WRITES[kind](store, rows, ids)
    assert "\n" not in str(error.value)
    assert image_of(store) == before
    WRITES[kind](store, ROWS, IDS)


@pytest.mark.parametrize("kind", STORES)
def test_store_accepts_rows_and_ids_of_any_layout_and_dtype(kind: str) -> None:
    store, odd = STORES[kind](), STORES[kind]()
    rows = np.random.default_rng(0).standard_normal((4, DIM)).astype(np.float16)
    ids = np.array([6, 0, 5, 1])
    WRITES[kind](store, rows.astype(np.float32), ids)
    WRITES[kind](odd, np.asfortranarray(rows.astype(np.float64)), ids[::-1].astype(np.int16)[::-1])
    assert image_of(odd) == image_of(store)


@pytest.mark.parametrize("kind", STORES)
def test_store_keeps_no_reference_to_its_input_arrays(kind: str) -> None:
    store, rows, ids = STORES[kind](), ROWS.copy(), IDS.copy()
    WRITES[kind](store, rows, ids)
    written, state = image_of(store), copied(store.state_dict())
    restored = STORES[kind]()
    restored.load_state_dict(state)
    rows[:], ids[:] = 9, 9
    for array in (state["rows"], state["sample_id"], state["step"]):
        array[:] = 9  # pyright: ignore[reportIndexIssue]
    assert image_of(store) == image_of(restored) == written


@pytest.mark.parametrize("kind", STORES)
def test_rows_become_tensors_without_a_copy_and_all_bytes_are_counted(kind: str) -> None:
    store = STORES[kind]()
    WRITES[kind](store, ROWS, IDS)
    stored = store.negatives()
    assert torch.from_numpy(stored.rows).data_ptr() == stored.rows.ctypes.data
    assert torch.from_numpy(stored.rows).is_contiguous()
    assert torch.from_numpy(store.get(IDS[:1]).rows).is_contiguous()
    assert stored.sample_id.dtype == stored.step.dtype == np.int64
    assert store.num_bytes == 7 * (DIM * 4 + 8 + 8)  # rows, ids and steps


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("array", ["rows", "sample_id", "step"])
def test_state_of_another_store_is_refused_and_nothing_is_loaded(kind: str, array: str) -> None:
    store, state = STORES[kind](), copied(STORES[kind]().state_dict())
    WRITES[kind](store, ROWS, IDS)
    before = image_of(store)
    value = np.asarray(state.pop(array))
    wrong = [np.zeros((1, *value.shape[1:]), value.dtype), value.astype(np.float16)]
    for invalid in (state, *(state | {array: one} for one in wrong)):
        with pytest.raises(ConfigError, match="load it into a store made with the same settings") as error:
            store.load_state_dict(invalid)
        assert "\n" not in str(error.value)
    assert image_of(store) == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KeyQueue(0, DIM), "cannot keep 0 keys; give a capacity of at least 1"),
        (lambda: KeyQueue(3, 0), "rows of dim 0"),
        (lambda: KeyQueue(3, DIM, np.float64), "rows of float64; choose float32 or float16"),
        (
            lambda: KeyQueue(3, DIM).load_state_dict(KeyQueue(4, DIM).state_dict()),
            "of 4 keys, this one keeps 3",
        ),
        (lambda: KeyQueue(3, DIM).load_state_dict({"capacity": 3}), "the state does not fit this store"),
        (lambda: KeyQueue(3, DIM).push(ROWS, IDS, -1), "cannot be of step -1"),
        (lambda: some_bank([2, 3, 5]).update(IDS, ROWS, -1), "cannot be of step -1; steps count from 0"),
        (lambda: some_bank([2, 3, 5]).replace(IDS, ROWS, -1), "cannot be of step -1; steps count from 0"),
        (lambda: some_bank([1, 2]).load_part(some_bank([1, 3]).negatives()), "no slot for the samples 3"),
        (lambda: some_bank([]), "no samples"),
        (lambda: some_bank([4, 3, 4, 4]), "not distinct: 4 came"),
        (lambda: some_bank([1], dim=0), "rows of dim 0"),
        (lambda: some_bank([1], dtype=np.float64), "rows of float64"),
        (lambda: some_bank([1], dtype="single precision"), "rows of single precision; choose float32 or"),
        (lambda: KeyQueue(3, DIM, dtype="f8"), "rows of f8"),
        (lambda: some_bank([1], momentum=1.0), r"not in \[0, 1\): it is 1"),
        (lambda: some_bank([1, 2], first_slot=-1), "slots are -1 to 1 of 1"),
        (lambda: some_bank([1, 2], first_slot=5, num_slots=6), "slots are 5 to 7 of 6"),
        (lambda: some_bank([1, 2]).draw(3, step=0), "cannot draw 3 slots of 2"),
        (lambda: draw_slots(2, -1, seed=0, step=0), "cannot draw -1 slots"),
        (
            lambda: some_bank([8, 9], first_slot=5).read(np.array([7, 4, 5])),
            "slots 4, 7 are not here: these are 5 to 6",
        ),
        (
            lambda: some_bank([1, 2]).load_state_dict(some_bank([1, 3]).state_dict()),
            "other samples, such as 3",
        ),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(make: Callable[[], object], message: str) -> None:
    with pytest.raises(RayclError, match=message) as error:
        make()
    assert isinstance(error.value, ConfigError) and "\n" not in str(error.value)
