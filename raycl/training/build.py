"""Builders: the objects of a run from its configuration."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from raycl.batchnorm import replace_batchnorm, split_batchnorm, synchronize
from raycl.config import RunConfig, Stage
from raycl.data.in_memory import InMemoryDataset, texts_of, tokens_of
from raycl.distributed import all_sum, rank
from raycl.errors import ConfigError
from raycl.losses import NormalizingConstant
from raycl.losses.logq import Frequencies
from raycl.losses.objective import Objective, build_objective
from raycl.models.heads import build_projection_head
from raycl.models.momentum import MomentumEncoder
from raycl.models.temperature import LearnedTemperature
from raycl.models.towers import Tower, Towers, TwoTowers
from raycl.negatives import KeyQueue, MemoryBank
from raycl.negatives.bank import Bank
from raycl.negatives.client import MemoryBankClient, QueueClient
from raycl.negatives.spec import BankSpec
from raycl.optimizers import build_optimizer
from raycl.tokenization import Vocabulary
from raycl.training.modality import ImageModality, ImageTowerBuilder, Modality, TowerBuilder
from raycl.training.pairs import ImageTextModality, PairModality
from raycl.training.stores import BankStore, NoStore, QueueStore, Store
from raycl.training.texts import TextModality, TextTowerBuilder
from raycl.training.train_state import EmbedConfig, TrainState
from raycl.training.views import ViewMaker


def modality(config: RunConfig, vocabulary: Vocabulary | None = None) -> Modality:
    """Return the modality of the samples; texts need the vocabulary."""
    if config.data.kind == "image":
        return ImageModality(ImageTowerBuilder(config))
    assert vocabulary is not None, "texts need the tokenizer of a vocabulary"
    side = TextTowerBuilder(config=config, settings=config.encoder, vocabulary=vocabulary)
    if config.data.kind == "text":
        return TextModality(side=side)
    if config.data.kind == "pairs":
        return PairModality(side)
    return ImageTextModality(ImageTowerBuilder(config), replace(side, settings=config.text_encoder))


def view_maker(config: RunConfig, samples: Modality, device: torch.device) -> ViewMaker:
    """Return the maker of views: two, or one if the key is a slot of a memory bank."""
    return ViewMaker(
        drawing=samples.drawing(),
        num_views=1 if config.key == "memory_bank" else 2,
        device=device,
    )


def towers(config: RunConfig, samples: Modality, network: nn.Module | None = None) -> Towers:
    """Return encoders and projection heads, with BatchNorm replaced as configured.

    ``network`` is the user's own encoder, which replaces the only one. Raises ``ConfigError`` if the run
    has two.
    """
    if network is not None and len(samples.sides) > 1:
        raise ConfigError(
            "got one encoder for a run with two; name each by package.module:function in the configuration"
        )
    made = [_tower(config, side, network, number) for number, side in enumerate(samples.sides)]
    whole: Towers = TwoTowers(made[0], made[-1]) if config.has_two_towers else made[0]
    if config.batchnorm == "synchronized":
        synchronize(whole)
    elif config.batchnorm == "shuffled":
        split_batchnorm(whole, config.rows_per_group(config.stages[0]))
    elif config.batchnorm != "local":
        replace_batchnorm(whole, config.batchnorm)
    return whole


def _tower(config: RunConfig, side: TowerBuilder, network: nn.Module | None, number: int) -> Tower:
    encoder = side.encoder() if network is None else network
    torch.manual_seed(config.seed + 1 + number)
    return Tower(
        encoder,
        build_projection_head(side.representation_dim(encoder), **config.projection_head.model_dump()),
    )


def learner(config: RunConfig, whole: Towers, *, num_samples: int | None) -> TrainState:
    """Return the train state; ``num_samples`` is the number of slots of a memory bank, if any."""
    normalizer = None
    if num_samples is not None:  # for every loss: a stage of NCE may be appended to a finished run
        normalizer = NormalizingConstant(num_samples, momentum=config.negatives.normalizer_momentum)
    temperature = None
    if config.learn_temperature:
        device = next(whole.parameters()).device
        temperature = LearnedTemperature(config.stages[0].temperature, bias=config.first_bias).to(device)
    return TrainState(
        whole,
        optimizer(config, nn.ModuleList(filter(None, (whole, temperature)))),
        temperature=temperature,
        momentum_encoder=MomentumEncoder(whole) if config.key == "momentum_encoder" else None,
        normalizer=normalizer,
        seed=config.seed,
    )


def manner(config: RunConfig, stage: Stage) -> EmbedConfig:
    """Return the settings by which a stage embeds its batches."""
    return EmbedConfig(
        chunk_size=stage.chunk_size,
        cached_chunks=stage.cached_chunks,
        activation_checkpoint_every=stage.activation_checkpoint_every,
        rows_per_group=config.rows_per_group(stage) if config.batchnorm == "shuffled" else None,
        leak_group_size=_rows_normalized_together(config, stage),
    )


def _rows_normalized_together(config: RunConfig, stage: Stage) -> int:
    """Return the number of rows that share BatchNorm statistics; 0 if BatchNorm cannot leak."""
    in_batch_only = config.negatives.store == "none"
    local_batch_size = config.local_batch_size(stage)
    return {
        "synchronized": 0 if in_batch_only else stage.batch_size,
        "local": 0 if in_batch_only and config.workers_of(stage) == 1 else local_batch_size,
        "shuffled": config.rows_per_group(stage),
    }.get(config.batchnorm, 0)


def frequencies(config: RunConfig, rows: InMemoryDataset, device: torch.device) -> Frequencies | None:
    """Count these rows' documents, and explicit negatives if used, if a stage has the logQ correction."""
    if not any(stage.logq_correction for stage in config.stages):
        return None
    found = []
    for batch in rows.batches(4_096):
        found.append(tokens_of(batch, "document").text_id)
        if config.negatives.explicit and "negatives" in batch.contents:
            found.append(texts_of(batch, "negatives").tokens.text_id)
    return Frequencies.of(found).to(device)


