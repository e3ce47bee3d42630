"""The interface of trackers, and the run ids that they store in the output."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from raycl.storage import Place


@final
@dataclass(frozen=True, kw_only=True)
class MetricsRecord:
    """The metrics of one logged step; ``time`` is in seconds since 1970.

    A record with ``is_rollback`` has no metrics: the run returned to this step, and later ones are void.
    """

    step: int
    time: float
    metrics: Mapping[str, float]
    is_rollback: bool = False


class Tracker(Protocol):
    """A destination of metrics, used by one thread. Any method may raise."""

    def write(self, records: Sequence[MetricsRecord]) -> None:
        """Store records, in order; after an error all of them are sent again."""
        ...

    def flush(self) -> None:
        """Make the stored records visible to readers."""
        ...

    def close(self, *, finished: bool) -> None:
        """Close; unless ``finished``, another tracker of the same kind may continue the run."""
        ...


def known_run(output: Place, name: str, server: str) -> str | None:
    """Return the run id that a tracker stored below ``output`` for this server, if any."""
    place = output / f"{name}.json"
    known = json.loads(place.read_text()) if place.exists() else {}
    return known.get("run") if known.get("server") == server else None


def remember_run(output: Place, name: str, server: str, run: str) -> None:
    """Store the run id for ``known_run``; raises ``StorageError``."""
    (output / f"{name}.json").write_text(json.dumps({"server": server, "run": run}) + "\n")
