"""Data without Ray: decoding, sources, ids, held-out rows, the order of an epoch."""

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raycl.data.columns import ColumnNames
from raycl.data.coordinator import RunCoordinator
from raycl.data.decode import are_flat
from raycl.data.ids import stable_ids
from raycl.data.images import BrokenImageError, ImageFormat, image_sides
from raycl.data.in_memory import InMemoryDataset, pixels_of
from raycl.data.prefetch import Prefetched
from raycl.data.sampler import BatchShard, InMemorySampler
from raycl.data.sources import ROWS_PER_FRAGMENT, Fragment, find_source
from raycl.data.split import make_split
from raycl.errors import DataError


def encoded(picture: Image.Image, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind)
    return stream.getvalue()


def colors(width: int = 20, height: int = 10) -> Image.Image:
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = 200
    pixels[..., 1] = np.arange(width) * (255 // width)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "CMYK", "YCbCr", "RGBA", "LA", "I;16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_mode_of_image_decodes(mode: str, channels: int) -> None:
    if mode == "I;16":
        picture = Image.fromarray(np.full((10, 20), 40_000, np.uint16))
    else:
        picture = colors().convert(mode)
    kind = "TIFF" if mode in {"CMYK", "YCbCr", "I;16"} else "PNG"
    pixels, aspect = ImageFormat(size=8, channels=channels).decode(encoded(picture, kind))
    assert pixels.shape == (8, 8, channels)
    assert pixels.dtype == np.uint8
    assert aspect == 2.0
    assert pixels.max() > 30


def test_an_image_of_the_stored_size_keeps_its_pixels() -> None:
    picture = colors(16, 16)
    pixels, aspect = ImageFormat(size=16).decode(encoded(picture))
    assert np.array_equal(pixels, np.asarray(picture))
    assert aspect == 1.0


def test_transparent_pixels_become_white() -> None:
    picture = Image.new("RGBA", (8, 8), (10, 20, 30, 0))
    assert (ImageFormat(size=8).decode(encoded(picture))[0] == 255).all()


def test_an_array_decodes_like_the_image() -> None:
    picture = colors(30, 20)
    from_array = ImageFormat(size=8).decode(np.asarray(picture))
    from_bytes = ImageFormat(size=8).decode(encoded(picture))
    assert np.array_equal(from_array[0], from_bytes[0])


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "not an image"),
        (b"a text file named .jpg", "not an image"),
        (None, "missing value"),
        (7, "no image bytes"),
        (np.zeros((4, 4, 3), np.float32), "an array other than uint8"),
        (np.zeros((4, 4, 2), np.uint8), "an array without"),
    ],
)
def test_broken_content_has_a_cause(content: object, cause: str) -> None:
    with pytest.raises(BrokenImageError, match=cause):
        ImageFormat(size=8).decode(content)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_pixels_that_are_not_finite_are_broken(value: float) -> None:
    pixels = np.zeros((8, 8), np.float32)
    pixels[3, 4] = value
    for content in (pixels, np.stack([pixels] * 3, axis=-1), encoded(Image.fromarray(pixels), "TIFF")):
        with pytest.raises(BrokenImageError, match="not finite"):
            ImageFormat(size=8).decode(content)


