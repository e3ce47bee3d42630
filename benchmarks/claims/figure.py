"""A figure: its runs, its claims and its panels; and the two scales at which it runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, final

from claims.rules import Claim
from raycl.config import RunConfig
from raycl.config.overrides import override
from raycl.errors import ConfigError
from raycl.recipes import recipe

if TYPE_CHECKING:
    from claims.results import MetricCurve, Results

ScaleName = Literal["cpu", "gpu"]


@final
@dataclass(frozen=True, kw_only=True)
class Scale:
    """Settings of all figures; ``num_train`` images are sampled from the training set, None uses all."""

    image_size: int
    num_train: int | None
    overrides: Mapping[str, Any]
    text: str


# All test images evaluate and no training image is held out, unless a figure shows kNN during training.
_COMMON = {"evaluation.every_epochs": 0, "precision": "bfloat16", "augment.crop_scale": [0.2, 1.0]}
SCALES: dict[ScaleName, Scale] = {
    "cpu": Scale(
        image_size=24,
        num_train=10_000,
        overrides={**_COMMON, "encoder.name": "resnet10", "encoder.stem": "half", "encoder.width": 0.5},
        text="cut for two cores: 10,000 training images drawn at random, or all where there are fewer",
    ),
    "gpu": Scale(image_size=32, num_train=None, overrides=_COMMON, text="all training images"),
}


@final
@dataclass(frozen=True, kw_only=True)
class Setting:
    """One compared setting: a recipe and its overrides.

    ``name`` is for folders, ``label`` for people. A setting may be the point at ``x`` of the curve ``line``.
    """

    name: str
    label: str
    recipe: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    line: str | None = None
    x: float | None = None


def settings(recipe: str, *rows: tuple[str, str, Mapping[str, Any]]) -> tuple[Setting, ...]:
    """Return settings of one recipe: names, labels and overrides."""
    return tuple(Setting(name=name, label=label, recipe=recipe, overrides=own) for name, label, own in rows)


@final
@dataclass(frozen=True, kw_only=True)
class Panel:
    """A number of all settings: a dot a seed, medians at the points of their lines, or curves over training.

    ``values`` is the key of a number or metric, or makes the curves; ``limit`` is a dotted line.
    """

    kind: Literal["dots", "lines", "curves"]
    values: "str | Callable[[Results], Mapping[str, Sequence[MetricCurve]]]"
    x: str
    y: str = ""
    title: str = ""
    over: Literal["samples", "steps"] = "samples"
    limit: float | None = None
    is_log: bool = False


KNN = Panel(kind="dots", values="knn_top1", x="kNN top-1 on the test images")


@final
@dataclass(frozen=True, kw_only=True)
class ClaimFigure:
    """A published figure: its ``settings`` and their ``shared`` overrides, by scale.

    ``columns`` are the numbers of the table, by key of a run's record. ``size`` is in inches.
    ``probe_group_size`` asks for the probe of BatchNorm's leak on the test images, with so many rows normalized
    together.
    """

    name: str
    title: str
    source: str
    settings: Mapping[ScaleName, tuple[Setting, ...]]
    shared: Mapping[ScaleName, Mapping[str, Any]]
    columns: Mapping[str, str]
    claims: "Callable[[Results], list[Claim]]"
    panels: Sequence[Panel]
    size: tuple[float, float]
    note: str = ""
    probe_group_size: int | None = None

    def config(
        self,
        setting: Setting,
        scale: ScaleName,
        *,
        seed: int,
        workers: int | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> RunConfig:
        """Return the run of a setting: scale, figure, ``workers``, setting, then the user's ``overrides``.

        Raises ``ConfigError``.
        """
        overrides = overrides or {}
        if "seed" in overrides:
            raise ConfigError(
                f"--set seed={overrides['seed']} would give all seeds of a setting the same run; remove it, "
                "--seeds sets their number"
            )
        base = {**SCALES[scale].overrides, **self.shared[scale]}
        base |= {} if workers is None else {"workers": workers}
        config = recipe(setting.recipe, image_size=SCALES[scale].image_size)
        # Two calls: a stage added by the setting copies the figure's first stage, not the user's.
        return override(override(config, {**base, **setting.overrides, "seed": seed}), overrides)


def describe_runs(scale: ScaleName, configs: Sequence[RunConfig]) -> str:
    """Describe all runs: image size, encoder and batch size where they agree, and their lengths."""
    facts = [
        {f"{config.data.image_size} pixels" for config in configs},
        {f"{(e := config.encoder).name} of width {e.width:g} (stem: {e.stem})" for config in configs},
        {f"batches of {stage.batch_size:,}" for config in configs for stage in config.stages},
    ]
    common = [values.pop() for values in facts if len(values) == 1]
    return ", ".join([SCALES[scale].text, *common, " or ".join(dict.fromkeys(map(_length, configs)))])


def _length(config: RunConfig) -> str:
    counts = {unit: sum(getattr(stage, unit) or 0 for stage in config.stages) for unit in ("epochs", "steps")}
    return " and ".join(f"{count:,} {unit}" for unit, count in counts.items() if count)


def find_scale(name: str) -> ScaleName:
    """Return the scale of this name; raises ``ConfigError`` naming the known ones."""
    for known in SCALES:
        if known == name:
            return known
    raise ConfigError(f"unknown --scale {name!r}; choose {', '.join(SCALES)}")
