"""Folders of Hugging Face's datasets, and Arrow files that are damaged or malicious."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

from raycl.data.arrow_tables import unread_files
from raycl.data.columns import ColumnNames
from raycl.data.discovery import check_no_splits, find_source
from raycl.errors import DataError
from tests.images import digit_files
from tests.table_files import write_arrow, write_rows, write_saved
from tests.test_table_files import TEXTS, assert_same, read

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def saved_images(num_rows: int = 40) -> pa.Table:
    """Return images as ``datasets`` stores them, with numbers of classes and several captions."""
    contents, labels = digit_files(num_rows)
    return pa.table(
        {
            "image": pa.array([{"bytes": content, "path": "a.png"} for content in contents], IMAGE),
            "caption": [[f"a {label}", f"the {label}"] for label in labels],
            "label": labels,
        }
    )


@pytest.mark.parametrize("caption", [None, "caption"])
def test_a_saved_data_set_has_the_same_rows_as_parquet(caption: str | None, tmp_path: Path) -> None:
    folder = write_saved(tmp_path / "saved", saved_images())
    pq.write_table(saved_images(), tmp_path / "rows.parquet")
    columns = ColumnNames(caption=caption)
    found, expected = (find_source(str(path), columns) for path in (folder, tmp_path / "rows.parquet"))
    assert (found.kind, found.ignored, found.num_rows) == ("arrow", (), 40)
    rows, others = read(found), read(expected)
    assert {name: each for name, each in rows.items() if name != "row"} == {
        name: each for name, each in others.items() if name != "row"
    }
    assert len(set(rows["label"])) == 10


def test_files_that_datasets_computed_from_the_data_are_not_read(tmp_path: Path) -> None:
    folder = write_saved(tmp_path / "saved", pa.table({"text": ["a", "b", "c"]}))
    write_arrow(folder / "cache-0123456789abcdef.arrow", pa.table({"text": ["a b"]}))
    source = find_source(str(folder), TEXTS)
    assert read(source)["text"] == [b"a", b"b", b"c"]
    assert source.ignored == ((".arrow", 1),)
    (folder / "notes.json").write_text("{}")
    assert find_source(str(folder), TEXTS).ignored == ((".arrow", 1), (".json", 1))
    other = tmp_path / "other"
    write_arrow(other / "cache-0.arrow", pa.table({"text": ["a"]}))  # a name like any other
    assert find_source(str(other), TEXTS).num_rows == 1


@pytest.mark.parametrize("name", ["cache-0123456789abcdef", "cache-0123456789abcdef_00001_of_00002"])
def test_files_that_datasets_computed_in_its_cache_are_not_read(name: str, tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_arrow(tmp_path / f"imdb-{split}.arrow", pa.table({"text": [split]}))
    write_arrow(tmp_path / f"{name}.arrow", pa.table({"text": ["train"]}))
    assert find_source(str(tmp_path), TEXTS).num_rows == 3  # a folder of files like any others
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(DataError, match="2 splits; give --data .*/imdb-test.arrow or .*/imdb-train.arrow$"):
        check_no_splits(find_source(str(tmp_path), TEXTS))
    (tmp_path / "imdb-test.arrow").unlink()
    assert read(find_source(str(tmp_path), TEXTS))["text"] == [b"train"]
    (tmp_path / "imdb-train.arrow").unlink()
    assert find_source(str(tmp_path), TEXTS).num_rows == 1  # beside no data of its own


def test_columns_of_one_name_are_refused_where_they_are_read(tmp_path: Path) -> None:
    columns = [pa.array(["a", "b"]), pa.array([1, 2]), pa.array([3, 4])]
    unused = write_arrow(tmp_path / "a.arrow", pa.table(columns, names=["text", "x", "x"]))
    assert read(find_source(str(unused), TEXTS))["text"] == [b"a", b"b"]
    twice = write_arrow(tmp_path / "b.arrow", pa.table(columns[:1] * 2, names=["text", "text"]))
    with pytest.raises(DataError, match="b.arrow has 2 columns 'text'; rename all but one of them"):
        find_source(str(twice), TEXTS)


def test_files_of_an_earlier_data_set_in_the_folder_are_not_read(tmp_path: Path) -> None:
    table = pa.table({"text": list("abcdefg")})
    write_saved(tmp_path / "saved", pa.table({"text": list("vwxyz")}), num_files=3)
    folder = write_saved(tmp_path / "saved", table, num_files=2)
    source = find_source(str(folder), ColumnNames(image=None, text="text"))
    assert source.num_rows == 7
    assert source.ignored == ((".arrow", 3),)
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(
        DataError, match="saved lacks data-00001-of-00002.arrow, which its state.json lists; save"
    ):
        find_source(str(folder), ColumnNames(image=None, text="text"))
    (folder / "state.json").write_text("{}")
    with pytest.raises(DataError, match="state.json as the state of a saved data set"):
        find_source(str(folder), ColumnNames(image=None, text="text"))


@pytest.mark.parametrize("content", ["{}", "[1]", "no JSON", "\xff"])
def test_files_with_the_names_of_those_of_datasets_may_lie_beside_others(
    content: str, tmp_path: Path
) -> None:
    write_rows(tmp_path / "a.parquet", [{"text": "a"}])
    for name in ("state.json", "dataset_dict.json"):
        (tmp_path / name).write_text(content, "latin-1")
    source = find_source(str(tmp_path), TEXTS)
    assert (source.kind, source.num_rows, source.ignored) == ("parquet", 1, ((".json", 2),))


def test_splits_without_their_states_are_refused(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_arrow(tmp_path / split / "data.arrow", pa.table({"text": ["a"]}))
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(DataError, match="2 splits; give --data .*/test or --data .*/train$"):
        find_source(str(tmp_path), TEXTS)


def test_a_data_set_in_splits_is_refused_with_the_folders_to_give(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_saved(tmp_path / "all" / split, pa.table({"text": ["a"]}))
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for given in (tmp_path / "all", tmp_path):
        with pytest.raises(DataError, match="2 splits; give --data .*/all/test or --data .*/all/train$"):
            find_source(str(given), TEXTS)
    assert find_source(str(tmp_path / "all" / "train"), TEXTS).num_rows == 1


def test_the_folders_to_give_keep_the_options_of_an_address() -> None:
    files = ["dataset_dict.json", "test/data.arrow", "train/data.arrow"]
    given = r"--data 's3://bucket/my all/test\?region=x' or --data 's3://bucket/my all/train\?region=x'$"
    with pytest.raises(DataError, match=given):
        unread_files("s3://bucket/my all?region=x", files)


@pytest.mark.parametrize("ending", ["arrow", "feather"])
def test_class_names_may_be_dictionaries_that_differ_between_batches(ending: str, tmp_path: Path) -> None:
    names = [f"class {row // 7}" for row in range(40)]
    table = pa.table({"text": [f"t{row}" for row in range(40)], "label": names})
    batches = [each.set_column(1, "label", each["label"].dictionary_encode()) for each in table.to_batches(9)]
    path = tmp_path / f"rows.{ending}"
    new = ipc.new_file if ending == "feather" else ipc.new_stream
    options = ipc.IpcWriteOptions(unify_dictionaries=ending == "feather")
    with new(str(path), batches[0].schema, options=options) as writer:
        writer.write_table(pa.Table.from_batches(batches), 9)
    pq.write_table(table, tmp_path / "rows.parquet")
    assert_same(*(find_source(str(each), TEXTS) for each in (path, tmp_path / "rows.parquet")))


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("text", [pa.string(), pa.large_string(), pa.string_view(), pa.list_(pa.string())])
def test_texts_of_every_type_and_compression_are_read(
    text: pa.DataType, compression: str | None, tmp_path: Path
) -> None:
    values = [["a", "b"] if pa.types.is_list(text) else "a", None] * 5
    table = pa.table({"text": pa.array(values, text)})
    options = ipc.IpcWriteOptions(compression=compression)
    with ipc.new_stream(str(tmp_path / "rows.arrow"), table.schema, options=options) as writer:
        writer.write_table(table, 3)
    expected = [b"a", None] * 5 if not pa.types.is_list(text) else [[b"a", b"b"], None] * 5
    assert read(find_source(str(tmp_path / "rows.arrow"), TEXTS))["text"] == expected


def test_categories_of_string_views_are_read_as_texts_ids_and_paths(tmp_path: Path) -> None:
    names = ["a.png", "b.png", "a.png"]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    views = pa.array(names[:2]).cast(pa.string_view())
    kinds = {"views": pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.uint32()), views), "texts": names}
    columns = ColumnNames(caption="caption")
    for kind, values in kinds.items():
        roles = ("image", "caption", "label", "sample_id")
        write_arrow(tmp_path / f"{kind}.arrow", pa.table(dict.fromkeys(roles, values)))
    found, expected = (find_source(str(tmp_path / f"{kind}.arrow"), columns) for kind in kinds)
    assert read(found) == read(expected)


def test_texts_that_are_not_utf8_are_invalid_rows(tmp_path: Path) -> None:
    text = pa.array([b"fine", b"caf\xe9"]).view(pa.string())
    write_arrow(tmp_path / "rows.arrow", pa.table({"text": text}))
    assert read(find_source(str(tmp_path / "rows.arrow"), TEXTS))["text"] == [b"fine", b"caf\xe9"]


def test_an_unread_column_of_a_local_file_is_not_read(tmp_path: Path) -> None:
    path = write_arrow(
        tmp_path / "rows.arrow", pa.table({"label": [1, 2], "image": [b"x" * 999, b"y" * 999]})
    )
    content = path.read_bytes()
    path.write_bytes(content.replace(b"x" * 999, b"z" * 999))
    source = find_source(str(path))
    assert read(source)["image"] == [b"z" * 999, b"y" * 999]


BROKEN = {
    "empty.arrow": (b"", "as arrow: the file is empty"),
    "plain.arrow": (
        b"plain text, and no Arrow" * 9,
        "as arrow: it is cut off, or no Arrow file; give a file that",
    ),
    "old.feather": (b"FEA1" + bytes(99), "version 1 of Feather"),
    "cut.feather": (b"ARROW1\0\0" + bytes(99), "as arrow: .*; give a file that Arrow or"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_of_another_kind_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        find_source(str(tmp_path / name), TEXTS)
    assert "\n" not in str(caught.value)


def test_files_without_rows_or_the_columns_are_refused(tmp_path: Path) -> None:
    none = write_arrow(tmp_path / "none.arrow", pa.table({"text": pa.array([], pa.string())}))
    with pytest.raises(DataError, match="holds no rows"):
        find_source(str(none), TEXTS)
    other = write_arrow(tmp_path / "other.arrow", pa.table({"texts": ["a"]}))
    with pytest.raises(DataError, match="has no column 'text'; it has texts"):
        find_source(str(other), TEXTS)
    write_rows(tmp_path / "mixed" / "a.arrow", [{"text": "a"}])
    write_rows(tmp_path / "mixed" / "b.tar", [{"text": "a"}])
    with pytest.raises(DataError, match=r"several formats \(1 arrow, 1 tar\); give a folder of one"):
        find_source(str(tmp_path / "mixed"), TEXTS)


DAMAGE = """
import random, sys
import pyarrow as pa
from raycl.data.columns import ColumnNames
from raycl.data.discovery import find_source
from raycl.errors import DataError
refused = 0
path, draw = sys.argv[1], random.Random(0)
whole = open(path, "rb").read()
for _ in range(300):
    damaged = bytearray(whole)
    for _ in range(draw.choice([1, 3, 10])):
        damaged[draw.randrange(len(whole))] = draw.randrange(256)
    open(path, "wb").write(damaged)
    try:
        source = find_source(path, ColumnNames(caption="caption"))
        for fragment in source.fragments:
            list(source.read(fragment))
    except DataError as error:
        assert "\\n" not in str(error)
        refused += 1
assert refused > 50
"""


@pytest.mark.parametrize("ending", ["arrow", "feather"])
def test_damage_ends_in_a_line_and_never_in_the_end_of_the_process(ending: str, tmp_path: Path) -> None:
    path = write_arrow(tmp_path / f"rows.{ending}", saved_images(9))
    found = subprocess.run(
        [sys.executable, "-c", DAMAGE, str(path)], check=False, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr[-2000:]
