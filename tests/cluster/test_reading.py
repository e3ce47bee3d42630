"""Reading with Ray Data: invalid images are counted by cause, and a stream has the same batches for any workers."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from PIL import Image
from ray.util.placement_group import placement_group_table

import raycl
from raycl.cli.plan import plan_run
from raycl.config.overrides import override
from raycl.data.columns import ColumnNames
from raycl.data.decode import Decoder, decode_dataset, decode_source
from raycl.data.discovery import find_source
from raycl.data.images import ImageFormat
from raycl.data.in_memory import InMemoryDataset, pixels_of, tokens_of, weights_of
from raycl.data.read_stats import ReadStats
from raycl.data.sampler import BatchShard
from raycl.data.streaming import StreamingSampler, stream_source
from raycl.data.texts import TextFormat
from raycl.errors import ConfigError, DataError, StorageError
from raycl.inference.embed import embed_dataset
from raycl.inference.encoder import read_encoder
from raycl.preparation import pack_rows
from raycl.ray_runtime import connect_cluster, wait_for_gpu
from raycl.recipes import recipe
from raycl.step_replay.record import read_record
from raycl.step_replay.rows import read_rows
from raycl.storage import Place
from raycl.tokenization import Vocabulary
from raycl.training.coordinator import rows_in, start_coordinator
from raycl.training.data_module import DataModule
from raycl.training.data_set import DataSet, DecodedRows
from raycl.training.preflight import describe_data, save_run_files
from raycl.training.transforms import build_formats
from tests.encoders import write_images_run
from tests.images import digit_files, encode, photograph, write_digits

pytestmark = pytest.mark.usefixtures("ray_cluster")

FORMAT = ImageFormat(size=16)
FORMATS = {"image": FORMAT}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with images of every mode and with every kind of invalid image."""
    folder = tmp_path_factory.mktemp("mixed")
    photo = Image.fromarray(photograph())
    good = {
        "color.jpg": encode(photo, "JPEG"),
        "gray.png": encode(photo.convert("L")),
        "cmyk.jpg": encode(photo.convert("CMYK"), "JPEG"),
        "alpha.png": encode(photo.convert("RGBA").resize((64, 40))),
        "palette.png": encode(photo.convert("P")),
        "white.png": encode(Image.new("L", (20, 20), 255)),
    }
    bad = {
        "text.jpg": b"this is a text file",
        "truncated.jpg": good["color.jpg"][:20_000],
        "huge.png": encode(Image.new("1", (20_000, 20_000))),
        "empty.jpg": b"",
    }
    for name, content in {**good, **bad, "notes.txt": b"x"}.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def coordinator() -> Iterator[Any]:
    with start_coordinator() as actor:
        yield actor


def read(uri: Path) -> tuple[InMemoryDataset, ReadStats]:
    with start_coordinator() as coordinator:
        decoded = decode_source(find_source(str(uri)), Decoder(formats=FORMATS, coordinator=coordinator))
        return InMemoryDataset(ray.get(decoded.materialize().to_arrow_refs()), FORMATS), rows_in(coordinator)


def test_images_of_every_mode_are_read_and_invalid_ones_counted_by_cause(mixed: Path) -> None:
    rows, seen = read(mixed)
    assert len(rows) == 6
    assert seen.num_rows == 10
    assert seen.num_flat == 1
    assert seen.invalid == {
        "not an image": 2,
        "truncated image": 1,
        "more than 64,000,000 pixels": 1,
    }
    assert pixels_of(rows.take(np.arange(6))).aspect.max() == pytest.approx(640 / 427, rel=0.1)
    with pytest.raises(DataError, match="4 of 10 rows are invalid"):
        seen.check(0.01)


