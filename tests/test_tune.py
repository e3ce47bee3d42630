"""The search of `raycl tune`, with objectives in place of runs: what is searched, how long, and which trial wins."""

import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

import raycl
from raycl.cli.plan import plan_run
from raycl.config import RunConfig, Stage
from raycl.config.overrides import config_from_yaml, differences, override
from raycl.errors import ConfigError, DataError, RayclError, RunError
from raycl.recipes import RECIPES, recipe
from raycl.records import DATA, METRICS
from raycl.storage import Place
from raycl.training.preflight import describe_data
from raycl.tuning import search
from raycl.tuning.plan import (
    ETA,
    LEAST_STEPS,
    SHAPES,
    Measured,
    Trial,
    best_trial,
    check_search,
    plan_rungs,
    search_space,
    trial_config,
)
from raycl.tuning.search import TUNED, KeepingRecipe, Recorder, TuneResult
from raycl.tuning.trial import _train
from tests.images import write_digits

NUM_ROWS = 10_000
SIMCLR = recipe("simclr", image_size=32)
RATE, TEMPERATURE, CROP, BATCH = (
    "stages.0.learning_rate",
    "stages.0.temperature",
    "augment.crop_scale.0",
    "stages.0.batch_size",
)


@pytest.mark.parametrize(
    ("name", "needed"), [("simclr", "rows with labels of several classes"), ("two_tower", "pairs")]
)
def test_a_run_without_a_measure_names_its_cause(
    name: str, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmeasured = SimpleNamespace(
        final={"loss": 1.0}, seconds=1.0, notices=["the cause: no periodic measure", "other"]
    )
    monkeypatch.setattr("raycl.training.launch.train", lambda *_, **__: unmeasured)
    with pytest.raises(DataError, match=f"trials by: the cause: no periodic measure; give more {needed}$"):
        _train(recipe(name), "output", [])


def test_the_rate_of_a_run_is_that_of_its_last_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps, of a process that warms up, count as a cost of the start."""
    laps = [
        {"loss": 2.0, "samples_per_second": 5.0},
        {"loss": 1.0, "samples_per_second": 50.0},
        {"knn_top1": 0.5},
    ]
    (tmp_path / METRICS).write_text("".join(f"{json.dumps({'step': 3} | line)}\n" for line in laps))
    # 300 samples at 50 samples per second.
    result = SimpleNamespace(final={"knn_top1": 0.5}, seconds=33.0, samples_per_second=300 / 33)
    monkeypatch.setattr("raycl.training.launch.train", lambda *_, **__: result)
    moments = iter((100.0, 140.0))
    monkeypatch.setattr("raycl.tuning.trial.time.monotonic", lambda: next(moments))
    assert _train(SIMCLR, str(tmp_path), []) == Measured(0.5, pytest.approx(40.0 - 300 / 50), 50.0)


# The settings


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("simclr", {RATE, TEMPERATURE, CROP, BATCH}),
        ("simcse", {RATE, TEMPERATURE, BATCH}),
        ("two_tower", {RATE, TEMPERATURE, BATCH}),
        ("clip", {RATE, CROP, BATCH}),
    ],
)
def test_only_settings_with_an_effect_are_searched(name: str, expected: set[str]) -> None:
    assert search_space(recipe(name), NUM_ROWS).keys() == expected


@pytest.mark.parametrize("name", RECIPES)
def test_the_limits_of_the_search_are_valid_in_every_recipe(name: str) -> None:
    config = recipe(name, image_size=32)
    for path, values in search_space(config, NUM_ROWS).items():
        for value in (min(values), max(values)):
            changed = trial_config(config, {path: value}, 3_000, "trials/0-1")
            assert changed.stages[0].steps == max(1, 3_000 // changed.stages[0].batch_size)


def test_batches_leave_two_steps_in_an_epoch_and_fit_the_queue() -> None:
    assert search_space(SIMCLR, 600)[BATCH] == [128, 256]
    assert search_space(SIMCLR, 2_000)[BATCH] == [128, 256, 512]
    queue = override(recipe("moco_v2", image_size=32), {"negatives.capacity": 256})
    assert search_space(queue, NUM_ROWS)[BATCH] == [128, 256]


def test_the_run_of_the_recipe_differs_in_its_length_and_its_evaluations_only() -> None:
    assert differences(SIMCLR, trial_config(SIMCLR, {}, 5_120, "trials/0-1")).keys() == {
        "stages.0.epochs",
        "stages.0.steps",
        "evaluation.every_epochs",
        "evaluation.num_snapshot_samples",
        "max_failures",
    }


def test_trials_do_not_share_a_bank() -> None:
    named = override(recipe("moco_v2", image_size=32), {"bank.name": "mine", "bank.detached": True})
    folders = [f"{search}/trials/{trial}-1" for search in ("one", "other") for trial in (0, 1)]
    banks = [trial_config(named, {}, 5_120, folder).bank for folder in folders]
    assert len({bank.name for bank in banks} | {"mine", None}) == 6
    assert not any(bank.detached for bank in banks)


# The time


@given(
    st.floats(0, 100),
    st.floats(0.1, 1e5),
    st.floats(-100, 1e5),
    st.sampled_from([{"epochs": 3}, {"steps": 90}]),
)
def test_the_recipe_and_the_trials_fit_the_time_or_are_refused(
    overhead_s: float, rate: float, seconds: float, length: dict[str, int]
) -> None:
    config = override(
        SIMCLR,
        {"stages.0.epochs": None, "stages.0.steps": None, **{f"stages.0.{k}": v for k, v in length.items()}},
    )
    try:
        rungs = plan_rungs(config, NUM_ROWS, Measured(0.5, overhead_s, rate), seconds)
    except ConfigError as error:
        assert "raise --minutes" in str(error)
        return
    num_trials = dict(SHAPES)[len(rungs)]
    runs = [overhead_s + samples / rate for samples in rungs]
    assert sum(run * (1 + num_trials / ETA**rung) for rung, run in enumerate(runs)) <= seconds * 1.001
    assert rungs[0] >= LEAST_STEPS * 256
    assert rungs[-1] <= (3 * NUM_ROWS if "epochs" in length else 90 * 256)
    assert all(long == pytest.approx(ETA * short, abs=ETA) for short, long in pairwise(rungs))


def test_more_time_gives_more_rungs_and_too_little_says_how_much_is_needed() -> None:
    pace = Measured(0.5, 10.0, 1_000.0)
    numbers = [len(plan_rungs(SIMCLR, NUM_ROWS, pace, 60.0 * minutes)) for minutes in (2, 4, 10)]
    assert numbers == [1, 2, 3]
    with pytest.raises(ConfigError, match="3 trials of 5,120 samples take 1.0 minutes, and 0.9 are left"):
        plan_rungs(SIMCLR, NUM_ROWS, pace, 55.0)


# The choice


def trial(number: int, *scores: float) -> Trial:
    return Trial(number=number, settings={RATE: number} if number else {}, scores=scores)


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        ([trial(0, 0.5, 0.6), trial(1, 0.6, 0.7), trial(2, 0.7, 0.65)], 1),
        ([trial(0, 0.5, 0.6), trial(1, 0.5, 0.6), trial(2, 0.9, 0.6)], 0),
        ([trial(0, 0.5, 0.6), trial(1, 0.9)], 0),
        ([trial(0, 0.5), trial(1, 0.6, 0.9)], 0),
        ([trial(0)], 0),
        ([trial(0, 0.1, 0.0), trial(1, 0.1, 0.0)], 0),
    ],
    ids=["better", "tie", "not finished", "recipe not finished", "nothing", "all failed"],
)
def test_the_recipe_wins_unless_another_trial_is_better_in_the_last_rung(
    trials: list[Trial], expected: int
) -> None:
    for order in (trials, trials[::-1]):
        assert best_trial(order, 2).number == expected


def run_search(
    place: Place, objective: Any, num_trials: int = 30, num_rungs: int = 3
) -> tuple[Any, list[str]]:
    """Run trials one after another as Ray Tune does, until the recipe fails; return the result and the printed lines."""
    lines: list[str] = []
    recorder = Recorder(SIMCLR, place, tuple(1_000 * ETA**rung for rung in range(num_rungs)), lines.append)
    scheduler = KeepingRecipe(num_rungs)
    for number in range(num_trials):
        each: Any = SimpleNamespace(trial_id=f"abc_{number:05d}", config={RATE: 0.01 * (number + 1)})
        scheduler.on_trial_add(None, each)  # pyright: ignore[reportArgumentType]
        for rung in range(num_rungs):
            error = "" if (score := objective(number, rung)) is not None else "the loss is NaN"
            result = {"score": score or 0.0, "length": ETA**rung, "error": error}
            is_over = recorder(each.trial_id, result)
            is_over = is_over or scheduler.on_trial_result(None, each, result) == scheduler.STOP
            recorder.on_trial_result(rung, [], each, result)
            if is_over:
                break
        if recorder.stop_all():
            break
    return recorder.result(), lines


@pytest.mark.parametrize("seed", range(5))
def test_the_search_keeps_the_recipe_in_every_rung_and_is_never_worse(seed: int, tmp_path: Path) -> None:
    scores = np.random.default_rng(seed).random((30, 3))
    result, _ = run_search(Place(str(tmp_path)), lambda number, rung: scores[number, rung])
    assert result.trials[0].scores == tuple(scores[0])
    last = [each.scores[-1] for each in result.trials if len(each.scores) == 3]
    assert result.best.scores[-1] == max(last) >= scores[0, -1]
    assert result.gain == result.best.scores[-1] - scores[0, -1]
    counts = [sum(len(each.scores) > rung for each in result.trials) for rung in range(3)]
    assert counts[0] == 30
    assert 30 / 6 < counts[1] < 30 / 1.5
    assert counts[2] < counts[1]


def test_the_worst_recipe_reaches_the_last_rung_and_a_failed_trial_is_ended(tmp_path: Path) -> None:
    result, lines = run_search(
        Place(str(tmp_path)), lambda number, rung: None if number == 3 else 0.1 if number == 0 else 0.5
    )
    assert len(result.trials[0].scores) == 3
    assert len(result.trials[3].scores) == 1
    assert result.best.number == 1
    assert "trial 3 (learning_rate=0.04): failed: the loss is NaN after 1,000 samples" in lines
    row = str(result).splitlines()[8]
    assert row.split()[0] == "3"
    assert row.endswith("failed")


def test_a_failed_recipe_ends_the_trials_at_once(tmp_path: Path) -> None:
    result, lines = run_search(
        Place(str(tmp_path)), lambda number, rung: None if (number, rung) == (0, 1) else 0.5
    )
    assert [each.scores for each in result.trials] == [(0.5, 0.0)]
    assert lines[-1] == "recipe: failed: the loss is NaN after 3,000 samples"
    assert config_from_yaml((tmp_path / TUNED).read_text()) == SIMCLR


def test_the_recipe_is_kept_beside_faster_and_better_trials() -> None:
    scheduler, decisions = KeepingRecipe(2), []
    for number, score in ((1, 0.9), (2, 0.5), (3, 0.95), (0, 0.1)):
        each: Any = SimpleNamespace(trial_id=f"abc_{number:05d}")
        scheduler.on_trial_add(None, each)  # pyright: ignore[reportArgumentType]
        result = {"score": score, "length": 1, "error": ""}
        decisions.append(scheduler.on_trial_result(None, each, result))
    assert decisions == ["CONTINUE", "STOP", "CONTINUE", "CONTINUE"]
    assert scheduler.on_trial_result(None, each, {"score": 0.1, "length": ETA}) == "STOP"


def test_equal_trials_return_the_recipe_itself(tmp_path: Path) -> None:
    result, _ = run_search(Place(str(tmp_path)), lambda number, rung: 0.5)
    assert (result.best.number, result.gain, result.config) == (0, 0.0, SIMCLR)
    assert config_from_yaml((tmp_path / TUNED).read_text()) == SIMCLR


@pytest.mark.parametrize(
    ("scores", "gain", "last"),
    [
        ((0.5,), "unknown: the time ended before the recipe's last rung, so nothing was compared;", "-"),
        ((0.5, 0.5), "0", "best"),
    ],
)
def test_a_recipe_before_its_last_rung_is_not_called_the_best(
    scores: tuple[float, ...], gain: str, last: str
) -> None:
    trials = (trial(0, *scores), trial(1, 0.9))
    result = TuneResult(
        output=TUNED,
        config=SIMCLR,
        metric="knn_top1",
        rungs=(1_000, 3_000),
        recipe=SIMCLR,
        trials=trials,
        best=best_trial(trials, 2),
    )
    lines = str(result).splitlines()
    assert lines[1].removeprefix("  gain over the recipe").strip().startswith(gain)
    (row,) = (line for line in lines if line.startswith("recipe"))
    assert row.split()[-1] == last


def test_the_best_settings_so_far_are_a_file_that_train_reads(tmp_path: Path) -> None:
    place, written = Place(str(tmp_path)), list[RunConfig]()

    def objective(number: int, rung: int) -> float:
        written.append(plan_run(str(tmp_path / TUNED), data=[], flags={}, settings=()).config)
        return number / 10

    result, _ = run_search(place, objective, num_trials=3, num_rungs=2)
    final = plan_run(str(tmp_path / TUNED), data=[], flags={}, settings=()).config
    changed = override(SIMCLR, {RATE: 0.03})
    assert written == [*[SIMCLR] * 4, override(SIMCLR, {RATE: 0.02}), override(SIMCLR, {RATE: 0.02})]
    assert final == result.config == changed


# Refusals


def test_samples_without_labels_are_refused_before_ray_starts(tmp_path: Path) -> None:
    data = write_digits(tmp_path / "digits.parquet", 100, labeled=False)
    with pytest.raises(
        DataError, match="raycl tune compares trials by kNN on the labels .* data.columns.label=NAME"
    ):
        raycl.tune("simclr", data=data, output=tmp_path / "out")
    assert not ray.is_initialized()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "simclear"}, "unknown recipe 'simclear'"),
        ({"minutes": 0.5}, "--minutes must be at least 1, got 0.5"),
        ({"minutes": float("nan")}, "--minutes must be at least 1"),
        ({"data": []}, "the list of data sets is empty"),
        ({"output": "earlier"}, "holds an earlier search"),
        ({"settings": {"no.such": 1}}, "unknown key no.such"),
    ],
)
def test_a_search_is_refused_in_one_line_before_ray_starts(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_digits(tmp_path / "digits.parquet", 600)
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / TUNED).write_text("")
    with pytest.raises(RayclError, match=message) as caught:
        raycl.tune(**{"recipe": "simclr", "data": data, **options})
    assert "\n" not in str(caught.value)
    assert not ray.is_initialized()


def test_several_stages_are_refused() -> None:
    stages = SIMCLR.model_copy(update={"stages": (Stage(epochs=1), Stage(epochs=1))})
    with pytest.raises(ConfigError, match="one stage, and the configuration has 2"):
        check_search(stages, (), 10)


def test_a_failed_trial_never_wins() -> None:
    recipe_failed = [
        Trial(number=0, settings={}, scores=(0.7, 0.0), error="the loss is NaN"),
        Trial(number=1, settings={"stages.0.temperature": 0.1}, scores=(0.6, 0.5)),
    ]
    assert best_trial(recipe_failed, 2).number == 0
    trial_failed = [
        Trial(number=0, settings={}, scores=(0.0,)),
        replace(recipe_failed[0], number=1, scores=(0.0,)),
    ]
    assert best_trial(trial_failed, 1).number == 0


def search_with(
    monkeypatch: pytest.MonkeyPatch,
    config: RunConfig,
    output: Path,
    rows: list[int],
    tune: Any,
    *,
    end_s: float = 601.0,
) -> list[tuple[search.Runner, str]]:
    """Replace the pace run, which trains on so many ``rows`` of each data set, and Ray Tune; return the runs."""
    place, runs = Place(str(output)), list[tuple[search.Runner, str]]()

    def run(runner: search.Runner, settings: Any, samples: int, name: str) -> Measured:
        runs.append((runner, name))
        described = describe_data([], rows, None, streamed=False)
        (place / "trials" / name / DATA).write_text(json.dumps(described))
        return Measured(0.5, 1.0, 1_000.0)

    validated = nullcontext(SimpleNamespace(output=place, sources=(), config=config))
    monkeypatch.setattr(search, "validate_run", lambda *_, **__: validated)
    monkeypatch.setattr(search, "connect_cluster", lambda *_, **__: None)
    monkeypatch.setattr(search.Runner, "run", run)
    monkeypatch.setattr(search, "tune_trials", tune)
    # Without an error, the search lasts until its deadline, after 600 s.
    monkeypatch.setattr(search, "CLOSING_S", 0.0)
    clock = iter([0.0, 0.0, end_s])
    monkeypatch.setattr(search.time, "monotonic", lambda: next(clock))
    return runs


def report_recipe(recorder: Recorder, score: float, error: str = "") -> None:
    trial = SimpleNamespace(trial_id="x_00000", config={})
    recorder.on_trial_result(1, [], trial, {"score": score, "error": error})


def test_a_failed_recipe_ends_the_search_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_runner: Any, _rungs: Any, _space: Any, recorder: Recorder, **_: Any) -> None:
        report_recipe(recorder, 0.0, "the loss is NaN")

    search_with(monkeypatch, SIMCLR, tmp_path, [5_000], fail, end_s=60.0)
    source: Any = SimpleNamespace(num_rows=5_000, uri="data")
    with pytest.raises(RunError, match="the recipe failed: the loss is NaN"):
        search.search(SIMCLR, output=str(tmp_path), sources=[source], deadline=600.0, quiet=True)


@pytest.mark.parametrize(
    ("rows", "sizes"), [([200], [32, 64]), ([100, 500], [32, 64]), ([300, 300], [32, 64, 128])]
)
def test_the_rows_of_the_pace_run_plan_the_search(
    rows: list[int], sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = list[Any]()

    def tune(_runner: Any, rungs: Any, space: Any, recorder: Recorder, **_: Any) -> None:
        planned.extend((max(rungs), space[BATCH]))
        report_recipe(recorder, 0.5)

    config = override(recipe("two_tower"), {"stages.0.batch_size": 64, "stages.0.epochs": 20})
    search_with(monkeypatch, config, tmp_path, rows, tune)
    logs: Any = [SimpleNamespace(num_rows=5_000, uri="data")] * len(rows)  # with fewer clicks
    search.search(config, output=str(tmp_path), sources=logs, deadline=600.0, quiet=True)
    assert planned == [20 * sum(rows), sizes]


def test_trials_share_the_gpus_by_the_workers_of_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    num_trials = list[int]()

    class PlannedError(Exception):
        pass

    def plan(*, max_concurrent: int, **_: Any) -> None:
        num_trials.append(max_concurrent)
        raise PlannedError

    monkeypatch.setattr(search, "BasicVariantGenerator", plan)
    monkeypatch.setattr(search.ray, "cluster_resources", lambda: {"GPU": 8.0})
    monkeypatch.setattr(search.os, "environ", dict(search.os.environ))
    for workers in ("workers", "stages.0.workers"):
        config = override(SIMCLR, {"gpu": True, workers: 4})
        runner, recorder = search.Runner(config=config, sources=(), output="trials"), cast("Recorder", None)
        with pytest.raises(PlannedError):
            search.tune_trials(runner, (900,), {RATE: (0.1, 1.0)}, recorder, seconds=1.0, debug=True)
    assert num_trials == [2, 2]


def test_the_runs_of_trials_lie_below_an_address_with_options(monkeypatch: pytest.MonkeyPatch) -> None:
    options = "?scheme=http&endpoint_override=127.0.0.1:9000"
    outputs: list[str] = []

    def remote(config: RunConfig, output: str, sources: Any) -> None:
        outputs.append(output)

    fake = SimpleNamespace(remote=lambda **_: lambda _: SimpleNamespace(remote=remote), get=lambda _: None)
    monkeypatch.setattr("raycl.tuning.trial.ray", fake)
    search.Runner(config=SIMCLR, sources=(), output=f"s3://bucket/tuned/trials{options}").run({}, 900, "2-1")
    assert outputs == [f"s3://bucket/tuned/trials/2-1{options}"]


@pytest.mark.parametrize(
    ("config", "shared"),
    [
        (override(recipe("two_tower"), {"text.vocabulary_size": 900, "text.lowercase": False}), True),
        (override(recipe("two_tower"), {"text.tokenizer": "/mine/tokenizer.json"}), False),
        (override(recipe("simcse"), {"text.corpus": "more.parquet"}), True),  # whose tokens no weights need
        (SIMCLR, False),
    ],
    ids=["trained", "given", "corpus", "images"],
)
def test_all_trials_have_the_tokenizer_of_the_first_run(
    config: RunConfig, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runners = list[search.Runner]()

    def tune(runner: search.Runner, _rungs: Any, _space: Any, recorder: Recorder, **_: Any) -> None:
        runners.append(runner)
        report_recipe(recorder, 0.5)

    runs = search_with(monkeypatch, config, tmp_path, [5_000], tune)
    source: Any = SimpleNamespace(num_rows=5_000, uri="data")
    result = search.search(config, output=str(tmp_path), sources=[source], deadline=600.0, quiet=True)
    (first, name), *again = runs
    assert first.config == config
    # The first run trained the tokenizer, so its time is not that of a trial.
    expected = [(runners[0].config, f"{name}-again")] if shared else []
    assert [(runner.config, name) for runner, name in again] == expected
    tokenizer = str(tmp_path / "trials" / name / "tokenizer.json")
    read = config if config.counts_tokens or not shared else override(config, {"text.corpus": None})
    changed = override(read, {"text.tokenizer": tokenizer}) if shared else config
    assert runners[0].config == changed
    assert trial_config(changed, {BATCH: 128}, 5_000, "0-1").text.tokenizer == changed.text.tokenizer
    assert result.config == config  # and not the tokenizer of a trial


def test_pairs_need_no_labels() -> None:
    source: Any = SimpleNamespace(has_labels=False)
    check_search(recipe("two_tower"), (source,), 10)
