"""`raycl tune` on a real Ray: runs below trials of Ray Tune, and the end of the time."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import raycl
from raycl.config import RunConfig
from raycl.config.overrides import config_from_yaml, override
from raycl.data.discovery import find_source
from raycl.errors import ConfigError, RunError
from raycl.recipes import recipe
from raycl.records import read_result
from raycl.storage import Place
from raycl.tuning import search
from raycl.tuning.plan import Measured
from raycl.tuning.trial import Runner
from tests.images import write_digits

pytestmark = pytest.mark.usefixtures("ray_cluster")

SMALL: dict[str, Any] = {
    "data.channels": 1,
    "encoder.name": "tests.cluster.networks:small",
    "encoder.kwargs": {"channels": 1},
    "stages.0.batch_size": 64,
    "evaluation.num_test": 64,
    "evaluation.k": 20,
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_digits(tmp_path / "digits.parquet", 700)


def test_a_run_of_a_trial_has_changed_settings_and_a_pace(data: Path, tmp_path: Path) -> None:
    sources, place = (find_source(str(data)),), Place(str(tmp_path))
    config = override(recipe("simclr", image_size=16), SMALL)
    runner = Runner(config=config, sources=sources, output=(place / "trials").uri)
    found = runner.run({"stages.0.learning_rate": 0.25}, 320, "1-1")
    folder = place / "trials" / "1-1"
    assert found.score == pytest.approx(read_result(folder)["final"]["knn_top1"], abs=1e-5)
    assert found.overhead_s > 0 < found.samples_per_second
    stage = config_from_yaml((folder / "config.yaml").read_text()).stages[0]
    assert (stage.learning_rate, stage.steps, stage.epochs) == (0.25, 5, None)
    with pytest.raises(ConfigError, match="holds an earlier run"):
        runner.run({}, 320, "1-1")


@pytest.mark.drill
def test_a_search_trains_trials_and_writes_settings_that_train(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**SMALL, "stages.0.epochs": 20}
    result = raycl.tune("simclr", data=data, output=tmp_path / "out", minutes=4, settings=settings)
    assert len(result.trials) > 1
    last = [trial.scores[-1] for trial in result.trials if len(trial.scores) == len(result.rungs)]
    assert len(result.trials[0].scores) == len(result.rungs)
    assert result.best.scores[-1] == max(last)
    for trial in result.trials:
        for rung, (score, samples) in enumerate(zip(trial.scores, result.rungs, strict=False), 1):
            folder = Place(str(tmp_path / "out" / "trials" / f"{trial.number}-{rung}"))
            assert score == pytest.approx(read_result(folder)["final"]["knn_top1"], abs=1e-5)
            stage = config_from_yaml((folder / "config.yaml").read_text()).stages[0]
            assert stage.steps == samples // stage.batch_size
    assert config_from_yaml((tmp_path / "out" / "tuned.yaml").read_text()) == result.config
    assert result.config.stages[0].epochs == 20
    assert "recipe: knn_top1" in capsys.readouterr().err


@dataclass(frozen=True)
class Objective:
    """Scores settings in place of a ``Runner``, without training; one trial fails, and trial 2 does not end."""

    config: RunConfig
    output: str
    failing: int = 1

    def run(self, settings: Mapping[str, Any], samples: int, name: str) -> Measured:
        if name.startswith("2-"):
            time.sleep(600)
        if name.startswith(f"{self.failing}-"):
            raise RunError("the loss is NaN")
        return Measured(0.5, 0.0, 1_000.0)


@pytest.mark.drill
def test_the_time_ends_a_trial_that_does_not_and_a_failed_trial_is_a_line(tmp_path: Path) -> None:
    config: RunConfig = recipe("simclr", image_size=16)
    place, rungs, lines = Place(str(tmp_path)), (1_000, 3_000), list[str]()
    recorder = search.Recorder(config, place, rungs, lines.append)
    runner: Any = Objective(config, (place / "trials").uri)
    space = search.search_space(config, 10_000)
    began = time.monotonic()
    search.tune_trials(runner, rungs, space, recorder, seconds=12.0, debug=False)
    assert time.monotonic() - began < 12.0 + search.CLOSING_S
    assert [(trial.number, trial.scores) for trial in recorder.result().trials] == [
        (0, (0.5, 0.5)),
        (1, (0.0,)),
    ]
    assert lines[0] == "recipe: knn_top1 0.5000 after 1,000 samples"
    assert lines[2].endswith("failed: the loss is NaN after 1,000 samples")


@pytest.mark.drill
def test_a_failed_recipe_ends_the_search_long_before_the_time(tmp_path: Path) -> None:
    config: RunConfig = recipe("simclr", image_size=16)
    place, rungs = Place(str(tmp_path)), (1_000, 3_000)
    recorder = search.Recorder(config, place, rungs, lambda _: None)
    runner: Any = Objective(config, (place / "trials").uri, failing=0)
    space = search.search_space(config, 10_000)
    began = time.monotonic()
    search.tune_trials(runner, rungs, space, recorder, seconds=300.0, debug=False)
    assert time.monotonic() - began < 100.0
    assert [(trial.number, trial.scores) for trial in recorder.result().trials] == [(0, (0.0,))]
