"""The sections of a run's configuration."""

import json
import re
from typing import Annotated, Any, Literal, Self, final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from raycl.display import Displayable, Table, flatten

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
SMALLEST_VIEW = 8  # pixels
_Share = Annotated[float, Field(gt=0.0, le=1.0)]


def _ascending(values: tuple[float, float]) -> tuple[float, float]:
    low, high = values
    if low > high:
        raise ValueError(f"must ascend, got {low} to {high}")
    return values


Range = Annotated[tuple[Positive, Positive], AfterValidator(_ascending)]
_CropScale = Annotated[tuple[_Share, _Share], AfterValidator(_ascending)]


def check_text_keys(value: Any) -> None:
    """Raise ``ValueError`` for a key that JSON would turn into text."""
    if isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r} is not text; put it into quotes")
            check_text_keys(each)
    for each in value if isinstance(value, list | tuple) else ():
        check_text_keys(each)


def scaled_size(size: int, *, full: int, new_full: int) -> int:
    """Return the side of a view in pixels if the full size changes."""
    return round(size * new_full / full)


class Section(Displayable, BaseModel):
    """A section of the configuration: frozen, strictly typed, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __hash__(self) -> int:
        # Equal sections have equal hashes without their dicts, such as encoder.kwargs, which have none.
        values = (getattr(self, name) for name in type(self).model_fields)
        return hash(tuple(value for value in values if not isinstance(value, dict)))

    def to_table(self) -> Table:
        """Return the settings that differ from the defaults; ``raycl.config_to_yaml`` has all."""
        facts = flatten(self.model_dump(mode="json", exclude_defaults=True))
        return Table(title=f"{type(self).__name__}, where it differs from the defaults", facts=facts)


@final
class Columns(Section):
    """Names of the columns to read.

    ``data.kind`` selects the columns that are needed. With ``None``, an optional column is read under
    its field's name if the data have it.
    """

    image: str = "image"
    """Encoded images (JPEG, PNG, ...), or their paths: bytes, a struct with ``bytes`` or ``path``, or texts."""

    text: str = "text"
    """Texts; a list of texts holds alternatives with the same meaning."""

    caption: str = "caption"
    """Captions of the images, for kind ``image_text``; a list holds alternatives."""

    query: str = "query"
    """Queries, for kind ``pairs``."""

    document: str = "document"
    """The positive document of each query, for kind ``pairs``."""

    negatives: str | None = None
    """Lists of explicit negative documents, for kind ``pairs``."""

    query_id: str | None = None
    """Ids of the queries; equal ids are never negatives of each other."""

    document_id: str | None = None
    """Ids of the documents; equal ids are never negatives of each other."""

    negative_ids: str | None = None
    """Lists of ids, one per explicit negative."""

    weight: str | None = None
    """Weights of the samples in the loss, finite numbers of at least 0. ``None`` reads no weights."""

    label: str | None = None
    """Integer or text labels: classes for the evaluation, or 1 and 0 for clicked and skipped documents."""

    sample_id: str | None = None
    """Ids of the samples, integers or texts, by which a bank is queried."""


@final
class DataConfig(Section):
    """The samples, and how they are read and cached.

    Images are decoded, resized to a square of ``decode_size`` pixels and stored as uint8.
    """

    kind: Literal["image", "text", "image_text", "pairs"] = "image"
    """Sample type: ``image`` and ``text`` give two random views of a sample, ``image_text`` an image and
    its caption, ``pairs`` a query and its document, optionally with explicit negatives.
    """

    columns: Columns = Columns()
    """Names of the columns."""

    weights: tuple[Positive, ...] | None = None
    """Shares of the batches of an epoch, one per data set, if there are several (``--data A --data B``);
    default: in proportion to their sizes, so that an epoch is one pass over each.
    """

    image_size: Annotated[int, Field(ge=8, le=1024)] = 224
    """Side of a view in pixels, 8 to 1024."""

    decode_size: Annotated[int, Field(ge=8, le=2048)] | None = None
    """Side of a stored image in pixels, 8 to 2048; by default ``image_size`` up to 64 pixels and 1.25 times
    that above, so that random crops keep detail.
    """

    channels: Literal[1, 3] = 3
    """1 for grayscale, 3 for RGB."""

    max_pixels: Count = 64_000_000
    """Images with more pixels are invalid; protects memory against decompression bombs."""

    max_invalid_fraction: Fraction = 0.01
    """The run fails when more than this fraction of the rows is invalid, 0 to 1."""

    cache: Literal["auto", "materialize", "stream"] = "auto"
    """``materialize`` keeps the decoded data in the object store, ``stream`` reads them in each epoch;
    ``auto`` materializes data that fit into half of the smallest node's object store.
    """

    shuffle_buffer_size: Count = 16_384
    """Rows in the shuffle buffer of streamed data; larger buffers shuffle better and need more memory."""

    samples_per_class: Annotated[int, Field(ge=2)] | None = None
    """Samples of each class in a batch, at least 2, with ``batch_size / samples_per_class`` classes drawn
    uniformly; streamed data form as many such batches as the shuffle buffer allows. Needs labels. Default:
    samples are drawn regardless of their class.
    """

    @property
    def resolved_decode_size(self) -> int:
        """The side of a stored image in pixels, with the default applied."""
        if self.decode_size is not None:
            return self.decode_size
        return self.image_size if self.image_size <= 64 else self.image_size * 5 // 4


@final
class ViewsConfig(Section):
    """Random views of one size."""

    count: Count
    """Views of each sample; the first entry has at least 2."""

    size: Annotated[int, Field(ge=8, le=1024)] | None = None
    """Side of these views in pixels, at most ``data.image_size``, which is the default and the size of the first
    entry. A stage with an ``image_size`` of its own scales all sizes by the same factor.
    """

    crop_scale: _CropScale | None = None
    """As ``augment.crop_scale``, the default, for these views."""


@final
class AugmentConfig(Section):
    """The random views of an image (Chen et al., 2020); strengths as in torchvision.

    The defaults are SimCLR's for ImageNet.
    """

    views: tuple[ViewsConfig, ...] | None = None
    """Views of each sample, by size, such as ``[{count: 2}, {count: 4, size: 96, crop_scale: [0.05, 0.14]}]``, the
    multi-crop of SwAV (Caron et al., 2020). Every view is compared with the views of the first entry. Default: two
    views of full size.
    """

    crop_scale: _CropScale = (0.08, 1.0)
    """Range of the crop's area as a fraction of the image's area, at most 1."""

    crop_ratio: Range = (3 / 4, 4 / 3)
    """Range of the crop's aspect ratio, width / height."""

    flip: Fraction = 0.5
    """Probability of a horizontal flip."""

    rotation: Annotated[float, Field(ge=0.0, le=180.0)] = 0.0
    """Largest rotation in degrees, 0 to 180, in either direction."""

    jitter: Fraction = 0.8
    """Probability of color jitter."""

    brightness: NotNegative = 0.8
    """Strength of the brightness jitter: factors from max(0, 1 - strength) to 1 + strength."""

    contrast: NotNegative = 0.8
    """Strength of the contrast jitter, as for ``brightness``."""

    saturation: NotNegative = 0.8
    """Strength of the saturation jitter, as for ``brightness``."""

    hue: Annotated[float, Field(ge=0.0, le=0.5)] = 0.2
    """Largest hue shift as a fraction of the color circle, 0 to 0.5."""

    grayscale: Fraction = 0.2
    """Probability of a conversion to gray."""

    blur: Fraction = 0.5
    """Probability of a Gaussian blur."""

    blur_sigma: Range = (0.1, 2.0)
    """Range of the blur's standard deviation in pixels."""

    mean: tuple[Finite, ...] | None = None
    """Mean per channel on pixels in [0, 1]; default: ImageNet's, or 0.5 for one channel."""

    std: tuple[Positive, ...] | None = None
    """Standard deviation per channel on pixels in [0, 1]; default: ImageNet's, or 0.25 for one channel."""


