"""The whole run, and what of its parts does not fit together."""

import math
from typing import Annotated, Literal, Self, final

from pydantic import Field, model_validator

from raycl.config.schema import (
    AugmentConfig,
    BankConfig,
    CheckpointConfig,
    Count,
    DataConfig,
    EncoderConfig,
    EvaluationConfig,
    HeadConfig,
    MomentumEncoderConfig,
    MonitorConfig,
    NegativesConfig,
    OptimizerConfig,
    Positive,
    Section,
    TextAugmentConfig,
    TextConfig,
    TrackingConfig,
)
from raycl.config.stage import Stage
from raycl.loss_specs import LOSSES, cross_entropy_for, join_names

_OVER_THE_BATCH = ("synchronized", "local")  # BatchNorm that all chunks must wait for


@final
class RunConfig(Section):
    """A whole run as a value; recipes return one, YAML holds one.

    ``key`` says what encodes a query's key: the same tower (SimCLR), the momentum encoder (MoCo), or
    nothing, for the key is the sample's own slot of the memory bank (InstDisc). ``synchronized``
    BatchNorm takes its statistics over the rows of all workers, ``local`` over those of one, and
    ``shuffled`` over random ones, in ``batchnorm_groups`` groups over all workers, at least one a
    worker. Pairs and images with captions have two towers; those of pairs are one and the same
    unless ``separate_towers``, and captions are read by ``text_encoder``. ``learn_temperature`` begins
    at that of the first stage and stays above 0.01, as in CLIP. ``workers`` are those of every stage that
    asks for no other number; with ``min_workers`` they may be fewer, as many as the cluster has room
    for at the time. ``autoscaling`` says that the cluster grows when more is asked for than it has now;
    otherwise a run that does not fit is refused. ``accelerator`` asks for GPUs of one of Ray's types, such as H100.
    ``precision`` is that of the towers: ``auto`` means bfloat16 with ``gpu`` and float32 without. A run goes on without what it lost, a process or a
    node, from its last checkpoint, up to ``max_failures`` times in a row without a new one between.
    """

    recipe: str
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    workers: Count = 1
    min_workers: Count | None = None
    gpu: bool = False
    autoscaling: bool = False
    cpus_per_worker: Positive | None = None
    accelerator: str | None = None
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    data: DataConfig = DataConfig()
    text: TextConfig = TextConfig()
    augment: AugmentConfig = AugmentConfig()
    text_augment: TextAugmentConfig = TextAugmentConfig()
    encoder: EncoderConfig = EncoderConfig()
    text_encoder: EncoderConfig = EncoderConfig(name="transformer")
    separate_towers: bool = False
    projection_head: HeadConfig = HeadConfig()
    learn_temperature: bool = False
    key: Literal["tower", "momentum_encoder", "memory_bank"] = "tower"
    momentum_encoder: MomentumEncoderConfig = MomentumEncoderConfig()
    negatives: NegativesConfig = NegativesConfig()
    bank: BankConfig = BankConfig()
    batchnorm: Literal["synchronized", "shuffled", "layer", "group", "local"] = "synchronized"
    batchnorm_groups: Count = 8
    optimizer: OptimizerConfig = OptimizerConfig()
    stages: tuple[Stage, ...]
    evaluation: EvaluationConfig = EvaluationConfig()
    monitor: MonitorConfig = MonitorConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    log_every_steps: Count = 10
    max_failures: Annotated[int, Field(ge=0)] = 3

    @property
    def tower_precision(self) -> Literal["float32", "bfloat16"]:
        """The precision in which the towers compute."""
        if self.precision == "auto":
            return "bfloat16" if self.gpu else "float32"
        return self.precision

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation by channel, on pixels between 0 and 1."""
        natural = {1: ((0.5,), (0.25,)), 3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
        mean, std = natural[self.data.channels]
        return self.augment.mean or mean, self.augment.std or std

    @property
    def has_two_towers(self) -> bool:
        """Whether query and key are different things."""
        return self.data.kind in ("pairs", "image_text")

    @property
    def has_texts(self) -> bool:
        """Whether there is something to cut into tokens."""
        return self.data.kind != "image"

    @property
    def judged_by(self) -> str:
        """The metric of the periodic judge that says which checkpoint is best."""
        return "recall_at_10" if self.has_two_towers else "knn_top1"

    def workers_of(self, stage: Stage) -> int:
        """Return how many workers a stage has, at most."""
        return stage.workers or self.workers

    def worker_range(self, stage: Stage) -> tuple[int, int]:
        """Return the least and the greatest number of workers that a stage may have."""
        most = self.workers_of(stage)
        return (most if stage.workers or self.min_workers is None else self.min_workers, most)

    def settled(self, workers: int) -> Self:
        """Return the configuration of a group that came to so many workers."""
        if self.min_workers is None:
            return self
        return self.model_copy(update={"workers": workers, "min_workers": None})

    def local_batch_size(self, stage: Stage) -> int:
        """Return how many rows of a batch each worker has."""
        return stage.batch_size // self.workers_of(stage)

    def local_views(self, stage: Stage) -> int:
        """Return how many views each worker's tower embeds in a step: two a sample, unless another gives the keys."""
        both = self.key == "tower" and not self.has_two_towers
        return self.local_batch_size(stage) * (2 if both else 1)

    def rows_per_group(self, stage: Stage) -> int:
        """Return how many rows shuffled BatchNorm normalizes together."""
        return stage.batch_size // max(self.batchnorm_groups, self.workers_of(stage))

    @model_validator(mode="after")
    def _asks_for_accelerators_with_gpu(self) -> Self:
        if self.accelerator is not None and not self.gpu:
            raise ValueError(
                f"accelerator is {self.accelerator!r}, and the workers have no GPU; set gpu=true, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _has_batches_that_divide(self) -> Self:
        if not self.stages:
            raise ValueError("stages is empty, so there is nothing to train; give one stage or more")
        if self.min_workers is not None and self.min_workers > self.workers:
            raise ValueError(
                f"min_workers {self.min_workers} is more than workers {self.workers}; give --workers MIN:MAX"
            )
        for index, stage in enumerate(self.stages):
            if problem := self._problem_of(stage):
                # One stage is the rule, and its number then says nothing.
                raise ValueError(problem if len(self.stages) == 1 else f"stage {index}: {problem}")
        return self

    def _problem_of(self, stage: Stage) -> str | None:
        """Return what is wrong with a stage for any number of workers that it may have."""
        least, most = self.worker_range(stage)
        for workers in range(least, most + 1):
            settled = self.settled(workers)
            for check in (_check_workers, _check_groups):
                if problem := check(settled, stage):
                    return problem + _for_each_number(least, most)
            for check in (_check_chunks, _check_capacity):
                if problem := check(settled, stage):
                    return problem
        return None

    @model_validator(mode="after")
    def _has_a_loss_to_roll_back_to(self) -> Self:
        if self.monitor.on_collapse == "rollback" and not any(stage.has_hinge for stage in self.stages):
            raise ValueError(
                "monitor.on_collapse rollback puts a cross-entropy in the place of the hinge, and no stage has a "
                "hinge: set it to warn or stop"
            )
        return self

    @model_validator(mode="after")
    def _has_keys_that_fit_loss_and_store(self) -> Self:
        store = self.negatives.store
        if (self.key == "memory_bank") != (store == "memory_bank"):
            raise ValueError(
                f"key {self.key} and negatives.store {store} do not fit: a memory bank's slots are the keys "
                "(key=memory_bank), and no other store has slots"
            )
        if self.batchnorm == "shuffled" and self.key == "memory_bank":
            raise ValueError(
                "batchnorm shuffled does not go with key memory_bank: it shuffles the views that are compared, and of a "
                "sample there is one; set batchnorm to synchronized, layer or group"
            )
        for stage in self.stages:
            if problem := self._loss_problem(stage):
                raise ValueError(problem)
            if stage.proximal_weight and self.key != "memory_bank":
                raise ValueError(
                    "proximal_weight pulls to a slot of the memory bank: set key=memory_bank, or 0"
                )
        return self

    def _loss_problem(self, stage: Stage) -> str | None:
        """Return what the loss of a stage cannot use, or lacks."""
        spec, store, kind = LOSSES[stage.loss], self.negatives.store, self.data.kind
        if self.key not in spec.keys or (store != "none" and not spec.stored_negatives):
            return (
                f"loss {stage.loss} does not go with key {self.key} and negatives.store {store}: it takes "
                f"key {join_names(spec.keys)}{'' if spec.stored_negatives else ', and no store'}"
            )
        explicit = kind == "pairs" and self.negatives.explicit
        if explicit and spec.pairs and not spec.explicit_negatives:
            return (
                f"loss {stage.loss} uses no explicit negatives: set negatives.explicit=false, or loss to "
                f"{join_names(name for name, each in LOSSES.items() if each.pairs and each.explicit_negatives)}"
            )
        if store == "none" and not (self.negatives.in_batch or explicit):
            return f"{stage.loss} has no negatives: set negatives.in_batch=true, or a negatives.store"
        if spec.needs_batch and not self.negatives.in_batch:
            others = [name for name in self._fitting_losses() if name != stage.loss]
            return (
                f"loss {stage.loss} needs the negatives of the batch, negatives.in_batch is false: "
                f"set it to true, or loss to {join_names(others)}"
            )
        if self.has_two_towers and not spec.pairs:
            return (
                f"loss {stage.loss} compares views of one sample, data.kind {kind} has pairs: set "
                f"loss to {join_names(name for name, each in LOSSES.items() if each.pairs)}"
            )
        return None

    def _fitting_losses(self) -> list[str]:
        sources = {"key": self.key, "pairs": self.has_two_towers, "store": self.negatives.store}
        in_batch = self.negatives.in_batch
        return [name for name, spec in LOSSES.items() if spec.fits(**sources, in_batch=in_batch)]

    def without_hinge(self, stage: Stage) -> Stage:
        """Return the stage with a cross-entropy in place of the hinge."""
        loss = stage.loss
        if not LOSSES[loss].mixes:
            loss = cross_entropy_for(
                key=self.key,
                pairs=self.has_two_towers,
                store=self.negatives.store,
                in_batch=self.negatives.in_batch,
            )
        return stage.model_copy(update={"loss": loss, "hinge_weight": 0.0, "final_hinge_weight": None})

    @property
    def first_bias(self) -> float | None:
        """Where a learned bias begins: that of the first stage whose loss learns one; None without."""
        return next((stage.bias for stage in self.stages if "bias" in LOSSES[stage.loss].learns), None)

    @model_validator(mode="after")
    def _has_what_two_towers_need(self) -> Self:
        if self.has_two_towers and self.key != "tower":
            raise ValueError(
                f"data.kind {self.data.kind} has a tower for its keys, key is {self.key}: set key=tower"
            )
        if self.has_two_towers and self.batchnorm == "shuffled":
            raise ValueError(
                "batchnorm shuffled mixes views of one tower, and two towers have nothing to shuffle: set it "
                "to synchronized, group or layer"
            )
        for stage in self.stages:
            if stage.logq_correction and (self.data.kind != "pairs" or not LOSSES[stage.loss].log_frequency):
                raise ValueError(
                    "logq_correction is for documents that recur in pairs: set data.kind=pairs and "
                    f"loss={join_names(name for name, spec in LOSSES.items() if spec.log_frequency)}, or leave it out"
                )
        if self.learn_temperature and not any(LOSSES[stage.loss].learns for stage in self.stages):
            raise ValueError(
                f"learn_temperature is true, and loss {self.stages[0].loss} has no temperature to learn: leave it out"
            )
        if self.data.kind in ("image", "pairs") and any(self.text_augment.model_dump().values()):
            raise ValueError(
                f"text_augment changes views of texts, and data.kind {self.data.kind} has none: leave it out"
            )
        if self.separate_towers and self.data.kind != "pairs":
            raise ValueError(f"separate_towers is for pairs, data.kind is {self.data.kind}: leave it out")
        return self

    @model_validator(mode="after")
    def _has_a_bank_that_can_be_held(self) -> Self:
        bank, negatives = self.bank, self.negatives
        if bank.location == "worker" and (bank.shards > 1 or bank.detached or bank.name):
            raise ValueError(
                "bank.shards, bank.detached and bank.name are an actor's; with bank.location worker leave them out"
            )
        if negatives.store != "memory_bank" and bank.shards > 1:
            raise ValueError(
                f"bank.shards {bank.shards} is for a memory bank, negatives.store is {negatives.store}: one actor "
                "holds a queue; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _has_possible_views(self) -> Self:
        for name, (low, high) in {
            "crop_scale": self.augment.crop_scale,
            "crop_ratio": self.augment.crop_ratio,
            "blur_sigma": self.augment.blur_sigma,
        }.items():
            if low > high:
                raise ValueError(f"augment.{name} must ascend, came {low} to {high}")
        if self.augment.crop_scale[1] > 1:
            raise ValueError(f"augment.crop_scale ends at {self.augment.crop_scale[1]}; at most 1 is allowed")
        for name, values in {"mean": self.augment.mean, "std": self.augment.std}.items():
            if values is not None and len(values) != self.data.channels:
                raise ValueError(
                    f"augment.{name} has {len(values)} numbers for {self.data.channels} channels; give one a channel"
                )
        return self


def _for_each_number(least: int, most: int) -> str:
    """Say what divides over any number of workers that there may be."""
    if least == most:
        return ""
    multiple = math.lcm(*range(least, most + 1))
    # Of 1 to 16 workers it is 720,720, which no batch has.
    way_out = (
        f"a multiple of {multiple} divides over each" if multiple <= 100_000 else "choose a narrower MIN:MAX"
    )
    return f" (any number from {least} to {most} workers may come: {way_out})"


def _check_workers(config: RunConfig, stage: Stage) -> str | None:
    workers = config.workers_of(stage)
    if stage.batch_size % workers == 0:
        return None
    return (
        f"batch_size {stage.batch_size} does not divide over {workers} workers; "
        "batch_size counts the rows of all workers, choose a multiple"
    )


def _check_groups(config: RunConfig, stage: Stage) -> str | None:
    if config.batchnorm != "shuffled":
        return None
    workers = config.workers_of(stage)
    groups = max(config.batchnorm_groups, workers)
    if groups % workers:
        return f"batchnorm_groups {groups} do not divide over {workers} workers; choose a multiple"
    if stage.batch_size % groups or stage.batch_size < 2 * groups or groups < 2:
        return (
            f"batch_size {stage.batch_size} does not split into {groups} groups of at least 2 rows for "
            "shuffled BatchNorm, which needs 2 groups or more; set batchnorm_groups or --batch-size"
        )
    return None


def _check_chunks(config: RunConfig, stage: Stage) -> str | None:
    size, views = stage.chunk_size, config.local_views(stage)
    if stage.activation_checkpoint_every is not None and (
        size is None or config.batchnorm not in _OVER_THE_BATCH
    ):
        return (
            f"activation_checkpoint_every {stage.activation_checkpoint_every} has no effect on batchnorm {config.batchnorm} and chunk_size "
            f"{'null' if size is None else size}: it is for {' or '.join(_OVER_THE_BATCH)} in chunks; leave it out"
        )
    if size is None:
        return None
    if size > views:
        return (
            f"chunk_size {size} is larger than a worker's {views} views of a batch of {stage.batch_size}; "
            "leave chunk_size out, or choose a smaller one"
        )
    if config.batchnorm == "shuffled" and size % config.rows_per_group(stage):
        return (
            f"chunk_size {size} is no multiple of the {config.rows_per_group(stage)} rows that shuffled BatchNorm "
            "normalizes together; choose a multiple, or more batchnorm_groups"
        )
    return None


def _check_capacity(config: RunConfig, stage: Stage) -> str | None:
    negatives = config.negatives
    if negatives.store != "queue" or negatives.capacity >= stage.batch_size:
        return None
    return (
        f"negatives.capacity {negatives.capacity} is less than a batch of {stage.batch_size}; "
        "a queue keeps at least the keys of one step"
    )
