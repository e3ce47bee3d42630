"""The figures: tables that are runs, rules on planted numbers, pictures of what is there."""

import io
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raycl.demo.digits import write_digits
from raycl.errors import ConfigError, DataError
from raycl.records import METRICS, RESULT
from raycl.reproduction.catalog import FIGURES, find_figure
from raycl.reproduction.claims import Sample, above, every
from raycl.reproduction.figure import Figure
from raycl.reproduction.images import training_part
from raycl.reproduction.outcomes import OUTCOME, Curve, Outcome, Results, read_curves, read_outcome
from raycl.reproduction.panels import spread_apart
from raycl.reproduction.paragraph import Page
from raycl.reproduction.request import Request, gather, reproduce
from raycl.reproduction.runs import outcome_of, plan_runs
from raycl.reproduction.scales import SCALES, find_scale
from raycl.settings import config_to_yaml
from raycl.storage import Place
from raycl.training.resumption import CONFIG

MACHINE = {"cpu": "a cpu", "num_cores": 2, "capability": "AVX512", "gpu": None, "torch": "2"}
Planted = Mapping[str, Mapping[str, list[float]]]  # setting -> number -> a value a seed
EACH = [
    pytest.param(figure, scale, id=f"{name}-{scale}") for name, figure in FIGURES.items() for scale in SCALES
]


def outcomes_of(planted: Planted) -> list[Outcome]:
    """Return an outcome for each setting and seed."""
    found = []
    for setting, numbers in planted.items():
        for seed in range(max(map(len, numbers.values()), default=0)):
            own = {name: values[seed] for name, values in numbers.items() if seed < len(values)}
            found.append(
                Outcome(setting=setting, seed=seed, numbers=own, machine=MACHINE, data="train", test="test")
            )
    return found


def results_of(name: str, planted: Planted, curves: Mapping[str, list[Curve]] | None = None) -> Results:
    """Return planted results of a figure at the scale of a CPU."""
    settings = FIGURES[name].settings["cpu"]
    assert set(planted) <= {setting.name for setting in settings}
    return Results(
        labels={setting.name: setting.label for setting in settings},
        lines={setting.name: (setting.line, setting.x) for setting in settings},
        outcomes=outcomes_of(planted),
        curves=curves or {},
    )


def verdicts(
    name: str, planted: Planted, curves: Mapping[str, list[Curve]] | None = None
) -> list[bool | None]:
    return [claim.held for claim in FIGURES[name].claims(results_of(name, planted, curves))]


def knn(*values: float) -> dict[str, list[float]]:
    return {"knn_top1": list(values)}


# The tables


@pytest.mark.parametrize(("figure", "scale"), EACH)
def test_every_setting_is_a_run_of_its_own_folder(figure: Figure, scale) -> None:
    runs = plan_runs(figure, scale, Place("out"), num_seeds=2, overrides={})
    assert len(runs) == 2 * len(figure.settings[scale])
    assert len({run.name for run in runs}) == len(runs)
    assert len({config_to_yaml(run.config) for run in runs}) == len(runs)
    for run in runs:
        assert run.name == f"{figure.name}-{run.setting.name}-seed{run.seed}"
        assert set(run.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_.")
        assert run.config.seed == run.seed
        assert run.config.data.image_size == SCALES[scale].image_size
    # All settings once, then the next seed: an unfinished figure has points everywhere.
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)


@pytest.mark.parametrize(("figure", "scale"), EACH)
def test_batches_and_stores_fit_the_images(figure: Figure, scale) -> None:
    num_train = SCALES[scale].num_train or 50_000
    for setting in figure.settings[scale]:
        config = figure.config(setting, scale, seed=0)
        held_out = config.evaluation.num_test if config.evaluation.every_epochs else 0
        assert all(stage.batch_size <= num_train - held_out for stage in config.stages)
        if config.negatives.store == "memory_bank":
            assert config.negatives.num_negatives <= num_train


