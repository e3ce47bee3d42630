"""Runs of several stages: settings that change between stages, and state that persists."""

from pathlib import Path
from typing import Any

import pytest
import torch

import raycl
from raycl.config import RunConfig
from raycl.errors import ConfigError
from raycl.records import read_metrics
from raycl.storage import Place
from tests.cluster.test_run import BATCH_SIZE, NUM_IMAGES, NUM_INVALID, small_run, weights_of
from tests.images import write_digits

pytestmark = pytest.mark.usefixtures("ray_cluster")

GROWN = 2 * BATCH_SIZE
FIRST_STAGE = {"stages.0.epochs": 1, "stages.0.image_size": 8, "batchnorm": "group"}
SECOND_STAGE = {
    "stages.1.epochs": None,
    "stages.1.steps": 7,
    "stages.1.image_size": 12,
    "stages.1.batch_size": GROWN,
    "stages.1.chunk_size": 50,  # 128 rows on one worker, 64 rows on each of two
    "stages.1.temperature": 0.5,
    "stages.1.hinge_weight": 0.0,
    "stages.1.final_hinge_weight": 0.6,
}


def staged_run(**settings: Any) -> RunConfig:
    """One epoch of nine steps, then seven steps on larger images at twice the batch size, in chunks, towards the hinge loss."""
    return small_run(**(FIRST_STAGE | SECOND_STAGE | settings))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data") / "digits.parquet", NUM_IMAGES, broken=NUM_INVALID)


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two stages on one worker without interruption; write the sizes of the images to a file beside the run."""
    output = tmp_path_factory.mktemp("runs") / "alone"
    arguments = {"channels": 1, "marker": str(output.with_name("sizes"))}
    sized = {"encoder.name": "tests.cluster.networks:sized", "encoder.kwargs": arguments}
    raycl.train(staged_run(workers=1, **sized), data=str(data), output=str(output), quiet=True)
    return output


def test_batch_size_learning_rate_and_weight_change_while_steps_continue(alone: Path) -> None:
    lines = [line for line in read_metrics(Place(str(alone))) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 17))
    assert [line["stage"] for line in lines] == [0] * 9 + [1] * 7
    sizes = [BATCH_SIZE] * 9 + [GROWN] * 7
    assert [line["samples"] for line in lines] == [sum(sizes[: step + 1]) for step in range(16)]
    # A stage starts with a new epoch: four steps of 128 rows, then the second epoch with the last steps.
    assert [line["epoch"] for line in lines] == [0] * 9 + [1] * 4 + [2] * 3
    first, second = (lines[index]["learning_rate"] for index in (0, 9))
    assert second == pytest.approx(
        2 * first
    )  # linear in the batch size; both warmups are shorter than a step


def test_a_stage_ends_with_an_evaluation_and_the_result_counts_all_samples(alone: Path) -> None:
    evaluated = [
        (line["step"], line["stage"]) for line in read_metrics(Place(str(alone))) if "knn_top1" in line
    ]
    assert (9, 0) in evaluated
    assert evaluated[-1] == (16, 1)


def test_a_stage_trains_at_its_image_size_and_is_evaluated_at_that_of_the_run(alone: Path) -> None:
    passes = [line.split() for line in alone.with_name("sizes").read_text().splitlines()]
    # Eleven passes for each step of the second stage: 256 rows in six chunks, of which the last is kept.
    assert [size for mode, size in passes if mode == "train"] == ["8"] * 9 + ["12"] * 7 * 11
    assert {size for mode, size in passes if mode == "eval"} == {"16"}


@pytest.mark.drill
def test_a_worker_killed_in_the_second_stage_resumes_in_it(alone: Path, data: Path, tmp_path: Path) -> None:
    # Nine passes, then eleven per step: crashes in the second step of the stage.
    arguments = {"channels": 1, "die_at": 9 + 11 + 6, "marker": str(tmp_path / "died")}
    settings = {"workers": 1, "max_failures": 1, "checkpoints.every_steps": 1, "encoder.kwargs": arguments}
    output = tmp_path / "killed"
    raycl.train(staged_run(**settings), data=str(data), output=str(output), quiet=True)
    assert (tmp_path / "died").exists()
    lines = [line for line in read_metrics(Place(str(output))) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 17))
    assert_same_weights(output, alone)


@pytest.mark.drill
def test_a_finished_run_continues_with_an_added_stage(alone: Path, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "longer"
    first = small_run(**FIRST_STAGE, workers=1)
    raycl.train(first, data=str(data), output=str(output), quiet=True)
    raycl.train(staged_run(workers=1), data=str(data), output=str(output), quiet=True, resume=True)
    assert_same_weights(output, alone)
    with pytest.raises(ConfigError, match=r"would change stages\.0\.batch_size from 64 to 32"):
        changed = staged_run(**{"workers": 1, "stages.0.batch_size": 32})
        raycl.train(changed, data=str(data), output=str(output), quiet=True, resume=True)


@pytest.mark.drill
def test_a_stage_gets_its_own_number_of_workers(alone: Path, data: Path, tmp_path: Path) -> None:
    # With BatchNorm synchronized over all workers, and over all chunks in the second stage.
    config = staged_run(**{"workers": 1, "stages.1.workers": 2, "batchnorm": "synchronized"})
    output = tmp_path / "grown"
    raycl.train(config, data=str(data), output=str(output), quiet=True)
    lines = [line for line in read_metrics(Place(str(output))) if "loss" in line]
    expected = [line for line in read_metrics(Place(str(alone))) if "loss" in line]
    for key in ("step", "stage", "samples", "epoch", "learning_rate"):
        assert [line[key] for line in lines] == [line[key] for line in expected]


def assert_same_weights(output: Path, expected: Path) -> None:
    ours, theirs = weights_of(output), weights_of(expected)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name
