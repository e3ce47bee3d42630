"""Labels of training and test sets: classes get the same numbers, or the evaluation is refused."""

from pathlib import Path

import pytest
import torch

from raycl.data.sources import Source, find_source
from raycl.errors import DataError
from raycl.evaluation.classification import (
    LabeledSet,
    _check_labels,
    _warn_of_equal_sets,
    _with_train_classes,
)
from tests.images import digit_files, write_digits


def folder_of(path: Path, classes: str) -> Source:
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
    with pytest.raises(DataError, match="names its classes, the other numbers them"):
        _check_labels({"train": folder_of(tmp_path / "a", "ab"), "test": numbers})


def test_equal_training_and_test_sets_print_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = folder_of(tmp_path / "a", "ab"), folder_of(tmp_path / "b", "ab")
    _warn_of_equal_sets({"train": one, "test": other})
    assert capsys.readouterr().err == ""
    _warn_of_equal_sets({"train": one, "test": find_source(str(tmp_path / "a") + "/")})
    assert f"train and test are both {tmp_path / 'a'}" in capsys.readouterr().err