def test_the_settings_of_a_figure_see_equally_many_images() -> None:
    """But for those of steps, whose batch is the same."""
    for scale in SCALES:
        for figure in FIGURES.values():
            configs = [figure.config(setting, scale, seed=0) for setting in figure.settings[scale]]
            epochs = {sum(stage.epochs or 0 for stage in config.stages) for config in configs}
            assert len(epochs) == 1, (figure.name, scale)
            if epochs == {0}:
                stages = [config.stages[0] for config in configs]
                assert len({(stage.steps, stage.batch_size) for stage in stages}) == 1


def test_the_ways_to_have_negatives_differ_in_nothing_else() -> None:
    figure = FIGURES["negatives"]
    chosen = {setting.line: figure.config(setting, "cpu", seed=0) for setting in figure.settings["cpu"]}
    assert len(chosen) == 3
    first, *others = chosen.values()
    for other in others:
        assert (other.augment, other.projection_head, other.encoder) == (
            first.augment,
            first.projection_head,
            first.encoder,
        )
        assert other.optimizer == first.optimizer
        for name in (
            "loss",
            "temperature",
            "learning_rate",
            "learning_rate_schedule",
            "warmup_epochs",
            "epochs",
        ):
            assert getattr(other.stages[0], name) == getattr(first.stages[0], name), name


def test_what_the_user_sets_comes_last_and_workers_before_what_a_setting_states() -> None:
    figure = FIGURES["accumulation"]
    whole, two = (each for each in figure.settings["cpu"] if each.name in ("whole", "workers"))
    config = figure.config(whole, "cpu", seed=3, workers=4, overrides={"stages.0.steps": 7})
    assert (config.workers, config.stages[0].steps, config.seed) == (4, 7, 3)
    assert figure.config(two, "cpu", seed=0, workers=4).workers == 2
    growing = FIGURES["stages"].settings["cpu"][1]
    grown = FIGURES["stages"].config(growing, "cpu", seed=0, overrides={"stages.0.epochs": 1})
    assert [stage.epochs for stage in grown.stages] == [1, 3, 3]
    faster = FIGURES["stages"].config(growing, "cpu", seed=0, overrides={"stages.0.learning_rate": 0.5})
    assert [stage.learning_rate for stage in faster.stages] == [0.5, 0.12, 0.12]


def test_unknown_names_are_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="unknown figure 'leaks'; there are negatives, .*accumulation"):
        find_figure("leaks")
    with pytest.raises(ConfigError, match="unknown --scale 'tpu'; there are cpu, gpu"):
        find_scale("tpu")
    with pytest.raises(ConfigError, match="--seeds 0"):
        plan_runs(FIGURES["leak"], "cpu", Place("out"), num_seeds=0, overrides={})


# The rules


def test_above_asks_for_more_than_the_spread_and_for_two_seeds() -> None:
    assert above(Sample((0.5, 0.6)), Sample((0.3, 0.4))) is True
    assert above(Sample((0.5, 0.75)), Sample((0.25, 0.5))) is False  # as far as the spread, no more
    assert above(Sample((0.3, 0.4)), Sample((0.5, 0.6))) is False
    assert above(Sample((0.55, 0.55)), Sample((0.1, 0.4))) is False  # the greater spread counts
    assert above(Sample((0.9,)), Sample((0.1, 0.1))) is None
    assert above(Sample((0.9, 0.9)), Sample(())) is None


def test_every_is_false_where_one_is_and_unknown_where_one_is() -> None:
    assert every([True, True]) is True
    assert every([True, None]) is None
    assert every([None, False]) is False
    assert every([]) is None


def lines(end_to_end: tuple[float, float], bank: tuple[float, float], moco: tuple[float, float]) -> Planted:
    """Return three curves with a first and a last point, two near seeds each, that share 128 negatives."""
    ends = {"end-to-end": (end_to_end, 1_024), "bank": (bank, 8_192), "moco": (moco, 8_192)}
    return {
        f"{name}-{count}": knn(value, value + 0.002)
        for name, (values, most) in ends.items()
        for count, value in zip((128, most), values, strict=True)
    }


