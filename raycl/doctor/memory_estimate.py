"""What a recipe needs: memory of a worker, of the bank's shards, and of the object store."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from raycl.config import RunConfig, Stage
from raycl.doctor.memory_profile import Measured
from raycl.doctor.result import size
from raycl.training import build

_READY = 4  # batches of rows: two wait, one is used and one is made
_EMBEDDINGS = 8  # of gathered embeddings: both views, their gradients, and what the loss makes of them
# Real workers took 1.14 to 1.32 times the sum of the parts (docs/doctor.md): freed memory stays with a process.
ALLOCATOR = 4 / 3
STATES = {"adamw": 2, "sgd": 1, "lars": 1}  # numbers that an optimizer keeps for each weight


@final
@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes of one worker in its largest stage, by what they are for; ``stage`` is its number.

    ``device`` says which of them lie on the GPU, if the run has one.
    """

    stage: int
    parts: dict[str, float]
    device: frozenset[str]

    @property
    def total(self) -> float:
        """All bytes of a worker, with what the allocator keeps."""
        return ALLOCATOR * sum(self.parts.values())

    def on(self, *, gpu: bool) -> float:
        """Return the bytes on the GPU, or those in the node's memory beside it."""
        chosen = (num_bytes for name, num_bytes in self.parts.items() if (name in self.device) == gpu)
        return ALLOCATOR * sum(chosen)

    def __str__(self) -> str:
        shown = sorted(self.parts.items(), key=lambda part: -part[1])
        named = [f"{name} {size(num_bytes)}" for name, num_bytes in shown if num_bytes >= 2**20]
        return ", ".join([*named, "and a third for what the allocator keeps"])


def worker_need(
    config: RunConfig, measured: Sequence[Measured], *, num_samples: int, row_bytes: float, negatives: float
) -> Need:
    """Return what a worker needs in the stage that needs most; ``measured`` is by stage.

    ``row_bytes`` are those of a decoded row, ``negatives`` how many a pair brings along.
    """
    needs = [
        _need_of(config, number, stage, each, num_samples, row_bytes, negatives)
        for number, (stage, each) in enumerate(zip(config.stages, measured, strict=True))
    ]
    return max(needs, key=lambda need: need.total)


def bank_bytes(config: RunConfig, num_samples: int) -> list[float]:
    """Return the memory of each shard of the run's bank; nothing, where there is none."""
    if config.negatives.store == "none" or config.bank.held_by == "workers":
        return []
    plan = build.bank_spec(config, output="bank", name="bank", num_samples=num_samples)
    return [float(plan.bytes_of(shard)) for shard in range(plan.num_shards)]


def _need_of(
    config: RunConfig,
    number: int,
    stage: Stage,
    measured: Measured,
    num_samples: int,
    row_bytes: float,
    negatives: float,
) -> Need:
    rows = _rows_of_sides(config, stage, negatives)
    activations = sum(
        row * _with_graph(count, stage) + (waiting * count if stage.chunk_size else 0.0)
        for count, row, waiting in zip(rows, measured.row, measured.waiting, strict=True)
    )
    local_batch = config.local_batch_size(stage)
    weights = measured.parameters
    parts = {
        "process": measured.process,
        "weights": weights + measured.buffers,
        "gradients": weights,
        "optimizer": weights * _states(config),
        "momentum encoder": weights + measured.buffers if config.key == "momentum_encoder" else 0.0,
        "activations": activations,
        "views": sum(count * each for count, each in zip(rows, measured.input, strict=True)),
        "rows that wait": _READY * local_batch * row_bytes,
        "embeddings": _EMBEDDINGS * stage.batch_size * config.projection_head.dim * 4.0,
        "negatives": _store_bytes(config, num_samples),
    }
    on_device = set(parts) - {"process", "rows that wait"}
    if config.negatives.store == "memory_bank":
        on_device -= {"negatives"}
    return Need(stage=number, parts=parts, device=frozenset(on_device) if config.gpu else frozenset())


def _rows_of_sides(config: RunConfig, stage: Stage, negatives: float) -> list[float]:
    """Return how many rows each side embeds on a worker with gradient."""
    if not config.has_two_towers:
        return [float(config.local_views(stage))]
    explicit = negatives if config.negatives.explicit else 0.0
    local_batch = config.local_batch_size(stage)
    return [float(local_batch), local_batch * (1.0 + explicit)]


def _with_graph(num_rows: float, stage: Stage) -> float:
    """Return how many rows have their graph at one time."""
    if stage.chunk_size is None:
        return num_rows
    return min(num_rows, stage.chunk_size * max(1, stage.kept_chunks))


def _states(config: RunConfig) -> int:
    optimizer = config.optimizer
    return 0 if optimizer.name == "sgd" and not optimizer.momentum else STATES[optimizer.name]


def _store_bytes(config: RunConfig, num_samples: int) -> float:
    """Return what a worker itself holds of the store: a queue's ring, its memory bank, or ids and rows lent."""
    if config.negatives.store == "none":
        return 0.0
    plan = build.bank_spec(config, output="bank", name="bank", num_samples=num_samples)
    whole = float(sum(plan.bytes_of(shard) for shard in range(plan.num_shards)))
    if config.negatives.store == "queue":
        # Rows of half the size are lent as whole ones.
        return whole + (4.0 * plan.capacity * plan.dim if plan.dtype == "float16" or config.gpu else 0.0)
    lent = 2.0 * 4 * plan.dim * (config.negatives.num_negatives + config.stages[0].batch_size)
    return 16.0 * num_samples + lent + (whole if config.bank.held_by == "workers" else 0.0)
