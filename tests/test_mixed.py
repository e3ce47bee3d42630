"""Several data sets in one run: each batch has rows of one of them, in proportion to sizes or weights."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raycl
from raycl.config import RunConfig
from raycl.data.columns import ColumnNames
from raycl.data.discovery import find_source
from raycl.data.in_memory import Batch, InMemoryDataset
from raycl.data.sampler import BatchShard, InMemorySampler, MixedSampler, batch_counts
from raycl.errors import ConfigError, RayclError
from raycl.recipes import recipe
from raycl.storage import Place
from raycl.training import data_set
from raycl.training.coordinator import RunCoordinator
from raycl.training.data_module import DataModule
from raycl.training.preflight import (
    check_data_sets,
    check_same_data,
    check_sizes,
    column_names,
    describe_data,
    validate_run,
)
from raycl.training.stages import Position, stage_plans
from raycl.training.views import build_sampler
from tests.images import encode, write_digits
from tests.table_files import write_rows

BATCH_SIZE = 4
SIZES = (50, 23, 9)  # 12, 5 and 2 complete batches
PASSES = [12, 5, 2]
WHOLE = BatchShard(batch_size=BATCH_SIZE)


def sampler_of(
    *sizes: int, weights: tuple[float, ...] | None = None, equal_ids: bool = False
) -> MixedSampler:
    """Return a sampler of data sets whose ids are 1,000 apart, or the same numbers."""
    sets = []
    for number, size in enumerate(sizes):
        ids = np.arange(size) + (0 if equal_ids else 1_000 * number)
        sets.append(InMemoryDataset([pa.table({"sample_id": ids, "label": ids})], {}))
    samplers = [InMemorySampler(rows=rows, seed=20 + number) for number, rows in enumerate(sets)]
    return MixedSampler(samplers=samplers, seed=3, weights=weights)


def ids_of(batches: Iterator[Batch]) -> list[list[int]]:
    return [batch.sample_id.tolist() for batch in batches]


def data_sets_of(sampler: MixedSampler, epoch: int) -> list[int]:
    return [batch.data_set for batch in sampler.epoch_batches(WHOLE, epoch=epoch)]


@pytest.mark.parametrize("weights", [None, (1, 1, 1), (3, 1, 2.5)])
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_each_batch_has_rows_of_one_data_set_for_any_number_of_workers(
    num_workers: int, weights: tuple[float, ...] | None
) -> None:
    sampler = sampler_of(*SIZES, weights=weights)
    for epoch in (0, 3):
        whole = list(sampler.epoch_batches(WHOLE, epoch=epoch))
        for batch in whole:
            assert set(batch.sample_id // 1_000) == {batch.data_set}
        shares = [
            ids_of(
                sampler.epoch_batches(
                    BatchShard(batch_size=BATCH_SIZE, rank=rank, num_workers=num_workers), epoch=epoch
                )
            )
            for rank in range(num_workers)
        ]
        joined = [[row for part in parts for row in part] for parts in zip(*shares, strict=True)]
        assert joined == ids_of(iter(whole))


def test_without_weights_an_epoch_is_one_pass_over_every_data_set() -> None:
    sampler, last = sampler_of(*SIZES), []
    for epoch in range(3):
        batches = list(sampler.epoch_batches(WHOLE, epoch=epoch))
        rows = np.concatenate([batch.sample_id for batch in batches])
        assert len(np.unique(rows)) == len(rows) == sum(PASSES) * BATCH_SIZE
        assert Counter(batch.data_set for batch in batches) == dict(enumerate(PASSES))
        assert {batch.epoch for batch in batches} == {epoch}
        last.append([batch.data_set for batch in batches])
    # By hand: numpy's permutation of the numbers of the data sets, seeded by seed and epoch.
    numbers = np.repeat(np.arange(len(PASSES)), PASSES)
    assert last == [np.random.default_rng((3, epoch)).permutation(numbers).tolist() for epoch in range(3)]


def test_one_data_set_of_several_has_the_order_of_its_own_sampler() -> None:
    sampler = sampler_of(*SIZES)
    for number, own in enumerate(sampler.samplers):
        mixed = [each for each in sampler.epoch_batches(WHOLE, epoch=5) if each.data_set == number]
        assert ids_of(iter(mixed)) == ids_of(own.epoch_batches(WHOLE, epoch=5))


@pytest.mark.parametrize("weights", [(1, 1, 1), (8, 1, 1), (0.1, 0.2, 0.3)])
def test_weights_divide_an_epoch_and_each_data_set_is_used_up_before_it_starts_over(
    weights: tuple[float, ...],
) -> None:
    sampler, num_epochs = sampler_of(*SIZES, weights=weights), 6
    batches = [each for epoch in range(num_epochs) for each in sampler.epoch_batches(WHOLE, epoch=epoch)]
    counts = Counter(batch.data_set for batch in batches)
    for number, passes in enumerate(PASSES):
        exact = sum(PASSES) * weights[number] / sum(weights)
        assert abs(counts[number] / num_epochs - exact) < 1
        own = [batch for batch in batches if batch.data_set == number]
        for start in range(0, len(own), passes):
            window = own[start : start + passes]
            rows = np.concatenate([batch.sample_id for batch in window])
            assert len(np.unique(rows)) == len(window) * BATCH_SIZE
            assert {batch.epoch for batch in window} == {start // passes}


@pytest.mark.parametrize("weights", [None, (8, 1, 1)])
def test_a_resumed_epoch_has_the_remaining_batches(weights: tuple[float, ...] | None) -> None:
    sampler = sampler_of(*SIZES, weights=weights)
    whole = list(sampler.epoch_batches(WHOLE, epoch=2))
    for start in (0, 1, 7, len(whole)):
        rest = list(sampler.epoch_batches(WHOLE, epoch=2, start=start))
        assert ids_of(iter(rest)) == ids_of(iter(whole[start:]))
        assert [(each.data_set, each.epoch) for each in rest] == [
            (each.data_set, each.epoch) for each in whole[start:]
        ]


def test_equal_ids_in_two_data_sets_never_meet_in_a_batch() -> None:
    sampler = sampler_of(20, 20, equal_ids=True)
    for batch in sampler.epoch_batches(WHOLE, epoch=0):
        assert len(set(batch.sample_id)) == BATCH_SIZE


@pytest.mark.parametrize(
    ("passes", "weights", "counts"),
    [
        ([12, 5, 2], None, [12, 5, 2]),
        ([12, 5, 2], [12, 5, 2], [12, 5, 2]),
        ([12, 5, 2], [1, 1, 1], [7, 6, 6]),
        ([12, 5, 2], [0.1, 0.1, 0.8], [2, 2, 15]),
        ([3, 3], [1000, 1], [6, 0]),
    ],
)
def test_batch_counts_are_shares_of_the_weights_with_the_sum_of_the_passes(
    passes: list[int], weights: list[float] | None, counts: list[int]
) -> None:
    assert batch_counts(passes, weights) == counts
    assert sum(counts) == sum(passes)


def test_data_sets_are_drawn_as_by_the_proportional_sampler_of_sentence_transformers() -> None:
    samplers = pytest.importorskip("sentence_transformers.base.sampler")
    utils = pytest.importorskip("torch.utils.data")
    peers = [
        utils.BatchSampler(utils.RandomSampler(range(size)), BATCH_SIZE, drop_last=True) for size in SIZES
    ]
    joined = utils.ConcatDataset([range(size) for size in SIZES])
    peer = samplers.ProportionalBatchSampler(joined, peers)
    own = sampler_of(*SIZES)
    ends = np.cumsum(SIZES)
    theirs = [{int(np.searchsorted(ends, row, side="right")) for row in batch} for batch in peer]
    assert all(len(each) == 1 for each in theirs)
    assert Counter(number for each in theirs for number in each) == Counter(data_sets_of(own, 0))
    assert len(peer) == len(data_sets_of(own, 0))
    # Neither draws the data sets in turn.
    assert len({tuple(islice(data_sets_of(own, epoch), 6)) for epoch in range(8)}) > 4


def test_equal_weights_draw_as_many_batches_of_each_as_the_round_robin_of_sentence_transformers() -> None:
    samplers = pytest.importorskip("sentence_transformers.base.sampler")
    utils = pytest.importorskip("torch.utils.data")
    peers = [
        utils.BatchSampler(utils.RandomSampler(range(size)), BATCH_SIZE, drop_last=True) for size in SIZES
    ]
    peer = samplers.RoundRobinBatchSampler(utils.ConcatDataset([range(size) for size in SIZES]), peers)
    ends = np.cumsum(SIZES)
    theirs = Counter(int(np.searchsorted(ends, batch[0], side="right")) for batch in peer)
    ours = Counter(data_sets_of(sampler_of(*SIZES, weights=(1, 1, 1)), 0))
    assert set(theirs.values()) == {min(PASSES)}
    assert max(ours.values()) - min(ours.values()) <= 1  # but over a whole epoch
    assert ours.total() == sum(PASSES)


# A run


def run_of(**settings: Any) -> RunConfig:
    whole = {"stages.0.batch_size": BATCH_SIZE, "data.cache": "materialize", "workers": 1}
    return raycl.override(raycl.recipe("simclr", image_size=16), whole | settings)


def test_a_run_on_one_data_set_has_the_batches_of_its_sampler() -> None:
    [own] = sampler_of(50).samplers
    built = build_sampler(run_of(seed=7), [own.rows])
    assert isinstance(built, InMemorySampler)
    expected = ids_of(InMemorySampler(rows=own.rows, seed=7).epoch_batches(WHOLE, epoch=3))
    assert ids_of(built.epoch_batches(WHOLE, epoch=3)) == expected


def test_data_sets_of_a_run_have_orders_of_their_own() -> None:
    twins = [each.rows for each in sampler_of(40, 40, equal_ids=True).samplers]
    mixed = list(build_sampler(run_of(), twins).epoch_batches(WHOLE, epoch=0))
    first, second = (ids_of(each for each in mixed if each.data_set == number) for number in (0, 1))
    assert np.unique(first).tolist() == np.unique(second).tolist() == list(range(40))
    assert first != second


def test_a_plan_adds_up_the_batches_of_the_data_sets() -> None:
    config = run_of(**{"stages.0.epochs": 3})
    [plan] = stage_plans(config, num_train=SIZES)
    assert (plan.steps_per_epoch, plan.num_steps) == (sum(PASSES), 3 * sum(PASSES))


def test_a_position_counts_the_steps_of_each_data_set_if_there_are_several() -> None:
    position = Position(data_set_steps=(0, 0))
    for number in (1, 1, 0):
        position = position.next_step(batch_size=BATCH_SIZE, data_set=number)
    assert (position.data_set_steps, position.step) == ((1, 2), 3)
    assert position.next_epoch().next_stage().data_set_steps == (1, 2)
    assert Position().next_step(batch_size=BATCH_SIZE).data_set_steps == ()


@pytest.mark.parametrize(
    ("number", "settings", "message"),
    [
        (
            1,
            {"data.weights": [1]},
            r"data.weights acts only with several data sets \(--data A --data B\); remove it",
        ),
        (3, {"data.weights": [1, 2]}, "data.weights has 2 numbers, and there are 3 data sets; give one per"),
        (2, {"data.weights": []}, "data.weights has 0 numbers, and there are 2 data sets"),
        (
            2,
            {"data.cache": "stream"},
            "data.cache=stream reads one data set, and there are 2; set data.cache=",
        ),
    ],
)
def test_settings_that_do_not_fit_the_number_of_data_sets_are_refused(
    number: int, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_data_sets(run_of(**settings), number)


@pytest.mark.parametrize("name", ["moco_v2", "instance_discrimination", "sogclr"])
def test_a_store_of_negatives_is_refused_with_several_data_sets(name: str) -> None:
    config = raycl.recipe(name, image_size=16)
    check_data_sets(config, 1)
    with pytest.raises(
        ConfigError, match=f"negatives.store {config.negatives.store} would keep rows of all 2"
    ):
        check_data_sets(config, 2)


@pytest.mark.parametrize("weights", ["[0, 1]", "[-1, 1]", "[.nan, 1]", "[.inf, 1]", "[a, 1]", "3"])
def test_weights_are_finite_and_above_zero(weights: str) -> None:
    with pytest.raises(ConfigError, match=r"^data\.weights") as caught:
        raycl.override(raycl.recipe("simclr"), [f"data.weights={weights}"])
    assert "\n" not in str(caught.value)


def test_a_data_set_without_a_batch_is_refused_by_name() -> None:
    check_sizes(run_of(), {"a": 4, "b": 4})
    with pytest.raises(
        RayclError,
        match=r"a batch of 4 rows .* is larger than the 3 rows to train on in b; lower --batch-size",
    ):
        check_sizes(run_of(), {"a": 9, "b": 3})
    with pytest.raises(
        RayclError, match="larger than the 3 rows to train on; lower --batch-size or give more data"
    ):
        check_sizes(run_of(), {"a": 3})
    weighted = run_of(**{"data.weights": [1000, 1]})
    with pytest.raises(RayclError, match="gives b none of the 6 batches of an epoch; raise its weight"):
        check_sizes(weighted, {"a": 12, "b": 12})


def test_a_data_set_given_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = [str(write_digits(tmp_path / "digits.parquet", 20)), "digits.parquet"]
    with (
        pytest.raises(
            ConfigError, match="digits.parquet is given twice; give it once, and raise its number in"
        ),
        validate_run(run_of(), output=str(tmp_path / "run"), resume=False, data=given),
    ):
        raise AssertionError("accepted")


def test_a_run_resumes_only_with_the_same_data_sets_in_the_same_order(tmp_path: Path) -> None:
    def described(*rows: int) -> dict[str, Any]:
        return describe_data([str(each) for each in rows], rows, None, streamed=False)

    assert "rows_per_data_set" not in described(700)
    for rows in ((400, 300), (700,)):
        (tmp_path / "data.json").write_text(json.dumps(described(*rows)))
        check_same_data(Place(str(tmp_path)), described(*rows))
        message = (
            "the run began with .*, and --resume got data sets of 300, 400 rows; give the same data sets"
        )
        with pytest.raises(ConfigError, match=message):
            check_same_data(Place(str(tmp_path)), described(300, 400))


def folder_of(path: Path, *classes: str) -> str:
    for name in classes:
        (path / name).mkdir(parents=True)
        (path / name / "1.png").write_bytes(b"")
    return str(path)


def test_equal_class_names_of_two_data_sets_are_one_class(tmp_path: Path) -> None:
    first, second = folder_of(tmp_path / "a", "cat", "dog"), folder_of(tmp_path / "b", "ant", "dog", "cat")
    samples = DataModule(run_of(), None, [find_source(each) for each in (first, second)])
    assert samples.classes == ("ant", "cat", "dog")
    sources = [each.source for each in samples.data_sets if each.source]
    read = [rows for source in sources for part in source.fragments for rows in source.read(part)]
    assert [label for rows in read for label in rows.label.tolist()] == [1, 2, 0, 1, 2]


def write_named(path: Path, *names: str) -> None:
    """Write rows with a ``ClassLabel`` of Hugging Face's ``datasets``."""
    info = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    table = pa.table({"image": [b"", b""], "label": [0, 1]})
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(info)}), path)


