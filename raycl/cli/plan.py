"""Build a run's configuration from a recipe, flags, settings and a few rows of the data."""

import contextlib
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from raycl.arguments import check_type, listed
from raycl.config import Columns, EncoderConfig, RunConfig, flat
from raycl.config.conditions import leaves
from raycl.config.overrides import config_from_yaml, flat_pairs, override_pairs, pairs_of, unknown_setting
from raycl.errors import ConfigError, DataError
from raycl.gpus import cpu_has_bfloat16
from raycl.recipes import recipe
from raycl.recipes.images import SMALL
from raycl.recipes.texts import of_other_encoder

if TYPE_CHECKING:
    import ray

    from raycl.data.columns import ColumnNames
    from raycl.data.sources import Fragment, Source

Settings = Mapping[str, Any] | Sequence[str]  # a mapping by key.path, or strings key.path=value
Answer = TypeVar("Answer")
LARGEST = 224
NUM_PEEKED = 16
# Settings that choose an encoder; its last layer and its arguments are those of the default one.
_ENCODERS = r"encoder(\.(?!whitening$|kwargs\b).*)?|text_encoder(\.name)?"


class RunPlan(NamedTuple):
    """The configuration of a run, its data if they were read for their image size, and lines for the user."""

    config: RunConfig
    sources: "tuple[Source, ...]" = ()
    notes: tuple[str, ...] = ()


def plan_run(
    run: str | RunConfig,
    *,
    data: "Sequence[str | ray.data.Dataset]",
    flags: Mapping[str, Any],
    settings: Settings,
    own_encoder: bool = False,
    resumed: str | None = None,
) -> RunPlan:
    """Plan the run of a recipe, a YAML file or a ``RunConfig``, with flags and settings applied.

    ``data`` are the addresses of the data sets, or Ray Datasets; none if they are unknown.
    The image size of a recipe is the median shorter side of 16 images from all over the data, at most 224, unless
    ``data.image_size`` is set. Small gray images get other views (:func:`raycl.recipes.images.for_gray`). Without a
    GPU, small images get another encoder (:func:`raycl.recipes.images.for_cpu`), in bfloat16 if this machine's CPU
    has it, unless one is set (other than its last layer, ``encoder.whitening``, and ``encoder.kwargs``) or is a module
    of the user's (``own_encoder``), and another optimizer with its learning rate, unless the name of an optimizer or a
    learning rate is set; sentences get a bag of subwords (:func:`raycl.recipes.texts.of_words`), unless an encoder is
    set. If ``resumed`` is the output of a run, that encoder keeps the precision with which the run began, since another machine
    may have another CPU.
    Raises ``ConfigError`` or ``DataError``.
    """
    named = pairs_of(settings)
    overrides, pairs = [*flags.items(), *named], dict(flat_pairs(named))
    _check_conflicts(flags, pairs)
    if own_encoder:
        _check_own_encoder(pairs)
    if isinstance(run, RunConfig):
        _check_flags(flags, run, "the configuration")
        return RunPlan(override_pairs(run, overrides))
    path = run.partition("?")[0] if "://" in run else run  # an address may have options
    if path.endswith((".yaml", ".yml")):
        from raycl.storage import Place

        # An earlier version of raycl may have written the file of the run itself.
        config = config_from_yaml(Place(run).read_text(), name=run, trained=_is_own(run, resumed))
        _check_flags(flags, config, run)
        return RunPlan(override_pairs(config, overrides))
    config = recipe(run, image_size=LARGEST)
    is_set = own_encoder or any(re.fullmatch(_ENCODERS, key) for key in pairs)
    requested = _requested(run, config, overrides)  # report typing errors before reading data
    if requested.data.kind == "text":
        words = override_pairs(recipe(run, on_cpu=not requested.gpu and not is_set), overrides)
        return RunPlan(words, notes=_departures(words, config, gray=False, is_set=is_set))
    if requested.data.kind == "pairs":
        is_other = own_encoder or requested.encoder.name != config.encoder.name
        if config.encoder.name != "bag_of_subwords" or not is_other:
            return RunPlan(requested)
        planned = override_pairs(of_other_encoder(config), overrides)
        return RunPlan(planned, notes=_changed_rate(planned, requested))
    size = requested.data.image_size if "data.image_size" in pairs else None
    gray, sources = requested.data.channels == 1, ()
    if size is None or (not gray and requested.data.kind == "image" and size <= SMALL):
        # Here, since these modules take a second to import, and wrong settings are refused before.
        from raycl.data.discovery import find_source
        from raycl.training.preflight import column_names

        columns = column_names(requested)
        sources = tuple(find_source(each, columns) for each in data if isinstance(each, str))
        given: Sequence[Any] = sources or data  # addresses are sources now
        images = [image for each in given for image in _some_images(each, columns)]
        size = size or _median_side(images)
        gray = gray or (size <= SMALL and _are_gray(images))
    papers = recipe(run, image_size=size)
    config = recipe(run, image_size=size, gray=gray, on_cpu=not requested.gpu and not is_set)
    if config.encoder != papers.encoder:
        config = config.model_copy(update={"precision": _precision_on_cpu(resumed)})
    if _is_papers_optimizer(pairs, config):
        config = config.model_copy(update={"optimizer": papers.optimizer, "stages": papers.stages})
    config = override_pairs(config, overrides)
    return RunPlan(config, sources, _departures(config, papers, gray=gray, is_set=is_set))


