"""A run, stated: frozen, validated values. Nothing below this floor sees them."""

from typing import Annotated, Any, Literal, Self, final

from pydantic import BaseModel, ConfigDict, Field, model_validator

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1)]
Range = tuple[Positive, Positive]


_KEYS_OF = {
    "nt_xent": ("tower",),
    "info_nce": ("tower", "momentum_encoder", "slot"),
    "nce": ("slot",),
}


class Section(BaseModel):
    """A part of the configuration: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@final
class Columns(Section):
    """Names of the columns to read; ``None`` takes the usual name where it exists."""

    image: str = "image"
    label: str | None = None
    sample_id: str | None = None


@final
class DataConfig(Section):
    """How images come in: decoded, resized to a square of ``stored_size``, kept as bytes."""

    columns: Columns = Columns()
    image_size: Annotated[int, Field(ge=8, le=1024)] = 224
    stored_size: Annotated[int, Field(ge=8, le=2048)] | None = None
    channels: Literal[1, 3] = 3
    max_pixels: Count = 64_000_000
    max_bad_fraction: Probability = 0.01
    cache: Literal["auto", "materialize", "stream"] = "auto"
    shuffle_rows: Count = 16_384

    @property
    def decoded_size(self) -> int:
        """The stored side in pixels; larger than a crop's for big images, to keep detail."""
        if self.stored_size is not None:
            return self.stored_size
        return self.image_size if self.image_size <= 64 else self.image_size * 5 // 4


@final
class AugmentConfig(Section):
    """The random view of an image (Chen et al., 2020); strengths are torchvision's."""

    crop_scale: Range = (0.08, 1.0)
    crop_ratio: Range = (3 / 4, 4 / 3)
    flip: Probability = 0.5
    rotation: Annotated[float, Field(ge=0.0, le=180.0)] = 0.0
    jitter: Probability = 0.8
    brightness: NotNegative = 0.8
    contrast: NotNegative = 0.8
    saturation: NotNegative = 0.8
    hue: Annotated[float, Field(ge=0.0, le=0.5)] = 0.2
    grayscale: Probability = 0.2
    blur: Probability = 0.5
    blur_sigma: Range = (0.1, 2.0)
    mean: tuple[float, ...] | None = None
    std: tuple[Positive, ...] | None = None


@final
class EncoderConfig(Section):
    """The network: a torchvision name, or ``package.module:function`` of the user's own."""

    name: str = "resnet50"
    stem: Literal["auto", "small", "half", "standard"] = "auto"
    width: Positive = 1.0
    arguments: dict[str, Any] = {}


@final
class HeadConfig(Section):
    """The projection head; ``hidden_dim=None`` is as wide as the representation.

    ``batchnorm`` is that of the hidden layers.
    """

    num_layers: Literal[1, 2, 3] = 2
    hidden_dim: Count | None = None
    dim: Annotated[int, Field(ge=2)] = 128
    batchnorm: bool = True


@final
class MomentumEncoderConfig(Section):
    """How slowly the momentum encoder follows (He et al., 2020).

    ``momentum`` may rise to ``final_momentum`` over the run, along half a cosine.
    """

    momentum: Fraction = 0.999
    final_momentum: Fraction | None = None


@final
class NegativesConfig(Section):
    """Where the negatives come from: the gathered batch, a store, or both.

    ``queue`` keeps the newest ``capacity`` keys; of a ``memory_bank``, one slot a sample that moves
    by ``slot_momentum``, ``num_negatives`` slots are drawn for each step; its ``first_rows`` are random,
    as in the paper, or the embeddings of the untrained tower, which cost one pass over the data and
    spare the first epochs the task of fitting random targets.
    ``normalizer_momentum=None`` holds the first estimate of the normalizing constant of ``nce``.
    """

    in_batch: bool = True
    store: Literal["none", "queue", "memory_bank"] = "none"
    capacity: Count = 65_536
    num_negatives: Count = 4_096
    slot_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    first_rows: Literal["random", "embeddings"] = "random"
    normalizer_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None


