"""CSV, JSONL, Arrow and tars: the same rows as in parquet, and broken files in one line."""

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raycl.data.codecs import Formats
from raycl.data.columns import ColumnNames
from raycl.data.decode import Decoder
from raycl.data.fingerprint import fingerprint
from raycl.data.ids import IdFormat
from raycl.data.images import ImageFormat
from raycl.data.patterns import expand, folder_of
from raycl.data.sources import Source, check_exists, find_source
from raycl.data.texts import TextFormat, TextsFormat
from raycl.data.weights import WeightFormat
from raycl.doctor.data import _describe, _find, sample_rows
from raycl.errors import DataError
from raycl.inference.reading import read_pairs
from raycl.preparation import gather_texts, pack_rows
from raycl.recipes import recipe
from raycl.serve.sample_viewer import _one_row
from raycl.storage import Place
from raycl.training.transforms import build_formats
from tests.conftest import BUCKET
from tests.images import digit_files
from tests.pairs import vocabulary
from tests.table_files import Rows, write_rows
from tests.texts import invented_texts

TEXTS = ColumnNames(image=None, text="text")
PAIRS = ColumnNames(image=None, query="query", document="document")
WEIGHTED = ColumnNames(image=None, query="query", document="document", weight="w")
ODD = ['with, a comma and "quotes"', "of two\nlines", "Größe 日本", "007", "2024-01-01", "NA", " ", "", None]
CSV, TSV, LINES = ("csv", "csv.gz"), ("tsv", "tsv.gz"), ("jsonl", "ndjson", "jsonl.gz", "ndjson.gz")
WITH_IMAGES = ("arrow", "feather", "tar", "tar.gz", "tgz")


def texts(num_rows: int = 60) -> list[str | None]:
    return [*ODD, *invented_texts(num_rows, seed=1)][:num_rows]


def pairs(num_rows: int = 60) -> Rows:
    """Return a click log with odd texts, ids, labels and weights."""
    first, second = texts(num_rows), texts(num_rows)[::-1]
    return [
        {
            "query": one,
            "document": other,
            "label": row % 2,
            "query_id": row // 3,
            "document_id": f"d{row}",
            "w": row / 4,
            "unused": row,
        }
        for row, (one, other) in enumerate(zip(first, second, strict=True))
    ]


def read(source: Source) -> dict[str, list[Any]]:
    """Return all rows: id, label, the contents by role, and the number in the file."""
    found: dict[str, list[Any]] = {}
    for fragment in source.fragments:
        for rows in source.read(fragment):
            numbers = [int(where.rpartition(" row ")[2]) for where in rows.where]
            parts = {
                "id": rows.sample_id.tolist(),
                "label": rows.label.tolist(),
                "row": numbers,
                **rows.values,
            }
            for name, values in parts.items():
                found.setdefault(name, []).extend(values)
    # Parquet may have an empty text where CSV has a missing one; both are invalid.
    return {name: [None if value == b"" else value for value in values] for name, values in found.items()}


def decoded(source: Source) -> pa.Table:
    """Return the rows as a run stores them."""
    text: dict[str, Any] = {"tokenizer": vocabulary().tokenizer, "max_length": 8}
    known: Formats = {
        "image": ImageFormat(size=8),
        "caption": TextsFormat(**text),
        "text": TextsFormat(**text),
        "query": TextFormat(**text),
        "document": TextFormat(**text),
        "negatives": TextsFormat(**text, may_be_empty=True),
        "query_id": IdFormat(),
        "document_id": IdFormat(),
        "negative_ids": IdFormat(in_lists=True),
        "weight": WeightFormat(),
    }
    formats = {role: known[role] for role in source.columns.contents}
    decoder = Decoder(formats=formats, coordinator=None)
    blocks = [decoder.tables(each.name, source.read(each)) for each in source.fragments]
    return pa.concat_tables(table for tables in blocks for table in tables)


def assert_same(source: Source, expected: Source) -> None:
    assert [(each.first_id, each.start, each.stop) for each in source.fragments] == [
        (each.first_id, each.start, each.stop) for each in expected.fragments
    ]
    assert (source.columns, source.classes) == (expected.columns, expected.classes)
    assert read(source) == read(expected)
    assert decoded(source).equals(decoded(expected))
    ids = [each.sample_ids(each.fragments).tolist() for each in (source, expected)]
    assert ids[0] == ids[1] == read(source)["id"]


