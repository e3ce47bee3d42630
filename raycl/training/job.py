"""What the driver gives a group of workers, and what the group returns."""

from dataclasses import dataclass
from typing import Any, final

import ray
from torch import nn

from raycl.config import RunConfig
from raycl.data.columns import ColumnNames
from raycl.data.split import Holdout
from raycl.data.streaming import StreamingSampler
from raycl.lease import Lease
from raycl.negatives.bank import Bank
from raycl.storage import Place
from raycl.tokenization import Vocabulary
from raycl.training import build
from raycl.training.modality import Modality


@final
@dataclass(frozen=True, kw_only=True)
class Job:
    """One run as its workers see it.

    ``blocks`` hold all decoded rows, or with a ``stream`` only those of the periodic judge.
    ``columns`` are those that were read, and ``vocabulary`` is that of texts. ``workers`` is the least and
    the greatest number that were asked for. ``bank`` is the actors' that hold the store of negatives.
    ``sample_id`` holds the ids of the ``num_samples`` that a memory bank has slots for.
    """

    config: RunConfig
    output: Place
    blocks: tuple[ray.ObjectRef, ...]
    stream: StreamingSampler | None
    num_train: int
    holdout: Holdout
    logbook: Any
    judged: bool
    columns: ColumnNames
    workers: tuple[int, int] = (1, 1)
    vocabulary: Vocabulary | None = None
    network: nn.Module | None = None
    bank: Bank | None = None
    sample_id: ray.ObjectRef | None = None
    num_samples: int | None = None
    lease: Lease | None = None

    def check_lease(self) -> None:
        """Raise ``RunError`` if another process has taken over the output."""
        if self.lease is not None:
            self.lease.check()

    def modality(self) -> Modality:
        """Return what the samples are."""
        return build.modality(self.config, self.vocabulary)


@final
@dataclass(frozen=True)
class Finished:
    """The run is over; ``metrics`` are its last ones, with ``step``, ``samples``, ``epoch`` and ``seconds``."""

    metrics: dict[str, Any]


@final
@dataclass(frozen=True)
class ResizeRequested:
    """The next stage asks for another number of workers, at least and at most."""

    least: int
    most: int


@final
@dataclass(frozen=True)
class Stopped:
    """Somebody asked the run to stop; it was saved at this step."""

    step: int


Outcome = Finished | ResizeRequested | Stopped