@final
class TextConfig(Section):
    """Tokenization, and the lengths of texts in tokens."""

    tokenizer: str | None = None
    """Address of a ``tokenizer.json``; by default a tokenizer is trained on the run's texts."""

    corpus: str | None = None
    """Address of more texts to train the tokenizer and count tokens on, such as documents without queries; in a column
    ``text`` or in a column of the run's texts.
    """

    vocabulary_size: Annotated[int, Field(ge=261)] = 16_384
    """Largest number of tokens of a trained tokenizer, at least 261: all bytes and the special tokens."""

    lowercase: bool = True
    """Whether a trained tokenizer lowercases texts."""

    tokenizer_train_size: Count = 1_000_000
    """Largest number of texts to train the tokenizer on."""

    max_length: Annotated[int, Field(ge=1, le=8_192)] = 64
    """Tokens after which texts and queries are truncated, 1 to 8192."""

    max_document_length: Annotated[int, Field(ge=1, le=8_192)] | None = None
    """Tokens after which documents and negatives are truncated, 1 to 8192; default: ``max_length``."""

    query_prompt: str = ""
    """Text before each query or sentence, such as ``"query: "`` of E5 (Wang et al., 2022), in training and in
    use; its tokens count in ``max_length``.
    """

    document_prompt: str = ""
    """Text before each document, negative or caption, such as ``"passage: "``."""

    length_buckets: Count = 1
    """Number of batches whose rows are sorted by length together, into as many batches of similar lengths:
    less padding, and no negatives that are recognizable by their length. 1 does not sort.
    """

    @field_validator("query_prompt", "document_prompt", mode="before")
    @classmethod
    def _is_text(cls, prompt: object) -> object:
        if not isinstance(prompt, str):
            raise ValueError(f"quote the prompt within the value, as '\"query: \"'; YAML read {prompt!r}")
        return prompt

    @property
    def longest(self) -> int:
        """The largest number of tokens of a text in any role."""
        return max(self.max_length, self.max_document_length or 0)

    def prompt_of(self, role: str) -> str:
        """Return the prompt of the texts in a column with this role."""
        return self.query_prompt if role in ("text", "query") else self.document_prompt


