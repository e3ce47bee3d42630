"""Faults for tests: kill Ray's processes without warning, add and remove nodes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import ray


def wait_until(condition: Callable[[], object], *, timeout_s: float = 240.0) -> None:
    """Wait until the condition holds; fail after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.02)


def kill_process(title: str | tuple[str, ...], *, timeout_s: float = 240.0) -> int:
    """Wait for a process of the session whose title starts with (one of) ``title``, SIGKILL it, and return its id."""
    found: list[int] = []
    wait_until(lambda: found.extend(processes(title)) or found, timeout_s=timeout_s)
    os.kill(found[0], signal.SIGKILL)
    return found[0]


def processes(title: str | tuple[str, ...]) -> list[int]:
    """Return the processes started by the session's raylets whose title starts with (one of) ``title``."""
    session = ray.get_runtime_context().get_session_name()
    raylets = {pid for pid, line in _processes() if "raylet" in line[:200] and session in line}
    return [pid for pid, line in _processes() if line.startswith(title) and _parent(pid) in raylets]


@contextmanager
def extra_node(num_cpus: float, **labels: str) -> Iterator["Node"]:
    """Add a node to the session's cluster: another raylet on this machine."""
    node = Node(num_cpus, labels)
    try:
        yield node
    finally:
        node.kill()
        wait_until(lambda: node.id not in alive())  # otherwise Ray could schedule the next test on it


class Node:
    """A raylet with its workers; killing it leaves no process behind."""

    def __init__(self, num_cpus: float, labels: Mapping[str, str] | None = None) -> None:
        before = alive()
        context = ray.get_runtime_context()
        command = [
            *(str(Path(sys.executable).parent / "ray"), "start", "--block"),
            *("--address", context.gcs_address, "--num-cpus", str(num_cpus)),
            *("--object-store-memory", str(100 * 2**20)),
            *("--labels", ",".join(f"{name}={value}" for name, value in (labels or {}).items())),
        ]
        # All processes of the node share a new session, which identifies them for the kill.
        self._process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(lambda: alive() - before)
        [self.id] = alive() - before

    def kill(self) -> None:
        """Kill all processes of the node without warning."""
        for pid, line in _processes():
            with suppress(ProcessLookupError, PermissionError):
                if line and self.has(pid):
                    os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait(30)

    def announce_loss(self, *, seconds: int) -> None:
        """Announce to Ray that the node will disappear, like a cloud's preemption notice."""
        drain = (
            *(str(Path(sys.executable).parent / "ray"), "drain-node", "--node-id", self.id),
            *("--address", ray.get_runtime_context().gcs_address),
            *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"),
            *("--deadline-remaining-seconds", str(seconds)),
        )
        subprocess.run(drain, check=True, capture_output=True, timeout=60)

    def has(self, pid: int) -> bool:
        """Whether the process belongs to this node."""
        return os.getsid(pid) == self._process.pid


def alive() -> set[str]:
    """Return the ids of the cluster's nodes."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _processes() -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                yield int(folder.name), line


def _parent(pid: int) -> int:
    with suppress(OSError):
        # The process name comes first, in parentheses, and may contain any character.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
