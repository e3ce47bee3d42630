"""What a run can be refused for in a moment, before torch is imported and Ray is there."""

from dataclasses import dataclass
from typing import final

from raycl.config import RunConfig
from raycl.data.sources import Source, find_source
from raycl.errors import DataError
from raycl.storage import Place
from raycl.tracking import check_trackers
from raycl.training.columns import column_names
from raycl.training.resumption import prepare_output


@final
@dataclass(frozen=True, kw_only=True)
class Admission:
    """A run whose output can be written, and whose data are there; without an address they are a Ray Dataset."""

    config: RunConfig
    output: Place
    resumed: bool
    data: str | None
    source: Source | None


def admit(config: RunConfig, *, output: str, resume: bool, data: str | None) -> Admission:
    """Look at the output and at the data; raises ``ConfigError``, ``DataError`` or ``StorageError``."""
    check_trackers(config)
    place = prepare_output(config, output, resume=resume)
    source = None if data is None else find_source(data, column_names(config))
    if source is not None:
        check_size(config, source.num_rows)
    return Admission(config=config, output=place, resumed=resume, data=data, source=source)


def check_size(config: RunConfig, num_rows: int) -> None:
    """Refuse a stage whose batch is larger than all there is."""
    for number, stage in enumerate(config.stages):
        if num_rows < stage.batch_size:
            raise DataError(
                f"a batch of {stage.batch_size} rows (stages.{number}.batch_size) is larger than the {num_rows} rows "
                "to train on; set it lower or give more data"
            )
