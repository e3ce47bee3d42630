"""One writer for each output: a lease in the output itself, on any storage and without locks.

A process puts a claim, a small file, and then lists all claims. It withdraws if it finds another living
one. Each process puts before it lists, so of two that start together at least one finds the other. A
claim is dead when its process has ended on this machine, or when it was not renewed for a minute by the
clock of the storage. The successor removes dead claims. A process that was only suspended finds its claim
missing when it wakes up, since it checks the claim before each write.
"""

import contextlib
import json
import os
import random
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self, final

from raycl.commands import this_command
from raycl.errors import ConfigError, RunError, StorageError
from raycl.storage import Place, absolute

RENEW_S = 15.0
DEAD_S = 60.0  # since the last renewal, by the clock of the storage
WATCH_S = 2 * RENEW_S  # at least: a living writer renews late after an outage of the storage
_CLAIM = ".writer-"
_TRIES = 4  # two processes that start together may both withdraw; a writer is still there at the last try


@final
@dataclass(frozen=True, kw_only=True)
class Writer:
    """The process behind a claim, as its claim describes it."""

    host: str
    pid: int
    started: str | None  # the start time: process ids are used again
    machine: str | None  # the boot and container that share process ids; unknown outside Linux
    command: str
    since: str

    @classmethod
    def here(cls) -> Self:
        """Describe this process."""
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            started=_started(os.getpid()),
            machine=_machine(),
            command=this_command(),
            since=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} ({self.command})"

    def is_gone(self) -> bool | None:
        """Whether the process has ended; None if it runs on another machine."""
        if self.machine is None or self.machine != _machine():
            return None
        return self.started is None or _started(self.pid) != self.started


@final
@dataclass(frozen=True)
class Lease:
    """The right of one process to write to an output; its workers hold copies."""

    folder: Place
    prefix: str
    name: str
    writer: Writer

    @property
    def _claim(self) -> Place:
        return self.folder / self.name

    def check(self) -> None:
        """Raise ``RunError`` if another process has taken over; call it before each write."""
        if not self._claim.exists():
            others = ", ".join(str(self._writer(name)) for name in self._claims()) or "no process"
            raise RunError(
                f"this process lost its lease on {self.folder} after it was silent for a minute (the writer is now "
                f"{others}); it writes nothing more; repeat the command with --resume once no process writes there"
            )

    def renew(self) -> None:
        """Show other processes that this one lives; raises as ``check`` does."""
        self.check()
        self._put()

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Put the claim, renew it within, and withdraw it."""
        is_new = self.folder.is_local and not self.folder.exists()
        self._put()
        ended = threading.Event()
        renewing = threading.Thread(target=self._renew_until, args=(ended,), name="lease", daemon=True)
        renewing.start()
        try:
            yield
        finally:
            ended.set()
            renewing.join()  # or it might put the claim back
            with contextlib.suppress(StorageError):
                self._claim.delete()
                if is_new:  # a refused run leaves no folder behind
                    with contextlib.suppress(OSError):
                        Path(self.folder.resolve()[1]).rmdir()

    def _put(self) -> None:
        self._claim.write_text(json.dumps(asdict(self.writer)))

    def rival(self) -> Writer | None:
        """Return a living writer, or None after the claims of dead ones are removed."""
        claims = self._claims()
        others = [name for name in claims if name != self.name]
        for name in others:
            writer = self._writer(name)
            if writer is None:
                continue
            gone = writer.is_gone()
            if gone is None:
                gone = not self._is_renewed(name, claims[name], now=claims.get(self.name, 0.0))
            if not gone:
                return writer
        for name in others:
            (self.folder / name).delete()
        self.check()
        return None

    def _is_renewed(self, name: str, seen: float, *, now: float) -> bool:
        """Watch a claim until it is renewed, or is dead."""
        wait_s = max(WATCH_S, DEAD_S - (now - seen))
        line = f"waiting up to {wait_s:.0f} s: {self._writer(name)} may be writing to {self.folder}"
        print(line, file=sys.stderr, flush=True)
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            time.sleep(min(1.0, RENEW_S / 4))
            at = self._claims().get(name)
            if at != seen:
                return at is not None
        return False

    def _claims(self) -> dict[str, float]:
        written = self.folder.written_at()
        return {name: at for name, at in written.items() if name.startswith(self.prefix)}

    def _writer(self, name: str) -> Writer | None:
        """Return the writer behind a claim; None if it has just been withdrawn."""
        try:
            return Writer(**json.loads((self.folder / name).read_text()))
        except StorageError:
            return None

    def _renew_until(self, ended: threading.Event) -> None:
        while not ended.wait(RENEW_S):
            with contextlib.suppress(StorageError, RunError):  # the next write reports it
                self.renew()


@contextlib.contextmanager
def writing(output: Place, *, is_file: bool = False) -> Iterator[Lease]:
    """Be the only writer of a folder, or of a file, within.

    Raises:
        ConfigError: Another process is writing there.
        StorageError: Nothing can be written there.
    """
    folder, prefix = (output.beside(""), f".{output.name}{_CLAIM}") if is_file else (output, _CLAIM)
    rival = None
    for _ in range(_TRIES):
        lease = Lease(folder, prefix, f"{prefix}{uuid.uuid4().hex}", Writer.here())
        with lease.claimed():
            rival = lease.rival()
            if rival is None:
                yield lease
                return
        time.sleep(random.uniform(0.05, 0.3))
    if rival is not None:
        raise ConfigError(
            f"{rival} has been writing to {output} since {rival.since}; stop it and repeat the command to take "
            "over, or give another --output"
        )


@contextlib.contextmanager
def writing_new(output: str, *, is_file: bool = False) -> Iterator[Place]:
    """Be the only writer of an output that does not exist yet; a failure removes it.

    Raises as ``writing`` does, ``StorageError`` if the output exists, and ``RunError`` if another process
    took over.
    """
    place = Place(absolute(output))
    with writing(place, is_file=is_file) as lease:
        if place.is_taken():
            raise StorageError(f"{output} exists already; give another --output or remove it")
        try:
            yield place
        except Exception:
            with contextlib.suppress(RunError):
                lease.check()
                place.remove()
            raise
        lease.check()


def _machine() -> str | None:
    """Return a name for the boot and the container whose process ids this process sees."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return None


def _started(pid: int) -> str | None:
    """Return when a process started, in ticks since the boot; None if it has ended."""
    with contextlib.suppress(OSError):
        fields = _fields(f"/proc/{pid}/stat")
        # A killed process may still write while its first thread is a zombie.
        if any(
            _fields(f"/proc/{pid}/task/{task}/stat")[0] not in "ZX"
            for task in os.listdir(f"/proc/{pid}/task")
        ):
            return fields[19]
    return None


def _fields(stat: str) -> list[str]:
    """Return what follows the name, which may hold anything: the state first."""
    return Path(stat).read_text().rpartition(")")[2].split()
