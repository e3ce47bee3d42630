"""A run, stated: frozen, validated values. Nothing below this floor sees them."""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, final

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from raycl.errors import ConfigError

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Range = tuple[Positive, Positive]


class Section(BaseModel):
    """A part of the configuration: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@final
class Columns(Section):
    """Names of the columns to read; ``None`` takes the usual name where it exists."""

    image: str = "image"
    label: str | None = None
    sample_id: str | None = None


@final
class DataConfig(Section):
    """How images come in: decoded, resized to a square of ``stored_size``, kept as bytes."""

    columns: Columns = Columns()
    image_size: Annotated[int, Field(ge=8, le=1024)] = 224
    stored_size: Annotated[int, Field(ge=8, le=2048)] | None = None
    channels: Literal[1, 3] = 3
    max_pixels: Count = 64_000_000
    max_bad_fraction: Probability = 0.01
    cache: Literal["auto", "materialize", "stream"] = "auto"
    shuffle_rows: Count = 16_384

    @property
    def decoded_size(self) -> int:
        """The stored side in pixels; larger than a crop's for big images, to keep detail."""
        if self.stored_size is not None:
            return self.stored_size
        return self.image_size if self.image_size <= 64 else self.image_size * 5 // 4


@final
class AugmentConfig(Section):
    """The random view of an image (Chen et al., 2020); strengths are torchvision's."""

    crop_scale: Range = (0.08, 1.0)
    crop_ratio: Range = (3 / 4, 4 / 3)
    flip: Probability = 0.5
    rotation: Annotated[float, Field(ge=0.0, le=180.0)] = 0.0
    jitter: Probability = 0.8
    brightness: NotNegative = 0.8
    contrast: NotNegative = 0.8
    saturation: NotNegative = 0.8
    hue: Annotated[float, Field(ge=0.0, le=0.5)] = 0.2
    grayscale: Probability = 0.2
    blur: Probability = 0.5
    blur_sigma: Range = (0.1, 2.0)
    mean: tuple[float, ...] | None = None
    std: tuple[Positive, ...] | None = None


@final
class EncoderConfig(Section):
    """The network: a torchvision name, or ``package.module:function`` of the user's own."""

    name: str = "resnet50"
    stem: Literal["auto", "small", "half", "standard"] = "auto"
    width: Positive = 1.0
    arguments: dict[str, Any] = {}


@final
class HeadConfig(Section):
    """The projection head; ``hidden_dim=None`` is as wide as the representation."""

    num_layers: Literal[1, 2, 3] = 2
    hidden_dim: Count | None = None
    dim: Annotated[int, Field(ge=2)] = 128


@final
class OptimizerConfig(Section):
    """The optimizer; ``momentum`` for SGD and LARS, ``betas`` for AdamW."""

    name: Literal["sgd", "adamw", "lars"] = "lars"
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (
        0.9,
        0.999,
    )
    weight_decay: NotNegative = 1e-6
    trust_coefficient: Positive = 1e-3


@final
class Stage(Section):
    """A stretch of the run; exactly one of ``epochs`` and ``steps`` says how long.

    The peak learning rate is ``learning_rate`` at a batch of 256 rows and follows the batch by
    ``learning_rate_scaling``; after ``warmup_epochs`` (or a tenth of the stage, if that is less)
    it falls along half a cosine.
    """

    epochs: Count | None = None
    steps: Count | None = None
    batch_size: Annotated[int, Field(ge=2)] = 256
    loss: Literal["nt_xent"] = "nt_xent"
    temperature: Positive = 0.1
    learning_rate: Positive = 0.3
    learning_rate_scaling: Literal["linear", "square_root", "none"] = "linear"
    learning_rate_schedule: Literal["cosine", "constant"] = "cosine"
    warmup_epochs: NotNegative = 10.0

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("set exactly one of epochs and steps")
        return self

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate at this stage's batch size."""
        ratio = self.batch_size / 256
        return (
            self.learning_rate
            * {"linear": ratio, "square_root": ratio**0.5, "none": 1.0}[self.learning_rate_scaling]
        )


@final
class EvaluationConfig(Section):
    """The periodic kNN judge on held-out labeled rows (Wu et al., 2018).

    ``every_epochs=None`` judges about ten times a run, ``0`` never. ``num_test`` rows are held
    out of training (never more than a tenth of the set) and vote over ``num_train`` others. Of a large
    set that is streamed, they come from some pieces spread over it, and all other rows are trained on.
    """

    every_epochs: Annotated[int, Field(ge=0)] | None = None
    num_train: Count = 10_000
    num_test: Count = 2_000
    k: Count = 200
    temperature: Positive = 0.07


@final
class CheckpointConfig(Section):
    """When to save: after every judgment, and every ``every_steps`` steps or ``every_s`` seconds."""

    every_steps: Count | None = None
    every_s: Positive = 300.0
    keep: Count = 2