def test_parts_of_data_that_number_their_classes_differently_are_refused(tmp_path: Path) -> None:
    for name, classes in {"a": ("cat", "dog"), "b": ("cat", "dog", "owl"), "c": ("ant", "cat")}.items():
        write_named(tmp_path / f"{name}.parquet", *classes)
    sets = [find_source(str(tmp_path / f"{name}.parquet")) for name in "abc"]
    assert DataModule(run_of(), None, sets[:2]).classes is None
    message = "label 0 is cat in one part of {} and ant in another; give all the same numbers"
    with pytest.raises(RayclError, match=message.format("the data sets")):
        DataModule(run_of(), None, sets)
    with pytest.raises(RayclError, match=message.format(tmp_path)):
        find_source(str(tmp_path))
    as_grades = ColumnNames(image=None, query="image", document="image")
    assert find_source(str(tmp_path), as_grades).has_labels


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_data_set_without_any_label_may_lie_beside_one_with_names_of_classes(
    ending: str, tmp_path: Path
) -> None:
    for name, label in (("a", "cat"), ("b", None)):
        write_rows(tmp_path / f"{name}.{ending}", [{"image": "a.png", "label": label}])
    module = DataModule(run_of(), None, [find_source(str(tmp_path / f"{name}.{ending}")) for name in "ab"])
    assert [each.classes for each in module.data_sets] == [("cat",), ("cat",)]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"label": [1, 2]},
            "the labels of .*/b.parquet are integers, and those of another data set are text",
        ),
        (
            {},
            r"a.parquet has the columns image, label, and .*/b.parquet has the columns image; give all data sets labels, or none of them; a column label",
        ),
    ],
)
def test_data_sets_of_other_columns_or_labels_are_refused(
    other: dict[str, Any], message: str, tmp_path: Path
) -> None:
    for name, columns in (("a", {"label": ["cat", "dog"]}), ("b", other)):
        pq.write_table(pa.table({"image": [b"", b""], **columns}), tmp_path / f"{name}.parquet")
    sources = [find_source(str(tmp_path / f"{name}.parquet")) for name in "ab"]
    with pytest.raises(RayclError, match=message):
        DataModule(run_of(), None, sources)


