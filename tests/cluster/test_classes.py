"""Runs with data.samples_per_class on a real local Ray cluster, in memory and streamed."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raycl
from raycl.errors import DataError
from raycl.records import read_metrics, read_result
from raycl.storage import Place
from tests.images import digit_files
from tests.settings import override_active

pytestmark = pytest.mark.usefixtures("ray_cluster")

SMALL: dict[str, Any] = {
    "workers": 2,
    "cpus_per_worker": 0.5,
    "data.channels": 1,
    "encoder.name": "tests.cluster.networks:small",
    "encoder.kwargs": {"channels": 1},
    "stages.0.epochs": 2,
    "stages.0.batch_size": 32,
    "evaluation.every_epochs": 0,
    "log_every_steps": 1,
    "data.samples_per_class": 8,
}


def train(folder: Path, labels: list[int | None], **settings: Any) -> raycl.RunResult:
    images, _ = digit_files(len(labels))
    table = pa.table({"image": pa.array(images, pa.binary()), "label": pa.array(labels, pa.int64())})
    pq.write_table(table, folder / "digits.parquet", row_group_size=64)
    config = override_active(raycl.recipe("supcon", image_size=16), SMALL, settings)
    return raycl.train(config, data=str(folder / "digits.parquet"), output=str(folder / "run"), quiet=True)


@pytest.mark.parametrize(
    "cache",
    [
        pytest.param("materialize", marks=pytest.mark.drill),  # test_class_batches.py has these counts
        "stream",
    ],
)
def test_a_run_counts_the_samples_that_form_no_group_of_their_class(cache: str, tmp_path: Path) -> None:
    labels = [*(number % 5 for number in range(300)), *[7] * 3, *[None] * 5]
    result = train(tmp_path, labels, **{"data.cache": cache, "workers": 1})
    output = Place(str(tmp_path / "run"))
    assert result.steps == 2 * (len(labels) // 32)
    fractions = {line["grouped_fraction"] for line in read_metrics(output) if "grouped_fraction" in line}
    if cache == "materialize":
        skipped = {"in a class of fewer than 8 samples": 3, "without a label": 5}
        assert result.skipped == read_result(output)["skipped"] == skipped
        assert not fractions
    else:
        assert not result.skipped
        assert 0.6 < min(fractions) < 1  # some rows of the last window form no group


@pytest.mark.drill  # test_class_batches.py has the error, test_run.py an error of a worker in one line
def test_a_streamed_run_of_sorted_classes_fails_in_one_line(tmp_path: Path) -> None:
    labels = [number // 80 for number in range(320)]
    settings = {"data.cache": "stream", "data.shuffle_buffer_size": 32, "stages.0.batch_size": 64}
    with pytest.raises(DataError, match="no shuffle buffer had 8 classes with as many samples"):
        train(tmp_path, labels, **settings)
