"""Periodic evaluation on the rows of ``evaluation.data``."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

import raycl
from raycl.config import RunConfig
from raycl.data.columns import ColumnNames
from raycl.data.read_stats import ReadStats
from raycl.embedding_snapshot import read_probe_set
from raycl.errors import ConfigError, DataError
from raycl.recipes import recipe
from raycl.records import read_metrics
from raycl.storage import Place
from raycl.training.coordinator import RunCoordinator
from raycl.training.job import EVALUATION_PREFIX, Job
from tests.cluster.test_run import small_run
from tests.cluster.test_texts import run_of
from tests.images import write_digits
from tests.texts import invented_texts

pytestmark = pytest.mark.usefixtures("ray_cluster")

NUM_TRAIN, NUM_OTHERS = 256, 120


def config_of(others: Path, **settings: Any) -> RunConfig:
    length = {"workers": 1, "stages.0.epochs": 1, "evaluation.num_test": 1_000}
    return small_run(**length | {"evaluation.data": str(others)} | settings)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Digits to train on, the same without labels, and other digits, two of them invalid."""
    folder = tmp_path_factory.mktemp("digits")
    table = pq.read_table(write_digits(folder / "all.parquet", NUM_TRAIN + NUM_OTHERS))
    train, others = table.slice(0, NUM_TRAIN), table.slice(NUM_TRAIN)
    broken = pa.table(
        {"image": pa.array([b"broken"] * 2, pa.binary()), "label": pa.array([0, 1], pa.int64())}
    )
    others = pa.concat_tables([others, broken])
    named = {"train": train, "unlabeled": train.drop_columns("label"), "others": others}
    for name, each in named.items():
        pq.write_table(each, folder / f"{name}.parquet", row_group_size=64)
    return folder / "train.parquet", folder / "unlabeled.parquet", folder / "others.parquet"


@pytest.mark.parametrize("cache", ["materialize", "stream"])
def test_the_last_evaluation_equals_raycl_evaluate_on_these_rows(
    files: tuple[Path, Path, Path], tmp_path: Path, cache: str
) -> None:
    train, _, others = files
    config = config_of(others, **{"data.max_invalid_fraction": 0.05, "data.cache": cache})
    result = raycl.train(config, data=train, output=tmp_path / "run", quiet=True)
    assert result.steps == NUM_TRAIN // config.stages[0].batch_size  # all rows of an epoch are training rows
    expected = raycl.evaluate(
        "knn", run=tmp_path / "run", train=train, test=others, k=20, quiet=True, max_invalid_fraction=0.05
    )
    assert result.final["knn_top1"] == pytest.approx(expected["top1"], abs=1e-9)
    assert 0.2 < result.final["knn_top1"] < 1
    assert result.invalid_rows == {"not an image": 2}
    probes = read_probe_set(Place(str(tmp_path / "run")))
    assert probes.held_out
    assert len(probes.label) == NUM_OTHERS