@final
class BankConfig(Section):
    """How a store is held: by an actor that outlives the workers, or in each worker's process.

    ``name`` is what others ask it by; None takes the last part of ``--output``. ``shards`` cut it
    over actors, for more memory than one node has. A ``detached`` bank stays when the run is over.
    ``max_staleness=1`` reads a memory bank one step ahead, so that no worker waits for it, and misses
    what this worker wrote in the previous step, and others in up to two; its rows then travel as
    float16. 0 waits, and they travel as they are. ``dtype`` is that of the rows.
    """

    held_by: Literal["actor", "workers"] = "actor"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)] | None = None
    shards: Count = 1
    detached: bool = False
    max_staleness: Annotated[int, Field(ge=0, le=1)] = 1
    dtype: Literal["float32", "float16"] = "float32"
    timeout_s: Positive = 120.0


@final
class OptimizerConfig(Section):
    """The optimizer; ``momentum`` for SGD and LARS, ``betas`` for AdamW."""

    name: Literal["sgd", "adamw", "lars"] = "lars"
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (
        0.9,
        0.999,
    )
    weight_decay: NotNegative = 1e-6
    trust_coefficient: Positive = 1e-3


@final
class Stage(Section):
    """A stretch of the run; exactly one of ``epochs`` and ``steps`` says how long.

    The peak learning rate is ``learning_rate`` at a batch of 256 rows and follows the batch by
    ``learning_rate_scaling``; after ``warmup_epochs`` (or a tenth of the stage, if that is less)
    it falls along half a cosine, or to a tenth at three and again at four fifths (``step``).
    ``proximal_weight`` pulls an embedding to its slot of the memory bank (Wu et al., 2018).
    """

    epochs: Count | None = None
    steps: Count | None = None
    batch_size: Annotated[int, Field(ge=2)] = 256
    loss: Literal["nt_xent", "info_nce", "nce"] = "nt_xent"
    temperature: Positive = 0.1
    proximal_weight: NotNegative = 0.0
    learning_rate: Positive = 0.3
    learning_rate_scaling: Literal["linear", "square_root", "none"] = "linear"
    learning_rate_schedule: Literal["cosine", "step", "constant"] = "cosine"
    warmup_epochs: NotNegative = 10.0

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("set exactly one of epochs and steps")
        return self

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate at this stage's batch size."""
        ratio = self.batch_size / 256
        return (
            self.learning_rate
            * {"linear": ratio, "square_root": ratio**0.5, "none": 1.0}[self.learning_rate_scaling]
        )


@final
class EvaluationConfig(Section):
    """The periodic kNN judge on held-out labeled rows (Wu et al., 2018).

    ``every_epochs=None`` judges about ten times a run, ``0`` never. ``num_test`` rows are held
    out of training (never more than a tenth of the set) and vote over ``num_train`` others. Of a large
    set that is streamed, they come from some pieces spread over it, and all other rows are trained on.
    """

    every_epochs: Annotated[int, Field(ge=0)] | None = None
    num_train: Count = 10_000
    num_test: Count = 2_000
    k: Count = 200
    temperature: Positive = 0.07


@final
class CheckpointConfig(Section):
    """When to save: after every judgment, and every ``every_steps`` steps or ``every_s`` seconds."""

    every_steps: Count | None = None
    every_s: Positive = 300.0
    keep: Count = 2


