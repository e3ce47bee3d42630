"""Runs on a cluster that starts without nodes: workers follow the nodes, and the losses stay equal."""

import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from torch import Tensor, nn

import raycl
from raycl.inference.embed import Embedder
from raycl.records import read_metrics
from raycl.storage import Place
from tests.cluster.networks import Small
from tests.encoders import write_images_run
from tests.growing_cluster import GrowingCluster, growing_cluster, processes_of
from tests.images import write_digits

pytestmark = [pytest.mark.drill, pytest.mark.timeout(3600)]

NUM_IMAGES, BATCH_SIZE, EPOCHS = 300, 48, 60
STEPS_PER_EPOCH = NUM_IMAGES // BATCH_SIZE
QUEUED_STEPS = 4
SETTINGS: dict[str, Any] = {
    "autoscaling": "true",
    "batchnorm": "synchronized",
    "checkpoints.interval_s": 5,
    "data.channels": 1,
    "data.image_size": 16,
    "encoder.name": f"{__name__}:patient",
    "evaluation.every_epochs": 0,
    "log_every_steps": 1,
    "negatives.capacity": QUEUED_STEPS * BATCH_SIZE,
}


class DelayedEncoder(Small):
    """Delays each batch by a second until the marker exists."""

    def __init__(self, marker: str) -> None:
        super().__init__(channels=1, dropout=0.0)
        self._until = marker

    def forward(self, images: Tensor) -> Tensor:
        if self.training and not Path(self._until).exists():
            time.sleep(1.0)
        return super().forward(images)


def patient(**arguments: Any) -> nn.Module:
    return DelayedEncoder(**arguments)


def lines_of(output: Path) -> list[dict[str, Any]]:
    if not (output / "metrics.jsonl").exists():
        return []
    return [line for line in read_metrics(Place(str(output))) if "loss" in line]


def train(
    cluster: GrowingCluster, recipe: str, output: Path, *, marker: Path, until: int, **settings: Any
) -> tuple[float, float]:
    """Train with ``raycl train`` on a cluster; hurry after the first line with ``until`` workers."""
    data = write_digits(cluster.folder / "digits.parquet", NUM_IMAGES)
    settings = SETTINGS | {"encoder.kwargs.marker": str(marker)} | settings
    flags = {"--data": data, "--output": output, "--batch-size": BATCH_SIZE}
    arguments = [str(part) for flag in flags.items() for part in flag]
    arguments += [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]

    def hurry() -> None:
        if any(line["workers"] >= until for line in lines_of(output)):
            marker.touch()

    return cluster.train(recipe, *arguments, meanwhile=hurry)