def _requested(run: str, config: RunConfig, overrides: Sequence[tuple[str, Any]]) -> RunConfig:
    """Override the settings of a recipe, whose images may be small or whose sentences may train without a GPU."""
    try:
        return override_pairs(config, overrides)
    except ConfigError:
        if config.data.kind == "pairs":
            raise
        # Small images, and sentences without a GPU, have other defaults, on which these settings may act.
        with contextlib.suppress(ConfigError):
            return override_pairs(recipe(run, image_size=SMALL, on_cpu=True), overrides)
        raise


def _is_papers_optimizer(pairs: Mapping[str, Any], config: RunConfig) -> bool:
    """Return whether settings name another optimizer, or a learning rate, which is meant for the paper's."""
    if "optimizer.name" in pairs:
        return pairs["optimizer.name"] != config.optimizer.name
    return any(re.fullmatch(r"stages(\.\d+\.learning_rate)?", key) for key in pairs)


def _precision_on_cpu(resumed: str | None) -> str:
    """Return the precision of the run to resume, or else the fastest one of this machine's CPU."""
    if resumed is not None:
        from raycl.records import CONFIG
        from raycl.storage import Place

        if (saved := Place(resumed) / CONFIG).exists():
            return config_from_yaml(saved.read_text(), name=saved.uri, trained=True).precision
    return "bfloat16" if cpu_has_bfloat16() else "auto"


def _departures(config: RunConfig, papers: RunConfig, *, gray: bool, is_set: bool) -> tuple[str, ...]:
    """Return a line for each departure of a recipe from the paper that the user has not set."""
    size, notes = config.data.image_size, []
    if config.encoder.name != papers.encoder.name and not is_set:
        trained = (
            f"sentences train a {config.encoder.name}"
            if config.data.kind == "text"
            else f"images of {size} pixels train a small {config.encoder.name} in {config.tower_precision} with "
            f"{config.optimizer.name}"
        )
        notes.append(
            f"without a GPU, {trained}; the paper's settings are --set encoder.name={papers.encoder.name}"
        )
    if gray and config.augment.rotation > papers.augment.rotation and not config.augment.flip:
        notes.append(
            f"gray images of {size} pixels train on views that are rotated and not flipped; "
            f"the paper's are --set augment.rotation=0.0 --set augment.flip={papers.augment.flip}"
        )
    return tuple(notes)


def _changed_rate(config: RunConfig, requested: RunConfig) -> tuple[str, ...]:
    """Return a line if a run has another learning rate than its recipe, for its encoder."""
    rate, recipes = config.stages[0].learning_rate, requested.stages[0].learning_rate
    if rate == recipes:
        return ()
    return (
        f"the learning rate is {rate:g}, since {recipes:g} is meant for a bag of subwords; "
        "set stages.0.learning_rate for another one, about 2e-5 for a pretrained model",
    )


