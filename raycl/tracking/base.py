"""What trackers are given, and what they do with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final


@final
@dataclass(frozen=True, kw_only=True)
class MetricsRecord:
    """The numbers of one logged step, and the time in seconds since 1970.

    With ``goes_back`` it has none: the run went back to this step, and what came after it is void.
    """

    step: int
    time: float
    metrics: Mapping[str, float]
    goes_back: bool = False


class Tracker(Protocol):
    """A place that metrics go to; used by one thread only. Any method may raise."""

    def write(self, points: Sequence[MetricsRecord]) -> None:
        """Take in points, in order; if this raises, all of them come once more."""
        ...

    def flush(self) -> None:
        """Let others see what was taken in."""
        ...

    def close(self, *, finished: bool) -> None:
        """End; unless ``finished``, the run may go on with another tracker of the same kind."""
        ...
