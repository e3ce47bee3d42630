"""Tars of samples: which files are columns, types of values, and broken tars."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raycl.data import tar_tables
from raycl.data.columns import ColumnNames
from raycl.data.discovery import find_source
from raycl.data.read_stats import ReadStats
from raycl.data.tar_tables import TarTables
from raycl.errors import DataError
from raycl.preparation import _row_tables
from raycl.storage import Place
from tests.table_files import write_tar
from tests.test_table_files import PAIRS, TEXTS, WEIGHTED, decoded, read

IMAGES = ColumnNames()
CAPTIONS = ColumnNames(caption="caption")
LABELED = ColumnNames(image=None, text="text", label="label")


def as_json(**keys: Any) -> bytes:
    return json.dumps(keys).encode()


def test_files_that_share_a_name_are_a_row_and_their_endings_are_its_columns(tmp_path: Path) -> None:
    samples = [
        {"JPG": b"1", "txt": b"one\n", "cls": b"7\n", "seg.png": b"mask"},
        {"webp": b"2", "cls": b"8"},
        {"text": b"three", "json": as_json(caption="not this", other={"nested": 1})},
        {"png": b"4", "json": as_json(caption="four")},
    ]
    path = str(write_tar(tmp_path / "a.tar", samples))
    found = read(find_source(path, CAPTIONS))
    assert found["image"] == [b"1", b"2", None, b"4"]
    assert found["caption"] == [b"one\n", None, b"three", b"four"]
    assert found["label"] == [7, 8, -1, -1]
    assert read(find_source(path, TEXTS))["text"] == [b"one\n", None, b"three", None]
    masks = find_source(path, ColumnNames(image="seg.png"))
    assert read(masks)["image"] == [b"mask", None, None, None]
    with pytest.raises(DataError, match="has no column 'query'; it has .*: name the right one"):
        find_source(path, PAIRS)


def test_an_image_beside_its_mask_is_found_by_the_ending(tmp_path: Path) -> None:
    samples = [
        {"jpg": b"%d" % row, "png": b"mask", "json": b"[1, 2]"} for row in range(3)
    ]  # a list has no columns
    path = str(write_tar(tmp_path / "a.tar", samples))
    assert read(find_source(path, ColumnNames(image="jpg")))["image"] == [b"0", b"1", b"2"]
    assert read(find_source(path, ColumnNames(image="png")))["image"] == [b"mask"] * 3
    with pytest.raises(DataError, match="row 0 of .* has two files for column 'image'"):
        find_source(path, IMAGES)


def test_pairs_are_files_of_text_or_keys_of_json(tmp_path: Path) -> None:
    files = [{"query.txt": f"q{row}".encode(), "document.txt": f"d{row}".encode()} for row in range(3)]
    keys = [{"json": as_json(query=f"q{row}", document=f"d{row}")} for row in range(3)]
    found = [
        read(find_source(str(write_tar(tmp_path / f"{number}.tar", samples)), PAIRS))
        for number, samples in enumerate((files, keys))
    ]
    assert found[0] == found[1]
    assert found[0]["query"] == [b"q0", b"q1", b"q2"]


def test_labels_are_integers_if_those_of_all_tars_are_and_else_text(tmp_path: Path) -> None:
    for name, label in (("a", b"7"), ("b", b"12\n")):
        write_tar(tmp_path / f"{name}.tar", [{"txt": b"a", "cls": label}, {"txt": b"a"}])
    source = find_source(str(tmp_path), TEXTS)
    assert (source.classes, read(source)["label"]) == (None, [7, -1, 12, -1])
    write_tar(tmp_path / "c.tar", [{"txt": b"a", "cls": b"cat"}, {"txt": b"a", "cls": b" "}])
    source = find_source(str(tmp_path), TEXTS)
    assert source.classes == ("12", "7", "cat")
    assert read(source)["label"] == [1, -1, 0, -1, 2, -1]
    write_tar(tmp_path / "c.tar", [{"txt": b"a", "cls": b"007"}])
    assert find_source(str(tmp_path), TEXTS).classes == ("007", "12", "7")


def test_values_of_json_keep_their_types(tmp_path: Path) -> None:
    samples = [
        {"json": as_json(query="q", document="d", negatives=["n"], negative_ids=[1], query_id="x", w=1)},
        {"json": as_json(query="q", document="d", negatives=[], negative_ids=[], query_id=None, w=0.5)},
    ]
    found = read(find_source(str(write_tar(tmp_path / "a.tar", samples)), WEIGHTED))
    assert (found["negatives"], found["negative_ids"]) == ([[b"n"], []], [[1], []])
    assert (found["query_id"], found["weight"]) == ([b"x", None], [1.0, 0.5])


def test_keys_of_json_that_a_run_does_not_read_may_hold_any_values(tmp_path: Path) -> None:
    keys = as_json(text=[["word", 0.93]], query_id={"a": 1}, weight=["x", 1], negatives=[[1, "a"]])
    path = str(write_tar(tmp_path / "a.tar", [{"png": b"1", "json": keys}]))
    assert read(find_source(path, IMAGES))["image"] == [b"1"]
    with pytest.raises(DataError, match="holds double and string|holds string and double"):
        find_source(path, TEXTS)


def test_endings_and_keys_that_are_not_utf8_are_left_out(tmp_path: Path) -> None:
    other = {
        "txt": b"two",
        "\udce9t.png": b"mask",
        "json": b'{"\\ud800": 1}',
    }  # a byte of Latin-1, and half a surrogate
    path = str(write_tar(tmp_path / "a.tar", [{"txt": b"one"}, other]))
    assert read(find_source(path, TEXTS))["text"] == [b"one", b"two"]


@pytest.mark.parametrize("first", [{"json": as_json(text="one")}, {"txt": b"one"}], ids=["key", "file"])
def test_numbers_among_texts_are_refused_before_they_are_read(
    first: dict[str, bytes], tmp_path: Path
) -> None:
    path = str(write_tar(tmp_path / "a.tar", [first, {"json": as_json(text=5)}]))
    with pytest.raises(
        DataError, match="column 'text' of .*a.tar holds string and int64; give its values one type"
    ):
        find_source(path, TEXTS)


def test_texts_that_are_not_utf8_are_invalid_rows(tmp_path: Path) -> None:
    samples = [{"txt": b"fine"}, {"txt": b"caf\xe9"}, {"json": b'{"text": "\\ud800"}'}]
    source = find_source(str(write_tar(tmp_path / "a.tar", samples)), TEXTS)
    assert decoded(source)["sample_id"].to_pylist() == [0]


def test_other_members_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind in (
            ("part", tarfile.DIRTYPE),
            ("part/._1.png", tarfile.REGTYPE),
            ("part/.DS_Store", tarfile.REGTYPE),
            ("part/README", tarfile.REGTYPE),
            ("part/0.png", tarfile.SYMTYPE),
            ("part/.ipynb_checkpoints/1-checkpoint.png", tarfile.REGTYPE),
            (".a/1.png", tarfile.REGTYPE),
            ("./.a/1.png", tarfile.REGTYPE),
            ("../..a/1.png", tarfile.REGTYPE),
            ("./part.of/1.png", tarfile.REGTYPE),
            ("home/.cache/images/1.png", tarfile.REGTYPE),
            ("../2.png", tarfile.REGTYPE),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd" if kind == tarfile.SYMTYPE else ""
            content = name[:4].encode() if kind == tarfile.REGTYPE else b""
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    assert read(find_source(str(path)))["image"] == [b"./pa", b"home", b"../2"]


@pytest.mark.parametrize("ending", ["tar", "tgz"])
def test_only_the_files_that_are_needed_are_read(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = list[str]()

    def content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
        contents.append(member.name)
        return original(tar, member)

    original = tar_tables._content
    monkeypatch.setattr(tar_tables, "_content", content)
    monkeypatch.setattr("raycl.data.discovery.ROWS_PER_FRAGMENT", 2)
    samples = [{"png": b"1", "txt": b"a", "cls": b"1"} for _ in range(6)]
    source = find_source(str(write_tar(tmp_path / f"a.{ending}", samples)))
    assert [name.rpartition(".")[2] for name in contents] == ["cls"] * 6
    contents.clear()
    assert [(each.start, each.stop) for each in source.fragments] == [(0, 2), (2, 6)]
    assert len(list(source.read(source.fragments[0]))) == 1
    assert contents == [f"part/{row:06d}.{kind}" for row in (0, 1) for kind in ("png", "cls")]


def test_a_folder_of_images_may_have_a_tar_beside_them(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    write_tar(tmp_path / "all.tar.gz", [{"png": b""}])
    source = find_source(str(tmp_path))
    assert (source.kind, source.num_rows, source.ignored) == ("folder", 1, ((".gz", 1),))


def test_packed_images_are_the_same_and_so_are_their_ids(tmp_path: Path) -> None:
    samples = [{"png": b"%d" % row, "txt": b"text", "cls": b"cat"} for row in range(5)]
    write_tar(tmp_path / "a.tgz", [*samples, {"txt": b"no image"}])
    expected = find_source(str(tmp_path / "a.tgz"), CAPTIONS)
    rows = pa.concat_tables(_row_tables(expected, expected.fragments[0], ReadStats()))
    pq.write_table(rows, tmp_path / "a.parquet")
    found = find_source(str(tmp_path / "a.parquet"), CAPTIONS)
    assert (found.classes, read(found)) == (("cat",), read(expected))


BROKEN: dict[str, tuple[list[dict[str, bytes]] | bytes, ColumnNames, str]] = {
    "empty.tar": (b"", IMAGES, "as tar: empty header at byte 0, before the end of the tar; write the tar again"),
    "plain.tar": (b"no tar" * 999, IMAGES, "as tar: .* at byte 0"),
    "plain.tgz": (b"no gzip" * 999, IMAGES, "as tar: zlib inflate failed"),
    "none.tar": ([], IMAGES, "holds no rows outside of hidden folders; give"),
    "twice.tar": ([{"png": b"1"}, {"png": b"1", "jpg": b"2"}], IMAGES,
                  "row 1 of .* has two files for column 'image', the second is 'part/000001.jpg'; keep one of them, or name"),
    "json.tar": ([{"txt": b"a"}, {"txt": b"a", "json": b"{"}], TEXTS, "the JSON of row 1 of .*; correct or remove it"),
    "deep.tar": ([{"txt": b"a", "json": b"[" * 100_000}], TEXTS, "the JSON of row 0 of .*; correct or remove it"),
    "label.tar": ([{"txt": b"a", "cls": b"caf\xe9"}], TEXTS, "column 'label' of .* not UTF-8; give text"),
    "fraction.tar": ([{"txt": b"a", "json": as_json(label=1.5)}], LABELED, "labels must be integers or text"),
    "surrogate.tar": ([{"txt": b"a", "json": b'{"label": "\\ud800"}'}], TEXTS, "as tar: .*; give text in UTF-8"),
    "id.tar": ([{"txt": b"a", "json": as_json(sample_id=2**64)}], TEXTS, "ids must be integers of 64 bits or text"),
    "types.tar": ([{"json": as_json(text="a")}, {"json": as_json(text=1.5)}], TEXTS,
                  "column 'text' of .* holds string and double; give its values one type"),
    "number.tar": ([{"json": as_json(text=1)}], TEXTS, "texts must be strings.* holds int64"),
    "object.tar": ([{"json": as_json(text={"a": 1})}], TEXTS, "texts must be strings"),
    "weight.tar": ([{"json": as_json(query="q", document="d", w=1)}, {"json": as_json(query="q", document="d")}],
                   WEIGHTED, "a missing weight .* in row 1 of"),
    "no_image.tar": ([{"txt": b"a"}], IMAGES, "has no column 'image'; it has"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tar_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, columns, message = BROKEN[name]
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        write_tar(tmp_path / name, content)
    with pytest.raises(DataError, match=message) as caught:
        find_source(str(tmp_path / name), columns)
    assert "\n" not in str(caught.value)


def test_damage_in_the_middle_of_a_tar_is_not_its_end(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [{"txt": b"a"} for _ in range(4)])
    content = bytearray(path.read_bytes())
    content[2 * 1024] ^= 1  # the name of the third file: Python's tarfile would return two files
    path.write_bytes(content)
    with pytest.raises(DataError, match="as tar: bad checksum at byte 2,048, before the end of the tar"):
        find_source(str(path), TEXTS)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    samples=st.lists(
        st.fixed_dictionaries(
            {"json": st.just(b"{}")},
            optional={
                "png": st.binary(max_size=2000),
                "txt": st.binary(max_size=9),
                "cls": st.integers(-(2**63), 2**63 - 1).map(lambda label: str(label).encode()),
            },
        ),
        min_size=1,
        max_size=9,
    ),
    is_compressed=st.booleans(),
)
def test_any_samples_are_read_as_written(
    samples: list[dict[str, bytes]], is_compressed: bool, tmp_path: Path
) -> None:
    samples = [{"png": b"first", "txt": b"first"}, *samples]
    path = write_tar(tmp_path / ("a.tgz" if is_compressed else "a.tar"), samples)
    source = find_source(str(path), CAPTIONS)
    found = [rows for fragment in source.fragments for rows in source.read(fragment)]
    assert [value for rows in found for value in rows.values["image"]] == [
        each.get("png") for each in samples
    ]
    assert [value for rows in found for value in rows.values["caption"]] == [
        each.get("txt") for each in samples
    ]
    assert [label for rows in found for label in rows.label.tolist()] == [
        max(-1, int(each.get("cls", b"-1")))
        for each in samples  # a negative one is missing
    ]


@pytest.mark.parametrize(
    ("size", "num_bytes", "num_reads"), [(3 * 2**20, 5 * 2**20, 9), (2**20, 9.1 * 2**20, 3)]
)
def test_large_files_of_a_remote_tar_are_skipped_and_small_ones_read_in_blocks(
    size: int, num_bytes: float, num_reads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [{"jpg": bytes([row]) * size, "cls": b"%d" % row} for row in range(9)]
    path, sizes = write_tar(tmp_path / "a.tar", samples), list[int]()

    class Counted(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            found = super().read(size)
            sizes.append(len(found or b""))
            return found or b""

    monkeypatch.setattr(Place, "is_local", False)
    monkeypatch.setattr(Place, "open", lambda _: Counted(path))
    place, tars = Place("s3://bucket/a.tar"), TarTables()
    assert tars.inspect(place, IMAGES).group_sizes == [9]
    assert sum(sizes) < num_bytes
    assert len(sizes) <= num_reads
    types = pa.schema({"image": pa.binary(), "label": pa.int64()})
    rows = pa.concat_tables(table for _, table in tars.read(place, types.names, types, start=0, stop=9))
    assert rows["image"].to_pylist() == [sample["jpg"] for sample in samples]
    assert rows["label"].to_pylist() == list(range(9))
