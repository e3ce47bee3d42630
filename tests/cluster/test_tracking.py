"""The metrics of a run in Prometheus and TensorBoard, during and after the run."""

import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import raycl
from raycl.data.columns import ColumnNames
from raycl.data.read_stats import ReadStats
from raycl.data.split import Holdout
from raycl.records import read_metrics
from raycl.storage import Place
from raycl.tracking.prometheus import METRICS
from raycl.tracking.trackers import BackgroundTracker
from raycl.training.coordinator import start_coordinator
from raycl.training.job import Job
from raycl.training.metrics_logger import MetricsLogger
from raycl.training.stages import Position
from tests.cluster.networks import small
from tests.cluster.test_run import BATCH_SIZE, NUM_IMAGES, NUM_INVALID, SMALL
from tests.images import write_digits

pytestmark = pytest.mark.usefixtures("ray_cluster")

CAPACITY = 128
NUM_STEPS_BEFORE = 3  # steps before the run waits
# Not for plots: the time, the number of evaluated rows, and their dimension.
NOT_EXPORTED = {"time", "num_rows", "dim"}

Samples = dict[str, list[tuple[dict[str, str], float]]]


class WaitingEncoder(nn.Module):
    """An encoder that waits within a step until the marker exists."""

    def __init__(self, marker: str, channels: int = 1) -> None:
        super().__init__()
        self.network = small(channels=channels)
        self._marker, self._num_batches = marker, 0

    def forward(self, images: Tensor) -> Tensor:
        self._num_batches += self.training
        if self.training and self._num_batches == NUM_STEPS_BEFORE + 1:
            deadline = time.monotonic() + 300
            while not Path(self._marker).exists() and time.monotonic() < deadline:
                time.sleep(0.1)
        return self.network(images)


def patient(**arguments: Any) -> nn.Module:
    return WaitingEncoder(**arguments)


@pytest.fixture
def coordinator() -> Iterator[Any]:
    with start_coordinator() as actor:
        yield actor


def recorder_of(output: Path, coordinator: Any) -> MetricsLogger:
    """Return the metrics logger of a newly started run."""
    config = raycl.override(raycl.recipe("simclr"), {"tracking.tensorboard": True})
    job = Job(
        config=config,
        output=Place(str(output)),
        blocks=(),
        stream=None,
        num_train=(0,),
        holdout=Holdout(seed=0),
        coordinator=coordinator,
        is_evaluated=False,
        columns=ColumnNames(),
        workers=(1, 1),
    )
    return MetricsLogger(job, Position(), num_steps=9)


def shown_in_tensorboard(output: Path, name: str) -> list[tuple[int, float]]:
    shown = EventAccumulator(str(output / "tensorboard"))
    shown.Reload()
    return [(event.step, event.value) for event in shown.Scalars(name)]


def test_rolled_back_steps_are_not_in_tensorboard(coordinator: Any, tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path, coordinator)
    for step in (1, 2, 3):
        recorder.write(Position(step=step), {"loss": 1.0})
    recorder.roll_back(Position(step=1, rollbacks=1), "went back from step 3")
    recorder.write(Position(step=2, rollbacks=1), {"loss": 0.5})
    recorder.close(finished=True)
    assert shown_in_tensorboard(tmp_path, "loss") == [(1, 1.0), (2, 0.5)]


def test_a_failing_tracker_is_reported_once_and_counted_and_the_run_continues(
    coordinator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "raycl.tracking.trackers.BackgroundTracker", partial(BackgroundTracker, interval_s=0.5)
    )
    in_the_way = tmp_path / "tensorboard"
    in_the_way.write_text("a file where the folder should be")
    recorder = recorder_of(tmp_path, coordinator)
    deadline = time.monotonic() + 60
    lines: list[dict[str, Any]] = []
    step = 0
    while not any(line.get("tracking_failures", 0) > 1 for line in lines):
        assert time.monotonic() < deadline
        step += 1
        recorder.write(Position(step=step), {"loss": 0.5})
        recorder.flush()
        lines = read_metrics(Place(str(tmp_path)))
        time.sleep(0.1)
    in_the_way.unlink()
    recorder.close(finished=True)
    [notice] = ray.get(coordinator.notices.remote())
    assert "tracking.tensorboard failed: " in notice
    assert [line["event"] for line in lines if "event" in line] == ["tracking"]
    # All refused records arrived in the end.
    assert shown_in_tensorboard(tmp_path, "loss") == [(each, 0.5) for each in range(1, step + 1)]


