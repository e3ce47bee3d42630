"""Build a run's configuration from a recipe, flags, settings and the first rows of the data."""

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from raycl.config import Columns, RunConfig
from raycl.config.overrides import config_from_yaml, override, parse_setting, unknown_setting
from raycl.data.columns import ColumnNames
from raycl.data.images import InvalidImageError, image_sides
from raycl.data.sources import Source, find_source
from raycl.errors import ConfigError
from raycl.recipes import recipe
from raycl.storage import Place
from raycl.training.preflight import column_names

if TYPE_CHECKING:
    import ray

Settings = Mapping[str, Any] | Sequence[str]  # a mapping by key.path, or strings key.path=value
LARGEST = 224
NUM_PEEKED = 16
_MAX_INVALID_FRACTION: dict[str, type] = {"data.max_invalid_fraction": float}


class RunPlan(NamedTuple):
    """The configuration of a run, and its data if they were found for the image size."""

    config: RunConfig
    source: Source | None = None


def plan_run(
    run: str | RunConfig,
    *,
    data: "str | ray.data.Dataset | None",
    flags: Mapping[str, Any],
    settings: Settings,
) -> RunPlan:
    """Plan the run of a recipe, a YAML file or a ``RunConfig``, with flags and then settings applied.

    The image size of a recipe is the shorter side of the first images, at most 224, unless
    ``data.image_size`` is set. Raises ``ConfigError`` or ``DataError``.
    """
    pairs = settings_of(settings)
    overrides = {**flags, **pairs}
    if isinstance(run, RunConfig):
        _check_flags(flags, run, "the configuration")
        return RunPlan(override(run, overrides))
    if run.endswith((".yaml", ".yml")):
        config = config_from_yaml(Place(run).read_text(), name=run)
        _check_flags(flags, config, run)
        return RunPlan(override(config, overrides))
    config = recipe(run, image_size=LARGEST)
    requested = override(config, overrides)  # report typing errors before reading data
    if requested.data.kind not in ("image", "image_text"):
        return RunPlan(requested)
    if "data.image_size" in pairs:
        return RunPlan(override(recipe(run, image_size=pairs["data.image_size"]), overrides))
    columns = column_names(requested)
    source = find_source(data, columns) if isinstance(data, str) else None
    size = peek_image_size(data if source is None else source, columns)
    return RunPlan(override(recipe(run, image_size=size), overrides), source)


def run_flags(
    *,
    workers: int | str | None = None,
    gpu: bool | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """Return the given flags as settings; raises ``ConfigError`` for flags that exclude each other."""
    flags = {"gpu": gpu, "seed": seed, "stages.0.batch_size": batch_size}
    given = {key: value for key, value in flags.items() if value is not None}
    return given | _workers(workers) | _length(epochs, steps)


def _workers(number: int | str | None) -> dict[str, int | None]:
    """Return the settings for N or MIN:MAX."""
    if number is None:
        return {}
    parts = str(number).split(":")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"--workers takes a positive number of processes, or MIN:MAX, got {number!r}; "
            "for example --workers 2"
        )
    least, most = int(parts[0]), int(parts[-1])
    return {"workers": most, "min_workers": least if least != most else None}


def _length(epochs: int | None, steps: int | None) -> dict[str, Any]:
    """Return the settings of the stage's length; the given one replaces the other."""
    if epochs is not None and steps is not None:
        raise ConfigError(f"--epochs {epochs} and --steps {steps} exclude each other; give one")
    if epochs is None and steps is None:
        return {}
    return {"stages.0.epochs": epochs, "stages.0.steps": steps}


def _check_flags(flags: Mapping[str, Any], config: RunConfig, name: str) -> None:
    """Refuse flags of a single stage if there are several."""
    stage_flags = [key for key, value in flags.items() if key.startswith("stages.0.") and value is not None]
    if stage_flags and len(config.stages) > 1:
        raise ConfigError(
            f"{name} has {len(config.stages)} stages, but --epochs, --steps and --batch-size set only one; "
            f"name the stage: --set {stage_flags[0]}={flags[stage_flags[0]]}"
        )