def test_class_folders_may_lie_beside_files_with_a_column_of_labels(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "folders" / name).mkdir(parents=True)
        (tmp_path / "folders" / name / "a.png").write_bytes(b"")
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "a.png").write_bytes(b"")
    for name, label in (("named", "ant"), ("without", None)):
        labels = pa.array([label], pa.string())
        pq.write_table(pa.table({"jpg": [b""], "class": labels}), tmp_path / f"{name}.parquet")
    columns = ColumnNames(image="jpg", label="class")
    folders, named, without, flat = (
        find_source(str(tmp_path / name), columns)
        for name in ("folders", "named.parquet", "without.parquet", "flat")
    )
    for sets in ([folders, named, without], [named, folders, without]):
        module = DataModule(run_of(), None, sets)
        assert [each.classes for each in module.data_sets] == [("ant", "cat", "dog")] * 3
    with pytest.raises(
        RayclError, match="folders has .* and class folders, and .*/flat has .*; give all data sets labels"
    ):
        DataModule(run_of(), None, [folders, flat])


def test_the_columns_of_a_click_log_are_named_as_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped = Mock(schema=lambda: None, count=lambda: 1)
    grouped.materialize.return_value = grouped
    monkeypatch.setattr(data_set, "group_source", lambda *_, **__: grouped)
    monkeypatch.setattr(data_set, "_ordered", lambda pairs: pairs)
    (tmp_path / "a.csv").write_text("query,document,label\nq,d,1\n")
    (tmp_path / "b.csv").write_text("query,document\nq,d\n")
    config = recipe("two_tower")
    sources = [find_source(str(tmp_path / f"{name}.csv"), column_names(config)) for name in "ab"]
    message = (
        r"a.csv has the columns query, document, label, and .*/b.csv has the columns query, document; give"
    )
    with pytest.raises(RayclError, match=message):
        DataModule(config, RunCoordinator(), sources)


