"""The parts of a run's configuration, each checked by itself."""

import re
from typing import Annotated, Any, Literal, Self, final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from raycl.display import Displayable, Table, flatten

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Range = tuple[Positive, Positive]


class Section(Displayable, BaseModel):
    """A part of the configuration: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def to_table(self) -> Table:
        """Show the settings that differ from the defaults; ``raycl.config_to_yaml`` has them all."""
        facts = flatten(self.model_dump(mode="json", exclude_defaults=True))
        return Table(title=f"{type(self).__name__}, where it differs from the defaults", facts=facts)


@final
class Columns(Section):
    """Names of the columns to read; ``None`` takes the usual name where it exists.

    Which of them are read follows from ``data.kind``.
    """

    image: str = "image"
    text: str = "text"
    caption: str = "caption"
    query: str = "query"
    document: str = "document"
    negatives: str | None = None
    query_id: str | None = None
    document_id: str | None = None
    negative_ids: str | None = None
    label: str | None = None
    sample_id: str | None = None


@final
class DataConfig(Section):
    """What the samples are, and how images come in.

    ``image`` and ``text`` are samples of which two views are drawn; ``image_text`` are images with their
    captions, and ``pairs`` are queries with a document each, and perhaps explicit negatives.
    Images are decoded, resized to a square of ``decode_size`` and kept as bytes.
    """

    kind: Literal["image", "text", "image_text", "pairs"] = "image"
    columns: Columns = Columns()
    image_size: Annotated[int, Field(ge=8, le=1024)] = 224
    decode_size: Annotated[int, Field(ge=8, le=2048)] | None = None
    channels: Literal[1, 3] = 3
    max_pixels: Count = 64_000_000
    max_invalid_fraction: Fraction = 0.01
    cache: Literal["auto", "materialize", "stream"] = "auto"
    shuffle_buffer_size: Count = 16_384

    @property
    def resolved_decode_size(self) -> int:
        """The stored side in pixels; larger than a crop's for big images, to keep detail."""
        if self.decode_size is not None:
            return self.decode_size
        return self.image_size if self.image_size <= 64 else self.image_size * 5 // 4


@final
class AugmentConfig(Section):
    """The random view of an image (Chen et al., 2020); strengths are torchvision's."""

    crop_scale: Range = (0.08, 1.0)
    crop_ratio: Range = (3 / 4, 4 / 3)
    flip: Fraction = 0.5
    rotation: Annotated[float, Field(ge=0.0, le=180.0)] = 0.0
    jitter: Fraction = 0.8
    brightness: NotNegative = 0.8
    contrast: NotNegative = 0.8
    saturation: NotNegative = 0.8
    hue: Annotated[float, Field(ge=0.0, le=0.5)] = 0.2
    grayscale: Fraction = 0.2
    blur: Fraction = 0.5
    blur_sigma: Range = (0.1, 2.0)
    mean: tuple[float, ...] | None = None
    std: tuple[Positive, ...] | None = None


@final
class TextConfig(Section):
    """How texts are cut into tokens.

    ``tokenizer`` is the address of a ``tokenizer.json``; None trains one of at most ``vocabulary_size``
    tokens on the run's own texts, ``tokenizer_train_size`` of them at most. A query is cut at ``max_length``
    tokens, and so is a text; a document, or a negative, at ``max_document_length`` if that is set.
    The rows of ``length_buckets`` batches are sorted by length and make as many batches of like
    lengths, which saves padding and leaves no negative that its length gives away; 1 leaves them mixed.
    """

    tokenizer: str | None = None
    vocabulary_size: Annotated[int, Field(ge=261)] = 16_384
    lowercase: bool = True
    tokenizer_train_size: Count = 1_000_000
    max_length: Annotated[int, Field(ge=1, le=8_192)] = 64
    max_document_length: Annotated[int, Field(ge=1, le=8_192)] | None = None
    length_buckets: Count = 1

    @property
    def longest(self) -> int:
        """The greatest number of tokens of a text in any role."""
        return max(self.max_length, self.max_document_length or 0)


@final
class TextAugmentConfig(Section):
    """The random view of a text: words left out, copied elsewhere, tokens repeated (Wu et al., 2022)."""

    deletion: Fraction = 0.0
    insertion: Fraction = 0.0
    repetition: Fraction = 0.0


@final
class EncoderConfig(Section):
    """The network: a name, or ``package.module:function`` of the user's own.

    Names are torchvision's for images; ``bag_of_subwords``, ``transformer`` or ``transformers:PATH``
    for texts. ``stem`` and ``width`` are those of images' networks.
    """

    name: str = "resnet50"
    stem: Literal["auto", "small", "half", "standard"] = "auto"
    width: Positive = 1.0
    kwargs: dict[str, Any] = {}


