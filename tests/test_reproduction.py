"""Figures: settings, claims on planted numbers, drawings of finished runs, and the output folder."""

import dataclasses
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raycl.config import leaves
from raycl.config.overrides import config_to_yaml, differences
from raycl.data.images import Pixels
from raycl.data.in_memory import Batch
from raycl.demo.digits import write_digits
from raycl.errors import ConfigError, DataError
from raycl.records import CONFIG, METRICS, RESULT
from raycl.storage import Place

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from claims import FIGURES, find_figure
from claims.figure import SCALES, ClaimFigure, describe_runs, find_scale
from claims.images import NUM_PROBE_IMAGES, num_classes, probe_images, training_subset
from claims.markdown import Page
from claims.plots import spread_apart
from claims.results import OUTCOME, MetricCurve, Outcome, Results, read_curves, read_outcome
from claims.rules import MARGIN, Claim, SeedValues, all_hold, exceeds, non_inferior
from claims.run import ReproduceRequest, collect_results, reproduce
from claims.runs import PlannedRun, outcome_of, plan_runs

MACHINE = {"cpu": "a cpu", "num_cores": 2, "capability": "AVX512", "gpu": None, "torch": "2"}
Planted = Mapping[str, Mapping[str, list[float]]]  # setting -> number -> one value per seed
EACH = [
    pytest.param(figure, scale, id=f"{name}-{scale}") for name, figure in FIGURES.items() for scale in SCALES
]


def outcome(setting: str, seed: int = 0, **changes: Any) -> Outcome:
    fields: dict[str, Any] = {"numbers": {}, "machine": MACHINE, "data": "train", "test": "test"}
    return Outcome(setting=setting, seed=seed, **fields | changes)


def results_of(name: str, planted: Planted, curves: Mapping[str, list[MetricCurve]] | None = None) -> Results:
    """Return planted results of a figure at CPU scale."""
    figure = FIGURES[name]
    assert set(planted) <= {setting.name for setting in figure.settings["cpu"]}
    outcomes = [
        outcome(setting, seed, numbers={key: own[seed] for key, own in numbers.items() if seed < len(own)})
        for setting, numbers in planted.items()
        for seed in range(max(map(len, numbers.values()), default=0))
    ]
    return Results(figure=figure, scale="cpu", configs=[], outcomes=outcomes, curves=curves or {})


def claims_of(
    name: str, planted: Planted, curves: Mapping[str, list[MetricCurve]] | None = None
) -> list[Claim]:
    return results_of(name, planted, curves).claims


def verdicts(
    name: str, planted: Planted, curves: Mapping[str, list[MetricCurve]] | None = None
) -> list[bool | None]:
    return [claim.held for claim in claims_of(name, planted, curves)]


def planned(
    name: str, output: Path | str = "out", *, num_seeds: int = 1, **overrides: Any
) -> list[PlannedRun]:
    return plan_runs(FIGURES[name], "cpu", Place(str(output)), num_seeds=num_seeds, overrides=overrides)


def knn(*values: float) -> dict[str, list[float]]:
    return {"knn_top1": list(values)}


# The tables


