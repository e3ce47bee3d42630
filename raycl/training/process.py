"""The setup of a worker process: threads, allocator, device, matrix products."""

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from raycl.config import RunConfig
from raycl.distributed import all_agree
from raycl.errors import ConfigError

# glibc's mallopt parameters (malloc.h).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3

_ALLOCATOR = "PYTORCH_ALLOC_CONF"
_TRIED = ((64, 64), (512, 256), (8, 64, 32))  # shapes of single and batched products
_EXACT = 1e-5  # relative; float32 gives 3e-7, bfloat16 3e-3


def environment(*, gpu: bool) -> dict[str, str]:
    """Return the environment variables that a worker process must start with."""
    # Ray runs the loop in a thread. glibc would give the thread a separate arena, which cannot keep blocks above
    # 64 MB.
    needed = {"MALLOC_ARENA_MAX": "1"}
    if gpu:
        # Batches of texts differ in shape, which would fragment GPU memory.
        needed[_ALLOCATOR] = os.environ.get(_ALLOCATOR, "expandable_segments:True")
    return needed


def prepare_process(num_threads: int) -> None:
    """Set the threads of torch, enable faster matrix products, and keep freed memory in the process.

    By default, glibc returns every large block to the kernel, and every step pays for the page faults
    again: a third of a ResNet's step on CPU.
    """
    torch.set_num_threads(num_threads)
    if _is_amd():
        multiply_by_onednn()
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        # glibc before 2.35 accepts at most 32 MB.
        if not mallopt(_MMAP_THRESHOLD, 2**30):
            mallopt(_MMAP_THRESHOLD, 2**25)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 64 * 2**20)


@contextlib.contextmanager
def prepared_process(num_threads: int) -> Iterator[None]:
    """Prepare a process that is the user's own; restore its threads and matrix products at the end."""
    products = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before, threads = products.fp32_precision, torch.get_num_threads()
    try:
        prepare_process(num_threads)
        yield
    finally:
        products.fp32_precision = before
        torch.set_num_threads(threads)


def prepare_device(config: RunConfig, device: torch.device) -> RunConfig:
    """Set up a worker's GPU; return the configuration, in float32 if ``auto`` finds a GPU without bfloat16.

    Raises ``ConfigError`` if ``precision=bfloat16`` finds such a GPU. Collective.
    """
    if device.type != "cuda":
        return config
    # All images have the same shape, so the search for the fastest kernels runs once.
    torch.backends.cudnn.benchmark = True
    # TF32 for convolutions only: the products of losses and neighbors stay exact.
    torch.backends.cudnn.allow_tf32 = config.precision != "float32"
    has_bfloat16 = all_agree(torch.cuda.is_bf16_supported(including_emulation=False))
    if has_bfloat16 or config.tower_precision == "float32":
        return config
    if config.precision == "bfloat16":
        raise ConfigError(
            f"precision=bfloat16 needs GPUs that have it, got {torch.cuda.get_device_name(device)}; "
            "set precision=float32, or ask for newer ones by accelerator"
        )
    return config.model_copy(update={"precision": "float32"})


def multiply_by_onednn() -> bool:
    """Use oneDNN for float32 matrix products on the CPU, if it is exact; return whether it is.

    The default is MKL, which reaches less than half of oneDNN's speed on AMD.
    """
    # The setting permits oneDNN to round factors to bfloat16, which it does only on processors with bfloat16
    # matrix units. Measure the products to detect these.
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
