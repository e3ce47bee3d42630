"""Collectives between workers: gather with gradient, sums, agreement, checks, a ring.

Everything also works without a process group, as a single worker of rank 0.

Every function except ``rank``, ``num_workers`` and ``shares_memory`` is collective: all workers call
it, in the same order.
"""

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from raycl.distributed.shared_memory import MAX_BYTES, SharedMemory
from raycl.distributed.step_timer import phase
from raycl.errors import RayclError

_memory: SharedMemory | None = None
# Embeddings gathered on each worker, and as much for their gradient; below it gathering is faster.
MAX_GATHERED_BYTES = 256 * 2**20
_BUCKET_BYTES = 32 * 2**20  # of tensors sent together: large enough to fill any network


def rank() -> int:
    """Return the rank of this worker; 0 for a single worker."""
    return dist.get_rank() if _connected() else 0


def num_workers() -> int:
    """Return the number of workers (the world size); 1 for a single worker."""
    return dist.get_world_size() if _connected() else 1


def gather(rows: Tensor) -> Tensor:
    """Stack the rows of all workers, in the order of their ranks, with gradient.

    The gradient of a row is the **sum** over the losses of all workers. With a loss that is the mean
    over a worker's own rows, and ``DistributedDataParallel``, which averages over workers, the
    parameters receive the gradient of the mean loss over the global batch.

    Args:
        rows: This worker's rows, [local_batch, ...]; the same shape and type on every worker
            (check it once with :func:`check_equal`; no call checks it).

    Returns:
        [num_workers * local_batch, ...]; this worker's rows begin at ``rank() * local_batch``.
    """
    return _Gather.apply(rows) if num_workers() > 1 else rows  # pyright: ignore[reportReturnType]


def gather_detached(rows: Tensor) -> Tensor:
    """Stack the rows of all workers without gradient; integers such as ids too.

    Args:
        rows: [local_batch, ...]; the same shape and type on every worker.

    Returns:
        [num_workers * local_batch, ...].
    """
    rows = rows.detach()
    if num_workers() == 1:
        return rows
    with phase("messages"):
        if memory := _memory_for(rows):
            return memory.gather(rows)
        stacked = rows.new_empty(num_workers() * rows.shape[0], *rows.shape[1:])
        dist.all_gather_into_tensor(stacked, rows.contiguous())
        return stacked


