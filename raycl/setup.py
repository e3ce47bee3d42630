"""From what a user types to what a run needs: recipe, flags, settings, and a look at the data."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from raycl.config import Columns, RunConfig
from raycl.data.columns import ColumnNames
from raycl.data.images import BrokenImageError, image_sides
from raycl.data.sources import Source, find_source
from raycl.errors import ConfigError
from raycl.recipes import recipe
from raycl.settings import config_from_yaml, override, parse_setting
from raycl.storage import Place
from raycl.training.columns import column_names

LARGEST = 224
NUM_PEEKED = 16
_MAX_BAD_FRACTION: dict[str, type] = {"data.max_bad_fraction": float}


def plan_run(name: str, *, data: str, flags: Mapping[str, Any], settings: Sequence[str]) -> RunConfig:
    """Return the run: a recipe sized to the data, or a YAML file; then flags; then ``--set``.

    A recipe looks at a few images: its image size is their shorter side, at most 224, unless
    ``data.image_size`` is set. Raises ``ConfigError`` or ``DataError``.
    """
    pairs = dict(map(parse_setting, settings))
    overrides = {**flags, **pairs}
    if name.endswith((".yaml", ".yml")):
        stated = config_from_yaml(Place(name).read_text(), name=name)
        _check_flags(flags, stated, name)
        return override(stated, overrides)
    config = recipe(name, image_size=LARGEST)
    asked = override(config, overrides)  # a typing error is found before the data are touched
    if asked.data.kind not in ("image", "image_text"):
        return asked
    if "data.image_size" in pairs:
        return override(recipe(name, image_size=pairs["data.image_size"]), overrides)
    size = peek_image_size(find_source(data, column_names(asked)))
    return override(recipe(name, image_size=size), overrides)


def _check_flags(flags: Mapping[str, Any], config: RunConfig, name: str) -> None:
    """Refuse flags that speak of one stage where there are several."""
    of_a_stage = [key for key, value in flags.items() if key.startswith("stages.0.") and value is not None]
    if of_a_stage and len(config.stages) > 1:
        raise ConfigError(
            f"{name} has {len(config.stages)} stages, and --epochs, --steps and --batch-size speak of one; "
            f"name the stage: --set {of_a_stage[0]}={flags[of_a_stage[0]]}"
        )


def peek_image_size(source: Source) -> int:
    """Return the median shorter side of the first sound images, between 8 and 224 pixels."""
    sides = []
    for rows in islice(source.read(source.pieces[0]), 1):
        for content in rows.values["image"][:NUM_PEEKED]:
            try:
                sides.append(min(image_sides(content)))
            except BrokenImageError:
                continue
    return max(8, min(LARGEST, int(statistics.median(sides)))) if sides else LARGEST


def judgment_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Read ``--set`` of ``evaluate``: k, temperature, labels_per_class, seed, floor, data.*."""
    kinds = {"k": int, "temperature": float, "labels_per_class": int, "seed": int, "floor": bool}
    return _read_settings(settings, kinds | _MAX_BAD_FRACTION, columns=True)


def retrieval_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Read ``--set`` of ``evaluate retrieval``: queries, documents, examples, floor, data.columns.*."""
    kinds = {"queries": str, "documents": str, "examples": int, "floor": bool}
    return _read_settings(settings, kinds, columns=True)


def sts_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Read ``--set`` of ``evaluate sts``: text, the column of the corpus, and floor."""
    return _read_settings(settings, {"text": str, "floor": bool}, columns=False)


def embedding_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Read ``--set`` of ``embed`` and ``prepare pairs``: data.columns.* and data.max_bad_fraction."""
    return _read_settings(settings, _MAX_BAD_FRACTION, columns=True)


def column_settings(settings: Sequence[str]) -> ColumnNames | None:
    """Read ``--set`` of ``mine`` and ``doctor``: data.columns.*."""
    return _read_settings(settings, {}, columns=True).get("columns")


def _read_settings(settings: Sequence[str], kinds: Mapping[str, type], *, columns: bool) -> dict[str, Any]:
    result: dict[str, Any] = {}
    named: dict[str, Any] = {}
    roles = [f"data.columns.{name}" for name in Columns.model_fields] if columns else []
    for path, value in map(parse_setting, settings):
        if path in kinds:
            result[path.removeprefix("data.")] = _typed(path, value, kinds[path])
        elif path in roles:
            named[path.removeprefix("data.columns.")] = value
        else:
            raise ConfigError(f"unknown key {path} (allowed: {', '.join([*kinds, *roles])})")
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
