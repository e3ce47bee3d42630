"""Batches of P classes with K samples each: in memory, in the windows of a stream, and their refusals."""

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from raycl.config.overrides import override
from raycl.config.schema import DataConfig
from raycl.data.columns import ColumnNames
from raycl.data.in_memory import InMemoryDataset
from raycl.data.sampler import BatchShard, InMemorySampler, class_batches, grouped
from raycl.data.sources import Source
from raycl.data.streaming import StreamingSampler
from raycl.data.windows import Piece, RowRange
from raycl.errors import ConfigError, DataError
from raycl.recipes import recipe
from raycl.training.data_module import DataModule
from raycl.training.preflight import check_classes

GROUP, BATCH_SIZE = 3, 12  # four classes of three samples
SIZES = (3, 4, 5, 8, 13, 30)
LABEL = np.random.default_rng(0).permutation(
    np.concatenate([np.repeat(np.arange(len(SIZES)), SIZES), [7, 8, 8], np.full(4, -1)])
)
DRAWN = np.flatnonzero(np.isin(LABEL, range(len(SIZES))))  # not the small classes 7 and 8


def rows_with(label: NDArray[np.int64]) -> InMemoryDataset:
    return InMemoryDataset([pa.table({"sample_id": np.arange(len(label)), "label": label})], {})


def epoch_of(*, epoch: int = 0, start: int = 0, rank: int = 0, num_workers: int = 1) -> list[Any]:
    sampler = InMemorySampler(rows=rows_with(LABEL), seed=5, samples_per_class=GROUP)
    share = BatchShard(batch_size=BATCH_SIZE, rank=rank, num_workers=num_workers)
    return list(sampler.epoch_batches(share, epoch=epoch, start=start))


def ids_of(batches: list[Any]) -> list[list[int]]:
    return [batch.sample_id.tolist() for batch in batches]


def sizes_in(label: NDArray[np.int64]) -> set[int]:
    return set(Counter(label.tolist()).values())


# In memory


def test_each_batch_has_equally_many_different_samples_of_each_of_its_classes() -> None:
    for epoch in range(20):
        batches = epoch_of(epoch=epoch)
        assert len(batches) == len(LABEL) // BATCH_SIZE
        for batch in batches:
            assert sizes_in(batch.label) == {GROUP}
            assert len(set(batch.sample_id)) == BATCH_SIZE
            assert set(batch.sample_id) <= set(DRAWN)
            assert batch.label.tolist() == LABEL[batch.sample_id].tolist()


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_batches_of_classes_do_not_depend_on_the_number_of_workers(num_workers: int) -> None:
    parts = (ids_of(epoch_of(epoch=3, rank=rank, num_workers=num_workers)) for rank in range(num_workers))
    assert [list(itertools.chain(*each)) for each in zip(*parts, strict=True)] == ids_of(epoch_of(epoch=3))


def test_an_epoch_of_classes_resumes_with_the_same_batches_and_views() -> None:
    whole, resumed = epoch_of(epoch=1), epoch_of(epoch=1, start=2)
    assert ids_of(resumed) == ids_of(whole)[2:] != ids_of(epoch_of(epoch=2))[2:]
    assert [batch.epoch for batch in resumed] == [batch.epoch for batch in whole][2:]


def test_every_step_has_views_of_its_own() -> None:
    numbers = [batch.epoch for epoch in range(5) for batch in epoch_of(epoch=epoch)]
    assert len(set(numbers)) == len(numbers)