def gather_uneven(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Stack the rows of all workers in the order of ranks; workers may have different numbers of rows, or none.

    Args:
        rows: [num_rows, ...]; the gradient is the one of :func:`gather`.
        sizes: The number of rows of each worker.

    Returns:
        [sum(sizes), ...].
    """
    if num_workers() == 1 or not any(sizes):
        return rows
    most = max(sizes)
    padded = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
    parts = gather(padded).split(most)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def all_sum(value: Tensor) -> Tensor:
    """Return the elementwise sum over all workers, without gradient; ``value`` stays unchanged."""
    value = value.detach()
    return _sum_into(torch.empty_like(value, memory_format=torch.contiguous_format), value)


@final
class RingTransfer:
    """Tensors in transfer from each worker to another, ``step`` ranks on, from the last worker to the first.

    A worker that is its own receiver gets its own tensors. Computation may continue and read the tensors, but
    must not change them before the transfer has arrived.
    """

    def __init__(self, *sent: Tensor, step: int = 1) -> None:
        """Start the transfer of tensors whose shapes and types are equal on every worker (not checked)."""
        # References keep the buffers alive until they are sent.
        self._sent = tuple(each.detach().contiguous() for each in sent)
        self._received = self._sent
        self._works: list[dist.Work] = []
        if step % num_workers():
            self._received = tuple(torch.empty_like(each) for each in self._sent)
            receiver, sender = ((rank() + ranks) % num_workers() for ranks in (step, -step))
            messages = [dist.P2POp(dist.isend, each, receiver) for each in self._sent]
            messages += [dist.P2POp(dist.irecv, each, sender) for each in self._received]
            self._works = dist.batch_isend_irecv(messages)

    def arrived(self) -> tuple[Tensor, ...]:
        """Wait for the tensors of the sender, and return them without gradient."""
        with phase("messages"):
            for work in self._works:
                work.wait()
        return self._received


@final
class RowExchange:
    """Rows on their way from each worker to some of the others; collective."""

    def __init__(self, rows: Tensor, *, sent: Sequence[int], received: Sequence[int]) -> None:
        """Start to send ``rows`` [num_rows, ...], which are in the order of their receivers.

        Args:
            rows: They must not change before the rows of this worker have arrived.
            sent: The number of rows for each worker.
            received: The number of rows from each worker.
        """
        # A reference keeps the rows alive until they are sent.
        self._sent, self._work = rows.contiguous(), None
        self._received = self._sent
        if num_workers() > 1:
            self._received = rows.new_empty(sum(received), *rows.shape[1:])
            self._work = dist.all_to_all_single(
                self._received, self._sent, list(received), list(sent), async_op=True
            )

    def arrived(self) -> Tensor:
        """Wait for the rows of all senders, in the order of their ranks; without gradient."""
        if self._work is not None:
            with phase("messages"):
                self._work.wait()
        return self._received


def visit_all(visit: Callable[..., Tensor | None], *tensors: Tensor) -> Tensor | None:
    """Call ``visit`` with each worker's rank and tensors, this worker's first; the next ones travel at the same time.

    Args:
        visit: A function, so that it holds no tensors while the next but one arrive. It may return a tensor for
            the visited worker, such as the gradient of its rows; then it does so on every call and worker, and
            keeps no reference, since the tensor is changed.
        tensors: As for :class:`RingTransfer`.

    Returns:
        The sum of the tensors that all workers returned for this one, or None.
    """
    total = None
    for number in range(num_workers()):
        passing = RingTransfer(*tensors) if number < num_workers() - 1 else None
        found = visit((rank() - number) % num_workers(), *tensors)
        if found is not None:
            (arrived,) = RingTransfer(found, step=-number).arrived()
            total = arrived if total is None else total.add_(arrived)
            del arrived
        del found
        if passing is not None:
            tensors = passing.arrived()
            del passing
    return total


def exceeds_gather_limit(*rows: Tensor) -> bool:
    """Return whether these rows of all workers would take too much memory on each of them; never for one worker."""
    return num_workers() > 1 and num_workers() * sum(each.nbytes for each in rows) > MAX_GATHERED_BYTES


@torch.no_grad()
def average_(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its mean over all workers, in place, by few large messages.

    Args:
        tensors: Floating-point tensors such as gradients; number, shapes and types equal on every worker.
    """
    if num_workers() == 1:
        return
    for bucket in _buckets(list(tensors), MAX_BYTES if shares_memory() else _BUCKET_BYTES):
        flats = [each.contiguous().view(-1) for each in bucket]
        flat = flats[0] if len(bucket) == 1 else torch.cat(flats)
        parts = _sum_into(flat, flat).div_(num_workers()).split([each.numel() for each in bucket])
        for each, part in zip(bucket, parts, strict=True):
            if part.data_ptr() != each.data_ptr():
                each.copy_(part.view_as(each))


def all_agree(flag: bool) -> bool:
    """Return on every worker whether ``flag`` is true on all of them, so that all act alike."""
    return all(_gather_integers(int(flag)))


def mean_over_workers(values: Sequence[float]) -> list[float]:
    """Return the mean of each value over all workers, in float64."""
    if num_workers() == 1:
        return list(map(float, values))
    total = all_sum(torch.tensor(values, dtype=torch.float64, device=_device_of_messages()))
    return (total / num_workers()).tolist()


def check_equal(value: int, name: str) -> None:
    """Raise on every worker unless ``value`` is the same on all of them.

    Args:
        value: For example the local batch size, once before the first step.
        name: The name of the value, for the error.

    Raises:
        RayclError: The values differ; the message lists the value of each rank.
    """
    values = _gather_integers(value)
    if len(set(values)) > 1:
        came = ", ".join(f"rank {index}: {each}" for index, each in enumerate(values))
        raise RayclError(f"{name} must be the same on every worker, but differs ({came})")


@contextlib.contextmanager
def use_shared_memory() -> Iterator[bool]:
    """Send small messages between workers of one machine through shared memory; yield whether that works.

    Results are identical, and arrive sooner. Workers on several machines, on accelerators or without
    shared memory use the network.
    """
    global _memory
    _memory = _map_memory() if num_workers() > 1 and dist.get_backend() == "gloo" else None
    try:
        yield _memory is not None
    finally:
        _memory = None


def shares_memory() -> bool:
    """Return whether small messages go through shared memory."""
    return _memory is not None


def _map_memory() -> SharedMemory | None:
    name = f"raycl-{_gather_integers(secrets.randbits(62))[0]:x}"
    memory = None
    with contextlib.suppress(OSError):
        memory = SharedMemory(name, rank=rank(), num_workers=num_workers())
        memory.greet()
    # Equal names need not be the same memory: each machine and container has its own.
    everyone_maps = all_agree(memory is not None)
    everyone_met = all_agree(memory is not None and memory.met_all())
    if memory is not None:
        memory.unlink()
    return memory if everyone_maps and everyone_met else None


def _buckets(tensors: list[Tensor], max_bytes: int) -> Iterator[list[Tensor]]:
    """Group consecutive tensors of one dtype up to the limit; a larger tensor is a group of its own."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        fits = sum(each.nbytes for each in bucket) + tensor.nbytes <= max_bytes
        if bucket and not (fits and tensor.dtype == bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _sum_into(out: Tensor, value: Tensor) -> Tensor:
    """Write the sum over all workers to the contiguous ``out``, which may be ``value`` itself; return it."""
    if num_workers() == 1:
        return out.copy_(value)
    with phase("messages"):
        if memory := _memory_for(value):
            return memory.sum(value, out)
        dist.all_reduce(out.copy_(value))
        return out


def _memory_for(rows: Tensor) -> SharedMemory | None:
    return _memory if not rows.is_cuda and 0 < rows.nbytes <= MAX_BYTES else None


def _connected() -> bool:
    return dist.is_available() and dist.is_initialized()


def _gather_integers(value: int) -> list[int]:
    return gather_detached(torch.tensor([value], device=_device_of_messages())).tolist()


def _device_of_messages() -> str:
    # NCCL transfers device memory only, gloo host memory.
    return "cuda" if _connected() and dist.get_backend() == "nccl" else "cpu"


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.local_batch = rows.shape[0]
        return gather_detached(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Sum, not mean: DDP divides by the number of workers afterwards.
        if grad.is_cuda:
            own = grad.new_empty(ctx.local_batch, *grad.shape[1:])
            dist.reduce_scatter_tensor(own, grad.contiguous())
            return own
        # gloo's reduce-scatter takes three times as long as its all-reduce (1 MB, 2 workers).
        return all_sum(grad).narrow(0, rank() * ctx.local_batch, ctx.local_batch)
