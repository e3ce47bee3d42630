"""The one switchboard: from names in a configuration to objects."""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from raycl.batchnorm import split_batchnorm, swap, synchronize
from raycl.config import RunConfig, Stage
from raycl.data.sources import ColumnNames
from raycl.distributed import all_sum, num_workers, rank
from raycl.losses import NormalizingConstant
from raycl.models.heads import build_projection_head
from raycl.models.momentum import MomentumEncoder
from raycl.models.towers import Tower
from raycl.negatives import KeyQueue, MemoryBank
from raycl.negatives.bank_client import MemoryBankClient, QueueClient
from raycl.negatives.bank_handle import Bank
from raycl.negatives.bank_plan import BankPlan
from raycl.optimizers import build_optimizer
from raycl.training.contrast import Contrast, Hinge, InfoNce, Mixed, Nce, NtXent
from raycl.training.learner import Learner, Manner
from raycl.training.modality import ImageModality, Modality
from raycl.training.monitor import CollapseMonitor, Limits
from raycl.training.stores import BankStore, NoStore, QueueStore, Store
from raycl.training.views import ViewMaker


def column_names(config: RunConfig) -> ColumnNames:
    """Return the columns to read."""
    return ColumnNames(**config.data.columns.model_dump())


def modality(config: RunConfig) -> Modality:
    """Return what the samples are."""
    return ImageModality(config)


def view_maker(config: RunConfig, device: torch.device) -> ViewMaker:
    """Return what draws the views: two, unless the key is a slot of a memory bank."""
    return ViewMaker(
        drawing=modality(config).drawing(device),
        num_views=1 if config.key == "slot" else 2,
        device=device,
    )


def tower(config: RunConfig, network: nn.Module) -> Tower:
    """Return encoder and projection head with the BatchNorm cure in place."""
    torch.manual_seed(config.seed + 1)
    head = build_projection_head(
        modality(config).representation_dim(network), **config.projection_head.model_dump()
    )
    whole = Tower(network, head)
    if config.batchnorm == "synchronized":
        synchronize(whole)
    elif config.batchnorm == "shuffled":
        split_batchnorm(whole, config.rows_per_group(config.stages[0]))
    elif config.batchnorm != "as_is":
        swap(whole, config.batchnorm)
    return whole


def learner(config: RunConfig, whole: Tower, *, num_samples: int | None) -> Learner:
    """Return all that learns; ``num_samples`` are the slots of a memory bank, if there is one."""
    normalizer = None
    if num_samples is not None:  # whichever the loss: a stage of NCE may be added to a finished run
        normalizer = NormalizingConstant(num_samples, momentum=config.negatives.normalizer_momentum)
    return Learner(
        whole,
        optimizer(config, whole),
        momentum_encoder=MomentumEncoder(whole) if config.key == "momentum_encoder" else None,
        normalizer=normalizer,
        seed=config.seed,
    )


def manner(config: RunConfig, stage: Stage) -> Manner:
    """Return how a stage embeds its batches."""
    return Manner(
        chunk_size=stage.chunk_size,
        kept_chunks=stage.kept_chunks,
        milestone_every=stage.milestone_every,
        rows_per_group=config.rows_per_group(stage) if config.batchnorm == "shuffled" else None,
        rows_in_company=_rows_normalized_together(config, stage),
    )


def _rows_normalized_together(config: RunConfig, stage: Stage) -> int:
    """Return how many rows share the statistics of BatchNorm; 0 where no other rows are negatives."""
    in_batch_only = config.negatives.store == "none"
    local_batch_size = config.local_batch_size(stage)
    return {
        "synchronized": 0 if in_batch_only else stage.batch_size,
        "as_is": 0 if in_batch_only and config.workers_of(stage) == 1 else local_batch_size,
        "shuffled": config.rows_per_group(stage),
    }.get(config.batchnorm, 0)


def contrast(
    config: RunConfig, stage: Stage, learns: Learner, *, hinge_weight: float, num_samples: int | None
) -> Contrast:
    """Return the loss over all workers, of which the hinge is this fraction."""
    if stage.loss == "hinge" or hinge_weight == 1.0:
        return _hinge(config, stage)
    entropy = _cross_entropy(config, stage, learns, num_samples=num_samples)
    if not hinge_weight:
        return entropy
    return Mixed(cross_entropy=entropy, hinge=_hinge(config, stage), hinge_weight=hinge_weight)