def test_the_names_of_classes_are_read_once_of_many_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Mock(wraps=json)
    monkeypatch.setattr("raycl.data.labels.json", reader)
    for number in range(4):
        write_named(tmp_path / f"{number}.parquet", "read", "once")
    assert find_source(str(tmp_path)).label_names == ("read", "once")
    reader.loads.assert_called_once()


class BlocksHere:
    """A stand-in for a Ray Dataset whose blocks are tables of this process."""

    def __init__(self, blocks: Sequence[pa.Table]) -> None:
        self.blocks = blocks

    def schema(self) -> pa.Schema:
        return self.blocks[0].schema

    def count(self) -> int:
        return sum(map(len, self.blocks))

    def select_columns(self, names: list[str]) -> "BlocksHere":
        return BlocksHere([block.select(names) for block in self.blocks])

    def map_batches(self, read: Callable[[pa.Table], Iterator[pa.Table]], **_: Any) -> "BlocksHere":
        return BlocksHere([table for block in self.blocks for table in read(block)])

    def materialize(self) -> "BlocksHere":
        return self


def test_equal_blocks_of_a_dataset_without_ids_are_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_set, "fetch_tables", lambda dataset: dataset.blocks)
    pictures = [encode(np.full((16, 16, 3), value, np.uint8)) for value in range(3)]
    block = pa.table({"image": [*pictures, b"broken"]})
    twice: Any = BlocksHere([block, block])
    data = DataModule(run_of(**{"evaluation.every_epochs": 0}), RunCoordinator(), [twice])
    decoded = data.read_rows()
    assert sum(map(len, decoded[0].columns(["sample_id"]))) == 6
    assert data.num_train(decoded) == [6]
    assert data.data_sets[0].counts()["rows"] == 8


