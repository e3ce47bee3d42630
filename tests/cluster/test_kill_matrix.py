"""The kill matrix: whatever dies, a run of any method ends as if nothing had happened."""

import io
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

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray
import safetensors.torch
import torch

import raycl
from raycl.config import RunConfig
from raycl.records import read_metrics, read_result
from raycl.storage import Place
from raycl.training.checkpoint import saved_steps
from tests.cluster.strikes import Node, extra_node, kill_process, wait_until
from tests.faulty_s3 import FaultyS3
from tests.images import write_digits
from tests.pairs import write_pairs
from tests.settings import override_active

pytestmark = pytest.mark.usefixtures("ray_cluster")

Method = Literal["simclr", "moco_v2", "instance_discrimination", "two_tower"]
METHODS: tuple[Method, ...] = ("simclr", "moco_v2", "instance_discrimination", "two_tower")
ROOT = Path(__file__).parent.parent.parent
BATCH_SIZE, NUM_ROWS, NUM_EPOCHS, SAVED_EVERY = 32, 360, 4, 5
STRUCK_AT = 2 * SAVED_EVERY  # when this checkpoint is there
OUTAGE_S = 20.0

COMMON: dict[str, Any] = {
    "workers": 2,
    "cpus_per_worker": 0.5,
    # Read anew in every epoch, so that there are tasks that read all the time.
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
    # Read in step: what is read one step ahead would depend on when it is asked for.
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
class Struck:
    """A run that is under way as a process of its own, and what may befall it."""

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
        """Let the run hurry to its end; return the exit status of its driver."""
        (self.folder / "hurry").touch()
        return self.drivers[-1].wait(300)

    def log(self) -> str:
        return (self.folder / "log").read_text()[-3_000:]


def config_of(method: Method, folder: Path, **settings: Any) -> RunConfig:
    arguments: dict[str, Any] = {"marker": str(folder / "hurry")}
    arguments |= {"dim": 16} if method == "two_tower" else {"channels": 1}
    named = {**COMMON, **OWN[method], "encoder.kwargs": arguments, **settings}
    return override_active(raycl.recipe(method, image_size=16), named)


# What befalls a run


def lose_worker(_: Struck) -> None:
    kill_process("ray::RayTrainWorker")


def lose_controller(_: Struck) -> None:
    kill_process("ray::TrainController")


def lose_data_worker(_: Struck) -> None:
    kill_process("ray::MapBatches")


def lose_shard(run: Struck) -> None:
    kill_process("ray::BankActor")


def lose_node(run: Struck) -> None:
    assert run.node is not None
    run.node.kill()
    run.node = Node(3)


def lose_driver(run: Struck) -> None:
    run.drivers[-1].send_signal(signal.SIGKILL)
    run.drivers[-1].wait(30)
    run.start("--resume")


def lose_storage(run: Struck) -> None:
    assert run.s3 is not None
    run.s3.go_away(OUTAGE_S)


STRIKES: Mapping[str, Callable[[Struck], None]] = {
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
    for fault in STRIKES
    for method in METHODS
    if (fault, method) != ("bank shard", "simclr")  # it has no bank
]


@dataclass(frozen=True)
class Whole:
    """A run that nothing befell."""

    method: Method
    data: Path
    output: Place


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Method], Whole]:
    """Return the undisturbed run of a method, made when it is first asked for."""
    made: dict[Method, Whole] = {}

    def of(method: Method) -> Whole:
        if method not in made:
            folder = tmp_path_factory.mktemp(method)
            (folder / "hurry").touch()
            data = folder / "data.parquet"
            (write_pairs if method == "two_tower" else write_digits)(data, NUM_ROWS)
            output = Place(str(folder / "whole"))
            config = config_of(method, folder)
            raycl.train(config, data=str(data), output=output.uri, quiet=True)
            made[method] = Whole(method, data, output)
        return made[method]

    return of


