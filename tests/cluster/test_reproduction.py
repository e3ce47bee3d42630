"""A figure with two settings on digits: trained, evaluated and drawn; finished runs are kept."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from raycl.demo.digits import write_digits
from raycl.records import METRICS, RESULT
from raycl.storage import Place

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import claims
from claims.results import OUTCOME
from claims.run import ReproduceRequest, reproduce
from claims.runs import RUNS

TINY = {
    "data.channels": 1,
    "data.image_size": 16,
    "encoder.width": 0.125,
    "precision": "float32",
    "stages.0.epochs": None,
    "stages.0.steps": 3,
    "stages.0.batch_size": 32,
    "negatives.capacity": 64,
    "log_every_steps": 1,
}


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.drill
def test_a_figure_is_run_once_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = claims.FIGURES["leak"]
    chosen = tuple(
        dataclasses.replace(setting, overrides={**setting.overrides, "workers": 1})
        for setting in whole.settings["cpu"]
        if setting.name in ("local", "group")
    )
    two = dataclasses.replace(whole, settings={**whole.settings, "cpu": chosen})
    monkeypatch.setitem(claims.FIGURES, "leak", two)
    train, test = write_digits(Place(str(tmp_path / "digits")))
    output = tmp_path / "out"
    request = ReproduceRequest(
        figure="leak", output=str(output), data=train, test=test, num_seeds=1, settings=TINY
    )
    messages: list[str] = []
    page = reproduce(request, notify=messages.append)

    assert [line.partition(",")[0] for line in messages[:2]] == [
        "leak: run 1 of 2 (local",
        "leak: run 2 of 2 (group norm",
    ]
    assert "minutes left" in messages[1]
    assert page.results.missing == []
    local, group = page.results.outcomes
    assert {
        "knn_top1",
        "batchnorm_leakage",
        "shared",
        "apart",
        "loss",
        "pixels",
        "steps",
    } <= local.numbers.keys()
    assert (local.numbers["steps"], group.numbers["batchnorm_leakage"]) == (3.0, 0.0)
    assert 0.1 < local.numbers["knn_top1"] < 1.0
    assert local.numbers["knn_top1"] != group.numbers["knn_top1"]
    assert all(claim.held is not True for claim in page.results.claims)  # with one seed
    with Image.open(output / "leak.png") as picture:
        assert picture.width > picture.height
    assert len(json.loads((output / "leak.json").read_text())["runs"][0]["curves"]["loss"][0]["values"]) == 3

    # The second call trains and evaluates nothing.
    runs = [output / RUNS / f"leak-{name}-seed0" for name in ("local", "group")]
    assert sorted((output / RUNS).iterdir()) == sorted(runs)
    files = [run / name for run in runs for name in (METRICS, RESULT, OUTCOME)]
    before = {file: file.stat().st_mtime_ns for file in files}
    messages.clear()
    again = reproduce(request, notify=messages.append)
    assert {file: file.stat().st_mtime_ns for file in files} == before
    assert not any("run 1 of 2" in line for line in messages)
    assert again.numbers() == page.numbers()

    # A trained run without an evaluation is only evaluated; an interrupted run is resumed.
    (runs[0] / OUTCOME).unlink()
    (runs[1] / OUTCOME).unlink()
    (runs[1] / RESULT).write_text('{"status": "running"}')
    (runs[1] / METRICS).unlink()
    resumed = reproduce(request, notify=messages.append)
    assert (runs[0] / RESULT).stat().st_mtime_ns == before[runs[0] / RESULT]
    assert json.loads((runs[1] / RESULT).read_text())["status"] == "finished"
    assert resumed.results.outcomes[0].numbers["knn_top1"] == local.numbers["knn_top1"]
    assert resumed.results.outcomes[1].numbers["steps"] == 3.0