def test_rows_with_labels_are_found_by_their_labels_and_not_by_ids_that_data_sets_share() -> None:
    tables = [pa.table({"sample_id": [0, 1, 2], "label": labels}) for labels in ([4, -1, 5], [-1, 6, -1])]
    rows = InMemoryDataset(tables, {}).labeled()
    assert (rows.sample_id.tolist(), rows.label.tolist()) == ([0, 1, 2], [4, 6, 5])


def test_a_run_resumes_only_with_the_files_that_give_its_rows_their_ids(tmp_path: Path) -> None:
    def described(folder: str, columns: ColumnNames | None = None) -> dict[str, Any]:
        source = find_source(folder, columns)
        files = [source.files_fingerprint]
        return describe_data([folder], [source.num_rows], source.classes, streamed=False, files=files)

    first, copied, other = (
        folder_of(tmp_path / name, "cat", "dog", last)
        for name, last in (("a", "fox"), ("b", "fox"), ("c", "ant"))
    )
    (tmp_path / "data.json").write_text(json.dumps(described(first)))
    check_same_data(Place(str(tmp_path)), described(copied))
    with pytest.raises(
        ConfigError, match="c differ from the files that the run began with.*; restore the files"
    ):
        check_same_data(Place(str(tmp_path)), described(other))
    for name, order in (("d", "ab"), ("e", "ba")):  # with ids of their own, rows may be in any file
        (tmp_path / name).mkdir()
        for number, part in enumerate(order):
            table = pa.table({"image": [part.encode()], "id": [ord(part)]})
            pq.write_table(table, tmp_path / name / f"{number}{part}.parquet")
    with_ids = [described(str(tmp_path / name), ColumnNames(sample_id="id")) for name in ("d", "e")]
    assert "files" not in with_ids[0]
    (tmp_path / "data.json").write_text(json.dumps(with_ids[0]))
    check_same_data(Place(str(tmp_path)), with_ids[1])


