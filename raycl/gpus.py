"""Checks of GPUs, importable without Ray: a run that lacks them is refused before Ray starts."""

import os
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from raycl.errors import ConfigError

# Device files: NVIDIA's, AMD's, and either within WSL.
_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")


def check_gpus(workers: int, have: float) -> None:
    """Raise ``ConfigError`` if there are fewer GPUs than ``workers``."""
    if have < workers:
        raise ConfigError(
            f"{workers} workers ask for a GPU each, the cluster has {have:g}; "
            "lower --workers, leave out --gpu, or set autoscaling=true if the cluster will grow"
        )


# Ray's accelerator types without units for bfloat16.
_WITHOUT_BFLOAT16 = ("K80", "P4", "P100", "T4", "V100")


def accelerators(resources: Iterable[str]) -> list[str]:
    """Return the types of GPUs among the names of a cluster's resources."""
    prefix = "accelerator_type:"
    return sorted(name.removeprefix(prefix) for name in resources if name.startswith(prefix))


def check_accelerator(wanted: str | None, have: Sequence[str]) -> None:
    """Raise ``ConfigError`` if no node has the wanted type of GPU."""
    if wanted is not None and wanted not in have:
        raise ConfigError(
            f"no node of the cluster has the accelerator {wanted!r}, it has {', '.join(have) or 'none'}; "
            "set accelerator to one of these, leave it out, or set autoscaling=true if the cluster will grow"
        )


def check_bfloat16(types: Collection[str]) -> None:
    """Raise ``ConfigError`` if none of these types of GPUs has bfloat16."""
    if types and all(each in _WITHOUT_BFLOAT16 for each in types):
        raise ConfigError(
            f"precision=bfloat16 needs GPUs that have it, came {', '.join(types)}; set precision=float32, or ask for "
            "newer ones by accelerator"
        )


def check_gpu(have: float) -> None:
    """Raise ``ConfigError`` if there is no GPU to embed on."""
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
