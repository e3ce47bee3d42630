"""Runs on several data sets: each batch has rows of one of them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

import raycl
from raycl.config import RunConfig
from raycl.data import click_logs
from raycl.errors import ConfigError, DataError, RunError
from raycl.records import read_metrics, read_result
from raycl.storage import Place
from raycl.training.coordinator import start_coordinator
from raycl.training.data_module import DataModule
from tests.cluster.test_negatives import assert_equal_runs
from tests.cluster.test_texts import run_of
from tests.texts import invented_texts

pytestmark = pytest.mark.usefixtures("ray_cluster")

SIZES = {"apples": 330, "zebras": 100}  # and three invalid pairs of the second


def pairs_of(word: str, number: int) -> dict[str, list[Any]]:
    """Pairs whose texts all begin with one word; the ids of two data sets are the same."""
    texts = invented_texts(number, seed=len(word))
    return {
        "query": [f"{word} {' '.join(text.split()[:3])} {row}" for row, text in enumerate(texts)],
        "document": [f"{word} {text}" for text in texts],
        "document_id": list(range(number)),
        "sample_id": list(range(number)),
    }


@pytest.fixture(scope="module")
def tables() -> dict[str, pa.Table]:
    made = {word: pairs_of(word, number) for word, number in SIZES.items()}
    for row in (5, 6, 7):
        made["zebras"]["document"][row] = None
    return {word: pa.table(columns) for word, columns in made.items()}


@pytest.fixture(scope="module")
def files(tables: dict[str, pa.Table], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pairs")
    for word, table in tables.items():
        pq.write_table(table, folder / f"{word}.parquet", row_group_size=64)
    return [str(folder / f"{word}.parquet") for word in tables]


def mixed_run(folder: Path, **settings: Any) -> RunConfig:
    """Two workers, weights, a constant learning rate; each worker writes the first tokens of its batches to a folder."""
    folder.mkdir(exist_ok=True)
    whole = {
        "encoder.name": "tests.cluster.networks:recording",
        "encoder.kwargs": {"folder": str(folder)},
        "data.max_invalid_fraction": 0.05,
        "data.weights": [1, 3],
        "stages.0.learning_rate_schedule": "constant",
        "stages.0.warmup_epochs": 0.0,
    }
    return run_of("two_tower", **whole | settings)


def data_sets_of(output: Path) -> list[int]:
    return [line["data_set"] for line in read_metrics(Place(str(output))) if "loss" in line]


@pytest.fixture(scope="module")
def finished(files: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, raycl.RunResult]:
    folder = tmp_path_factory.mktemp("mixed")
    return folder, raycl.train(mixed_run(folder / "tokens"), data=files, output=folder / "run", quiet=True)


def test_every_batch_on_every_worker_has_rows_of_one_data_set(
    finished: tuple[Path, raycl.RunResult],
) -> None:
    folder, result = finished
    of_workers = [(folder / "tokens" / f"{rank}.txt").read_text().splitlines() for rank in (0, 1)]
    assert of_workers[0] == of_workers[1]
    first_tokens = [json.loads(line) for line in of_workers[0]]
    assert len(first_tokens) == 2 * result.steps  # of queries and of documents
    assert {len(each) for each in first_tokens} == {1}
    names = sorted({token for [token] in first_tokens})
    assert len(names) == 2
    drawn = Counter(token for [token] in first_tokens)
    logged = Counter(data_sets_of(folder / "run"))
    assert sorted(drawn.values()) == sorted(2 * number for number in logged.values())


def test_the_result_has_rows_and_steps_of_each_data_set(
    finished: tuple[Path, raycl.RunResult], files: list[str]
) -> None:
    folder, result = finished
    assert result.data_sets == read_result(Place(str(folder / "run")))["data_sets"]
    assert list(result.data_sets) == files
    apples, zebras = result.data_sets.values()
    assert [apples["rows"], zebras["rows"]] == list(SIZES.values())
    assert (apples["invalid_rows"], zebras["invalid_rows"]) == ({}, {"missing value": 3})
    assert result.invalid_rows == {"missing value": 3}
    assert result.epochs == 2
    # A tenth of the rows of each is held out: 9 and 2 batches in a pass, 3 and 8 by the weights in an epoch.
    assert (apples["steps"], zebras["steps"]) == (6, 16)
    assert Counter(data_sets_of(folder / "run")) == {0: apples["steps"], 1: zebras["steps"]}
    assert result.final["recall_at_10"] > 0.2
    described = json.loads((folder / "run" / "data.json").read_text())
    assert described["data"] == files
    assert (described["num_rows"], described["rows_per_data_set"]) == (430, [330, 100])


@pytest.mark.drill
def test_a_run_resumed_on_ray_datasets_equals_an_uninterrupted_run_on_files(
    files: list[str], tables: dict[str, pa.Table], finished: tuple[Path, raycl.RunResult], tmp_path: Path
) -> None:
    output = tmp_path / "run"
    first = mixed_run(tmp_path / "tokens", **{"stages.0.epochs": None, "stages.0.steps": 7})
    raycl.train(first, data=files, output=output, quiet=True)
    whole = mixed_run(tmp_path / "tokens")
    with pytest.raises(
        ConfigError, match="the run began with data sets of 330, 100 rows, and --resume got data"
    ):
        raycl.train(whole, data=files[::-1], output=output, resume=True, quiet=True)
    datasets = [ray.data.from_arrow(table) for table in tables.values()]
    result = raycl.train(whole, dataset=datasets, output=output, resume=True, quiet=True)
    assert data_sets_of(output) == data_sets_of(finished[0] / "run")
    assert_equal_runs(output, finished[0] / "run")
    assert list(result.data_sets) == ["dataset 0", "dataset 1"]
    assert list(result.data_sets.values()) == list(finished[1].data_sets.values())


def test_a_run_is_not_resumed_with_other_weights_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, output = tmp_path / "texts.parquet", tmp_path / "run"
    columns = {"text": invented_texts(80), "sample_id": list(range(80))}
    config = run_of("simcse", **{"encoder.name": "bag_of_subwords", "data.columns.weight": "w"})

    def fail(*_: Any, **__: Any) -> None:
        raise RunError("stopped before the first step")

    monkeypatch.setattr("raycl.training.launch.train_in_groups", fail)

    def train(weights: list[int], *, resume: bool) -> None:
        pq.write_table(pa.table(columns | {"w": weights}), data)
        raycl.train(config, data=data, output=output, resume=resume, quiet=True)

    weights = [row % 2 for row in range(80)]
    message = (
        r"^the run began with other weights of rows than there are now in .*texts.parquet; give the same data, "
        "or another --output$"
    )
    with pytest.raises(RunError, match="stopped before"):
        train(weights, resume=False)
    with pytest.raises(ConfigError, match=message):
        train(weights[::-1], resume=True)
    with pytest.raises(RunError, match="stopped before"):
        train(weights, resume=True)


def test_click_logs_are_grouped_and_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(click_logs.group_rows.__kwdefaults__, "num_parts", 2)  # one of them empty
    same = {"query": ["one query"] * 3, "document": ["a", "b", "c"], "label": [1, 0, 0]}
    logs = [
        ray.data.from_arrow(pa.table(same)),
        ray.data.from_arrow(pa.table({**same, "label": [0, 0, 0]}).slice(0, 2)),
        ray.data.from_arrow(pa.table(same)),
    ]
    with start_coordinator() as coordinator:
        config = run_of("two_tower", **{"evaluation.every_epochs": 0})
        samples = DataModule(config, coordinator, [logs[0], logs[2]])
        assert [each.num_rows for each in samples.data_sets] == [1, 1]
        assert [each.num_clicks for each in samples.data_sets] == [3, 3]
        samples.learn_vocabulary(None)
        for decoded in samples.read_rows():
            assert sum(map(len, decoded.columns(["sample_id"]))) == 1
        assert [each.stats().num_train for each in samples.data_sets] == [1, 1]
        assert samples.counts([5, 6])["dataset 1"] == {
            "steps": 6,
            "rows": 3,
            "invalid_rows": {},
            "skipped": {},
        }
    with start_coordinator() as coordinator, pytest.raises(DataError, match="no query has a document"):
        DataModule(config, coordinator, logs[:2])