def own_settings(output: str) -> str:
    """Return the address of the settings of the run in ``output``, with which it is resumed.

    Raises ``ConfigError`` without a run, or if the user must name its settings: they contain code outside the packages in
    RAYCL_TRUSTED, or an address with options.
    """
    from raycl.records import CONFIG
    from raycl.storage import Place, has_options

    file = Place(output) / CONFIG
    if not file.exists():
        raise ConfigError(f"there is no run in {output} to resume; give a recipe and --data for a new one")
    config = config_from_yaml(file.read_text(), name=file.uri, trained=True)
    config.check_trusted(file.uri)
    for path, value in leaves(config).items():
        if has_options(value):
            raise ConfigError(
                f"{path} of {file.uri} is an address with options; give that file as the recipe"
            )
    return file.uri


def own_data(output: str) -> list[str]:
    """Return the addresses of the data of the run in ``output``.

    Raises ``ConfigError`` if the user must name them: a Ray Dataset has none, and others have options.
    """
    from raycl.records import DATA, read_object
    from raycl.storage import Place, has_options

    file = Place(output) / DATA
    if not file.exists():
        raise ConfigError(f"there is no run in {output} to resume; give --data for a new one")
    addresses = listed(read_object(file).get("data"))
    if not addresses:
        raise ConfigError(f"the run in {output} read a Ray Dataset; resume it in Python with dataset=")
    for each in addresses:
        if not isinstance(each, str):
            raise DataError(f"{file.uri} is damaged: {each!r} is no address of data; give --data")
        if has_options(each):
            raise ConfigError(f"{file.uri} names an address with options, {each}; give it as --data")
    return addresses


def _is_own(config: str, output: str | None) -> bool:
    """Whether a file of settings is the one in this output."""
    from raycl.records import CONFIG
    from raycl.storage import Place

    return output is not None and Place(config).uri == (Place(output) / CONFIG).uri


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


def _check_conflicts(flags: Mapping[str, Any], pairs: Mapping[str, Any]) -> None:
    """Refuse a setting that would replace the value of a flag, itself or as the list that holds it."""
    given = [(key, value, path) for key, value in flags.items() if value is not None for path in pairs]
    for key, value, path in given:
        if f"{key}.".startswith(f"{path}.") and flat(pairs[path], path).get(key) != value:
            flag = key.rpartition(".")[2].removeprefix("min_").replace("_", "-")
            raise ConfigError(
                f"--{flag} sets {key} to {value}, and --set {path} replaces it; give one of them"
            )


def _check_own_encoder(pairs: Mapping[str, Any]) -> None:
    """Refuse settings of the network that a module of the user's replaces, unless they have their defaults."""
    default = {f"encoder.{name}": value for name, value in EncoderConfig()}
    for path, value in pairs.items():
        if re.fullmatch(r"encoder\.(stem|width|kwargs(\..*)?)", path) and value != default.get(path):
            raise ConfigError(
                f"{path} acts only with a network that raycl builds by its name, and encoder= is another; remove it"
            )


def _check_flags(flags: Mapping[str, Any], config: RunConfig, name: str) -> None:
    """Refuse flags of a single stage if there are several."""
    stage_flags = {key: value for key, value in flags.items() if key.startswith("stages.0.")}
    if len(config.stages) > 1 and any(value is not None for value in stage_flags.values()):
        # A length replaces the other one, which is null.
        settings = [f"--set {key}={'null' if each is None else each}" for key, each in stage_flags.items()]
        raise ConfigError(
            f"{name} has {len(config.stages)} stages, but --epochs, --steps and --batch-size set only one; "
            f"name the stage: {' '.join(settings)}"
        )


def _median_side(images: Sequence[Any]) -> int:
    """Return the median shorter side of the valid images, between 8 and 224 pixels."""
    from raycl.data.images import image_sides

    sides = [min(each) for each in _of_valid(images, image_sides)]
    return max(8, min(LARGEST, int(statistics.median(sides)))) if sides else LARGEST


def _are_gray(images: Sequence[Any]) -> bool:
    """Whether there are valid images, and all of them are gray."""
    from raycl.data.images import is_gray

    found = _of_valid(images, is_gray)
    return bool(found) and all(found)


