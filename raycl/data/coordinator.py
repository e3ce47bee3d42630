"""The coordinator of a run: a small actor that workers and data tasks report to and the driver reads."""

import contextlib
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, final

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycl.errors import DataError
from raycl.tracking.prometheus import Exporter, Reading

NUM_EXAMPLES = 3

_RESTART_S = 30.0  # in which Ray restarts the actor
_HEARTBEAT_S, _ANSWER_S = 1.0, 10.0


@final
@dataclass(frozen=True, kw_only=True)
class ReadStats:
    """Counts of the rows read so far: ``broken`` (invalid) and ``left_out`` (valid but skipped), by cause.

    ``num_flat`` rows are used, although all pixels of their image are equal.
    """

    num_rows: int = 0
    num_train: int = 0
    broken: Mapping[str, int] = field(default_factory=dict)
    examples: Sequence[str] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    num_flat: int = 0

    @property
    def num_broken(self) -> int:
        """The number of invalid rows, for any cause."""
        return sum(self.broken.values())

    def describe_broken(self) -> str:
        """Return the counts by cause and the first examples, in one line."""
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(self.broken.items()))
        return f"{causes}; for example {'; '.join(self.examples)}"

    def check(self, max_invalid_fraction: float, *, min_rows: int = 0) -> None:
        """Raise ``DataError`` if more than this fraction of at least ``min_rows`` rows is invalid."""
        if self.num_rows >= min_rows and self.num_broken > max_invalid_fraction * self.num_rows:
            raise DataError(
                f"{self.num_broken} of {self.num_rows} rows are invalid ({self.describe_broken()}), "
                f"more than the fraction {max_invalid_fraction:g} allowed; "
                "fix the data or raise data.max_invalid_fraction"
            )


@final
class RunCoordinator:
    """Keep the latest progress, the counts of each data fragment, notices, heartbeats and stop requests.

    A fragment that is read again (in a later epoch, or by a retried task) counts once. With ``tags``
    of a run, its rows are exported to Prometheus. The ``journal``, a file on the driver's node, restores
    counts, notices and stop requests if the process is restarted.
    """

    def __init__(self, tags: Mapping[str, str] | None = None, journal: str | None = None) -> None:
        self._fragments: dict[str, tuple[int, int, Counter[str], list[str], int]] = {}
        self._progress: dict[str, Any] = {}
        self._notices: list[str] = []
        self._left_out: dict[str, Counter[str]] = {}
        self._exporter = None if tags is None else Exporter(tags, self._readings)
        self._stop_requested = False
        self._last_heartbeat = time.monotonic()
        self._journal: TextIO | None = None
        if journal is not None:
            for name, arguments in _entries(Path(journal)):
                getattr(self, name)(*arguments)
            # An actor without the driver's file system has no journal.
            with contextlib.suppress(OSError):
                opened = Path(journal).open("a")
                opened.write("\n")  # the last line may be incomplete
                opened.flush()
                self._journal = opened

    def add_rows(
        self,
        fragment: str,
        num_rows: int,
        num_train: int,
        broken: Mapping[str, int],
        examples: list[str],
        num_flat: int = 0,
    ) -> None:
        """Count the rows of one fragment; ``num_train`` of them are valid and not held out."""
        now = (num_rows, num_train, Counter(broken), examples, num_flat)
        if self._fragments.get(fragment) != now:
            self._write("add_rows", fragment, num_rows, num_train, dict(broken), examples, num_flat)
        self._fragments[fragment] = now

    def add_left_out(self, fragment: str, left_out: Mapping[str, int]) -> None:
        """Count the skipped rows of one fragment by cause; they are valid but unused."""
        if self._left_out.get(fragment) != Counter(left_out):
            self._write("add_left_out", fragment, dict(left_out))
        self._left_out[fragment] = Counter(left_out)

    def add_progress(self, progress: Mapping[str, Any]) -> None:
        """Update the progress of training; values of the same names are replaced."""
        self._progress |= progress

    def progress(self) -> dict[str, Any]:
        """Return the latest progress."""
        return dict(self._progress)

    def add_notice(self, text: str) -> None:
        """Add a line for the user."""
        self._write("add_notice", text)
        self._notices.append(text)

    def notices(self) -> list[str]:
        """Return all notices so far."""
        return list(self._notices)

    def request_stop(self) -> None:
        """Request that the run saves a checkpoint and stops."""
        if not self._stop_requested:
            self._write("request_stop")
        self._stop_requested = True

    def heartbeat(self) -> bool:
        """Record that the workers are alive; return whether a stop was requested."""
        self._last_heartbeat = time.monotonic()
        return self._stop_requested

    def seconds_since_heartbeat(self) -> float:
        """Return the age of the last heartbeat."""
        return time.monotonic() - self._last_heartbeat

    def rows(self) -> ReadStats:
        """Return the counts over all fragments."""
        fragments = [self._fragments[name] for name in sorted(self._fragments)]
        return ReadStats(
            num_rows=sum(fragment[0] for fragment in fragments),
            num_train=sum(fragment[1] for fragment in fragments),
            broken=dict(sum((fragment[2] for fragment in fragments), Counter())),
            examples=[example for fragment in fragments for example in fragment[3]][:NUM_EXAMPLES],
            num_flat=sum(fragment[4] for fragment in fragments),
            left_out={k: v for k, v in sum(self._left_out.values(), Counter()).items() if v},
        )

    def _write(self, name: str, *arguments: Any) -> None:
        """Write a call to the journal before it is answered."""
        if self._journal is None:
            return
        try:
            self._journal.write(json.dumps([name, arguments]) + "\n")
            self._journal.flush()
        except OSError:  # a full disk must not end the run: the journal matters only after a restart
            self._journal = None

    def _readings(self) -> Iterator[Reading]:
        rows = self.rows()
        yield Reading("rows_read", rows.num_rows)
        for name, counts in (("rows_invalid", rows.broken), ("rows_skipped", rows.left_out)):
            for cause, count in counts.items():
                yield Reading(name, count, cause)