@final
class TextAugmentConfig(Section):
    """The random view of a text; the defaults leave it unchanged."""

    deletion: Fraction = 0.0
    """Probability that a word is deleted; at least one word stays."""

    insertion: Fraction = 0.0
    """Probability that a word is followed by a copy of another word of the text."""

    repetition: Fraction = 0.0
    """Up to max(2, ``repetition`` * n) of n tokens are repeated, 0 to 1; 0.32 in ESimCSE (Wu et al.,
    2022).
    """


@final
class EncoderConfig(Section):
    """The network of a tower."""

    name: str = "resnet50"
    """``resnet18``, ``vit_small`` and the like for images; ``bag_of_subwords``, ``transformer`` or
    ``transformers:PATH`` for texts; ``package.module:function`` for a custom network.
    """

    stem: Literal["auto", "small", "half", "standard"] = "auto"
    """First layer of an image network: ``standard`` is a 7x7 convolution with stride 2 and pooling,
    ``small`` a 3x3 convolution without either, ``half`` the same with stride 2. ``auto`` is ``small`` up to
    64 pixels, ``standard`` above.
    """

    width: Positive = 1.0
    """Multiplier of an image network's channels."""

    kwargs: dict[str, Any] = {}
    """Keyword arguments of a text encoder or a custom network: finite numbers, text, lists and mappings by text."""

    freeze_patches: bool = False
    """Whether the patch projection of a ViT keeps its random weights, which makes training stable (Chen et al.,
    2021).
    """

    whitening: Positive | None = None
    """Shrinkage of a last linear layer that evens out the variances of the saved encoder's representations; a small one
    makes them equal in all directions. Neighbors become better, and a classifier of few labels may become worse.
    Default: no such layer.
    """

    @field_validator("kwargs")
    @classmethod
    def _is_json(cls, values: dict[str, Any]) -> dict[str, Any]:
        check_text_keys(values)
        try:
            json.dumps(values, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{error}; give finite numbers, text, lists and mappings") from None
        return values


@final
class HeadConfig(Section):
    """The projection head, between the representation and the embedding."""

    num_layers: Literal[0, 1, 2, 3] = 2
    """Linear layers; with 0 the representation is the embedding."""

    hidden_dim: Count | None = None
    """Width of the hidden layers; default: the width of the representation."""

    dim: Annotated[int, Field(ge=2)] = 128
    """Dimension of the embedding, at least 2; 128 as in SimCLR. With 0 layers, the representation's width."""

    batchnorm: Literal[True, False, "all"] = True
    """Whether the hidden layers have BatchNorm; ``all`` gives one to the last layer too."""


@final
class PredictionHeadConfig(Section):
    """The prediction head, which maps projections to queries; keys have none (Grill et al., 2020).

    With it all views of a sample are queries, views of full size are keys too, and the loss is the mean over all
    queries and the keys of other views: with two views, over both directions.
    """

    num_layers: Literal[0, 1, 2, 3] = 0
    """Linear layers; 0 means no prediction head."""

    hidden_dim: Count | None = None
    """Width of the hidden layers, which have BatchNorm; default: the dimension of the embedding."""


def _is_label(text: str) -> str:
    name, _, value = text.partition("=")
    if not name or not value or "=" in value or " " in text:
        raise ValueError(f"must be NAME=VALUE, such as zone=spot, got {text!r}")
    return text


class PoolConfig(Section):
    """A pool of actors that encode."""

    actors: Count = 1
    """Most actors of the pool; it grows while callers wait for it."""

    min_actors: Annotated[int, Field(ge=0)] | None = None
    """Fewest actors of the pool, at least 0; default: exactly ``actors``."""

    cpus_per_actor: Positive = 1.0
    """CPUs reserved per actor."""

    gpus_per_actor: NotNegative = 0.0
    """GPUs reserved per actor, such as 0.5; 0 encodes on the CPU."""

    node_label: Annotated[str, AfterValidator(_is_label)] | None = None
    """Ray label ``NAME=VALUE`` of the nodes for these actors; default: any node."""

    @property
    def actor_range(self) -> tuple[int, int]:
        """The fewest and the most actors of the pool."""
        return self.actors if self.min_actors is None else self.min_actors, self.actors

    @property
    def labels(self) -> dict[str, str]:
        """The Ray label of the nodes for these actors; empty for any node."""
        name, _, value = (self.node_label or "").partition("=")
        return {name: value} if name else {}


@final
class MomentumEncoderConfig(PoolConfig):
    """The momentum encoder: a moving average of the tower's weights (He et al., 2020)."""

    momentum: Fraction = 0.999
    """Weight of the old value at each step, 0 to 1; 0.999 as in MoCo."""

    final_momentum: Fraction | None = None
    """Momentum at the end of the run, reached along half a cosine; default: constant."""

    location: Literal["workers", "actors"] = "workers"
    """Where keys are encoded: by the ``workers``, or ahead of their use by a pool of ``actors`` with
    published weights. Then a worker encodes only the keys that are missing or too old.
    """

    ahead: Annotated[int, Field(ge=2)] = 2
    """Steps before its use at which a batch goes to the pool, at least 2."""

    publish_every: Count = 1
    """Steps between the weights that the pool gets, unless the last ones are still on their way."""

    max_age: Annotated[int, Field(ge=0)] = 64
    """Largest age of a key, in steps since its weights; 0 uses no key of the pool."""


@final
class GuideConfig(Section):
    """Embeddings by another encoder, which masks the negatives that it finds nearer than the positive (Solatorio, 2024),
    or is the teacher of ``distillation``.

    They are folders of parquet files with the columns ``query_id`` or ``document_id``, or ``sample_id`` of images and
    sentences, and ``representation``, as ``raycl embed`` writes them.
    """

    query: Annotated[str, Field(min_length=1)] | None = None
    """Folder of the queries' embeddings, by ``query_id``; of images and sentences, by ``sample_id``."""

    document: Annotated[str, Field(min_length=1)] | None = None
    """Folder of the embeddings of documents and explicit negatives, by ``document_id``."""

    margin: Finite = 0.0
    """A negative is masked if its similarity is above the positive's minus this margin, in cosine. The positive of an
    image or a sentence has similarity 1, since both views have one embedding; a mask then needs a margin above 0.
    """

    margin_strategy: Literal["absolute", "relative"] = "absolute"
    """``relative`` multiplies the margin by the absolute value of the positive's similarity."""

    def folders(self, kind: str) -> dict[str, str | None]:
        """Return the folders that a run on this kind of samples needs, by the column of their ids."""
        if kind == "pairs":
            return {"query_id": self.query, "document_id": self.document}
        return {"sample_id": self.query}


@final
class MinedConfig(PoolConfig):
    """Hard negatives from a search with the newest weights, which runs during training (ANCE: Xiong et al., 2021).

    The queries and documents come from pairs, images with captions, or sentences.
    """

    num: Annotated[int, Field(ge=0)] = 0
    """Mined negatives of each query in a step, in addition to the data's; 0 mines none."""

    candidates: Count = 20
    """Nearest documents of each query from which ``num`` are drawn, at least as many; 200 in ANCE."""

    random_fraction: Fraction = 0.0
    """Fraction of the mined negatives that are random documents instead, 0 to 1."""

    max_relative_score: _Share = 0.95
    """A document nearer to the query than this fraction of its positive's cosine is skipped, since it may match;
    as for ``raycl mine``.
    """

    refresh: Count = 100
    """Steps after which the workers publish their weights and take the newest result of the search."""


def _flag_or_count(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, int) and value >= 1):
        return value
    raise ValueError(f"must be true, false or a number of at least 1, got {value!r}")