@final
class RunConfig(Section):
    """A whole run as a value; recipes return one, YAML holds one.

    ``autoscaling`` says that the cluster grows when more is asked for than it has now; otherwise
    a run that does not fit is refused.
    """

    recipe: str
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    workers: Count = 1
    gpu: bool = False
    autoscaling: bool = False
    cpus_per_worker: Positive | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    encoder: EncoderConfig = EncoderConfig()
    projection_head: HeadConfig = HeadConfig()
    batchnorm: Literal["synchronized", "as_is"] = "synchronized"
    optimizer: OptimizerConfig = OptimizerConfig()
    stages: Annotated[tuple[Stage, ...], Field(min_length=1, max_length=1)]
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    log_every_steps: Count = 10
    max_failures: Annotated[int, Field(ge=0)] = 0

    @property
    def stage(self) -> Stage:
        """The run's one stage."""
        return self.stages[0]

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation by channel, on pixels between 0 and 1."""
        natural = {1: ((0.5,), (0.25,)), 3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
        mean, std = natural[self.data.channels]
        return self.augment.mean or mean, self.augment.std or std

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        for stage in self.stages:
            if stage.batch_size % self.workers:
                raise ValueError(
                    f"batch_size {stage.batch_size} does not divide over {self.workers} workers; "
                    "batch_size counts the rows of all workers, choose a multiple"
                )
        for name, (low, high) in {
            "crop_scale": self.augment.crop_scale,
            "crop_ratio": self.augment.crop_ratio,
            "blur_sigma": self.augment.blur_sigma,
        }.items():
            if low > high:
                raise ValueError(f"augment.{name} must ascend, came {low} to {high}")
        if self.augment.crop_scale[1] > 1:
            raise ValueError(f"augment.crop_scale ends at {self.augment.crop_scale[1]}; at most 1 is allowed")
        for name, values in {"mean": self.augment.mean, "std": self.augment.std}.items():
            if values is not None and len(values) != self.data.channels:
                raise ValueError(
                    f"augment.{name} has {len(values)} numbers for {self.data.channels} channels; give one a channel"
                )
        return self


def config_from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Validate a tree of plain values; raises ``ConfigError`` naming the key."""
    try:
        return RunConfig.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from None
    except TypeError as error:
        raise ConfigError(f"the configuration holds a value that is no plain YAML: {error}") from None


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes 1e-4 for text; people mean the number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("+-0123456789")
)


def config_from_yaml(text: str, *, name: str = "the configuration") -> RunConfig:
    """Read a run from YAML; raises ``ConfigError``."""
    try:
        values = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{name} must hold keys and values, came {type(values).__name__}; see `raycl recipes simclr`"
        )
    return config_from_dict(values)


def config_to_yaml(config: RunConfig) -> str:
    """Write a run as YAML that ``config_from_yaml`` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def override(config: RunConfig, settings: Sequence[str] | Mapping[str, Any]) -> RunConfig:
    """Return the run with ``key.path=value`` settings replaced; values are YAML.

    Raises ``ConfigError`` for an unknown key, a wrong type or an impossible value.
    """
    pairs = settings.items() if isinstance(settings, Mapping) else map(parse_setting, settings)
    values = config.model_dump(mode="json")
    for path, value in pairs:
        _set(values, path, value)
    return config_from_dict(values)


def differences(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two runs differ: key path to (before, after)."""
    old, new = (_flat(config.model_dump(mode="json")) for config in (before, after))
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def _flat(values: Any, path: str = "") -> dict[str, Any]:
    items = (
        values.items()
        if isinstance(values, dict)
        else enumerate(values)
        if isinstance(values, list)
        else None
    )
    if items is None:
        return {path: values}
    parts = [_flat(value, f"{path}.{key}" if path else str(key)) for key, value in items]
    return {key: value for part in parts for key, value in part.items()}


def parse_setting(setting: str) -> tuple[str, Any]:
    """Split ``key.path=value``; the value is YAML. Raises ``ConfigError``."""
    path, equals, value = setting.partition("=")
    if not equals or not path:
        raise ConfigError(
            f"--set takes key.path=value, came {setting!r}; for example stages.0.temperature=0.2"
        )
    try:
        return path.strip(), yaml.load(value, _Loader)
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"--set {path}: {value!r} is no YAML value; quote it") from None


def _set(values: Any, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        child = _child(values, name, path)
        # Below free-form arguments a path makes what it passes.
        values = values.setdefault(child, {}) if isinstance(values, dict) else values[child]
        if not isinstance(values, dict | list):
            raise ConfigError(f"unknown key {path}: {name} holds the single value {values!r}")
    values[_child(values, last, path)] = value


def _child(values: Any, name: str, path: str) -> Any:
    """Return the key or index called ``name``, which must exist (free-form arguments excepted)."""
    if isinstance(values, list):
        if not name.isdigit() or int(name) >= len(values):
            raise ConfigError(f"unknown key {path}: {name!r} is no index below {len(values)}")
        return int(name)
    if name not in values and ".arguments." not in f".{path}":
        raise ConfigError(_unknown(path, name, list(values)))
    return name


def _one_line(error: ValidationError) -> str:
    # A tuple whose only item is wrong is reported as too short as well.
    problems = [
        each for each in error.errors(include_url=False) if each["type"] != "too_short"
    ] or error.errors()
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return _describe(problems[0]) + more


def _describe(problem: ErrorDetails) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return _unknown(path, str(problem["loc"][-1]), _names_at(problem["loc"][:-1]))
    if problem["type"] == "missing":
        return f"{path} is missing; it has no default"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{path}: {message}" if path else message
    return f"{path}: {message[0].lower()}{message[1:]}, came {problem['input']!r}"


def _unknown(path: str, name: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, allowed, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"unknown key {path}{hint} (allowed: {', '.join(allowed)})"


def _names_at(path: Sequence[int | str]) -> list[str]:
    """Return the keys that the section at ``path`` has."""
    section: Any = RunConfig
    for part in path:
        if isinstance(part, str):
            kind = section.model_fields[part].annotation
            section = Stage if part == "stages" else kind
    return list(section.model_fields)
