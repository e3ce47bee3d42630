"""The machine that a number was measured on."""

import os
import platform
from pathlib import Path
from typing import Any

import torch


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, accelerator and versions as plain values, with the load of the moment."""
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