@pytest.mark.parametrize(("figure", "scale"), EACH)
def test_every_setting_is_a_run_in_its_own_folder_that_fits_the_images(figure: ClaimFigure, scale) -> None:
    num_train = SCALES[scale].num_train or 50_000
    runs = plan_runs(figure, scale, Place("out"), num_seeds=2, overrides={})
    assert len(runs) == 2 * len(figure.settings[scale])
    assert len({run.name for run in runs}) == len({config_to_yaml(run.config) for run in runs}) == len(runs)
    # All settings once, then the next seed: an unfinished figure has points for every setting.
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    for run in runs:
        config = run.config
        assert run.name == f"{figure.name}-{run.setting.name}-seed{run.seed}"
        assert set(run.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_.")
        assert (config.seed, config.data.image_size) == (run.seed, SCALES[scale].image_size)
        held_out = config.evaluation.num_test if config.evaluation.every_epochs else 0
        assert all(stage.batch_size <= num_train - held_out for stage in config.stages)
        assert config.negatives.store != "memory_bank" or config.negatives.num_negatives <= num_train


def test_fresh_seeds_follow_the_first_one_and_the_command_repeats_it() -> None:
    runs = plan_runs(FIGURES["momentum"], "cpu", Place("out"), num_seeds=2, first_seed=3, overrides={})
    assert {run.config.seed for run in runs} == {3, 4}
    request = ReproduceRequest(figure="momentum", output="out", num_seeds=2, first_seed=3)
    assert request.command().endswith("--seeds 2 --first-seed 3")


def test_the_settings_of_a_figure_train_on_equally_many_images() -> None:
    """Except in the figures of steps, where the batch size is constant, and of views, where the pixels are."""
    for scale in SCALES:
        for figure in FIGURES.values():
            if figure.name == "views":
                continue
            configs = [figure.config(setting, scale, seed=0) for setting in figure.settings[scale]]
            epochs = {sum(stage.epochs or 0 for stage in config.stages) for config in configs}
            assert len(epochs) == 1, (figure.name, scale)
            if epochs == {0}:
                stages = [config.stages[0] for config in configs]
                assert len({(stage.steps, stage.batch_size) for stage in stages}) == 1


# The permitted differences between the runs of the negatives figure, with reasons.
DIFFERS = {
    "recipe": "the name of the way to have negatives",
    "key": "what is compared: where a key comes from",
    "negatives.store": "what is compared: where negatives come from",
    "negatives.in_batch": "what is compared: only end to end they are of the batch",
    "negatives.capacity": "how many of them, of the queue; no other run has one",
    "negatives.num_negatives": "how many of them, of the bank; no other run has one",
    "stages.0.batch_size": "how many of them, end to end; the others keep the least of these",
    "momentum_encoder.momentum": "MoCo's own; no other run has a momentum encoder",
    "negatives.bank_init": "only for the bank, explained in the note: the queue begins empty",
    "batchnorm_groups": "of shuffled BatchNorm, which no other run has",
    "batchnorm": "explained in the note: a queue leaks unless the keys are shuffled, and slots cannot be",
    "bank.dtype": "explained in the note: rounding of the queue's keys",
}


@pytest.mark.parametrize("scale", SCALES)
def test_settings_of_negatives_differ_only_in_listed_ways(scale) -> None:
    figure = FIGURES["negatives"]
    configs = {setting.name: figure.config(setting, scale, seed=0) for setting in figure.settings[scale]}
    flat = list(map(leaves, configs.values()))
    paths = set[str]().union(*flat)
    assert {path for path in paths if len({repr(each.get(path)) for each in flat}) > 1} == DIFFERS.keys()
    for name, config in configs.items():  # the largest possible groups share a normalization
        if name.startswith("moco"):
            (stage,) = config.stages
            assert config.rows_per_group(stage) == stage.batch_size // 2
        else:
            assert config.batchnorm == "synchronized"


def test_user_overrides_win_and_settings_override_workers() -> None:
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


def test_overrides_that_make_two_runs_equal_are_refused() -> None:
    with pytest.raises(ConfigError, match="--set seed=7 would give all seeds .* the same run; remove it"):
        planned("leak", num_seeds=3, seed=7)
    with pytest.raises(ConfigError, match="makes momentum-0 and momentum-0.9 of momentum the same run"):
        planned("momentum", **{"momentum_encoder.momentum": 0.5})
    with pytest.raises(ConfigError, match="--seeds 0"):
        planned("leak", num_seeds=0)


@pytest.mark.parametrize(("figure", "scale"), EACH)
def test_the_text_of_a_figure_describes_its_runs(figure: ClaimFigure, scale) -> None:
    configs = [figure.config(setting, scale, seed=0) for setting in figure.settings[scale]]
    text = describe_runs(scale, configs)
    stages = [stage for config in configs for stage in config.stages]
    epochs = [sum(stage.epochs or 0 for stage in config.stages) for config in configs]
    lengths = " or ".join(dict.fromkeys(f"{each} epochs" for each in epochs))
    assert text.endswith(f", {lengths}" if any(epochs) else f", {stages[0].steps} steps")
    assert f" {SCALES[scale].image_size} pixels" in text
    assert configs[0].encoder.name in text
    has_one_size = len({stage.batch_size for stage in stages}) == 1
    assert (f"batches of {stages[0].batch_size:,}" in text) is has_one_size


def test_the_text_of_a_figure_follows_user_overrides() -> None:
    asked = {"stages.0.epochs": 3, "encoder.name": "resnet18", "data.image_size": 16}
    assert describe_runs("cpu", [run.config for run in planned("leak", **asked)]) == (
        "cut for two cores: 10,000 training images drawn at random, or all where there are fewer, 16 pixels, "
        "resnet18 of width 0.5 (stem: half), batches of 64, 3 epochs"
    )


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown figure 'leaks'; choose negatives, .*accumulation"):
        find_figure("leaks")
    with pytest.raises(ConfigError, match="unknown --scale 'tpu'; choose cpu, gpu"):
        find_scale("tpu")


# The claims


def three(low: float, high: float) -> SeedValues:
    return SeedValues((low, (low + high) / 2, high))


def test_exceeds_needs_a_gap_above_the_spread_and_three_seeds() -> None:
    assert exceeds(three(0.5, 0.6), three(0.3, 0.4)) is True
    assert exceeds(three(0.5, 0.75), three(0.25, 0.5)) is False  # exactly the spread
    assert exceeds(three(0.3, 0.4), three(0.5, 0.6)) is False
    assert exceeds(three(0.55, 0.55), three(0.1, 0.4)) is False  # the larger spread counts
    assert exceeds(SeedValues((0.9, 0.9)), three(0.1, 0.1)) is None
    assert exceeds(three(0.9, 0.9), SeedValues(())) is None


def test_non_inferior_is_undecided_if_the_spread_could_hide_a_loss() -> None:
    assert non_inferior(three(0.40, 0.402), three(0.405, 0.407)) is True
    assert non_inferior(three(0.38, 0.382), three(0.405, 0.407)) is False
    assert non_inferior(three(0.36, 0.44), three(0.36, 0.44)) is None  # too noisy to decide
    assert non_inferior(three(0.36, 0.44), three(0.405, 0.407)) is None
    assert non_inferior(three(0.34, 0.42), three(0.36, 0.44)) is None  # worse, but within the spread
    assert non_inferior(three(0.56, 0.64), three(0.36, 0.44)) is True  # better, for any spread
    assert non_inferior(three(0.26, 0.34), three(0.46, 0.54)) is False
    assert non_inferior(SeedValues((0.4, 0.4)), three(0.4, 0.4)) is None


def test_all_hold_is_false_if_a_claim_is_false_and_unknown_if_a_claim_is_unknown() -> None:
    assert all_hold([True, True]) is True
    assert all_hold([True, None]) is None
    assert all_hold([None, False]) is False
    assert all_hold([]) is None


def lines(end_to_end: tuple[float, float], bank: tuple[float, float], moco: tuple[float, float]) -> Planted:
    """Return three curves of two points each, with three similar seeds, that share 128 negatives."""
    ends = {"end-to-end": (end_to_end, 1_024), "bank": (bank, 8_192), "moco": (moco, 8_192)}
    return {
        f"{name}-{count}": knn(value, value + 0.001, value + 0.002)
        for name, (values, most) in ends.items()
        for count, value in zip((128, most), values, strict=True)
    }


def test_the_claim_of_a_bank_compares_the_most_negatives_with_the_fewest() -> None:
    def bank(fewest: float, most: float) -> Planted:
        return {"bank-32": knn(fewest, fewest, fewest + 0.02), "bank-512": knn(most, most, most)}

    assert verdicts("bank", bank(0.3, 0.33)) == [True, None]
    assert verdicts("bank", bank(0.3, 0.32)) == [False, None]  # no more than the spread
    assert verdicts("bank", bank(0.3, 0.2)) == [False, None]
    assert verdicts("bank", {"bank-32": knn(0.3, 0.3, 0.3)}) == [None, None]
    fewest, most = knn(0.3, 0.3, 0.31, 0.32, 0.33), knn(0.34, 0.35, 0.35, 0.36, 0.38)
    assert verdicts("bank", {"bank-32": fewest, "bank-512": most}) == [False, True]
    assert verdicts("bank", {"bank-32": fewest, "bank-512": knn(0.31, 0.4, 0.33, 0.4, 0.34)}) == [False, True]
    assert verdicts("bank", {"bank-32": fewest, "bank-512": knn(0.3, 0.5, 0.5, 0.5, 0.5)}) == [False, False]


def test_negatives_claims_compare_gains_and_common_points() -> None:
    assert verdicts("negatives", lines((0.3, 0.4), (0.2, 0.35), (0.3, 0.4))) == [True, True, True]
    assert verdicts("negatives", lines((0.3, 0.3), (0.2, 0.35), (0.3, 0.4))) == [False, True, True]
    assert verdicts("negatives", lines((0.3, 0.4), (0.2, 0.45), (0.3, 0.4))) == [True, False, True]
    assert verdicts("negatives", lines((0.35, 0.4), (0.2, 0.35), (0.3, 0.4))) == [True, True, False]
    assert verdicts("negatives", lines((0.309, 0.4), (0.2, 0.35), (0.3, 0.4))) == [True, True, True]
    assert verdicts("negatives", lines((0.312, 0.4), (0.2, 0.35), (0.3, 0.4))) == [True, True, False]
    alone = {"moco-128": knn(0.3, 0.3, 0.3), "moco-512": knn(0.4, 0.4, 0.4)}
    assert verdicts("negatives", alone) == [None, None, None]
    wide = {"moco-128": knn(0.26, 0.3, 0.34), "end-to-end-128": knn(0.28, 0.32, 0.36)}
    assert verdicts("negatives", wide)[2] is None


def near(value: float) -> dict[str, list[float]]:
    """Return the values of three similar seeds."""
    return knn(value, value + 0.002, value + 0.004)


def test_momentum_zero_is_worst_if_below_all_others_and_slow_is_better_if_both_slow_ones_are() -> None:
    good = {
        f"momentum-{name}": near(value)
        for name, value in (("0", 0.2), ("0.9", 0.3), ("0.99", 0.4), ("0.999", 0.35))
    }
    good["momentum-0"]["loss"] = [8.3] * 3
    assert verdicts("momentum", good) == [True, True, True]
    fair = {**near(0.32), "loss": [8.3] * 3}
    assert verdicts("momentum", good | {"momentum-0": fair}) == [False, True, True]
    assert verdicts("momentum", good | {"momentum-0": {**fair, **near(0.36)}}) == [False, True, False]
    for other in (8.2, 20.0):
        assert (
            verdicts("momentum", good | {"momentum-0": {**near(0.2), "loss": [8.3, 8.3, other]}})[2] is False
        )
    assert verdicts("momentum", good | {"momentum-0.9": near(0.4)}) == [True, False, True]
    one_is_better = good | {"momentum-0.999": near(0.25)}
    assert verdicts("momentum", one_is_better) == [True, False, True]
    assert verdicts("momentum", good | {"momentum-0.9": knn(0.3, 0.3)}) == [None, None, True]
    assert verdicts("momentum", {}) == [None, None, None]
    claim = claims_of("momentum", good)[0]
    assert "fail" not in claim.text  # the worst run may still be a good one


def test_more_views_are_better_if_they_exceed_two_views_at_as_many_encoded_pixels() -> None:
    good = {
        name: near(value) for name, value in {"two": 0.3, "four": 0.4, "eight": 0.35, "crops": 0.45}.items()
    }
    assert verdicts("views", good) == [True, True, True]
    assert verdicts("views", good | {"crops": near(0.301)}) == [False, True, True]
    assert verdicts("views", good | {"eight": near(0.3)}) == [True, True, False]
    assert verdicts("views", good | {"two": knn(0.2, 0.2)}) == [None, None, None]
    for scale in SCALES:
        pixels = set()
        for setting in FIGURES["views"].settings[scale]:
            config = FIGURES["views"].config(setting, scale, seed=0)
            stage = config.stages[0]
            by_size = config.views_by_size(stage)
            pixels.add((stage.epochs or 0) * sum(size**2 * count for size, count in by_size.items()))
        assert len(pixels) == 1


def test_the_global_loss_is_compared_with_a_large_batch_and_with_other_losses_of_its_batch() -> None:
    good = {
        name: near(value)
        for name, value in {"global": 0.4, "dcl": 0.35, "small": 0.3, "large": 0.405}.items()
    }
    assert verdicts("global", good) == [True, True, True]
    assert verdicts("global", good | {"large": near(0.42)}) == [False, True, True]
    assert verdicts("global", good | {"small": near(0.4), "dcl": near(0.5)}) == [True, False, False]
    assert verdicts("global", good | {"global": knn(0.4, 0.4)}) == [None, None, None]
    for scale in SCALES:
        runs = {
            setting.name: FIGURES["global"].config(setting, scale, seed=0)
            for setting in FIGURES["global"].settings[scale]
        }
        changed = set(differences(runs["small"], runs["global"]))
        assert changed == {"recipe", "stages.0.loss", "negatives.store", "negatives.bank_momentum"}
        assert set(differences(runs["small"], runs["large"])) == {"stages.0.batch_size"}


def leaking(as_is: float, cured: list[float], accuracy: float = 0.3) -> Planted:
    return {
        "local": {"batchnorm_leakage": [as_is] * 3, **near(accuracy)},
        "shuffled": {"batchnorm_leakage": cured, **near(0.4)},
        "group": {"batchnorm_leakage": [0.0] * 3, **near(0.4)},
        "layer": {"batchnorm_leakage": [0.0] * 3, **near(0.4)},
    }


def test_the_leak_claims_follow_probe_accuracy_and_remedies() -> None:
    assert verdicts("leak", leaking(0.3, [0.05] * 3)) == [True, True, True]
    assert verdicts("leak", leaking(0.05, [0.05] * 3)) == [False, True, False]
    assert verdicts("leak", leaking(0.3, [0.05] * 3, accuracy=0.4)) == [True, False, True]
    assert verdicts("leak", {"local": {"batchnorm_leakage": [0.3], **knn(0.2)}}) == [None, None, None]


def test_a_reduced_leak_is_not_a_remedy_and_a_small_advantage_is_not_a_leak() -> None:
    planted = {"shuffled": 0.291, "group": 0.281, "layer": 0.271}
    less = {name: {"batchnorm_leakage": [value] * 3, **near(0.4)} for name, value in planted.items()}
    assert verdicts("leak", {**leaking(0.301, [0.0] * 3), **less}) == [True, True, False]
    one_seed_leaks = leaking(0.301, [0.0, 0.0, 0.06])
    assert verdicts("leak", one_seed_leaks) == [True, True, False]
    assert verdicts("leak", leaking(0.04, [0.0] * 3))[0] is False
    assert "cannot leak by construction" in FIGURES["leak"].note


def test_a_remedy_for_collapse_must_keep_embeddings_spread_and_raise_accuracy() -> None:
    def run(spread: float, accuracy: float) -> dict[str, list[float]]:
        return {"embedding_std": [spread, spread + 0.005, spread + 0.01], **near(accuracy)}

    planted = {
        "hinge": run(0.02, 0.3),
        "entropy-first": run(0.5, 0.4),
        "mixed": run(0.05, 0.4),
        "rollback": run(0.5, 0.302),
    }
    assert verdicts("collapse", planted) == [True, True, False, False, None]
    assert verdicts("collapse", {"hinge": {"embedding_std": [0.02, 0.02, 0.3]}})[0] is False
    assert verdicts("collapse", {"hinge": {"embedding_std": [0.02, 0.02]}})[0] is None


def growth(small: float, grown: float, large: float, *, steps: float = 10.0) -> Planted:
    """Return three similar seeds per batch size; the growing batch takes ``steps``, the small one 20."""
    taken = {"small": 20.0, "grown": steps, "large": 2.0}
    values = {"small": small, "grown": grown, "large": large}
    return {name: {**near(value), "steps": [taken[name]] * 3} for name, value in values.items()}


def test_growth_is_compared_with_the_large_and_the_small_batch() -> None:
    assert verdicts("stages", growth(0.4, 0.4, 0.3)) == [True, True]
    assert verdicts("stages", growth(0.409, 0.4, 0.3)) == [True, True]
    assert verdicts("stages", growth(0.415, 0.4, 0.3)) == [True, False]
    assert verdicts("stages", growth(0.5, 0.4, 0.4)) == [False, False]
    few = {name: {**numbers, **knn(0.4, 0.4)} for name, numbers in growth(0.4, 0.4, 0.3).items()}
    assert verdicts("stages", few) == [None, None]


def test_growth_must_take_fewer_steps_and_noise_leaves_it_undecided() -> None:
    assert verdicts("stages", growth(0.4, 0.4, 0.3, steps=20.0)) == [True, False]
    noisy = {name: {**numbers, **knn(0.3, 0.4, 0.5)} for name, numbers in growth(0.4, 0.4, 0.4).items()}
    assert verdicts("stages", noisy) == [False, None]
    sentence = claims_of("stages", noisy)[1].sentence()
    assert "cannot be said yet" in sentence
    assert sentence.endswith("it takes 3 seeds of every setting it compares, and a spread within 0.01.")


def loss_curve(setting: str, seed: int, early: float, late: float) -> MetricCurve:
    steps = [1, 2, 5, 6, 60]
    whole = [3.0 + seed, 2.9, 2.5, 2.4, 2.0]
    values = [value * off for value, off in zip(whole, (1.0, 1.0, early, late, late), strict=True)]
    return MetricCurve(setting=setting, seed=seed, attempt=0, samples=steps, steps=steps, values=values)


def losses(
    chunks: float,
    workers: float,
    by_chunk: float = 0.02,
    *,
    late: float = 0.0,
    num_seeds: int = 3,
    norm: str = "",
) -> dict[str, list[MetricCurve]]:
    """Return curves with these relative errors in the first steps; later the chunks have ``late``.

    With ``norm`` -layer, only the settings with layer norm have them, and the whole batches of both norms differ.
    """
    off = {
        f"whole{norm}": (0.0, 0.0),
        f"chunks{norm}": (chunks, late),
        f"workers{norm}": (workers, 0.0),
        "by-chunk": (by_chunk, 0.0),
    }
    if norm:
        off = {"whole": (0.0, 0.0), **{name: (early + 0.1, late) for name, (early, late) in off.items()}}
        off["by-chunk"] = (by_chunk, 0.0)
    return {
        "loss": [
            loss_curve(name, seed, 1.0 + early, 1.0 + later)
            for seed in range(num_seeds)
            for name, (early, later) in off.items()
        ]
    }


@pytest.mark.parametrize("norm", ["", "-layer"])
def test_chunks_may_differ_only_by_rounding_and_in_the_first_steps(norm: str) -> None:
    def held(*off: float, **changes: Any) -> list[bool | None]:
        return verdicts("accumulation", {}, losses(*off, norm=norm, **changes))

    at = 0 if norm else 1
    assert held(5e-5, 1e-5)[at] is True
    assert held(5e-4, 1e-5)[at] is False
    assert held(-5e-4, 1e-5)[at] is False
    assert held(5e-5, 1e-5, late=0.3)[at] is True
    assert held(5e-6, 0.0)[at] is True
    assert held(5e-5, 1e-5, num_seeds=2)[at] is None
    assert held(5e-5, 1e-5)[1 - at] is None  # the other norm has no runs
    assert verdicts("accumulation", {}, {}) == [None, None]


def test_chunks_are_not_compared_if_the_workers_differ_too_much() -> None:
    assert verdicts("accumulation", {}, losses(0.05, 0.05, by_chunk=0.5))[1] is False
    assert verdicts("accumulation", {}, losses(9e-4, 0.05))[1] is True
    # BatchNorm per chunk is a different run: the claim must detect it.
    assert verdicts("accumulation", {}, losses(5e-5, 1e-5, by_chunk=5e-5))[1] is None
    without = {"loss": [curve for curve in losses(5e-5, 1e-5)["loss"] if curve.setting != "by-chunk"]}
    assert verdicts("accumulation", {}, without) == [None, None]


def test_a_sentence_states_its_evidence_and_the_seeds_it_needs() -> None:
    claim = claims_of("momentum", {"momentum-0": knn(0.25, 0.25)})[0]
    assert claim.sentence() == (
        "“Without momentum (0) MoCo is worse than with any” cannot be said yet: 0.250 at 0; "
        "it takes 3 seeds of every setting it compares."
    )


# The claims on random numbers

TRIALS = 1_000
MOST_FALSE = 0.045  # one of two equal settings exceeds the other in 3.1% of all cases; 10.8% with two seeds
ALIKE = {
    "knn_top1": (0.4, 0.02),
    "batchnorm_leakage": (0.2, 0.02),
    "embedding_std": (0.5, 0.05),
    "steps": (100.0, 0.0),
    "loss": (8.318, 0.01),
}
NON_INFERIOR_AT = {"negatives": 2, "stages": 1, "global": 0}  # the position of the claim in the figure


def alike(name: str, rng: np.random.Generator, num_seeds: int = 3) -> dict[str, dict[str, list[float]]]:
    """Draw all settings of a figure from one distribution."""
    return {
        setting.name: {number: rng.normal(*shape, num_seeds).tolist() for number, shape in ALIKE.items()}
        for setting in FIGURES[name].settings["cpu"]
    }


def held_rates(trials: list[list[bool | None]]) -> list[float]:
    """Return how often each claim held."""
    return [sum(held is True for held in claim) / len(trials) for claim in zip(*trials, strict=True)]


@pytest.mark.parametrize("num_seeds", [2, 3])
@pytest.mark.parametrize("name", [name for name in FIGURES if name != "accumulation"])
def test_equal_settings_rarely_differ_by_chance(name: str, num_seeds: int) -> None:
    rng = np.random.default_rng(0)
    rates = held_rates([verdicts(name, alike(name, rng, num_seeds)) for _ in range(TRIALS)])
    differences = [rate for at, rate in enumerate(rates) if at != NON_INFERIOR_AT.get(name)]
    assert differences
    assert max(differences) <= MOST_FALSE, rates


def rate_of_non_inferior(figure: str, worse: str, *, loss: float, noise: float) -> float:
    """Return how often a setting that is worse by this loss passes as non-inferior."""
    rng, trials = np.random.default_rng(0), []
    for _ in range(TRIALS):
        planted = alike(figure, rng)
        for setting, numbers in planted.items():
            numbers["knn_top1"] = rng.normal(0.4 - loss * (setting == worse), noise, 3).tolist()
        planted[worse]["steps"] = [1.0] * 3
        trials.append(verdicts(figure, planted))
    return held_rates(trials)[NON_INFERIOR_AT[figure]]


@pytest.mark.parametrize(("figure", "worse"), [("negatives", "moco-128"), ("stages", "grown")])
def test_twice_the_margin_rarely_passes_as_non_inferior_and_equality_usually_does(
    figure: str, worse: str
) -> None:
    for noise in (0.1, 0.5, 1.0, 2.0, 5.0):
        rate = rate_of_non_inferior(figure, worse, loss=2 * MARGIN, noise=noise * MARGIN)
        assert rate <= MOST_FALSE, noise
    assert rate_of_non_inferior(figure, worse, loss=0.0, noise=0.25 * MARGIN) >= 0.9


def rate_of_chunks(chunks: float, by_chunk: float, *, noise: float) -> float:
    """Return how often chunks pass whose error is this multiple of the error of two workers."""
    rng, trials = np.random.default_rng(0), []
    for _ in range(TRIALS):
        curves: list[MetricCurve] = []
        for seed in range(3):
            off = (1e-5 * np.array([chunks, 1.0, by_chunk]) * np.exp(rng.normal(0.0, noise, 3))).tolist()
            curves += [dataclasses.replace(each, seed=seed) for each in losses(*off, num_seeds=1)["loss"]]
        trials.append(verdicts("accumulation", {}, {"loss": curves}))
    return held_rates(trials)[1]


def test_chunks_rarely_pass_if_they_differ_more_or_the_claim_is_undecided() -> None:
    assert rate_of_chunks(1.0, 1.0, noise=1.0) <= MOST_FALSE  # the error of BatchNorm per chunk
    assert rate_of_chunks(20.0, 1_000.0, noise=0.3) <= MOST_FALSE  # twice the allowed error
    assert rate_of_chunks(1.0, 1_000.0, noise=0.3) >= 0.9


# The drawings


def some(name: str, *, whole: bool) -> Results:
    """Return numbers and curves for all settings, or only for the first one."""
    figure, rng = FIGURES[name], np.random.default_rng(0)
    names = [setting.name for setting in figure.settings["cpu"][: None if whole else 1]]
    numbers = [*figure.columns, "knn_top1", "embedding_std", "loss", "batchnorm_leakage"]
    planted = {each: {number: rng.uniform(0.2, 0.5, 3).tolist() for number in numbers} for each in names}
    steps = [10.0 * step for step in range(12)]
    curves = {
        metric: [
            MetricCurve(setting=each, seed=seed, attempt=attempt, samples=steps, steps=steps, values=rng.uniform(0.1, 1, 12).tolist())
            for each in names
            for seed in range(3)
            for attempt in range(2)
        ]
        for metric in ("loss", "embedding_std", "knn_top1")
    }  # fmt: skip
    configs = [run.config for run in planned(name)]
    return dataclasses.replace(results_of(name, planted, curves), configs=configs)


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "partial"])
def test_a_figure_is_drawn_described_and_counted_with_all_or_some_runs(name: str, whole: bool) -> None:
    results = some(name, whole=whole)
    page = Page(command="python jobs/reproduce.py", results=results)
    with Image.open(io.BytesIO(page.picture())) as picture:
        assert picture.width > 900
        assert picture.height > 450
        assert len(set(picture.convert("L").resize((64, 64)).tobytes())) > 8  # not empty
    text = page.text()
    for claim in results.claims:
        assert claim.sentence() in text
    assert all(label in text for label in results.labels.values())
    assert describe_runs("cpu", results.configs) in text
    numbers = json.loads(page.numbers())
    assert len(numbers["runs"]) == len(results.outcomes)
    assert numbers["runs"][0]["machine"] == MACHINE
    assert numbers["runs"][0]["curves"]["loss"][0]["steps"]
    if not whole:
        assert None in [claim["held"] for claim in numbers["claims"]]