def test_images_whose_pixels_have_one_value_are_flat() -> None:
    formats = {"image": ImageFormat(size=8), "other": ImageFormat(size=8, channels=1)}
    black, red, dot = (np.zeros((8, 8, 3), np.uint8) for _ in range(3))
    red[..., 0] = 200
    dot[5, 2, 1] = 1
    contents = {
        "image": formats["image"].decode_all([black, red, dot, dot]),
        "other": formats["other"].decode_all([encoded(colors())] * 3 + [red]),
    }
    assert are_flat(formats, contents).tolist() == [True, True, False, True]
    assert are_flat(formats, {"image": [], "other": []}).tolist() == []


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_truncated_image_is_broken_and_not_half_gray(kind: str) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    content = encoded(noise, kind)
    with pytest.raises(BrokenImageError, match="truncated|undecodable"):
        ImageFormat(size=8).decode(content[: len(content) // 2])


def test_a_huge_image_is_refused_before_it_is_decoded() -> None:
    huge = encoded(Image.new("1", (20_000, 20_000)))
    with pytest.raises(BrokenImageError, match="more than 64,000,000 pixels"):
        ImageFormat(size=8).decode(huge)


def test_sides_are_read_without_decoding() -> None:
    assert image_sides(encoded(colors(20, 10))) == (20, 10)


def write_images(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encoded(colors(), "JPEG" if name.lower().endswith("jpg") else "PNG"))


def test_class_folders_give_labels_and_sorted_names_give_ids(tmp_path: Path) -> None:
    write_images(tmp_path, ["dog/b.png", "cat/z.JPG", "cat/a.png"])
    (tmp_path / "notes.txt").write_text("x")
    source = find_source(str(tmp_path))
    assert source.classes == ("cat", "dog")
    assert source.ignored == ((".txt", 1),)
    rows = next(source.read(source.pieces[0]))
    assert rows.where == ["cat/a.png", "cat/z.JPG", "dog/b.png"]
    assert rows.label.tolist() == [0, 0, 1]
    assert rows.sample_id.tolist() == [0, 1, 2]


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    write_images(tmp_path, ["a.png", "b.png"])
    source = find_source(str(tmp_path))
    assert not source.has_labels
    assert next(source.read(source.pieces[0])).label.tolist() == [-1, -1]


@pytest.mark.parametrize("make", [lambda p: None, lambda p: (p / "a.txt").write_text("x")])
def test_a_folder_without_images_says_so(tmp_path: Path, make) -> None:
    make(tmp_path)
    with pytest.raises(DataError, match="holds no images and no parquet files"):
        find_source(str(tmp_path))


def test_nothing_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is nothing at"):
        find_source(str(tmp_path / "missing"))


def write_parquet(path: Path, num_rows: int, row_group_size: int, **columns: object) -> None:
    table = {"image": [b"%d" % row for row in range(num_rows)], **columns}
    pq.write_table(pa.table(table), path, row_group_size=row_group_size)


@pytest.mark.parametrize("row_group_size", [7, 1000, 2048, 5000, 20_000])
def test_pieces_cover_every_row_once_whatever_the_row_groups(tmp_path: Path, row_group_size: int) -> None:
    for name, num_rows in (("a", 9_001), ("b", 3)):
        write_parquet(tmp_path / f"{name}.parquet", num_rows, row_group_size)
    source = find_source(str(tmp_path))
    rows = [row for piece in source.pieces for row in source.read(Fragment.from_json(piece.to_json()))]
    assert np.concatenate([row.sample_id for row in rows]).tolist() == list(range(9_004))
    contents = [content for row in rows for content in row.values["image"]]
    assert contents == [b"%d" % row for row in [*range(9_001), *range(3)]]
    assert max(piece.num_rows for piece in source.pieces) <= 2 * ROWS_PER_FRAGMENT


def test_an_id_column_is_taken_and_text_is_hashed(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", 3, 3, number=[7, 5, 6], name=["x", "y", "x"])
    file = str(tmp_path / "a.parquet")
    by_number = find_source(file, ColumnNames(sample_id="number"))
    assert next(by_number.read(by_number.pieces[0])).sample_id.tolist() == [7, 5, 6]
    by_name = find_source(file, ColumnNames(sample_id="name"))
    ids = next(by_name.read(by_name.pieces[0])).sample_id.tolist()
    # On every machine and in every process: those of a set that was embedded last year still fit.
    assert ids == [5717441744405258058, 6892360672924705551, 5717441744405258058]


def test_text_labels_become_sorted_classes(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", 3, 2, label=["dog", "cat", "dog"])
    source = find_source(str(tmp_path))
    assert source.classes == ("cat", "dog")
    labels = np.concatenate([rows.label for piece in source.pieces for rows in source.read(piece)])
    assert labels.tolist() == [1, 0, 1]


def test_hugging_face_images_read_like_plain_bytes_or_from_their_files(tmp_path: Path) -> None:
    images = [encoded(colors(20 + index)) for index in range(5)]
    (tmp_path / "1.png").write_bytes(images[1])
    structs = [
        {"bytes": images[0], "path": "0.png"},
        {"bytes": None, "path": str(tmp_path / "1.png")},
        {"bytes": images[2], "path": None},
        None,
        {"bytes": None, "path": None},
        {"bytes": None, "path": "0.png"},
        {"bytes": None, "path": str(tmp_path / "gone.png")},
        {"bytes": None, "path": "/dev/zero"},
        {"bytes": None, "path": f"{tmp_path}/../{tmp_path.name}/1.png"},
        {"bytes": None, "path": "s3://bucket?endpoint_override=other/1.png"},
    ]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({"image": pa.array(structs, kind)}), tmp_path / "hugging_face.parquet")
    source = find_source(str(tmp_path / "hugging_face.parquet"))
    [rows] = source.read(source.pieces[0])
    decoded = ImageFormat(size=8).decode_all(rows.values["image"])
    plain = ImageFormat(size=8).decode_all(images[:3])
    for (pixels, aspect), (expected, expected_aspect) in zip(decoded[:3], plain, strict=True):
        assert np.array_equal(pixels, expected)
        assert aspect == expected_aspect
    elsewhere = "no image bytes, and a path that is not absolute"
    assert [str(each) for each in decoded[3:]] == [
        *("missing value", "missing value", elsewhere),
        *("file not found", "file not found", elsewhere, elsewhere),
    ]


@pytest.mark.parametrize("role", ["image", "label", "sample_id"])
def test_a_missing_column_names_those_that_exist(tmp_path: Path, role: str) -> None:
    write_parquet(tmp_path / "a.parquet", 3, 2, weight=[1, 2, 3])
    with pytest.raises(DataError, match=rf"no column 'img'; it has image, weight.*data.columns.{role}="):
        find_source(str(tmp_path), ColumnNames(**{role: "img"}))


def test_unsigned_ids_wrap_text_is_hashed_and_a_row_without_id_is_refused() -> None:
    assert stable_ids([0, -1, 2**63, 2**64 - 2]).tolist() == [0, -1, -(2**63), -2]
    assert stable_ids(["a", "b"]).tolist() == stable_ids(["a", "b"]).tolist()
    assert len(set(stable_ids(["a", "b", "1", 1]).tolist())) == 4
    with pytest.raises(DataError, match="row 1 of a batch has no id"):
        stable_ids([3, None])


def test_a_column_that_holds_no_bytes_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", 3, 10, size=[2**45] * 3)
    with pytest.raises(DataError, match=r"encoded bytes.* column 'size' of .* holds int64; name another"):
        find_source(str(tmp_path / "a.parquet"), ColumnNames(image="size"))


def test_an_empty_parquet_file_and_a_damaged_one_say_so(tmp_path: Path) -> None:
    write_parquet(tmp_path / "empty.parquet", 0, 1)
    with pytest.raises(DataError, match="holds no rows"):
        find_source(str(tmp_path / "empty.parquet"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match="as parquet"):
        find_source(str(tmp_path / "bad.parquet"))


def test_held_out_rows_are_few_the_same_in_any_order_and_never_trained_on() -> None:
    holdout = make_split(100_000, num_test=2_000, num_train=10_000, seed=3)
    ids = np.arange(100_000)
    test, bank, train = holdout.is_test(ids), holdout.is_bank(ids), holdout.is_train(ids)
    assert 1_800 < test.sum() < 2_200
    assert 9_500 < bank.sum() < 10_500
    assert np.array_equal(train, ~test)
    assert not (bank & test).any()
    assert np.array_equal(holdout.is_evaluated(ids), test | bank)
    assert np.array_equal(holdout.is_test(ids[::-1]), test[::-1])


def test_a_small_set_holds_out_at_most_a_tenth() -> None:
    assert make_split(100, num_test=2_000, num_train=10_000, seed=0).test == 0.1


def rows_of(num_rows: int, size: int = 8) -> InMemoryDataset:
    image_format = ImageFormat(size=size, channels=1)
    pixels = [bytes([row % 256]) * size * size for row in range(num_rows)]
    table = pa.table(
        {
            "image.pixels": pa.array(pixels, pa.binary(size * size)),
            "image.aspect": pa.array(np.ones(num_rows), pa.float32()),
            "sample_id": pa.array(np.arange(num_rows), pa.int64()),
            "label": pa.array(np.arange(num_rows) % 3, pa.int64()),
        }
    )
    # Several tables, one of them sliced and one empty, as Ray may hand them over.
    return InMemoryDataset([table.slice(0, 5), table.slice(5, 0), table.slice(5)], {"image": image_format})


def test_rows_are_read_by_position_over_all_tables() -> None:
    batch = rows_of(20).take(np.array([19, 0, 5, 4]))
    assert batch.sample_id.tolist() == [19, 0, 5, 4]
    assert pixels_of(batch).images[:, 0, 0, 0].tolist() == [19, 0, 5, 4]
    assert batch.label.tolist() == [1, 0, 2, 1]


def test_chosen_rows_keep_their_pixels() -> None:
    chosen = rows_of(20).where(lambda ids: ids % 2 == 1)
    assert len(chosen) == 10
    assert [pixels_of(batch).images[:, 0, 0, 0].tolist() for batch in chosen.batches(4)][2] == [17, 19]


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_global_batches_hold_the_same_rows_for_any_number_of_workers(num_workers: int) -> None:
    shuffled = InMemorySampler(rows=rows_of(103), seed=5)
    alone = [batch.sample_id for batch in shuffled.epoch_batches(BatchShard(batch_size=12), epoch=2)]
    shares = [BatchShard(batch_size=12, rank=rank, num_workers=num_workers) for rank in range(num_workers)]
    together = zip(*(shuffled.epoch_batches(share, epoch=2) for share in shares), strict=True)
    joined = [np.concatenate([batch.sample_id for batch in step]) for step in together]
    assert len(alone) == len(joined) == 103 // 12
    for one, many in zip(alone, joined, strict=True):
        assert np.array_equal(one, many)


def test_an_epoch_has_every_row_once_and_another_order_each_time() -> None:
    shuffled = InMemorySampler(rows=rows_of(60), seed=5)
    orders = [
        np.concatenate(
            [batch.sample_id for batch in shuffled.epoch_batches(BatchShard(batch_size=6), epoch=epoch)]
        )
        for epoch in (0, 1)
    ]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(60))
    assert not np.array_equal(*orders)


def test_an_epoch_begun_in_the_middle_goes_on_with_the_same_batches() -> None:
    shuffled, share = (
        InMemorySampler(rows=rows_of(60), seed=5),
        BatchShard(batch_size=6, rank=1, num_workers=2),
    )
    whole = [batch.sample_id.tolist() for batch in shuffled.epoch_batches(share, epoch=1)]
    rest = [batch.sample_id.tolist() for batch in shuffled.epoch_batches(share, epoch=1, start=4)]
    assert rest == whole[4:]


def test_a_large_photograph_is_squashed_as_pillow_does() -> None:
    rng = np.random.default_rng(0)
    for width, height in ((401, 300), (1_400, 400), (20_000, 10)):
        noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(noise).resize((60, 40)).resize((width, height)))
        for picture in (noise, smooth):
            for size in (100, 224, 500):
                squashed = ImageFormat(size=size).decode(picture)[0]
                want = Image.fromarray(picture).resize(
                    (size, size), Image.Resampling.BILINEAR, reducing_gap=3.0
                )
                assert np.abs(squashed.astype(int) - np.asarray(want)).max() <= 1, (width, height, size)


@pytest.mark.parametrize(
    ("shape", "size", "by_torch"),
    [
        ((300, 400, 3), 224, True),
        ((30, 40, 3), 16, False),
        ((300, 400), 224, False),
        ((400, 1_400, 3), 224, False),
    ],
)
def test_only_large_photographs_are_squashed_by_torch_and_its_errors_are_not_the_images(
    shape: tuple[int, ...], size: int, by_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("no such library")

    monkeypatch.setattr("torch.nn.functional.interpolate", refuse)
    format_here = ImageFormat(size=size, channels=3 if len(shape) == 3 else 1)
    picture = np.zeros(shape, np.uint8)
    if by_torch:
        with pytest.raises(OSError, match="no such library"):
            format_here.decode(picture)
    else:
        assert format_here.decode(picture)[0].shape[:2] == (size, size)


def test_prefetched_items_that_are_forgotten_end_their_thread() -> None:
    made: list[int] = []

    def endless():
        while True:
            made.append(len(made))
            yield made[-1]

    items = Prefetched(endless(), depth=2)
    assert next(items) == 0
    threads = [thread for thread in threading.enumerate() if thread.name == "raycl-prefetch"]
    del items
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert len(made) <= 5


def test_prefetched_items_are_prepared_before_anybody_asks_and_end_once() -> None:
    begun = threading.Event()

    def two():
        begun.set()
        yield 1
        yield 2

    items = Prefetched(two())
    assert begun.wait(10)
    assert list(items) == [1, 2]
    assert list(items) == []


def test_who_waits_for_an_item_gets_an_error_where_they_are_closed() -> None:
    never = threading.Event()

    def one():
        yield 1
        never.wait(60)

    items = Prefetched(one())
    assert next(items) == 1
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(next, items)
        items.close()
        with pytest.raises(ValueError, match="closed while they were in use"):
            waiting.result(10)
    never.set()
    # And nobody takes what is left for the whole.
    items = Prefetched(iter(range(5)))
    items.close()
    with pytest.raises(ValueError, match="closed"):
        list(items)


def test_prefetched_items_keep_their_order_and_hand_errors_over() -> None:
    assert list(Prefetched(iter(range(50)))) == list(range(50))

    def failing():
        yield 1
        raise ValueError("broken")

    items = Prefetched(failing())
    assert next(items) == 1
    with pytest.raises(ValueError, match="broken"):
        next(items)


def test_a_logbook_goes_on_from_its_journal_whose_last_line_may_be_cut(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    first = RunCoordinator(None, str(journal))
    first.add_rows("a", 10, 8, {"not an image": 1}, ["a.png"])
    first.add_left_out("a", {"labels without a query": 3})
    first.add_rows("a", 10, 8, {"not an image": 2}, ["a.png"], 3)  # read again: counts once
    first.request_stop()
    first.request_stop()
    with journal.open("a") as file:
        file.write('["add_rows", ["b", 10, 8')
    second = RunCoordinator(None, str(journal))
    assert second.rows() == first.rows()
    assert second.rows().num_rows == 10
    assert second.rows().num_flat == 3
    assert second.heartbeat()
    second.add_rows("a", 10, 8, {"not an image": 2}, ["a.png"], 3)  # as in each epoch: nothing new
    second.add_left_out("a", {"labels without a query": 3})
    second.add_rows("c", 5, 5, {}, [])
    assert RunCoordinator(None, str(journal)).rows().num_rows == 15
    assert journal.read_text().count("add_rows") == 4  # of them one that was cut; nothing twice
    assert RunCoordinator(None, str(tmp_path / "no such folder" / "journal")).rows().num_rows == 0


def test_a_disk_that_is_full_costs_a_logbook_its_journal_and_nothing_else(tmp_path: Path) -> None:
    logbook = RunCoordinator(None, str(tmp_path / "journal"))
    logbook._journal = Path("/dev/full").open("a")
    logbook.request_stop()
    logbook.add_rows("a", 10, 8, {}, [])
    assert logbook.heartbeat()
    assert logbook.rows().num_rows == 10


def test_logbook_counts_a_piece_once_though_it_is_read_again() -> None:
    logbook = RunCoordinator()
    for _ in range(2):
        logbook.add_rows("a", 10, 8, {"not an image": 2}, ["x.jpg (not an image)"])
    logbook.add_rows("b", 10, 10, {}, [])
    rows = logbook.rows()
    assert (rows.num_rows, rows.num_train, rows.num_broken) == (20, 18, 2)
    rows.check(0.1)
    with pytest.raises(DataError, match=r"2 of 20 rows are invalid \(2 not an image; for example x.jpg"):
        rows.check(0.05)