def _entries(journal: Path) -> Iterator[tuple[str, list[Any]]]:
    """Yield the calls of the journal; an incomplete last one was never answered."""
    for line in journal.read_text().splitlines() if journal.exists() else ():
        with contextlib.suppress(ValueError):
            name, arguments = json.loads(line)
            yield name, arguments


def rows_in(coordinator: Any) -> ReadStats:
    """Return the counts of the rows read so far; retries while Ray restarts a dead actor."""
    until = time.monotonic() + _RESTART_S
    while True:
        try:
            return ray.get(coordinator.rows.remote())  # pyright: ignore[reportReturnType]
        except (ActorDiedError, ActorUnavailableError):
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


@contextlib.contextmanager
def send_heartbeats(coordinator: Any, *, interval_s: float = _HEARTBEAT_S) -> Iterator[threading.Event]:
    """Send a heartbeat every ``interval_s`` seconds; yield an event that is set once a stop is requested.

    A thread sends them, since a step, an evaluation or a checkpoint may take minutes.
    """
    ended, stop_requested = threading.Event(), threading.Event()

    def send() -> None:
        while True:
            # Ray restarts a dead coordinator, which then answers the next heartbeat.
            with contextlib.suppress(RayActorError, GetTimeoutError):
                if ray.get(coordinator.heartbeat.remote(), timeout=_ANSWER_S):
                    stop_requested.set()
            if ended.wait(interval_s):
                return

    thread = threading.Thread(target=send, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield stop_requested
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def start_coordinator(tags: Mapping[str, str] | None = None) -> Iterator[Any]:
    """Start the actor, which takes no CPU, and end it afterwards; ``tags`` label its metrics."""
    # On the driver's node, which no autoscaler removes during the run.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here}
    actor: Any = ray.remote(**options)(RunCoordinator)
    with tempfile.TemporaryDirectory(prefix="raycl-coordinator-") as folder:
        coordinator = actor.remote(tags, f"{folder}/journal")
        try:
            yield coordinator
        finally:
            # Ray Data and Ray Train hold references to it until the driver ends.
            ray.kill(coordinator)
