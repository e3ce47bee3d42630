"""Runs with a queue and a memory bank: actors against worker-local stores, resumed and killed."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raycl
from raycl.config import RunConfig
from raycl.data.split import make_split
from raycl.errors import ConfigError, DataError
from raycl.negatives.bank import Bank, connect_bank, list_banks
from raycl.negatives.spec import BankSpec
from raycl.negatives.start import start_bank
from raycl.records import read_metrics, read_result
from raycl.storage import Place
from raycl.training.launch import RunResult
from tests.bank_snapshots import rows_in_snapshot
from tests.cluster.test_run import BATCH_SIZE, NUM_IMAGES, NUM_INVALID, small_run, weights_of
from tests.images import write_digits

pytestmark = pytest.mark.usefixtures("ray_cluster")

CAPACITY = 4 * BATCH_SIZE


def run_of(method: str, **settings: Any) -> RunConfig:
    """``small_run`` with another method."""
    stores: dict[str, dict[str, Any]] = {
        "moco_v2": {"negatives.capacity": CAPACITY},
        "moco_v3": {"projection_head.hidden_dim": 64, "prediction_head.hidden_dim": 64},
        "nnclr": {
            "projection_head.hidden_dim": 64,
            "prediction_head.hidden_dim": 64,
            "negatives.capacity": CAPACITY,
        },
        "instance_discrimination": {"negatives.num_negatives": 100, "batchnorm": "synchronized"},
        "sogclr": {"negatives.bank_momentum": 0.5},
    }
    return small_run(method, **{**stores[method], **settings})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data") / "digits.parquet", NUM_IMAGES, broken=NUM_INVALID)


def trained(config: RunConfig, data: Path, output: Path, *, resume: bool = False) -> RunResult:
    return raycl.train(config, data=str(data), output=str(output), resume=resume, quiet=True)


def losses_of(output: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(Place(str(output))) if "loss" in line]


def assert_equal_runs(first: Path, second: Path) -> None:
    assert losses_of(first) == losses_of(second)
    theirs = weights_of(second)
    for name, value in weights_of(first).items():
        assert torch.equal(value, theirs[name]), name


def snapshot_of(output: Path, step: int, num_shards: int = 1) -> dict[str, np.ndarray]:
    """Return the rows of a snapshot in the order of slots."""
    folder = output / "bank" / f"step-{step:08d}"
    assert len(list(folder.glob("shard-*.parquet"))) == num_shards
    return rows_in_snapshot(Place(str(output)), step)


@pytest.fixture(scope="module")
def moco(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    """MoCo v2 with its queue in an actor."""
    output = tmp_path_factory.mktemp("runs") / "moco"
    return output, trained(run_of("moco_v2"), data, output)


def test_the_queues_snapshot_contains_the_keys_of_the_last_steps(moco: tuple[Path, RunResult]) -> None:
    output, result = moco
    held = snapshot_of(output, result.steps)
    steps, counts = np.unique(held["step"], return_counts=True)
    assert steps.tolist() == list(range(result.steps - 4, result.steps))
    assert counts.tolist() == [BATCH_SIZE] * 4
    # Samples are unique within an epoch.
    assert len(np.unique(held["sample_id"])) == CAPACITY


def test_the_metrics_include_negative_age_and_batchnorm_leakage(
    moco: tuple[Path, RunResult],
) -> None:
    output, result = moco
    lines = [line for line in read_metrics(Place(str(output))) if "loss" in line]
    ages = [(line["negatives_age_mean"], line["negatives_age_max"]) for line in lines]
    assert ages[:4] == [(1, 1), (1.5, 2), (2, 3), (2.5, 4)]
    assert set(ages[4:]) == {(2.5, 4)}
    assert -1 < result.final["batchnorm_leakage"] < 1
    assert result.final["knn_top1"] > 0.3


def test_a_bank_ends_with_its_run_and_keeps_the_snapshots_of_its_checkpoints(
    moco: tuple[Path, RunResult],
) -> None:
    output, _ = moco
    assert "moco" not in list_banks()
    steps = {path.name for path in (output / "bank").glob("step-*")}
    assert steps == {path.name.removesuffix("-evaluated") for path in (output / "checkpoints").glob("step-*")}


def test_one_process_repeats_a_step_with_the_queue_of_the_snapshot(moco: tuple[Path, RunResult]) -> None:
    output, result = moco
    found = raycl.replay(output, step=result.steps, top=8)
    assert found.checkpoint is not None
    assert found.relative_difference is not None and found.relative_difference < 5e-4
    rows = [each for query in found.queries for each in query.negatives]
    assert {each.source for each in rows} == {"queue"}
    assert {each.age for each in rows} <= {1, 2, 3, 4}
    assert all(each.sample.picture and each.sample.label for each in rows)


@pytest.fixture(scope="module")
def in_step(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    """InstDisc with a bank of two shards that are read without prefetching."""
    output = tmp_path_factory.mktemp("runs") / "instance"
    config = run_of("instance_discrimination", **{"bank.max_staleness": 0, "bank.shards": 2})
    return output, trained(config, data, output)


@pytest.mark.drill
def test_a_synchronous_bank_in_actors_gives_the_same_run_as_a_bank_in_workers(
    in_step: tuple[Path, RunResult], data: Path, tmp_path: Path
) -> None:
    output, result = in_step
    trained(run_of("instance_discrimination", **{"bank.location": "worker"}), data, tmp_path / "run")
    assert_equal_runs(output, tmp_path / "run")
    held = snapshot_of(output, result.steps, num_shards=2)
    # Every trained sample has the step of its last update; the others were never written.
    assert (held["step"] < result.steps).all()
    assert (held["step"] >= result.steps // 2).sum() == result.steps // 2 * BATCH_SIZE


@pytest.mark.drill
def test_a_memory_bank_run_that_loses_a_worker_equals_an_uninterrupted_run(
    in_step: tuple[Path, RunResult], data: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "died"
    # To fill the bank, the network also encodes every batch of an epoch once before training.
    die_at = in_step[1].steps // 2 + 8
    arguments = {"channels": 1, "die_at": die_at, "marker": str(marker)}
    settings = {"encoder.kwargs": arguments, "bank.max_staleness": 0, "bank.shards": 2}
    config = run_of("instance_discrimination", **settings)
    trained(config, data, tmp_path / "run")
    assert int(marker.read_text()) == in_step[1].steps - 5
    assert_equal_runs(in_step[0], tmp_path / "run")


@pytest.mark.drill
def test_streamed_data_trains_with_slots_prefetched_one_step_ahead(data: Path, tmp_path: Path) -> None:
    config = run_of("instance_discrimination", **{"data.cache": "stream", "data.shuffle_buffer_size": 128})
    result = trained(config, data, tmp_path / "run")
    # Invalid rows also have slots, since they are discovered while streaming; held-out rows have none.
    holdout = make_split(NUM_IMAGES, num_test=64, num_train=10_000, seed=0)
    trained_on = np.flatnonzero(holdout.is_train(np.arange(NUM_IMAGES)))
    assert snapshot_of(tmp_path / "run", result.steps)["sample_id"].tolist() == trained_on.tolist()
    assert np.isfinite(losses_of(tmp_path / "run")).all()


@pytest.mark.parametrize(
    ("method", "of_whole", "of_interrupted"),
    [
        pytest.param("moco_v3", {"workers": 1}, {"workers": 1}, marks=pytest.mark.drill),
        pytest.param("nnclr", {"workers": 1}, {"workers": 1}, marks=pytest.mark.drill),
        pytest.param(
            *("sogclr", {"bank.location": "worker"}, {"bank.max_staleness": 0, "bank.shards": 2}),
            marks=pytest.mark.drill,
        ),
    ],
)
def test_a_run_that_loses_a_worker_equals_an_uninterrupted_run(
    method: str, of_whole: dict[str, Any], of_interrupted: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    """With a prediction head, and with the partition functions of samples, whose actors equal a bank in workers."""
    result = trained(run_of(method, **of_whole), data, tmp_path / "whole")
    marker = tmp_path / "died"
    arguments = {"channels": 1, "die_at": 8, "marker": str(marker)}
    trained(run_of(method, **{"encoder.kwargs": arguments}, **of_interrupted), data, tmp_path / "run")
    assert int(marker.read_text()) == result.steps - 5
    [failure] = read_result(Place(str(tmp_path / "run")))["failures"]
    # It died in step 8, after the checkpoint of step 5. A worker reports its steps a few times a second.
    assert (failure["step"], failure["repeated_steps"] <= 2, failure["lost_seconds"] > 0) == (5, True, True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "run")
    assert all(name.startswith("layers.") for name in weights_of(tmp_path / "run"))
    assert result.final["knn_top1"] > 0.2


@pytest.mark.drill
def test_no_acknowledged_row_is_lost_when_a_worker_and_a_shard_are_killed(data: Path, tmp_path: Path) -> None:
    output, marker = tmp_path / "drill", tmp_path / "died"
    settings = {
        "encoder.kwargs": {"channels": 1, "die_at": 75, "marker": str(marker)},
        # The queue holds forty steps, so that snapshots after the kills contain rows from before.
        "negatives.capacity": 40 * BATCH_SIZE,
        "stages.0.epochs": 15,
        "checkpoints.every_steps": 15,
        "checkpoints.keep": 100,
        "evaluation.every_epochs": 0,
        "max_failures": 2,
    }
    killed: list[int] = []
    killer = threading.Thread(target=kill_shard_once, args=("drill", 20, killed))
    killer.start()
    result = trained(run_of("moco_v2", **settings), data, output)
    killer.join(60)
    assert marker.exists(), "no worker died"
    assert killed, "no shard died"
    order = ids_by_step(result.steps // 15, 15)
    snapshots = [int(folder.name.removeprefix("step-")) for folder in (output / "bank").glob("step-*")]
    assert any(killed[0] < step < killed[0] + 40 for step in snapshots)
    for step in snapshots:
        held = snapshot_of(output, step)
        first = max(0, step - 40)
        assert sorted(set(held["step"].tolist())) == list(range(first, step))
        for written in range(first, step):
            assert sorted(held["sample_id"][held["step"] == written]) == sorted(order[written]), (
                step,
                written,
            )


def ids_by_step(steps_per_epoch: int, num_epochs: int) -> list[list[int]]:
    """Return the samples of each global batch of a run without a holdout."""
    num_rows = NUM_IMAGES - NUM_INVALID
    orders = [np.random.default_rng((0, epoch)).permutation(num_rows) for epoch in range(num_epochs)]
    return [
        order[step * BATCH_SIZE : (step + 1) * BATCH_SIZE].tolist()
        for order in orders
        for step in range(steps_per_epoch)
    ]


@pytest.mark.drill
def test_a_run_survives_and_reports_a_killed_memory_bank_shard(data: Path, tmp_path: Path) -> None:
    killed: list[int] = []
    killer = threading.Thread(target=kill_shard_once, args=("slots", 20, killed))
    killer.start()
    config = run_of("instance_discrimination", **{"stages.0.epochs": 15, "evaluation.every_epochs": 0})
    result = trained(config, data, tmp_path / "slots")
    killer.join(60)
    assert killed, "no shard died"
    lines = [line for line in read_metrics(Place(str(tmp_path / "slots"))) if "loss" in line]
    restarts = {line["step"]: line["bank_restarts"] for line in lines}
    assert restarts[5] == 0
    assert restarts[result.steps] == 1
    assert np.isfinite([line["loss"] for line in lines]).all()
    held = snapshot_of(tmp_path / "slots", result.steps)
    last = list(range(result.steps - result.steps // 15, result.steps))
    assert sorted(set(held["step"].tolist()) & set(last)) == last


def kill_shard_once(name: str, step: int, killed: list[int]) -> None:
    """SIGKILL the bank's process after a run has passed the step; record the newest step."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not killed:
        bank = found(name)
        stats = None if bank is None else bank.stats()
        if stats is not None and (stats.newest_step or 0) >= step:
            os.kill(stats.shards[0].pid, signal.SIGKILL)
            killed.append(stats.newest_step or 0)
        time.sleep(0.02)