def test_labels_at_the_ends_of_lines_do_not_overlap() -> None:
    assert spread_apart([]) == []
    assert spread_apart([0.2, 0.6]) == [0.2, 0.6]
    assert spread_apart([0.5, 0.5, 0.5], gap=0.1) == pytest.approx([0.4, 0.5, 0.6])


# The output folder


def write_run(run: PlannedRun, **changes: Any) -> None:
    """Write the files of a trained run, and its record if ``record`` is True."""
    (run.place / CONFIG).write_text(config_to_yaml(run.config))
    (run.place / RESULT).write_text('{"status": "finished"}')
    lines = [{"step": step, "samples": 32 * step, "loss": 3.0 - step / 10} for step in (1, 2, 3)]
    (run.place / METRICS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if changes.pop("record", True):
        outcome(run.setting.name, run.seed, **changes).write(run.place)


def request_of(name: str, output: Path, *, num_seeds: int = 1, **changes: Any) -> ReproduceRequest:
    return ReproduceRequest(figure=name, output=str(output), num_seeds=num_seeds, **changes)


def test_finished_runs_are_drawn_and_missing_runs_are_named(tmp_path: Path) -> None:
    request = request_of("momentum", tmp_path, num_seeds=2)
    runs = planned("momentum", tmp_path, num_seeds=2)
    with pytest.raises(ConfigError, match="no run of momentum is finished"):
        reproduce(request, draw_only=True)
    for run in runs[:2]:
        write_run(run, numbers={"knn_top1": 0.3, "pixels": 0.25})
    write_run(runs[2], record=False)  # trained, not evaluated
    messages: list[str] = []
    page = reproduce(request, draw_only=True, notify=messages.append)
    assert page.results.missing == [run.name for run in runs[2:]]
    assert page.command.startswith("python jobs/reproduce.py momentum --data train --test test --output ")
    assert page.results.baseline == 0.25
    assert [curve.values for curve in page.results.curves_of("momentum-0", "loss")] == [[2.9, 2.8, 2.7]]
    text = (tmp_path / "momentum.md").read_text()
    assert "Not finished yet: momentum-momentum-0.99-seed0, " in text
    assert "cannot be said yet" in messages[0]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"runs", "momentum.png", "momentum.json", "momentum.md"}