@final
class NegativesConfig(Section):
    """Sources of negatives, which may be combined: the batch, explicit negatives, mined ones, a queue or a memory
    bank.
    """

    in_batch: bool = True
    """Whether the other rows of the batch, over all workers, are negatives."""

    explicit: Annotated[bool | int, BeforeValidator(_flag_or_count)] = True
    """Whether the explicit negatives of the pairs are candidates of every query in the batch. With a number, each pair
    draws at most this many of its own in each epoch.
    """

    store: Literal["none", "queue", "memory_bank", "partition"] = "none"
    """``queue`` stores the newest keys, ``memory_bank`` one slot per sample, ``partition`` each sample's
    partition function for loss ``gcl``, two for a pair.
    """

    capacity: Count = 65_536
    """Keys in the queue, at least one batch; 65,536 as in MoCo."""

    num_negatives: Count = 4_096
    """Slots of the memory bank drawn per step; 4,096 as in InstDisc."""

    bank_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """Weight of the old value when a slot is updated, below 1; 0.5 as in InstDisc. For ``gcl`` it is 1 minus
    the gamma of SogCLR and FastCLIP.
    """

    bank_init: Literal["random", "encoder"] = "random"
    """Initial slots: ``random`` as in the paper, or the embeddings of the untrained ``encoder``, which cost
    one pass over the data and save the first epochs of fitting random targets.
    """

    normalizer_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Weight of the old value when NCE's normalizing constant is updated, below 1; by default the first
    estimate is kept.
    """

    guide: GuideConfig = GuideConfig()
    """Another encoder that masks negatives."""

    mined: MinedConfig = MinedConfig()
    """Explicit negatives that are mined during training."""

    @property
    def has_slots(self) -> bool:
        """Whether the store has a slot for each sample."""
        return self.store in ("memory_bank", "partition")


@final
class BankConfig(Section):
    """The storage of a queue, a memory bank, partition functions, or the documents that are searched for negatives."""

    location: Literal["actor", "worker"] = "actor"
    """``actor`` survives a crash of the workers and answers queries; ``worker`` keeps a copy in each
    worker's process.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)] | None = None
    """Name for queries, of letters, digits, ``.``, ``_`` and ``-``; default: the last part of
    ``--output``.
    """

    shards: Count = 1
    """Actors of a memory bank, for more memory than one node has; a queue has one."""

    detached: bool = False
    """Whether the bank stays alive after the run."""

    max_staleness: Annotated[int, Field(ge=0, le=1)] = 1
    """1 reads a memory bank one step ahead: workers do not wait for a shard that answers within a step, rows travel as
    float16, and a read lacks the updates of the previous step. 0 waits, and rows keep their dtype.
    """

    dtype: Literal["float32", "float16"] = "float32"
    """Type of the stored rows."""

    timeout_s: Positive = 120.0
    """Seconds to wait for a shard that starts or recovers; at least 900 with ``autoscaling``."""


