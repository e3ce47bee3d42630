"""Data without Ray: decoding, sources, ids, held-out rows, prefetching, and coordinator counts."""

import io
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import ExifTags, Image
from pyarrow import feather

from raycl.data.columns import ColumnNames
from raycl.data.decode import are_flat, decode_here
from raycl.data.discovery import ROWS_PER_FRAGMENT, check_no_splits, find_source
from raycl.data.ids import content_ids, stable_ids
from raycl.data.images import ImageFormat, InvalidImageError, image_sides
from raycl.data.in_memory import InMemoryDataset, pixels_of
from raycl.data.labels import NO_LABEL, class_names, label_numbers
from raycl.data.prefetch import Prefetched
from raycl.data.read_stats import ReadStats
from raycl.data.sources import Fragment, RawRows, Source
from raycl.data.split import Holdout, make_split
from raycl.data.streaming import without_first_rows
from raycl.errors import DataError
from raycl.records import READ_ROWS
from raycl.storage import Place
from raycl.training.coordinator import RunCoordinator
from raycl.training.job import Job
from tests.images import encode, photograph, write_digits
from tests.table_files import write_saved

NOISE = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)


def colors(width: int = 20, height: int = 10) -> Image.Image:
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = 200
    pixels[..., 1] = np.arange(width) * (255 // width)
    return Image.fromarray(pixels)


def read(source: Source) -> list[RawRows]:
    return [rows for fragment in source.fragments for rows in source.read(fragment)]


# Images


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "CMYK", "YCbCr", "RGBA", "LA", "I;16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_image_mode_is_decoded(mode: str, channels: int) -> None:
    gray16 = Image.fromarray(np.full((10, 20), 40_000, np.uint16))
    picture = gray16 if mode == "I;16" else colors().convert(mode)
    kind = "TIFF" if mode in {"CMYK", "YCbCr", "I;16"} else "PNG"
    pixels, aspect = ImageFormat(size=8, channels=channels).decode(encode(picture, kind))
    assert (pixels.shape, pixels.dtype, aspect) == ((8, 8, channels), np.uint8, 2.0)
    assert pixels.max() > 30


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_gray_levels_of_32_bits_are_kept_if_they_are_those_of_8_bits(kind: Any) -> None:
    levels = np.arange(192, 256).reshape(8, 8)
    pixels, _ = ImageFormat(size=8, channels=1).decode(encode(Image.fromarray(levels.astype(kind)), "TIFF"))
    assert np.array_equal(pixels[..., 0], levels)


@pytest.mark.parametrize("most", [1_023, 65_535])
def test_gray_levels_of_pgm_files_beyond_8_bits_are_scaled(most: int) -> None:
    levels = np.linspace(0, most, 64).astype(">u2").reshape(8, 8)
    pixels, _ = ImageFormat(size=8, channels=1).decode(b"P5 8 8 %d\n" % most + levels.tobytes())
    assert np.abs(pixels[..., 0] - levels * (255.0 / most)).max() < 1.0


def test_images_of_the_decode_size_keep_their_pixels_and_transparency_becomes_white() -> None:
    for content in (encode(colors(16, 16)), np.asarray(colors(16, 16))):
        pixels, aspect = ImageFormat(size=16).decode(content)
        assert np.array_equal(pixels, np.asarray(colors(16, 16)))
        assert aspect == 1.0
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    stream = io.BytesIO()
    colors(16, 16).save(stream, "PNG", exif=turned)
    assert np.array_equal(ImageFormat(size=16).decode(stream.getvalue())[0], np.asarray(colors(16, 16)))
    transparent = Image.new("RGBA", (8, 8), (10, 20, 30, 0))
    assert (ImageFormat(size=8).decode(encode(transparent))[0] == 255).all()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("pixels", "hidden"),
    [
        (np.full((8, 8, 3), 40, np.uint8), (40, 40, 40)),
        (np.full((8, 8), 40, np.uint8), 40),
        (np.full((8, 8), 40 << 8, np.uint16), 40 << 8),
    ],
)
def test_a_color_that_a_file_makes_transparent_becomes_white(
    pixels: np.ndarray, hidden: Any, channels: int
) -> None:
    pixels = pixels.copy()
    pixels[0] = pixels[0] // 4
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG", transparency=hidden)
    found, _ = ImageFormat(size=8, channels=channels).decode(stream.getvalue())
    assert (found[0] == 10).all()
    assert (found[1:] == 255).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_truncated_file_that_pillow_opened_is_invalid(kind: str) -> None:
    content = encode(NOISE, kind)
    opened = Image.open(io.BytesIO(content[: len(content) // 2]))
    with pytest.raises(InvalidImageError, match="truncated|undecodable"):
        ImageFormat(size=8).decode(opened)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "not an image"),
        (b"a text file named .jpg", "not an image"),
        (None, "missing value"),
        (7, "no image bytes"),
        (np.zeros((4, 4, 3), np.float32), "an array other than uint8"),
        (np.zeros((4, 4, 2), np.uint8), "an array without"),
        *((np.zeros(shape, np.uint8), "no pixels") for shape in ((0, 4, 3), (4, 0, 3), (4, 0))),
        *((np.full(shape, value, np.float32), "not finite")
          for value in (np.nan, np.inf) for shape in ((8, 8), (8, 8, 3))),
        (encode(Image.fromarray(np.full((8, 8), np.nan, np.float32)), "TIFF"), "not finite"),
        *((encode(Image.fromarray(np.full((8, 8), value, kind)), "TIFF"), "gray levels of 32 bits")
          for value, kind in ((256, np.int32), (-1, np.int32), (256, np.float32), (0.5, np.float32))),
        *((content[: len(content) // 2], "truncated|undecodable")
          for content in (encode(NOISE, "JPEG"), encode(NOISE, "PNG"))),
        (encode(Image.new("1", (20_000, 20_000))), "more than 64,000,000 pixels"),
    ],
)  # fmt: skip
def test_invalid_images_are_reported_with_a_cause(content: object, cause: str) -> None:
    with pytest.raises(InvalidImageError, match=cause):
        ImageFormat(size=8).decode(content)


def test_images_with_a_single_pixel_value_are_flat() -> None:
    formats = {"image": ImageFormat(size=8), "other": ImageFormat(size=8, channels=1)}
    black, red, dot = (np.zeros((8, 8, 3), np.uint8) for _ in range(3))
    red[..., 0] = 200
    dot[5, 2, 1] = 1
    contents = {
        "image": formats["image"].decode_all([black, red, dot, dot]),
        "other": formats["other"].decode_all([encode(colors())] * 3 + [red]),
    }
    assert are_flat(formats, contents).tolist() == [True, True, False, True]
    assert are_flat(formats, {"image": [], "other": []}).tolist() == []


def test_image_dimensions_are_read_without_decoding() -> None:
    assert image_sides(encode(colors(20, 10))) == (20, 10)


@pytest.mark.parametrize(("width", "height"), [(401, 300), (1_400, 400), (20_000, 10)])
@pytest.mark.parametrize("size", [100, 224, 500])
def test_large_images_are_resized_as_in_pillow(width: int, height: int, size: int) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(noise).resize((60, 40)).resize((width, height)))
    for picture in (noise, smooth):
        resized = ImageFormat(size=size).decode(picture)[0]
        expected = Image.fromarray(picture).resize((size, size), Image.Resampling.BILINEAR, reducing_gap=3.0)
        assert np.abs(resized.astype(int) - np.asarray(expected)).max() <= 1


@pytest.mark.parametrize(
    ("shape", "size", "by_torch"),
    [
        ((300, 400, 3), 224, True),
        ((30, 40, 3), 16, False),
        ((300, 400), 224, False),
        ((400, 1_400, 3), 224, False),
    ],
)
def test_only_large_photographs_are_resized_by_torch_and_its_errors_stop_the_run(
    shape: tuple[int, ...], size: int, by_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("no such library")

    monkeypatch.setattr("torch.nn.functional.interpolate", refuse)
    image_format = ImageFormat(size=size, channels=3 if len(shape) == 3 else 1)
    if by_torch:
        with pytest.raises(OSError, match="no such library"):
            image_format.decode(np.zeros(shape, np.uint8))
    else:
        assert image_format.decode(np.zeros(shape, np.uint8))[0].shape[:2] == (size, size)


# Sources


def write_images(folder: Path, names: list[str]) -> Source:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encode(colors(), "JPEG" if name.lower().endswith("jpg") else "PNG"))
    return find_source(str(folder))


def write_parquet(path: Path, num_rows: int = 3, row_group_size: int = 10, **columns: object) -> str:
    table = {"image": [b"%d" % row for row in range(num_rows)], **columns}
    pq.write_table(pa.table(table), path, row_group_size=row_group_size)
    return str(path)


def test_class_folders_define_labels_and_sorted_file_names_define_ids(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    source = write_images(tmp_path, ["dog/b.png", "cat/z.JPG", "cat/a.png"])
    [rows] = read(source)
    assert (source.classes, source.ignored) == (("cat", "dog"), ((".txt", 1),))
    assert rows.where == ["cat/a.png", "cat/z.JPG", "dog/b.png"]
    assert (rows.label.tolist(), rows.sample_id.tolist()) == ([0, 0, 1], [0, 1, 2])


def test_files_without_an_ending_are_no_images_and_are_counted_together(tmp_path: Path) -> None:
    write_images(tmp_path, ["v1.0/a.png"])
    for name in ("README", "png", "v1.0/COPYING"):
        (tmp_path / name).write_text("x")
    source = find_source(str(tmp_path))
    assert (source.num_rows, source.ignored) == (1, (("without an ending", 3),))
    with pytest.raises(DataError, match="png is not parquet"):
        find_source(str(tmp_path / "png"))


def test_only_images_may_have_names_that_begin_with_an_underscore(tmp_path: Path) -> None:
    for name in ("_SUCCESS", "_log/0.parquet", "cat/._DSC1.JPG", ".thumbs/b.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    names = ["_other/z.jpg", "cat/DSC2.JPG", "cat/_DSC1.JPG", "dog/_MG_1.jpg"]
    source = write_images(tmp_path, names)
    [rows] = read(source)
    assert (rows.where, source.classes, source.ignored) == (names, ("_other", "cat", "dog"), ())


def test_a_link_without_its_image_is_an_invalid_row(tmp_path: Path) -> None:
    for name in ("a/1.png", "b/2.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(encode(colors()))
    (tmp_path / "b" / "3.png").symlink_to("nothing.png")
    (rows,) = read(find_source(str(tmp_path)))
    assert rows.where == ["a/1.png", "b/2.png", "b/3.png"]
    with pytest.raises(InvalidImageError, match="file not found"):
        ImageFormat(size=8).decode(rows.values["image"][2])


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    source = write_images(tmp_path, ["a.png", "b.png"])
    assert not source.has_labels
    assert read(source)[0].label.tolist() == [-1, -1]


def test_splits_are_not_taken_for_classes(tmp_path: Path) -> None:
    names = ["train/cat/a.png", "train/dog/b.png", "Test/cat/c.png"]
    source = write_images(tmp_path, names)
    with pytest.raises(
        DataError, match="holds a data set in 2 splits; give --data .*/Test or --data .*/train"
    ):
        check_no_splits(source)
    check_no_splits(find_source(str(tmp_path / "train")))
    below = write_images(tmp_path / "below", [f"data/{name}" for name in names])
    assert below.classes is None
    with pytest.raises(DataError, match="give --data .*below/data/Test or --data .*below/data/train"):
        check_no_splits(below)
    check_no_splits(write_images(tmp_path / "one", ["train/cat/test.png", "train/dog/train.png"]))
    check_no_splits(write_images(tmp_path / "flat", ["test.png", "train.png"]))
    check_no_splits(write_images(tmp_path / "beside", ["test.png", "train/a.png"]))


@pytest.mark.parametrize(
    ("folders", "num_splits"),
    [
        (["train2017", "val2017", "test2017", "unlabeled2017"], 4),
        (["Train_Images", "test_images"], 2),
        (["train_imgs", "val_imgs"], 2),
        (["training_set", "test_set"], 2),
        (["split=train1", "split=test"], 2),
        (["images_train", "images_test"], 2),
        (["train-images", "test"], 2),
        (["seg_train", "seg_test"], 2),
        (["2017train", "2017val"], 2),
        (["split=train", "test"], 2),
        (["env=dev", "env=test"], 2),
        (["env=dev", "env=test", "env=prod"], 0),
        (["train_station", "test_tube"], 0),
        (["freight_train", "blood_test", "train", "bus"], 0),
        (["train", "bus", "car"], 0),
        (["test1", "test2"], 0),
        (["training", "trainings"], 0),
        (["test_train", "train_test"], 0),
    ],
)
def test_folders_of_splits_differ_only_in_their_word_and_in_common_words(
    folders: list[str], num_splits: int, tmp_path: Path
) -> None:
    source = write_images(tmp_path, [f"{folder}/a.png" for folder in folders])
    if not num_splits:
        check_no_splits(source)
        return
    given = " or ".join(f"--data {tmp_path}/{folder}" for folder in sorted(folders))
    with pytest.raises(DataError, match=f"holds a data set in {num_splits} splits; give {given}$"):
        check_no_splits(source)
    check_no_splits(find_source(f"{tmp_path}/{folders[0]}"))


@pytest.mark.parametrize(
    ("below", "more", "beside"),
    [
        ("", ["extra/cat/1.png"], "extra"),
        ("", ["logo.png"], "images outside of folders"),
        ("", ["bus/1.png", "car/1.png", "dog/1.png", "van/1.png"], "bus, car, dog, ..."),
        ("", ["train_thumbnails/1.png", "test.png"], "images outside of folders, train_thumbnails"),
        ("data/", ["data/extra/1.png"], "extra"),
        ("data/", ["logo.png"], ""),
    ],
)
def test_splits_beside_other_images_are_refused(
    below: str, more: list[str], beside: str, tmp_path: Path
) -> None:
    splits = [f"{below}{split}_images/cat/1.png" for split in ("train", "test")]
    source = write_images(tmp_path, [*splits, *more])
    folders = [f"--data {tmp_path}/{below}{split}_images" for split in ("test", "train")]
    message = f"2 splits{beside and f', beside {beside}'}; give {' or '.join(folders)}"
    if beside:
        message += " (rename them if they are classes)"
    with pytest.raises(DataError, match=f"{re.escape(message)}$"):
        check_no_splits(source)
    check_no_splits(find_source(f"{tmp_path}/{below}train_images"))


def test_a_parquet_file_needs_no_ending(tmp_path: Path) -> None:
    assert find_source(write_parquet(tmp_path / "part-0", 2)).num_rows == 2


def test_sources_without_rows_are_refused_in_one_line(tmp_path: Path) -> None:
    for name in ("empty", "texts"):
        (tmp_path / name).mkdir()
    for name in ("a.txt", "a.doc"):
        (tmp_path / "texts" / name).write_text("x")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense")
    write_parquet(tmp_path / "rows.parquet", 0)
    (tmp_path / "single.PNG").write_bytes(b"x")
    for name, message in (
        ("missing", "there is nothing at"),
        ("empty", "holds no images and no files of rows"),
        ("texts", "holds no images and no files of rows"),
        ("rows.parquet", "holds no rows"),
        ("bad.parquet", "as parquet"),
        (
            "texts/a.doc",
            "a.doc is not parquet, and its name has no ending of another format; convert it to .parquet, .csv",
        ),
        (
            "texts/a.txt",
            r'a.txt is plain text; write each line as {"text": "..."} to a file that ends in .jsonl',
        ),
        ("single.PNG", "single.PNG is a single image; give the folder of the images"),
    ):
        with pytest.raises(DataError, match=message):
            find_source(str(tmp_path / name))


@pytest.mark.parametrize("row_group_size", [7, 1000, 2048, 5000, 20_000])
def test_fragments_cover_each_row_once_with_any_row_groups(tmp_path: Path, row_group_size: int) -> None:
    for name, num_rows in (("a", 9_001), ("b", 3)):
        write_parquet(tmp_path / f"{name}.parquet", num_rows, row_group_size)
    source = find_source(str(tmp_path))
    rows = read(source)
    assert np.concatenate([row.sample_id for row in rows]).tolist() == list(range(9_004))
    contents = [content for row in rows for content in row.values["image"]]
    assert contents == [b"%d" % row for row in [*range(9_001), *range(3)]]
    assert max(fragment.num_rows for fragment in source.fragments) <= 2 * ROWS_PER_FRAGMENT


@pytest.mark.parametrize(("num_files", "num_parts"), [(1, 8), (4, 4), (16, 1), (17, 1)])
def test_files_are_cut_into_fewer_parts_the_more_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_files: int, num_parts: int
) -> None:
    monkeypatch.setattr("raycl.data.discovery.ROWS_PER_FRAGMENT", 2)
    monkeypatch.setattr("raycl.data.discovery._ENOUGH_PARTS", 16)
    for number in range(num_files):
        write_parquet(tmp_path / f"{number:02}.parquet", 45, 100)
    fragments = find_source(str(tmp_path)).fragments
    assert sum(fragment.num_rows for fragment in fragments) == 45 * num_files
    assert len(fragments) == num_files * num_parts


def test_ids_come_from_the_id_column_and_texts_are_hashed(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", number=[7, 5, 6], name=["x", "y", "x"])
    by_number, by_name = (find_source(file, ColumnNames(sample_id=name)) for name in ("number", "name"))
    assert read(by_number)[0].sample_id.tolist() == [7, 5, 6]
    # Stable across machines, processes and releases, so that old embeddings remain valid.
    expected = [5717441744405258058, 6892360672924705551, 5717441744405258058]
    assert read(by_name)[0].sample_id.tolist() == expected
    assert by_name.sample_ids(by_name.fragments).tolist() == expected


def test_ids_are_64_bit_integers_or_hashes_and_are_required() -> None:
    assert stable_ids([0, -1, 2**63, 2**64 - 2]).tolist() == [0, -1, -(2**63), -2]
    assert len(set(stable_ids(["a", "b", "1", 1]).tolist())) == 4
    decimals = pa.array([7, -1, 2**64 - 2], pa.decimal128(22, 2)).to_pylist()
    assert stable_ids(decimals).tolist() == [7, -1, -2]
    assert len(set(stable_ids([Decimal("0.5"), Decimal(2**64), Decimal("Infinity"), 0]).tolist())) == 4
    with pytest.raises(DataError, match="row 1 of a batch has no id"):
        stable_ids([3, None])


def test_text_labels_become_sorted_classes(tmp_path: Path) -> None:
    source = find_source(write_parquet(tmp_path / "a.parquet", 3, 2, label=["dog", "cat", "dog"]))
    assert source.classes == ("cat", "dog")
    assert np.concatenate([rows.label for rows in read(source)]).tolist() == [1, 0, 1]


@pytest.mark.parametrize("kind", [pa.string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())])
def test_an_empty_text_is_a_missing_label(kind: pa.DataType) -> None:
    column = pa.chunked_array([pa.array(["y", "", None, "x"]).cast(kind)])
    classes = class_names([column])
    assert (classes, label_numbers(column, classes).tolist()) == (("x", "y"), [1, NO_LABEL, NO_LABEL, 0])


@pytest.mark.parametrize("kind", [pa.decimal128(38, 0), pa.decimal128(6, 2), pa.decimal256(60, 0)])
def test_decimals_of_integers_are_labels(kind: pa.DataType, tmp_path: Path) -> None:
    label = pa.array([Decimal(3), None, Decimal(-1)], kind)
    source = find_source(write_parquet(tmp_path / "a.parquet", 3, label=label))
    (found,) = read(source)
    assert (source.classes, source.has_labels, found.label.tolist()) == (None, True, [3, NO_LABEL, NO_LABEL])


@pytest.mark.parametrize("value", ["0.5", str(2**53), "1e20"])
def test_decimals_that_are_no_integers_are_not_read_as_labels(value: str, tmp_path: Path) -> None:
    label = pa.array([Decimal(value), Decimal(1)], pa.decimal128(38, 2))
    uri = write_parquet(tmp_path / "a.parquet", 2, label=label)
    assert find_source(uri).ignored_label == "decimal128(38, 2)"
    with pytest.raises(DataError, match="labels must be integers or text, column 'label' of .* holds [0-9]"):
        find_source(uri, ColumnNames(label="label"))


def test_integers_are_labels_also_if_the_first_file_has_none(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", 2, label=pa.nulls(2))
    write_parquet(tmp_path / "b.parquet", 2, label=[10, 2])
    source = find_source(str(tmp_path))
    labels = np.concatenate([rows.label for rows in read(source)])
    assert (source.classes, labels.tolist()) == (None, [-1, -1, 10, 2])


def test_a_negative_label_is_a_missing_one(tmp_path: Path) -> None:
    (found,) = read(
        find_source(write_parquet(tmp_path / "a.parquet", 5, label=[-1, 1, None, -100, -(2**63)]))
    )
    assert found.label.tolist() == [NO_LABEL, 1, NO_LABEL, NO_LABEL, NO_LABEL]


@pytest.mark.parametrize("is_category", [False, True])
def test_an_integer_beyond_the_signed_ones_is_refused_as_a_label(is_category: bool, tmp_path: Path) -> None:
    label = pa.array([5, None, 2**63], pa.uint64())
    label = label.dictionary_encode() if is_category else label
    source = find_source(write_parquet(tmp_path / "a.parquet", 3, label=label))
    with pytest.raises(
        DataError, match="^integer labels must be below 2\\^63, came 9223372036854775808; number"
    ):
        read(source)


def test_labels_that_are_categories_of_integers_are_numbers(tmp_path: Path) -> None:
    label = pa.array([2, 10, -1, None, 2], pa.int8()).dictionary_encode()
    feather.write_feather(pa.table({"text": list("abcde"), "label": label}), str(tmp_path / "a.feather"))
    source = find_source(str(tmp_path / "a.feather"), ColumnNames(image=None, text="text"))
    (found,) = read(source)
    assert (source.classes, found.label.tolist()) == (None, [2, 10, NO_LABEL, NO_LABEL, 2])


def test_pillow_images_without_ids_have_ids_of_their_pixels() -> None:
    first, equal, other = content_ids({"image": [colors(), colors(), colors(10, 20)]})
    assert first == equal != other


def test_ids_that_are_not_utf8_are_hashed_and_labels_are_refused(tmp_path: Path) -> None:
    latin = pa.array([b"caf\xe9", b"cat"]).view(pa.string())
    source = find_source(write_parquet(tmp_path / "ids.parquet", 2, sample_id=latin))
    assert read(source)[0].sample_id.tolist() == source.sample_ids(source.fragments).tolist()
    assert source.sample_ids(source.fragments).tolist() == stable_ids([b"caf\xe9", "cat"]).tolist()
    with pytest.raises(DataError, match=r"^a label is not UTF-8 \(b'caf\\xe9'\); write the names"):
        find_source(write_parquet(tmp_path / "labels.parquet", 2, label=latin))


def test_a_missing_text_label_of_any_type_is_no_class() -> None:
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())):
        column = pa.chunked_array([pa.array(["dog", None, "cat", "dog"], kind)])
        classes = class_names([column])
        assert classes == ("cat", "dog")
        assert label_numbers(column, classes).tolist() == [1, NO_LABEL, 0, 1]


def test_integers_have_the_names_of_hugging_faces_class_labels(tmp_path: Path) -> None:
    """The metadata are those that ``datasets`` writes into parquet and Arrow files."""
    feature = {"names": ["ant", "bee"], "_type": "ClassLabel"}
    content = {"image": [encode(colors())] * 3, "label": [1, 0, 2]}
    for label, names in (
        (feature, ("ant", "bee")),
        ({"dtype": "int64", "_type": "Value"}, None),
        ({"names": 3, "_type": "ClassLabel"}, None),
        (None, None),
    ):
        info = {"info": {"features": {"image": {"_type": "Image"}, "label": label}}}
        info_text = json.dumps(info)
        table = pa.table(content).replace_schema_metadata({"huggingface": info_text})
        pq.write_table(table, tmp_path / "a.parquet")
        for uri in (tmp_path / "a.parquet", write_saved(tmp_path / str(len(info_text)), table)):
            source = find_source(str(uri))
            assert (source.label_names, source.classes) == (names, None)
            assert np.concatenate([rows.label for rows in read(source)]).tolist() == [1, 0, 2]
            shown = [source.label_name(each) for each in (1, 0, 2)]
            assert shown == (["bee", "ant", "2"] if names else ["1", "0", "2"])
    assert find_source(write_parquet(tmp_path / "b.parquet", 2, 2, label=["x", "y"])).label_name(1) == "y"


def test_hugging_face_images_are_read_from_bytes_or_files(tmp_path: Path) -> None:
    images = [encode(colors(20 + index)) for index in range(3)]
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
    [rows] = read(find_source(str(tmp_path / "hugging_face.parquet")))
    decoded: list[Any] = ImageFormat(size=8).decode_all(rows.values["image"])
    plain: list[Any] = ImageFormat(size=8).decode_all(images)
    assert [(pixels.tolist(), aspect) for pixels, aspect in decoded[:3]] == [
        (pixels.tolist(), aspect) for pixels, aspect in plain
    ]
    assert [str(each) for each in decoded[3:]] == [
        *("missing value", "missing value", "file not found", "file not found", "file not found"),
        *("a path with '..' or a zero byte", "an address other than s3://bucket/name"),
    ]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())], ids=str
)
def test_images_are_read_from_a_column_of_paths(tmp_path: Path, kind: pa.DataType) -> None:
    contents = [encode(colors(20 + index)) for index in range(2)]
    paths = [tmp_path / "0.png", tmp_path / "1.png"]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    given = [*map(str, paths), None, "0.png", str(tmp_path / "gone.png"), ""]
    table = pa.table({"image": pa.array(given).cast(kind)})
    pq.write_table(table, tmp_path / "paths.parquet")
    [rows] = read(find_source(str(tmp_path / "paths.parquet")))
    assert rows.values["image"][:4] == [*contents, None, contents[0]]
    assert str(rows.values["image"][4]) == "file not found"
    assert rows.values["image"][5] is None
    of_table = RawRows.of_table(table, ColumnNames(), None)  # as of a Ray Dataset
    assert of_table.values["image"][:3] == [*contents, None]
    assert str(of_table.values["image"][3]) == "a path that is not absolute"