def _of_valid(images: Sequence[Any], function: Callable[[Any], Answer]) -> list[Answer]:
    from raycl.data.images import InvalidImageError

    answers: list[Answer] = []
    for image in images:
        with contextlib.suppress(InvalidImageError):
            answers.append(function(image))
    return answers


def _some_images(data: "Source | ray.data.Dataset", columns: "ColumnNames") -> list[Any]:
    """Return 16 images, or fewer, read as in a run: of a Ray Dataset the first ones, else from all over the data."""
    from raycl.data.sources import Source, values_of

    if isinstance(data, Source):
        batches = (rows for each in _peeked(data.fragments) for rows in data.read(each))
        return [image for rows in batches for image in rows.values["image"]]
    from raycl.data.decode import columns_of

    named = columns_of(data, columns)
    tables: Any = data.limit(NUM_PEEKED).iter_batches(batch_size=NUM_PEEKED, batch_format="pyarrow")
    return [value for table in tables for value in values_of(table, named)["image"]]


def _peeked(fragments: "Sequence[Fragment]") -> "list[Fragment]":
    """Return fragments of 16 rows in all: spread over the images of a folder, or at the starts of up to four tables."""
    if fragments[0].paths:
        paths = _spread([path for each in fragments for path in each.paths], NUM_PEEKED)
        return [replace(fragments[0], paths=tuple(paths))]
    # Some formats read a file up to the wanted row.
    tables = _spread([each for each in fragments if each.start == 0], 4)
    return [replace(each, stop=min(each.stop, NUM_PEEKED // len(tables))) for each in tables]


def _spread(values: Sequence[Answer], number: int) -> list[Answer]:
    """Return ``number`` values at even distances, all if there are fewer."""
    number = min(number, len(values))
    return [values[place * len(values) // number] for place in range(number)]


_INVALID: dict[str, type] = {"data.max_invalid_fraction": float}
# The settings of the commands without a run's configuration, beside the measures. All but ``sts`` have ``data.columns``
# as well.
COMMANDS: dict[str, dict[str, type]] = {
    "embed": _INVALID,
    "pairs": _INVALID,
    "mine": {},
    "doctor": {},
    "explore": {},
}


def check_measure(measure: str) -> None:
    """Raise ``ConfigError`` for an unknown measure of ``raycl evaluate``."""
    from raycl.inference.preflight import MEASURES

    *others, last = MEASURES
    if measure not in (*others, last):
        raise ConfigError(f"unknown measure {measure!r}; choose {', '.join(others)} or {last}")


def command_settings(command: str, settings: Settings) -> dict[str, Any]:
    """Return the arguments from ``--set`` of a measure or a command of ``COMMANDS``; ``columns`` only if one is named.

    Raises ``ConfigError`` for an unknown setting or a wrong type.
    """
    from raycl.inference.preflight import MEASURES

    kinds, found, columns = COMMANDS.get(command, {}), dict[str, Any](), dict[str, Any]()
    for name, kind in MEASURES.get(command, {}).items():
        kinds = {**kinds, "data.max_invalid_fraction" if name == "max_invalid_fraction" else name: kind}
    roles = [] if command == "sts" else [f"data.columns.{name}" for name in Columns.model_fields]
    for path, value in pairs_of(settings):
        if path in kinds:
            check_type(path, value, kinds[path])
            found[path.removeprefix("data.")] = value
        elif path in roles:
            columns[path.removeprefix("data.columns.")] = _column_name(path, value)
        else:
            raise ConfigError(unknown_setting(path, [*kinds, *roles]))
    if columns:
        from raycl.data.columns import ColumnNames

        # Columns of texts replace the default image column; the doctor finds contents that are not named.
        has_texts = any(columns.get(role) for role in ("text", "query", "document"))
        is_found = command == "doctor" and "caption" not in columns
        found["columns"] = ColumnNames(**({"image": None} if has_texts or is_found else {}) | columns)
    return found


def _column_name(path: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):  # YAML reads 0 and true as other types
        raise ConfigError(
            f"{path} must be the name of a column, got {value!r}; quote a name: --set '{path}=\"NAME\"'"
        )
    return value
