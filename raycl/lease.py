"""One writer per output: a lease stored in the output, on any storage and without locks.

A process writes a claim, a small file, and then lists all claims. Since each process writes before it
lists, at least one of two concurrent processes finds the other. A process withdraws its claim if another
process is already writing, or if another claim precedes its own by name. It waits for other claims to be
withdrawn. A claim is dead if its process has ended on this machine, or if it has not been renewed for a
minute by the clock of the storage. The successor removes dead claims. A suspended process that resumes
finds its claim missing, since it checks the claim before each write.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self, final

from raycl.errors import ConfigError, RunError, StorageError
from raycl.provenance import this_command
from raycl.records import CONFIG
from raycl.storage import Place, absolute, is_in_copy_of_job

RENEW_S = 15.0
DEAD_S = 60.0  # since the last renewal, by the clock of the storage
WATCH_S = 2 * RENEW_S  # at least: a living writer renews late after an outage of the storage
_CLAIM = ".writer-"
# Unlike time.monotonic, it counts the time in which the machine sleeps.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


@final
@dataclass(frozen=True, kw_only=True)
class Writer:
    """The process that wrote a claim, as described in the claim."""

    host: str
    pid: int
    started: str | None  # the start time, since process ids are reused; None if hidden, as on macOS
    machine: str | None  # the boot and container that define process ids; None outside Linux
    command: str
    since: str
    is_writing: bool = False  # otherwise it waits for other claims

    @classmethod
    def here(cls) -> Self:
        """Describe this process."""
        started = None
        with contextlib.suppress(PermissionError):  # macOS has no /proc
            started = _started(os.getpid())
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            started=started,
            machine=_machine(),
            command=this_command(),
            since=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} ({self.command})"

    def is_alive(self) -> bool | None:
        """Whether the process is alive; None if this machine cannot determine it."""
        if self.started is None or (self.host, self.machine) != (socket.gethostname(), _machine()):
            return None
        with contextlib.suppress(PermissionError):  # a process of another user may be hidden in /proc
            return _started(self.pid) == self.started
        return None


_UNREADABLE = Writer(
    host="an unknown machine", pid=0, started=None, machine=None, command="unknown", since="?"
)


@final
@dataclass(frozen=True)
class Lease:
    """The right of one process to write to an output; its workers hold copies."""

    output: Place
    folder: Place  # holds the claims
    prefix: str
    name: str
    writer: Writer

    @property
    def _claim(self) -> Place:
        return self.folder / self.name

    def check(self) -> None:
        """Raise ``RunError`` if another process has taken over; call it before each write."""
        if not self._claim.exists():
            claims = self._claims()
            is_seen = claims or (self.output / CONFIG).exists()  # written before the workers start
            if self.folder.is_local and not is_seen and self.writer.host != socket.gethostname():
                raise RunError(
                    f"this node, {socket.gethostname()}, does not see the files that {self.writer.host} wrote to {self.output}; "
                    "give a folder that all nodes share, or s3://BUCKET/PREFIX, as --output"
                )
            others = ", ".join(str(self._writer(name)) for name in claims) or "no process"
            raise RunError(
                f"this process lost its lease on {self.output}: its claim was removed, as after a minute without "
                f"renewal, and the writer is now {others}; repeat the command once no other process writes there"
            )

    def renew(self) -> None:
        """Renew the claim, to show that this process is alive; raises as ``check`` does."""
        began = time.clock_gettime(_CLOCK)
        self.check()
        self._put(is_writing=True)
        # A successor may have removed the claim before this write restored it.
        if time.clock_gettime(_CLOCK) - began > RENEW_S and len(self._claims()) > 1:
            self._claim.delete()
            self.check()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Acquire the lease, renew it within the context, and release it; raises as ``writing`` does."""
        is_new = self.folder.is_local and not self.folder.exists()
        ended = threading.Event()
        renewing = threading.Thread(target=self._renew_until, args=(ended,), name="lease", daemon=True)
        try:
            self._put(is_writing=False)
            self._acquire()
            renewing.start()
            yield
        finally:
            ended.set()
            if renewing.ident is not None:
                renewing.join(RENEW_S)
            if not renewing.is_alive():  # otherwise it might restore the claim, which then expires
                with contextlib.suppress(StorageError):
                    self._claim.delete()
            if is_new:  # a rejected run leaves no empty folder
                with contextlib.suppress(OSError):
                    Path(self.folder.resolve()[1]).rmdir()

    def _acquire(self) -> None:
        others = [name for name in self._claims() if name != self.name]
        for name in others:
            if (rival := self._await(name)) is not None:
                raise ConfigError(
                    f"{rival} has been writing to {self.output} since {rival.since}; stop it and repeat the "
                    "command to take over, or give another --output"
                )
        for name in others:
            with contextlib.suppress(StorageError):
                (self.folder / name).delete()
        self.check()
        self._put(is_writing=True)

    def _await(self, name: str) -> Writer | None:
        """Wait until a claim is withdrawn or dead; return its writer instead if it is alive and precedes this one."""
        seen, seen_at, put_at = -1.0, 0.0, time.monotonic()
        is_renewed = is_announced = False
        while True:
            claims = self._claims()
            writer = self._writer(name) if name in claims else None
            if writer is None or (lives := writer.is_alive()) is False:
                return None
            if claims[name] != seen:
                is_renewed = seen >= 0
                seen, seen_at = claims[name], time.monotonic()
            age_s = claims.get(self.name, 0.0) - seen
            if age_s > DEAD_S and time.monotonic() - seen_at > WATCH_S:
                return None
            lives = is_renewed or (lives and age_s < DEAD_S)
            if lives and (writer.is_writing or name < self.name):
                return writer
            if not (lives or is_announced):
                is_announced = True
                print(f"waiting: {writer} may be writing to {self.output}", file=sys.stderr, flush=True)
            time.sleep(min(0.5, RENEW_S / 4))
            if time.monotonic() - put_at > RENEW_S:
                put_at = time.monotonic()
                self.check()
                self._put(is_writing=False)

    def _put(self, *, is_writing: bool) -> None:
        claim = json.dumps(asdict(replace(self.writer, is_writing=is_writing)))
        try:
            self._claim.write_text(claim)
        except StorageError:  # a process that releases its lease may have just removed the folder
            self._claim.write_text(claim)

    def _claims(self) -> dict[str, float]:
        written = self.folder.written_at()
        return {name: at for name, at in written.items() if name.startswith(self.prefix)}

    def _writer(self, name: str) -> Writer | None:
        """Return the writer of a claim; None if it has just been withdrawn."""
        return _read_writer(self.folder / name)

    def _renew_until(self, ended: threading.Event) -> None:
        while not ended.wait(RENEW_S):
            with contextlib.suppress(Exception):  # the next write reports the error
                self.renew()


