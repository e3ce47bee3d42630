"""What a group of workers came to: the end of the run, of its stage, or of its time."""

from dataclasses import dataclass
from typing import Any, final


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
