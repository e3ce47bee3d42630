"""Data sets prepared once: texts gathered into rows, and invalid commands of jobs/prepare.py."""

import runpy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycl.data.columns import ColumnNames
from raycl.data.discovery import find_source
from raycl.data.images import ImageFormat
from raycl.data.in_memory import pixels_of
from raycl.data.read_stats import ReadStats
from raycl.data.sources import Source
from raycl.errors import ConfigError, DataError, RayclError
from raycl.evaluation import sts
from raycl.inference.reading import read_images, read_pairs
from raycl.preparation import (
    _image_tables,
    gather_texts,
    group_pairs,
    make_tokenizer,
    pack_images,
    pack_rows,
)
from raycl.training.data_set import read_vocabulary
from tests.images import encode
from tests.table_files import write_rows
from tests.texts import invented_texts

ROOT = Path(__file__).parent.parent

LOG = ColumnNames(image=None, query="query", document="document", label="label")


def rows_gathered_from(folder: Path, groups: pa.Array, texts: pa.Array) -> tuple[list[list[str]], int]:
    """Return the rows gathered from these columns, and the number of invalid texts."""
    data, output = folder / "texts.parquet", folder / "groups.parquet"
    pq.write_table(pa.table({"text": texts, "about": groups}), data)
    found = gather_texts(str(data), str(output), group="about")
    return pq.read_table(output)["text"].to_pylist(), found.num_invalid


@pytest.mark.parametrize(
    "groups",
    [
        pa.array([1, 2, None, 1, None], pa.int64()),
        pa.array([1.0, 2.0, float("nan"), 1.0, float("nan")]),
        pa.array(["1", "2", "", "1", ""]),
        pa.array(["1", "2", None, "1", ""]).dictionary_encode(),
    ],
    ids=["none", "nan", "empty", "dictionary"],
)
def test_texts_without_a_group_form_no_row(groups: pa.Array, tmp_path: Path) -> None:
    assert rows_gathered_from(tmp_path, groups, pa.array(["a", "b", "c", "d", "e"])) == ([["a", "d"]], 0)


def test_texts_without_a_group_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, output = tmp_path / "texts.parquet", tmp_path / "groups.parquet"
    pq.write_table(pa.table({"text": ["a", "b", "c"], "about": [1, 1, None]}), data)
    runpy.run_path(str(ROOT / "jobs" / "prepare.py"))["groups"](str(data), str(output), group="about")
    assert capsys.readouterr().out.splitlines() == [
        f"1 rows of 2 texts in {output}",
        "skipped: 0 texts without a partner, 1 without a group; invalid: 0",
    ]


def test_groups_that_may_have_lost_digits_as_floats_are_refused(tmp_path: Path) -> None:
    groups = pa.array([2.0**53, 2.0**53 + 1, None])  # as pandas writes integers beside a missing one
    with pytest.raises(DataError, match="has an id of 2\\^53 or more as float in 'about'; give groups as"):
        rows_gathered_from(tmp_path, groups, pa.array(["a", "b", "c"]))


@pytest.mark.parametrize("group", [b"x", b"caf\xe9"])
def test_a_text_that_is_not_utf8_is_counted_and_the_others_are_gathered(group: bytes, tmp_path: Path) -> None:
    texts = pa.array([b"a", b"caf\xe9", b"c", None, b" "], pa.binary()).view(pa.string())
    groups = pa.array([group] * 5, pa.binary()).view(pa.string())
    assert rows_gathered_from(tmp_path, groups, texts) == ([["a", "c"]], 3)


def test_a_group_without_a_valid_text_has_no_text_alone(tmp_path: Path) -> None:
    data = {"text": ["a", "b", "c", "d", "", None], "about": [1, 1, 2, 3, 4, 5]}
    pq.write_table(pa.table(data), tmp_path / "texts.parquet")
    found = gather_texts(str(tmp_path / "texts.parquet"), str(tmp_path / "groups.parquet"), group="about")
    assert (found.num_rows, found.num_texts, found.num_alone, found.num_invalid) == (1, 2, 2, 2)