@pytest.mark.parametrize("recipe", ["simclr", "moco_v2"])
def test_a_run_grows_with_its_cluster_without_changing_its_losses(recipe: str, tmp_path: Path) -> None:
    grown, alone, marker = tmp_path / "grown", tmp_path / "alone", tmp_path / "hurry"
    # The delay between two nodes is long enough for the run to grow by one worker.
    with growing_cluster(max_nodes=3, boot_s=45.0) as cluster:
        length = {"stages.0.epochs": EPOCHS}
        assert cluster.look().nodes == 0
        elastic = {"workers": 3, "min_workers": 1}
        began, over = train(cluster, recipe, grown, marker=marker, until=3, **elastic, **length)
        assert cluster.wait_until_empty().nodes == 0
        during = [seen.nodes for seen in cluster.seen if began <= seen.time <= over]
        assert during[0] == 0
        assert max(during) >= 2
        train(cluster, recipe, alone, marker=marker, until=1, workers=1, **length)
    assert not processes_of(cluster.folder)

    lines = lines_of(grown)
    workers = [line["workers"] for line in lines]
    assert workers[0] == 1
    assert workers == sorted(workers)
    assert workers[-1] > 1
    # With any number of workers, every step has the configured batch size and every epoch all its steps.
    assert [line["step"] for line in lines] == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
    assert [line["samples"] for line in lines] == [BATCH_SIZE * line["step"] for line in lines]
    assert [line["epoch"] for line in lines] == [(line["step"] - 1) // STEPS_PER_EPOCH for line in lines]
    reference = lines_of(alone)
    assert {line["workers"] for line in reference} == {1}
    assert [line["learning_rate"] for line in lines] == [line["learning_rate"] for line in reference]
    if recipe == "moco_v2":
        ages = [line["negatives_age_max"] for line in lines]
        assert ages == [min(line["step"], QUEUED_STEPS) for line in lines]
    # Sums in a different order diverge over time, so compare the losses around each change.
    first, *others = changes(lines)
    assert_equal_losses(lines, reference, around=first, rel=1e-4)
    for change in others:
        assert_equal_losses(lines, reference, around=change, rel=1e-2)


def changes(lines: list[dict[str, Any]]) -> list[int]:
    """Return the indices of the first lines after a change of the number of workers."""
    numbers = [line["workers"] for line in lines]
    return [index for index, (few, more) in enumerate(pairwise(numbers), start=1) if few != more]


def assert_equal_losses(
    lines: list[dict[str, Any]], reference: list[dict[str, Any]], *, around: int, rel: float
) -> None:
    near = slice(max(0, around - 3), around + 10)
    expected = [line["loss"] for line in reference[near]]
    assert [line["loss"] for line in lines[near]] == pytest.approx(expected, rel=rel)


def test_a_stage_with_more_workers_gets_them_and_keeps_the_queue(tmp_path: Path) -> None:
    output, marker = tmp_path / "run", tmp_path / "hurry"
    marker.touch()
    stages = {"stages.0.epochs": 2, "stages.1.epochs": 2, "stages.0.workers": 1, "stages.1.workers": 2}
    # Starting a node takes longer than 60 s, after which Ray Train gives up on a group and retries.
    with growing_cluster(max_nodes=2, boot_s=70.0) as cluster:
        train(cluster, "moco_v2", output, marker=marker, until=2, **stages)
        assert cluster.wait_until_empty().nodes == 0
    lines = lines_of(output)
    assert [(line["stage"], line["workers"]) for line in lines] == [(0, 1)] * 12 + [(1, 2)] * 12
    assert [line["samples"] for line in lines] == [BATCH_SIZE * step for step in range(1, 25)]
    # A new queue would be young at step 13; a queue with another batch size would never reach this mean age.
    assert [line["negatives_age_max"] for line in lines] == [min(step, QUEUED_STEPS) for step in range(1, 25)]
    assert {line["negatives_age_mean"] for line in lines[QUEUED_STEPS:]} == {(1 + QUEUED_STEPS) / 2}
    assert cluster.seen[0].nodes == 0
    assert max(seen.nodes for seen in cluster.seen) == 2


class HostEmbedder:
    """Embeds slowly on the CPU of a node whose GPU is simulated."""

    def __init__(
        self, encoder: Any, use_gpu: bool, network: nn.Module | None, trusted: tuple[str, ...]
    ) -> None:
        assert use_gpu
        assert ray.get_gpu_ids()
        self._embedder = Embedder(encoder, False, network, trusted)

    def __call__(self, table: pa.Table) -> pa.Table:
        time.sleep(10.0)
        return self._embedder(table)


def embed_on_gpus(*arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raycl.inference.embed.Embedder", HostEmbedder)
        raycl.embed(*arguments, gpu=True)


def test_embedding_waits_for_gpus_and_takes_those_that_come(tmp_path: Path) -> None:
    run = write_images_run(
        tmp_path / "run",
        "resnet10",
        channels=1,
        image_size=16,
        stored_size=16,
        width=0.25,
        representation_dim=128,
    )
    few = pq.read_table(write_digits(tmp_path / "few.parquet", 1_700))
    data = tmp_path / "digits.parquet"
    # Minutes of work: Ray Data asks for a second node only after a while.
    pq.write_table(pa.concat_tables([few] * 6), data, row_group_size=1_000)
    raycl.embed(run, data, tmp_path / "here", quiet=True)
    code = f"import sys; from {__name__} import embed_on_gpus; embed_on_gpus(*sys.argv[1:])"
    with growing_cluster(max_nodes=2, boot_s=5.0, gpus=1) as cluster:
        cluster.run([sys.executable, "-c", code, run, str(data), str(tmp_path / "there")])
        assert "the cluster has no GPU yet; waiting up to 15 minutes for one" in cluster.output()
        assert max(seen.nodes for seen in cluster.seen) == 2
    here, there = (pq.read_table(tmp_path / name).sort_by("sample_id") for name in ("here", "there"))
    assert here["sample_id"].equals(there["sample_id"])
    first, second = (np.stack(table["representation"].to_numpy()) for table in (here, there))
    np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-5)