def test_few_rows_are_decoded_in_this_process_as_by_tasks(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycl.data.discovery.ROWS_PER_FRAGMENT", 64)
    monkeypatch.setattr("raycl.training.data_module.is_own_ray", lambda: True)

    def read_set(uri: Path, size: int) -> tuple[DecodedRows, ReadStats]:
        monkeypatch.setattr("raycl.training.data_module._HERE_BYTES", size)
        config = raycl.override(raycl.recipe("simclr", image_size=16), {"data.max_invalid_fraction": 1.0})
        with start_coordinator() as coordinator:
            data = DataModule(config, coordinator, [find_source(str(uri))])
            [decoded] = data.read_rows()
            return decoded, data.data_sets[0].stats()

    for uri in (mixed, write_digits(tmp_path / "digits.parquet", 300)):
        # The rows need a row's least size each.
        (here, counted), (tasks, counted_by_tasks) = read_set(uri, 4_096 * 300), read_set(uri, 4_096 * 9)
        assert isinstance(here.rows, list) and not isinstance(tasks.rows, list)
        assert counted == counted_by_tasks
        assert here.fingerprint() == tasks.fingerprint()
        assert ray.get(here.blocks()) == ray.get(tasks.blocks())
        for names in (["sample_id"], ["sample_id", "label"]):
            assert here.fingerprint(names) == tasks.fingerprint(names)
            assert pa.concat_tables(here.columns(names)) == pa.concat_tables(tasks.columns(names))


def test_a_file_that_disappears_before_it_is_read_is_one_invalid_row(
    mixed: Path, tmp_path: Path, coordinator: Any
) -> None:
    for name in ("a.jpg", "b.jpg", "c.jpg"):
        (tmp_path / name).write_bytes((mixed / "color.jpg").read_bytes())
    source = find_source(str(tmp_path))
    (tmp_path / "b.jpg").unlink()
    decoded = decode_source(source, Decoder(formats=FORMATS, coordinator=coordinator))
    rows = InMemoryDataset(ray.get(decoded.materialize().to_arrow_refs()), FORMATS)
    assert rows.sample_id.tolist() == [0, 2]
    assert rows_in(coordinator).invalid == {"file not found": 1}
    assert rows_in(coordinator).examples == ["b.jpg (file not found)"]


def test_a_large_stream_holds_out_rows_only_from_the_evaluation_fragments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, coordinator: Any
) -> None:
    monkeypatch.setattr("raycl.data.discovery.ROWS_PER_FRAGMENT", 64)
    monkeypatch.setattr("raycl.training.data_module.EVALUATION_PART", 1)
    source = find_source(str(write_digits(tmp_path / "digits.parquet", 1_000)))
    config = raycl.override(
        raycl.recipe("simclr", image_size=16),
        {
            "data.cache": "stream",
            "evaluation.num_test": 100,
            "evaluation.num_train": 200,
            "data.shuffle_buffer_size": 200,
        },
    )
    samples = DataModule(config, coordinator, [source])
    [kept] = samples.read_rows()
    evaluated = set(pa.concat_tables(kept.columns(["sample_id"]))["sample_id"].to_pylist())
    held_out = {row for row in evaluated if samples.holdout.is_test(np.array([row]))[0]}
    assert len(evaluated) == pytest.approx(0.65 * 360, abs=40)  # a tenth held out, 200 reference rows
    output = Place(str(tmp_path / "run"))
    stream = samples.stream(output)
    trained_on = [int(row) for batch in stream.epoch_batches(BatchShard(batch_size=1), epoch=0)
                  for row in batch.sample_id]  # fmt: skip
    assert sorted(trained_on) == sorted(set(range(1_000)) - held_out)
    assert 20 < len(held_out) < 60  # a tenth of the rows in six evaluation fragments of sixteen
    assert samples.num_train_expected() == pytest.approx(len(trained_on), abs=15)
    # A certificate reads the same batches without Ray.
    save_run_files(output, config, describe_data([source.uri], [1_000], None, streamed=True), None)
    rows = read_rows(read_record(output.uri))
    assert rows.job.num_train == (samples.num_train_expected(),)
    assert rows.num_train == len(trained_on)
    local, shard = rows.job.stream, BatchShard(batch_size=50)
    assert local is not None
    expected = list(stream.epoch_batches(shard, epoch=1))
    # A resumed stream skips fragments, of which some have held-out rows.
    assert stream.open_epoch(1, 400)[1] > 300
    resumed = [batch.sample_id.tolist() for batch in stream.epoch_batches(shard, epoch=1, start=11)]
    assert resumed == [batch.sample_id.tolist() for batch in expected[11:]]
    for start in (0, 11):
        for whole in (replace(shard, is_whole=True), replace(shard, num_workers=2, is_whole=True)):
            found = list(local.epoch_batches(whole, epoch=1, start=start))
            assert len(found) == len(expected) - start > 5
            for own, batch in zip(found, expected[start:], strict=True):
                assert own.sample_id.tolist() == batch.sample_id.tolist()
                same = zip(pixels_of(own).images, pixels_of(batch).images, strict=True)
                assert all(np.array_equal(*pair) for pair in same)