def test_a_stream_resumes_only_with_its_rows_in_the_same_fragments(tmp_path: Path) -> None:
    table = pa.table({"id": range(4_000), "text": [f"text {number}" for number in range(4_000)]})
    columns = ColumnNames(image=None, text="text", sample_id="id")

    def described(name: str, *sizes: int, row_group_size: int = 1_000) -> dict[str, Any]:
        (tmp_path / name).mkdir()
        for number, size in enumerate(sizes):
            part = table.slice(sum(sizes[:number]), size)
            pq.write_table(part, tmp_path / name / f"{number}.parquet", row_group_size=row_group_size)
        source = find_source(str(tmp_path / name), columns)
        fragments = [source.fragments_fingerprint]
        return describe_data([name], [4_000], None, streamed=True, fragments=fragments)

    first = described("first", 2_000, 2_000)
    (tmp_path / "data.json").write_text(json.dumps(first))
    check_same_data(Place(str(tmp_path)), described("copy", 2_000, 2_000))
    for other in (described("sizes", 1_000, 3_000), described("joined", 4_000)):
        message = r"are in other files or parts of files than when the run began, so the stream"
        with pytest.raises(ConfigError, match=message):
            check_same_data(Place(str(tmp_path)), other)
    del first["fragments"]  # of an earlier version
    (tmp_path / "data.json").write_text(json.dumps(first))
    check_same_data(Place(str(tmp_path)), described("again", 2_000, 2_000))
