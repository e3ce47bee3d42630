"""Fast checks before the import of torch and the start of Ray."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from raycl.config import RunConfig
from raycl.data.columns import ColumnNames
from raycl.data.sources import Source, find_source
from raycl.errors import DataError
from raycl.gpus import are_missing, check_gpus
from raycl.lease import Lease, writing
from raycl.models.registry import check_encoder_name
from raycl.storage import Place, absolute
from raycl.tracking import check_trackers
from raycl.training.resume import check_output


@final
@dataclass(frozen=True, kw_only=True)
class ValidatedRun:
    """A run whose data exist and whose output has no other writer; ``data`` is None for a Ray Dataset."""

    config: RunConfig
    output: Place
    lease: Lease
    resumed: bool
    data: str | None
    source: Source | None


@contextlib.contextmanager
def validate_run(
    config: RunConfig,
    *,
    output: str,
    resume: bool,
    data: str | None,
    own_encoder: bool = False,
    address: str | None = None,
) -> Iterator[ValidatedRun]:
    """Check names, GPUs, output and data, and hold the lease of the output in the context.

    ``own_encoder`` means that a module replaces the encoder of the configuration. Raises ``ConfigError``,
    ``DataError`` or ``StorageError``.
    """
    _check_encoder_names(config, own_encoder=own_encoder)
    if config.gpu and not config.autoscaling and are_missing(address):
        check_gpus(max(config.worker_range(stage)[0] for stage in config.stages), 0)
    check_trackers(config)
    place = Place(absolute(output))
    with writing(place) as lease:
        check_output(config, place, resume=resume)
        source = None if data is None else find_source(data, column_names(config))
        if source is not None:
            check_size(config, source.num_rows)
        yield ValidatedRun(config=config, output=place, lease=lease, resumed=resume, data=data, source=source)


def _check_encoder_names(config: RunConfig, *, own_encoder: bool) -> None:
    kind = config.data.kind
    if not own_encoder:
        check_encoder_name(config.encoder.name, is_text=kind in ("text", "pairs"))
    if kind == "image_text":
        check_encoder_name(config.text_encoder.name, is_text=True, key="text_encoder.name")


def check_size(config: RunConfig, num_rows: int) -> None:
    """Raise ``DataError`` if the batch of a stage is larger than the data."""
    for number, stage in enumerate(config.stages):
        if num_rows < stage.batch_size:
            raise DataError(
                f"a batch of {stage.batch_size} rows (stages.{number}.batch_size) is larger than the {num_rows} rows "
                "to train on; set it lower or give more data"
            )


_PAIRS = ("query", "document", "negatives", "query_id", "document_id", "negative_ids")
_ROLES = {"image": ("image",), "text": ("text",), "image_text": ("image", "caption"), "pairs": _PAIRS}


def column_names(config: RunConfig) -> ColumnNames:
    """Return the columns to read; columns of other kinds of samples are ignored."""
    named = config.data.columns.model_dump()
    unused = {role for roles in _ROLES.values() for role in roles} - set(_ROLES[config.data.kind])
    return ColumnNames(**named | dict.fromkeys(unused))