def test_ids_follow_sorted_names_even_with_invalid_images(mixed: Path) -> None:
    names = sorted(path.name for path in mixed.iterdir() if path.suffix != ".txt")
    sound = [
        names.index(name)
        for name in ("alpha.png", "cmyk.jpg", "color.jpg", "gray.png", "palette.png", "white.png")
    ]
    assert sorted(read(mixed)[0].sample_id.tolist()) == sorted(sound)


def test_equal_images_in_a_dataset_without_ids_share_an_id(coordinator: Any) -> None:
    same = encode(photograph())
    dataset = ray.data.from_items(
        [{"picture": same}, {"picture": encode(photograph()[:100])}, {"picture": same}]
    )
    columns = ColumnNames(image="picture")
    decoded = decode_dataset(dataset, columns, Decoder(formats=FORMATS, coordinator=coordinator))
    ids = [row["sample_id"] for row in decoded.take_all()]
    assert len(set(ids)) == 2
    with pytest.raises(DataError, match="no column 'image'; it has picture"):
        decode_dataset(dataset, ColumnNames(), Decoder(formats=FORMATS, coordinator=coordinator))


def test_a_dataset_has_the_same_rows_as_its_files(tmp_path: Path, coordinator: Any) -> None:
    images, digits = digit_files(40)
    names = [f"digit {digit}" if digit else None for digit in digits]
    plain = pa.table({"image": pa.array(images, pa.binary()), "label": names, "sample_id": range(40)})
    structs = [{"bytes": image, "path": f"{index}.png"} for index, image in enumerate(images)]
    pq.write_table(plain, tmp_path / "plain.parquet")
    hugging_face = ray.data.from_arrow(plain.set_column(0, "image", pa.array(structs))).repartition(2)
    config = raycl.override(raycl.recipe("simclr", image_size=16), {"evaluation.every_epochs": 0})
    source = find_source(str(tmp_path / "plain.parquet"))
    kinds = [
        DataModule(config, coordinator, [source]),
        DataModule(config, coordinator, [hugging_face]),
    ]
    assert kinds[0].classes == kinds[1].classes == tuple(f"digit {digit}" for digit in range(1, 10))
    names = ["sample_id", "label", "image.pixels", "image.aspect"]
    files, dataset = (
        pa.concat_tables(samples.read_rows()[0].columns(names)).sort_by("sample_id") for samples in kinds
    )
    assert files == dataset
    assert plan_run("simclr", data=[hugging_face], flags={}, settings={}).config.data.image_size == 16
    with pytest.raises(DataError, match="labels must be integers or text, column 'label' of the dataset"):
        DataModule(config, coordinator, [ray.data.from_items([{"image": b"", "label": 0.5}])])