def contrast(
    config: RunConfig,
    stage: Stage,
    train_state: TrainState,
    *,
    hinge_weight: float,
    num_samples: int | None = None,
    frequencies: Frequencies | None = None,
) -> Objective:
    """Return the loss over all workers, in which the hinge has the weight ``hinge_weight``."""
    temperature = stage.temperature if train_state.temperature is None else train_state.temperature()
    bias = (
        stage.bias
        if train_state.temperature is None or train_state.temperature.bias is None
        else train_state.temperature.bias
    )
    assert not stage.logq_correction or frequencies is not None, "documents are counted before the first step"
    return build_objective(
        stage.loss,
        hinge_weight=hinge_weight,
        temperature=temperature,
        bias=bias,
        margin=stage.margin,
        hardest=stage.hardest_negative,
        in_batch=_has_in_batch_negatives(config),
        pairs=config.has_two_towers,
        # Keys of a momentum encoder or a bank have no gradient.
        learns_keys=config.key == "tower",
        proximal_weight=stage.proximal_weight,
        log_frequency=frequencies if stage.logq_correction else None,
        normalizer=train_state.normalizer,
        num_samples=num_samples,
    )


def without_hinge(config: RunConfig, stage: Stage) -> Stage:
    """Return the stage with a cross-entropy in place of the hinge."""
    return config.without_hinge(stage)


def _has_in_batch_negatives(config: RunConfig) -> bool:
    return config.negatives.in_batch and config.key != "memory_bank"


NEW_NODE_S = 900.0  # limit for a new node to start, including its installation


def bank_spec(config: RunConfig, *, output: str, name: str, num_samples: int | None) -> BankSpec:
    """Return the spec of the run's bank."""
    is_queue = config.negatives.store == "queue"
    return BankSpec(
        name=config.bank.name or name,
        kind="queue" if is_queue else "memory_bank",
        dim=config.projection_head.dim,
        output=output,
        capacity=config.negatives.capacity if is_queue else num_samples or 0,
        dtype=config.bank.dtype,
        wire_dtype=None if is_queue or config.bank.max_staleness == 0 else "float16",
        seed=config.seed,
        momentum=config.negatives.bank_momentum,
        num_shards=config.bank.shards,
        detached=config.bank.detached,
        # With autoscaling, the replacement of a lost node takes minutes.
        timeout_s=max(config.bank.timeout_s, NEW_NODE_S if config.autoscaling else 0.0),
    )


def store(
    config: RunConfig, bank: Bank | None, sample_id: NDArray[np.int64] | None, device: torch.device
) -> Store:
    """Return this worker's store: a client of ``bank``, or a local store without one."""
    negatives = config.negatives
    if negatives.store == "none":
        return NoStore()
    barrier = partial(meet, device)
    if negatives.store == "queue":
        queue = (
            KeyQueue(negatives.capacity, config.projection_head.dim, config.bank.dtype)
            if bank is None
            else QueueClient(bank, rank=rank())
        )
        return QueueStore(queue, capacity=negatives.capacity, device=device)
    assert sample_id is not None, "a memory bank needs the sample ids of the run"
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
        momentum=config.negatives.bank_momentum,
        dtype=config.bank.dtype,
    )


def meet(device: torch.device) -> None:
    """Wait for all workers; collective."""
    # Read the result on the host: NCCL calls return before the other workers arrive.
    all_sum(torch.zeros(1, device=device)).item()


def optimizer(config: RunConfig, module: nn.Module) -> Optimizer:
    """Return the optimizer; the loop sets its learning rate at every step."""
    return build_optimizer(module=module, **config.optimizer.model_dump())
