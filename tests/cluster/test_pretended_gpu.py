"""Whole runs and commands with ``--gpu`` through Ray, where the GPUs of all processes are pretended."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

import raycl
from raycl.inference.embed import Embedder
from raycl.inference.mining import _find as find
from raycl.training import controller
from raycl.training.loop import run_worker
from tests.images import write_digits
from tests.pretend_gpu import pretend_gpu
from tests.texts import invented_texts

pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]

SMALL: dict[str, Any] = {
    "encoder.name": "tests.cluster.networks:small",
    "encoder.kwargs.channels": 1,
    "data.channels": 1,
    "data.image_size": 16,
    "evaluation.num_test": 64,
}
QUEUE = {"negatives.capacity": 64}


def run_on_gpu(settings: Any) -> Any:
    """Train as a worker does that has a GPU."""
    with pretend_gpu():
        return run_worker(settings)


class GpuEmbedder:
    """Embeds as an actor does that has a GPU. Its threads take turns, since the patches are those of the process."""

    def __init__(self, *arguments: Any) -> None:
        self._lock = threading.Lock()
        with self._lock, pretend_gpu():
            self._embedder = Embedder(*arguments)

    def __call__(self, table: pa.Table) -> pa.Table:
        with self._lock, pretend_gpu():
            return self._embedder(table)


def find_on_gpu(*arguments: Any) -> Any:
    """Search as a task does that has a GPU."""
    with pretend_gpu():
        return find(*arguments)


@pytest.fixture(scope="module", autouse=True)
def gpus() -> Iterator[None]:
    """Start a Ray that counts GPUs. The process group is one of gloo, as this machine has no NCCL."""
    group = controller._ProcessGroup
    with (
        mock.patch("raycl.training.driver.run_worker", run_on_gpu),
        mock.patch("raycl.training.controller._ProcessGroup", lambda gpu: group(gpu=False)),
        mock.patch("raycl.inference.embed.Embedder", GpuEmbedder),
        mock.patch("raycl.inference.mining._find", find_on_gpu),
        mock.patch.dict("os.environ", {"RAYCL_TRUSTED": "tests"}),
    ):
        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=2,
            include_dashboard=False,
            object_store_memory=300 * 2**20,
            log_to_driver=False,
            logging_level="ERROR",
        )
        yield
        ray.shutdown()


def train(recipe: str, data: Path, output: Path, **settings: Any) -> Any:
    return raycl.train(
        recipe,
        data=data,
        output=output,
        gpu=True,
        epochs=2,
        batch_size=32,
        quiet=True,
        settings=settings,
        debug=True,
    )


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("simclr", {}),
        ("simclr", {"data.cache": "stream"}),
        ("moco_v2", QUEUE),
        ("moco_v2", {**QUEUE, "momentum_encoder.location": "actors"}),
        ("instance_discrimination", {"negatives.num_negatives": 64}),
    ],
)
def test_images_are_trained_evaluated_and_embedded(
    recipe: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    data, output = write_digits(tmp_path / "digits.parquet", 400), tmp_path / "run"
    trained = train(recipe, data, output, **SMALL, **settings)
    assert trained.steps == 2 * (400 - 40) // 32
    assert np.isfinite(trained.final["knn_top1"])
    test = write_digits(tmp_path / "test.parquet", 100)
    found = raycl.evaluate("knn", run=output, train=data, test=test, gpu=True, quiet=True)
    assert found["num_test"] == 100
    raycl.embed(output, data, tmp_path / "embedded", gpu=True, quiet=True)
    assert pq.read_table(tmp_path / "embedded").num_rows == 400


def test_pairs_are_trained_evaluated_and_mined(tmp_path: Path) -> None:
    queries = list(invented_texts(200, seed=1))
    data, output = tmp_path / "pairs.parquet", tmp_path / "run"
    pq.write_table(pa.table({"query": queries, "document": [f"{query} x" for query in queries]}), data)
    train("two_tower", data, output)
    found = raycl.evaluate("retrieval", run=output, test=data, gpu=True, quiet=True)
    assert found["num_queries"] == 200
    mined = raycl.mine(output, data, tmp_path / "mined.parquet", num_negatives=2, gpu=True, quiet=True)
    assert mined.num_pairs == 200