def test_classes_are_drawn_equally_often_and_so_are_the_samples_of_a_class() -> None:
    counts = np.zeros(len(LABEL))
    for epoch in range(3_000):
        for batch in epoch_of(epoch=epoch):
            counts[batch.sample_id] += 1
    by_class = [counts[np.flatnonzero(number == LABEL)] for number in range(len(SIZES))]
    totals = np.array([each.sum() for each in by_class]) / GROUP
    # Each of the batches has a class with probability 4 / 6.
    num_batches = 3_000 * (len(LABEL) // BATCH_SIZE)
    expected, deviation = num_batches * 4 / 6, (num_batches * 4 / 6 * 2 / 6) ** 0.5
    assert np.abs(totals - expected).max() < 4.5 * deviation
    for each in by_class:
        # Draws without replacement vary less than independent ones: chi-square is at most its usual value.
        chi_square = ((each - each.mean()) ** 2 / each.mean()).sum()
        assert chi_square < len(each) + 6 * (2 * len(each)) ** 0.5


def test_no_sample_is_drawn_again_before_the_rest_of_its_class() -> None:
    batches = class_batches(LABEL, batch_size=18, samples_per_class=GROUP, rng=np.random.default_rng(1))
    drawn: dict[int, list[int]] = {number: [] for number in range(len(SIZES))}
    for batch in itertools.islice(batches, 20):  # with all six classes
        for row in batch.tolist():
            drawn[int(LABEL[row])].append(row)
    for number, size in enumerate(SIZES):
        in_a_pass = size // GROUP * GROUP
        for start in range(0, 60 - in_a_pass + 1, in_a_pass):
            assert len(set(drawn[number][start : start + in_a_pass])) == in_a_pass


def test_pytorch_metric_learning_draws_batches_of_the_same_form() -> None:
    samplers: Any = pytest.importorskip("pytorch_metric_learning.samplers")
    chosen = np.random.default_rng(0).permutation(DRAWN)  # it fills small classes with copies
    theirs = samplers.MPerClassSampler(
        LABEL[chosen], m=GROUP, batch_size=BATCH_SIZE, length_before_new_iter=40_000
    )
    np.random.seed(0)
    counts = {"theirs": np.zeros(len(LABEL)), "ours": np.zeros(len(LABEL))}
    for batch in chosen[list(theirs)].reshape(-1, BATCH_SIZE):
        assert sizes_in(LABEL[batch]) == {GROUP}
        counts["theirs"][batch] += 1
    rng = np.random.default_rng(0)
    ours = class_batches(LABEL, batch_size=BATCH_SIZE, samples_per_class=GROUP, rng=rng)
    for batch in itertools.islice(ours, 40_000 // BATCH_SIZE):
        counts["ours"][batch] += 1
    # A sample of a class of 30 is drawn about 222 times: within 4.5 standard deviations of a difference.
    assert counts["ours"] == pytest.approx(counts["theirs"], rel=0.45)


# A stream


def labels_of(sizes: list[int]) -> NDArray[np.int64]:
    """Return the labels of this many rows without a label, and of each class."""
    return np.repeat(np.arange(len(sizes)) - 1, sizes)


labels = st.lists(st.integers(0, 20), min_size=1, max_size=8).map(labels_of)


def most_batches(label: NDArray[np.int64], num_classes: int, group: int) -> int:
    """Return the largest T for which classes, each at most once in a batch, fill T batches."""
    _, sizes = np.unique(label[label >= 0], return_counts=True)
    return max(T for T in range(100) if np.minimum(sizes // group, T).sum() >= num_classes * T)


@settings(deadline=None)
@given(labels, st.integers(1, 4), st.integers(2, 4), st.integers(0, 99))
def test_a_window_forms_as_many_batches_of_whole_groups_as_possible(
    label: NDArray[np.int64], num_classes: int, group: int, seed: int
) -> None:
    size, rng = num_classes * group, np.random.default_rng(seed)
    order = rng.permutation(len(label))
    found, num_rows = grouped(order, label, batch_size=size, samples_per_class=group, rng=rng)
    assert sorted(found) == sorted(order)
    complete = found[: len(label) // size * size].reshape(-1, size)
    whole = [
        batch
        for batch in label[complete]
        if sizes_in(batch) == {group} and batch.min() >= 0 and len(set(batch)) == num_classes
    ]
    assert num_rows == size * most_batches(label, num_classes, group)
    assert len(whole) * size >= num_rows
    # A group has rows of its class that are adjacent in their order, and the rest is in its order.
    by_class = [[row for row in order if label[row] == each] for each in set(label) - {-1}]
    groups = [rows[start : start + group] for rows in by_class for start in range(0, len(rows), group)]
    assert sum(part in groups for part in complete.reshape(-1, group).tolist()) * group >= num_rows
    rest = np.argsort(order)[found[complete.size :]].tolist()
    assert rest == sorted(rest)


def test_classes_of_equal_sizes_meet_in_different_batches() -> None:
    label, met = np.repeat(np.arange(8), GROUP), set[tuple[int, ...]]()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        found, _ = grouped(np.arange(24), label, batch_size=BATCH_SIZE, samples_per_class=GROUP, rng=rng)
        met.add(tuple(sorted(set(label[found[:BATCH_SIZE]]))))
    assert len(met) > 10  # of 70


def stream_of(label: NDArray[np.int64], *, buffer: int, samples_per_class: int | None) -> StreamingSampler:
    return StreamingSampler(
        open_epoch=lambda epoch: None,  # pyright: ignore[reportArgumentType]
        formats={},
        seed=3,
        shuffle_buffer_size=buffer,
        samples_per_class=samples_per_class,
    )


def streamed(
    label: NDArray[np.int64], *, buffer: int, samples_per_class: int | None
) -> tuple[StreamingSampler, list[Any]]:
    stream = stream_of(label, buffer=buffer, samples_per_class=samples_per_class)
    share = BatchShard(batch_size=BATCH_SIZE)
    cutter, pieces = stream.cutter(share), []
    blocks = [
        RowRange(ids, 0, len(ids), 0) for ids in np.array_split(np.arange(len(label)), len(label) // 50)
    ]
    for number, window in enumerate(cutter.windows(iter(blocks))):
        rows = [part.block[part.start : part.stop] for part in window]
        tables = [pa.table({"sample_id": ids, "label": label[ids]}) for ids in rows]
        [[table]], num_grouped = cutter.cut(tables, epoch=1, number=number)
        pieces.append(Piece(table, num_grouped))
    return stream, list(stream._batches(iter(pieces), share, 1, is_whole=True))


def test_a_stream_uses_every_row_once_and_counts_the_rows_in_whole_groups() -> None:
    label = np.random.default_rng(2).choice(8, 2_000, p=np.array([30, 1, 1, 2, 2, 3, 3, 3]) / 45)
    _, plain = streamed(label, buffer=400, samples_per_class=None)
    stream, batches = streamed(label, buffer=400, samples_per_class=GROUP)
    # Workers whose rows have other labels make the same number of steps.
    assert len(batches) == len(plain) == 2_000 // BATCH_SIZE
    seen = [row for batch in batches for row in batch.sample_id.tolist()]
    assert len(seen) == len(set(seen))
    is_whole = [sizes_in(batch.label) == {GROUP} for batch in batches]
    assert 0.3 < np.mean(is_whole) < 0.9  # the first class has more rows than there are batches
    assert stream.grouped_fraction == pytest.approx(np.mean(is_whole), abs=1 / len(batches))
    assert not any(sizes_in(batch.label) == {GROUP} for batch in plain)
    # They are anywhere in their window of 33 batches.
    in_window = np.reshape(is_whole[:165], (5, 33)).mean(axis=0)
    assert in_window[:11].mean() == pytest.approx(in_window[-11:].mean(), abs=0.4)


def test_a_stream_of_balanced_classes_has_almost_only_whole_groups() -> None:
    label = np.random.default_rng(2).permutation(np.repeat(np.arange(20), 100))
    stream, batches = streamed(label, buffer=500, samples_per_class=GROUP)
    assert len(batches) == 2_000 // BATCH_SIZE
    assert stream.grouped_fraction > 0.9


def test_a_stream_without_any_whole_group_is_refused() -> None:
    label = np.repeat(np.arange(10), 200)  # sorted by class: two or three classes in a buffer
    message = r"data.samples_per_class 3: in epoch 1, no shuffle buffer had 4 classes.*shuffle_buffer_size"
    with pytest.raises(DataError, match=message):
        streamed(label, buffer=300, samples_per_class=GROUP)


# Refusals


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("supcon", {"data.samples_per_class": 3}, "256 rows .* groups of data.samples_per_class 3; .* multiple of 3"),
        ("supcon", {"workers": 4, "data.samples_per_class": 128}, "64 rows .* data.samples_per_class 128; .* of 512"),
        ("supcon", {"data.samples_per_class": 256}, "data.samples_per_class 256 is the whole batch"),
        (
            "sogclr",
            {"data.samples_per_class": 4},
            "loss gcl takes the other rows of a batch for a random sample of the data, .* data.samples_per_class 4 "
            "draws .*; remove it, or set loss to dcl and negatives.store to none",
        ),
        ("clip", {"data.samples_per_class": 4}, "acts only with data.kind image or text"),
        ("instance_discrimination", {"data.samples_per_class": 4}, "acts only with key tower or momentum_encoder"),
        (
            "simcse",
            {"data.samples_per_class": 4, "text.length_buckets": 8},
            "text.length_buckets acts only with data.samples_per_class unset",
        ),
    ],
)  # fmt: skip
def test_a_setting_that_forms_no_batch_of_classes_is_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        override(recipe(name, image_size=32), changes)


def test_a_single_sample_of_each_class_is_refused() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 2"):
        DataConfig(samples_per_class=1)


@pytest.mark.parametrize(
    ("label", "changes", "message"),
    [
        (np.arange(300), {}, r"loss supcon finds no two samples of a class among 300 .*\(300 classes\)"),
        (np.full(300, -1), {}, r"loss supcon finds no two samples of a class among 300 .*\(0 classes\)"),
        (
            np.arange(300) % 30,
            {"data.samples_per_class": 4},
            "a batch of 256 needs 64 classes of at least 4 samples .* and 30 of the 30 classes have as many",
        ),
        (
            np.arange(300) % 100,
            {"data.samples_per_class": 4},
            "a batch of 256 needs 64 classes of at least 4 samples .* and 0 of the 100 classes have as many",
        ),
    ],
)
def test_classes_that_fill_no_batch_are_refused(
    label: NDArray[np.int64], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_classes(override(recipe("supcon", image_size=32), changes), label)


def test_samples_that_are_never_drawn_are_counted_by_cause() -> None:
    changes = {"stages.0.batch_size": BATCH_SIZE, "data.samples_per_class": GROUP}
    counted = check_classes(override(recipe("simclr", image_size=32), changes), LABEL)
    assert counted == {"in a class of fewer than 3 samples": 3, "without a label": 4}
    assert counted.total() == len(LABEL) - len(DRAWN)
    assert check_classes(recipe("supcon", image_size=32), LABEL) == {}


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, ["4 of 70 training samples have no label: their only positives in loss supcon are their own views"]),
        (
            {"stages.0.batch_size": BATCH_SIZE, "data.samples_per_class": GROUP},
            ["3 samples in a class of fewer than 3 samples are never drawn", "4 samples without a label are never drawn"],
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_labeled", [False, True])
def test_a_run_reports_training_samples_without_a_label(
    changes: dict[str, Any], lines: list[str], is_labeled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    label = np.append(LABEL, -1)  # the last one is held out
    table = pa.table({"sample_id": np.arange(len(label)), "label": np.where(is_labeled, 0, label)})
    decoded: Any = [SimpleNamespace(columns=lambda _: [table])]
    data: Any = SimpleNamespace(
        _config=override(recipe("supcon", image_size=32), changes if not is_labeled else {}),
        streamed=False,
        data_sets=[SimpleNamespace(prefix="")],
        holdout=SimpleNamespace(is_train=lambda ids: ids < len(LABEL)),
        _coordinator=MagicMock(),
    )
    monkeypatch.setattr("raycl.training.data_module.ray.get", MagicMock())
    DataModule.check_classes(data, decoded)
    found = [call.args[0] for call in data._coordinator.add_notice.remote.call_args_list]
    assert found == ([] if is_labeled else lines)


def test_samples_without_labels_are_refused() -> None:
    config = override(recipe("simclr", image_size=32), {"data.samples_per_class": 4})
    source = Source(
        uri="", kind="folder", fragments=(), columns=ColumnNames(), classes=None, has_labels=False
    )
    with pytest.raises(ConfigError, match=r"data.samples_per_class needs labels.*--set data.columns.label"):
        DataModule(config, None, [source])
