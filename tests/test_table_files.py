"""CSV, JSONL, Arrow, tars, Delta, Iceberg and Lance: the same rows as in parquet, and broken files in one line."""

import base64
import gzip
import json
import math
import os
import re
import shlex
import shutil
import sys
from dataclasses import replace
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import StaticTable, Table
from pyiceberg.typedef import Record
from pyiceberg.types import LongType

import raycl
from raycl.data.click_logs import is_clicked, labels_as_given
from raycl.data.codecs import Formats
from raycl.data.columns import ColumnNames, UnlabeledColumnNames
from raycl.data.decode import Decoder
from raycl.data.discovery import check_exists, check_no_splits, find_source
from raycl.data.fingerprint import fingerprint
from raycl.data.ids import IdFormat
from raycl.data.images import ImageFormat
from raycl.data.lance_tables import _open_version
from raycl.data.patterns import expand, folder_of
from raycl.data.read_stats import ReadStats
from raycl.data.sources import Source
from raycl.data.texts import TextFormat, TextsFormat
from raycl.data.weights import WeightFormat
from raycl.doctor.data import _describe, _find, sample_rows
from raycl.errors import DataError, InvalidValueError, StorageError
from raycl.inference.reading import read_pairs
from raycl.preparation import _row_tables, gather_texts, pack_rows
from raycl.recipes import recipe
from raycl.serve.sample_viewer import SampleViewer, _one_row
from raycl.storage import Place
from raycl.training.transforms import build_formats
from tests.conftest import BUCKET
from tests.images import digit_files
from tests.pairs import small_config, vocabulary
from tests.table_files import IcebergFolder, Rows, write_parts, write_rows
from tests.texts import invented_texts
from tests.towers import save

TEXTS = ColumnNames(image=None, text="text")
PAIRS = ColumnNames(image=None, query="query", document="document")
WEIGHTED = ColumnNames(image=None, query="query", document="document", weight="w")
ODD = ['with, a comma and "quotes"', "of two\nlines", "Größe 日本", "007", "2024-01-01", "NA", " ", "", None]
CSV, TSV, LINES = ("csv", "csv.gz"), ("tsv", "tsv.gz"), ("jsonl", "ndjson", "jsonl.gz", "ndjson.gz")
FILES_WITH_IMAGES = ("arrow", "feather", "tar", "tar.gz", "tgz")
TABLES = ("delta", "iceberg", "lance")
WITH_IMAGES = (*FILES_WITH_IMAGES, *TABLES)
INSTALLED = [each for each in WITH_IMAGES if each != "lance" or find_spec("lance")]
# Other names of formats, which the tests of rows read; commands read the formats themselves.
ALIASES = ("tsv.gz", "ndjson", "ndjson.gz", "tgz")


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
        monkeypatch.setattr("raycl.data.discovery.ROWS_PER_FRAGMENT", request.param)
        monkeypatch.setattr("raycl.data.tables.BATCH_ROWS", 3)
        monkeypatch.setattr("raycl.data.tar_tables.BATCH_ROWS", 4)
        monkeypatch.setattr("raycl.data.lance_tables.BATCH_ROWS", 4)
        monkeypatch.setattr("raycl.data.json_tables.BLOCK_BYTES", 200)
        monkeypatch.setattr("raycl.data.csv_tables._BLOCK_BYTES", 600)


@pytest.mark.parametrize("ending", [*CSV, *TSV, *LINES, *WITH_IMAGES])
@pytest.mark.usefixtures("small_parts")
def test_rows_are_the_same_as_in_parquet(ending: str, tmp_path: Path) -> None:
    rows = pairs()
    place, parts = write_parts(tmp_path / "other", ending, [rows[:41], rows[41:]])
    parquet, _ = write_parts(tmp_path / "parquet", "parquet", parts)
    for columns in (PAIRS, WEIGHTED):
        found, expected = (find_source(str(each), columns) for each in (place, parquet))
        assert found.num_rows == 60
        assert_same(found, expected)
    one = find_source(str(write_rows(tmp_path / f"a.{ending}", parts[0])), PAIRS)
    assert one.num_rows == len(parts[0])
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


def evaluated(run: Path, measure: Any, test: Path, **options: Any) -> dict[str, Any]:
    train = None if measure in ("retrieval", "sts") else test
    return raycl.evaluate(measure, run=run, test=test, train=train, quiet=True, **options)


def embedded(run: Path, data: Path, output: Path, columns: ColumnNames | None = None) -> pa.Table:
    raycl.embed(run, data, output, columns=columns, quiet=True)
    return pq.read_table(output)


@pytest.mark.parametrize("ending", [each for each in (*CSV, *TSV, *LINES, *INSTALLED) if each not in ALIASES])
def test_commands_on_texts_read_each_format(ending: str, tmp_path: Path) -> None:
    towers, sentences = tmp_path / "towers", tmp_path / "sentences"
    save(small_config("two_tower"), towers)
    save(small_config("simcse"), sentences)
    first, second = invented_texts(24, seed=1), invented_texts(24, seed=2)
    rows = [
        {"query": one, "document": other, "text": one, "label": row % 2}
        | {"sentence1": one, "sentence2": other, "score": row / 4 - 1, "dataset": f"s{row % 2}"}
        | {"query_id": f"q{row}", "document_id": row}
        for row, (one, other) in enumerate(zip(first, second, strict=True))
    ]
    place, parts = write_parts(tmp_path / "other", ending, [rows[:15], rows[15:]])
    parquet, _ = write_parts(tmp_path / "parquet", "parquet", parts)
    for measure, run in (("sts", sentences), ("retrieval", towers), ("knn", towers), ("linear", towers)):
        options = {"columns": TEXTS} if measure in ("knn", "linear") else {}
        found, expected = (evaluated(run, measure, each, **options) for each in (place, parquet))
        assert found == expected
    judged = [evaluated(towers, "retrieval", each, queries=each, documents=each) for each in (place, parquet)]
    assert judged[0] == judged[1]
    tables = [embedded(sentences, each, tmp_path / f"of {each.name}", TEXTS) for each in (place, parquet)]
    assert tables[0].equals(tables[1])


@pytest.mark.parametrize("ending", [each for each in INSTALLED if each not in ALIASES])
def test_commands_on_images_read_each_format(ending: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(small_config("clip"), run)
    rows = [row for row in images() if None not in row.values() and row["image"] != b"broken"]
    place, parts = write_parts(tmp_path / "other", ending, [rows[:23], rows[23:]])
    parquet, _ = write_parts(tmp_path / "parquet", "parquet", parts)
    for measure in ("retrieval", "knn", "linear"):
        found, expected = (evaluated(run, measure, each) for each in (place, parquet))
        assert found == expected
    tables = [embedded(run, each, tmp_path / f"of {each.name}") for each in (place, parquet)]
    assert tables[0].equals(tables[1])
    captioned = ColumnNames(caption="caption")
    viewers = [SampleViewer(str(each), captioned, max_pixels=10_000) for each in (place, parquet)]
    assert viewers[0].show(30) == viewers[1].show(30)


@pytest.mark.parametrize("ending", WITH_IMAGES)
@pytest.mark.parametrize("caption", [None, "caption"])
@pytest.mark.usefixtures("small_parts")
def test_images_and_captions_are_the_same_as_in_parquet(
    ending: str, caption: str | None, tmp_path: Path
) -> None:
    place, parts = write_parts(tmp_path / "other", ending, [images()[:23], images()[23:]])
    parquet, _ = write_parts(tmp_path / "parquet", "parquet", parts)
    (place / "labels.csv").write_text("file,label")
    columns = ColumnNames(caption=caption)
    if caption:
        (place / "labels.csv").unlink()
    found, expected = (find_source(str(each), columns) for each in (place, parquet))
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
        ("{0..1}.csv", "there is nothing at .*1.csv; give a file"),
        (
            "*.csv",
            r"nothing at .*/\*.csv, .* wildcards .*; write \{000..127\} .* or \{a,b\} .*, or give the folder",
        ),
        ("[0-9]-{0..1}.csv", r"nothing at .*/\[0-9\]-0.csv, .* wildcards"),
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


def test_the_options_of_an_address_are_no_wildcards(s3_server: str) -> None:
    with pytest.raises(DataError, match="there is nothing at .*; give a file"):
        find_source(f"s3://{BUCKET}/missing?region=us-east-1", TEXTS)


def test_a_pattern_on_s3_has_the_escapes_of_other_addresses(tmp_path: Path, s3_server: str) -> None:
    folder = f"s3://{BUCKET}/{tmp_path.name}"
    for name in "ab":
        (Place(folder) / f"50% {name}?.csv").write_text("text\nx\n")
    for name, num_rows in (("50%25 a%3F.csv", 1), ("50%25%20{a,b}%3F.csv", 2)):
        check_exists(f"{folder}/{name}")
        assert find_source(f"{folder}/{name}", TEXTS).num_rows == num_rows


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
    for each in [file, *file.rglob("*")]:
        if each.is_file():
            Place(str(place) + str(each).removeprefix(str(file))).write_bytes(each.read_bytes())
    file = file.rename(tmp_path / f"moved.{ending}")  # a table may have its own address in its metadata
    columns = ColumnNames(caption="caption")
    found, expected = (find_source(uri, columns) for uri in (place.uri, str(file)))
    assert (found.num_rows, read(found)) == (40, read(expected))
    fragment = replace(found.fragments[0], first_id=7, start=7, stop=18)
    assert [row for rows in found.read(fragment) for row in rows.sample_id] == [*range(7, 18)]
    assert [row for rows in found.read(fragment) for row in rows.values["caption"]] == read(expected)[
        "caption"
    ][7:18]


@pytest.mark.parametrize("name", ["run#1", "my data", "données"])
def test_a_delta_table_on_s3_may_have_any_letters_in_its_address(
    name: str, tmp_path: Path, s3_server: str
) -> None:
    local = write_rows(tmp_path / "rows.delta", [{"text": "a"}])
    place = Place(f"s3://{BUCKET}/{tmp_path.name}/{name}/rows.delta")
    for each in filter(Path.is_file, local.rglob("*")):
        (place / each.relative_to(local).as_posix()).write_bytes(each.read_bytes())
    assert read(find_source(place.uri, TEXTS))["text"] == [b"a"]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), ending=st.sampled_from(INSTALLED), num_rows=st.integers(1, 30))
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


