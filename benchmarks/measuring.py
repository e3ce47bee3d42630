"""Measurements that the benchmarks share: summaries, memory of the process, the machine."""

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
    """Return median, minimum and maximum."""
    return {"median": statistics.median(numbers), "min": min(numbers), "max": max(numbers)}


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, accelerator, versions and the current load as plain values."""
    return {
        "cpu": _processor(),
        "num_cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
    }


def _processor() -> str:
    listed = Path("/proc/cpuinfo")  # Linux only
    lines = listed.read_text().splitlines() if listed.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()