@pytest.mark.drill
@pytest.mark.parametrize(("fault", "method"), CELLS)
def test_a_run_ends_as_if_nothing_had_happened(
    fault: str, method: Method, whole: Callable[[Method], Whole], s3_server: str, tmp_path: Path
) -> None:
    expected = whole(method)
    run = Struck(config_of(method, tmp_path), expected.data, Place(str(tmp_path / "run")), tmp_path)
    with ExitStack() as stack:
        if fault == "node":
            run.node = stack.enter_context(extra_node(3))
            run.config = config_of(method, tmp_path, cpus_per_worker=2.5)  # a node has no room for two
            stack.callback(lambda: run.node.kill() if run.node else None)
        if fault.startswith("S3"):
            run.s3 = stack.enter_context(FaultyS3(s3_server))
            run.output = Place(run.s3.uri(f"matrix/{method}"))
        run.start()
        stack.callback(lambda: run.drivers[-1].kill())
        run.wait_for_checkpoint(STRUCK_AT)
        STRIKES[fault](run)
        assert run.end() == 0, run.log()
        if run.s3 is not None:
            assert run.s3.count("away") > 0
        assert_ended_like(expected, run.output, exactly=fault != "bank shard")
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.drill
@pytest.mark.parametrize("cache", ["materialize", "stream"])
def test_a_run_whose_node_never_comes_back_goes_on_with_the_workers_that_are_left(
    cache: str, tmp_path: Path
) -> None:
    data = write_digits(tmp_path / "data.parquet", NUM_ROWS)
    settings: dict[str, Any] = {"data.cache": cache, "encoder.kwargs": {"channels": 1, "dropout": 0.0}}
    settings["encoder.kwargs"] |= {"marker": str(tmp_path / "hurry")}
    # At the recipe's rate this small network is so restless that rounding shows within ten steps.
    settings["stages.0.learning_rate"] = 0.03
    config = config_of("simclr", tmp_path, **settings, min_workers=1, cpus_per_worker=2.5)
    run = Struck(config, data, Place(str(tmp_path / "run")), tmp_path)
    with extra_node(3) as node:
        run.start()
        run.wait_for_checkpoint(STRUCK_AT)
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
    if cache == "materialize":  # streamed rows are dealt to workers, so their number changes the batches
        losses = [loss for _, loss in losses_of(alone)]
        assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-4)


@pytest.mark.drill
def test_a_node_whose_loss_is_announced_is_saved_from_before_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "1")
    monkeypatch.setenv("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "0.5")
    data = write_digits(tmp_path / "data.parquet", NUM_ROWS)
    # Nothing else is a reason to save. What deals out a stream may live on that node: that loss counts.
    settings = {"checkpoints.every_steps": 1_000, "evaluation.every_epochs": 0, "max_failures": 1}
    settings |= {"min_workers": 1, "cpus_per_worker": 2.5}
    run = Struck(config_of("simclr", tmp_path, **settings), data, Place(str(tmp_path / "run")), tmp_path)
    with extra_node(3) as node:
        run.start()
        wait_until(lambda: (run.output / "metrics.jsonl").exists() or run.drivers[-1].poll() is not None)
        node.announce_loss(seconds=30)
        run.wait_for_checkpoint(1)
        (saved,) = saved_steps(run.output)
        node.kill()
        assert run.end() == 0, run.log()
    lines = [line for line in read_metrics(run.output) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert {line["workers"] for line in lines if line["step"] <= saved} == {2}
    assert {line["workers"] for line in lines if line["step"] > saved} == {1}


def assert_ended_like(whole: Whole, output: Place, *, exactly: bool) -> None:
    """Compare steps, losses, weights, judgment and the rows of the bank with those of the whole run."""
    result, expected = read_result(output), read_result(whole.output)
    assert result["status"] == "finished"
    assert (result["steps"], result["epochs"]) == (expected["steps"], NUM_EPOCHS)
    losses, expected_losses = losses_of(output), losses_of(whole.output)
    assert [step for step, _ in losses] == list(range(1, expected["steps"] + 1))
    if whole.method != "simclr":
        for step in range(SAVED_EVERY, result["steps"] + 1, SAVED_EVERY):
            assert rows_held(output, step) == rows_held(whole.output, step), step
    if not exactly:
        # The shard that came back may have missed a step, or lend what others would have got.
        assert losses[:STRUCK_AT] == expected_losses[:STRUCK_AT]
        judged = "recall_at_10" if whole.method == "two_tower" else "knn_top1"
        assert result["final"][judged] == pytest.approx(expected["final"][judged], abs=0.1)
        return
    assert losses == expected_losses
    theirs = weights_of(whole.output)
    for name, value in weights_of(output).items():
        assert torch.equal(value, theirs[name]), name


def losses_of(output: Place) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(output) if "loss" in line]


def weights_of(output: Place) -> dict[str, torch.Tensor]:
    return safetensors.torch.load((output / "encoder.safetensors").read_bytes())


def rows_held(output: Place, step: int) -> list[tuple[int, int]]:
    """Return the step and the sample of every row in a snapshot of the bank."""
    folder = output / "bank" / f"step-{step:08d}"
    tables = [
        pq.read_table(io.BytesIO((folder / path).read_bytes()))
        for path, _ in folder.files()
        if path.endswith(".parquet")
    ]
    held = [np.stack([table[name].to_numpy() for name in ("step", "sample_id")], 1) for table in tables]
    return sorted(map(tuple, np.concatenate(held).tolist()))