@pytest.mark.parametrize("ending", ["jsonl.gz", "arrow", "feather", "tar", "tgz", *TABLES])
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


def test_floats_of_integers_in_csv_files_are_integers_as_pandas_writes_them(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label,sample_id\na,1,11\nb,2,12\n")
    (tmp_path / "b.csv").write_text("text,label,sample_id\na,1.0,13.0\nb,,14\nc,2.0,15.0\n")
    source = find_source(str(tmp_path), TEXTS)
    assert (source.classes, read(source)["label"]) == (None, [1, 2, 1, -1, 2])
    assert read(source)["id"] == [11, 12, 13, 14, 15]
    for other in ("1.5", "01.0", f"{2**53}.0", "1.00", "cat"):
        (tmp_path / "b.csv").write_text(f"text,label,sample_id\na,{other},x\nb,1.0,y\n")
        assert find_source(str(tmp_path), TEXTS).classes == tuple(sorted({"1", "1.0", "2", other}))
    (tmp_path / "b.csv").write_text("text,label,sample_id\na,1,13.0\nb,1,\n")
    (tmp_path / "a.csv").write_text(f"text,label,sample_id\na,1,{2**53 + 1}\n")
    with pytest.raises(DataError, match=r"a.csv row 0 has an id of 2\^53 or more as float"):
        read(find_source(str(tmp_path), TEXTS))


def test_ids_of_pairs_may_be_floats_in_one_csv_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("query,document,document_id\nq,d,5\n")
    (tmp_path / "b.csv").write_text("query,document,document_id\nr,e,5.0\ns,f,\n")
    assert decoded(find_source(str(tmp_path), PAIRS))["document_id.id"].to_pylist() == [[5], [5]]


@pytest.mark.parametrize("ending", ["parquet", "arrow", *TABLES])
@pytest.mark.parametrize("digits", ["", ".00"])
def test_decimals_of_warehouses_are_ids_labels_and_weights(digits: str, ending: str, tmp_path: Path) -> None:
    numbers = {"label": 1, "query_id": 7, "document_id": 2**60}
    decimals = {name: Decimal(f"{number}{digits}") for name, number in numbers.items()}
    negative = dict.fromkeys(decimals, Decimal(f"0{digits}"))
    rows = [{"query": "q", "document": "d"} | each for each in (decimals, negative)]
    path = str(write_rows(tmp_path / f"clicks.{ending}", rows))
    source, found = find_source(path, PAIRS), read_pairs(path, PAIRS)
    (given,) = (rows for fragment in source.fragments for rows in source.read(fragment))
    assert [is_clicked(label) for label in labels_as_given(given, source)] == [True, False]
    assert is_clicked(decimals["label"])  # of a Ray Dataset
    assert (found.label.tolist(), found.by_role["query_id"]) == ([1, 0], [7, 0])
    assert found.by_role["document_id"] == [2**60, 0]
    weighted = [{"query": "q", "document": "d", "w": Decimal("0.5")}]
    source = find_source(str(write_rows(tmp_path / f"pairs.{ending}", weighted)), WEIGHTED)
    assert decoded(source)["weight.value"].to_pylist() == [0.5]


def test_texts_that_are_not_utf8_are_invalid_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,n\nfine,1\ncaf\xe9,2\n")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9"}\n')
    for name in ("a.csv", "a.jsonl"):
        source = find_source(str(tmp_path / name), TEXTS)
        assert read(source)["text"] == [b"fine", b"caf\xe9"]
        assert decoded(source)["sample_id"].to_pylist() == [0]