@final
class HeadConfig(Section):
    """The projection head; ``hidden_dim=None`` is as wide as the representation.

    ``batchnorm`` is that of the hidden layers. With no layers the representation is the embedding,
    and ``dim`` must be its width.
    """

    num_layers: Literal[0, 1, 2, 3] = 2
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
    """Where the negatives come from: the gathered batch, a store, the pairs themselves, or all of them.

    ``explicit`` negatives are those that pairs bring with them, candidates of every query of the batch.
    ``queue`` keeps the newest ``capacity`` keys; of a ``memory_bank``, one slot a sample that moves
    by ``bank_momentum``, ``num_negatives`` slots are drawn for each step; its slots begin at ``bank_init``: random rows,
    as in the paper, or the embeddings of the untrained tower, which cost one pass over the data and
    spare the first epochs the task of fitting random targets.
    ``normalizer_momentum=None`` holds the first estimate of the normalizing constant of ``nce``.
    """

    in_batch: bool = True
    explicit: bool = True
    store: Literal["none", "queue", "memory_bank"] = "none"
    capacity: Count = 65_536
    num_negatives: Count = 4_096
    bank_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    bank_init: Literal["random", "encoder"] = "random"
    normalizer_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None


@final
class BankConfig(Section):
    """How a store is held: by an actor that outlives the workers, or in each worker's process.

    ``name`` is what others ask it by; None takes the last part of ``--output``. ``shards`` is the
    number of actors of a memory bank, for more memory than one node has. A ``detached`` bank stays
    when the run is over. ``max_staleness=1`` reads a memory bank one step ahead, so that no worker waits for it, and misses
    what this worker wrote in the previous step, and others in up to two; its rows then travel as
    float16. 0 waits, and they travel as they are. ``dtype`` is that of the rows. ``timeout_s`` is how
    long a shard may take to start or to come back; where the cluster grows, at least 900 s.
    """

    location: Literal["actor", "worker"] = "actor"
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
class EvaluationConfig(Section):
    """The periodic kNN judge on held-out labeled rows (Wu et al., 2018).

    ``every_epochs=None`` judges about ten times a run, ``0`` never. ``num_test`` rows are held
    out of training (never more than a tenth of the set) and vote over ``num_train`` others. Of a large
    set that is streamed, they come from some pieces spread over it, and all other rows are trained on.
    Each evaluation also saves the embeddings of ``num_snapshot_samples`` held-out rows for the report; 0 saves none.
    """

    every_epochs: Annotated[int, Field(ge=0)] | None = None
    num_train: Count = 10_000
    num_test: Count = 2_000
    k: Count = 200
    temperature: Positive = 0.07
    num_snapshot_samples: Annotated[int, Field(ge=0)] = 1_000


@final
class CheckpointConfig(Section):
    """When to save: after every judgment, and every ``every_steps`` steps or ``interval_s`` seconds."""

    every_steps: Count | None = None
    interval_s: Positive = 300.0
    keep: Count = 2


@final
class MonitorConfig(Section):
    """What watches for collapse (see ``docs/stages.md``) and what happens then.

    ``warn`` says so and goes on; ``stop`` ends the run; ``rollback`` goes back to the last good
    checkpoint and takes cross-entropy in place of the hinge for ``cross_entropy_steps`` steps, at
    most ``max_rollbacks`` times. A sign of collapse counts when it is seen at ``patience`` logged
    steps in a row; at ``initial_patience`` if the run was never good before.
    """

    on_collapse: Literal["warn", "stop", "rollback"] = "warn"
    patience: Count = 3
    initial_patience: Annotated[int, Field(ge=3)] = 20
    cross_entropy_steps: Count = 500
    max_rollbacks: Count = 3

    @model_validator(mode="after")
    def _waits_longer_at_the_start(self) -> Self:
        if self.initial_patience < self.patience:
            raise ValueError(
                f"initial_patience {self.initial_patience} is less than patience {self.patience}; 20 and 3 are usual"
            )
        return self


@final
class TrackingConfig(Section):
    """Where metrics go besides ``metrics.jsonl`` and Prometheus.

    ``tensorboard`` writes event files below ``<output>/tensorboard``. ``mlflow`` is the address of a
    tracking server, or an absolute path; ``wandb`` is a project of Weights & Biases, or
    ``entity/project``. Keys and passwords are none of the settings: both take them from their usual
    variables, on the workers.
    """

    tensorboard: bool = False
    mlflow: str | None = None
    wandb: Annotated[str, Field(pattern=r"^[^/\s]+(/[^/\s]+)?$")] | None = None

    @model_validator(mode="after")
    def _has_an_address_that_all_may_read(self) -> Self:
        address = self.mlflow
        if address is None:
            return self
        if re.search(r"//[^/@]*@", address):
            raise ValueError(
                "mlflow holds a user or password, which would be written to config.yaml; give the address alone "
                "and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        if not (address.startswith("/") or ":" in address or address == "databricks"):
            raise ValueError(
                f"mlflow {address!r} would be another folder on every node; give an address such as "
                "http://host:5000, or an absolute path"
            )
        return self
