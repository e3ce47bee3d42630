"""What a node is, seen from a process on it: versions, memory, and whether strangers reach its ports."""

import functools
import hashlib
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import final

PACKAGES = ("ray", "torch", "pyarrow", "raycl")


@final
@dataclass(frozen=True, kw_only=True)
class Machine:
    """Versions by package, and memory in bytes: all that the node or its container may use, and what is free."""

    versions: dict[str, str]
    memory: float
    free_memory: float


def look_around() -> Machine:
    """Look at the machine of this process."""
    memory, free = _memory()
    return Machine(versions=versions(), memory=memory, free_memory=free)


def versions() -> dict[str, str]:
    """Return the versions by package; of raycl the source's fingerprint, which a job may bring along."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["raycl"] += f" ({_fingerprint()})"
    return found


def reachable_ports(ports: Sequence[int]) -> list[int]:
    """Return those of this machine's ports that answer at its address in the network, not only on loopback."""
    address = _address_in_the_network()
    return [port for port in ports if address is not None and _answers(address, port)]


def _address_in_the_network() -> str | None:
    """Return the address that this machine would send from; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # an address of documentation, which nobody has
            address = probe.getsockname()[0]
        except OSError:
            return None
    return None if address.startswith("127.") else address


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=10.0).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True  # only a refusal shows that nobody listens there
    return True


@functools.cache
def _fingerprint() -> str:
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def _memory() -> tuple[float, float]:
    """Return all memory and what is free of it, in bytes; infinite where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf"), float("inf")
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    total, free = kib["MemTotal"] * 1024.0, kib["MemAvailable"] * 1024.0
    limit, used = _container()
    return min(total, limit), min(free, limit - used)


def _container() -> tuple[float, float]:
    """Return the limit of this container's memory and what it uses of it; infinite without one."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = float((folder / "memory.max").read_text())  # "max" where there is none
        return limit, float((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return float("inf"), 0.0