@final
class OptimizerConfig(Section):
    """The optimizer."""

    name: Literal["sgd", "adamw", "lars", "muon"] = "lars"
    """``lars`` keeps large batches stable, as in SimCLR. ``muon`` orthogonalizes the steps of matrices and filters
    (Jordan et al., 2024) and learns faster in short runs.
    """

    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Momentum of SGD, LARS and Muon, below 1."""

    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (
        0.9,
        0.999,
    )
    """Decay rates of AdamW's two moments, below 1; in Muon, of parameters that are not matrices."""

    weight_decay: NotNegative = 1e-6
    """Weight decay, except of biases and normalization layers; 1e-6 as in SimCLR."""

    trust_coefficient: Positive = 1e-3
    """Trust coefficient of LARS (You et al., 2017)."""

    layer_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Factor of the learning rate from each block of a ViT or a transformer to the block before, and to
    the embeddings, 0 to 1 (Bao et al., 2022). Default: one learning rate.
    """

    max_grad_norm: Positive | None = None
    """Largest L2 norm of the gradient of all learned parameters together; a longer gradient is scaled to
    it. The norm before is logged as ``grad_norm``. Default: no limit.
    """


@final
class EvaluationConfig(Section):
    """The periodic kNN evaluation on held-out labeled rows (Wu et al., 2018).

    Runs with two towers are evaluated by recall@10. On large streamed data, held-out rows come from a
    few fragments spread over the data set; the run trains on all other rows.
    """

    every_epochs: Annotated[int, Field(ge=0)] | None = None
    """Epochs between evaluations, which follow the ends of epochs; 0 disables them, and by default it is a tenth of the
    run's epochs, at least 1."""

    data: str | None = None
    """Address of rows to evaluate on; by default some training rows are held out. If the training rows have no labels,
    the other rows of this address vote, at most ``num_train``; then at most half are evaluated.
    """

    num_train: Count = 10_000
    """Labeled rows that vote."""

    num_test: Count = 2_000
    """Rows to evaluate on: of ``evaluation.data``, or held out of training, then at most a tenth of the data."""

    k: Count = 200
    """Neighbors that vote; 200 as in InstDisc."""

    temperature: Positive = 0.07
    """Temperature of the votes: a neighbor of cosine s has weight exp(s / temperature)."""

    num_snapshot_samples: Annotated[int, Field(ge=0)] = 1_000
    """Held-out rows whose embeddings are saved at each evaluation for the report; 0 saves none."""