def test_negatives_are_judged_by_gain_and_by_points_in_common() -> None:
    assert verdicts("negatives", lines((0.3, 0.4), (0.2, 0.35), (0.3, 0.4))) == [True, True, True]
    assert verdicts("negatives", lines((0.3, 0.3), (0.2, 0.35), (0.3, 0.4))) == [False, True, True]
    assert verdicts("negatives", lines((0.3, 0.4), (0.2, 0.45), (0.3, 0.4))) == [True, False, True]
    assert verdicts("negatives", lines((0.35, 0.4), (0.2, 0.35), (0.3, 0.4))) == [True, True, False]
    assert verdicts("negatives", {"moco-128": knn(0.3, 0.3), "moco-512": knn(0.4, 0.4)}) == [None, None, None]


def test_momentum_zero_fails_only_if_it_is_below_all_others() -> None:
    good = {
        f"momentum-{name}": knn(value, value + 0.01)
        for name, value in (("0", 0.2), ("0.9", 0.3), ("0.99", 0.4), ("0.999", 0.25))
    }
    assert verdicts("momentum", good) == [True, True]
    assert verdicts("momentum", good | {"momentum-0": knn(0.36, 0.37)}) == [False, True]
    assert verdicts("momentum", good | {"momentum-0.9": knn(0.4, 0.41)}) == [True, False]
    assert verdicts("momentum", good | {"momentum-0.9": knn(0.3)}) == [None, None]
    assert verdicts("momentum", {}) == [None, None]


def test_the_leak_is_judged_by_probe_accuracy_and_cures() -> None:
    def table(leaked: float, accuracy: float, cured: float) -> Planted:
        return {
            "as_is": {"leakage": [leaked] * 2, **knn(accuracy, accuracy + 0.01)},
            "shuffled": {"leakage": [cured] * 2, **knn(0.4, 0.41)},
            "group": {"leakage": [0.0] * 2, **knn(0.4, 0.41)},
            "layer": {"leakage": [0.0] * 2, **knn(0.4, 0.41)},
        }

    assert verdicts("leak", table(0.3, 0.3, 0.05)) == [True, True, True]
    assert verdicts("leak", table(0.05, 0.3, 0.05)) == [False, True, False]
    assert verdicts("leak", table(0.3, 0.4, 0.05)) == [True, False, True]
    assert verdicts("leak", {"as_is": {"leakage": [0.3], **knn(0.2)}}) == [None, None, None]


def test_a_cure_of_the_collapse_must_keep_apart_and_be_worth_more() -> None:
    def run(spread: float, accuracy: float) -> dict[str, list[float]]:
        return {"spread": [spread, spread + 0.01], **knn(accuracy, accuracy + 0.01)}

    planted = {
        "hinge": run(0.02, 0.3),
        "entropy-first": run(0.5, 0.4),
        "mixed": run(0.05, 0.4),
        "rollback": run(0.5, 0.305),
    }
    assert verdicts("collapse", planted) == [True, True, False, False, None]
    assert verdicts("collapse", {"hinge": {"spread": [0.02, 0.3]}})[0] is False
    assert verdicts("collapse", {"hinge": {"spread": [0.02]}})[0] is None


def test_growth_is_judged_beside_the_large_and_the_small_batch() -> None:
    table = {
        name: {**knn(value, value + 0.01), "steps": [10.0, 10.0]}
        for name, value in (("small", 0.4), ("grown", 0.4), ("large", 0.3))
    }
    assert verdicts("stages", table) == [True, True]
    assert verdicts("stages", table | {"large": knn(0.4, 0.41), "small": knn(0.5, 0.51)}) == [False, False]
    assert verdicts("stages", table | {"grown": knn(0.4)}) == [None, None]


