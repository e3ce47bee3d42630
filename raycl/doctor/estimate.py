"""Estimates of the memory of processes, and the memory of nodes that they are compared with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from raycl.augment.images import DRAWN_PIXELS
from raycl.config import RunConfig
from raycl.display import format_bytes
from raycl.doctor.checks import AUTOSCALING
from raycl.doctor.nodes import Node, NodeAnswer, NodeInfo, ask_nodes, gpu_memory
from raycl.doctor.result import CheckResult, passed, passed_if

# Allocators keep freed memory: real workers took 1.14 to 1.32 times the sum of the parts (docs/doctor.md).
ALLOCATOR = 4 / 3
CUDA_BYTES = 2.0**30  # context, workspaces of cuDNN, blocks that the allocator keeps
# For each pixel, while views are drawn: float32 planes, products of the crop, weights of the interpolation.
_DRAWN_PIXEL = 40.0
_RESERVED = 0.05  # of a node's memory: above 95% Ray kills workers

Answers = Sequence[NodeAnswer[NodeInfo]]
# A node, the processes that it may get, their bytes, and the estimate of one.
Placed = tuple[NodeAnswer[NodeInfo], str, float, "MemoryEstimate"]


@final
@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of a worker by purpose, in its largest stage, whose index is ``stage``.

    ``on_gpu`` names the parts that are on the GPU, if the run has one.
    """

    stage: int
    parts: dict[str, float]
    on_gpu: frozenset[str]

    @property
    def total(self) -> float:
        """All bytes of a worker, with the allocator's share."""
        return ALLOCATOR * sum(self.parts.values())

    @property
    def gpu(self) -> float:
        """The bytes on the GPU, with the allocator's share."""
        return ALLOCATOR * sum(num_bytes for name, num_bytes in self.parts.items() if name in self.on_gpu)

    @property
    def host(self) -> float:
        """The bytes in the node's memory, with the allocator's share."""
        return self.total - self.gpu

    def describe(self, *, on_gpu: bool) -> str:
        """Return the parts in the memory of the GPU or of the node, largest first."""
        parts = sorted(self._parts_in(on_gpu=on_gpu).items(), key=lambda part: -part[1])
        shown = [f"{name} {format_bytes(num_bytes)}" for name, num_bytes in parts if num_bytes >= 2**20]
        return ", ".join([*shown, "and a third for the allocator"])

    def remedy(self, config: RunConfig, *, on_gpu: bool) -> str:
        """Return how to lower the largest part in the memory of the GPU or of the node, by settings that act in this run."""
        parts = dict.fromkeys(self.parts, 0.0) | self._parts_in(on_gpu=on_gpu)
        if parts["negatives"] > max(parts["activations"], parts["waiting rows"]):
            if config.negatives.mined.num:
                return "lower negatives.mined.candidates, of which each worker has a table"
            if config.negatives.store == "queue":
                # On a CPU, a step converts float16 to another copy in float32.
                is_wide = on_gpu and config.bank.dtype == "float32"
                return f"lower negatives.capacity{', or set bank.dtype=float16' if is_wide else ''}"
            if config.bank.location == "worker":
                return "set bank.location=actor, so that actors hold the slots of all samples once"
            return "take nodes with more memory, since each worker has the ids of all samples"
        if parts["weights"] > parts["activations"]:
            return f"take a smaller encoder, or {'GPUs' if on_gpu else 'nodes'} with more memory"
        if not parts["activations"]:  # of a run on GPUs
            return "lower --batch-size, use more nodes, or take nodes with more memory"
        return f"lower --batch-size, set stages.{self.stage}.chunk_size, or use more workers and nodes"

    def _parts_in(self, *, on_gpu: bool) -> dict[str, float]:
        return {name: num_bytes for name, num_bytes in self.parts.items() if (name in self.on_gpu) == on_gpu}


def drawing_bytes(config: RunConfig, batch_bytes: float) -> float:
    """Return the bytes of two batches of decoded images on a GPU, and of the intermediates of their views."""
    if config.data.kind not in ("image", "image_text"):
        return 0.0
    return 2 * batch_bytes + _DRAWN_PIXEL * min(batch_bytes / config.data.channels, DRAWN_PIXELS)


def workers_on(node: Node, config: RunConfig, num_cpus: float) -> int:
    """Return the most workers that Ray may place on a node of a cluster with ``num_cpus``."""
    workers = max(config.workers_of(stage) for stage in config.stages)
    if config.gpu:
        return min(workers, int(node.num_gpus)) if has_gpu_of(config, node) else 0
    if config.cpus_per_worker is not None:
        return min(workers, int(node.num_cpus / config.cpus_per_worker))
    if num_cpus >= workers:
        return min(workers, int(node.num_cpus))
    return workers if node.num_cpus else 0  # each takes a fraction of a CPU


def has_gpu_of(config: RunConfig, node: Node) -> bool:
    """Return whether a node has the type of GPU that the run requires, if any."""
    return config.accelerator is None or config.accelerator in node.accelerators


def available_memory(answer: NodeAnswer[NodeInfo]) -> float:
    """Return the bytes of a node's memory that Ray lets workers use."""
    info = answer.value
    return 0.0 if info is None else info.free_memory - _RESERVED * info.memory


def check_nodes(
    name: str, estimate: MemoryEstimate, placed: Sequence[Placed], remedy: Callable[[MemoryEstimate], str]
) -> CheckResult:
    """Compare the memory of the tightest node with the processes that it may get; ``estimate`` is shown if none may.

    ``remedy`` says how to lower an estimate.
    """
    tightest = min(placed, key=lambda each: available_memory(each[0]) - each[2], default=None)
    shown = tightest[3] if tightest else estimate
    seen = f"about {format_bytes(shown.host)} " + ("beside the GPU " if shown.on_gpu else "")
    seen += f"({shown.describe(on_gpu=False)})"
    if tightest is None:
        return passed(name, f"{seen}; no node can hold one now, so nothing to compare ({AUTOSCALING})")
    answer, text, num_bytes, _ = tightest
    available = available_memory(answer)
    seen += f"; {text} on {answer.node.name}, which has {format_bytes(max(0.0, available))} free"
    return passed_if(num_bytes <= available, name, seen, remedy(shown))


def check_gpu(
    name: str, estimate: MemoryEstimate, nodes: Sequence[Node], remedy: str, *, share: float = 1.0
) -> CheckResult:
    """Compare the memory of a process on a GPU with its share of the smallest free GPU of these nodes."""
    num_bytes = estimate.gpu + CUDA_BYTES
    seen = f"about {format_bytes(num_bytes)} ({estimate.describe(on_gpu=True)})"
    answers = ask_nodes([node for node in nodes if node.num_gpus >= 1], gpu_memory, num_gpus=1)
    smallest = min((memory for answer in answers for _, memory in answer.value or ()), default=None)
    if smallest is None:
        return passed(name, f"{seen}; no GPU is free now, so nothing to compare")
    part = "" if share == 1 else f"{share:g} of "
    seen += f"; {part}the smallest has {format_bytes(share * smallest)}"
    return passed_if(num_bytes <= share * smallest, name, seen, remedy)