def test_a_finished_figure_is_drawn_without_training(tmp_path: Path) -> None:
    for run in planned("stages", tmp_path, num_seeds=3):
        steps = {"small": 9.0, "grown": 3.0, "large": 1.0}[run.setting.name]
        write_run(run, numbers={"knn_top1": 0.5 - 0.1 * (run.setting.name == "large"), "steps": steps})
    files = {file: file.stat().st_mtime_ns for file in tmp_path.glob("runs/*/*")}
    # No images exist at these addresses: reading them would fail.
    request = request_of("stages", tmp_path, num_seeds=3, data="train", test="test")
    page = reproduce(request, notify=lambda _: None)
    assert [claim.held for claim in page.results.claims] == [True, True]
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("runs/*/*")} == files
    assert not page.results.missing


def test_a_folder_with_other_settings_or_images_is_refused(tmp_path: Path) -> None:
    write_run(planned("momentum", tmp_path)[0])
    other = request_of("momentum", tmp_path, settings={"stages.0.epochs": 99})
    with pytest.raises(ConfigError, match=r"stages\.0\.epochs 8, and this one has 99; repeat the flags"):
        reproduce(other, draw_only=True)
    with pytest.raises(ConfigError, match="give --data and --test"):
        reproduce(request_of("momentum", tmp_path))
    with pytest.raises(ConfigError, match="--data is other, and runs at the output saw train"):
        reproduce(request_of("momentum", tmp_path, data="other", test="test"))


