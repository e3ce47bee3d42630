"""The scripts in ``jobs/`` as started by users: separate processes that join the cluster."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray

from tests.images import write_digits

pytestmark = pytest.mark.usefixtures("ray_cluster")

ROOT = Path(__file__).parent.parent.parent


def run_job(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run ``python jobs/NAME.py ARGUMENTS`` on the tests' cluster."""
    return subprocess.run(
        [sys.executable, f"jobs/{name}.py", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def is_rays(line: str) -> bool:
    """Whether Ray wrote this line, from its core or a process in the cluster."""
    return ".cc:" in line or "(pid=" in line


@pytest.mark.drill
def test_jobs_train_evaluate_and_embed(tmp_path: Path) -> None:
    train, test = (
        write_digits(tmp_path / name, number)
        for name, number in (("train.parquet", 300), ("test.parquet", 60))
    )
    run = tmp_path / "run"
    settings = [
        "data.image_size=16",
        "data.channels=1",
        "encoder.name=resnet10",
        "encoder.width=0.125",
        "cpus_per_worker=0.5",
    ]
    flags = [flag for setting in settings for flag in ("--set", setting)]
    trained = run_job(
        "train", "simclr", "--data", train, "--output", run, "--steps", 3, "--batch-size", 64, *flags,
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    assert "3 steps in" in trained.stdout

    evaluated = run_job(
        "evaluate",
        "linear",
        "--run",
        run,
        "--train",
        train,
        "--test",
        test,
        "--json",
        tmp_path / "linear.json",
    )
    assert evaluated.returncode == 0, evaluated.stderr
    result = json.loads((tmp_path / "linear.json").read_text())
    assert json.loads(evaluated.stdout.splitlines()[-1]) == result
    assert 0 <= result["top1"] <= 1
    assert result["num_test"] == 60
    # A linear classifier works well on raw pixels of upright digits.
    assert result["baseline"]["pixels"] > 0.8

    embedded = run_job("embed", "--run", run, "--data", test, "--output", tmp_path / "rows")
    assert embedded.returncode == 0, embedded.stderr
    assert pq.read_table(tmp_path / "rows").num_rows == 60
    messages = [line for job in (trained, evaluated, embedded) for line in job.stderr.splitlines()]
    assert not list(filter(is_rays, messages))


def test_a_failed_job_prints_one_line_and_returns_an_exit_status(tmp_path: Path) -> None:
    failed = run_job("train", "simclr", "--data", tmp_path / "nothing", "--output", tmp_path / "run")
    assert failed.returncode == 2
    assert "nothing at" in failed.stderr
    assert "Traceback" not in failed.stderr