def test_labeled_rows_evaluate_training_without_labels(
    files: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, unlabeled, others = files
    config = config_of(others, **{"data.max_invalid_fraction": 0.05})
    result = raycl.train(config, data=unlabeled, output=tmp_path / "run")
    assert "\nreading evaluation.data\n" in capsys.readouterr().err
    assert result.steps == NUM_TRAIN // config.stages[0].batch_size
    assert "baseline_knn_top1" in result.final
    # About half of the rows are evaluated; the others vote.
    probes = read_probe_set(Place(str(tmp_path / "run")))
    assert 0.35 < len(probes.sample_id) / NUM_OTHERS < 0.65
    is_test = np.isin(np.arange(NUM_OTHERS), probes.sample_id)
    valid = pq.read_table(others).slice(0, NUM_OTHERS)
    for name, rows in (("votes", ~is_test), ("test", is_test)):
        pq.write_table(valid.filter(pa.array(rows)), tmp_path / f"{name}.parquet")
    expected = raycl.evaluate(
        "knn",
        run=tmp_path / "run",
        train=tmp_path / "votes.parquet",
        test=tmp_path / "test.parquet",
        k=20,
        quiet=True,
    )
    assert result.final["knn_top1"] == pytest.approx(expected["top1"], abs=1e-9)


@pytest.mark.parametrize("missing", ["-1", "-1 beside texts", "null", "another column"])
def test_rows_of_a_training_set_without_any_label_do_not_vote(
    missing: str, files: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    _, unlabeled, others = files
    settings: dict[str, Any] = {
        "data.max_invalid_fraction": 0.05,
        "stages.0.epochs": None,
        "stages.0.steps": 1,
    }
    table = pq.read_table(unlabeled)
    if missing == "another column":
        named = pq.read_table(others).rename_columns(["image", "category"])
        pq.write_table(named, others := tmp_path / "named.parquet")
        settings["data.columns.label"] = "category"
    else:
        labels = pa.nulls(NUM_TRAIN) if missing == "null" else pa.array([-1] * NUM_TRAIN)
        table = table.append_column("label", labels)
    if missing == "-1 beside texts":
        named = pq.read_table(others)
        names = [f"class {label}" for label in named["label"].to_pylist()]
        pq.write_table(named.set_column(1, "label", pa.array(names)), others := tmp_path / "texts.parquet")
    pq.write_table(table, tmp_path / "train.parquet")
    result = raycl.train(
        config_of(others, **settings), data=tmp_path / "train.parquet", output=tmp_path / "run", quiet=True
    )
    probes = read_probe_set(Place(str(tmp_path / "run")))
    assert 0.35 < len(probes.sample_id) / NUM_OTHERS < 0.65
    assert 0 < result.final["knn_top1"] < 1


def test_rows_to_evaluate_do_not_count_among_the_invalid_rows_of_a_stream() -> None:
    coordinator = RunCoordinator()
    coordinator.add_rows(f"{EVALUATION_PREFIX}val:0", ReadStats(num_rows=2_000))
    read = ReadStats(num_rows=5_000)
    read.invalid["not an image"] = 65
    coordinator.add_rows("train:0", read)
    config = recipe("simclr")
    place = Place("/nowhere")
    job: Any = SimpleNamespace(
        stream=object(), num_train=(5_000,), coordinator=coordinator, config=config, output=place
    )
    with pytest.raises(DataError, match="65 of 5000 rows are invalid"):
        Job.check_streamed_rows(job)


def pairs_of(rows: range) -> pa.Table:
    texts = invented_texts(rows.stop, seed=3)[rows.start :]
    return pa.table(
        {
            "query": [" ".join(text.split()[:3]) for text in texts],
            "document": texts,
            "document_id": list(rows),
        }
    )


def test_other_pairs_are_compared_with_all_documents(tmp_path: Path) -> None:
    for name, rows in (("train", range(200)), ("others", range(200, 260))):
        pq.write_table(pairs_of(rows), tmp_path / f"{name}.parquet")
    config = run_of(
        "two_tower",
        **{"workers": 2, "evaluation.data": str(tmp_path / "others.parquet"), "stages.0.epochs": 2},
    )
    result = raycl.train(config, data=tmp_path / "train.parquet", output=tmp_path / "run", quiet=True)
    expected = raycl.evaluate(
        "retrieval",
        run=tmp_path / "run",
        train=tmp_path / "train.parquet",
        test=tmp_path / "others.parquet",
        columns=ColumnNames(image=None, query="query", document="document", document_id="document_id"),
        quiet=True,
    )
    assert result.final["recall_at_10"] == pytest.approx(expected["recall_at_10"], abs=1e-9)
    assert result.final["recall_at_10"] > 0.2


def test_other_rows_resume_at_another_address_only(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    train, _, others = files
    settings = {"data.max_invalid_fraction": 0.05}
    raycl.train(config_of(others, **settings), data=train, output=tmp_path / "run", quiet=True)
    copy = tmp_path / "copy.parquet"
    copy.write_bytes(others.read_bytes())
    longer = settings | {"stages.0.epochs": 2}
    with pytest.raises(ConfigError, match=r"--resume would change evaluation.data"):
        raycl.train(
            config_of(others, **longer | {"evaluation.data": None}),
            data=train,
            output=tmp_path / "run",
            resume=True,
            quiet=True,
        )
    result = raycl.train(
        config_of(copy, **longer), data=train, output=tmp_path / "run", resume=True, quiet=True
    )
    assert result.epochs == 2
    pq.write_table(pq.read_table(others).slice(1), copy)
    with pytest.raises(ConfigError, match="other rows or classes in evaluation.data than there are now"):
        raycl.train(
            config_of(copy, **longer | {"stages.0.epochs": 3}),
            data=train,
            output=tmp_path / "run",
            resume=True,
            quiet=True,
        )
    values = [line["knn_top1"] for line in read_metrics(Place(str(tmp_path / "run"))) if "knn_top1" in line]
    assert len(values) == 3  # before the first step, and after each epoch


def with_columns(path: Path, **columns: list[Any]) -> Path:
    table = pq.read_table(path)
    for name, values in columns.items():
        table = table.drop_columns(name) if name in table.column_names else table
        table = table.append_column(name, pa.array(values[: len(table)]))
    pq.write_table(table, path)
    return path


def test_rows_that_do_not_fit_are_refused(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    train, unlabeled, others = files

    def refusal(data: Any, evaluation: Path, **settings: Any) -> str:
        given = {"dataset": data} if isinstance(data, ray.data.Dataset) else {"data": data}
        with pytest.raises((ConfigError, DataError)) as raised:
            raycl.train(config_of(evaluation, **settings), **given, output=tmp_path / "run", quiet=True)
        assert not (tmp_path / "run" / "config.yaml").exists()
        return str(raised.value)

    days = tmp_path / "days"
    days.mkdir()
    for name in ("first", "last"):
        (days / f"{name}.parquet").write_bytes(train.read_bytes())
    for one, other in ((train, train), (days, days / "last.parquet"), (days / "first.parquet", days)):
        assert "and the run trains on it; give other rows" in refusal(one, other)
    assert f"needs labels in evaluation.data ({unlabeled})" in refusal(train, unlabeled)
    assert "acts only with evaluation.every_epochs other than 0" in refusal(
        train, others, **{"evaluation.every_epochs": 0}
    )
    names = [f"class {number % 10}" for number in range(NUM_TRAIN)]
    named = with_columns(write_digits(tmp_path / "named.parquet", NUM_TRAIN), label=names)
    assert "the labels of evaluation.data are integers, and those of the training rows are text" in refusal(
        named, others
    )
    others_named = with_columns(write_digits(tmp_path / "others.parquet", 50), label=["a cat"] * 50)
    unknown = "evaluation.data has the class 'a cat', which no training row has"
    assert unknown in refusal(named, others_named)
    assert unknown in refusal(ray.data.read_parquet(str(named)), others_named)
    broken = write_digits(tmp_path / "broken.parquet", 50, broken=25)
    assert "25 of 50 rows are invalid" in refusal(train, broken)


def test_pairs_without_the_ids_of_the_training_rows_are_refused(tmp_path: Path) -> None:
    pq.write_table(pairs_of(range(200)), tmp_path / "train.parquet")
    pq.write_table(pairs_of(range(200, 260)).drop_columns("document_id"), tmp_path / "others.parquet")
    config = run_of("two_tower", **{"evaluation.data": str(tmp_path / "others.parquet")})
    with pytest.raises(
        DataError, match=r"columns query, document, and the training rows have query, document, d"
    ):
        raycl.train(config, data=tmp_path / "train.parquet", output=tmp_path / "run", quiet=True)