def test_missing_columns_and_columns_without_images_are_named(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", weight=[2**45] * 3)
    for role in ("image", "label", "sample_id"):
        with pytest.raises(DataError, match=rf"no column 'img'; it has image, weight.*data.columns.{role}="):
            find_source(file, ColumnNames(**{role: "img"}))
    with pytest.raises(DataError, match=r"encoded bytes.* column 'weight' of .* holds int64; name another"):
        find_source(file, ColumnNames(image="weight"))
    pq.write_table(pa.table([[b"x"], [b"y"]], names=["image", "image"]), file)
    with pytest.raises(DataError, match="has 2 columns 'image'; rename all but one of them"):
        find_source(file)


# Rows in memory


def test_held_out_rows_are_few_independent_of_order_and_never_trained_on() -> None:
    holdout = make_split(100_000, num_test=2_000, num_train=10_000, seed=3)
    ids = np.arange(100_000)
    test, reference, train = holdout.is_test(ids), holdout.is_reference(ids), holdout.is_train(ids)
    assert 1_800 < test.sum() < 2_200
    assert 9_500 < reference.sum() < 10_500
    assert np.array_equal(train, ~test)
    assert not (reference & test).any()
    assert np.array_equal(holdout.is_evaluated(ids), test | reference)
    assert np.array_equal(holdout.is_test(ids[::-1]), test[::-1])
    assert make_split(100, num_test=2_000, num_train=10_000, seed=0).test == 0.1  # at most a tenth


def test_the_held_out_rows_of_a_seed_never_change() -> None:
    # A resumed run, and an evaluation after it, must not train and test on the same rows.
    holdout = Holdout(seed=3, test=0.1, reference=0.3)
    held_out = [14, 17, 26, 34, 47, 52, 59, 66, 67, 68, 71, 80, 83]
    assert np.flatnonzero(holdout.is_test(np.arange(100))).tolist() == held_out
    assert np.flatnonzero(holdout.is_reference(np.arange(50))).tolist() == [0, 3, 6, 11, 12, 22, 33, 39, 42]
    for seed, sample_id, value in (
        (0, -1, "0x1.c9b2e2ee36ca5p-1"),
        (2**70 + 5, 2**63 - 1, "0x1.ac2cc6659ba38p-1"),
    ):
        edge, ids = float.fromhex(value), np.array([sample_id], np.int64)
        assert Holdout(seed=seed, test=np.nextafter(edge, 1)).is_test(ids)
        assert not Holdout(seed=seed, test=edge).is_test(ids)


def test_rows_are_read_by_position_from_all_tables() -> None:
    image_format = ImageFormat(size=8, channels=1)
    table = pa.table(
        {
            "image.pixels": pa.array([bytes([row]) * 64 for row in range(20)], pa.binary(64)),
            "image.aspect": pa.array(np.arange(20) / 2, pa.float32()),
            "sample_id": pa.array(np.arange(20), pa.int64()),
            "label": pa.array(np.arange(20) % 3 - 1, pa.int64()),
        }
    )
    # Several tables, some sliced and one empty, as from Ray.
    parts = [table.slice(0, 5), table.slice(5, 0), table.slice(5)]
    rows = InMemoryDataset(parts, {"image": image_format})
    for positions in ([19, 0, 5, 4, 19], []):
        batch = rows.take(np.array(positions, np.int64), epoch=2)
        pixels = pixels_of(batch)
        assert batch.sample_id.tolist() == pixels.images[:, 0, 0, 0].tolist() == positions
        assert (pixels.images == pixels.images[:, :1, :1]).all()
        assert pixels.images.flags.writeable  # torch requires writable memory
        assert pixels.aspect.tolist() == [position / 2 for position in positions]
        assert batch.label.tolist() == [position % 3 - 1 for position in positions]
        assert batch.epoch == 2
    odd = rows.where(lambda ids: ids % 2 == 1)
    assert len(odd) == 10
    assert [pixels_of(batch).images[:, 0, 0, 0].tolist() for batch in odd.batches(4)][1:] == [
        [9, 11, 13, 15],
        [17, 19],
    ]
    assert odd.labeled().sample_id.tolist() == [1, 5, 7, 11, 13, 17, 19]


# Prefetching


def test_prefetching_stops_once_its_iterator_is_deleted() -> None:
    made: list[int] = []

    def endless() -> Iterator[int]:
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


def test_prefetched_items_are_prepared_early_and_returned_in_order() -> None:
    begun = threading.Event()

    def many() -> Iterator[int]:
        begun.set()
        yield from range(50)

    items = Prefetched(many())
    assert begun.wait(10)
    assert list(items) == list(range(50))
    assert list(items) == []


def test_an_error_is_raised_in_place_of_its_item() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("damaged")

    items = Prefetched(failing())
    assert next(items) == 1
    with pytest.raises(ValueError, match="damaged"):
        next(items)


def test_closing_raises_an_error_in_waiting_and_later_callers() -> None:
    never = threading.Event()

    def one() -> Iterator[int]:
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
    items = Prefetched(iter(range(5)))
    items.close()
    with pytest.raises(ValueError, match="closed"):
        list(items)


# Counts


def stats(**counts: Any) -> ReadStats:
    return ReadStats(num_rows=10, num_train=8, examples=["x.jpg (not an image)"], **counts)


@pytest.mark.parametrize(
    ("num_invalid", "remedy"),
    [
        (1, "fix the data, or allow them by --set data.max_invalid_fraction=0.11"),
        (5, "fix the data, or allow them by --set data.max_invalid_fraction=0.51"),
        (6, "fix the data"),
    ],
)
def test_too_many_invalid_rows_name_the_setting_that_allows_them(num_invalid: int, remedy: str) -> None:
    counts = stats(invalid=Counter({"not an image": num_invalid}))
    with pytest.raises(DataError) as caught:
        counts.check(0.01)
    assert str(caught.value).endswith(f"more than the fraction 0.01 allowed; {remedy}")
    if setting := remedy.partition("max_invalid_fraction=")[2]:
        counts.check(float(setting))


def test_a_restarted_coordinator_restores_a_journal_with_an_incomplete_last_line(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    first = RunCoordinator(None, str(journal))
    first.add_rows("a", stats(invalid=Counter({"not an image": 1})))
    last = stats(invalid=Counter({"not an image": 2}), num_flat=3)
    groups = ReadStats(skipped=Counter({"labels without a query": 3}))
    first.add_rows("groups", groups)
    first.add_rows("a", last)
    first.request_stop()
    first.request_stop()
    for node in ("x", "y", "x"):
        first.add_standby_node(node)
    with journal.open("a") as file:
        file.write('["add_rows", ["b", {"num_rows": 8')
    second = RunCoordinator(None, str(journal))
    assert second.rows() == first.rows()
    assert (second.rows().num_rows, second.rows().num_flat, second.rows().skipped) == (10, 3, groups.skipped)
    assert second.heartbeat()
    assert second.nodes_without_standby(["x", "y", "z"], most=9) == ["z"]
    second.add_rows("a", last)  # repeated in each epoch, without new rows
    second.add_rows("groups", groups)
    second.add_rows("c", ReadStats(num_rows=5))
    assert RunCoordinator(None, str(journal)).rows().num_rows == 15
    assert journal.read_text().count("add_rows") == 5  # including the incomplete one
    assert RunCoordinator(None, str(tmp_path / "no such folder" / "journal")).rows().num_rows == 0


def test_a_resumed_run_restores_the_counts_of_fragments(tmp_path: Path) -> None:
    first, file = RunCoordinator(), Place(str(tmp_path)) / "read_rows.json.gz"
    first.restore_rows(file, "x")  # of a new run
    first.add_rows("x:0", stats(invalid=Counter({"not an image": 1})))
    skipped = Counter({"labels without a query": 3})
    first.add_rows("x:9", ReadStats(num_rows=5, num_train=5, skipped=skipped, fingerprint=7))
    first.save_rows(file)
    second = RunCoordinator(None, str(tmp_path / "journal"))
    second.restore_rows(file, "x")
    assert second.rows() == first.rows()
    assert second.num_train() == {"x:0": 8, "x:9": 5}
    assert second.fingerprints() == {9: 7}
    moved = RunCoordinator()
    moved.restore_rows(file, "y")  # the same data at another address, which are read again
    assert moved.num_train() == {}
    assert RunCoordinator(None, str(tmp_path / "journal")).rows() == first.rows()
    file.delete()
    first.save_rows(file)  # nothing is new
    assert not file.exists()
    first.add_rows("c", ReadStats(num_rows=7))
    assert first.rows().num_rows == 22
    first.save_rows(file)
    assert file.exists()


@pytest.mark.parametrize("keep", [0, 1, 20])
def test_damaged_counts_of_fragments_are_reported_and_not_used(tmp_path: Path, keep: int) -> None:
    coordinator, file = RunCoordinator(), Place(str(tmp_path)) / "read_rows.json.gz"
    coordinator.add_rows("x:0", stats())
    coordinator.save_rows(file)
    file.write_bytes(file.read_bytes()[:keep] or b"{}")
    resumed = RunCoordinator()
    resumed.restore_rows(file, "x")
    assert resumed.num_train() == {}
    [notice] = resumed.notices()
    assert notice.endswith("read_rows.json.gz is damaged: a stream is read from the first row of its epoch")


def test_a_stream_with_too_many_invalid_rows_is_counted_again_after_it_is_corrected(tmp_path: Path) -> None:
    coordinator, output = RunCoordinator(), Place(str(tmp_path))
    data = SimpleNamespace(max_invalid_fraction=0.01)
    job: Any = SimpleNamespace(
        stream=(), coordinator=coordinator, config=SimpleNamespace(data=data), num_train=(9,), output=output
    )
    coordinator.add_rows("x:0", stats())
    coordinator.save_rows(output / READ_ROWS)
    Job.check_streamed_rows(job)
    assert (output / READ_ROWS).exists()
    coordinator.add_rows("x:9", stats(invalid=Counter({"not an image": 2})))
    with pytest.raises(DataError, match="2 of 20 rows are invalid"):
        Job.check_streamed_rows(job)
    assert not (output / READ_ROWS).exists()


def test_fragments_of_used_rows_are_skipped_up_to_the_first_unknown_one() -> None:
    fragments = [Fragment(uri="x", first_id=first, stop=10) for first in (30, 0, 10, 20)]
    num_train = {"x:30": 10, "x:0": 8, "x:20": 10}
    for num_unneeded, num_left, num_skipped in [(9, 4, 0), (10, 3, 10), (17, 3, 10), (99, 2, 18)]:
        left, skipped = without_first_rows(fragments, num_train, num_unneeded)
        assert (list(left), skipped) == (fragments[-num_left:], num_skipped)
    assert without_first_rows(fragments, num_train | {"x:10": 0}, 18) == (fragments[-1:], 18)
    assert without_first_rows(fragments, num_train | {"x:10": 0}, 99) == (fragments[-1:], 18)


def test_a_coordinator_survives_a_full_disk_without_its_journal(tmp_path: Path) -> None:
    coordinator = RunCoordinator(None, str(tmp_path / "journal"))
    coordinator._journal = Path("/dev/full").open("a")
    coordinator.request_stop()
    coordinator.add_rows("a", stats())
    assert coordinator.heartbeat()
    assert coordinator.rows().num_rows == 10


def test_a_fragment_read_twice_counts_once_and_too_many_invalid_rows_are_an_error() -> None:
    coordinator = RunCoordinator()
    for _ in range(2):
        coordinator.add_rows("a", stats(invalid=Counter({"not an image": 2})))
    coordinator.add_rows("b", ReadStats(num_rows=10, num_train=10))
    rows = coordinator.rows()
    assert (rows.num_rows, rows.num_train, rows.num_invalid) == (20, 18, 2)
    rows.check(0.1)
    with pytest.raises(DataError, match=r"2 of 20 rows are invalid \(2 not an image; for example x.jpg"):
        rows.check(0.05)


def test_a_folder_reads_only_wanted_files_and_the_next_ones_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number:04}.png" for number in range(600)]
    for name in names:
        (tmp_path / name).touch()
    read, is_ahead = set[str](), threading.Event()

    def read_image(place: Place) -> bytes:
        read.add(place.name)
        if place.name == names[300]:
            is_ahead.set()
        return place.name.encode()

    monkeypatch.setattr("raycl.data.sources.read_image", read_image)
    source = find_source(str(tmp_path))
    batches = source.read(source.fragments[0], lambda ids: ids % 3 == 0)
    first = next(batches)
    assert is_ahead.wait(10)  # file 300 of the second batch, while the first one is in use
    found = [value for rows in (first, *batches) for value in rows.values["image"]]
    assert read == set(names[::3])
    assert found == [name.encode() if number % 3 == 0 else None for number, name in enumerate(names)]


def test_a_link_without_its_file_beside_class_folders_keeps_the_classes(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(encode(photograph()))
    (tmp_path / "latest.png").symlink_to(tmp_path / "gone.png")
    source = find_source(str(tmp_path))
    assert source.classes == ("a", "b")
    assert read(source)[0].label.tolist() == [0, 1, NO_LABEL]
    (tmp_path / "latest.png").unlink()
    (tmp_path / "latest.png").symlink_to(tmp_path / "a" / "1.png")
    assert find_source(str(tmp_path)).classes is None


def test_a_table_that_is_a_link_without_its_file_is_named(tmp_path: Path) -> None:
    write_digits(tmp_path / "a.parquet", 10)
    (tmp_path / "latest.parquet").symlink_to(tmp_path / "gone.parquet")
    with pytest.raises(DataError, match="latest.parquet is a link to a file that does not exist; remove it"):
        find_source(str(tmp_path))


def test_the_file_of_a_fragment_is_named_once_and_not_for_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    def place(fragment: Fragment) -> Place:
        asked.append(fragment.name)
        return Place(fragment.uri)

    path = tmp_path / "pairs.csv"
    path.write_text("query,document\n" + "q,d\n" * 500)
    source = find_source(str(path), ColumnNames(image=None, query="query", document="document"))
    monkeypatch.setattr(Fragment, "place", property(place))
    (fragment,) = source.fragments
    where = [place for rows in source.read(fragment) for place in rows.where]
    assert where == [f"pairs.csv row {row}" for row in range(500)]
    assert len(asked) < 10


@pytest.mark.timeout(30)
def test_an_interrupted_reader_waits_for_no_more_than_a_batch() -> None:
    began, decoder = threading.Event(), cast("Any", SimpleNamespace(tables=lambda _, batches: batches))

    def read(fragment: Any) -> Iterator[Any]:
        if fragment.name == "endless":
            began.set()
            yield from iter(int, 1)
        yield fragment.name

    fragments: Any = [SimpleNamespace(name="short"), SimpleNamespace(name="endless")]
    tables: Any = decode_here(fragments, read, decoder)
    assert next(tables) == "short"
    assert began.wait(10)
    with pytest.raises(KeyboardInterrupt):
        tables.throw(KeyboardInterrupt)
