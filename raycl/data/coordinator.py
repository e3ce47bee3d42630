"""The logbook: a small actor that workers and data tasks write to and the driver reads."""

import contextlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, final

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycl.errors import DataError
from raycl.tracking.prometheus import Exporter, Reading

NUM_EXAMPLES = 3

_PATIENCE_S = 30.0


@final
@dataclass(frozen=True, kw_only=True)
class ReadStats:
    """What has been read so far; ``broken`` counts rows by cause, ``left_out`` what is sound but of no use.

    ``num_flat`` rows are used though all pixels of their image have one value.
    """

    num_rows: int = 0
    num_train: int = 0
    broken: Mapping[str, int] = field(default_factory=dict)
    examples: Sequence[str] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    num_flat: int = 0

    @property
    def num_broken(self) -> int:
        """Rows left out, whatever the cause."""
        return sum(self.broken.values())

    def describe_broken(self) -> str:
        """Return the counts by cause and the first examples, in one line."""
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(self.broken.items()))
        return f"{causes}; for example {'; '.join(self.examples)}"

    def check(self, max_bad_fraction: float, *, min_rows: int = 0) -> None:
        """Raise ``DataError`` if more than this fraction of at least ``min_rows`` rows is broken."""
        if self.num_rows >= min_rows and self.num_broken > max_bad_fraction * self.num_rows:
            raise DataError(
                f"{self.num_broken} of {self.num_rows} rows are broken ({self.describe_broken()}), "
                f"more than the fraction {max_bad_fraction:g} allowed; "
                "mend the data or raise data.max_bad_fraction"
            )


@final
class RunCoordinator:
    """Keep the latest progress and what each piece of the data held.

    A piece that is read again (an epoch later, or by a task that Ray retried) counts once. With
    ``tags``, those of a run, its rows are metrics of Prometheus. What must not be forgotten if this process
    dies is also written to the ``journal``, a file on the driver's node.
    """

    def __init__(self, tags: Mapping[str, str] | None = None, journal: str | None = None) -> None:
        self._pieces: dict[str, tuple[int, int, Counter[str], list[str], int]] = {}
        self._progress: dict[str, Any] = {}
        self._notices: list[str] = []
        self._left_out: dict[str, Counter[str]] = {}
        self._exporter = None if tags is None else Exporter(tags, self._readings)
        self._is_to_stop = False
        self._heard_at = time.monotonic()
        self._journal: TextIO | None = None
        if journal is not None:
            for name, arguments in _entries(Path(journal)):
                getattr(self, name)(*arguments)
            # Where the driver has a file system of its own, there is none.
            with contextlib.suppress(OSError):
                opened = Path(journal).open("a")
                opened.write("\n")  # the last line may have been cut
                opened.flush()
                self._journal = opened

    def add_rows(
        self,
        piece: str,
        num_rows: int,
        num_train: int,
        broken: Mapping[str, int],
        examples: list[str],
        num_flat: int = 0,
    ) -> None:
        """Note the rows of one piece; ``num_train`` of them are sound and not held out."""
        now = (num_rows, num_train, Counter(broken), examples, num_flat)
        if self._pieces.get(piece) != now:
            self._write("add_rows", piece, num_rows, num_train, dict(broken), examples, num_flat)
        self._pieces[piece] = now

    def add_left_out(self, piece: str, left_out: Mapping[str, int]) -> None:
        """Note how much of one piece is sound but of no use, by cause."""
        if self._left_out.get(piece) != Counter(left_out):
            self._write("add_left_out", piece, dict(left_out))
        self._left_out[piece] = Counter(left_out)

    def add_progress(self, progress: Mapping[str, Any]) -> None:
        """Note how far training is; what came before under the same names is replaced."""
        self._progress |= progress

    def progress(self) -> dict[str, Any]:
        """Return the latest progress."""
        return dict(self._progress)

    def add_notice(self, text: str) -> None:
        """Note something that people must see."""
        self._write("add_notice", text)
        self._notices.append(text)

    def notices(self) -> list[str]:
        """Return all notices so far."""
        return list(self._notices)

    def ask_to_stop(self) -> None:
        """Ask the run to save and end."""
        if not self._is_to_stop:
            self._write("ask_to_stop")
        self._is_to_stop = True

    def hear(self) -> bool:
        """Note that a worker is there, and answer whether the run is to save and end."""
        self._heard_at = time.monotonic()
        return self._is_to_stop

    def seconds_alone(self) -> float:
        """Return since when no worker was heard."""
        return time.monotonic() - self._heard_at

    def rows(self) -> ReadStats:
        """Return what all pieces held together."""
        pieces = [self._pieces[name] for name in sorted(self._pieces)]
        return ReadStats(
            num_rows=sum(piece[0] for piece in pieces),
            num_train=sum(piece[1] for piece in pieces),
            broken=dict(sum((piece[2] for piece in pieces), Counter())),
            examples=[example for piece in pieces for example in piece[3]][:NUM_EXAMPLES],
            num_flat=sum(piece[4] for piece in pieces),
            left_out={k: v for k, v in sum(self._left_out.values(), Counter()).items() if v},
        )

    def _write(self, name: str, *arguments: Any) -> None:
        """Write a call down, whole before it is answered."""
        if self._journal is None:
            return
        try:
            self._journal.write(json.dumps([name, arguments]) + "\n")
            self._journal.flush()
        except OSError:  # a full disk must not cost the run what only a death of this process would
            self._journal = None

    def _readings(self) -> Iterator[Reading]:
        rows = self.rows()
        yield Reading("rows_read", rows.num_rows)
        for name, counts in (("rows_broken", rows.broken), ("rows_left_out", rows.left_out)):
            for cause, count in counts.items():
                yield Reading(name, count, cause)


def _entries(journal: Path) -> Iterator[tuple[str, list[Any]]]:
    """Yield the calls that were written down; the last one may have been cut, and was not answered then."""
    for line in journal.read_text().splitlines() if journal.exists() else ():
        with contextlib.suppress(ValueError):
            name, arguments = json.loads(line)
            yield name, arguments


def rows_in(logbook: Any) -> ReadStats:
    """Ask a logbook actor what has been read so far; one that has died is waited for, it comes back."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return ray.get(logbook.rows.remote())  # pyright: ignore[reportReturnType]
        except (ActorDiedError, ActorUnavailableError):
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


@contextlib.contextmanager
def start_coordinator(tags: Mapping[str, str] | None = None) -> Iterator[Any]:
    """Start the actor, which takes no CPU, and end it afterwards; ``tags`` are those of its metrics."""
    # Beside the driver, so that no node takes it away while the run goes on.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here}
    actor: Any = ray.remote(**options)(RunCoordinator)
    with tempfile.TemporaryDirectory(prefix="raycl-logbook-") as folder:
        logbook = actor.remote(tags, f"{folder}/journal")
        try:
            yield logbook
        finally:
            # Ray would not: what Ray Data and Ray Train remember of a run holds on to it until the driver ends.
            ray.kill(logbook)
