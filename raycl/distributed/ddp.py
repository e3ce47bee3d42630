"""Average gradients and buffers over workers."""

import inspect

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from raycl.distributed import average_, num_workers, shares_memory
from raycl.distributed.shared_memory import MAX_BYTES
from raycl.eager_torch import without_compiler


def average_gradients(tower: nn.Module, device: torch.device, *, leaves_unused: bool = False) -> nn.Module:
    """Wrap a tower in DDP: after backward every worker has the mean gradient of all workers.

    If the tower ``leaves_unused`` parameters, DDP looks for them in each step; it would wait for their gradients.
    """
    if num_workers() == 1:
        return tower
    # Synchronized statistics are equal on all workers. torch 2.15 renamed the argument.
    known = inspect.signature(DistributedDataParallel).parameters
    switch = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    with without_compiler():
        parallel = DistributedDataParallel(
            tower,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=leaves_unused,
            **{switch: False},  # pyright: ignore[reportArgumentType]
        )
        with parallel._inside_ddp_forward():  # its first call asks for the compiler
            pass
    if shares_memory():
        parallel.register_comm_hook(None, _average_through_memory)
    return parallel


def average_buffers(module: nn.Module) -> None:
    """Average floating-point buffers over all workers; collective."""
    average_(buffer for buffer in module.buffers() if buffer.is_floating_point())


def _average_through_memory(_: object, bucket: GradBucket) -> Future[Tensor]:
    gradients = bucket.buffer()
    average_(gradients.split(MAX_BYTES // gradients.element_size()))
    done: Future[Tensor] = Future()
    done.set_result(gradients)
    return done
