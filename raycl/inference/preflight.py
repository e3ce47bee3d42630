"""Checks of commands on a trained run that need neither torch nor Ray."""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, Literal, get_args

from raycl.arguments import check_type
from raycl.config.overrides import config_from_yaml
from raycl.config.schema import DataConfig
from raycl.data.columns import ColumnNames
from raycl.data.discovery import check_exists, check_output_is_outside, check_parquet_output
from raycl.errors import ConfigError, StorageError, first_line
from raycl.gpus import are_missing, check_gpu
from raycl.lease import check_absent
from raycl.models.registry import SPEC, SideName, check_side
from raycl.records import CHECKPOINT_LIST, CHECKPOINTS, CONFIG, STATE
from raycl.storage import Place, absolute

_OF_LABELS = {"baseline": bool, "max_invalid_fraction": float}
# The options of the measures of ``raycl evaluate`` that ``--set`` takes too, with their types.
MEASURES: dict[str, dict[str, type]] = {
    "knn": {"k": int, "temperature": float, **_OF_LABELS},
    "linear": {"labels_per_class": int, "seed": int, **_OF_LABELS},
    "retrieval": {"queries": str, "documents": str, "examples": int, "baseline": bool},
    "sts": {"text": str, "baseline": bool},
}
_VALID: dict[str, tuple[Callable[[Any], bool], str]] = {
    "k": (lambda value: value >= 1, "at least 1"),
    "labels_per_class": (lambda value: value >= 1, "at least 1"),
    "examples": (lambda value: value >= 0, "at least 0"),
    "seed": (lambda value: value >= 0, "at least 0"),
    "temperature": (lambda value: value > 0, "above 0"),
    "max_invalid_fraction": (lambda value: 0 <= value <= 1, "from 0 to 1"),
}


Package = Literal["sentence_transformers", "model2vec", "torchvision", "timm", "onnx"]


def check_package(to: str | None) -> None:
    """Raise ``ConfigError`` unless encoders can be exported to the package."""
    packages = get_args(Package)
    if to not in (*packages, None):
        raise ConfigError(f"cannot export to {to!r}; there are {', '.join(packages[:-1])} and {packages[-1]}")
    missing = [each for each in ("onnx", "onnxscript") if to == "onnx" and find_spec(each) is None]
    if missing:
        raise ConfigError(
            f"the export to ONNX needs the package {missing[0]}, which is not installed; pip install 'raycl[onnx]'"
        )


def check_index(index: str | None) -> None:
    """Raise ``ConfigError`` unless an index of this kind can be written here."""
    if index not in ("faiss", None):
        raise ConfigError(f"cannot write an index of kind {index!r}; the only one is faiss")
    if index == "faiss":
        try:
            import faiss  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"the index needs the package faiss-cpu ({first_line(error)}); pip install 'raycl[faiss]'"
            ) from error


def check_options(measure: str, given: Mapping[str, object]) -> None:
    """Raise ``ConfigError`` for an option that a measure does not have, of another type or out of range."""
    known = {*MEASURES[measure], "network"} | ({"columns"} if measure != "sts" else set())
    if unknown := sorted({*given} - known):
        raise ConfigError(
            f"evaluate {measure} has no option {unknown[0]!r}; it has {', '.join(sorted(known))}"
        )
    for name, kind in {**MEASURES[measure], "columns": ColumnNames}.items():
        check_type(name, given.get(name), kind, optional=True)
    check_values(given)


def check_values(given: Mapping[str, object]) -> None:
    """Raise ``ConfigError`` for an option out of range, before a set is read; None is a default."""
    for name, (is_valid, said) in _VALID.items():
        value = given.get(name)
        if value is not None and not is_valid(value):
            raise ConfigError(f"{name} must be {said}, came {value}")


def check_mining(num_negatives: int, max_relative_score: float, output: str) -> None:
    """Raise ``ConfigError`` unless the number is positive, the fraction in (0, 1], and the output named as parquet."""
    check_type("num_negatives", num_negatives, int)
    check_type("max_relative_score", max_relative_score, float)
    if num_negatives < 1 or not 0 < max_relative_score <= 1:
        raise ConfigError(
            f"cannot mine {num_negatives} negatives below {max_relative_score:g} of the positive; give 1 or more, and a "
            "fraction up to 1"
        )
    check_parquet_output(output)


def has_encoder(run: str | os.PathLike[str]) -> bool:
    """Whether the run saved its encoder."""
    return (Place(absolute(run)) / SPEC).exists()


def has_checkpoint(run: str | os.PathLike[str]) -> bool:
    """Whether the run saved a checkpoint, or is the folder of one."""
    place = Place(absolute(run))
    return (place / CHECKPOINTS / CHECKPOINT_LIST).exists() or (place / STATE).exists()


def allowed_invalid_fraction(run: str, asked: float | None = None) -> float:
    """Return the largest fraction of invalid rows: the one ``asked`` for, else the run's.

    An encoder is also used without the run's configuration, and then the default counts.
    """
    if asked is not None:
        return asked
    place = Place(absolute(run))
    place = (place.parent.parent if (place / STATE).exists() else place) / CONFIG
    if place.exists():
        with contextlib.suppress(ConfigError):
            return config_from_yaml(place.read_text(), trained=True).data.max_invalid_fraction
    return DataConfig().max_invalid_fraction


def check_inputs(
    run: str,
    *,
    side: SideName = "query",
    data: Iterable[str | None] = (),
    output: str | None = None,
    gpu: bool = False,
    address: str | None = None,
) -> None:
    """Check that the encoder of ``run`` and the sets in ``data`` exist and ``output`` does not.

    Raises:
        ConfigError: The side is unknown, ``output`` lies in a set, or this machine, where Ray would start, has no GPU.
        StorageError: ``run`` has neither an encoder nor a checkpoint, or ``output`` exists.
        DataError: A set does not exist.
    """
    check_side(side)
    check_type("gpu", gpu, bool)
    check_type("address", address, str, optional=True)
    if gpu and are_missing(address):
        check_gpu(0)
    if not (has_encoder(run) or has_checkpoint(run)):
        raise StorageError(
            f"found no encoder at {run} (no {SPEC}, no checkpoint); give the --output of a run"
        )
    sets = [uri for uri in data if uri]
    for uri in sets:
        check_exists(uri)
    if output is not None:
        check_output_is_outside(output, sets)
        check_absent(output)