def test_packed_rows_keep_their_ids_in_several_files(tmp_path: Path) -> None:
    texts = [f"sentence {number}" for number in range(40)]
    for name, part in (("a", texts[:25]), ("b", texts[25:])):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{name}.tsv").write_text("text\n" + "".join(f"{text}\n" for text in part))
    columns = ColumnNames(image=None, text="text")
    packed, _ = pack_rows(
        str(tmp_path / "texts"), str(tmp_path / "packed"), columns=columns, rows_per_file=10
    )
    assert packed.num_rows == 40
    assert len(list((tmp_path / "packed").glob("*.parquet"))) == 2
    found = find_source(str(tmp_path / "packed"), columns)
    rows = [rows for fragment in found.fragments for rows in found.read(fragment)]
    by_id = {
        number: text
        for each in rows
        for number, text in zip(each.sample_id, each.values["text"], strict=True)
    }
    assert by_id == {number: text.encode() for number, text in enumerate(texts)}
    with pytest.raises(StorageError, match="exists already"):
        pack_rows(str(tmp_path / "texts"), str(tmp_path / "packed"), columns=columns)
    (tmp_path / "texts" / "1.png").write_bytes(b"1")
    for name in ("a", "b"):
        (tmp_path / "texts" / f"{name}.tsv").write_text("image\n1.png\ngone.png\n")
    _, counts = pack_rows(
        str(tmp_path / "texts" / "{a,b}.tsv"), str(tmp_path / "images"), columns=ColumnNames(image="image")
    )
    assert (counts.num_rows, counts.invalid) == (4, {"file not found": 2})


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamingSampler]:
    """Open a stream over three files, so that it has several fragments to order."""
    connect_cluster()  # sets the order of blocks, like every entry point
    folder = tmp_path_factory.mktemp("stream")
    for name, num_images in (("a", 70), ("b", 81), ("c", 50)):
        write_digits(folder / f"{name}.parquet", num_images)
    source = find_source(str(folder))
    gray = ImageFormat(size=16, channels=1)
    with start_coordinator() as coordinator:
        opened = stream_source(source, Decoder(formats={"image": gray}, coordinator=coordinator), seed=3)
        yield StreamingSampler(open_epoch=opened, formats={"image": gray}, seed=3, shuffle_buffer_size=64)


def ids_of(stream: StreamingSampler, share: BatchShard, epoch: int, start: int = 0) -> list[list[int]]:
    return [batch.sample_id.tolist() for batch in stream.epoch_batches(share, epoch=epoch, start=start)]


@pytest.fixture(scope="module")
def expected_ids(stream: StreamingSampler) -> Callable[[int], list[list[int]]]:
    """Return the batches of an epoch that one worker reads from its start, once for all tests."""
    return cache(partial(ids_of, replace(stream), BatchShard(batch_size=20)))


def test_a_streamed_epoch_has_every_row_once_in_full_batches_and_in_a_new_order(
    stream: StreamingSampler, expected_ids: Callable[[int], list[list[int]]]
) -> None:
    first = ids_of(stream, BatchShard(batch_size=20), 0)
    assert first == expected_ids(0)
    assert first != expected_ids(1)
    assert {len(batch) for batch in first} == {20}
    seen = [row_id for batch in first for row_id in batch]
    assert len(seen) == len(set(seen)) == 200


# Windows have 60 rows, and the fragments 70, 81 and 50, in this order.
@pytest.mark.parametrize(("start", "num_unneeded", "num_skipped"), [(4, 60, 0), (6, 120, 70), (10, 180, 151)])
def test_a_stream_resumed_in_an_epoch_has_the_same_batches_and_skips_fragments(
    stream: StreamingSampler,
    expected_ids: Callable[[int], list[list[int]]],
    start: int,
    num_unneeded: int,
    num_skipped: int,
) -> None:
    whole = expected_ids(1)  # now the rows of each fragment are counted
    dataset, found = stream.open_epoch(1, num_unneeded)
    assert (found, dataset.count()) == (num_skipped, 201 - num_skipped)
    assert ids_of(stream, BatchShard(batch_size=20), 1, start=start) == whole[start:]


def test_a_stream_of_texts_batches_similar_lengths_together(tmp_path: Path) -> None:
    texts = [" ".join(["word"] * length) for length in np.random.default_rng(0).permutation(200) + 1]
    pq.write_table(pa.table({"text": texts}), tmp_path / "texts.parquet")
    source = find_source(str(tmp_path), ColumnNames(image=None, text="text"))
    tokenizer = Vocabulary.of_texts(texts[:10], max_length=300, size=300, lowercase=True).tokenizer
    formats = {"text": TextFormat(tokenizer=tokenizer, max_length=300)}
    padding: dict[int, int] = {}
    with start_coordinator() as coordinator:
        opened = stream_source(source, Decoder(formats=formats, coordinator=coordinator), seed=3)
        for buckets in (1, 4):
            stream = StreamingSampler(
                open_epoch=opened, formats=formats, seed=3, shuffle_buffer_size=80, length_buckets=buckets
            )
            batches = list(stream.epoch_batches(BatchShard(batch_size=20), epoch=0))
            seen = [row_id for batch in batches for row_id in batch.sample_id.tolist()]
            assert len(seen) == len(set(seen)) == 200
            lengths = [tokens_of(batch, "text").lengths for batch in batches]
            padding[buckets] = sum(int((each.max() - each).sum()) for each in lengths)
    assert padding[4] < padding[1] / 2