def loss_curve(setting: str, seed: int, early: float, late: float) -> Curve:
    steps = [1, 2, 5, 6, 60]
    whole = [3.0 + seed, 2.9, 2.5, 2.4, 2.0]
    values = [value * off for value, off in zip(whole, (1.0, 1.0, early, late, late), strict=True)]
    return Curve(setting=setting, seed=seed, attempt=0, samples=steps, steps=steps, values=values)


def losses(chunks: float, workers: float, *, late: float = 0.0, num_seeds: int = 2) -> dict[str, list[Curve]]:
    """Return curves that are off by these parts of the whole batch's in the first steps, the chunks' later ``late``."""
    off = {"whole": (0.0, 0.0), "chunks": (chunks, late), "workers": (workers, 0.0)}
    return {
        "loss": [
            loss_curve(name, seed, 1.0 + early, 1.0 + later)
            for seed in range(num_seeds)
            for name, (early, later) in off.items()
        ]
    }


def test_chunks_may_be_off_by_what_rounding_does_in_the_first_steps_and_no_more() -> None:
    assert verdicts("accumulation", {}, losses(5e-5, 1e-5)) == [True]
    assert verdicts("accumulation", {}, losses(5e-4, 1e-5)) == [False]
    assert verdicts("accumulation", {}, losses(-5e-4, 1e-5)) == [False]
    assert verdicts("accumulation", {}, losses(5e-5, 1e-5, late=0.3)) == [True]
    assert verdicts("accumulation", {}, losses(5e-6, 0.0)) == [True]
    assert verdicts("accumulation", {}, losses(5e-5, 1e-5, num_seeds=1)) == [None]
    assert verdicts("accumulation", {}, {}) == [None]


def test_a_sentence_says_what_was_found_and_never_more_than_the_seeds_tell() -> None:
    claim = FIGURES["momentum"].claims(results_of("momentum", {"momentum-0": knn(0.25, 0.25)}))[0]
    assert claim.sentence() == (
        "“Without momentum (0) MoCo fails” cannot be said yet: 0.250 at 0; "
        "it takes 2 seeds of every setting it compares."
    )


# The pictures


def some(name: str, *, whole: bool) -> Results:
    """Return numbers and curves for all settings, or for the first one alone."""
    settings = FIGURES[name].settings["cpu"][: None if whole else 1]
    rng = np.random.default_rng(0)
    numbers = [*FIGURES[name].columns, "knn_top1", "spread", "loss", "leakage"]
    planted = {
        each.name: {number: rng.uniform(0.2, 0.5, 3).tolist() for number in numbers} for each in settings
    }
    steps = [10.0 * step for step in range(12)]
    curves = {
        metric: [
            Curve(
                setting=each.name,
                seed=seed,
                attempt=attempt,
                samples=steps,
                steps=steps,
                values=rng.uniform(0.1, 1, 12).tolist(),
            )
            for each in settings
            for seed in range(3)
            for attempt in range(2)
        ]
        for metric in ("loss", "spread", "knn_top1")
    }
    return results_of(name, planted, curves)


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "partial"])
def test_a_figure_is_drawn_told_and_counted_whatever_is_there(name: str, whole: bool) -> None:
    results = some(name, whole=whole)
    page = Page(figure=FIGURES[name], scale="cpu", command="python jobs/reproduce.py", results=results)
    with Image.open(io.BytesIO(page.picture())) as picture:
        assert picture.width > 900
        assert picture.height > 450
        assert len(set(picture.convert("L").resize((64, 64)).tobytes())) > 8  # not empty
    text = page.text()
    for claim in page.claims:
        assert claim.sentence() in text
    assert all(label in text for label in results.labels.values())
    told = json.loads(page.numbers())
    assert len(told["runs"]) == len(results.outcomes)
    assert told["runs"][0]["machine"] == MACHINE
    assert told["runs"][0]["curves"]["loss"][0]["steps"]
    if not whole:
        assert None in [claim["held"] for claim in told["claims"]]