def test_training_images_are_refused_as_test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    same = str(tmp_path / "images")
    for run in planned("momentum", tmp_path):
        write_run(run, data=same, test=same)
    for test in (same, "images"):
        with pytest.raises(ConfigError, match=f"--data and --test are both {test}, .*give --test other"):
            reproduce(request_of("momentum", tmp_path, data=same, test=test))


def test_a_record_is_read_back_and_an_invalid_record_is_refused(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    assert read_outcome(place) is None
    written = outcome("a", 1, numbers={"knn_top1": 0.5}, failed="why")
    written.write(place)
    assert read_outcome(place) == written
    (place / OUTCOME).write_text('{"setting": "a"')
    with pytest.raises(ConfigError, match="not a record of a run"):
        read_outcome(place)


def test_a_folder_without_a_run_has_no_outcome_and_is_missing(tmp_path: Path) -> None:
    runs = planned("stages", tmp_path)
    outcomes = list(map(outcome_of, runs))
    assert outcomes == [None] * 3
    assert collect_results(FIGURES["stages"], "cpu", runs, outcomes).missing == [run.name for run in runs]


def test_a_run_that_was_rolled_back_gives_one_curve_per_attempt(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "samples": 4, "embedding_std": 0.5},
        {"step": 2, "samples": 8, "embedding_std": 0.1},
        {"step": 0, "samples": 0, "event": "rollback"},
        {"step": 1, "samples": 4, "embedding_std": 0.6},
        {"step": 2, "samples": 8, "loss": 1.0},
    ]
    (Place(str(tmp_path)) / METRICS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = read_curves(Place(str(tmp_path)), outcome("rollback", 2))
    assert [(curve.attempt, curve.values) for curve in found["embedding_std"]] == [
        (0, [0.5, 0.1]),
        (1, [0.6]),
    ]
    assert [(curve.attempt, curve.steps) for curve in found["loss"]] == [(1, [2])]


# The images


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_digits(Place(str(tmp_path_factory.mktemp("digits"))))


def test_the_training_subset_is_drawn_once_for_each_data_set(digits: tuple[str, str], tmp_path: Path) -> None:
    part = training_subset(digits[0], 600, Place(str(tmp_path)))
    drawn, whole = pq.read_table(part), pq.read_table(digits[0])
    labels = dict(zip(whole["image"].to_pylist(), whole["label"].to_pylist(), strict=True))
    assert [labels[image] for image in drawn["image"].to_pylist()] == drawn["label"].to_pylist()
    counts = np.bincount(drawn["label"].to_numpy())
    assert (drawn.num_rows, len(counts)) == (600, 10)
    assert counts.min() > 35
    before = Path(part).stat().st_mtime_ns
    assert training_subset(digits[0], 600, Place(str(tmp_path))) == part
    assert Path(part).stat().st_mtime_ns == before
    reversed_set = str(tmp_path / "other.parquet")
    pq.write_table(whole.take(np.arange(whole.num_rows)[::-1]), reversed_set)
    other = training_subset(reversed_set, 600, Place(str(tmp_path)))
    assert other != part
    assert pq.read_table(other)["image"].to_pylist() != drawn["image"].to_pylist()


class SortedByClass:
    """A test set in the order of class folders: four classes, one after the other."""

    label = np.repeat(np.arange(4), NUM_PROBE_IMAGES)

    def __len__(self) -> int:
        return len(self.label)

    def take(self, positions: np.ndarray) -> Batch:
        size = len(positions)
        image = Pixels(np.zeros((size, 2, 2, 3), np.uint8), np.ones(size, np.float32))
        return Batch(contents={"image": image}, sample_id=positions, label=self.label[positions])


def test_the_leak_is_probed_on_images_of_all_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("claims.images._read", lambda *_: SortedByClass())
    figure = FIGURES["leak"]
    config = figure.config(figure.settings["cpu"][0], "cpu", seed=0)
    images, ids = probe_images("test", config)
    assert len(images) == len(set(ids.tolist())) == NUM_PROBE_IMAGES
    assert np.bincount(SortedByClass.label[ids], minlength=4).min() > NUM_PROBE_IMAGES // 8
    assert np.array_equal(ids, probe_images("test", config)[1])  # the same images for all runs


def test_a_small_data_set_is_used_as_a_whole(digits: tuple[str, str], tmp_path: Path) -> None:
    for num_rows in (None, 10**6):
        assert training_subset(digits[0], num_rows, Place(str(tmp_path))) == digits[0]
    assert not list(tmp_path.iterdir())


def test_a_run_without_an_encoder_guesses_among_all_classes(digits: tuple[str, str]) -> None:
    assert num_classes(digits[1]) == 10


def test_images_without_labels_are_refused(digits: tuple[str, str], tmp_path: Path) -> None:
    bare = str(tmp_path / "bare.parquet")
    pq.write_table(pq.read_table(digits[0], columns=["image"]), bare)
    with pytest.raises(DataError, match="has no labels, and kNN needs them"):
        training_subset(bare, 100, Place(str(tmp_path)))