def test_weights_stay_with_their_rows_in_memory_and_in_a_stream(tmp_path: Path) -> None:
    numbers = np.arange(60)
    table = pa.table({"text": [f"text {n}" for n in numbers], "w": numbers / 4, "sample_id": numbers})
    pq.write_table(table, tmp_path / "texts.parquet")
    source = find_source(str(tmp_path), ColumnNames(image=None, text="text", weight="w"))
    config = override(recipe("simcse"), {"data.columns.weight": "w"})
    formats = build_formats(config, Vocabulary.stand_in().tokenizer, source.columns)
    with start_coordinator() as coordinator:
        decoder = Decoder(formats=formats, coordinator=coordinator)
        decoded = decode_source(source, decoder).materialize()
        rows = InMemoryDataset(ray.get(decoded.to_arrow_refs()), formats)
        opened = stream_source(source, decoder, seed=3)
        stream = StreamingSampler(open_epoch=opened, formats=formats, seed=3, shuffle_buffer_size=30)
        streamed = list(stream.epoch_batches(BatchShard(batch_size=20), epoch=0))
    for batch in (*rows.batches(25), *streamed):
        weights = weights_of(batch)
        assert weights is not None and np.array_equal(weights, batch.sample_id / 4)
    assert len(streamed) == 3


def test_an_invalid_weight_of_a_dataset_is_refused_before_it_is_decoded(coordinator: Any) -> None:
    config = override(recipe("simcse"), {"data.columns.weight": "w"})
    dataset = ray.data.from_arrow(pa.table({"text": ["a", "b"], "w": [1.0, -2.0]}))
    with pytest.raises(DataError, match="the weight -2 in row 1 of dataset 0"):
        DataSet(config, coordinator, dataset)


@pytest.fixture
def workers_as_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace Ray Train's workers by threads: the first passes every object to the others."""
    monkeypatch.setattr("raycl.data.windows.broadcast_from_rank_zero", lambda given: local.broadcast(given))


class Group(threading.local):
    """The workers of a thread's group."""

    box: list[Any]
    here: threading.Barrier

    def broadcast(self, given: Any) -> Any:
        if given is not None:
            self.box.append(given)
        self.here.wait(60)
        received = self.box[-1]
        self.here.wait(60)
        return received


local = Group()


def by_workers(
    num_workers: int,
    stream: StreamingSampler,
    work: Callable[[StreamingSampler, BatchShard], list[list[int]]],
    batch_size: int = 20,
) -> list[list[list[int]]]:
    """Return the results of several workers with one stream each."""
    box, here = list[Any](), threading.Barrier(num_workers)

    def run(each: StreamingSampler, rank: int) -> list[list[int]]:
        local.box, local.here = box, here
        return work(each, BatchShard(batch_size=batch_size, rank=rank, num_workers=num_workers))

    with ThreadPoolExecutor(num_workers) as threads:
        streams = [replace(stream) for _ in range(num_workers)]
        return list(threads.map(run, streams, range(num_workers), timeout=120))


def joined(results: list[list[list[int]]]) -> list[list[int]]:
    """Return the global batch of each step."""
    return [[row for part in parts for row in part] for parts in zip(*results, strict=True)]


@pytest.mark.parametrize(("num_workers", "start"), [(2, 0), (4, 5)])
def test_workers_share_the_same_batches_of_a_streamed_epoch(
    stream: StreamingSampler,
    workers_as_threads: None,
    expected_ids: Callable[[int], list[list[int]]],
    num_workers: int,
    start: int,
) -> None:
    results = by_workers(num_workers, stream, lambda each, share: ids_of(each, share, 0, start))
    assert joined(results) == expected_ids(0)[start:]