BROKEN = {
    "fields.csv": (b"text,n\na,1\nb,2,3\n", r"as csv: .*: row 1: Expected 2 columns, got 3.*; give a header"),
    "latin1.csv": (b"text,pr\xe9nom\na,b\n", "the header of .*latin1.csv is not UTF-8; write the file in UTF-8"),
    "few.tsv": (b"text\tn\na\n", r": row 0: Expected 2 columns, got 1"),
    "quotes.csv": (b'n,text\n1,a\n2,"b\n3,c\n', r"ends within quotes: from its last row on \(1\).*close the quote"),
    "quotes_in_one.csv": (b'text\na\n"b\nc', r"ends within quotes: from its last row on \(1\)"),
    "twice.csv": (b"text,text\na,b\n", "has 2 columns 'text'; rename"),
    "no_column.csv": (b"texts,n\na,1\n", "has no column 'text'; it has texts, n: name the right one with --set data.columns.text=NAME"),
    "upper_case.csv": (b"Text,n\na,1\n", "it has Text, n: name the right one with --set data.columns.text=Text"),
    "spaces.csv": (b"n, text\n1, a\n", "it has n, \" text\": name the right one with --set 'data.columns.text=\" text\"'"),
    "semicolons.csv": (b"\xef\xbb\xbftext;n\r\na;1\r\n", "fields in the header of .*semicolons.csv are separated by ';'; separate all fields by commas in .csv"),
    "quoted_semicolons.csv": (b'"text";"n"\n"a";1\n', "fields in the header of .*quoted_semicolons.csv are separated by ';'"),
    "quoted_tabs.csv": (b'"text"\t"n"\n"a"\t1\n', r"are separated by '\\t'"),
    "quoted_commas.tsv": (b'"text","n"\n"a",1\n', "are separated by ','"),
    "partly_quoted.csv": (b'"text";n\n"a";1\n', "are separated by ';'"),
    "quoted_quotes.csv": (b'"a ""|"" b";text\n"a";1\n', "are separated by ';'"),
    "quoted_name.csv": (b'"text;n"\n"a"\n', "has no column 'text'; it has text;n"),
    "commas_in_rows.csv": (b"text;n\nHello, world;1\n", "are separated by ';'"),
    "tabs.csv": (b"text\tn\na\t1\n", r"are separated by '\\t'; separate all fields by commas in .csv, by tabs in .tsv"),
    "empty.csv": (b"", "empty.csv holds no rows"),
    "quotes_of_texts.tsv": (b'query\ttext\nq1\t"d1\nq2\td2\nq3\t"d3\nq4\td4\n', r'row 0 of .*quotes_of_texts.tsv has a field with tabs and newlines, .* or give texts with both as .csv or .jsonl'),
    "quotes_elsewhere.tsv": (b'text\tnote\na\tb\nq1\t"d1\nq2\td2\nq3\td3"\nq4\td4\n', r"row 1 of .*quotes_elsewhere.tsv has a field with tabs and newlines"),
    "surrogate.jsonl": (b'{"text": "a"}\n{"text": "\\ud83d"}\n', r"in row 1; write a whole character in place of half of one"),
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
    "name.jsonl": (b'{"text": "a", "label": "caf\xe9"}\n', "name.jsonl as jsonl: .*[Ii]nvalid UTF8 .*; write the file in UTF-8$"),
    "name.csv": (b"text,label\na,caf\xe9\n", "column 'label' of .*name.csv holds bytes that are not UTF-8; write the file in UTF-8$"),
    "id.tsv": (b"text\tsample_id\na\tb\nc\tcaf\xe9\n", "column 'sample_id' of .*id.tsv holds bytes that are not UTF-8; write"),
    "utf16.csv": ("text,n\na,1\n".encode("utf-16"), "utf16.csv is in UTF-16; write the file in UTF-8$"),
    "big_endian.tsv": ("\ufefftext\tn\na\t1\n".encode("utf-16-be"), "big_endian.tsv is in UTF-16; write the file in UTF-8$"),
    "utf16.csv.gz": (gzip.compress("text\na\n".encode("utf-16")), "utf16.csv.gz is in UTF-16; write the file in UTF-8$"),
    "utf16.jsonl": ('{"text": "a"}\n'.encode("utf-16"), "utf16.jsonl is in UTF-16; write the file in UTF-8$"),
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
    label = "label" if name == "label.jsonl" else None
    columns = ColumnNames(image=None, text="text", weight="w" if "weight" in name else None, label=label)
    with pytest.raises(DataError, match=message) as caught:
        find_source(str(tmp_path / name), columns)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv", "tar"])
def test_pairs_without_labels_name_the_columns_that_are_not_read(ending: str, tmp_path: Path) -> None:
    row: dict[str, Any] = {"query": "q", "document": "d", "document_id": "7"}
    logged = write_rows(tmp_path / f"log.{ending}", [row | {"seen": "5", "clicked": "0"}])
    (line,) = find_source(str(logged), PAIRS).unread()
    assert line == (
        f"all rows of {logged} count as matching pairs; columns not read: clicked, seen "
        "(if one tells which rows match, name it with --set data.columns.label=NAME)"
    )
    assert find_source(str(logged), replace(PAIRS, label="clicked")).unread() == []
    unlabeled = UnlabeledColumnNames(image=None, query="query", document="document")
    assert find_source(str(logged), unlabeled).unread() == []
    assert find_source(str(write_rows(tmp_path / f"rows.{ending}", [row])), PAIRS).unread() == []
    text = replace(TEXTS, text="query")
    assert find_source(str(logged), text).unread() == []


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "arrow", "tar", *TABLES])
@pytest.mark.parametrize(
    ("labels", "kind"), [([0.5, 1.0], "double"), ([float(2**53), None], "double"), ([[1, 2], [3]], "list<")]
)
def test_a_column_label_of_other_values_is_ignored_unless_it_is_named(
    labels: list[Any], kind: str, ending: str, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / f"rows.{ending}", [{"text": "a", "label": label} for label in labels])
    source = find_source(str(path), TEXTS)
    assert (source.num_rows, source.has_labels, source.columns) == (2, False, TEXTS)
    assert source.ignored_label.startswith(kind)
    assert read(source)["label"] == [-1, -1]
    with pytest.raises(DataError, match="labels must be integers or text, column 'label' of .* holds"):
        find_source(str(path), replace(TEXTS, label="label"))
    pairs = write_rows(
        tmp_path / f"pairs.{ending}", [{"query": "q", "document": "d", "label": [label]} for label in labels]
    )
    with pytest.raises(DataError, match="labels must be integers or text, column 'label' of .* holds"):
        find_source(str(pairs), PAIRS)


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "arrow", "tar", *TABLES])
@pytest.mark.parametrize("columns", [TEXTS, replace(TEXTS, label="label")])
def test_labels_may_be_floats_of_integers(columns: ColumnNames, ending: str, tmp_path: Path) -> None:
    labels = [3.0, None, -1.0, 10.0]
    path = write_rows(tmp_path / f"rows.{ending}", [{"text": "a", "label": label} for label in labels])
    source = find_source(str(path), columns)
    assert (source.has_labels, source.classes, source.ignored_label) == (True, None, "")
    assert read(source)["label"] == [3, -1, -1, 10]


