"""Runs whose embeddings collapse: the collapse is reported, and the run stops or recovers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import raycl
from raycl.config import RunConfig
from raycl.errors import CollapseError
from raycl.records import read_metrics, read_result
from raycl.storage import Place
from tests.cluster.test_run import small_run
from tests.images import write_digits

pytestmark = pytest.mark.usefixtures("ray_cluster")


def collapsing_run(on_collapse: str, passes: Sequence[int], **settings: Any) -> RunConfig:
    """Eighteen steps with the hinge loss; in these passes all embeddings are one point."""
    return small_run(
        **{
            "batchnorm": "group",
            "stages.0.loss": "hinge",
            "encoder.kwargs": {"channels": 1, "collapsed": list(passes)},
            "monitor.on_collapse": on_collapse,
            "monitor.initial_patience": 3,
            **({"monitor.cross_entropy_steps": 4} if on_collapse == "rollback" else {}),
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


@pytest.fixture(scope="module")
def recovered(tmp_path_factory: pytest.TempPathFactory) -> raycl.RunResult:
    """A run that collapses twice."""
    # The third check reports the collapse. Step 9, the end of an epoch, is saved three times: after two
    # checks with one point, so that the first rollback leads to step 5; healthy, for the second; and again.
    config = collapsing_run("rollback", [8, 9, 10, 15, 16, 17])
    return train(config, tmp_path_factory.mktemp("recovered") / "run")


def test_a_collapsed_run_recovers_by_rollback_and_temporary_cross_entropy(recovered: raycl.RunResult) -> None:
    output = Path(recovered.output)
    assert events_of(output) == [
        ("collapse", 10),
        ("rollback", 5),
        ("collapse", 12),
        ("rollback", 9),
    ]
    steps = steps_of(output)
    assert [line["step"] for line in steps] == [*range(1, 11), *range(6, 13), *range(10, 19)]
    # NT-Xent with 64 pairs is far above the hinge loss; it replaces it for four steps.
    by_cross_entropy = [False] * 10 + [True] * 4 + [False] * 3 + [True] * 4 + [False] * 5
    assert [line["loss"] > 1 for line in steps] == by_cross_entropy
    in_one_point = [False] * 7 + [True] * 3 + [False] * 4 + [True] * 3 + [False] * 9
    assert [line["embedding_std"] < 0.01 for line in steps] == in_one_point
    assert all(line["samples_per_second"] > 0 for line in steps)
    assert recovered.final["rollbacks"] == 2
    certificate = raycl.certify(output)
    assert certificate.is_valid, str(certificate)
    assert recovered.steps == 18


def test_a_loaded_encoder_has_the_replacements_of_batchnorm(recovered: raycl.RunResult) -> None:
    encoder = raycl.load_encoder(recovered.output)
    assert any(isinstance(layer, torch.nn.GroupNorm) for layer in encoder.modules())
    assert not any(isinstance(layer, torch.nn.BatchNorm2d) for layer in encoder.modules())
    assert "batchnorm_leakage" not in recovered.final


@pytest.mark.drill
def test_a_rollback_into_another_stage_restores_its_number_of_workers(tmp_path: Path) -> None:
    # Each group of workers restarts its count of passes: the last two steps of the first stage and the
    # first two steps of the second have one point. Step 9 is saved as collapsing, and step 10 at the stage
    # boundary. Without labels the latest healthy checkpoint, step 6, is the best and the only one kept.
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


@pytest.mark.drill  # test_loop.py stops a worker without Ray
def test_a_run_that_stops_on_collapse_fails_in_one_line_and_keeps_its_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        CollapseError, match=r"embedding std was .* at step 8 and .* at step 10.*step 9\) is kept"
    ) as caught:
        train(collapsing_run("stop", range(8, 19), workers=1), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert read_result(Place(str(tmp_path / "run")))["status"] == "failed"
    assert list((tmp_path / "run" / "checkpoints").glob("step-00000009*"))


@pytest.mark.drill
def test_a_run_that_keeps_collapsing_ends_after_the_allowed_rollbacks(tmp_path: Path) -> None:
    config = collapsing_run("rollback", range(8, 99), **{"monitor.max_rollbacks": 1})
    with pytest.raises(CollapseError, match=r"1 rollbacks did not help.*set monitor.on_collapse to warn"):
        train(config, tmp_path / "run")
    assert [event for event, _ in events_of(tmp_path / "run")] == ["collapse", "rollback", "collapse"]
