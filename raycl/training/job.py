"""What the driver hands to every worker."""

from dataclasses import dataclass
from typing import Any, final

import ray
from torch import nn

from raycl.config import RunConfig
from raycl.data.holdout import Holdout
from raycl.data.stream import Stream
from raycl.storage import Place


@final
@dataclass(frozen=True, kw_only=True)
class Job:
    """One run as its workers see it.

    ``blocks`` hold all decoded rows, or with a ``stream`` only those of the periodic judge.
    """

    config: RunConfig
    output: Place
    blocks: tuple[ray.ObjectRef, ...]
    stream: Stream | None
    num_train: int
    holdout: Holdout
    logbook: Any
    judged: bool
    network: nn.Module | None = None
