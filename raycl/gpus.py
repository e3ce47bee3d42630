"""GPUs, CPUs and their checks, importable without Ray, so that a run without GPUs is refused before Ray starts."""

import math
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from raycl.errors import ConfigError

# Device files of NVIDIA, AMD, and either in WSL.
_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")


def check_gpus(workers: int, have: float) -> None:
    """Raise ``ConfigError`` if there are fewer GPUs than ``workers``."""
    if have < workers:
        raise ConfigError(
            f"--gpu takes one GPU per worker: {workers} needed, but the cluster has {have:g}; "
            "lower --workers, remove --gpu, or set autoscaling=true if the cluster will grow"
        )


# Ray's accelerator types without bfloat16 hardware.
_WITHOUT_BFLOAT16 = ("K80", "P4", "P100", "T4", "V100")


def accelerators(resources: Iterable[str]) -> list[str]:
    """Return the GPU types among the names of a cluster's resources."""
    prefix = "accelerator_type:"
    return sorted(name.removeprefix(prefix) for name in resources if name.startswith(prefix))


def check_accelerator(wanted: str | None, have: Sequence[str]) -> None:
    """Raise ``ConfigError`` if no node has the required GPU type."""
    if wanted is not None and wanted not in have:
        raise ConfigError(
            f"no node of the cluster has accelerator {wanted!r}, it has {', '.join(have) or 'none'}; "
            "choose one of these, remove accelerator, or set autoscaling=true if the cluster will grow"
        )


def check_bfloat16(types: Collection[str]) -> None:
    """Raise ``ConfigError`` if none of these GPU types supports bfloat16."""
    if types and all(each in _WITHOUT_BFLOAT16 for each in types):
        raise ConfigError(
            f"precision=bfloat16 needs GPUs that support it, got {', '.join(types)}; set precision=float32, or choose "
            "newer GPUs by accelerator"
        )


def cpu_has_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16; without them it is slower than float32."""
    info = Path("/proc/cpuinfo")  # Linux only
    return info.exists() and not {"avx512_bf16", "amx_bf16"}.isdisjoint(info.read_text().split())


def available_cores() -> int:
    """Return the number of cores available to this process, within the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, _container_cores())))


def _container_cores() -> float:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return float(quota) / float(period)  # "max" means no quota
    except (OSError, ValueError):
        return math.inf


def check_gpu(have: float) -> None:
    """Raise ``ConfigError`` if the cluster has no GPU."""
    if have < 1:
        raise ConfigError("--gpu needs a GPU, but the cluster has none; remove it, or join another cluster")


def are_missing(address: str | None) -> bool:
    """Whether Ray will start on this machine, which has no GPU."""
    return starts_here(address) and not _has_gpu()


def starts_here(address: str | None) -> bool:
    """Whether Ray will start on this machine: none is joined or addressed."""
    ray = sys.modules.get("ray")
    is_joined = ray is not None and ray.is_initialized()
    return not is_joined and (address or os.environ.get("RAY_ADDRESS") or "local") == "local"


def _has_gpu() -> bool:
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return not is_hidden and any(any(Path("/dev").glob(name)) for name in _DEVICES)