def without_hinge(config: RunConfig, stage: Stage) -> Stage:
    """Return the stage with a cross-entropy in place of the hinge."""
    symmetric = config.key == "tower" and config.negatives.store == "none"
    loss = stage.loss if stage.loss != "hinge" else "nt_xent" if symmetric else "info_nce"
    return stage.model_copy(update={"loss": loss, "hinge_weight": 0.0, "final_hinge_weight": None})


def _hinge(config: RunConfig, stage: Stage) -> Contrast:
    return Hinge(
        margin=stage.margin,
        hardest=stage.hardest_negative,
        in_batch=_meets_the_batch(config),
        # Keys without gradient, of a momentum encoder or a bank, have nothing to learn from queries.
        bidirectional=config.key == "tower",
        proximal_weight=stage.proximal_weight,
    )


def _cross_entropy(config: RunConfig, stage: Stage, learns: Learner, *, num_samples: int | None) -> Contrast:
    if stage.loss == "nt_xent":
        return NtXent(temperature=stage.temperature)
    if stage.loss == "info_nce":
        return InfoNce(
            temperature=stage.temperature,
            in_batch=_meets_the_batch(config),
            proximal_weight=stage.proximal_weight,
        )
    assert num_samples is not None, "the configuration gives NCE a memory bank"
    assert learns.normalizer is not None, "the learner of NCE estimates its normalizing constant"
    return Nce(
        temperature=stage.temperature,
        num_samples=num_samples,
        normalizer=learns.normalizer,
        proximal_weight=stage.proximal_weight,
    )


def _meets_the_batch(config: RunConfig) -> bool:
    return config.negatives.in_batch and config.key != "slot"


def monitor(config: RunConfig) -> CollapseMonitor:
    """Return what judges the measures of the embeddings."""
    return CollapseMonitor(Limits(patience=config.monitor.patience, grace=config.monitor.grace))


def bank_plan(config: RunConfig, *, output: str, name: str, num_samples: int | None) -> BankPlan:
    """Return what the run's bank is."""
    is_queue = config.negatives.store == "queue"
    return BankPlan(
        name=config.bank.name or name,
        kind="queue" if is_queue else "memory_bank",
        dim=config.projection_head.dim,
        output=output,
        capacity=config.negatives.capacity if is_queue else num_samples or 0,
        dtype=config.bank.dtype,
        wire_dtype=None if is_queue or config.bank.max_staleness == 0 else "float16",
        seed=config.seed,
        momentum=config.negatives.slot_momentum,
        num_shards=config.bank.shards,
        detached=config.bank.detached,
        timeout_s=config.bank.timeout_s,
    )


def store(
    config: RunConfig, bank: Bank | None, sample_id: NDArray[np.int64] | None, device: torch.device
) -> Store:
    """Return this worker's side of the store: of the actors' ``bank``, or one of its own without."""
    negatives = config.negatives
    if negatives.store == "none":
        return NoStore()
    barrier = partial(meet, device)
    if negatives.store == "queue":
        queue = (
            KeyQueue(negatives.capacity, config.projection_head.dim, config.bank.dtype)
            if bank is None
            else QueueClient(bank, rank=rank(), num_workers=num_workers(), barrier=barrier)
        )
        return QueueStore(queue, capacity=negatives.capacity, device=device)
    assert sample_id is not None, "a memory bank is made for the samples of the run"
    slots = (
        _own_memory_bank(config, sample_id)
        if bank is None
        else MemoryBankClient(
            bank, sample_id, rank=rank(), max_staleness=config.bank.max_staleness, barrier=barrier
        )
    )
    return BankStore(slots, num_negatives=negatives.num_negatives, device=device)


def _own_memory_bank(config: RunConfig, sample_id: NDArray[np.int64]) -> MemoryBank:
    return MemoryBank(
        sample_id,
        config.projection_head.dim,
        seed=config.seed,
        momentum=config.negatives.slot_momentum,
        dtype=config.bank.dtype,
    )


def meet(device: torch.device) -> None:
    """Wait until all workers are here; collective."""
    # Read on the host: nccl's calls return before the others have come.
    all_sum(torch.zeros(1, device=device)).item()


def optimizer(config: RunConfig, module: nn.Module) -> Optimizer:
    """Return the optimizer; the loop sets its learning rate at every step."""
    return build_optimizer(module=module, **config.optimizer.model_dump())
