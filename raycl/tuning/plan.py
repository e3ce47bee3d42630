"""The plan of a search: the settings to vary, the runs that fit the time, and the choice at the end."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from raycl.config import RunConfig
from raycl.config.conditions import why_inactive
from raycl.config.overrides import override
from raycl.data.sources import Source
from raycl.errors import ConfigError, DataError

ETA = 3  # runs of the next rung are three times as long, for about the best third of the trials
SHAPES = ((3, 8), (2, 6), (1, 3))  # numbers of rungs, and of trials beside the recipe that must fit the time
PACE_STEPS, PACE_LAP = 6, 3  # the rate is the last lap's, since the first steps of a process are slow
LEAST_STEPS = 20  # of the recipe's batch, in the first rung
CLOSING_S = 25.0  # Ray Tune may take as long to end the last trial

Values = tuple[float, float] | list[int]  # a range, drawn uniformly in the logarithm, or a list
_SIZES = (0.5, 1, 2)  # of the recipe's batch


@final
@dataclass(frozen=True, kw_only=True)
class Trial:
    """The changed settings by path, none for the recipe, which is number 0, and the score of each finished rung."""

    number: int
    settings: Mapping[str, Any]
    scores: tuple[float, ...] = ()
    error: str = ""


class Measured(NamedTuple):
    """The metric of a finished run, the samples per second of its last lap, and the rest of the seconds that it took."""

    score: float
    overhead_s: float
    samples_per_second: float


def check_search(config: RunConfig, sources: Sequence[Source], minutes: float) -> None:
    """Raise ``ConfigError`` or ``DataError`` if trials cannot be compared, or for less than a minute."""
    if not minutes >= 1:
        raise ConfigError(f"--minutes must be at least 1, got {minutes:g}")
    if len(config.stages) > 1:
        raise ConfigError(
            f"raycl tune searches the settings of one stage, and the configuration has {len(config.stages)}; "
            "give one with its first stage only"
        )
    is_comparable = config.has_two_towers or config.evaluation.data is not None
    if not is_comparable and not all(source.has_labels for source in sources):
        ignored = next((source.ignored_label for source in sources if source.ignored_label), "")
        held = f" (column 'label' holds {ignored})" if ignored else ""
        raise DataError(
            f"raycl tune compares trials by kNN on the labels of held-out rows, and the samples have none{held}; name their "
            "column with --set data.columns.label=NAME, or give class folders"
        )


def search_space(config: RunConfig, num_rows: int) -> dict[str, Values]:
    """Return the values to try of each setting that has an effect; the smallest data set has ``num_rows``."""
    stage, (low, high) = config.stages[0], config.augment.crop_scale
    sizes = {int(stage.batch_size * share) for share in _SIZES}
    space: dict[str, Values] = {
        "stages.0.learning_rate": (stage.learning_rate / 8, stage.learning_rate * 8),
        "stages.0.temperature": (stage.temperature / 3, stage.temperature * 3),
        "augment.crop_scale.0": (min(low, 0.05), max(low, min(0.8, high))),
        "stages.0.batch_size": [size for size in sorted(sizes) if _fits(config, size, num_rows)],
    }
    if config.learn_temperature:
        del space["stages.0.temperature"]  # it would be the initial value only
    return {path: values for path, values in space.items() if why_inactive(config, path) is None}


def _fits(config: RunConfig, size: int, num_rows: int) -> bool:
    """Whether the run may have batches of this size, with two of them in an epoch unless it is the recipe's."""
    try:
        override(config, {"stages.0.batch_size": size})
    except ConfigError:
        return False
    return size == config.stages[0].batch_size or 2 * size <= num_rows


def plan_rungs(config: RunConfig, num_rows: int, pace: Measured, seconds: float) -> tuple[int, ...]:
    """Return the samples of a run in each rung, such that the recipe and some trials fit into ``seconds``.

    The longest run has at most the samples of the recipe. Raises ``ConfigError`` if the time is too short.
    """
    stage = config.stages[0]
    most = stage.steps * stage.batch_size if stage.steps else (stage.epochs or 1) * num_rows
    least, needed_s = min(LEAST_STEPS * stage.batch_size, most), 0.0
    for num_rungs, num_trials in SHAPES:
        num_runs = [1 + num_trials / ETA**rung for rung in range(num_rungs)]
        overhead_s = pace.overhead_s * sum(num_runs)
        rate = pace.samples_per_second / sum(number * ETA**rung for rung, number in enumerate(num_runs))
        first = min((seconds - overhead_s) * rate, most / ETA ** (num_rungs - 1))
        if first >= least:
            return tuple(int(first * ETA**rung) for rung in range(num_rungs))
        needed_s = overhead_s + least / rate
    raise ConfigError(
        f"the recipe and {SHAPES[-1][1]} trials of {least:,} samples take {needed_s / 60:.1f} minutes, and "
        f"{max(0.0, seconds) / 60:.1f} are left after the start; raise --minutes"
    )


def trial_config(config: RunConfig, settings: Mapping[str, Any], samples: int, output: str) -> RunConfig:
    """Return the run of a trial: it has so many samples, is evaluated at its end, and fails if a worker is lost.

    Its folder ``output`` names its bank, since other searches may run on the cluster.
    """
    changed = override(config, settings)
    own = {
        "stages.0.epochs": None,
        "stages.0.steps": max(1, samples // changed.stages[0].batch_size),
        "evaluation.every_epochs": 10**9,
        "evaluation.num_snapshot_samples": 0,
        "max_failures": 0,
    }
    has_bank = why_inactive(changed, "bank.name") is None
    name = f"tune-{zlib.crc32(output.encode()):08x}" if has_bank else None
    bank = config.bank.model_copy(update={"name": name, "detached": False})
    return override(changed, own).model_copy(update={"bank": bank})


def best_trial(trials: Sequence[Trial], num_rungs: int) -> Trial:
    """Return the best trial of the last rung; the recipe if it did not finish, or no other one is better."""
    recipe = next(trial for trial in trials if trial.number == 0)
    finished = [trial for trial in trials if len(trial.scores) == num_rungs and not trial.error]
    if recipe not in finished:
        return recipe
    return max(finished, key=lambda trial: (trial.scores[-1], trial.number == 0))
