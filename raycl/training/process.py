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

_TRIED = ((64, 64), (512, 256), (8, 64, 32))  # matrices, and several at once
_EXACT = 1e-5  # relative; float32 gives 3e-7, bfloat16 3e-3


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
    """Give torch its threads and the faster matrix products, and keep freed memory in the process.

    By default glibc returns every large block to the kernel, and each step pays for the page
    faults anew: a third of a ResNet's step on CPU.
    """
    torch.set_num_threads(num_threads)
    if _is_amd():
        multiply_by_onednn()
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        # Before 2.35, glibc takes no more than 32 MB here.
        if not mallopt(_MMAP_THRESHOLD, 2**30):
            mallopt(_MMAP_THRESHOLD, 2**25)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 64 * 2**20)


def multiply_by_onednn() -> bool:
    """Let oneDNN multiply matrices of float32 on the CPU, if it does so exactly; return whether it does.

    torch asks MKL otherwise, which runs at less than half of oneDNN's speed on AMD.
    """
    # The switch permits to round factors to bfloat16. oneDNN has a use for that only where the processor has
    # units for such matrices: so the products say whether it may stay.
    products = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before, products.fp32_precision = products.fp32_precision, "bf16"
    is_exact = all(_product_error(shape) < _EXACT for shape in _TRIED)
    if not is_exact:
        products.fp32_precision = before
    return is_exact


def _product_error(shape: tuple[int, ...]) -> float:
    """Return the relative error of a product of matrices [..., n, k] and [..., k, n]."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator) for _ in range(2))
    exact = left.double() @ right.double().mT
    return float((left @ right.mT - exact).norm() / exact.norm())


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context in which towers run: bfloat16 autocast, or nothing for float32."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
