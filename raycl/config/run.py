"""The configuration of a whole run, and checks across its sections."""

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

_OVER_THE_BATCH = ("synchronized", "local")  # BatchNorm with statistics over all chunks


@final
class RunConfig(Section):
    """A whole run as a frozen value; recipes return one, YAML files hold one."""

    recipe: str
    """Name of the recipe; metrics and reports show it."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of weights, order and views, 0 to 2**31 - 1."""

    workers: Count = 1
    """Training processes; a stage may set another number."""

    min_workers: Count | None = None
    """Fewest workers to train with when the cluster has no room for ``workers``; default: exactly
    ``workers``.
    """

    gpu: bool = False
    """Whether each worker gets a GPU."""

    autoscaling: bool = False
    """Whether the cluster grows on demand; otherwise a run that does not fit is refused."""

    cpus_per_worker: Positive | None = None
    """CPUs reserved per worker; default: 1, or less on a small cluster."""

    accelerator: str | None = None
    """Required GPU type, by Ray's name, such as ``H100``; default: any."""

    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the towers; ``auto`` is bfloat16 with ``gpu``, otherwise float32."""

    data: DataConfig = DataConfig()
    """Samples, reading and caching."""

    text: TextConfig = TextConfig()
    """Tokenization."""

    augment: AugmentConfig = AugmentConfig()
    """Random views of images."""

    text_augment: TextAugmentConfig = TextAugmentConfig()
    """Random views of texts."""

    encoder: EncoderConfig = EncoderConfig()
    """Network of images, single texts, and queries; of documents as well unless ``separate_towers``."""

    text_encoder: EncoderConfig = EncoderConfig(name="transformer")
    """Network of captions, for kind ``image_text``."""

    separate_towers: bool = False
    """Whether the documents of ``pairs`` have a tower of their own; by default both sides share weights."""

    projection_head: HeadConfig = HeadConfig()
    """Projection head of each tower."""

    learn_temperature: bool = False
    """Whether to learn the temperature, starting at the first stage's, above 0.01 as in CLIP."""

    key: Literal["tower", "momentum_encoder", "memory_bank"] = "tower"
    """Source of the keys: the ``tower`` itself (SimCLR), a ``momentum_encoder`` (MoCo), or the sample's
    slot of a ``memory_bank`` (InstDisc).
    """

    momentum_encoder: MomentumEncoderConfig = MomentumEncoderConfig()
    """The moving average of the weights."""

    negatives: NegativesConfig = NegativesConfig()
    """Sources of negatives."""

    bank: BankConfig = BankConfig()
    """Storage of the queue or memory bank."""

    batchnorm: Literal["synchronized", "shuffled", "layer", "group", "local"] = "synchronized"
    """Rows that share BatchNorm statistics: the rows of all workers (``synchronized``), of one worker
    (``local``), or of random groups (``shuffled``). ``layer`` and ``group`` replace BatchNorm by LayerNorm
    or GroupNorm.
    """

    batchnorm_groups: Count = 8
    """Groups of shuffled BatchNorm over all workers, at least one per worker."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""

    stages: tuple[Stage, ...]
    """Stages in order, at least one."""

    evaluation: EvaluationConfig = EvaluationConfig()
    """The periodic evaluation."""

    monitor: MonitorConfig = MonitorConfig()
    """Detection of a collapse."""

    checkpoints: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""

    tracking: TrackingConfig = TrackingConfig()
    """Experiment trackers."""

    log_every_steps: Count = 10
    """Steps between logged metrics."""

    max_failures: Annotated[int, Field(ge=0)] = 3
    """Consecutive restarts from the same checkpoint, after the loss of a process or a node, before the run
    fails.
    """

    @property
    def tower_precision(self) -> Literal["float32", "bfloat16"]:
        """The precision of the towers."""
        if self.precision == "auto":
            return "bfloat16" if self.gpu else "float32"
        return self.precision

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation per channel, on pixels in [0, 1]."""
        natural = {1: ((0.5,), (0.25,)), 3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
        mean, std = natural[self.data.channels]
        return self.augment.mean or mean, self.augment.std or std

    @property
    def has_two_towers(self) -> bool:
        """Whether queries and keys are different kinds of samples."""
        return self.data.kind in ("pairs", "image_text")

    @property
    def has_texts(self) -> bool:
        """Whether the samples contain texts."""
        return self.data.kind != "image"

    @property
    def judged_by(self) -> str:
        """The metric of the periodic evaluation that selects the best checkpoint."""
        return "recall_at_10" if self.has_two_towers else "knn_top1"

    def workers_of(self, stage: Stage) -> int:
        """Return the largest number of workers of a stage."""
        return stage.workers or self.workers

    def worker_range(self, stage: Stage) -> tuple[int, int]:
        """Return the smallest and the largest number of workers of a stage."""
        most = self.workers_of(stage)
        return (most if stage.workers or self.min_workers is None else self.min_workers, most)

    def settled(self, workers: int) -> Self:
        """Return the configuration with a fixed number of workers in place of the range."""
        if self.min_workers is None:
            return self
        return self.model_copy(update={"workers": workers, "min_workers": None})

    def local_batch_size(self, stage: Stage) -> int:
        """Return the number of rows of a batch on each worker."""
        return stage.batch_size // self.workers_of(stage)

    def local_views(self, stage: Stage) -> int:
        """Return the number of views each worker's tower embeds per step: two per sample if it encodes the keys too."""
        both = self.key == "tower" and not self.has_two_towers
        return self.local_batch_size(stage) * (2 if both else 1)

    def rows_per_group(self, stage: Stage) -> int:
        """Return the number of rows in a group of shuffled BatchNorm."""
        return stage.batch_size // max(self.batchnorm_groups, self.workers_of(stage))

    @model_validator(mode="after")
    def _asks_for_accelerators_with_gpu(self) -> Self:
        if self.accelerator is not None and not self.gpu:
            raise ValueError(
                f"accelerator={self.accelerator!r} requires gpu=true; set it, or remove accelerator"
            )
        return self

    @model_validator(mode="after")
    def _has_batches_that_divide(self) -> Self:
        if not self.stages:
            raise ValueError("stages is empty; give at least one stage")
        if self.min_workers is not None and self.min_workers > self.workers:
            raise ValueError(
                f"min_workers {self.min_workers} is more than workers {self.workers}; give --workers MIN:MAX"
            )
        for index, stage in enumerate(self.stages):
            if problem := self._problem_of(stage):
                # The index is omitted for a single stage, the usual case.
                raise ValueError(problem if len(self.stages) == 1 else f"stage {index}: {problem}")
        return self

    def _problem_of(self, stage: Stage) -> str | None:
        """Return an error message if a stage is invalid for any number of workers in its range."""
        least, most = self.worker_range(stage)
        for workers in range(least, most + 1):
            settled = self.settled(workers)
            for check in (_check_workers, _check_groups):
                if problem := check(settled, stage):
                    return problem + _range_hint(least, most)
            for check in (_check_chunks, _check_capacity):
                if problem := check(settled, stage):
                    return problem
        return None

    @model_validator(mode="after")
    def _has_a_loss_to_roll_back_to(self) -> Self:
        if self.monitor.on_collapse == "rollback" and not any(stage.has_hinge for stage in self.stages):
            raise ValueError(
                "monitor.on_collapse=rollback replaces the hinge by cross-entropy, and no stage has a "
                "hinge; set it to warn or stop"
            )
        return self

    @model_validator(mode="after")
    def _has_keys_that_fit_loss_and_store(self) -> Self:
        store = self.negatives.store
        if (self.key == "memory_bank") != (store == "memory_bank"):
            raise ValueError(
                f"key {self.key} is incompatible with negatives.store {store}; "
                "key=memory_bank and negatives.store=memory_bank require each other"
            )
        if self.batchnorm == "shuffled" and self.key == "memory_bank":
            raise ValueError(
                "batchnorm shuffled needs two views per sample, and key memory_bank has one; "
                "set batchnorm to synchronized, layer or group"
            )
        for stage in self.stages:
            if problem := self._loss_problem(stage):
                raise ValueError(problem)
            if stage.proximal_weight and self.key != "memory_bank":
                raise ValueError(
                    "proximal_weight needs the slots of a memory bank; set key=memory_bank, or proximal_weight=0"
                )
        return self

    def _loss_problem(self, stage: Stage) -> str | None:
        """Return an error message if the loss of a stage does not fit the keys and negatives."""
        spec, store, kind = LOSSES[stage.loss], self.negatives.store, self.data.kind
        if self.key not in spec.keys or (store != "none" and not spec.stored_negatives):
            return (
                f"loss {stage.loss} is incompatible with key {self.key} and negatives.store {store}: it takes "
                f"key {join_names(spec.keys)}{'' if spec.stored_negatives else ', and negatives.store none'}"
            )
        explicit = kind == "pairs" and self.negatives.explicit
        if explicit and spec.pairs and not spec.explicit_negatives:
            return (
                f"loss {stage.loss} cannot use explicit negatives; set negatives.explicit=false, or loss to "
                f"{join_names(name for name, each in LOSSES.items() if each.pairs and each.explicit_negatives)}"
            )
        if store == "none" and not (self.negatives.in_batch or explicit):
            return f"{stage.loss} has no negatives; set negatives.in_batch=true, or a negatives.store"
        if spec.needs_batch and not self.negatives.in_batch:
            others = [name for name in self._fitting_losses() if name != stage.loss]
            return (
                f"loss {stage.loss} needs in-batch negatives; "
                f"set negatives.in_batch=true, or loss to {join_names(others)}"
            )
        if self.has_two_towers and not spec.pairs:
            return (
                f"loss {stage.loss} compares views of one sample, but data.kind {kind} has pairs; "
                f"set loss to {join_names(name for name, each in LOSSES.items() if each.pairs)}"
            )
        return None

    def _fitting_losses(self) -> list[str]:
        sources = {"key": self.key, "pairs": self.has_two_towers, "store": self.negatives.store}
        in_batch = self.negatives.in_batch
        return [name for name, spec in LOSSES.items() if spec.fits(**sources, in_batch=in_batch)]

    def without_hinge(self, stage: Stage) -> Stage:
        """Return the stage with cross-entropy instead of the hinge."""
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
        """The initial value of a learned bias, from the first stage whose loss learns one; None without."""
        return next((stage.bias for stage in self.stages if "bias" in LOSSES[stage.loss].learns), None)

    @model_validator(mode="after")
    def _has_what_two_towers_need(self) -> Self:
        if self.has_two_towers and self.key != "tower":
            raise ValueError(
                f"data.kind {self.data.kind} encodes its keys by a tower, got key {self.key}; set key=tower"
            )
        if self.has_two_towers and self.batchnorm == "shuffled":
            raise ValueError(
                "batchnorm shuffled needs two views of one tower, and this run has two towers; set it "
                "to synchronized, group or layer"
            )
        for stage in self.stages:
            if stage.logq_correction and (self.data.kind != "pairs" or not LOSSES[stage.loss].log_frequency):
                raise ValueError(
                    "logq_correction needs pairs with recurring documents; set data.kind=pairs and "
                    f"loss={join_names(name for name, spec in LOSSES.items() if spec.log_frequency)}, or remove it"
                )
        if self.learn_temperature and not any(LOSSES[stage.loss].learns for stage in self.stages):
            raise ValueError(
                f"loss {self.stages[0].loss} has no temperature to learn; remove learn_temperature"
            )
        if self.data.kind in ("image", "pairs") and any(self.text_augment.model_dump().values()):
            raise ValueError(
                f"text_augment needs views of texts, and data.kind {self.data.kind} has none; remove it"
            )
        if self.separate_towers and self.data.kind != "pairs":
            raise ValueError(f"separate_towers needs data.kind pairs, got {self.data.kind}; remove it")
        return self

    @model_validator(mode="after")
    def _has_a_bank_that_can_be_held(self) -> Self:
        bank, negatives = self.bank, self.negatives
        if bank.location == "worker" and (bank.shards > 1 or bank.detached or bank.name):
            raise ValueError("bank.shards, bank.detached and bank.name need bank.location=actor; remove them")
        if negatives.store != "memory_bank" and bank.shards > 1:
            raise ValueError(
                f"bank.shards {bank.shards} needs a memory bank, got negatives.store {negatives.store}; "
                "remove bank.shards"
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
                raise ValueError(f"augment.{name} must ascend, got {low} to {high}")
        if self.augment.crop_scale[1] > 1:
            raise ValueError(f"augment.crop_scale must be at most 1, got {self.augment.crop_scale[1]}")
        for name, values in {"mean": self.augment.mean, "std": self.augment.std}.items():
            if values is not None and len(values) != self.data.channels:
                raise ValueError(
                    f"augment.{name} has {len(values)} numbers for {self.data.channels} channels; give one per channel"
                )
        return self


def _range_hint(least: int, most: int) -> str:
    """Return a hint for ranges of workers: a batch size that divides over each number."""
    if least == most:
        return ""
    multiple = math.lcm(*range(least, most + 1))
    # For 1 to 16 workers it is 720,720, too large for a batch.
    remedy = f"choose a multiple of {multiple}" if multiple <= 100_000 else "choose a narrower MIN:MAX"
    return f" (the run may have any number of workers from {least} to {most}; {remedy})"


def _check_workers(config: RunConfig, stage: Stage) -> str | None:
    workers = config.workers_of(stage)
    if stage.batch_size % workers == 0:
        return None
    return (
        f"batch_size {stage.batch_size} does not divide over {workers} workers; "
        "batch_size counts the rows of all workers; choose a multiple"
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
            f"{'null' if size is None else size}: it needs batchnorm {' or '.join(_OVER_THE_BATCH)} and chunk_size; remove it"
        )
    if size is None:
        return None
    if size > views:
        return (
            f"chunk_size {size} is larger than a worker's {views} views of a batch of {stage.batch_size}; "
            "remove chunk_size, or choose a smaller one"
        )
    if config.batchnorm == "shuffled" and size % config.rows_per_group(stage):
        return (
            f"chunk_size {size} is not a multiple of {config.rows_per_group(stage)}, the rows in a group of shuffled BatchNorm; "
            "choose a multiple, or more batchnorm_groups"
        )
    return None


def _check_capacity(config: RunConfig, stage: Stage) -> str | None:
    negatives = config.negatives
    if negatives.store != "queue" or negatives.capacity >= stage.batch_size:
        return None
    return (
        f"negatives.capacity {negatives.capacity} is less than a batch of {stage.batch_size}; "
        "a queue must hold at least the keys of one step"
    )