def test_labels_may_be_integers_in_one_file_and_floats_in_another(tmp_path: Path) -> None:
    for name, labels in (("a", [3, 1]), ("b", [3.0, math.nan])):
        pq.write_table(pa.table({"text": ["a", "b"], "label": labels}), tmp_path / f"{name}.parquet")
    source = find_source(str(tmp_path), replace(TEXTS, label="label"))
    assert (source.classes, read(source)["label"]) == (None, [3, 1, 3, -1])
    pq.write_table(pa.table({"text": ["a"], "label": [0.5]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"column 'label' of .*c.parquet holds 0.5; name another"):
        find_source(str(tmp_path), replace(TEXTS, label="label"))
    assert find_source(str(tmp_path), TEXTS).ignored_label == "double"


def test_labels_are_ignored_in_all_files_if_one_has_other_values(tmp_path: Path) -> None:
    for name, label in (("a", 1), ("b", 0.5)):
        write_rows(tmp_path / f"{name}.parquet", [{"text": "a", "label": label}])
    source = find_source(str(tmp_path), TEXTS)
    assert (source.num_rows, source.columns, source.ignored_label) == (2, TEXTS, "double")


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl", "arrow", *TABLES])
@pytest.mark.parametrize("columns", [PAIRS, replace(PAIRS, label="label")])
def test_labels_of_pairs_may_be_whole_floats(columns: ColumnNames, ending: str, tmp_path: Path) -> None:
    rows = [{"query": "q", "document": f"d{label}", "label": label} for label in (1.0, 0.0, None)]
    path = str(write_rows(tmp_path / f"rows.{ending}", rows))
    source = find_source(path, columns)
    (found,) = (rows for fragment in source.fragments for rows in source.read(fragment))
    clicks = labels_as_given(found, source)
    assert [is_clicked(label) for label in clicks[:2]] == [True, False]
    assert clicks[2] is None
    assert read_pairs(path, columns).label.tolist() == [1, 0]


def test_labels_of_pairs_may_be_integers_in_one_file_and_floats_in_another(tmp_path: Path) -> None:
    for name, label in (("a", 1), ("b", 0.0), ("c", 0.5)):
        write_rows(tmp_path / f"{name}.parquet", [{"query": "q", "document": "d", "label": label}])
    source = find_source(str(tmp_path), PAIRS)
    found = [rows for fragment in source.fragments for rows in source.read(fragment)]
    labels = [label for rows in found for label in labels_as_given(rows, source)]
    assert [is_clicked(label) for label in labels[:2]] == [True, False]
    with pytest.raises(InvalidValueError, match="label other than 0 and 1"):
        is_clicked(labels[2])


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "jsonl.gz"])
def test_captioned_images_are_read_from_their_paths(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "photo 1.png"
    path.write_bytes(b"a photo")
    rows = [{"filepath": str(path), "title": "one, of two"}, {"filepath": "gone.png", "title": "two"}]
    file = write_rows(tmp_path / f"photos.{ending}", rows)
    source = find_source(str(file), ColumnNames(image="filepath", caption="title"))
    [found] = [each for fragment in source.fragments for each in source.read(fragment)]
    assert found.values["image"][0] == b"a photo"
    assert str(found.values["image"][1]) == "file not found"
    assert found.values["caption"] == [b"one, of two", b"two"]


@pytest.mark.parametrize("ending", ["parquet", "csv", "tsv.gz", "jsonl", "arrow"])
def test_relative_paths_of_images_count_from_the_folder_of_their_table(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("one", "two"):
        (tmp_path / "tables" / folder / "images").mkdir(parents=True)
        (tmp_path / "tables" / folder / "images" / "a b.png").write_bytes(f"of {folder}".encode())
        paths = ("images/a b.png", "./images/a b.png", "gone.png")
        rows = [{"image": path, "caption": "a"} for path in paths]
        write_rows(tmp_path / "tables" / folder / f"photos.{ending}", rows)
    monkeypatch.chdir(tmp_path)
    of_two = [b"of two", b"of two"]
    for uri, expected in (
        ("tables", [b"of one", b"of one", "file not found", *of_two, "file not found"]),
        (f"tables/two/photos.{ending}", [*of_two, "file not found"]),
        (f"tables/two/{{photos.{ending},photos.{ending}}}", [*of_two, "file not found"]),
    ):
        found = read(find_source(uri, ColumnNames(caption="caption")))["image"]
        assert [each if isinstance(each, bytes) else str(each) for each in found] == expected


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet", "arrow"])
def test_images_that_a_table_names_are_not_listed_as_files_that_are_not_read(
    ending: str, tmp_path: Path
) -> None:
    for name in ("a.png", "b.JPG", "notes.md"):
        (tmp_path / name).write_bytes(b"a photo")
    rows = [{"image": name, "caption": "a"} for name in ("a.png", "b.JPG")]
    file = write_rows(tmp_path / f"metadata.{ending}", rows)
    columns = ColumnNames(caption="caption")
    assert find_source(str(tmp_path), columns).ignored == ((".md", 1),)
    if ending == "parquet":
        structs = [{"bytes": None, "path": row["image"]} for row in rows]
        pq.write_table(pa.table({"image": structs, "caption": ["a", "b"]}), file)
        assert find_source(str(tmp_path), columns).ignored == ((".md", 1),)
        pq.write_table(pa.table({"image": [b"a photo"] * 2, "caption": ["a", "b"]}), file)
        assert find_source(str(tmp_path), columns).ignored == ((".jpg", 1), (".md", 1), (".png", 1))


def test_paths_of_images_in_another_encoding_are_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("image,note\na.png,é\n".encode("cp1252"))
    assert find_source(str(tmp_path / "a.csv")).num_rows == 1  # the note is not read
    (tmp_path / "a.csv").write_bytes("image,note\na.png,1\né.png,2\n".encode("cp1252"))
    with pytest.raises(DataError, match="column 'image' of .*a.csv holds bytes that are not UTF-8; write"):
        find_source(str(tmp_path / "a.csv"))


def test_relative_paths_lead_to_no_other_folder(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"a photo")
    (tmp_path / "below").mkdir()
    os.mkfifo(tmp_path / "below" / "pipe")
    causes = {
        "../a.png": "a path with '..' or a zero byte",
        "b/../../a.png": "a path with '..' or a zero byte",
        "a\0.png": "a path with '..' or a zero byte",
        "pipe": "file not found",
        ".": "file not found",
        "~/a.png": "file not found",
        "http://host/a.png": "an address other than s3://bucket/name",
        "s3://bucket?endpoint_override=other/a.png": "an address other than s3://bucket/name",
        "s3://key:secret@bucket/a.png": "an address other than s3://bucket/name",
    }
    file = write_rows(tmp_path / "below" / "photos.parquet", [{"image": path} for path in causes])
    assert [str(each) for each in read(find_source(str(file)))["image"]] == [*causes.values()]


@pytest.mark.parametrize("path", ["gone.png", "~/a.png", r"C:\a\b.png", "/gone/a.png", "x" * 300 + ".png"])
def test_the_example_of_a_missing_image_shows_the_path_that_was_tried(path: str, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "photos.csv", [{"image": path}])
    [error] = read(find_source(str(file)))["image"]
    stats = ReadStats()
    stats.add_invalid("photos.csv row 0", error)
    assert stats.invalid == {"file not found": 1}
    tried = str(tmp_path / path)
    shown = tried if len(tried) <= 120 else f"{tried[:60]}...{tried[-60:]}"
    assert stats.examples == [f"photos.csv row 0 (file not found: {shown})"]


@pytest.mark.parametrize("start", ["", "data:image/png;base64,"])
@pytest.mark.parametrize("ending", ["jsonl", *TABLES])
def test_images_as_base64_have_a_cause_of_their_own(start: str, ending: str, tmp_path: Path) -> None:
    contents = [
        b"\x89PNG" + bytes(200),
        b"\xff\xd8\xff" + bytes(200),
    ]  # a PNG, and a JPEG: its text begins with /
    values = [start + base64.b64encode(content).decode() for content in contents]
    file = write_rows(tmp_path / f"photos.{ending}", [{"image": value} for value in values])
    found = read(find_source(str(file)))["image"]
    assert [str(each) for each in found] == ["base64 text in place of a path; decode it to bytes"] * 2


@pytest.mark.parametrize("ending", TABLES)
def test_relative_paths_of_tables_with_versions_are_refused(ending: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"a photo")
    rows = [{"image": "a.png"}, {"image": str(tmp_path / "a.png")}]
    error, image = read(find_source(str(write_rows(tmp_path / f"photos.{ending}", rows))))["image"]
    assert (str(error), image) == ("a path that is not absolute", b"a photo")


def test_relative_paths_on_s3_count_from_the_folder_of_their_table(tmp_path: Path, s3_server: str) -> None:
    place = Place(f"s3://{BUCKET}/{tmp_path.name}")
    (place / "images/a b.png").write_bytes(b"a photo")
    file = write_rows(tmp_path / "photos.csv", [{"image": "images/a b.png"}, {"image": "gone"}])
    (place / file.name).write_bytes(file.read_bytes())
    options = f"?endpoint_override={s3_server.removeprefix('http://')}&scheme=http"
    for uri in ((place / file.name).uri, (place / file.name).uri + options):
        image, error = read(find_source(uri))["image"]
        assert (image, str(error)) == (b"a photo", "file not found")


def test_packed_rows_have_the_images_of_relative_paths(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"a photo")
    columns = ColumnNames(image="file", caption="title")
    rows = [{"file": "a.png", "title": "a"}, {"file": "gone.png", "title": "b"}]
    source = find_source(str(write_rows(tmp_path / "photos.csv", rows)), columns)
    (tmp_path / "packed").mkdir()
    pq.write_table(
        pa.concat_tables(_row_tables(source, source.fragments[0], ReadStats())),
        tmp_path / "packed" / "a.parquet",
    )
    found = read(find_source(str(tmp_path / "packed"), columns))
    assert (found["image"], found["caption"]) == ([b"a photo", None], [b"a", b"b"])


def test_lists_and_numbers_as_images_and_long_lines_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    negatives = [{"query": "q", "document": "d", "negatives": '["n"]'}]
    with pytest.raises(DataError, match="negatives must be lists of strings, column 'negatives' of"):
        find_source(str(write_rows(tmp_path / "pairs.csv", negatives)), PAIRS)
    images = write_rows(tmp_path / "images.jsonl", [{"image": 7, "caption": "c"}])
    with pytest.raises(DataError, match="images must be encoded bytes, structs of bytes and path, or paths"):
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
    assert source.unread() == [f"files not read in {tmp_path}: 1 .md"]
    (tmp_path / "pictures.tar").write_bytes(b"")  # would be a format of its own
    assert find_source(str(tmp_path), TEXTS).ignored == ((".md", 1), (".tar", 1))
    write_rows(tmp_path / "e.jsonl", [{"text": "e"}])
    with pytest.raises(DataError, match=r"several formats \(3 csv, 1 jsonl\); give a folder of one"):
        find_source(str(tmp_path), TEXTS)
    write_rows(tmp_path / "f.parquet", [{"text": "f"}])
    source = find_source(str(tmp_path), TEXTS)
    assert (source.kind, source.num_rows) == ("parquet", 1)
    assert dict(source.ignored) == {".csv": 1, ".gz": 1, ".tsv": 1, ".jsonl": 1, ".md": 1, ".tar": 1}
    counts = "1 .csv, 1 .gz, 1 .jsonl, 1 .md, 1 .tar, 1 .tsv (read: 1 .parquet)"
    remedy = "to read the others, put them into a folder of their own"
    assert source.unread() == [f"files not read in {tmp_path}: {counts}; {remedy}"]


def test_images_and_tables_in_one_folder_are_both_counted(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.JPG", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    assert find_source(str(tmp_path)).unread() == [f"files not read in {tmp_path}: 1 .txt"]
    (tmp_path / "labels.csv").write_text("image,label\na.png,1\n")
    (line,) = find_source(str(tmp_path)).unread()
    assert ": 1 .csv, 1 .txt (read: 1 .jpg, 2 .png); to read the others, put them" in line
    write_rows(tmp_path / "rows.parquet", [{"image": b"a"}])
    (line,) = find_source(str(tmp_path)).unread()
    assert ": 1 .csv, 1 .jpg, 2 .png, 1 .txt (read: 1 .parquet); to read the others, put them" in line


@pytest.mark.parametrize("columns", [ColumnNames(), TEXTS, ColumnNames(caption="text")])
def test_parquet_beside_tars_of_the_same_names_is_refused(columns: ColumnNames, tmp_path: Path) -> None:
    rows = [{"image": b"a", "text": "a"}]
    for name in ("0", "1", "2", "3"):  # as img2dataset writes them
        write_rows(tmp_path / "shards" / f"{name}.tar", rows)
        write_rows(tmp_path / "shards" / f"{name}.parquet", rows)
        (tmp_path / "shards" / f"{name}_stats.json").write_text("{}")
    message = (
        "several formats (4 parquet, 4 tar); give a folder of one format, or a pattern of files: {000..127}"
    )
    with pytest.raises(DataError, match=re.escape(message)):
        find_source(str(tmp_path), columns)
    for ending in ("parquet", "tar"):
        assert find_source(f"{tmp_path}/shards/{{0..3}}.{ending}", columns).num_rows == 4


def test_parquet_is_read_beside_images_and_tars_of_other_names(tmp_path: Path) -> None:
    for name in ("preview.png", "data/logo.png", "raw.tar.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    write_rows(tmp_path / "data" / "train-0.parquet", [{"image": b"packed"}])
    source = find_source(str(tmp_path))
    assert (source.kind, source.num_rows, source.ignored) == ("parquet", 1, ((".gz", 1), (".png", 2)))
    write_rows(tmp_path / "data" / "test-0.parquet", [{"image": b"packed"}])
    with pytest.raises(DataError, match="in 2 splits; give --data .*/test-0.parquet or --data "):
        check_no_splits(find_source(str(tmp_path)))


def test_a_folder_of_images_may_have_other_tables_beside_them(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    write_rows(tmp_path / "labels.csv", [{"file": "a.png", "label": 1}])
    source = find_source(str(tmp_path))
    assert (source.kind, source.num_rows, source.ignored) == ("folder", 1, ((".csv", 1),))


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
@pytest.mark.parametrize("named", [{"image": "file_name"}, {"label": "class"}, {"sample_id": "number"}])
def test_named_columns_of_a_folder_of_images_are_in_its_table(
    named: dict[str, str], ending: str, tmp_path: Path
) -> None:
    rows = [{"file_name": f"{name}.png", "class": name, "number": ord(name)} for name in "ab"]
    for row in rows:
        (tmp_path / row["file_name"]).write_bytes(row["class"].encode())
    role, name = next(iter(named.items()))
    images = find_source(str(tmp_path), ColumnNames(**named))  # older runs had such settings
    line = f"no effect on the images of {tmp_path}, which have no columns: data.columns.{role}={name}"
    assert (images.kind, images.num_rows, images.unread()) == ("folder", 2, [line])
    (tmp_path / "all.tar").write_bytes(b"the images, packed")
    write_rows(tmp_path / f"metadata.{ending}", [row | {"image": row["file_name"]} for row in rows])
    source = find_source(str(tmp_path), ColumnNames(**named))
    found = read(source)
    assert (source.kind, found["image"], source.ignored) == (ending, [b"a", b"b"], ((".tar", 1),))
    assert source.classes == (("a", "b") if role == "label" else None)
    assert found["id"] == ([97, 98] if role == "sample_id" else [0, 1])


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_folder_of_tables_of_image_paths_is_a_data_set(ending: str, tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b")):
        rows = [{"image": str(tmp_path / "elsewhere" / "gone.png"), "label": number}]
        (tmp_path / "tables").mkdir(exist_ok=True)
        write_rows(tmp_path / "tables" / f"{name}.{ending}", rows)
    source = find_source(str(tmp_path / "tables"))
    assert (source.kind, source.num_rows, source.has_labels) == (ending, 2, True)
    (tmp_path / "tables" / "a.heic").write_bytes(b"")
    (tmp_path / "tables" / f"b.{ending}").unlink()
    assert find_source(str(tmp_path / "tables")).num_rows == 1
    write_rows(tmp_path / "tables" / f"a.{ending}", [{"file": "a.heic", "label": 1}])
    with pytest.raises(DataError, match=r"no column 'image'.*known endings are .bmp"):
        find_source(str(tmp_path / "tables"))


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl", "arrow", "tar"])
@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("label", PAIRS),
        ("query_id", PAIRS),
        ("document", PAIRS),
        ("clicked", replace(PAIRS, label="clicked")),
        ("w", WEIGHTED),
    ],
)
def test_a_column_that_only_the_names_of_folders_hold_is_refused(
    name: str, columns: ColumnNames, ending: str, tmp_path: Path
) -> None:
    row = {each: "a" for each in ("query", "document") if each != name}
    log = tmp_path / "day=1" / "log"
    for value in (0, 1):
        folder = log / "day=2" / f"{name}={value}"
        folder.mkdir(parents=True)
        write_rows(folder / f"rows.{ending}", [row])
    message = f"{log} is partitioned by {name!r}, which its files do not hold; write it into the files"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        find_source(str(log), columns)
    if name in ("label", "query_id"):
        unread = UnlabeledColumnNames(image=None, text="query")
        assert find_source(str(log), unread).num_rows == 2
        assert find_source(str(log / "day=2" / f"{name}=1"), PAIRS).num_rows == 1
    for file in log.rglob(f"*.{ending}"):
        write_rows(file, [{"query": "a", "document": "a", name: 1}])
    if name != "document":
        assert find_source(str(log), columns).num_rows == 2


def test_tables_in_folders_of_splits_are_refused_unless_a_pattern_names_them(tmp_path: Path) -> None:
    for split in ("train", "Test"):
        write_rows(tmp_path / split / "rows.csv", [{"text": split}])
    with pytest.raises(DataError, match="in 2 splits; give --data .*/Test or --data .*/train$"):
        check_no_splits(find_source(str(tmp_path), TEXTS))
    for name in ("train", "{train,Test}/rows.csv"):
        check_no_splits(find_source(f"{tmp_path}/{name}", TEXTS))
    write_rows(tmp_path / "more" / "rows.csv", [{"text": "more"}])
    with pytest.raises(DataError, match="in 2 splits, beside more; give --data .*/Test or --data .*/train$"):
        check_no_splits(find_source(str(tmp_path), TEXTS))


@pytest.mark.parametrize(
    "files",
    [
        ["test-00000-of-00001.csv", "train-00000-of-00001.csv", "extra.csv"],
        ["test.csv.gz", "train.csv", "extra.csv"],
        ["cats-test.csv", "cats-train.csv", "extra.csv"],
        ["test-00000-of-00001-a09b74b3ef.csv", "train-00000-of-00001-de45c.csv", "extra.csv"],
    ],
)
def test_files_of_splits_beside_another_one_are_refused(files: list[str], tmp_path: Path) -> None:
    for name in files:
        write_rows(tmp_path / name, [{"text": name}])
    given = " or ".join(f"--data {tmp_path}/{name}" for name in files[:2])
    with pytest.raises(DataError, match=f"in 2 splits, beside extra.csv; give {re.escape(given)}$"):
        check_no_splits(find_source(str(tmp_path), TEXTS))
    check_no_splits(find_source(f"{tmp_path}/{{{','.join(files)}}}", TEXTS))


@pytest.mark.parametrize(
    ("files", "given"),
    [
        (["train.csv", "test.csv"], ["test.csv", "train.csv"]),
        (["cats_train.csv", "cats_val.csv"], ["cats_train.csv", "cats_val.csv"]),
        (
            [f"data/train-{number:05}-of-00012.csv" for number in range(12)]
            + ["data/test-00000-of-00001.csv"],
            ["data/test-00000-of-00001.csv", "data/train-{00000..00011}-of-00012.csv"],
        ),
        (
            ["data/train-7.csv", "data/train-9.csv", "data/eval.csv"],
            ["data/eval.csv", "data/{train-7.csv,train-9.csv}"],
        ),
        (
            [f"{split}{year}.csv" for split in ("train", "val") for year in (2014, 2017, 2018, 2020)],
            ["{train2014.csv,train2017.csv,...}", "{val2014.csv,val2017.csv,...}"],
        ),
        (["data/train/a.csv", "data/dev.csv"], ["data/dev.csv", "data/train"]),
        (["split=train/a.csv", "split=test/a.csv"], ["split=test", "split=train"]),
    ],
)
def test_files_that_are_named_by_splits_are_refused(
    files: list[str], given: list[str], tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_rows(tmp_path / name, [{"text": name}])
    addresses = [f"{tmp_path}/{each}" for each in given]
    expected = " or ".join(f"--data {shlex.quote(each)}" for each in addresses)
    with pytest.raises(DataError, match=f"in 2 splits; give {re.escape(expected)}$"):
        check_no_splits(find_source(str(tmp_path), TEXTS))
    for address in addresses if "..." not in expected else []:
        check_no_splits(find_source(address, TEXTS))


def test_splits_of_more_files_than_a_pattern_may_have_are_refused_as_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycl.data.patterns.MAX_FILES", 4)
    for name in ("test", *(f"train-{number}" for number in range(5))):
        write_rows(tmp_path / f"{name}.csv", [{"text": name}])
    with pytest.raises(
        DataError, match="holds a data set in 2 splits; give .*/{train-0.csv,train-1.csv,...}"
    ):
        check_no_splits(find_source(str(tmp_path), TEXTS))


@pytest.mark.parametrize(
    "files",
    [
        ["train-0.csv", "train-1.csv"],
        ["train.csv", "more.csv"],
        ["train/test.csv", "train/a.csv"],
        ["part-test-train.csv", "part-test-dev.csv"],
        ["trained.csv", "tests.csv"],
        ["blood_test.csv", "freight_train.csv", "bus.csv"],
    ],
)
def test_files_of_no_or_one_split_are_one_data_set(files: list[str], tmp_path: Path) -> None:
    for name in files:
        write_rows(tmp_path / name, [{"text": name}])
    check_no_splits(find_source(str(tmp_path), TEXTS))


@pytest.mark.parametrize("ending", ["jsonl", "csv", "tsv"])
def test_empty_parts_have_no_rows(ending: str, tmp_path: Path) -> None:
    (tmp_path / f"a.{ending}").write_bytes(b"")
    write_rows(tmp_path / f"b.{ending}", [{"text": "b"}])
    assert read(find_source(str(tmp_path), TEXTS))["text"] == [b"b"]


@pytest.mark.parametrize("ending", ["jsonl", "tar"])
def test_labels_may_be_missing_in_all_rows_of_a_file(ending: str, tmp_path: Path) -> None:
    write_rows(tmp_path / f"a.{ending}", [{"text": "a"}])
    write_rows(tmp_path / f"b.{ending}", [{"text": "b", "label": "cat"}, {"text": "c"}])
    source = find_source(str(tmp_path), TEXTS)
    assert source.classes == ("cat",)
    assert decoded(source)["label"].to_pylist() == [-1, 0, -1]
    assert read(source)["text"] == [b"a", b"b", b"c"]


def test_labels_and_ids_may_be_missing_in_all_rows_of_a_csv_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("query,document,label,query_id\nq,d,,\n")
    source = find_source(str(tmp_path / "a.csv"), PAIRS)
    assert (source.classes, read(source)["label"], read(source)["query_id"]) == ((), [-1], [None])
    for label, classes in (("7", None), ("7.0", ("7.0",)), ("x", ("x",))):
        (tmp_path / "b.csv").write_text(f"query,document,label,query_id\nq,d,{label},{label}\n")
        source = find_source(str(tmp_path), PAIRS)
        given = [each for fragment in source.fragments for each in source.read(fragment)]
        labels = [label for rows in given for label in labels_as_given(rows, source)]
        assert (source.classes, labels[1]) == (classes, classes[0] if classes else 7)
        assert read(source)["query_id"] == [None, b"x" if label == "x" else 7]


def test_numbers_and_texts_as_labels_of_typed_files_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["c"], "label": pa.nulls(1)}), tmp_path / "0.parquet")
    for number, numbers, texts in ((1, *"ab"), (1, *"ba"), (1.0, *"ab"), (1.0, *"ba")):
        for name, label in {numbers: number, texts: "x"}.items():
            pq.write_table(pa.table({"text": [name], "label": [label]}), tmp_path / f"{name}.parquet")
        message = rf"labels are numbers in .*{numbers}.parquet and string in .*{texts}.parquet; give"
        with pytest.raises(DataError, match=message):
            find_source(str(tmp_path), TEXTS)


def test_a_file_without_labels_may_have_the_type_of_floats(tmp_path: Path) -> None:
    for name, label in (("a", ["x", "y"]), ("b", [float("nan")] * 2)):
        pq.write_table(pa.table({"text": [name, "t"], "label": label}), tmp_path / f"{name}.parquet")
    source = find_source(str(tmp_path), TEXTS)
    assert (source.classes, read(source)["label"]) == (("x", "y"), [0, 1, -1, -1])


def test_grades_may_be_numbers_in_one_file_and_texts_in_another(tmp_path: Path) -> None:
    for name, label in (("a", [1.0, 0.0]), ("b", ["1", "0"])):
        columns = {"query": [f"q{name}", "r"], "document": [f"d{name}", "e"], "label": label}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    assert find_source(str(tmp_path), PAIRS).classes == ("0", "0.0", "1", "1.0")


@pytest.mark.parametrize("kind", ["decimal32", "decimal64"])
def test_labels_of_small_decimals_are_ignored_with_a_line(kind: str, tmp_path: Path) -> None:
    column = pa.array([1, 2], getattr(pa, kind)(5))
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink:
        table = pa.table({"text": ["a", "b"], "label": column})
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    source = find_source(str(tmp_path), TEXTS)
    assert (source.has_labels, source.ignored_label) == (False, f"{kind}(5, 0)")


def test_a_weight_that_is_no_number_is_refused_with_its_row_and_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,w\na,1\nb,NA\n")
    message = r"row 1: CSV conversion error to double: invalid value 'NA'; give a number in each row of 'w'$"
    with pytest.raises(DataError, match=message):
        find_source(str(tmp_path / "a.csv"), ColumnNames(image=None, text="text", weight="w"))


def test_empty_lines_before_the_header_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\n\r\ntext,n\na,1\n")
    write_rows(tmp_path / "b.csv", [{"text": "b", "n": 2}])
    assert read(find_source(str(tmp_path), TEXTS))["text"] == [b"a", b"b"]


def test_ids_of_rows_in_some_files_alone_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": "a"}])
    write_rows(tmp_path / "b.jsonl", [{"text": "b", "sample_id": 7}])
    with pytest.raises(DataError, match="differ in their label or id columns"):
        find_source(str(tmp_path), TEXTS)


def test_a_missing_id_is_found_by_file_and_row(tmp_path: Path) -> None:
    ids = [*range(4_999), None]
    pq.write_table(pa.table({"text": ["a"] * 5_000, "sample_id": ids}), tmp_path / "a.parquet")
    source = find_source(str(tmp_path), TEXTS)
    for use in (lambda: read(source), lambda: source.sample_ids(source.fragments)):
        with pytest.raises(DataError, match="a.parquet row 4999 has no id: give every row its own id"):
            use()


@pytest.mark.parametrize("ending", ["csv", "jsonl.gz", "arrow", "tar", *TABLES])
@pytest.mark.usefixtures("small_parts")
def test_a_row_is_found_by_its_number(ending: str, tmp_path: Path) -> None:
    rows = [{"text": text} for text in invented_texts(30)]
    source = find_source(str(write_rows(tmp_path / f"rows.{ending}", rows)), TEXTS)
    firsts = np.array([fragment.first_id for fragment in source.fragments])
    for row in (0, 6, 7, 29):
        fragment = source.fragments[int(np.searchsorted(firsts, row, side="right")) - 1]
        (found,) = source.read(_one_row(fragment, row - fragment.first_id))
        assert (found.sample_id.tolist(), found.values["text"]) == ([row], [rows[row]["text"].encode()])
        assert found.where == [f"{fragment.place.name} row {row}"]


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
    source = find_source(str(tmp_path / "rows"), WEIGHTED)
    parts = [list(_row_tables(source, fragment, ReadStats())) for fragment in source.fragments]
    # In any order, as tasks write them.
    pq.write_table(pa.concat_tables(table for part in parts[::-1] for table in part), tmp_path / "a.parquet")
    expected, found = read(source), read(find_source(str(tmp_path / "a.parquet"), WEIGHTED))
    assert sorted(found["id"]) == expected["id"] == list(range(120))
    order = np.argsort(found["id"])
    assert [[found[name][row] for row in order] for name in expected if name != "row"] == [
        expected[name] for name in expected if name != "row"
    ]
    with pytest.raises(DataError, match="holds no tars, CSV or JSONL files"):
        pack_rows(str(tmp_path / "a.parquet"), str(tmp_path / "again"), columns=WEIGHTED)


@pytest.mark.parametrize("ending", ["csv", "jsonl.gz", "arrow", "tar", *TABLES])
def test_the_doctor_and_commands_on_trained_runs_read_the_same_rows(ending: str, tmp_path: Path) -> None:
    rows = pairs()
    file, parquet = (str(write_rows(tmp_path / f"pairs.{each}", rows)) for each in (ending, "parquet"))
    source, config = _find(file, None, None)
    formats = build_formats(config, vocabulary().tokenizer, source.columns)
    sample = sample_rows(source, source.fragments[0], formats, 40)
    invalid = [row for row in sample.rows if row.error is not None]
    assert (len(sample.rows), len(invalid)) == (40, 3)
    assert (invalid[0].where, invalid[0].error) == (f"{source.fragments[0].place.name} row 6", "empty text")
    described = _describe(source, config)
    assert (
        f"60 rows with labels, pairs, {source.kind} in 1 fragment" in described and ", 0 B" not in described
    )
    found, expected = (read_pairs(each, PAIRS) for each in (file, parquet))
    assert (found.by_role, found.label.tolist()) == (expected.by_role, expected.label.tolist())
    assert found.num_invalid == expected.num_invalid == 6


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl.gz", "arrow", "tar.gz", *TABLES])
def test_equivalent_texts_are_gathered_from_each_format(ending: str, tmp_path: Path) -> None:
    rows = [{"text": f"t{row}", "about": ["x", "y", None][row % 3]} for row in range(9)]
    write_rows(tmp_path / f"rows.{ending}", rows)
    gather_texts(str(tmp_path / f"rows.{ending}"), str(tmp_path / "out.parquet"), group="about")
    assert pq.read_table(tmp_path / "out.parquet")["text"].to_pylist() == [
        ["t0", "t3", "t6"],
        ["t1", "t4", "t7"],
    ]


@pytest.mark.parametrize("ending", TABLES)
def test_a_source_keeps_the_version_that_it_found_and_another_version_is_noticed(
    ending: str, tmp_path: Path
) -> None:
    rows = [{"text": text, "label": 0} for text in invented_texts(30)]
    place = write_rows(tmp_path / f"rows.{ending}", rows)
    source = find_source(str(place), TEXTS)
    before, table = read(source), pa.Table.from_pylist([{"text": "changed", "label": 0}])
    if ending == "delta":
        DeltaTable(place).delete(f"text = '{rows[0]['text']}'")
        write_deltalake(place, table, mode="append")
    elif ending == "iceberg":
        iceberg = open_table(place)
        iceberg.delete(f"text = '{rows[0]['text']}'")
        iceberg.append(table)
    else:
        import lance

        lance.dataset(place).delete(f"text = '{rows[0]['text']}'")
        lance.write_dataset(table, place, mode="append")
    newest = find_source(str(place), TEXTS)
    _open_version.cache_clear()  # as in another process
    assert read(source) == before
    assert sorted(read(newest)["text"]) == sorted([*before["text"][1:], b"changed"])
    assert newest.num_rows == source.num_rows == 30
    assert fingerprint(decoded(newest)) != fingerprint(decoded(source))


def open_table(place: Path) -> Table:
    """Return an Iceberg table as of its newest metadata."""
    newest = max((place / "metadata").glob("*.metadata.json"))
    found = StaticTable.from_metadata(f"file://{newest}")
    return Table(("rows",), found.metadata, found.metadata_location, found.io, IcebergFolder("tests"))


def test_the_files_of_a_delta_table_have_the_names_in_its_log(tmp_path: Path) -> None:
    rows = [{"text": f"t{row}", "day": day} for row, day in enumerate(["1 May", "100%", "a/b", "ä"])]
    place = tmp_path / "by day"
    write_deltalake(place, pa.Table.from_pylist(rows), partition_by=["day"])
    assert sorted(read(find_source(str(place), TEXTS))["text"]) == [b"t0", b"t1", b"t2", b"t3"]
    with pytest.raises(DataError, match="by day is partitioned by 'day', .*data.columns.text=NAME") as caught:
        find_source(str(place), ColumnNames(image=None, text="day"))
    assert "\n" not in str(caught.value)
    DeltaTable(place).create_checkpoint()
    (place / "_delta_log" / f"{0:020}.json").unlink()
    assert find_source(str(place), TEXTS).num_rows == 4


def commit(place: Path, feature: str, *, settings: dict[str, str] | None = None, **changes: Any) -> None:
    """Add a version to a Delta table in which a feature is used, and its file is described otherwise."""
    log = place / "_delta_log"
    lines = [json.loads(line) for line in (log / f"{0:020}.json").read_text().splitlines()]
    found = {name: value for line in lines for name, value in line.items()}
    features = {"readerFeatures": [feature], "writerFeatures": [feature]}
    actions = [{"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}}]
    actions.append({"metaData": found["metaData"] | {"configuration": settings or {}}})
    if changes:
        actions.append({"remove": {"path": found["add"]["path"], "deletionTimestamp": 1, "dataChange": True}})
        actions.append({"add": found["add"] | changes})
    (log / f"{1:020}.json").write_text("\n".join(map(json.dumps, actions)))


# Rows 3, 4, 7, 11, 18 and 29, as in the documentation of the format.
VECTOR = {"storageType": "i", "pathOrInlineDv": "^Bg9^0rr910000000000iXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L", "sizeInBytes": 44, "cardinality": 6}  # fmt: skip


def test_a_delta_table_is_not_taken_for_one_with_a_decoded_name(tmp_path: Path) -> None:
    write_rows(tmp_path / "per cent.delta", [{"text": "other"}])
    place = write_rows(tmp_path / "per%20cent.delta", [{"text": "a"}])
    with pytest.raises(DataError, match="per%20cent.delta has % in its path, .*; rename the folder"):
        find_source(str(place), TEXTS)


def test_a_delta_table_whose_files_would_be_read_wrongly_is_refused_in_one_line(tmp_path: Path) -> None:
    def refused(name: str, *given: Any, **changes: Any) -> str:
        place = write_rows(tmp_path / f"{name}.delta", [{"text": f"t{row}"} for row in range(40)])
        if given:
            commit(place, *given, **changes)
        else:
            (place / "_delta_log" / f"{0:020}.json").write_text("{broken")
        with pytest.raises(DataError, match=f"{name}.delta") as caught:
            find_source(str(place), TEXTS)
        assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)
        return str(caught.value)

    assert "deletion vectors, whose files still hold deleted rows; rewrite" in refused(
        "rows", "deletionVectors", deletionVector=VECTOR
    )
    lost = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "offset": 4, "sizeInBytes": 40, "cardinality": 6}  # fmt: skip
    assert "cannot read the deletion vectors" in refused("lost", "deletionVectors", deletionVector=lost)
    assert "is a Delta table with variantType, which raycl does not read" in refused("other", "variantType")
    assert "a file elsewhere, s3://other/a.parquet; copy it" in refused(
        "clone", "v2Checkpoint", path="s3://other/a.parquet"
    )
    assert "cannot read" in refused("unknown", "fromTheFuture")
    assert "restore its folder _delta_log" in refused("broken")
    physical = {"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "col-1"}
    place = write_rows(tmp_path / "mapped.delta", [{"text": "a"}])
    commit(place, "columnMapping", settings={"delta.columnMapping.mode": "name"})
    log = place / "_delta_log" / f"{1:020}.json"
    log.write_text(
        log.read_text().replace(
            '\\"metadata\\":{}', json.dumps({"metadata": physical}).replace('"', '\\"')[1:-1]
        )
    )
    with pytest.raises(DataError, match="with column mapping, whose files have other column names; copy it"):
        find_source(str(place), TEXTS)
    place = write_rows(tmp_path / "unused.delta", [{"text": "a"}])
    commit(place, "deletionVectors")
    assert find_source(str(place), TEXTS).num_rows == 1


def test_columns_of_an_iceberg_table_are_those_of_the_same_id(tmp_path: Path) -> None:
    rows = [{"text": "new", "old": "old", "label": 1, "n": 2}]
    place = write_rows(tmp_path / "rows.iceberg", rows)
    with open_table(place).update_schema() as update:
        update.rename_column("text", "spare").rename_column("old", "text")
    with pytest.raises(
        DataError, match=r"00000.*parquet .* other columns of the names 'text'; rewrite"
    ) as caught:
        find_source(str(place), TEXTS)
    assert "\n" not in str(caught.value)
    open_table(place).append(pa.table({"spare": ["s"], "text": ["t"], "label": [1], "n": [2]}))
    with pytest.raises(DataError, match="other columns of the names 'text'"):
        find_source(str(place), TEXTS)
    first = sorted((place / "metadata").glob("*.metadata.json"))[1]
    pinned = find_source(str(first), TEXTS)
    assert (pinned.uri, pinned.kind, read(pinned)["text"]) == (str(first), "iceberg", [b"new"])
    place = write_rows(tmp_path / "added.iceberg", [{"text": "a"}])
    with open_table(place).update_schema() as update:
        update.add_column("label", LongType())
        update.add_column("unused", LongType())
    with pytest.raises(DataError, match="other columns of the names 'label'"):
        find_source(str(place), TEXTS)
    place = write_rows(tmp_path / "unused.iceberg", [{"text": "a", "n": 1}])
    with open_table(place).update_schema() as update:
        update.rename_column("n", "m")
    assert find_source(str(place), TEXTS).num_rows == 1


def test_files_that_were_added_to_an_iceberg_table_are_read_by_its_mapping_of_names(tmp_path: Path) -> None:
    place = tmp_path / "rows.iceberg"
    table = IcebergFolder("tests").create(place, pa.schema([("text", pa.string()), ("n", pa.int64())]))
    write_rows(place / "data" / "a.parquet", [{"text": "a", "n": 1}])
    table.add_files([f"file://{place}/data/a.parquet"])
    assert read(find_source(str(place), TEXTS))["text"] == [b"a"]
    with open_table(place).update_schema() as update:
        update.rename_column("text", "spare")
    with pytest.raises(DataError, match="a.parquet was written when .* other columns of the names 'spare'"):
        find_source(str(place), ColumnNames(image=None, text="spare"))


def test_the_newest_metadata_of_an_iceberg_table_are_found(tmp_path: Path) -> None:
    place = write_rows(tmp_path / "rows.iceberg", [{"text": "a"}])
    folder = place / "metadata"
    old, new = sorted(folder.glob("*.metadata.json"))
    for address in (place, folder, new):
        assert find_source(str(address), TEXTS).num_rows == 1
    with pytest.raises(DataError, match="holds no rows"):
        find_source(str(old), TEXTS)
    (folder / "version-hint.text").write_text("0\n")  # as an old one
    assert find_source(str(place), TEXTS).num_rows == 1
    other = folder / new.name.replace("00001-", "00001-f")
    shutil.copy(new, other)
    with pytest.raises(DataError, match="2 files with the highest number, .*; give the one that") as caught:
        find_source(str(place), TEXTS)
    assert new.name in str(caught.value) and other.name in str(caught.value)
    for hint in (new.name, new.name.removesuffix(".metadata.json")):
        (folder / "version-hint.text").write_text(hint)
        assert find_source(str(place), TEXTS).num_rows == 1
    for each in (old, other, folder / "version-hint.text"):
        each.unlink()
    (folder / "v2.gz.metadata.json").write_bytes(gzip.compress(new.read_bytes()))
    assert find_source(str(place), TEXTS).num_rows == 1
    (folder / "v2.gz.metadata.json").rename(folder / "v2.metadata.json.gz")  # of older writers
    assert find_source(str(place), TEXTS).num_rows == 1
    assert find_source(str(folder / "v2.metadata.json.gz"), TEXTS).num_rows == 1
    (folder / "v2.metadata.json.gz").unlink()
    new.rename(tmp_path / new.name)
    with pytest.raises(DataError, match="has no metadata file with a number, .*; give the metadata file"):
        find_source(str(place), TEXTS)  # its parquet files may hold deleted rows
    (tmp_path / new.name).rename(new)
    # Properties of a table may name a class that pyiceberg would import to read files.
    named = json.loads(new.read_text()) | {"properties": {"py-io-impl": "tests.no_such_module.FileIO"}}
    (folder / "v3.metadata.json").write_text(json.dumps(named))
    assert find_source(str(place), TEXTS).num_rows == 1
    (folder / "v10.metadata.json").write_text("{broken")
    with pytest.raises(DataError, match="cannot read .*v10.metadata.json of an Iceberg table") as caught:
        find_source(str(place), TEXTS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"content": DataFileContent.POSITION_DELETES}, "with delete files, beside data files that still hold deleted rows"),
        ({"content": DataFileContent.EQUALITY_DELETES}, "with delete files"),
        ({"file_format": FileFormat.ORC}, "with ORC files; write them as parquet"),
        ({"file_path": "s3://other/a.parquet"}, "with a file elsewhere, s3://other/a.parquet; copy it"),
        ({"file_path": "{}/../a.parquet"}, r"'../a.parquet' would lead out of"),
    ],
)  # fmt: skip
def test_an_iceberg_table_with_other_files_than_its_parquet_is_refused_in_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    place = write_rows(tmp_path / "rows.iceberg", [{"text": "a"}])
    table = open_table(place)
    changes = {
        name: value.format(table.location()) if name == "file_path" else value
        for name, value in changes.items()
    }
    file = {"content": DataFileContent.DATA, "file_path": f"{table.location()}/data/b.parquet"} | changes
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as append:
        entry = {
            "file_format": FileFormat.PARQUET,
            "partition": Record(),
            "record_count": 1,
            "file_size_in_bytes": 1,
        }
        append.append_data_file(DataFile.from_args(**entry | file))
    with pytest.raises((DataError, StorageError), match=message) as caught:
        find_source(str(place), TEXTS)
    assert "\n" not in str(caught.value)