@contextlib.contextmanager
def writing(output: Place, *, is_file: bool = False) -> Iterator[Lease]:
    """Hold the lease of a folder or file within the context.

    Raises:
        ConfigError: Another process is writing there.
        StorageError: The output is not writable.
    """
    folder, prefix = (output.parent, f".{output.name}{_CLAIM}") if is_file else (output, _CLAIM)
    lease = Lease(output, folder, prefix, f"{prefix}{uuid.uuid4().hex}", Writer.here())
    with lease.taken():
        yield lease


@contextlib.contextmanager
def writing_new(output: str, *, is_file: bool = False) -> Iterator[Place]:
    """Hold the lease of a new output; a failure removes the output.

    Raises as ``writing`` and ``check_absent`` do, and ``RunError`` if another process took over.
    """
    place = Place(absolute(output))
    check_absent(output)
    with writing(place, is_file=is_file) as lease:
        if place.exists() and (is_file or not _is_empty(place)):
            raise _existing(place)
        try:
            yield place
        except (Exception, KeyboardInterrupt, SystemExit):
            with contextlib.suppress(RunError, StorageError):  # report the original error
                lease.check()
                place.remove()
            raise
        lease.check()


def is_being_written(output: Place) -> bool:
    """Whether a process writes to a folder; a claim from another machine counts for a minute after its renewal.

    The minute is by the clock of this machine, which writes nothing.
    """
    for name, renewed_at in output.written_at().items():
        writer = _read_writer(output / name) if name.startswith(_CLAIM) else None
        if writer is not None and writer.is_writing:
            is_alive = writer.is_alive()
            if is_alive or (is_alive is None and time.time() - renewed_at < DEAD_S):
                return True
    return False


def is_claim(name: str) -> bool:
    """Whether a file is a claim on the folder, or a partial claim."""
    return name.lstrip(".").startswith(_CLAIM[1:])


def check_is_kept(output: Place) -> None:
    """Raise ``ConfigError`` if Ray would delete the output after the job."""
    if output.is_local and is_in_copy_of_job(output.uri):
        raise ConfigError(
            f"{output} lies in Ray's copy of the submitted folder, which Ray deletes after the job; give an absolute path "
            "as --output, in a folder that all nodes share, or s3://BUCKET/PREFIX"
        )


def check_absent(output: str) -> None:
    """Raise ``StorageError`` if the output exists, unless it is an empty folder or has a writer."""
    place = Place(absolute(output))
    if place.exists() and not (
        place.is_folder() and (_is_empty(place) or any(map(is_claim, place.written_at())))
    ):
        raise _existing(place)


def _read_writer(claim: Place) -> Writer | None:
    """Return the writer of a claim; None if it has just been withdrawn."""
    try:
        return Writer(**json.loads(claim.read_text()))
    except (StorageError, ValueError, TypeError):
        return _UNREADABLE if claim.exists() else None


def _existing(place: Place) -> StorageError:
    return StorageError(f"{place} exists already; give another --output or remove it")


def _is_empty(folder: Place) -> bool:
    return all(map(is_claim, folder.written_at()))


def _machine() -> str | None:
    """Return an identifier of the boot and the process id namespace of this process."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return None


def _started(pid: int) -> str | None:
    """Return the start time of a process in ticks since boot, or None if it has ended.

    Raises ``PermissionError`` if the process is hidden.
    """
    with contextlib.suppress(OSError):
        fields = _fields(f"/proc/{pid}/stat")
        # A killed process may still write after its main thread became a zombie.
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return fields[19] if any(_state(task) not in ("Z", "X") for task in tasks) else None
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        raise PermissionError(f"process {pid} is hidden")
    return None


def _state(task: Path) -> str:
    """Return the state of a thread, or X if it has ended."""
    with contextlib.suppress(OSError):
        return _fields(f"{task}/stat")[0]
    return "X"


def _fields(stat: str) -> list[str]:
    """Return the fields after the process name, which may contain any character; the first is the state."""
    return Path(stat).read_text().rpartition(")")[2].split()
