"""The kill matrix: runs of every method survive every fault without a change to their results."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import ray
import safetensors.torch
import torch

import raycl
from raycl.config import RunConfig
from raycl.negatives.bank import connect_bank
from raycl.records import CHECKPOINT_LIST, CHECKPOINTS, read_metrics, read_result
from raycl.storage import Place
from raycl.training.checkpoint import saved_steps
from tests.bank_snapshots import rows_in_snapshot
from tests.cluster.faults import Node, extra_node, kill_process, wait_until
from tests.faulty_s3 import FaultyS3
from tests.images import write_digits
from tests.pairs import write_pairs
from tests.settings import override_active

pytestmark = pytest.mark.usefixtures("ray_cluster")

Method = Literal["simclr", "moco_v2", "instance_discrimination", "two_tower"]
METHODS: tuple[Method, ...] = ("simclr", "moco_v2", "instance_discrimination", "two_tower")
ROOT = Path(__file__).parent.parent.parent
BATCH_SIZE, NUM_ROWS, NUM_EPOCHS, SAVED_EVERY = 32, 360, 4, 5
FAULT_AFTER_STEP = 2 * SAVED_EVERY  # the fault comes after this checkpoint
OUTAGE_S = 20.0

COMMON: dict[str, Any] = {
    "workers": 2,
    "cpus_per_worker": 0.5,
    # Read from storage in every epoch, so that data tasks run all the time.
    "data.cache": "stream",
    "data.shuffle_buffer_size": 128,
    "stages.0.epochs": NUM_EPOCHS,
    "stages.0.batch_size": BATCH_SIZE,
    "evaluation.num_test": 40,
    "checkpoints.every_steps": SAVED_EVERY,
    "checkpoints.keep": 100,
    "log_every_steps": 1,
}
IMAGES = {"data.channels": 1, "encoder.name": "tests.cluster.networks:slow", "evaluation.k": 20}
QUEUE = {"negatives.capacity": 4 * BATCH_SIZE}
OWN: dict[Method, dict[str, Any]] = {
    "simclr": IMAGES,
    "moco_v2": IMAGES | QUEUE,
    # Read without prefetching: prefetched rows would depend on timing.
    "instance_discrimination": IMAGES
    | {"negatives.num_negatives": 64, "batchnorm": "synchronized", "bank.max_staleness": 0, "bank.shards": 2},
    "two_tower": QUEUE
    | {
        "negatives.store": "queue",
        "separate_towers": True,
        "text.vocabulary_size": 400,
        "encoder.name": "tests.cluster.networks:slow_words",
        "projection_head.dim": 16,
    },
}


@dataclass
class FaultedRun:
    """A run in a separate process that faults are applied to."""

    config: RunConfig
    data: Path
    output: Place
    folder: Path
    s3: FaultyS3 | None = None
    node: Node | None = None
    drivers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *flags: str) -> None:
        file = self.folder / "run.yaml"
        file.write_text(json.dumps(self.config.model_dump(mode="json")))
        command = [sys.executable, "jobs/train.py", str(file), "--data", str(self.data)]
        with (self.folder / "log").open("ab") as log:
            self.drivers.append(
                subprocess.Popen(
                    [*command, "--output", self.output.uri, *flags],
                    cwd=ROOT,
                    env=os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address},
                    stdout=log,
                    stderr=log,
                )
            )

    def wait_for_checkpoint(self, step: int) -> None:
        def is_there() -> bool:
            assert self.drivers[-1].poll() is None, self.log()
            return max(saved_steps(self.output), default=0) >= step

        wait_until(is_there, timeout_s=300)

    def end(self) -> int:
        """Let the run finish without delays; return the exit status of its driver."""
        (self.folder / "hurry").touch()
        return self.drivers[-1].wait(300)

    def log(self) -> str:
        return (self.folder / "log").read_text()[-3_000:]


def config_of(method: Method, folder: Path, **settings: Any) -> RunConfig:
    arguments: dict[str, Any] = {"marker": str(folder / "hurry")}
    arguments |= {"dim": 16} if method == "two_tower" else {"channels": 1}
    named = {**COMMON, **OWN[method], "encoder.kwargs": arguments, **settings}
    return override_active(raycl.recipe(method, image_size=16), named)


# Faults


def lose_worker(_: FaultedRun) -> None:
    kill_process("ray::RayTrainWorker")


def lose_controller(_: FaultedRun) -> None:
    kill_process("ray::TrainController")


def lose_data_worker(_: FaultedRun) -> None:
    kill_process("ray::MapBatches")


def lose_shard(run: FaultedRun) -> None:
    kill_process(("ray::QueueActor", "ray::MemoryBankActor"))


def lose_node(run: FaultedRun) -> None:
    assert run.node is not None
    run.node.kill()
    run.node = Node(3)


def lose_driver(run: FaultedRun) -> None:
    run.drivers[-1].send_signal(signal.SIGKILL)
    run.drivers[-1].wait(30)
    run.start("--resume")


def lose_storage(run: FaultedRun) -> None:
    assert run.s3 is not None
    run.s3.go_away(OUTAGE_S)


FAULTS: Mapping[str, Callable[[FaultedRun], None]] = {
    "worker": lose_worker,
    "controller": lose_controller,
    "data worker": lose_data_worker,
    "bank shard": lose_shard,
    "node": lose_node,
    "driver": lose_driver,
    "S3 for 20 s": lose_storage,
}
CELLS = [
    (fault, method)
    for fault in FAULTS
    for method in METHODS
    if (fault, method) != ("bank shard", "simclr")  # SimCLR has no bank
]


@dataclass(frozen=True)
class UninterruptedRun:
    """A run without faults."""

    method: Method
    data: Path
    output: Place


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Method], UninterruptedRun]:
    """Return the uninterrupted run of a method, trained on first use."""
    made: dict[Method, UninterruptedRun] = {}

    def of(method: Method) -> UninterruptedRun:
        if method not in made:
            folder = tmp_path_factory.mktemp(method)
            (folder / "hurry").touch()
            data = folder / "data.parquet"
            (write_pairs if method == "two_tower" else write_digits)(data, NUM_ROWS)
            output = Place(str(folder / "uninterrupted"))
            config = config_of(method, folder)
            raycl.train(config, data=str(data), output=output.uri, quiet=True)
            made[method] = UninterruptedRun(method, data, output)
        return made[method]

    return of


@pytest.mark.drill
@pytest.mark.parametrize(("fault", "method"), CELLS)
def test_a_run_with_a_fault_equals_the_uninterrupted_run(
    fault: str,
    method: Method,
    uninterrupted: Callable[[Method], UninterruptedRun],
    s3_server: str,
    tmp_path: Path,
) -> None:
    expected = uninterrupted(method)
    run = FaultedRun(config_of(method, tmp_path), expected.data, Place(str(tmp_path / "run")), tmp_path)
    with ExitStack() as stack:
        if fault == "node":
            run.node = stack.enter_context(extra_node(3))
            run.config = config_of(method, tmp_path, cpus_per_worker=2.5)  # two workers do not fit on a node
            stack.callback(lambda: run.node.kill() if run.node else None)
        if fault.startswith("S3"):
            run.s3 = stack.enter_context(FaultyS3(s3_server))
            run.output = Place(run.s3.uri(f"matrix/{method}"))
        run.start()
        stack.callback(lambda: run.drivers[-1].kill())
        run.wait_for_checkpoint(FAULT_AFTER_STEP)
        FAULTS[fault](run)
        assert run.end() == 0, run.log()
        if run.s3 is not None:
            assert run.s3.count("away") > 0
        assert_ended_like(expected, run.output, exactly=fault != "bank shard")
    assert "Traceback" not in (tmp_path / "log").read_text()


def lose_key_encoder(_: FaultedRun) -> None:
    kill_process("ray::EncoderActor")


def lose_pool(_: FaultedRun) -> None:
    kill_process("ray::PoolActor")


@pytest.mark.drill
@pytest.mark.parametrize("lose", [lose_key_encoder, lose_pool, lose_worker, lose_driver])
def test_a_run_with_key_encoders_survives_a_fault_with_young_keys_and_all_steps(
    lose: Callable[[FaultedRun], None], uninterrupted: Callable[[Method], UninterruptedRun], tmp_path: Path
) -> None:
    expected = uninterrupted("moco_v2")
    # The pool starts within the delays of 3 s per epoch.
    settings: dict[str, Any] = {"location": "actors", "actors": 2, "cpus_per_actor": 0.5, "max_age": 12}
    settings = {f"momentum_encoder.{name}": value for name, value in settings.items()}
    run = FaultedRun(
        config_of("moco_v2", tmp_path, **settings), expected.data, Place(str(tmp_path / "run")), tmp_path
    )
    run.start()
    try:
        run.wait_for_checkpoint(FAULT_AFTER_STEP)
        wait_until(lambda: any(line.get("key_encoders") for line in read_metrics(run.output)))
        lose(run)
        assert run.end() == 0, run.log()
    finally:
        run.drivers[-1].kill()
    lines = [line for line in read_metrics(run.output) if "loss" in line]
    result, reference = read_result(run.output), read_result(expected.output)
    assert result["status"] == "finished"
    assert [line["step"] for line in lines] == list(range(1, reference["steps"] + 1))
    assert all(0 <= line["key_age_max"] <= 12 for line in lines)
    assert max(line["key_age_max"] for line in lines) > 0
    assert result["final"]["knn_top1"] == pytest.approx(reference["final"]["knn_top1"], abs=0.1)
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.drill
@pytest.mark.parametrize("cache", ["materialize", "stream"])
def test_a_run_that_loses_a_node_for_good_continues_with_the_remaining_workers(
    cache: str, tmp_path: Path
) -> None:
    data = write_digits(tmp_path / "data.parquet", NUM_ROWS)
    settings: dict[str, Any] = {"data.cache": cache, "encoder.kwargs": {"channels": 1, "dropout": 0.0}}
    settings["encoder.kwargs"] |= {"marker": str(tmp_path / "hurry")}
    # At the recipe's rate this small network amplifies rounding errors within ten steps.
    settings["stages.0.learning_rate"] = 0.03
    config = config_of("simclr", tmp_path, **settings, min_workers=1, cpus_per_worker=2.5)
    run = FaultedRun(config, data, Place(str(tmp_path / "run")), tmp_path)
    with extra_node(3) as node:
        run.start()
        run.wait_for_checkpoint(FAULT_AFTER_STEP)
        node.kill()
        assert run.end() == 0, run.log()
    lines = [line for line in read_metrics(run.output) if "loss" in line]
    workers = [line["workers"] for line in lines]
    assert workers[0] == 2
    assert workers[-1] == 1
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    alone = Place(str(tmp_path / "alone"))
    raycl.train(
        config_of("simclr", tmp_path, **settings, workers=1), data=str(data), output=alone.uri, quiet=True
    )
    assert read_result(run.output)["steps"] == read_result(alone)["steps"]
    if cache == "materialize":  # streamed rows are split over workers, so their number changes the batches
        losses = [loss for _, loss in losses_of(alone)]
        assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-4)


@pytest.mark.drill
def test_an_announced_node_loss_triggers_a_checkpoint_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "1")
    monkeypatch.setenv("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "0.5")
    data = write_digits(tmp_path / "data.parquet", NUM_ROWS)
    # Nothing else triggers a checkpoint. Losing the actor that reads a stream would count as a failure.
    settings = {"checkpoints.every_steps": 1_000, "evaluation.every_epochs": 0, "max_failures": 1}
    settings |= {"min_workers": 1, "cpus_per_worker": 2.5}
    run = FaultedRun(config_of("simclr", tmp_path, **settings), data, Place(str(tmp_path / "run")), tmp_path)
    with extra_node(3) as node:
        run.start()
        wait_until(lambda: (run.output / "metrics.jsonl").exists() or run.drivers[-1].poll() is not None)
        node.announce_loss(seconds=30)
        run.wait_for_checkpoint(1)
        listed = run.output / CHECKPOINTS / CHECKPOINT_LIST
        wait_until(lambda: listed.exists() and b"step-" in listed.read_bytes())  # it is complete
        (saved,) = saved_steps(run.output)
        node.kill()
        assert run.end() == 0, run.log()
    lines = [line for line in read_metrics(run.output) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert {line["workers"] for line in lines if line["step"] <= saved} == {2}
    assert {line["workers"] for line in lines if line["step"] > saved} == {1}


@pytest.mark.drill
# An additional checkpoint averages running statistics that differ between workers: these two methods have none.
@pytest.mark.parametrize("method", ["two_tower", "instance_discrimination"])
def test_a_bank_leaves_a_drained_node_and_the_run_equals_the_uninterrupted_run(
    method: Method, uninterrupted: Callable[[Method], UninterruptedRun], tmp_path: Path
) -> None:
    expected = uninterrupted(method)
    run = FaultedRun(config_of(method, tmp_path), expected.data, Place(str(tmp_path / "run")), tmp_path)
    for_bank = {"raycl.io/role": "memory"}
    with extra_node(0, **for_bank) as drained, ExitStack() as stack:
        run.start()
        stack.callback(lambda: run.drivers[-1].kill())
        run.wait_for_checkpoint(FAULT_AFTER_STEP)
        bank = connect_bank("run")
        first = [shard.pid for shard in bank.stats().shards]
        assert all(map(drained.has, first))
        other = stack.enter_context(extra_node(0, **for_bank))
        drained.announce_loss(seconds=300)
        wait_until(lambda: run.log().count("moved away from") == len(first))
        assert all(other.has(shard.pid) and shard.restarts == 1 for shard in bank.stats().shards)
        drained.kill()
        assert run.end() == 0, run.log()
    assert_ended_like(expected, run.output, exactly=True)
    assert "Traceback" not in run.log()


def assert_ended_like(uninterrupted: UninterruptedRun, output: Place, *, exactly: bool) -> None:
    """Compare steps, losses, weights, evaluation and bank rows with the uninterrupted run."""
    result, expected = read_result(output), read_result(uninterrupted.output)
    assert result["status"] == "finished"
    assert (result["steps"], result["epochs"]) == (expected["steps"], NUM_EPOCHS)
    losses, expected_losses = losses_of(output), losses_of(uninterrupted.output)
    assert [step for step, _ in losses] == list(range(1, expected["steps"] + 1))
    if uninterrupted.method != "simclr":
        for step in range(SAVED_EVERY, result["steps"] + 1, SAVED_EVERY):
            assert rows_held(output, step) == rows_held(uninterrupted.output, step), step
    if not exactly:
        # The restarted shard may have missed a step or return other rows.
        assert losses[:FAULT_AFTER_STEP] == expected_losses[:FAULT_AFTER_STEP]
        metric = "recall_at_10" if uninterrupted.method == "two_tower" else "knn_top1"
        assert result["final"][metric] == pytest.approx(expected["final"][metric], abs=0.1)
        return
    assert losses == expected_losses
    theirs = weights_of(uninterrupted.output)
    for name, value in weights_of(output).items():
        # Workers take the mean of their running statistics at each checkpoint, which rounds them; training never reads them.
        tolerance = 1e-6 if "running_" in name else 0.0
        torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance, msg=name)


def losses_of(output: Place) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(output) if "loss" in line]


def weights_of(output: Place) -> dict[str, torch.Tensor]:
    return safetensors.torch.load((output / "encoder.safetensors").read_bytes())


def rows_held(output: Place, step: int) -> list[tuple[int, int]]:
    """Return the step and the sample of each row in a snapshot of the bank."""
    held = rows_in_snapshot(output, step)
    return sorted(zip(held["step"].tolist(), held["sample_id"].tolist(), strict=True))