def peek_image_size(data: "Source | ray.data.Dataset | None", columns: ColumnNames) -> int:
    """Return the median shorter side of the first valid images, between 8 and 224 pixels."""
    sides = []
    for content in _first_images(data, columns):
        try:
            sides.append(min(image_sides(content)))
        except InvalidImageError:
            continue
    return max(8, min(LARGEST, int(statistics.median(sides)))) if sides else LARGEST


def _first_images(data: "Source | ray.data.Dataset | None", columns: ColumnNames) -> list[Any]:
    if isinstance(data, Source):
        first = next(data.read(data.fragments[0]), None)
        return [] if first is None else list(first.values["image"][:NUM_PEEKED])
    if data is None:
        return []
    from raycl.data.decode import columns_of

    image = columns_of(data, columns).image or "image"
    return [row[image] for row in data.take(NUM_PEEKED)]


def settings_of(settings: Settings) -> dict[str, Any]:
    """Return settings by path; raises ``ConfigError`` for a string other than ``key.path=value``."""
    settings = [settings] if isinstance(settings, str) else settings
    return dict(settings if isinstance(settings, Mapping) else map(parse_setting, settings))


def check_measure(measure: str) -> None:
    """Raise ``ConfigError`` for an unknown measure."""
    if measure not in _MEASURES:
        raise ConfigError(f"unknown measure {measure!r}; choose knn, linear, retrieval or sts")


def measure_settings(measure: str, settings: Settings) -> dict[str, Any]:
    """Return the options of a measure from ``--set`` of ``evaluate``."""
    check_measure(measure)
    return _MEASURES[measure](settings)


def judgment_settings(settings: Settings) -> dict[str, Any]:
    """Return ``k``, ``temperature``, ``labels_per_class``, ``seed``, ``baseline`` and ``data.*`` from ``--set``."""
    kinds = {"k": int, "temperature": float, "labels_per_class": int, "seed": int, "baseline": bool}
    return _read_settings(settings, kinds | _MAX_INVALID_FRACTION, columns=True)


def retrieval_settings(settings: Settings) -> dict[str, Any]:
    """Return ``queries``, ``documents``, ``examples``, ``baseline`` and ``data.columns.*`` from ``--set``."""
    kinds = {"queries": str, "documents": str, "examples": int, "baseline": bool}
    return _read_settings(settings, kinds, columns=True)


def sts_settings(settings: Settings) -> dict[str, Any]:
    """Return ``text``, the column of the corpus, and ``baseline`` from ``--set``."""
    return _read_settings(settings, {"text": str, "baseline": bool}, columns=False)


def embedding_settings(settings: Settings) -> dict[str, Any]:
    """Return the columns and ``max_invalid_fraction`` from ``--set`` of ``embed`` and ``prepare pairs``."""
    return _read_settings(settings, _MAX_INVALID_FRACTION, columns=True)


def column_settings(settings: Settings) -> ColumnNames | None:
    """Return the columns from ``--set`` of ``mine`` and ``doctor``."""
    return _read_settings(settings, {}, columns=True).get("columns")


_MEASURES = {
    "knn": judgment_settings,
    "linear": judgment_settings,
    "retrieval": retrieval_settings,
    "sts": sts_settings,
}


def _read_settings(settings: Settings, kinds: Mapping[str, type], *, columns: bool) -> dict[str, Any]:
    result: dict[str, Any] = {}
    named: dict[str, Any] = {}
    roles = [f"data.columns.{name}" for name in Columns.model_fields] if columns else []
    for path, value in settings_of(settings).items():
        if path in kinds:
            result[path.removeprefix("data.")] = _typed(path, value, kinds[path])
        elif path in roles:
            named[path.removeprefix("data.columns.")] = value
        else:
            raise ConfigError(unknown_setting(path, [*kinds, *roles]))
    return result | ({"columns": _named(named)} if named else {})


def _named(columns: dict[str, Any]) -> ColumnNames:
    """Return the columns; naming text columns removes the default image column."""
    has_texts = any(columns.get(role) for role in ("text", "query", "document"))
    return ColumnNames(**({"image": None} if has_texts else {}) | columns)


def _typed(path: str, value: Any, kind: type) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{path} must be {kind.__name__}, got {value!r}")
    return value
