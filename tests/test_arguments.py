"""raycl's functions refuse arguments of other types in one line, before anything starts."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import raycl
from raycl.data.columns import ColumnNames
from raycl.data.decode import columns_of
from raycl.errors import ConfigError, DataError

CONFIG = raycl.recipe("simclr", image_size=32)
REFUSED: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "recipe": (raycl.recipe, None, "recipe must be text, came None of type NoneType"),
    "image size, text": (
        lambda given: raycl.recipe("simclr", image_size=given),
        "32",
        "image_size must be a whole number, came '32' of type str",
    ),
    "image size, fraction": (
        lambda given: raycl.recipe("simclr", image_size=given),
        32.0,
        "image_size must be a whole number, came 32.0 of type float",
    ),
    "image size, flag": (
        lambda given: raycl.recipe("simclr", image_size=given),
        True,
        "image_size must be a whole number, came True of type bool",
    ),
    "YAML": (raycl.config_from_yaml, 5, "the YAML must be text, came 5"),
    "configuration to write": (raycl.config_to_yaml, "simclr", "config must be a RunConfig, came 'simclr'"),
    "configuration": (
        lambda given: raycl.override(given, {}),
        "simclr",
        "config must be a RunConfig, came 'simclr'",
    ),
    "settings": (
        lambda given: raycl.override(CONFIG, given),
        5,
        "settings must be a dict or a list of key.path=value, came 5",
    ),
    "setting": (lambda given: raycl.override(CONFIG, given), [5], "a setting must be text, came 5"),
    "path of a setting": (
        lambda given: raycl.override(CONFIG, given),
        {1: 2},
        "a setting's path must be text, came 1",
    ),
    "minutes": (
        lambda given: raycl.tune("simclr", data="a", minutes=given),
        "10",
        "minutes must be a number, came '10'",
    ),
    "data to tune on": (
        lambda given: raycl.tune("simclr", data=given),
        5,
        "data must be an address, came int",
    ),
    "cluster to train on": (
        lambda given: raycl.train("simclr", data="a", output="b", address=given),
        5,
        "address must be text, came 5",
    ),
    "k": (
        lambda given: raycl.evaluate("knn", run="a", test="b", train="c", k=given),
        "5",
        "k must be a whole number, came '5'",
    ),
    "test set": (
        lambda given: raycl.evaluate("sts", run="a", test=given),
        None,
        "test must be an address, came NoneType",
    ),
    "columns": (
        lambda given: raycl.evaluate("retrieval", run="a", test="b", columns=given),
        {"query": "q"},
        "columns must be a ColumnNames, came {'query': 'q'}",
    ),
    "data to embed": (
        lambda given: raycl.embed("a", given, "b"),
        ["c"],
        "data must be an address, came list",
    ),
    "GPU": (
        lambda given: raycl.embed("a", "b", "c", gpu=given),
        "no",
        "gpu must be True or False, came 'no'",
    ),
    "output of mine": (lambda given: raycl.mine("a", "b", given), 5, "output must be an address, came int"),
    "number of negatives": (
        lambda given: raycl.mine("a", "b", "c", num_negatives=given),
        1.5,
        "num_negatives must be a whole number, came 1.5",
    ),
    "run to export": (
        lambda given: raycl.export_encoder(given, "a"),
        5,
        "run must be an address, came int; give text or a path",
    ),
    "network": (
        lambda given: raycl.load_encoder("a", network=given),
        "resnet18",
        "network must be a Module, came 'resnet18'",
    ),
    "trusted package": (
        lambda given: raycl.load_encoder("a", trusted=given),
        "models",
        "trusted must be a list of packages, came 'models'; give ['models']",
    ),
    "runs to report": (raycl.write_report, [5], "runs must be an address, came int"),
    "folder of runs": (raycl.list_runs, 5, "folder must be an address, came int"),
    "step to replay": (
        lambda given: raycl.replay("a", step=given),
        1.0,
        "step must be a whole number, came 1.0",
    ),
    "steps to find": (lambda given: raycl.find_steps("a", given), 5, "find must be text, came 5"),
    "steps to certify": (
        lambda given: raycl.certify("a", steps=given),
        "4",
        "steps must be a whole number, came '4'",
    ),
    "certificate": (raycl.check_certificate, 5, "file must be an address, came int"),
    "data to check": (lambda given: raycl.run_doctor(data=given), 5, "data must be an address, came int"),
    "bank": (raycl.connect_bank, 5, "name must be text, came 5"),
    "cluster of banks": (raycl.list_banks, 5, "address must be text, came 5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_of_another_type_is_refused_in_one_line(name: str) -> None:
    call, given, message = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        call(given)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_the_home_folder_is_expanded_as_a_shell_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DataError, match=f"^{re.escape(str(tmp_path))}/run holds no run"):
        raycl.write_report("~/run")
    with pytest.raises(ConfigError, match="is given twice"):
        raycl.write_report(["~/run", tmp_path / "run"])


def test_a_run_that_is_given_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for other in ("run/", "./run", tmp_path / "run"):
        with pytest.raises(ConfigError, match=f"^{re.escape(str(tmp_path))}/run is given twice; give each"):
            raycl.write_report(["run", other])
    with pytest.raises(ConfigError, match="^s3://bucket/run is given twice"):
        raycl.write_report(["s3://bucket/run", "s3://bucket/other", "s3://bucket/run/"])


def test_an_image_size_of_numpy_is_a_whole_number() -> None:
    size: Any = np.int64(32)
    assert raycl.recipe("simclr", image_size=size) == CONFIG


def test_one_setting_need_not_be_in_a_list() -> None:
    assert raycl.override(CONFIG, "seed=7").seed == 7


def test_an_empty_ray_dataset_is_refused_as_one() -> None:
    empty: Any = SimpleNamespace(schema=lambda: None)
    with pytest.raises(DataError, match=r"^the Ray Dataset has no rows and no columns; give one with rows$"):
        columns_of(empty, ColumnNames())