def scrape(run: str) -> Samples:
    """Return the tags and values that the node exports to Prometheus, by raycl's metric names."""
    [node] = [node for node in ray.nodes() if node["Alive"]]
    port = node["MetricsExportPort"]
    assert port > 0, "Ray exports no metrics here: ray[default] is not installed"
    with urllib.request.urlopen(f"http://{node['NodeManagerAddress']}:{port}/metrics", timeout=30) as page:
        families = text_string_to_metric_families(page.read().decode())
        samples = [sample for family in families for sample in family.samples]
    names = {metric.exported: name for name, metric in METRICS.items()}
    found: Samples = {}
    for sample in samples:
        if sample.name.startswith("ray_raycl_") and sample.labels.get("run") == run:
            found.setdefault(names[sample.name], []).append((sample.labels, sample.value))
    return found


@pytest.mark.drill
def test_constant_metrics_stay_visible() -> None:
    """Ray itself drops a gauge after two exports, 10 s apart."""
    with start_coordinator({"run": "lasting", "recipe": "none"}) as actor:
        stats = ReadStats(num_rows=8, num_train=5, invalid=Counter({"not an image": 2, "too large": 1}))
        ray.get(actor.add_rows.remote("fragment", stats))
        for _ in range(60):
            if seen := scrape("lasting"):
                break
            time.sleep(0.5)
        time.sleep(25)
        again = scrape("lasting")
    assert [value for _, value in again["rows_read"]] == [8]
    invalid = {tags["cause"]: value for tags, value in again["rows_invalid"]}
    assert invalid == {"not an image": 2, "too large": 1}
    assert again == seen


@pytest.mark.drill
def test_prometheus_and_tensorboard_show_a_run_with_its_data_and_bank(tmp_path: Path) -> None:
    data = write_digits(tmp_path / "digits.parquet", NUM_IMAGES, broken=NUM_INVALID)
    output, marker = tmp_path / "watched", tmp_path / "go-on"
    config = raycl.override(
        raycl.recipe("moco_v2", image_size=16),
        {
            **SMALL,
            "encoder.name": "tests.cluster.test_tracking:patient",
            "encoder.kwargs": {"marker": str(marker)},
            "stages.0.epochs": None,
            "stages.0.steps": NUM_STEPS_BEFORE + 2,
            "stages.0.learning_rate_schedule": "constant",
            "stages.0.warmup_epochs": 0.0,
            "negatives.capacity": CAPACITY,
            "tracking.tensorboard": True,
        },
    )
    run = threading.Thread(
        target=raycl.train, args=(config,), kwargs={"data": str(data), "output": str(output), "quiet": True}
    )
    run.start()
    num_samples = NUM_STEPS_BEFORE * BATCH_SIZE
    expected = {
        "step": NUM_STEPS_BEFORE,
        "samples": num_samples,
        "workers": 2,
        "trained_steps": NUM_STEPS_BEFORE,
        "trained_samples": num_samples,
        "rows_read": NUM_IMAGES,
        "rows_invalid": NUM_INVALID,
        "bank_rows": CAPACITY,
        "bank_rows_written": num_samples,
    }
    try:
        seen = wait_for(expected, run)
    finally:
        marker.touch()
        run.join()
    [(tags, _)] = seen["rows_invalid"]
    assert (tags["cause"], tags["recipe"]) == ("not an image", "moco_v2")
    calls = {tags["method"]: value for tags, value in seen["bank_calls"]}
    assert calls["push"] == 2 * NUM_STEPS_BEFORE  # each worker exports its share

    lines = read_metrics(Place(str(output)))
    numbers = {name for line in lines for name, value in line.items() if isinstance(value, int | float)}
    assert numbers - NOT_EXPORTED <= set(METRICS)
    [at_last] = [line["loss"] for line in lines if line["step"] == NUM_STEPS_BEFORE and "loss" in line]
    assert [value for _, value in seen["loss"]] == [pytest.approx(at_last, rel=1e-5)]
    assert {"knn_top1", "embedding_std", "negatives_age_max", "data_wait_fraction"} <= seen.keys()

    for name in ("loss", "knn_top1"):
        written = [(line["step"], pytest.approx(line[name], rel=1e-5)) for line in lines if name in line]
        assert shown_in_tensorboard(output, name) == written


def wait_for(expected: dict[str, float], run: threading.Thread) -> Samples:
    """Return the exported metrics once they are as expected; every process exports on its own schedule."""
    seen: Samples = {}
    deadline = time.monotonic() + 300
    while {name: [value for _, value in seen.get(name, [])] for name in expected} != {
        name: [value] for name, value in expected.items()
    }:
        assert run.is_alive()
        assert time.monotonic() < deadline, seen
        time.sleep(1)
        seen = scrape("watched")
    return seen