def test_images_with_metadata_beside_them_are_no_table(tmp_path: Path) -> None:
    for name in ("images/1.png", "metadata/1.metadata.json", "1.metadata.json", "_versions/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert find_source(str(tmp_path)).kind == "folder"
    shutil.rmtree(tmp_path / "metadata")
    (tmp_path / "metadata").write_bytes(b"")
    assert find_source(str(tmp_path)).kind == "folder"


def test_folders_with_names_like_a_tables_are_no_tables(tmp_path: Path) -> None:
    for name in ("rows.lance", "metadata"):
        write_rows(tmp_path / name / "a.parquet", [{"text": "a"}])
        assert find_source(str(tmp_path / name), TEXTS).kind == "parquet"


@pytest.mark.parametrize("ending", TABLES)
def test_a_table_that_cannot_be_read_is_refused_in_one_line(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = write_rows(tmp_path / f"rows.{ending}", [{"text": "a"}])
    message = f"rows.{ending} has no column 'title'; it has text: name the right one with --set"
    with pytest.raises(DataError, match=message):
        find_source(str(place), ColumnNames(image=None, text="title"))
    module = {"delta": "deltalake", "iceberg": "pyiceberg.serializers", "lance": "lance"}[ending]
    package = module.partition(".")[0]
    with monkeypatch.context() as patch, pytest.raises(DataError) as caught:
        patch.setitem(sys.modules, module, None)
        find_source(str(place), TEXTS)
    assert (
        f"needs the module {package}, and that is not installed here; pip install 'raycl[{ending}]'"
        in str(caught.value)
    )
    for file in place.rglob("*"):
        if file.suffix in (".parquet", ".lance"):
            file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises((DataError, StorageError), match=f"rows.{ending}") as caught:
        read(find_source(str(place), TEXTS))
    assert "\n" not in str(caught.value)
    if ending == "lance":
        (manifest,) = place.rglob("*.manifest")
        content = bytearray(manifest.read_bytes())
        start = int.from_bytes(content[-16:-8], "little")
        content[start : start + 4] = (2_000).to_bytes(4, "little")  # its length; Lance then panics
        manifest.write_bytes(content)
        with pytest.raises(
            DataError, match="rows.lance as a Lance table: range end .*; write the table again"
        ) as caught:
            find_source(str(place), TEXTS)
        assert "\n" not in str(caught.value)
    for file in place.rglob("*"):
        if file.suffix in (".avro", ".manifest", ".json"):
            file.unlink() if file.suffix == ".avro" else file.write_bytes(b"")
    with pytest.raises((DataError, StorageError), match=f"rows.{ending}") as caught:
        find_source(str(place), TEXTS)
    assert "\n" not in str(caught.value) and ".rs:" not in str(caught.value)


@pytest.mark.skipif(not find_spec("lance"), reason="pylance is not installed")
def test_a_lance_table_that_replaced_another_is_not_taken_for_it(tmp_path: Path) -> None:
    place = tmp_path / "rows.lance"
    old = find_source(str(write_rows(place, [{"text": "a"}, {"text": "b"}])), TEXTS)
    assert read(old)["text"] == [b"a", b"b"]
    new = find_source(str(write_rows(place, [{"text": "c"}, {"text": "d"}])), TEXTS)
    assert read(new)["text"] == [b"c", b"d"]
    with pytest.raises(
        DataError, match="rows.lance/version-1/0-.* no longer exists; do not replace"
    ) as caught:
        read(old)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not find_spec("lance"), reason="pylance is not installed")
@pytest.mark.usefixtures("small_parts")
def test_blobs_and_deleted_rows_of_a_lance_table_are_read_as_they_are(tmp_path: Path) -> None:
    import lance

    rows = images()
    kept = [row for number, row in enumerate(rows) if number % 3]
    table = pa.Table.from_pylist([{**row, "number": number} for number, row in enumerate(rows)])
    expected = find_source(str(write_rows(tmp_path / "rows.parquet", kept)), ColumnNames(caption="caption"))
    blob = pa.field("image", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    for version, field in (("2.1", blob), ("2.2", lance.blob_field("image"))):
        place = tmp_path / f"{version}.lance"
        column = table["image"].combine_chunks().cast(pa.large_binary())
        if version == "2.2":
            column = lance.blob_array(column.to_pylist())
        lance.write_dataset(table.set_column(0, field, column), place, data_storage_version=version)
        lance.dataset(place).delete("number % 3 = 0")
        assert_same(find_source(str(place), ColumnNames(caption="caption")), expected)
