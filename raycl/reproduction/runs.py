"""The runs of a figure: which there are, which are over, and one of them performed."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from raycl.config import RunConfig
from raycl.config.overrides import config_from_yaml, config_to_yaml, differences
from raycl.errors import CollapseError, ConfigError, NonFiniteLossError
from raycl.models.encoder_io import ImageEncoder, load_encoder
from raycl.records import RESULT, ROLLBACK, read_metrics, read_result
from raycl.reproduction.claims import MIN_SEEDS
from raycl.reproduction.figure import Figure, Setting
from raycl.reproduction.images import Evaluator
from raycl.reproduction.leakage import probe_run
from raycl.reproduction.machine import describe_machine
from raycl.reproduction.outcomes import Outcome, read_outcome
from raycl.reproduction.scales import ScaleName
from raycl.storage import Place
from raycl.training.launch import train
from raycl.training.resume import CONFIG

RUNS = "runs"


@final
@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One setting with one seed, and where it lies."""

    figure: Figure
    setting: Setting
    seed: int
    config: RunConfig
    place: Place
    probed_rows: int | None

    @property
    def name(self) -> str:
        """The run's folder: figure, setting and seed."""
        return self.place.name


def plan_runs(
    figure: Figure,
    scale: ScaleName,
    output: Place,
    *,
    num_seeds: int,
    workers: int | None = None,
    overrides: Mapping[str, Any],
) -> list[PlannedRun]:
    """Return all runs of a figure, every setting once before the next seed; raises ``ConfigError``."""
    if num_seeds < 1:
        raise ConfigError(
            f"--seeds {num_seeds} leaves no run; give 1 or more, {MIN_SEEDS} or more for a verdict"
        )
    planned = [
        PlannedRun(
            figure=figure,
            setting=setting,
            seed=seed,
            config=figure.config(setting, scale, seed=seed, workers=workers, overrides=overrides),
            place=output / RUNS / f"{figure.name}-{setting.name}-seed{seed}",
            probed_rows=figure.probes_leakage.get(scale),
        )
        for seed in range(num_seeds)
        for setting in figure.settings[scale]
    ]
    _check_that_all_differ(planned)
    return planned


def _check_that_all_differ(planned: Sequence[PlannedRun]) -> None:
    """Refuse two runs of the same configuration, such as a user's settings may make of two of the figure's."""
    seen: dict[str, PlannedRun] = {}
    for run in planned:
        earlier = seen.setdefault(config_to_yaml(run.config), run)
        if earlier is not run:
            raise ConfigError(
                f"--set makes {earlier.setting.name} and {run.setting.name} of {run.figure.name} one and the same run; "
                "leave out what they differ in"
            )


def outcome_of(run: PlannedRun) -> Outcome | None:
    """Return what came of a run, if it is over; raises ``ConfigError`` if other settings lie in its folder."""
    saved = run.place / CONFIG
    if not saved.exists():
        return None
    changed = differences(config_from_yaml(saved.read_text(), name=saved.uri), run.config)
    if changed:
        key, (before, now) = next(iter(changed.items()))
        raise ConfigError(
            f"{run.place} holds a run with {key} {before!r}, and this one has {now!r}; repeat the flags of the first "
            "time, or give another --output"
        )
    return read_outcome(run.place)


def perform(run: PlannedRun, judge: Evaluator, *, address: str | None, quiet: bool, debug: bool) -> Outcome:
    """Train if that is not done, going on where it was interrupted; judge, and keep what came of it.

    A loss that is no number, or a collapse that no rollback mends, is an outcome as well. Raises the
    other errors of ``raycl.train``.
    """
    began = time.monotonic()
    try:
        if not _is_trained(run.place):
            resume = (run.place / CONFIG).exists()
            train(
                run.config, data=judge.train, output=run.place.uri, resume=resume, address=address,
                quiet=quiet, debug=debug,
            )  # fmt: skip
        failed, numbers = None, _logged(run.place) | _measure(run, judge)
    except (NonFiniteLossError, CollapseError) as error:
        failed, numbers = str(error), _logged(run.place) | {"knn_top1": 1.0 / judge.num_classes(run.config)}
    outcome = Outcome(
        setting=run.setting.name,
        seed=run.seed,
        numbers=numbers | {"wall_seconds": time.monotonic() - began},
        machine=describe_machine(),
        data=judge.data,
        test=judge.test,
        failed=failed,
    )
    outcome.write(run.place)
    return outcome


def _is_trained(place: Place) -> bool:
    return (place / RESULT).exists() and read_result(place)["status"] == "finished"


def _logged(place: Place) -> dict[str, float]:
    """Return the last metrics of a run, and how often it collapsed and was rolled back."""
    lines = read_metrics(place)
    events = [line["event"] for line in lines if "event" in line]
    last = {name: _last(lines, name) for name in ("loss", "spread", "effective_rank")}
    counts = {"collapsed": float(events.count("collapse")), "rollbacks": float(events.count(ROLLBACK))}
    return {name: value for name, value in last.items() if value is not None} | counts


def _measure(run: PlannedRun, judge: Evaluator) -> dict[str, float]:
    """Return what a finished run came to: its length, kNN on the test images, the probe if asked for."""
    encoder = load_encoder(run.place.uri)
    assert isinstance(encoder, ImageEncoder), "the figures are of images"
    result = read_result(run.place)
    numbers = {name: float(result[name]) for name in ("steps", "seconds", "samples_per_second")}
    numbers |= {"knn_top1": judge.knn(encoder, run.config), "pixels": judge.pixels(run.config)}
    if run.probed_rows is not None:
        found = probe_run(run.place, *judge.probed(run.config), group_size=run.probed_rows)
        numbers |= {"shared": found.shared, "apart": found.apart, "leakage": found.advantage}
    return numbers


def _last(lines: Sequence[Mapping[str, Any]], name: str, *, over: int = 5) -> float | None:
    """Return the mean of a metric's last few values: of one batch the loss is noisy."""
    values = [line[name] for line in lines if line.get(name) is not None][-over:]
    return sum(values) / len(values) if values else None