def test_texts_are_gathered_beside_labels_of_any_type(tmp_path: Path) -> None:
    rows = {"text": ["a", "b"], "about": [1, 1], "label": [0.5, 4.0]}
    pq.write_table(pa.table(rows), tmp_path / "texts.parquet")
    found = gather_texts(str(tmp_path / "texts.parquet"), str(tmp_path / "groups.parquet"), group="about")
    assert found.num_texts == 2


def packed(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a packed folder of images."""
    source = find_source(str(folder))
    return [
        row
        for fragment in source.fragments
        for table in _image_tables(source, fragment, ReadStats())
        for row in table.to_pylist()
    ]


def test_packed_images_have_the_names_of_their_classes(tmp_path: Path) -> None:
    for name in ("a/1.png", "c/1.png", "c/2.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    rows = packed(tmp_path)
    assert [(row["path"], row["label"]) for row in rows] == [
        ("a/1.png", "a"),
        ("c/1.png", "c"),
        ("c/2.png", "c"),
    ]
    assert [row["image"] for row in rows] == [row["path"].encode() for row in rows]


def test_a_file_that_cannot_be_read_is_packed_as_a_missing_image(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(b"1")
    (tmp_path / "2.png").write_bytes(b"2")
    source = find_source(str(tmp_path))
    (tmp_path / "2.png").unlink()
    (fragment,) = source.fragments
    stats = ReadStats()
    (table,) = _image_tables(source, fragment, stats)
    assert table["image"].to_pylist() == [b"1", None]
    assert (stats.num_rows, stats.invalid) == (2, {"file not found": 1})
    assert stats.examples == ["2.png (file not found)"]


def test_images_of_paths_that_cannot_be_read_are_counted_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packed: list[Any] = []

    def write_here(source: Source, tables: Any, *_: Any, **__: Any) -> ReadStats:
        stats = ReadStats()
        for fragment in source.fragments:
            for table in tables(source, fragment, stats):
                packed.extend(table["image"].to_pylist())
        return stats

    monkeypatch.setattr("raycl.preparation._write", write_here)
    (tmp_path / "1.png").write_bytes(b"1")
    data = tmp_path / "rows.tsv"
    data.write_text("image\n1.png\ngone.png\n../1.png\n1.png\nlost.png\n")
    prepare = runpy.run_path(str(ROOT / "jobs" / "prepare.py"))
    prepare["rows"](str(data), str(tmp_path / "rows"), columns="image")
    assert packed == [b"1", None, None, b"1", None]
    out, err = capsys.readouterr()
    assert out == f"5 rows packed into {tmp_path / 'rows'}\n"
    assert err == (
        "3 of 5 images cannot be read and are null: 1 a path with '..' or a zero byte, 2 file not found; for example "
        f"rows.tsv row 1 (file not found: {tmp_path}/gone.png); rows.tsv row 2 (a path with '..' or a zero byte); "
        f"rows.tsv row 4 (file not found: {tmp_path}/lost.png)\n"
    )


def refused(kind: type[RayclError], *arguments: object) -> str:
    """Return the error line of a refused command."""
    app: Any = runpy.run_path(str(ROOT / "jobs" / "prepare.py"))["app"]
    with pytest.raises(kind) as caught:
        app([*map(str, arguments)], standalone_mode=False)
    (line,) = str(caught.value).splitlines()
    return line


def test_rows_of_images_alone_are_refused_also_with_columns_of_labels(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(b"1")
    command = ("rows", "--data", tmp_path, "--output", tmp_path.with_name("rows"), "--columns", "image,label")
    assert refused(DataError, *command) == (
        f"{tmp_path} holds no tars, CSV or JSONL files; give some, or train on it as it is"
    )


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """A data set with both labels and lists of negatives."""
    path = tmp_path / "pairs.parquet"
    rows = {"query": ["q"], "document": ["d"], "label": [1], "negatives": [["n"]]}
    pq.write_table(pa.table(rows), path)
    return path


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--columns", "foo"], "--columns: no texts have the role 'foo'; give some of text, caption, "),
        (
            ["--columns", "query,query_id"],
            "--columns: no texts have the role 'query_id'; give some of text, ",
        ),
        (["--columns", ""], "--columns: no texts have the role ''; "),
        (
            ["--columns", "query", "--vocabulary-size", "100"],
            "text.vocabulary_size: input should be greater than or equal to 261, got 100",
        ),
        (
            ["--columns", "query", "--num-texts", "0"],
            "text.tokenizer_train_size: input should be greater than or equal to 1, got 0",
        ),
    ],
    ids=["unknown", "an id", "nothing", "small", "no texts"],
)
def test_invalid_tokenizer_settings_are_refused_in_one_line(
    flags: list[str], line: str, pairs: Path, tmp_path: Path
) -> None:
    output = tmp_path / "tokenizer.json"
    assert refused(ConfigError, "tokenizer", "--data", pairs, "--output", output, *flags).startswith(line)
    assert not output.exists()


@pytest.mark.parametrize(
    ("command", "flags", "remedy"),
    [
        ("rows", {"columns": "query,document=text"}, "--columns document=NAME"),
        ("tokenizer", {"columns": "text"}, "--columns text=NAME"),
        ("groups", {"group": "query", "text": "sentence"}, "--text NAME"),
        ("groups", {"group": "about", "text": "query"}, "--group NAME"),
    ],
)
def test_a_missing_column_is_refused_with_a_flag_that_the_command_has(
    command: str, flags: dict[str, str], remedy: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"query": ["a"], "document": ["b"]}), tmp_path / "pairs.parquet")
    prepare = runpy.run_path(str(ROOT / "jobs" / "prepare.py"))
    with pytest.raises(DataError, match=f"name the right one with {remedy}$"):
        prepare[command](str(tmp_path / "pairs.parquet"), str(tmp_path / "new.parquet"), **flags)


@pytest.mark.parametrize("command", ["images", "rows", "tokenizer", "pairs", "groups"])
def test_a_second_data_set_or_list_of_columns_is_refused(command: str) -> None:
    said = refused(ConfigError, command, "--data", "a", "--data", "b")
    assert said == f"--data is given 2 times, and {command} takes one data set; run it once for each"
    if command in ("rows", "tokenizer"):
        said = refused(ConfigError, command, "--columns", "query", "--columns", "document")
        assert said == "--columns is given 2 times, and only one would count; separate the columns by commas"


@pytest.mark.parametrize(
    "command",
    ["images", "rows", "pairs", "groups --group about"],
)
def test_an_output_inside_the_data_is_refused(command: str, pairs: Path) -> None:
    name, *flags = command.split()
    output = pairs.parent / "cat" / "new"
    said = refused(ConfigError, name, "--data", pairs.parent, "--output", output, *flags)
    assert said.startswith(f"the output {output} lies in the data at {pairs.parent}, which could not be read")
    assert not output.parent.exists()


def test_negatives_beside_labels_are_refused_as_in_a_run(pairs: Path, tmp_path: Path) -> None:
    said = refused(DataError, "pairs", "--data", pairs, "--output", tmp_path / "grouped")
    assert said.startswith(
        "the dataset has labels ('label') and lists of negatives ('negatives'): remove one"
    )


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raycl.preparation.connect_cluster", lambda *_, **__: None)
    monkeypatch.setattr("raycl.preparation.learn_vocabulary", read_vocabulary)


@pytest.mark.usefixtures("without_ray")
def test_a_tokenizer_counts_the_texts_that_it_skips(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = invented_texts(5, seed=1)
    rows = {"query": [*texts, ""], "document": [*texts, None], "negatives": [[""]] * 6}
    pq.write_table(pa.table(rows), tmp_path / "texts.parquet")
    prepare = runpy.run_path(str(ROOT / "jobs" / "prepare.py"))
    output = str(tmp_path / "tokenizer.json")
    prepare["tokenizer"](str(tmp_path / "texts.parquet"), output, columns="query,document")
    printed = capsys.readouterr()
    assert printed.out.endswith(f"tokens in {output}\n")
    assert printed.err == (
        "2 of 12 texts are invalid and were skipped: 1 empty text, 1 missing value; for example "
        "texts.parquet row 5 (empty text); texts.parquet row 5 (missing value)\n"
    )


@pytest.mark.usefixtures("without_ray")
def test_a_tokenizer_reads_texts_beside_labels_of_any_type(tmp_path: Path) -> None:
    rows = pa.table({"text": invented_texts(40, seed=1), "label": [number / 2 for number in range(40)]})
    pq.write_table(rows, tmp_path / "texts.parquet")
    columns, output = ColumnNames(image=None, text="text"), tmp_path / "tokenizer.json"
    found, _ = make_tokenizer(
        str(tmp_path / "texts.parquet"), str(output), columns=columns, vocabulary_size=300
    )
    assert output.exists()
    assert found.num_tokens > 100


def test_packing_says_that_it_ignores_a_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("raycl.preparation._write", lambda *_, **__: ReadStats())
    data = write_rows(tmp_path / "rows.jsonl", [{"text": "a", "label": 0.5}])
    prepare = runpy.run_path(str(ROOT / "jobs" / "prepare.py"))
    prepare["rows"](str(data), str(tmp_path / "rows"), columns="text")
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"ignored the column 'label' of {data}: it holds double, not integers or text"
    ]


def test_a_folder_packed_into_parquet_has_the_same_rows(tmp_path: Path) -> None:
    for index in range(12):
        path = tmp_path / "images" / f"class{index % 3}" / f"{index:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(np.full((20, 20, 3), index * 20, np.uint8)))
    source, image_format = find_source(str(tmp_path / "images")), ImageFormat(size=16)
    pq.write_table(
        pa.concat_tables(_image_tables(source, source.fragments[0], ReadStats())), tmp_path / "packed.parquet"
    )
    before, after = (read_images(str(tmp_path / name), image_format) for name in ("images", "packed.parquet"))
    assert after.sample_id.tolist() == before.sample_id.tolist() == list(range(12))
    assert after.label.tolist() == before.label.tolist()
    assert {*before.label.tolist()} == {0, 1, 2}
    rows = np.arange(12)
    assert np.array_equal(pixels_of(after.take(rows)).images, pixels_of(before.take(rows)).images)


@pytest.mark.parametrize(
    "pack", [pack_images, partial(pack_rows, columns=ColumnNames(image=None, text="text"))]
)
def test_files_without_rows_are_refused_before_reading(pack: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rows_per_file must be at least 1, came 0"):
        pack(str(tmp_path / "nothing"), str(tmp_path / "out"), rows_per_file=0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "read",
    [
        lambda data, new: pack_rows(data, new, columns=ColumnNames(image=None, query="query")),
        lambda data, new: make_tokenizer(data, f"{new}.json", columns=ColumnNames(image=None, query="query")),
        lambda data, new: gather_texts(data, new, group="label", text="query"),
        lambda data, new: group_pairs(data, new, columns=LOG),
        lambda data, _: read_pairs(data, LOG),
        lambda data, _: sts._read(data, quiet=True),
    ],
)
def test_a_folder_of_splits_is_refused_wherever_it_is_read_whole(read: Any, tmp_path: Path) -> None:
    row = {"query": "a", "document": "b", "label": 1, "sentence1": "a", "sentence2": "b", "score": 1.0}
    for split in ("train", "test"):
        (tmp_path / "data" / split).mkdir(parents=True)
        write_rows(tmp_path / "data" / split / "rows.csv", [row])
    with pytest.raises(DataError, match="holds a data set in 2 splits; give --data "):
        read(str(tmp_path / "data"), str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
