"""Runs whose embeddings collapse: told, stopped, or taken back to health."""

from collections.abc import Sequence
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


def collapsing_run(on_collapse: str, passes: Sequence[int], **settings: Any) -> RunConfig:
    """Eighteen steps by the hinge on two workers; in these passes all embeddings are one point."""
    return small_run(
        **{
            "batchnorm": "group",
            "stages.0.loss": "hinge",
            "encoder.kwargs": {"channels": 1, "collapsed": list(passes)},
            "monitor.on_collapse": on_collapse,
            "monitor.initial_patience": 3,
            "monitor.cross_entropy_steps": 4,
            **settings,
        }
    )


def train(config: RunConfig, output: Path, *, labeled: bool = True) -> raycl.RunResult:
    data = write_digits(output.parent / "digits.parquet", 700, labeled=labeled)
    return raycl.train(config, data=str(data), output=str(output), quiet=True)


def events_of(output: Path) -> list[tuple[str, int]]:
    return [(line["event"], line["step"]) for line in lines_of(output) if "event" in line]


def steps_of(output: Path) -> list[dict[str, Any]]:
    return [line for line in lines_of(output) if "loss" in line]


def lines_of(output: Path) -> list[dict[str, Any]]:
    return read_metrics(Place(str(output)))


def test_a_collapsed_run_goes_back_to_health_and_to_cross_entropy_for_a_while(tmp_path: Path) -> None:
    # Told at the third look. Step 9, the end of an epoch, is saved thrice: after two looks at one
    # point, so that the first way back leads to step 5; in health, for the second way; and again.
    config = collapsing_run("rollback", [8, 9, 10, 15, 16, 17])
    result = train(config, tmp_path / "run")
    assert events_of(tmp_path / "run") == [
        ("collapse", 10),
        ("rollback", 5),
        ("collapse", 12),
        ("rollback", 9),
    ]
    steps = steps_of(tmp_path / "run")
    assert [line["step"] for line in steps] == [*range(1, 11), *range(6, 13), *range(10, 19)]
    # NT-Xent of 64 pairs is far above a hinge; it stands in for four steps.
    by_cross_entropy = [False] * 10 + [True] * 4 + [False] * 3 + [True] * 4 + [False] * 5
    assert [line["loss"] > 1 for line in steps] == by_cross_entropy
    in_one_point = [False] * 7 + [True] * 3 + [False] * 4 + [True] * 3 + [False] * 9
    assert [line["embedding_std"] < 0.01 for line in steps] == in_one_point
    assert all(line["samples_per_second"] > 0 for line in steps)
    assert result.final["rollbacks"] == 2
    assert result.steps == 18


@pytest.mark.drill
def test_a_way_back_into_a_stage_of_other_workers_gets_those(tmp_path: Path) -> None:
    # A new group of workers counts its passes anew: the last two steps of the first stage and the
    # first two of the second show one point. Step 9 is saved under that sign, and step 10 where the
    # stages meet. Without labels the latest of those without it, step 6, is the best and only one kept.
    settings = {"stages.0.epochs": 1, "workers": 1, "stages.1.workers": 2, "monitor.initial_patience": 4}
    rarely = {"checkpoints.every_steps": 3, "checkpoints.keep": 1}
    config = collapsing_run("rollback", [1, 2, 9, 10], **settings, **rarely)
    result = train(config, tmp_path / "run", labeled=False)
    assert events_of(tmp_path / "run") == [("collapse", 12), ("rollback", 6)]
    steps = steps_of(tmp_path / "run")
    assert [line["step"] for line in steps] == [*range(1, 13), *range(7, 21)]
    assert [line["stage"] for line in steps] == [0] * 10 + [1] * 2 + [0] * 4 + [1] * 10
    assert all(line["samples"] == 64 * line["step"] for line in steps)
    assert result.final["rollbacks"] == 1


def test_a_run_that_is_to_stop_fails_in_one_line_and_keeps_its_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        CollapseError, match=r"embedding std was .* at step 8 and .* at step 10.*step 9\) is kept"
    ) as caught:
        train(collapsing_run("stop", range(8, 19)), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert read_result(Place(str(tmp_path / "run")))["status"] == "failed"
    assert list((tmp_path / "run" / "checkpoints").glob("step-00000009*"))


@pytest.mark.drill
def test_a_run_that_does_not_get_well_ends_after_so_many_rollbacks(tmp_path: Path) -> None:
    config = collapsing_run("rollback", range(8, 99), **{"monitor.max_rollbacks": 1})
    with pytest.raises(CollapseError, match=r"1 rollbacks did not help.*set monitor.on_collapse to warn"):
        train(config, tmp_path / "run")
    assert [event for event, _ in events_of(tmp_path / "run")] == ["collapse", "rollback", "collapse"]
