"""From what a user types to what a run needs: recipe, flags, settings, and a look at the data."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from raycl.config import Columns, RunConfig
from raycl.config.overrides import config_from_yaml, override, parse_setting, unknown_setting
from raycl.data.columns import ColumnNames
from raycl.data.images import BrokenImageError, image_sides
from raycl.data.sources import find_source
from raycl.errors import ConfigError
from raycl.recipes import recipe
from raycl.storage import Place
from raycl.training.preflight import column_names

if TYPE_CHECKING:
    import ray

Settings = Mapping[str, Any] | Sequence[str]  # by key.path, or texts key.path=value
LARGEST = 224
NUM_PEEKED = 16
_MAX_BAD_FRACTION: dict[str, type] = {"data.max_invalid_fraction": float}


def plan_run(
    run: str | RunConfig,
    *,
    data: "str | ray.data.Dataset | None",
    flags: Mapping[str, Any],
    settings: Settings,
) -> RunConfig:
    """Return the run: a recipe sized to the data, a YAML file or a configuration; then flags; then settings.

    A recipe looks at a few images: its image size is their shorter side, at most 224, unless
    ``data.image_size`` is set. Raises ``ConfigError`` or ``DataError``.
    """
    pairs = settings_of(settings)
    overrides = {**flags, **pairs}
    if isinstance(run, RunConfig):
        _check_flags(flags, run, "the configuration")
        return override(run, overrides)
    if run.endswith((".yaml", ".yml")):
        stated = config_from_yaml(Place(run).read_text(), name=run)
        _check_flags(flags, stated, run)
        return override(stated, overrides)
    config = recipe(run, image_size=LARGEST)
    asked = override(config, overrides)  # a typing error is found before the data are touched
    if asked.data.kind not in ("image", "image_text"):
        return asked
    if "data.image_size" in pairs:
        return override(recipe(run, image_size=pairs["data.image_size"]), overrides)
    return override(recipe(run, image_size=peek_image_size(data, column_names(asked))), overrides)


def run_flags(
    *,
    workers: int | str | None = None,
    gpu: bool | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """Return the flags that were given as settings; raises ``ConfigError`` for what excludes each other."""
    flags = {"gpu": gpu, "seed": seed, "stages.0.batch_size": batch_size}
    given = {key: value for key, value in flags.items() if value is not None}
    return given | _workers(workers) | _length(epochs, steps)


def _workers(number: int | str | None) -> dict[str, int | None]:
    """Read N or MIN:MAX."""
    if number is None:
        return {}
    parts = str(number).split(":")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"--workers takes a number of processes above 0, or MIN:MAX, came {number!r}; "
            "for example --workers 2"
        )
    least, most = int(parts[0]), int(parts[-1])
    return {"workers": most, "min_workers": least if least != most else None}


def _length(epochs: int | None, steps: int | None) -> dict[str, Any]:
    """Return the stage's length; the one given takes the other's place."""
    if epochs is not None and steps is not None:
        raise ConfigError(f"--epochs {epochs} and --steps {steps} exclude each other; give one")
    if epochs is None and steps is None:
        return {}
    return {"stages.0.epochs": epochs, "stages.0.steps": steps}


def _check_flags(flags: Mapping[str, Any], config: RunConfig, name: str) -> None:
    """Refuse flags that speak of one stage where there are several."""
    of_a_stage = [key for key, value in flags.items() if key.startswith("stages.0.") and value is not None]
    if of_a_stage and len(config.stages) > 1:
        raise ConfigError(
            f"{name} has {len(config.stages)} stages, and --epochs, --steps and --batch-size speak of one; "
            f"name the stage: --set {of_a_stage[0]}={flags[of_a_stage[0]]}"
        )


def peek_image_size(data: "str | ray.data.Dataset | None", columns: ColumnNames) -> int:
    """Return the median shorter side of the first sound images, between 8 and 224 pixels."""
    sides = []
    for content in _first_images(data, columns):
        try:
            sides.append(min(image_sides(content)))
        except BrokenImageError:
            continue
    return max(8, min(LARGEST, int(statistics.median(sides)))) if sides else LARGEST


def _first_images(data: "str | ray.data.Dataset | None", columns: ColumnNames) -> list[Any]:
    if isinstance(data, str):
        source = find_source(data, columns)
        return [
            content
            for rows in islice(source.read(source.pieces[0]), 1)
            for content in rows.values["image"][:NUM_PEEKED]
        ]
    if data is None:
        return []
    from raycl.data.decode import columns_of

    image = columns_of(data, columns).image or "image"
    return [row[image] for row in data.take(NUM_PEEKED)]


def settings_of(settings: Settings) -> dict[str, Any]:
    """Return settings by their path; raises ``ConfigError`` for a text that is none."""
    settings = [settings] if isinstance(settings, str) else settings
    return dict(settings if isinstance(settings, Mapping) else map(parse_setting, settings))


def check_measure(measure: str) -> None:
    """Raise ``ConfigError`` unless there is a measure of this name."""
    if measure not in _MEASURES:
        raise ConfigError(f"unknown measure {measure!r}; there are knn, linear, retrieval and sts")


def measure_settings(measure: str, settings: Settings) -> dict[str, Any]:
    """Read ``--set`` of ``evaluate``: the options of the measure."""
    check_measure(measure)
    return _MEASURES[measure](settings)


def judgment_settings(settings: Settings) -> dict[str, Any]:
    """Read ``--set`` of ``evaluate``: k, temperature, labels_per_class, seed, baseline, data.*."""
    kinds = {"k": int, "temperature": float, "labels_per_class": int, "seed": int, "baseline": bool}
    return _read_settings(settings, kinds | _MAX_BAD_FRACTION, columns=True)


def retrieval_settings(settings: Settings) -> dict[str, Any]:
    """Read ``--set`` of ``evaluate retrieval``: queries, documents, examples, baseline, data.columns.*."""
    kinds = {"queries": str, "documents": str, "examples": int, "baseline": bool}
    return _read_settings(settings, kinds, columns=True)


def sts_settings(settings: Settings) -> dict[str, Any]:
    """Read ``--set`` of ``evaluate sts``: text, the column of the corpus, and baseline."""
    return _read_settings(settings, {"text": str, "baseline": bool}, columns=False)


def embedding_settings(settings: Settings) -> dict[str, Any]:
    """Read ``--set`` of ``embed`` and ``prepare pairs``: data.columns.* and data.max_invalid_fraction."""
    return _read_settings(settings, _MAX_BAD_FRACTION, columns=True)


def column_settings(settings: Settings) -> ColumnNames | None:
    """Read ``--set`` of ``mine`` and ``doctor``: data.columns.*."""
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
    """Return the columns; where texts or pairs are named, an image is no longer looked for."""
    has_texts = any(columns.get(role) for role in ("text", "query", "document"))
    return ColumnNames(**({"image": None} if has_texts else {}) | columns)


def _typed(path: str, value: Any, kind: type) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{path} must be {kind.__name__}, came {value!r}")
    return value