def test_names_at_the_ends_of_lines_keep_apart() -> None:
    assert spread_apart([]) == []
    assert spread_apart([0.2, 0.6]) == [0.2, 0.6]
    assert spread_apart([0.5, 0.5, 0.5], gap=0.1) == pytest.approx([0.4, 0.5, 0.6])


# What lies at the output


def lay_down(run, outcome: Outcome | None) -> None:
    """Write what a run leaves behind."""
    (run.place / CONFIG).write_text(config_to_yaml(run.config))
    (run.place / RESULT).write_text('{"status": "finished"}')
    lines = [{"step": step, "samples": 32 * step, "loss": 3.0 - step / 10} for step in (1, 2, 3)]
    (run.place / METRICS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if outcome is not None:
        outcome.write(run.place)


def test_what_is_there_is_drawn_and_the_rest_named(tmp_path: Path) -> None:
    request = Request(figure="momentum", output=str(tmp_path), num_seeds=2)
    runs = plan_runs(FIGURES["momentum"], "cpu", Place(str(tmp_path)), num_seeds=2, overrides={})
    with pytest.raises(ConfigError, match="no run of momentum is finished"):
        reproduce(request, draw_only=True)
    for run in runs[:2]:
        outcome = Outcome(
            setting=run.setting.name,
            seed=0,
            numbers={"knn_top1": 0.3, "pixels": 0.25},
            machine=MACHINE,
            data="train",
            test="test",
        )
        lay_down(run, outcome)
    lay_down(runs[2], None)  # trained, not judged
    told: list[str] = []
    page = reproduce(request, draw_only=True, tell=told.append)
    assert page.results.missing == [run.name for run in runs[2:]]
    assert page.command.startswith("python jobs/reproduce.py momentum --data train --test test --output ")
    assert page.results.floor == 0.25
    assert [curve.values for curve in page.results.curves_of("momentum-0", "loss")] == [[2.9, 2.8, 2.7]]
    text = (tmp_path / "momentum.md").read_text()
    assert "Not finished yet: momentum-momentum-0.99-seed0, " in text
    assert "cannot be said yet" in told[0]
    assert {path.name for path in tmp_path.iterdir()} == {
        "runs",
        "momentum.png",
        "momentum.json",
        "momentum.md",
    }


def test_a_finished_figure_is_drawn_without_a_run(tmp_path: Path) -> None:
    request = Request(figure="stages", output=str(tmp_path), data="train", test="test", num_seeds=2)
    for run in plan_runs(FIGURES["stages"], "cpu", Place(str(tmp_path)), num_seeds=2, overrides={}):
        numbers = {"knn_top1": 0.5 - 0.1 * (run.setting.name == "large"), "steps": 3.0}
        lay_down(
            run,
            Outcome(
                setting=run.setting.name,
                seed=run.seed,
                numbers=numbers,
                machine=MACHINE,
                data="train",
                test="test",
            ),
        )
    files = {file: file.stat().st_mtime_ns for file in tmp_path.glob("runs/*/*")}
    # There is nothing at these addresses: to look for images would be an error.
    page = reproduce(request, tell=lambda _: None)
    assert [claim.held for claim in page.claims] == [True, True]
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("runs/*/*")} == files
    assert not page.results.missing


def test_a_folder_with_other_settings_or_images_is_refused(tmp_path: Path) -> None:
    request = Request(figure="momentum", output=str(tmp_path), num_seeds=1)
    runs = plan_runs(FIGURES["momentum"], "cpu", Place(str(tmp_path)), num_seeds=1, overrides={})
    lay_down(
        runs[0], Outcome(setting="momentum-0", seed=0, numbers={}, machine=MACHINE, data="train", test="test")
    )
    other = Request(figure="momentum", output=str(tmp_path), num_seeds=1, settings={"stages.0.epochs": 99})
    with pytest.raises(ConfigError, match=r"stages\.0\.epochs 8, and this one has 99; repeat the flags"):
        reproduce(other, draw_only=True)
    with pytest.raises(ConfigError, match="give --data and --test"):
        reproduce(request)
    given = Request(figure="momentum", output=str(tmp_path), num_seeds=1, data="other", test="test")
    with pytest.raises(ConfigError, match="--data is other, and runs at the output saw train"):
        reproduce(given)