def found(name: str) -> Bank | None:
    return connect_bank(name) if name in list_banks() else None


def test_a_bank_of_another_run_is_not_replaced(data: Path, tmp_path: Path) -> None:
    other = start_bank(BankSpec(name="taken", kind="queue", dim=8, output=str(tmp_path / "x"), capacity=64))
    try:
        with pytest.raises(ConfigError, match=r"the bank 'taken' belongs to the run at .*x; set bank.name"):
            trained(run_of("moco_v2"), data, tmp_path / "taken")
        assert not (tmp_path / "taken" / "config.yaml").exists()
        assert connect_bank("taken").stats().filled == 0
    finally:
        other.stop()


def test_more_negatives_than_samples_are_refused(data: Path, tmp_path: Path) -> None:
    config = run_of("instance_discrimination", **{"negatives.num_negatives": 4_096})
    with pytest.raises(ConfigError, match=r"num_negatives 4096 is more than the 6\d\d samples"):
        trained(config, data, tmp_path / "run")
    assert not (tmp_path / "run" / "config.yaml").exists()  # so that another run can use the output


def test_a_streamed_dataset_has_no_ids_for_a_bank(tmp_path: Path) -> None:
    import ray

    rows = [{"image": np.zeros((12, 12, 1), np.uint8), "label": index % 2} for index in range(128)]
    config = run_of("instance_discrimination", **{"data.cache": "stream", "workers": 1})
    with pytest.raises(DataError, match="a memory bank and negatives.mined need the ids of all samples"):
        raycl.train(config, dataset=ray.data.from_items(rows), output=str(tmp_path / "run"), quiet=True)
