"""What the benchmarks of losses share: how a number is taken, and on which machine."""

import os
import platform
import statistics
from pathlib import Path
from typing import Any

import torch


def read_status(field: str) -> float:
    """Return a field of /proc/self/status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(field))
    return int(line.split()[1]) / 1024


def summarize(numbers: list[float]) -> dict[str, float]:
    """Return median, least and most."""
    return {"median": statistics.median(numbers), "min": min(numbers), "max": max(numbers)}


def describe_machine() -> dict[str, Any]:
    """Say what the numbers were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0].split(":")[1].strip() if models else platform.processor(),
        "num_cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
    }