def test_a_record_is_read_back_and_a_broken_one_refused(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    assert read_outcome(place) is None
    outcome = Outcome(
        setting="a", seed=1, numbers={"knn_top1": 0.5}, machine=MACHINE, data="d", test="t", failed="why"
    )
    outcome.write(place)
    assert read_outcome(place) == outcome
    (place / OUTCOME).write_text('{"setting": "a"')
    with pytest.raises(ConfigError, match="no record of a run"):
        read_outcome(place)


def test_an_untouched_folder_has_no_outcome(tmp_path: Path) -> None:
    run, *_ = plan_runs(FIGURES["leak"], "cpu", Place(str(tmp_path)), num_seeds=1, overrides={})
    assert outcome_of(run) is None


def test_a_run_that_was_rolled_back_gives_a_curve_an_attempt(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "samples": 4, "spread": 0.5},
        {"step": 2, "samples": 8, "spread": 0.1},
        {"step": 0, "samples": 0, "event": "rollback"},
        {"step": 1, "samples": 4, "spread": 0.6},
        {"step": 2, "samples": 8, "loss": 1.0},
    ]
    (Place(str(tmp_path)) / METRICS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    outcome = Outcome(setting="rollback", seed=2, numbers={}, machine=MACHINE, data="d", test="t")
    found = read_curves(Place(str(tmp_path)), outcome, ("spread", "loss"))
    assert [(curve.attempt, curve.values) for curve in found["spread"]] == [(0, [0.5, 0.1]), (1, [0.6])]
    assert [(curve.attempt, curve.steps) for curve in found["loss"]] == [(1, [2])]


def test_missing_runs_are_those_without_an_outcome(tmp_path: Path) -> None:
    figure = FIGURES["stages"]
    runs = plan_runs(figure, "cpu", Place(str(tmp_path)), num_seeds=1, overrides={})
    assert gather(figure, "cpu", runs, [None] * 3).missing == [run.name for run in runs]


# The images


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_digits(Place(str(tmp_path_factory.mktemp("digits"))))


def test_the_part_that_is_trained_on_is_drawn_once_and_has_all_classes(
    digits: tuple[str, str], tmp_path: Path
) -> None:
    part = training_part(digits[0], 600, Place(str(tmp_path)))
    drawn, whole = pq.read_table(part), pq.read_table(digits[0])
    assert drawn.num_rows == 600
    known = dict(zip(whole["image"].to_pylist(), whole["label"].to_pylist(), strict=True))
    assert all(
        known[image] == label
        for image, label in zip(drawn["image"].to_pylist(), drawn["label"].to_pylist(), strict=True)
    )
    counts = np.bincount(drawn["label"].to_numpy())
    assert len(counts) == 10
    assert counts.min() > 35
    before = Path(part).stat().st_mtime_ns
    assert training_part(digits[0], 600, Place(str(tmp_path))) == part
    assert Path(part).stat().st_mtime_ns == before


def test_a_set_that_is_small_enough_is_taken_as_it_is(digits: tuple[str, str], tmp_path: Path) -> None:
    for num_rows in (None, 10**6):
        assert training_part(digits[0], num_rows, Place(str(tmp_path))) == digits[0]
    assert not list(tmp_path.iterdir())


def test_images_without_labels_are_refused(digits: tuple[str, str], tmp_path: Path) -> None:
    bare = str(tmp_path / "bare.parquet")
    pq.write_table(pq.read_table(digits[0], columns=["image"]), bare)
    with pytest.raises(DataError, match="has no labels, and the figures are judged by labels"):
        training_part(bare, 100, Place(str(tmp_path)))
