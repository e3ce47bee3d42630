"""GPUs: what is refused for the lack of them, where possible without starting Ray."""

import os
import sys
from pathlib import Path

from raycl.errors import ConfigError

# Device files: NVIDIA's, AMD's, and either within WSL.
_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")


def check_gpus(workers: int, have: float) -> None:
    """Refuse a run with fewer GPUs than ``workers``: ``ConfigError``."""
    if have < workers:
        raise ConfigError(
            f"{workers} workers ask for a GPU each, the cluster has {have:g}; "
            "lower --workers, leave out --gpu, or set autoscaling=true if the cluster will grow"
        )


def check_gpu(have: float) -> None:
    """Refuse to embed on a GPU where there is none: ``ConfigError``."""
    if have < 1:
        raise ConfigError("--gpu asks for a GPU, the cluster has none; leave it out or join one that has")


def are_missing(address: str | None) -> bool:
    """Whether Ray will be started on this machine, and this machine has no GPU."""
    return _starts_here(address) and not _has_gpu()


def _starts_here(address: str | None) -> bool:
    ray = sys.modules.get("ray")
    is_joined = ray is not None and ray.is_initialized()
    return not is_joined and (address or os.environ.get("RAY_ADDRESS") or "local") == "local"


def _has_gpu() -> bool:
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return not is_hidden and any(any(Path("/dev").glob(name)) for name in _DEVICES)