@pytest.fixture(params=[None, 7], ids=["whole files", "fragments and blocks"])
def small_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file have several fragments, and these several blocks."""
    if request.param is not None:
        monkeypatch.setattr("raycl.data.sources.ROWS_PER_FRAGMENT", request.param)
        monkeypatch.setattr("raycl.data.tables.BATCH_ROWS", 3)
        monkeypatch.setattr("raycl.data.tar_tables.BATCH_ROWS", 4)
        monkeypatch.setattr("raycl.data.json_tables.BLOCK_BYTES", 200)
        monkeypatch.setattr("raycl.data.csv_tables._BLOCK_BYTES", 600)


@pytest.mark.parametrize("ending", [*CSV, *TSV, *LINES, *WITH_IMAGES])
@pytest.mark.usefixtures("small_parts")
def test_rows_are_the_same_as_in_parquet(ending: str, tmp_path: Path) -> None:
    rows = pairs()
    for name, part in (("a", rows[:41]), ("b", rows[41:])):
        write_rows(tmp_path / "parquet" / f"{name}.parquet", part)
        write_rows(tmp_path / "other" / f"{name}.{ending}", part)
    for columns in (PAIRS, WEIGHTED):
        found, expected = (find_source(str(tmp_path / name), columns) for name in ("other", "parquet"))
        assert found.num_rows == 60
        assert_same(found, expected)
    one = find_source(str(tmp_path / "other" / f"a.{ending}"), PAIRS)
    assert one.num_rows == 41
    assert fingerprint(decoded(one)) == fingerprint(
        decoded(find_source(str(tmp_path / "parquet/a.parquet"), PAIRS))
    )


@pytest.mark.parametrize("ending", [*CSV, *LINES, *WITH_IMAGES])
@pytest.mark.usefixtures("small_parts")
def test_ids_and_class_names_are_the_same_as_in_parquet(ending: str, tmp_path: Path) -> None:
    classes = ["cat", "dog", None, "007"]
    for name, ids in (("numbers", [*range(40)]), ("texts", [f"0{row}" for row in range(40)])):
        rows = [
            {"text": text, "sample_id": number, "label": classes[row % 4]}
            for row, (text, number) in enumerate(zip(texts(40), ids, strict=True))
        ]
        paths = [write_rows(tmp_path / f"{name}.{each}", rows) for each in (ending, "parquet")]
        assert_same(*(find_source(str(path), TEXTS) for path in paths))


def images(num_rows: int = 40) -> Rows:
    """Return digits with captions and class names; some are missing or broken."""
    contents, numbers = digit_files(num_rows)
    rows: list[dict[str, Any]] = [
        {"image": content, "caption": f"the digit {number}", "label": f"class {number}"}
        for content, number in zip(contents, numbers, strict=True)
    ]
    rows[3]["image"], rows[5]["image"], rows[6]["caption"], rows[8]["label"] = None, b"broken", None, None
    return rows


@pytest.mark.parametrize("ending", WITH_IMAGES)
@pytest.mark.parametrize("caption", [None, "caption"])
@pytest.mark.usefixtures("small_parts")
def test_images_and_captions_are_the_same_as_in_parquet(
    ending: str, caption: str | None, tmp_path: Path
) -> None:
    for name, part in (("a", images()[:23]), ("b", images()[23:])):
        write_rows(tmp_path / "parquet" / f"{name}.parquet", part)
        write_rows(tmp_path / "other" / f"{name}.{ending}", part)
    (tmp_path / "other" / "labels.csv").write_text("file,label")
    columns = ColumnNames(caption=caption)
    if caption:
        (tmp_path / "other" / "labels.csv").unlink()
    found, expected = (find_source(str(tmp_path / name), columns) for name in ("other", "parquet"))
    assert found.classes == tuple(f"class {number}" for number in range(10))
    assert decoded(found).num_rows == 40 - 2 - (caption is not None)
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("shard-{008..011}.tar", ["shard-008.tar", "shard-009.tar", "shard-010.tar", "shard-011.tar"]),
        ("{8..11}.tar", ["10.tar", "11.tar", "8.tar", "9.tar"]),
        ("{b,a}.parquet", ["a.parquet", "b.parquet"]),
        ("{b,a{0..1},a0}-{x,y}.csv", [f"{one}-{other}.csv" for one in ("a0", "a1", "b") for other in "xy"]),
        ("{train,test}/x.tar", ["test/x.tar", "train/x.tar"]),
    ],
)
def test_a_pattern_is_the_sorted_list_of_its_files(pattern: str, names: list[str]) -> None:
    for folder, options in (("/data", ""), ("s3://bucket/a", ""), ("s3://bucket", "?region=x")):
        assert expand(f"{folder}/{pattern}{options}") == names
        assert folder_of(f"{folder}/{pattern}{options}") == folder + options


def test_other_braces_belong_to_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "{v1}"
    folder.mkdir()
    write_rows(folder / "0.csv", [{"text": "a"}])
    assert find_source(str(folder), TEXTS).num_rows == 1


def test_a_pattern_of_buckets_is_refused() -> None:
    with pytest.raises(DataError, match="braces in the name of its bucket"):
        folder_of("s3://bucket-{1..2}/x.parquet")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("shard-{000..127-{a,b}.tar", "has a brace without its counterpart"),
        ("shard-000..127}-{a,b}.tar", "has a brace without its counterpart"),
        ("shard-{0}-{a,b}.tar", r"has \{0\}, neither a range nor a list; write \{000..127\} .* or \{a,b\}"),
        ("shard-{a..c}.tar", "neither a range nor a list"),
        ("shard-{9..0}.tar", "counts from 9 to 0; count upward"),
        ("shard-{0..9999}{0..99}.tar", "has more than 100,000 files"),
        ("{0..1}.csv", "there is nothing at .*1.csv"),
        ("{0.csv,0.jsonl}", r"several formats \(csv, jsonl\)"),
        ("{0.csv,folder.csv}", "folder.csv is a folder"),
    ],
)
def test_a_wrong_pattern_is_refused_in_one_line(pattern: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    for name in ("0.csv", "0.jsonl"):
        write_rows(tmp_path / name, [{"text": "a"}])
    with pytest.raises(DataError, match=message) as caught:
        find_source(str(tmp_path / pattern), TEXTS)
    assert "\n" not in str(caught.value)


def test_the_files_of_a_pattern_have_the_rows_and_ids_of_a_folder_of_them(
    tmp_path: Path, s3_server: str
) -> None:
    rows, folder = images(), tmp_path / "shards"
    place = Place(f"s3://{BUCKET}/{tmp_path.name}")
    for number in range(12):
        file = write_rows(folder / f"{number:02}.tar", rows[3 * number : 3 * number + 3])
        (place / file.name).write_bytes(file.read_bytes())
    write_rows(folder / "other.tar", rows)
    columns = ColumnNames(caption="caption")
    found, remote = (find_source(f"{each}/{{00..11}}.tar", columns) for each in (folder, place))
    (folder / "other.tar").unlink()
    expected = find_source(str(folder), columns)
    assert_same(found, expected)
    assert_same(remote, expected)
    assert (
        len({each.name for each in find_source(f"{folder}/{{00,01}}.tar").fragments + found.fragments}) == 14
    )
    assert _describe(remote, recipe("clip")) == _describe(found, recipe("clip"))
    check_exists(remote.uri)


@pytest.mark.parametrize("ending", WITH_IMAGES)
def test_a_file_on_s3_has_the_same_rows(ending: str, tmp_path: Path, s3_server: str) -> None:
    file = write_rows(tmp_path / f"images.{ending}", images())
    place = Place(f"s3://{BUCKET}/{tmp_path.name}") / file.name
    place.write_bytes(file.read_bytes())
    columns = ColumnNames(caption="caption")
    found, expected = (find_source(uri, columns) for uri in (place.uri, str(file)))
    assert (found.num_rows, read(found)) == (40, read(expected))
    fragment = replace(found.fragments[0], first_id=7, start=7, stop=18)
    assert [row for rows in found.read(fragment) for row in rows.sample_id] == [*range(7, 18)]
    assert [row for rows in found.read(fragment) for row in rows.values["caption"]] == read(expected)[
        "caption"
    ][7:18]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), ending=st.sampled_from(WITH_IMAGES), num_rows=st.integers(1, 30))
def test_any_range_of_rows_is_the_same_as_in_parquet(
    data: st.DataObject, ending: str, num_rows: int, tmp_path: Path
) -> None:
    rows = [{"text": f"t{row}", "label": row % 3, "sample_id": row * 5} for row in range(num_rows)]
    source = find_source(str(write_rows(tmp_path / f"rows.{ending}", rows)), TEXTS)
    start = data.draw(st.integers(0, num_rows - 1))
    stop = data.draw(st.integers(start + 1, num_rows))
    (fragment,) = source.fragments
    found = list(source.tables(replace(fragment, start=start, stop=stop), ["label", "sample_id", "text"]))
    assert found[0][0] == start
    tables = pa.concat_tables(table for _, table in found)
    assert tables["sample_id"].to_pylist() == [row["sample_id"] for row in rows[start:stop]]
    assert tables["label"].to_pylist() == [row["label"] for row in rows[start:stop]]
    assert tables["text"].cast(pa.string()).to_pylist() == [row["text"] for row in rows[start:stop]]


@pytest.mark.parametrize("ending", ["arrow", "feather", "tar", "tgz"])
def test_a_file_that_was_cut_off_anywhere_is_refused_in_one_line(ending: str, tmp_path: Path) -> None:
    whole = write_rows(tmp_path / f"whole.{ending}", images(9)).read_bytes()
    # A tar ends with two blocks of zeros, and more of them that mean nothing.
    length = {"tar": len(whole.rstrip(b"\0")), "tgz": len(whole) - 60}.get(ending, len(whole))
    for size in [0, 1, *range(7, length, max(length // 60, 1)), length - 1]:
        (tmp_path / f"cut.{ending}").write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"cut\.") as caught:
            find_source(str(tmp_path / f"cut.{ending}"), ColumnNames(caption="caption"))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ending", ["jsonl.gz", "arrow", "feather", "tar", "tgz"])
@pytest.mark.usefixtures("small_parts")
def test_lists_are_the_same_as_in_parquet(ending: str, tmp_path: Path) -> None:
    rows = [
        {
            "query": f"q{row}",
            "document": f"d{row}",
            "negatives": [f"n{row}-{number}" for number in range(row % 4)],
            "negative_ids": [row + number for number in range(row % 4)],
        }
        for row in range(50)
    ]
    paths = [write_rows(tmp_path / f"rows.{ending}", rows) for ending in (ending, "parquet")]
    assert_same(*(find_source(str(path), PAIRS) for path in paths))
    several = [{"text": [f"a {row}", f"b {row}"]} for row in range(20)]
    paths = [write_rows(tmp_path / f"texts.{ending}", several) for ending in (ending, "parquet")]
    assert_same(*(find_source(str(path), TEXTS) for path in paths))


def test_a_key_that_appears_late_is_a_column_and_rows_without_it_lack_the_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycl.data.json_tables.BLOCK_BYTES", 32)
    file = tmp_path / "late.jsonl"
    file.write_text('{"text": "a"}\n' * 5 + '\n{"text": null, "label": 3}\n{"text": "b", "x": {"y": [1]}}')
    source = find_source(str(file), TEXTS)
    assert read(source)["label"] == [-1, -1, -1, -1, -1, 3, -1]
    assert read(source)["text"] == [b"a"] * 5 + [None, b"b"]


def test_columns_of_jsonl_may_have_no_values_in_some_files(tmp_path: Path) -> None:
    parts: list[dict[str, Any]] = [
        {"document": None, "negatives": None, "negative_ids": None, "w": 1},
        {"document": "d", "negatives": [], "negative_ids": [], "w": 0.5},
        {"document": "d", "negatives": ["n"], "negative_ids": [7], "w": 2},
    ]
    for name, row in zip("abc", parts, strict=True):
        write_rows(tmp_path / f"{name}.jsonl", [{"query": "q", **row}])
    found = read(find_source(str(tmp_path), WEIGHTED))
    assert (found["document"], found["negatives"]) == ([None, b"d", b"d"], [None, [], [b"n"]])
    assert (found["negative_ids"], found["weight"]) == ([None, [], [7]], [1.0, 0.5, 2.0])
    for name in "bc":
        (tmp_path / f"{name}.jsonl").unlink()
    found = read(find_source(str(tmp_path), PAIRS))
    assert (found["document"], found["negatives"]) == ([None], [None])
    write_rows(tmp_path / "b.jsonl", [{"query": "q", **parts[1], "negatives": 3}])
    with pytest.raises(DataError, match="negatives must be lists of strings"):
        find_source(str(tmp_path), PAIRS)
    for name, label in (("a", 1), ("b", "cat")):
        write_rows(tmp_path / f"{name}.jsonl", [{"text": "a", "label": label}])
    with pytest.raises(
        DataError, match="column 'label' of .* holds int64 and string; give its values one type"
    ):
        find_source(str(tmp_path), TEXTS)


def test_integers_in_one_csv_file_and_text_in_another_are_classes_and_ids_of_texts(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.csv", [{"text": "a", "label": 7, "sample_id": 7}])
    write_rows(tmp_path / "b.csv", [{"text": "b", "label": "cat", "sample_id": "x"}])
    source = find_source(str(tmp_path), TEXTS)
    assert source.classes == ("7", "cat")
    assert len({*read(source)["id"], 7}) == 3
    (tmp_path / "b.csv").write_text(f"text,label,sample_id\nb,2,{2**63}\n")  # beyond 64 bits
    types = find_source(str(tmp_path), TEXTS).types
    assert types is not None and types.field("sample_id").type == pa.string()


def test_texts_that_are_not_utf8_are_invalid_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,n\nfine,1\ncaf\xe9,2\n")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9"}\n')
    for name in ("a.csv", "a.jsonl"):
        source = find_source(str(tmp_path / name), TEXTS)
        assert read(source)["text"] == [b"fine", b"caf\xe9"]
        assert decoded(source)["sample_id"].to_pylist() == [0]


BROKEN = {
    "fields.csv": (b"text,n\na,1\nb,2,3\n", r"as csv: .*: row 1: Expected 2 columns, got 3.*; give a header"),
    "few.tsv": (b"text\tn\na\n", r": row 0: Expected 2 columns, got 1"),
    "quotes.csv": (b'n,text\n1,a\n2,"b\n3,c\n', r"ends within quotes: from its last row on \(1\).*close the quote"),
    "quotes_in_one.csv": (b'text\na\n"b\nc', r"ends within quotes: from its last row on \(1\)"),
    "twice.csv": (b"text,text\na,b\n", "has 2 columns 'text'; rename"),
    "no_column.csv": (b"texts;n\na;1\n", "has no column 'text'; it has texts;n: name the right one"),
    "empty.csv": (b"", "as csv: Empty CSV file"),
    "header.csv": (b"text,n\n", "holds no rows"),
    "weight.csv": (b"text,w\na,1\nb,many\n", ": row 1: .*invalid value 'many'"),
    "missing_weight.csv": (b"text,w\na,1\nb,\n", "a missing weight .* in row 1 of"),
    "cut.csv.gz": (gzip.compress(b"text\n" + b"a\n" * 999)[:-9], "cannot read .*cut.csv.gz as csv: Truncated .*; write the file again"),
    "plain.csv.gz": (b"text\na\n", "cannot read .*plain.csv.gz as csv: zlib inflate failed"),
    "line.jsonl": (b'{"text": "a"}\n' * 30 + b'{"text": "b"\n', "as jsonl: .* in row 30; give an object per line"),
    "array.jsonl": (b'["a"]\n', "from object to array in row 0; give an object per line"),
    "type.jsonl": (b'{"text": "a"}\n' * 30 + b'{"text": 7}\n', "column 'text' of .* holds .* and .*; give its values one type|from string to number in row 30"),
    "number.jsonl": (b'{"text": 7}\n', "texts must be strings.* holds int64"),
    "twice.jsonl": (b'{"text": "a", "text": "b"}\n', r"was specified twice in row 0"),
    "id.jsonl": (b'{"text": "a", "sample_id": 18446744073709551616}\n', "ids must be integers of 64 bits or text, column 'sample_id' of"),
    "no_column.jsonl": (b'{"texts": "a"}\n', "has no column 'text'; it has texts"),
    "none.jsonl": (b"\n\n", "holds no rows"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a"}\n' * 999)[:-9], "as jsonl: Truncated"),
    "name.jsonl": (b'{"text": "a", "label": "caf\xe9"}\n', "as jsonl: .*[Ii]nvalid UTF8 .*; give an object per line"),
    "name.csv": (b"text,label\na,caf\xe9\n", "as csv: .*invalid UTF8"),
    "label.jsonl": (b'{"text": "a", "label": 1.5}\n', "labels must be integers or text"),
}  # fmt: skip


@pytest.mark.parametrize("block", [64, 2**20])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_in_one_line_before_training(
    name: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycl.data.json_tables.BLOCK_BYTES", block)
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    columns = ColumnNames(image=None, text="text", weight="w" if "weight" in name else None)
    with pytest.raises(DataError, match=message) as caught:
        find_source(str(tmp_path / name), columns)
    assert "\n" not in str(caught.value)


def test_lists_and_images_in_csv_and_long_lines_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    negatives = [{"query": "q", "document": "d", "negatives": '["n"]'}]
    with pytest.raises(DataError, match="negatives must be lists of strings, column 'negatives' of"):
        find_source(str(write_rows(tmp_path / "pairs.csv", negatives)), PAIRS)
    images = write_rows(tmp_path / "images.csv", [{"image": "a.jpg", "caption": "c"}])
    with pytest.raises(DataError, match="images must be encoded bytes"):
        find_source(str(images), ColumnNames(caption="caption"))
    monkeypatch.setattr("raycl.data.csv_tables._BLOCK_BYTES", 100)
    with pytest.raises(DataError, match="as csv: .*block size"):
        find_source(str(write_rows(tmp_path / "long.csv", [{"text": "x" * 200}])), TEXTS)
    monkeypatch.setattr("raycl.data.json_tables.BLOCK_BYTES", 100)
    monkeypatch.setattr("raycl.data.json_tables._MAX_LINE_BYTES", 150)
    with pytest.raises(DataError, match="a line of more than 150 bytes; give an object per line"):
        find_source(str(write_rows(tmp_path / "long.jsonl", [{"text": "x" * 400}])), TEXTS)


def test_a_folder_has_tables_of_one_format_and_other_files_are_named(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv.gz", "c/d.tsv", "README.md", "_hidden.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    for name in ("b.csv", "a.csv.gz", "c/d.tsv"):
        write_rows(tmp_path / name, [{"text": name}])
    source = find_source(str(tmp_path), TEXTS)
    assert [fragment.file for fragment in source.fragments] == ["a.csv.gz", "b.csv", "c/d.tsv"]
    assert (source.kind, source.ignored) == ("csv", ((".md", 1),))
    (tmp_path / "pictures.tar").write_bytes(b"")  # would be a format of its own
    assert find_source(str(tmp_path), TEXTS).ignored == ((".md", 1), (".tar", 1))
    write_rows(tmp_path / "e.jsonl", [{"text": "e"}])
    with pytest.raises(DataError, match=r"several formats \(3 csv, 1 jsonl\); give a folder of one"):
        find_source(str(tmp_path), TEXTS)
    write_rows(tmp_path / "f.parquet", [{"text": "f"}])
    source = find_source(str(tmp_path), TEXTS)
    assert (source.kind, source.num_rows) == ("parquet", 1)
    assert dict(source.ignored) == {".csv": 1, ".gz": 1, ".tsv": 1, ".jsonl": 1, ".md": 1, ".tar": 1}


def test_a_folder_of_images_may_have_other_tables_beside_them(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    write_rows(tmp_path / "labels.csv", [{"file": "a.png", "label": 1}])
    source = find_source(str(tmp_path))
    assert (source.kind, source.num_rows, source.ignored) == ("folder", 1, ((".csv", 1),))


def test_empty_parts_of_jsonl_have_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    write_rows(tmp_path / "b.jsonl", [{"text": "b"}])
    assert read(find_source(str(tmp_path), TEXTS))["text"] == [b"b"]


@pytest.mark.parametrize("ending", ["csv", "jsonl.gz", "arrow", "tar"])
@pytest.mark.usefixtures("small_parts")
def test_a_row_is_found_by_its_number(ending: str, tmp_path: Path) -> None:
    rows = [{"text": text} for text in invented_texts(30)]
    source = find_source(str(write_rows(tmp_path / f"rows.{ending}", rows)), TEXTS)
    firsts = np.array([fragment.first_id for fragment in source.fragments])
    for row in (0, 6, 7, 29):
        fragment = source.fragments[int(np.searchsorted(firsts, row, side="right")) - 1]
        (found,) = source.read(_one_row(fragment, row - fragment.first_id))
        assert (found.sample_id.tolist(), found.values["text"]) == ([row], [rows[row]["text"].encode()])
        assert found.where == [f"rows.{ending} row {row}"]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "arrow", "feather", "tar"])
def test_a_file_that_lost_rows_since_they_were_counted_is_refused(ending: str, tmp_path: Path) -> None:
    rows = [{"text": text} for text in invented_texts(30)]
    source = find_source(str(write_rows(tmp_path / f"rows.{ending}", rows)), TEXTS)
    write_rows(tmp_path / f"rows.{ending}", rows[:-1])
    with pytest.raises(
        DataError, match=f"rows.{ending} has 29 rows, and had at least 30 before; do not change it"
    ):
        read(source)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("ending", ["tsv.gz", "jsonl", "tgz"])
def test_packed_rows_are_the_same_and_so_are_their_ids(ending: str, tmp_path: Path) -> None:
    for name in "ab":
        write_rows(tmp_path / "rows" / f"{name}.{ending}", pairs())
    packed = pack_rows(str(tmp_path / "rows"), str(tmp_path / "rows.parquet"), columns=WEIGHTED)
    found = find_source(str(tmp_path / "rows.parquet"), WEIGHTED)
    assert (packed.num_rows, found.kind) == (120, "parquet")
    expected = read(packed)
    assert read(found) == expected | {"row": list(range(120))}
    with pytest.raises(DataError, match="holds no tars, CSV or JSONL files"):
        pack_rows(str(tmp_path / "rows.parquet"), str(tmp_path / "again.parquet"), columns=WEIGHTED)


@pytest.mark.parametrize("ending", ["csv", "jsonl.gz", "arrow", "tar"])
def test_the_doctor_and_commands_on_trained_runs_read_the_same_rows(ending: str, tmp_path: Path) -> None:
    rows = pairs()
    file, parquet = (str(write_rows(tmp_path / f"pairs.{each}", rows)) for each in (ending, "parquet"))
    source, config = _find(file, None, None)
    formats = build_formats(config, vocabulary().tokenizer, source.columns)
    sample = sample_rows(source, source.fragments[0], formats, 40)
    invalid = [row for row in sample.rows if row.error is not None]
    assert (len(sample.rows), len(invalid)) == (40, 3)
    assert (invalid[0].where, invalid[0].error) == (f"pairs.{ending} row 6", "empty text")
    assert f"60 rows with labels, pairs, {source.kind} in 1 fragment" in _describe(source, config)
    found, expected = (read_pairs(each, PAIRS) for each in (file, parquet))
    assert (found.by_role, found.label.tolist()) == (expected.by_role, expected.label.tolist())
    assert found.num_invalid == expected.num_invalid == 6


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl.gz", "arrow", "tar.gz"])
def test_equivalent_texts_are_gathered_from_each_format(ending: str, tmp_path: Path) -> None:
    rows = [{"text": f"t{row}", "about": ["x", "y", None][row % 3]} for row in range(9)]
    write_rows(tmp_path / f"rows.{ending}", rows)
    gather_texts(str(tmp_path / f"rows.{ending}"), str(tmp_path / "out.parquet"), group="about")
    assert pq.read_table(tmp_path / "out.parquet")["text"].to_pylist() == [
        ["t0", "t3", "t6"],
        ["t1", "t4", "t7"],
    ]
