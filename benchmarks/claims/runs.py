"""The runs of a figure: plan them, train one, evaluate it, and store its record."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from measuring import describe_machine
from numpy.typing import NDArray
from torch import Tensor

from claims.figure import ClaimFigure, ScaleName, Setting
from claims.images import num_classes, probe_images
from claims.results import Outcome, read_outcome
from claims.rules import MIN_SEEDS
from raycl.batchnorm.leakage_probe import Leakage, leakage
from raycl.config import RunConfig
from raycl.config.overrides import config_from_yaml, config_to_yaml, differences
from raycl.errors import CollapseError, ConfigError, NonFiniteLossError
from raycl.evaluation.classification import evaluate
from raycl.models.build import build_towers
from raycl.models.momentum import MomentumEncoder
from raycl.records import CONFIG, RESULT, ROLLBACK, last_checkpoint, read_metrics, read_result
from raycl.storage import Place
from raycl.training.launch import train
from raycl.training.transforms import ImageTransform

RUNS = "runs"


@final
@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One setting with one seed, and its folder."""

    figure: ClaimFigure
    setting: Setting
    seed: int
    config: RunConfig
    place: Place

    @property
    def name(self) -> str:
        """The name of the folder: figure, setting and seed."""
        return self.place.name


def plan_runs(
    figure: ClaimFigure,
    scale: ScaleName,
    output: Place,
    *,
    num_seeds: int,
    first_seed: int = 0,
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
        )
        for seed in range(first_seed, first_seed + num_seeds)
        for setting in figure.settings[scale]
    ]
    seen: dict[str, PlannedRun] = {}
    for run in planned:
        earlier = seen.setdefault(config_to_yaml(run.config), run)
        if earlier is not run:
            raise ConfigError(
                f"--set makes {earlier.setting.name} and {run.setting.name} of {figure.name} the same run; "
                "remove the setting in which they differ"
            )
    return planned


def outcome_of(run: PlannedRun) -> Outcome | None:
    """Return the record of a finished run; raises ``ConfigError`` if its folder has other settings."""
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


@final
@dataclass(frozen=True, kw_only=True)
class Images:
    """Addresses: the user's training images, those of them that runs train on, and the test images."""

    data: str
    train: str
    test: str


def perform(run: PlannedRun, images: Images, **how: Any) -> Outcome:
    """Train or resume the run unless it is finished, evaluate it, and store its record.

    ``how`` are ``address``, ``quiet`` and ``debug`` of ``raycl.train``. A loss that is not finite and a collapse
    without recovery are outcomes too. Raises the other errors of ``raycl.train``.
    """
    failed = None
    try:
        if not ((run.place / RESULT).exists() and read_result(run.place)["status"] == "finished"):
            resume = (run.place / CONFIG).exists()
            train(run.config, data=[images.train], output=run.place.uri, resume=resume, **how)
        numbers = _measure(run, images, **how)
    except (NonFiniteLossError, CollapseError) as error:
        failed, numbers = str(error), {"knn_top1": 1.0 / num_classes(images.test)}
    outcome = Outcome(
        setting=run.setting.name,
        seed=run.seed,
        numbers=_last_metrics(run.place) | numbers,
        machine=describe_machine(),
        data=images.data,
        test=images.test,
        failed=failed,
    )
    outcome.write(run.place)
    return outcome


def _last_metrics(place: Place, *, over: int = 5) -> dict[str, float]:
    """Return the last metrics of a run, and the counts of its collapses and rollbacks.

    Each metric is a mean over its last values: the loss of one batch is noisy.
    """
    lines = read_metrics(place)
    events = [line["event"] for line in lines if "event" in line]
    numbers = {"collapsed": float(events.count("collapse")), "rollbacks": float(events.count(ROLLBACK))}
    for name in ("loss", "embedding_std", "effective_rank"):
        if values := [line[name] for line in lines if line.get(name) is not None][-over:]:
            numbers[name] = sum(values) / len(values)
    return numbers


def _measure(run: PlannedRun, images: Images, **how: Any) -> dict[str, float]:
    """Return the length of a finished run, kNN on the test images, and the leakage if asked for."""
    result, settings = read_result(run.place), run.config.evaluation
    numbers = {name: float(result[name]) for name in ("steps", "seconds", "samples_per_second")}
    neighbors: dict[str, Any] = {"k": settings.k, "temperature": settings.temperature, "gpu": run.config.gpu}
    found = evaluate("knn", run=run.place.uri, train=images.train, test=images.test, **neighbors, **how)
    numbers |= {"knn_top1": found["top1"], "pixels": found["baseline"]["pixels"]}
    if run.figure.probe_group_size is not None:
        probed = probe_images(images.test, run.config)
        leak = probe_run(run.place, *probed, group_size=run.figure.probe_group_size)
        numbers |= {"shared": leak.shared, "apart": leak.apart, "batchnorm_leakage": leak.advantage}
    return numbers


def probe_run(
    run: Place, images: Tensor, ids: NDArray, *, group_size: int, num_groupings: int = 16
) -> Leakage:
    """Measure BatchNorm's leakage in the last checkpoint of a MoCo run.

    ``images`` are uint8 [num, height, width, channels]; ``group_size`` rows are normalized together.
    Raises ``ConfigError`` for a run without a momentum encoder.
    """
    config = config_from_yaml((run / CONFIG).read_text(), name=(run / CONFIG).uri)
    if config.key != "momentum_encoder":
        raise ConfigError(f"{run} has no momentum encoder, key is {config.key}; give runs of MoCo")
    content = (run / "checkpoints" / last_checkpoint(run) / "state.pt").read_bytes()
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)["learner"]
    tower = build_towers(config)
    key_tower = MomentumEncoder(tower)
    tower.load_state_dict(state["tower"])
    key_tower.load_state_dict(state["momentum_encoder"])
    augment = ImageTransform.of(config).augmentations[0]
    view_a, view_b = (augment(images, ids, seed=0, epoch=0, view=view) for view in (0, 1))
    return leakage(tower, key_tower, view_a, view_b, group_size=group_size, num_groupings=num_groupings)
