"""Labels of training and test sets: classes get the same numbers, or the evaluation is refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from scipy.stats import binom

from raycl.data.discovery import find_source
from raycl.data.sources import Source
from raycl.data.split import Holdout
from raycl.errors import ConfigError, DataError
from raycl.evaluation import classification
from raycl.evaluation.classification import (
    LabeledSet,
    _check_labels,
    _num_rows_with,
    _warn_of_equal_sets,
    _with_train_classes,
    evaluate,
)
from raycl.recipes import recipe
from tests.images import digit_files, encode, write_digits
from tests.settings import override_active
from tests.towers import save


def folder_of(path: Path, classes: Sequence[str]) -> Source:
    content = digit_files(1)[0][0]
    for name in classes:
        (path / name).mkdir(parents=True)
        (path / name / "image.png").write_bytes(content)
    return find_source(str(path))


def test_a_test_set_with_fewer_classes_gets_the_class_numbers_of_the_training_set(tmp_path: Path) -> None:
    sources = {"train": folder_of(tmp_path / "a", "abc"), "test": folder_of(tmp_path / "b", "bc")}
    _check_labels(sources)
    test_set = LabeledSet(values=torch.zeros(2, 1), label=torch.tensor([0, 1]))
    assert _with_train_classes(sources, test_set).label.tolist() == [1, 2]


def test_classes_missing_from_the_training_set_are_refused(tmp_path: Path) -> None:
    sources = {"train": folder_of(tmp_path / "a", "ab"), "test": folder_of(tmp_path / "b", "bc")}
    with pytest.raises(DataError, match="the training set lacks: c"):
        _check_labels(sources)


def test_class_names_in_one_set_and_numbers_in_the_other_are_refused(tmp_path: Path) -> None:
    numbers = find_source(str(write_digits(tmp_path / "digits.parquet", 10)))
    message = (
        "labels of the train set .*/a are text, such as 'a', and those of the test set are integers; give"
    )
    with pytest.raises(DataError, match=message):
        _check_labels({"train": folder_of(tmp_path / "a", "ab"), "test": numbers})
    with pytest.raises(
        DataError, match="labels of the test set .*b.parquet are text, such as 'n/a', and those"
    ):
        _check_labels({"train": numbers, "test": labeled(tmp_path / "b.parquet", ["0", "1", "n/a"])})


def labeled(path: Path, label: list[Any] | pa.Array) -> Source:
    pq.write_table(pa.table({"image": digit_files(len(label))[0], "label": label}), path)
    return find_source(str(path))


@pytest.mark.parametrize("label", [["a", "b", "a"], [0, 1, 0]])
@pytest.mark.parametrize("empty", [pa.nulls(3), pa.array([-1, None, -1]), pa.array(["", None, ""])])
def test_a_set_whose_column_holds_no_label_is_named(
    label: list[Any], empty: pa.Array, tmp_path: Path
) -> None:
    train, test = labeled(tmp_path / "train.parquet", label), labeled(tmp_path / "test.parquet", empty)
    _check_labels({"train": train, "test": train})
    for name, sources in (("test", (train, test)), ("train", (test, train))):
        message = (
            f"^no row of the {name} set .*/test.parquet has a label in column 'label'; fill the column, or"
        )
        with pytest.raises(DataError, match=message):
            _check_labels(dict(zip(("train", "test"), sources, strict=True)))


def test_class_folders_that_are_no_labels_say_why(tmp_path: Path) -> None:
    train, test = folder_of(tmp_path / "a", "ab"), folder_of(tmp_path / "b", "b")
    with pytest.raises(
        DataError, match="the test set .*/b has no labels: 'b' is its only class folder; give"
    ):
        _check_labels({"train": train, "test": test})
    (tmp_path / "a" / "preview.png").write_bytes(digit_files(1)[0][0])
    with pytest.raises(
        DataError, match="the train set .*/a has no labels: preview.png lies beside its class fo"
    ):
        _check_labels({"train": find_source(str(tmp_path / "a")), "test": test})
    with pytest.raises(
        DataError, match="has no labels; put images in a folder per class, or name the column"
    ):
        _check_labels({"train": find_source(str(tmp_path / "b" / "b")), "test": test})


def named(path: Path, *names: str) -> Source:
    """Write a row whose label 1 has the second of these names."""
    info = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    table = pa.table({"image": digit_files(1)[0], "label": [1]})
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(info)}), path)
    return find_source(str(path))


def test_a_number_that_names_another_class_in_the_other_set_is_refused(tmp_path: Path) -> None:
    train = named(tmp_path / "train.parquet", "ant", "bee", "cat")
    _check_labels({"train": train, "test": named(tmp_path / "fewer.parquet", "ant", "bee")})
    with pytest.raises(
        DataError, match="label 1 is bee in the training set and cat in the test set; give both"
    ):
        _check_labels({"train": train, "test": named(tmp_path / "test.parquet", "ant", "cat")})


def test_equal_training_and_test_sets_print_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = folder_of(tmp_path / "a", "ab"), folder_of(tmp_path / "b", "ab")
    _warn_of_equal_sets({"train": one, "test": other}, quiet=False)
    assert capsys.readouterr().err == ""
    _warn_of_equal_sets({"train": one, "test": find_source(str(tmp_path / "a") + "/")}, quiet=False)
    assert f"train and test are both {tmp_path / 'a'}" in capsys.readouterr().err


def noise(path: Path, num_rows: int, shape: tuple[int, ...], seed: int) -> str:
    """Write images of noise, a little brighter at a place of their class, with ids in descending order."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 200, (num_rows, *shape), np.uint8)
    label = rng.integers(0, 4, num_rows)
    for image, place in zip(images, label, strict=True):
        image[2 * place : 2 * place + 2] += 20
    ids = np.arange(num_rows)[::-1]
    pq.write_table(pa.table({"image": list(map(encode, images)), "label": label, "sample_id": ids}), path)
    return str(path)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the lengths of the vectors that kNN compares, as a growing list."""
    lengths: list[int] = []
    accuracy = classification.knn_accuracy

    def recorded(query: torch.Tensor, *rest: Any, **options: Any) -> float:
        lengths.append(query.shape[1])
        return accuracy(query, *rest, **options)

    monkeypatch.setattr(classification, "knn_accuracy", recorded)
    return lengths


def test_the_baseline_of_few_labels_has_enough_rows_of_each_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classification, "MAX_BASELINE_ROWS", {"linear": 12, "knn": 1_000})
    found = evaluate("linear", **small_run(tmp_path, (8, 8, 3)), labels_per_class=10, quiet=True)
    assert 0.3 < found["baseline"]["pixels"] < 0.99


def test_a_baseline_without_enough_labels_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(classification, "MAX_BASELINE_ROWS", {"linear": 12, "knn": 12})
    found = evaluate("linear", **small_run(tmp_path, (8, 8, 3)), labels_per_class=10, quiet=True)
    assert "baseline" not in found
    assert 0 < found["top1"] <= 1
    assert "no baseline of raw pixels: labels_per_class is 10, but class" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["table", "folders"])
def test_a_class_with_too_few_labels_is_named_before_anything_is_embedded(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(classification, "embedded_tables")
    asked = small_run(tmp_path, (8, 8))
    train = pq.read_table(asked["train"]).slice(0, 3).drop_columns(["label", "sample_id"])
    pq.write_table(train.append_column("label", pa.array(["bee", "ant", "bee"])), tmp_path / "named.parquet")
    train = str(tmp_path / "named.parquet")
    if kind == "folders":
        train = folder_of(tmp_path / "folders", ("ant", "bee")).uri
        (tmp_path / "folders" / "bee" / "second.png").write_bytes(b"")
    sets = dict.fromkeys(("train", "test"), train)
    with pytest.raises(DataError, match="labels_per_class is 2, but class ant has only 1 training rows"):
        evaluate("linear", run=asked["run"], **sets, labels_per_class=2, quiet=True)


def test_a_baseline_of_rows_without_labels_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(classification, "MAX_BASELINE_ROWS", {"linear": 12, "knn": 12})
    asked = small_run(tmp_path, (8, 8))
    table = pq.read_table(asked["train"])
    is_sampled = Holdout(seed=0, reference=12 / len(table)).is_evaluated(table["sample_id"].to_numpy())
    label = pa.array(table["label"].to_numpy(), mask=is_sampled)
    table = table.set_column(table.schema.get_field_index("label"), "label", label)
    pq.write_table(table, asked["train"])
    found = evaluate("knn", **asked, k=5)
    assert (found["num_train"], "baseline" in found) == (int((~is_sampled).sum()), False)
    assert "no baseline of raw pixels: no row of the set has a label" in capsys.readouterr().err


@pytest.mark.parametrize("labels_per_class", [1, 5, 20, 100])
@pytest.mark.parametrize("fewest", [150, 1_000])
def test_a_sample_has_enough_labels_of_each_class(labels_per_class: int, fewest: int) -> None:
    label = torch.cat([torch.arange(10).repeat(fewest), torch.arange(9).repeat(fewest)])
    fraction = min(1.0, _num_rows_with(labels_per_class, label, len(label)) / len(label))
    assert fewest >= 2 * labels_per_class + 20 or fraction == 1
    # The chance that the smallest class lacks labels.
    assert binom.cdf(labels_per_class - 1, fewest, fraction) < 1e-6


@pytest.mark.parametrize(("shape", "channels"), [((8, 8), 1), ((8, 8, 3), 3)])
def test_the_baseline_of_gray_images_compares_one_channel_with_the_same_result(
    shape: tuple[int, ...],
    channels: int,
    compared: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sets = small_run(tmp_path, shape)
    found = evaluate("knn", **sets, k=5, quiet=True)
    assert compared.pop() == 64 * channels
    monkeypatch.setattr(classification, "are_gray", lambda *_: False)
    assert evaluate("knn", **sets, k=5, quiet=True) == found
    assert 0.3 < found["baseline"]["pixels"] < 0.99
    assert compared.pop() == 64 * 3


@pytest.mark.parametrize("measure", ["knn", "linear"])
def test_the_baseline_takes_the_pixels_that_were_embedded(
    measure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classification, "MAX_BASELINE_ROWS", {"knn": 100, "linear": 100})
    sets, read = small_run(tmp_path, (8, 8, 3)), classification.read_images
    was_read: list[str] = []

    def recorded(source: Source, *rest: Any, **options: Any) -> Any:
        was_read.append(source.uri)
        return read(source, *rest, **options)

    monkeypatch.setattr(classification, "read_images", recorded)
    found = evaluate(measure, **sets, quiet=True)
    assert not was_read
    embedded = classification.embedded_tables
    monkeypatch.setattr(classification, "embedded_tables", lambda *a, kept, **o: embedded(*a, **o))
    assert evaluate(measure, **sets, quiet=True) == found
    assert (was_read, 0 < found["baseline"]["num_train"] < 160) == ([sets["train"], sets["test"]], True)


def small_run(folder: Path, shape: tuple[int, ...]) -> dict[str, Any]:
    """Save an encoder of color images; return it, and a training and a test set."""
    settings = {"encoder.name": "resnet10", "encoder.width": 0.25}
    save(override_active(recipe("simclr", image_size=8), settings, {}), folder / "run")
    sets = {
        name: noise(folder / f"{name}.parquet", rows, shape, rows)
        for name, rows in (("train", 160), ("test", 80))
    }
    return {"run": str(folder / "run"), **sets}


@pytest.mark.parametrize("measure", ["knn", "linear"])
def test_rows_without_a_label_are_counted_and_one_class_is_refused(
    measure: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = small_run(tmp_path, (8, 8))
    table = pq.read_table(asked["test"])
    for name, labels in (("some", [-1, 0, 1, None]), ("one", [-1, 1])):
        label = pa.array([labels[row % len(labels)] for row in range(len(table))], pa.int64())
        place = table.schema.get_field_index("label")
        pq.write_table(table.set_column(place, "label", label), tmp_path / f"{name}.parquet")
    result = evaluate(
        measure, run=asked["run"], train=str(tmp_path / "some.parquet"), test=asked["test"], baseline=False
    )
    assert result["num_train"] == 40
    line = "raycl: 40 of 80 rows of the train set have no label (empty, null or negative) and are skipped\n"
    assert capsys.readouterr().err.count(line) == 1
    with pytest.raises(
        DataError,
        match="^all labels of the training set are 1; give [^\n]* a negative label is a missing one$",
    ):
        evaluate(
            measure, run=asked["run"], train=str(tmp_path / "one.parquet"), test=asked["test"], quiet=True
        )


def test_invalid_rows_are_counted_by_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = small_run(tmp_path, (8, 8))
    table = pq.read_table(asked["test"])
    images = pa.array([b"broken", None, *table["image"].to_pylist()[2:]])
    table = table.set_column(table.schema.get_field_index("image"), "image", images)
    pq.write_table(table, asked["test"])
    result = evaluate("knn", **asked, k=5, baseline=False, max_invalid_fraction=0.1)
    assert (result["num_train"], result["num_test"]) == (160, 78)
    lines = [line for line in capsys.readouterr().err.splitlines() if "are invalid" in line]
    assert lines == [
        "raycl: 2 of 80 rows of the test set are invalid and are skipped: 1 missing value, 1 not an image; "
        "for example test.parquet row 0 (not an image); test.parquet row 1 (missing value)"
    ]


def test_rows_with_labels_are_not_copied() -> None:
    values = torch.zeros(3, 2)
    assert classification._labeled(values, torch.tensor([2, 0, 1])).values is values
    assert classification._labeled(values, torch.tensor([2, -1, 1])).values.shape == (2, 2)
    with pytest.raises(DataError, match="no row of the set has a label"):
        classification._labeled(values, torch.tensor([-1, -1, -1]))
    with pytest.raises(DataError, match="no row of the set could be read"):
        classification._labeled(values[:0], torch.tensor([]))


def test_rows_of_numbered_classes_that_the_training_set_lacks_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = small_run(tmp_path, (8, 8))
    table = pq.read_table(asked["test"])
    label, place = pa.array([1, 1000, 1001, 1002] * 20, pa.int64()), table.schema.get_field_index("label")
    pq.write_table(table.set_column(place, "label", label), tmp_path / "other.parquet")
    line = (
        "raycl: 60 of 80 rows of the test set are of classes that the training set lacks "
        "(1000, 1001, 1002) and count as errors\n"
    )
    for test, count in ((asked["test"], 0), (str(tmp_path / "other.parquet"), 1)):
        result = evaluate("knn", run=asked["run"], train=asked["train"], test=test, baseline=False)
        assert capsys.readouterr().err.count(line) == count
    assert result["top1"] <= 0.25


@pytest.mark.parametrize(
    ("measure", "option"),
    [("knn", "seed"), ("knn", "labels_per_class"), ("linear", "k"), ("linear", "temperature")],
)
def test_an_option_of_the_other_measure_is_refused_before_reading(measure: Any, option: str) -> None:
    options: dict[str, Any] = {option: 0}
    with pytest.raises(ConfigError, match=f"evaluate {measure} has no option '{option}'"):
        evaluate(measure, run="nowhere", train="nowhere", test="nowhere", **options)
