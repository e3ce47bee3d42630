"""The coordinator of a run: a small actor that workers and data tasks report to and the driver reads."""

import contextlib
import gzip
import json
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, final

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from raycl.data.read_stats import ReadStats
from raycl.ray_runtime import helper_actor, kill_actors
from raycl.tracking.prometheus import Exporter, Reading

if TYPE_CHECKING:
    from raycl.storage import Place

_RESTART_S = 30.0  # in which Ray restarts the actor
_HEARTBEAT_S, _ANSWER_S = 1.0, 10.0


@final
class RunCoordinator:
    """Keep the latest progress, the counts of each data fragment, notices, heartbeats and stop requests.

    A fragment that is read again (in a later epoch, or by a retried task) counts once. With ``tags``
    of a run, its rows are exported to Prometheus. The ``journal``, a file on the driver's node, restores
    counts, notices and stop requests if the process is restarted.
    """

    def __init__(self, tags: Mapping[str, str] | None = None, journal: str | None = None) -> None:
        self._fragments: dict[str, ReadStats] = {}
        self._totals: dict[tuple[str, str | None], ReadStats] = {}  # by prefixes, until a count changes
        self._is_saved = True  # whether the output has all counts
        self._progress: dict[str, Any] = {}
        self._notices: list[str] = []
        self._exporter = None if tags is None else Exporter(tags, self._readings)
        self._stop_requested = False
        self._last_heartbeat = time.monotonic()
        self._standby_nodes: set[str] = set()
        self._journal: TextIO | None = None
        if journal is not None:
            self._restore(Path(journal))
            # An actor without the driver's file system has no journal.
            with contextlib.suppress(OSError):
                opened = Path(journal).open("a")
                opened.write("\n")  # the last line may be incomplete
                opened.flush()
                self._journal = opened

    def add_rows(self, fragment: str, stats: ReadStats) -> None:
        """Count the rows of one fragment."""
        if self._fragments.get(fragment) == stats:
            return
        self._write("add_rows", fragment, vars(stats))
        self._fragments[fragment] = stats
        self._totals, self._is_saved = {}, False

    def add_progress(self, progress: Mapping[str, Any]) -> None:
        """Update the progress of training; values of the same names are replaced."""
        self._progress |= progress

    def progress(self) -> dict[str, Any]:
        """Return the latest progress."""
        return dict(self._progress)

    def add_notice(self, text: str, *, once: bool = False) -> None:
        """Add a line for the user; ``once``: unless it was added before, as by an earlier group of workers."""
        if once and text in self._notices:
            return
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

    def add_standby_node(self, node: str) -> None:
        """Record that this node has processes that replace lost ones, or was asked for them by its own worker."""
        if node not in self._standby_nodes:
            self._write("add_standby_node", node)
        self._standby_nodes.add(node)

    def nodes_without_standby(self, nodes: Sequence[str], most: int) -> list[str]:
        """Return unrecorded nodes, so many that at most ``most`` nodes will be recorded."""
        known = self._standby_nodes.intersection(nodes)
        return [node for node in nodes if node not in known][: max(0, most - len(known))]

    def rows(self, prefix: str = "", excluded: str | None = None) -> ReadStats:
        """Return the counts over all fragments whose names begin with ``prefix``, and not with ``excluded``."""
        key = prefix, excluded
        if key not in self._totals:
            self._totals[key] = total = ReadStats()
            for fragment, stats in sorted(self._fragments.items(), key=itemgetter(0)):
                if fragment.startswith(prefix) and not (excluded and fragment.startswith(excluded)):
                    total.merge(stats)
        return self._totals[key]

    def num_train(self) -> dict[str, int]:
        """Return the number of training rows of each fragment."""
        return {fragment: stats.num_train for fragment, stats in self._fragments.items()}

    def fingerprints(self) -> dict[int, int]:
        """Return the fingerprints of the fragments that have one, by the first id of each."""
        known = {name: stats.fingerprint for name, stats in self._fragments.items() if stats.fingerprint}
        return {int(name.rpartition(":")[2]): value for name, value in known.items()}

    def save_rows(self, file: "Place") -> None:
        """Write the counts of all fragments to a file of the run's output, unless it has them."""
        if not self._is_saved:
            counts = json.dumps({fragment: vars(stats) for fragment, stats in self._fragments.items()})
            file.write_bytes(gzip.compress(counts.encode(), compresslevel=1))
            self._is_saved = True

    def restore_rows(self, file: "Place", uri: str | None = None) -> None:
        """Add the counts that an earlier process of this run has saved of all fragments, or of those below ``uri``."""
        if not file.exists():
            return
        content = file.read_bytes()
        try:
            saved = json.loads(gzip.decompress(content))
        except (OSError, EOFError, ValueError, zlib.error):
            self.add_notice(f"{file} is damaged: a stream is read from the first row of its epoch")
            return
        for fragment, counts in saved.items():
            if uri is None or fragment.startswith(f"{uri}:"):  # a copy at another address is counted again
                self.add_rows(fragment, _stats_of(counts))

    def _restore(self, journal: Path) -> None:
        """Repeat the calls of the journal; an incomplete last one was never answered."""
        for line in journal.read_text().splitlines() if journal.exists() else ():
            with contextlib.suppress(ValueError):
                name, arguments = json.loads(line)
                if name == "add_rows":
                    fragment, counts = arguments
                    arguments = [fragment, _stats_of(counts)]
                getattr(self, name)(*arguments)

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
        for name, counts in (("rows_invalid", rows.invalid), ("rows_skipped", rows.skipped)):
            for cause, count in counts.items():
                yield Reading(name, count, cause)


def _stats_of(counts: Mapping[str, Any]) -> ReadStats:
    """Return the counts of a fragment from their JSON object."""
    counters = {cause: Counter(counts[cause]) for cause in ("invalid", "skipped")}
    return ReadStats(**{**counts, **counters})


def rows_in(coordinator: Any, prefix: str = "", excluded: str | None = None) -> ReadStats:
    """Return the counts of ``RunCoordinator.rows`` so far; retries while Ray restarts a dead actor."""
    if isinstance(coordinator, RunCoordinator):
        return coordinator.rows(prefix, excluded)
    until = time.monotonic() + _RESTART_S
    while True:
        try:
            return ray.get(coordinator.rows.remote(prefix, excluded))  # pyright: ignore[reportReturnType]
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
            with contextlib.suppress(RayError):
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
    with tempfile.TemporaryDirectory(prefix="raycl-coordinator-") as folder:
        coordinator = helper_actor(RunCoordinator, max_restarts=-1).remote(tags, f"{folder}/journal")
        try:
            yield coordinator
        finally:
            # Ray Data and Ray Train hold references to it until the driver ends.
            kill_actors(coordinator)
