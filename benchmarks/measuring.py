"""What the benchmarks of losses share: how a number is taken, and on which machine."""

import statistics
from pathlib import Path

from raycl.reproduction.machine import describe_machine

__all__ = ["describe_machine", "read_status", "summarize"]


def read_status(field: str) -> float:
    """Return a field of /proc/self/status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(field))
    return int(line.split()[1]) / 1024


def summarize(numbers: list[float]) -> dict[str, float]:
    """Return median, least and most."""
    return {"median": statistics.median(numbers), "min": min(numbers), "max": max(numbers)}