@final
class RunConfig(Section):
    """A whole run as a value; recipes return one, YAML holds one.

    ``key`` says what encodes a query's key: the same tower (SimCLR), the momentum encoder (MoCo), or
    nothing, for the key is the sample's own slot of the memory bank (InstDisc). ``shuffled``
    BatchNorm takes its statistics in ``batchnorm_groups`` groups over all workers, at least one a
    worker. ``autoscaling`` says that the cluster grows when more is asked for than it has now;
    otherwise a run that does not fit is refused.
    """

    recipe: str
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    workers: Count = 1
    gpu: bool = False
    autoscaling: bool = False
    cpus_per_worker: Positive | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    encoder: EncoderConfig = EncoderConfig()
    projection_head: HeadConfig = HeadConfig()
    key: Literal["tower", "momentum_encoder", "slot"] = "tower"
    momentum_encoder: MomentumEncoderConfig = MomentumEncoderConfig()
    negatives: NegativesConfig = NegativesConfig()
    bank: BankConfig = BankConfig()
    batchnorm: Literal["synchronized", "shuffled", "layer", "group", "as_is"] = "synchronized"
    batchnorm_groups: Count = 8
    optimizer: OptimizerConfig = OptimizerConfig()
    stages: Annotated[tuple[Stage, ...], Field(min_length=1, max_length=1)]
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    log_every_steps: Count = 10
    max_failures: Annotated[int, Field(ge=0)] = 0

    @property
    def stage(self) -> Stage:
        """The run's one stage."""
        return self.stages[0]

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation by channel, on pixels between 0 and 1."""
        natural = {1: ((0.5,), (0.25,)), 3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
        mean, std = natural[self.data.channels]
        return self.augment.mean or mean, self.augment.std or std

    @property
    def chunks_per_worker(self) -> int:
        """Into how many groups of rows shuffled BatchNorm cuts a worker's batch."""
        return max(1, self.batchnorm_groups // self.workers)

    @model_validator(mode="after")
    def _has_a_batch_that_divides(self) -> Self:
        for stage in self.stages:
            if stage.batch_size % self.workers:
                raise ValueError(
                    f"batch_size {stage.batch_size} does not divide over {self.workers} workers; "
                    "batch_size counts the rows of all workers, choose a multiple"
                )
            groups = max(self.batchnorm_groups, self.workers)
            if self.batchnorm == "shuffled" and groups % self.workers:
                raise ValueError(
                    f"batchnorm_groups {groups} do not divide over {self.workers} workers; choose a multiple"
                )
            if self.batchnorm == "shuffled" and (
                stage.batch_size % groups or stage.batch_size < 2 * groups or groups < 2
            ):
                raise ValueError(
                    f"batch_size {stage.batch_size} does not split into {groups} groups of at least 2 rows for "
                    "shuffled BatchNorm, which needs 2 groups or more; set batchnorm_groups or --batch-size"
                )
            if self.negatives.store == "queue" and self.negatives.capacity < stage.batch_size:
                raise ValueError(
                    f"negatives.capacity {self.negatives.capacity} is less than a batch of {stage.batch_size}; "
                    "a queue keeps at least the keys of one step"
                )
        return self

    @model_validator(mode="after")
    def _has_keys_that_fit_loss_and_store(self) -> Self:
        store = self.negatives.store
        if (self.key == "slot") != (store == "memory_bank"):
            raise ValueError(
                f"key {self.key} and negatives.store {store} do not fit: a memory bank's slots are the keys "
                "(key=slot), and no other store has slots"
            )
        if self.batchnorm == "shuffled" and self.key != "momentum_encoder":
            raise ValueError(
                f"batchnorm shuffled does not go with key {self.key}: it shuffles what a momentum encoder encodes; "
                "set batchnorm to synchronized, layer or group"
            )
        for stage in self.stages:
            allowed = _KEYS_OF[stage.loss]
            if self.key not in allowed or (stage.loss == "nt_xent" and store != "none"):
                raise ValueError(
                    f"loss {stage.loss} does not go with key {self.key} and negatives.store {store}: it takes "
                    f"key {' or '.join(allowed)}{', and no store' if stage.loss == 'nt_xent' else ''}"
                )
            if store == "none" and not self.negatives.in_batch:
                raise ValueError(
                    f"{stage.loss} has no negatives: set negatives.in_batch=true, or a negatives.store"
                )
            if stage.proximal_weight and self.key != "slot":
                raise ValueError("proximal_weight pulls to a slot of the memory bank: set key=slot, or 0")
        return self

    @model_validator(mode="after")
    def _has_a_bank_that_can_be_held(self) -> Self:
        bank, negatives = self.bank, self.negatives
        if bank.held_by == "workers" and (bank.shards > 1 or bank.detached or bank.name):
            raise ValueError(
                "bank.shards, bank.detached and bank.name are an actor's; with bank.held_by workers leave them out"
            )
        if negatives.store == "queue" and negatives.capacity % bank.shards:
            raise ValueError(
                f"negatives.capacity {negatives.capacity} does not divide over {bank.shards} shards; "
                "make it a multiple of bank.shards"
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