def steps(
    stream: StreamingSampler, share: BatchShard, *, epoch: int, start: int, stop: int
) -> list[list[int]]:
    """Return the batches of these steps of an epoch, which then ends early."""
    batches = stream.epoch_batches(share, epoch=epoch, start=start, has_next=True)
    return [batch.sample_id.tolist() for batch in islice(batches, stop - start)]


@pytest.mark.drill
def test_twenty_changes_of_workers_lose_no_row_and_repeat_none(
    stream: StreamingSampler, workers_as_threads: None
) -> None:
    rng, batch_size = np.random.default_rng(0), 12
    num_steps = 201 // batch_size
    alone = [ids_of(replace(stream), BatchShard(batch_size=batch_size), epoch) for epoch in range(5)]
    changes, workers = 0, [1, 2, 3, 4]
    for epoch in range(5):
        seen: list[list[int]] = []
        stops = sorted(rng.choice(np.arange(1, num_steps), 4, replace=False).tolist())
        for stop in [*stops, num_steps]:
            num_workers, start = int(rng.choice(workers)), len(seen)

            seen += joined(
                by_workers(
                    num_workers, stream, partial(steps, epoch=epoch, start=start, stop=stop), batch_size
                )
            )
            workers = [number for number in (1, 2, 3, 4) if number != num_workers]
            changes += 1
        assert seen == alone[epoch]
        assert len({row for batch in seen for row in batch}) == num_steps * batch_size
    assert changes == 25


def test_two_workers_have_whole_groups_in_the_same_steps(
    stream: StreamingSampler, workers_as_threads: None
) -> None:
    def whole_groups(each: StreamingSampler, share: BatchShard) -> list[list[int]]:
        labels = [batch.label for batch in each.epoch_batches(share, epoch=0)]
        return [sorted(Counter(label.tolist()).values()) for label in labels]

    # Windows have 100 rows of ten digits.
    results = by_workers(2, replace(stream, samples_per_class=5, shuffle_buffer_size=100), whole_groups)
    assert len(results[0]) == len(results[1]) == 10
    for batches in zip(*results, strict=True):
        assert batches.count([5, 5]) != 1
    assert 5 <= results[0].count([5, 5]) < 10


def several(stream: StreamingSampler, share: BatchShard, epochs: Sequence[int]) -> list[list[int]]:
    """Return the batches of consecutive epochs."""
    return [
        batch.sample_id.tolist()
        for epoch in epochs
        for batch in stream.epoch_batches(
            share, epoch=epoch, continues=epoch != epochs[0], has_next=epoch != epochs[-1]
        )
    ]


def test_an_epoch_read_ahead_has_the_same_batches(
    stream: StreamingSampler, workers_as_threads: None, expected_ids: Callable[[int], list[list[int]]]
) -> None:
    one_by_one = [batch for epoch in range(3) for batch in expected_ids(epoch)]
    assert joined(by_workers(2, stream, lambda each, share: several(each, share, range(3)))) == one_by_one


def test_the_next_epoch_is_read_during_the_current_one(
    stream: StreamingSampler, expected_ids: Callable[[int], list[list[int]]], tmp_path: Path
) -> None:
    opened: list[int] = []

    def open_epoch(epoch: int, num_unneeded: int) -> tuple[ray.data.Dataset, int]:
        def note(rows: pa.Table) -> pa.Table:
            (tmp_path / f"epoch-{epoch}").touch()
            return rows

        opened.append(epoch)
        dataset, num_skipped = stream.open_epoch(epoch, num_unneeded)
        return dataset.map_batches(note, batch_format="pyarrow"), num_skipped

    mine, share = replace(stream, open_epoch=open_epoch), BatchShard(batch_size=20)
    batches = mine.epoch_batches(share, epoch=0, has_next=True)
    first = [next(batches).sample_id.tolist() for _ in range(9)]
    assert opened == [0, 1]
    until = time.monotonic() + 60
    while not (tmp_path / "epoch-1").exists():
        assert time.monotonic() < until, "nothing of the next epoch was read"
        time.sleep(0.1)
    assert [*first, *(batch.sample_id.tolist() for batch in batches)] == expected_ids(0)
    rest = [batch.sample_id.tolist() for batch in mine.epoch_batches(share, epoch=1, continues=True)]
    assert opened == [0, 1]
    assert rest == expected_ids(1)
    # Epoch 2 was not announced, so nothing has read it.
    later = [batch.sample_id.tolist() for batch in mine.epoch_batches(share, epoch=2, continues=True)]
    assert opened == [0, 1, 2]
    assert later == expected_ids(2)