@final
class CheckpointConfig(Section):
    """When to save checkpoints, besides after each evaluation."""

    every_steps: Count | None = None
    """Steps between checkpoints; by default only ``interval_s`` counts."""

    interval_s: Positive | None = None
    """Seconds between checkpoints, checked once a second; by default 2 to 300: 1% of the time, and more often after losses."""

    keep: Count = 2
    """Checkpoints to keep, at least 1."""


@final
class MonitorConfig(Section):
    """Detection of a collapse of the embeddings (see ``docs/stages.md``), and the response."""

    on_collapse: Literal["warn", "stop", "rollback"] = "warn"
    """``warn`` prints a warning and continues; ``stop`` ends the run; ``rollback`` restores the last
    healthy checkpoint and replaces the hinge with cross-entropy for a while.
    """

    patience: Count = 3
    """Consecutive logged steps with a sign of collapse before the response."""

    initial_patience: Annotated[int, Field(ge=3)] = 20
    """Patience of a run that was never healthy, at least 3 and at least ``patience``; an untrained network
    looks collapsed as well.
    """

    cross_entropy_steps: Count = 500
    """Steps with cross-entropy after a rollback."""

    max_rollbacks: Count = 3
    """Rollbacks after which the run ends."""

    @model_validator(mode="after")
    def _waits_longer_at_the_start(self) -> Self:
        if self.initial_patience < self.patience:
            raise ValueError(
                f"initial_patience {self.initial_patience} is less than patience {self.patience}; 20 and 3 are usual"
            )
        return self


@final
class TrackingConfig(Section):
    """Where metrics are sent, besides ``metrics.jsonl`` and Prometheus.

    API keys and passwords are not settings: MLflow and Weights & Biases read them from their usual
    environment variables, on the workers.
    """

    tensorboard: bool = False
    """Whether to write event files below ``<output>/tensorboard``."""

    mlflow: str | None = None
    """Address of an MLflow tracking server, or an absolute path."""

    wandb: Annotated[str, Field(pattern=r"^[^/\s]+(/[^/\s]+)?$")] | None = None
    """A Weights & Biases project, or ``entity/project``."""

    @model_validator(mode="after")
    def _has_an_address_that_all_may_read(self) -> Self:
        address = self.mlflow
        if address is None:
            return self
        # A password may have any characters, also "/"; digits after the host are its port.
        if re.search(r"//[^/@]*(:(?!\d+(/|$)).*)?@", address):
            raise ValueError(
                "mlflow contains a user or password, which would be written to config.yaml; remove it "
                "and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        if not (address.startswith("/") or ":" in address or address == "databricks"):
            raise ValueError(
                f"mlflow {address!r} is a relative path, which differs between nodes; give an address such as "
                "http://host:5000, or an absolute path"
            )
        return self
