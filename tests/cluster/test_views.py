"""Runs with more than two views of a sample, of two sizes."""

from pathlib import Path
from typing import Any

import pytest

import raycl
from raycl.records import read_metrics, read_result
from raycl.storage import Place
from tests.cluster.test_run import NUM_IMAGES, small_run
from tests.images import write_digits

pytestmark = pytest.mark.usefixtures("ray_cluster")

CROPS: dict[str, Any] = {
    "augment.views": [{"count": 2}, {"count": 4, "size": 8, "crop_scale": [0.05, 0.4]}],
    "encoder.kwargs": {"channels": 1, "dropout": 0.0},
    "stages.0.epochs": 1,
}


def test_two_workers_train_on_crops_as_one_does_and_count_their_views(tmp_path: Path) -> None:
    data = write_digits(tmp_path / "digits.parquet", NUM_IMAGES)
    losses = {}
    chunks: dict[str, Any] = {"stages.0.chunk_size": 40}
    for workers, settings in ((1, {}), (2, chunks)):
        output = tmp_path / f"{workers}"
        config = small_run(**CROPS, **settings, workers=workers)
        result = raycl.train(config, data=str(data), output=str(output), quiet=True)
        lines = [line for line in read_metrics(Place(str(output))) if "loss" in line]
        losses[workers] = [line["loss"] for line in lines]
        for line in lines:
            assert line["views_per_second"] == pytest.approx(6 * line["samples_per_second"], rel=1e-4)
        assert result.views_per_second == pytest.approx(6 * result.samples_per_second)
        written = read_result(Place(str(output)))["views_per_second"]
        assert written == pytest.approx(result.views_per_second, rel=1e-4)
    assert losses[2] == pytest.approx(losses[1], rel=1e-3)
    assert len(set(losses[1])) == len(losses[1]) > 5