@pytest.mark.parametrize("epoch", [0, 1, pytest.param(4, marks=pytest.mark.drill)])  # 1 was announced, 4 not
def test_an_epoch_that_is_not_used_to_its_end_is_stopped(
    stream: StreamingSampler, expected_ids: Callable[[int], list[list[int]]], epoch: int
) -> None:
    mine, share = replace(stream), BatchShard(batch_size=20)
    batches = mine.epoch_batches(share, epoch=0, has_next=True)
    next(batches)
    last = mine._reader._actor
    del batches
    assert ids_of(mine, share, epoch) == expected_ids(epoch)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(last.window.remote(0, 0, 0), timeout=30)


def test_an_error_of_the_reader_reaches_every_worker(
    stream: StreamingSampler, workers_as_threads: None
) -> None:
    def broken(rows: pa.Table) -> pa.Table:
        raise ValueError("a block is broken")

    def open_epoch(epoch: int, num_unneeded: int) -> tuple[ray.data.Dataset, int]:
        dataset, num_skipped = stream.open_epoch(epoch, num_unneeded)
        return dataset.map_batches(broken, batch_format="pyarrow"), num_skipped

    def refused(each: StreamingSampler, share: BatchShard) -> list[list[int]]:
        with pytest.raises(Exception, match="a block is broken"):
            ids_of(each, share, 0)
        return [[1]]

    assert by_workers(2, replace(stream, open_epoch=open_epoch), refused) == [[[1]], [[1]]]


def test_the_doctor_checks_machine_cluster_and_data(mixed: Path) -> None:
    findings = {finding.name: finding for finding in raycl.run_doctor(data=mixed)}
    assert findings["cluster"].good
    assert "10 rows without labels" in findings["data"].seen
    assert "1 .txt" in findings["other files"].seen
    assert not findings["sample"].good
    assert "4 invalid" in findings["sample"].seen
    assert "1 flat" in findings["sample"].seen
    missing = {finding.name: finding for finding in raycl.run_doctor(data=mixed / "none")}
    assert not missing["data"].good


def test_the_rows_of_many_blocks_are_embedded_to_one_file_in_order(tmp_path: Path) -> None:
    sizes = {"channels": 1, "image_size": 16, "stored_size": 16, "width": 0.25, "representation_dim": 128}
    run = write_images_run(tmp_path / "run", "resnet10", stem="small", **sizes)
    (tmp_path / "data").mkdir()
    for number in range(5):  # each of them is a block
        write_digits(tmp_path / "data" / f"{number}.parquet", 20)
    raycl.embed(run, tmp_path / "data", tmp_path / "embedded", quiet=True)
    (file,) = (tmp_path / "embedded").iterdir()
    assert pq.read_table(file)["sample_id"].to_pylist() == list(range(100))


def test_a_missing_gpu_is_refused_after_the_wait(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--gpu needs a GPU, but the cluster has none"):
        wait_for_gpu(0.2)
    assert capsys.readouterr().err.startswith("the cluster has no GPU yet; waiting up to")
    assert not [group for group in placement_group_table().values() if group["state"] != "REMOVED"]


def test_embedding_on_gpus_is_accepted_by_ray_data(tmp_path: Path) -> None:
    run = write_images_run(tmp_path / "run", "resnet10", stem="small", channels=1, image_size=16)
    rows = ray.data.from_arrow(pa.table({"sample_id": [0]}))
    assert isinstance(embed_dataset(rows, read_encoder(run), gpu=True), ray.data.Dataset)
