"""What befalls a run: processes of Ray's killed with no warning, nodes that come and go."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import ray


def wait_until(is_so: Callable[[], object], *, timeout_s: float = 240.0) -> None:
    """Return once it is so; fails if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.02)


def kill_process(title: str, *, timeout_s: float = 240.0) -> int:
    """SIGKILL a process of the session whose title begins so, when there is one; return its id."""
    found: list[int] = []
    wait_until(lambda: found.extend(processes(title)) or found, timeout_s=timeout_s)
    os.kill(found[0], signal.SIGKILL)
    return found[0]


def processes(title: str) -> list[int]:
    """Return the processes that raylets of the session have started and that call themselves so."""
    session = ray.get_runtime_context().get_session_name()
    raylets = {pid for pid, line in _processes() if "raylet" in line[:200] and session in line}
    return [pid for pid, line in _processes() if line.startswith(title) and _parent(pid) in raylets]


@contextmanager
def extra_node(num_cpus: float, **labels: str) -> Iterator["Node"]:
    """Add a node to the session's cluster, a raylet of its own on this machine."""
    node = Node(num_cpus, labels)
    try:
        yield node
    finally:
        node.kill()
        wait_until(lambda: node.id not in alive())  # or what comes next would be asked of it


class Node:
    """A raylet with its workers, and what they have left when they are killed: nothing."""

    def __init__(self, num_cpus: float, labels: Mapping[str, str] | None = None) -> None:
        before = alive()
        context = ray.get_runtime_context()
        command = [
            *(str(Path(sys.executable).parent / "ray"), "start", "--block"),
            *("--address", context.gcs_address, "--num-cpus", str(num_cpus)),
            *("--object-store-memory", str(100 * 2**20)),
            *("--labels", ",".join(f"{name}={value}" for name, value in (labels or {}).items())),
        ]
        # A session of its own, which all of the node's processes are in and are killed by.
        self._process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(lambda: alive() - before)
        [self.id] = alive() - before

    def kill(self) -> None:
        """End all its processes with no warning."""
        for pid, line in _processes():
            with suppress(ProcessLookupError, PermissionError):
                if line and self.has(pid):
                    os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait(30)

    def announce_loss(self, *, seconds: int) -> None:
        """Let Ray know that the node will be taken away, as a cloud's notice would."""
        drain = (
            *(str(Path(sys.executable).parent / "ray"), "drain-node", "--node-id", self.id),
            *("--address", ray.get_runtime_context().gcs_address),
            *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"),
            *("--deadline-remaining-seconds", str(seconds)),
        )
        subprocess.run(drain, check=True, capture_output=True, timeout=60)

    def has(self, pid: int) -> bool:
        """Whether this process is one of its own."""
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
        # The name comes first, in parentheses, and may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
