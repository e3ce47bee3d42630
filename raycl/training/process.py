"""How a worker's process is set up: threads, allocator, device, matrix products."""

import contextlib
import ctypes
import math
import os
import platform
from pathlib import Path

import torch

# glibc's mallopt parameters (malloc.h).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3

# What a worker's process must be started with. Ray runs the loop in a thread, to which glibc would
# give an arena of its own, and such an arena cannot keep a block above 64 MB.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}


def available_cores() -> int:
    """Return how many cores this process may run on, within the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, _container_cores())))


def _container_cores() -> float:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return float(quota) / float(period)  # "max" where there is none
    except (OSError, ValueError):
        return math.inf


def prepare_process(num_threads: int) -> None:
    """Give torch its threads and keep freed memory in the process.

    By default glibc returns every large block to the kernel, and each step pays for the page
    faults anew: a third of a ResNet's step on CPU.
    """
    torch.set_num_threads(num_threads)
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        # Before 2.35, glibc takes no more than 32 MB here.
        if not mallopt(_MMAP_THRESHOLD, 2**30):
            mallopt(_MMAP_THRESHOLD, 2**25)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 64 * 2**20)


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context in which towers run: bfloat16 autocast, or nothing for float32."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
