"""Runs whose embeddings collapse: told, stopped, or taken back to health."""

from pathlib import Path
from typing import Any

import pytest

import raycl
from raycl.config import RunConfig
from raycl.errors import CollapseError
from raycl.records import read_metrics, read_result
from raycl.storage import Place
from tests.cluster.test_run import small_run
from tests.images import write_digits

pytestmark = pytest.mark.usefixtures("ray_cluster")


def collapsing_run(on_collapse: str, *, collapse_for: int) -> RunConfig:
    """Eighteen steps by the hinge on two workers; from the eighth pass on, all embeddings are one point."""
    return small_run(
        **{
            "batchnorm": "group",
            "stages.0.loss": "hinge",
            "encoder.arguments": {"channels": 1, "collapse_at": 8, "collapse_for": collapse_for},
            "monitor.on_collapse": on_collapse,
            "monitor.grace": 3,
            "monitor.cross_entropy_steps": 4,
        }
    )


def train(config: RunConfig, output: Path) -> raycl.RunResult:
    data = write_digits(output.parent / "digits.parquet", 700)
    return raycl.train(config, data=str(data), output=str(output), quiet=True)


def events_of(output: Path) -> list[tuple[str, int]]:
    return [(line["event"], line["step"]) for line in lines_of(output) if "event" in line]


def lines_of(output: Path) -> list[dict[str, Any]]:
    return read_metrics(Place(str(output)))


def test_a_collapsed_run_goes_back_to_health_and_to_cross_entropy_for_a_while(tmp_path: Path) -> None:
    result = train(collapsing_run("rollback", collapse_for=3), tmp_path / "run")
    # The third look at one point is that of step 10; step 9, of the end of an epoch, was saved after two of them.
    assert events_of(tmp_path / "run") == [("collapse", 10), ("rollback", 5)]
    steps = [line for line in lines_of(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in steps] == [*range(1, 11), *range(6, 19)]
    # NT-Xent of 64 pairs is far above a hinge; it stands in for four steps.
    assert [line["loss"] > 1 for line in steps] == [False] * 10 + [True] * 4 + [False] * 9
    assert all(line["samples_per_second"] > 0 for line in steps)
    assert [line["spread"] < 0.01 for line in steps] == [False] * 7 + [True] * 3 + [False] * 13
    assert result.final["rollbacks"] == 1
    assert result.steps == 18


def test_a_run_that_is_to_stop_fails_in_one_line_and_keeps_its_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        CollapseError, match=r"spread was .* at step 8 and .* at step 10.*step 9\) is kept"
    ) as caught:
        train(collapsing_run("stop", collapse_for=99), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert read_result(Place(str(tmp_path / "run")))["status"] == "failed"
    assert list((tmp_path / "run" / "checkpoints").glob("step-00000009*"))
