"""The configuration of a whole run, and checks across its sections."""

import functools
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, final

from pydantic import Field, ValidationInfo, model_validator

from raycl.config.checks import problems
from raycl.config.conditions import leaves, why_inactive
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
    PredictionHeadConfig,
    Section,
    TextAugmentConfig,
    TextConfig,
    TrackingConfig,
    ViewsConfig,
    scaled_size,
)
from raycl.config.stage import Stage
from raycl.loss_specs import LOSSES, cross_entropy_for
from raycl.models.registry import HUGGING_FACE, check_trusted, is_transformer

LENIENT = {"inactive": "accepted"}  # context of a validation that accepts inactive settings
TRAINED = LENIENT | {"problems": "accepted"}  # and also settings that exclude each other
_NO_DEFAULT = object()


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
    """CPUs reserved per worker, and its limit of threads; by default 1, or less on a small cluster, and no limit."""

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

    prediction_head: PredictionHeadConfig = PredictionHeadConfig()
    """Prediction head of the queries."""

    learn_temperature: bool = False
    """Whether to learn the temperature, starting at the first stage's; at least 0.01, as in CLIP."""

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

    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Evaluate and save an exponential moving average of the weights and BatchNorm statistics with this
    decay per step, such as 0.999; step n counts with a decay of at most n / (n + 9). Default: the last
    weights.
    """

    batchnorm: Literal["synchronized", "shuffled", "layer", "group", "local", "local_view"] = "synchronized"
    """Rows that share BatchNorm statistics: the rows of all workers (``synchronized``), of one worker
    (``local``), of one view of one worker (``local_view``), or of random groups (``shuffled``). ``layer`` and
    ``group`` replace BatchNorm by LayerNorm or GroupNorm.
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
    def has_batchnorm(self) -> bool:
        """Whether rows share statistics."""
        return self.batchnorm not in ("layer", "group")

    @property
    def uses_key_pool(self) -> bool:
        """Whether a pool of actors encodes keys."""
        keys = self.momentum_encoder
        return self.key == "momentum_encoder" and keys.location == "actors" and keys.max_age > 0

    @property
    def has_two_towers(self) -> bool:
        """Whether queries and keys are different kinds of samples."""
        return self.data.kind in ("pairs", "image_text")

    @property
    def has_prediction_head(self) -> bool:
        """Whether queries pass a prediction head; then all views of a sample are queries."""
        return self.prediction_head.num_layers > 0

    @property
    def has_texts(self) -> bool:
        """Whether the samples contain texts."""
        return self.data.kind != "image"

    @property
    def has_text_ids(self) -> bool:
        """Whether the ids of stored rows are hashes of the keys' texts, as in a queue, and not sample ids."""
        return self.has_texts and self.negatives.store == "queue"

    @property
    def key_text_role(self) -> str:
        """The role of the column with the texts of the keys."""
        return {"text": "text", "image_text": "caption"}.get(self.data.kind, "document")

    @property
    def needs_labels(self) -> str | None:
        """The loss or the setting that needs the classes of the samples, if any."""
        losses = [stage.loss for stage in self.stages if LOSSES[stage.loss].labels]
        if losses:
            return f"loss {losses[0]}"
        return None if self.data.samples_per_class is None else "data.samples_per_class"

    @property
    def ends_with_cross_entropy(self) -> bool:
        """Whether the loss of the last stage is a cross-entropy over negatives; others may be 0 or below by design."""
        return LOSSES[self.stages[-1].loss].mixes

    @property
    def encoder_names(self) -> tuple[str, ...]:
        """The names of the networks, one or two."""
        of_texts = (self.text_encoder.name,) if self.data.kind == "image_text" else ()
        return (self.encoder.name, *of_texts)

    @property
    def encoder_of_texts(self) -> EncoderConfig:
        """The network of captions, or of other texts if the samples are not images."""
        return self.text_encoder if self.data.kind == "image_text" else self.encoder

    def check_trusted(self, where: str) -> None:
        """Raise ``ConfigError`` if the file ``where`` names networks outside the packages in RAYCL_TRUSTED."""
        check_trusted(self.encoder.name, where, is_text=self.data.kind in ("text", "pairs"))
        if self.data.kind == "image_text":
            check_trusted(self.text_encoder.name, where, is_text=True)

    @property
    def counts_tokens(self) -> bool:
        """Whether the encoder of texts may start from the frequencies of tokens, as a bag of subwords does."""
        return self.has_texts and not is_transformer(self.encoder_names[-1])

    @property
    def has_pretrained_tokenizer(self) -> bool:
        """Whether the tower of texts is a pretrained model, which has a tokenizer."""
        encoder = self.encoder_of_texts
        is_model = self.has_texts and encoder.name.startswith(HUGGING_FACE)
        return is_model and encoder.kwargs.get("pretrained", True)

    @property
    def evaluation_metric(self) -> str:
        """The metric of the periodic evaluation that selects the best checkpoint."""
        return "recall_at_10" if self.has_two_towers else "knn_top1"

    @property
    def baseline(self) -> str:
        """What this metric is compared with at the end of the run."""
        return "BM25" if self.has_two_towers else "raw pixels"

    def workers_of(self, stage: Stage) -> int:
        """Return the largest number of workers of a stage."""
        return stage.workers or self.workers

    def worker_range(self, stage: Stage) -> tuple[int, int]:
        """Return the smallest and the largest number of workers of a stage."""
        most = self.workers_of(stage)
        return (most if stage.workers or self.min_workers is None else self.min_workers, most)

    def settled(self, workers: int) -> Self:
        """Return the configuration with a fixed number of workers in place of the range.

        The workers of a stage with a number of its own may lie outside the range.
        """
        if self.min_workers is None:
            return self
        fixed = min(max(workers, self.min_workers), self.workers)
        return self.model_copy(update={"workers": fixed, "min_workers": None})

    def image_size(self, stage: Stage) -> int:
        """Return the side of a view of a stage, in pixels."""
        return stage.image_size or self.data.image_size

    @property
    def views(self) -> tuple[ViewsConfig, ...]:
        """The views of each sample by size; one view if the keys are slots of a bank."""
        given = self.augment.views
        if not given or why_inactive(self, "augment.views"):
            return (ViewsConfig(count=1 if self.key == "memory_bank" else 2),)
        return given

    @property
    def num_views(self) -> int:
        """The number of views of each sample."""
        return sum(each.count for each in self.views)

    def view_size(self, views: ViewsConfig, stage: Stage) -> int:
        """Return the side of these views in a stage, in pixels."""
        full = self.data.image_size
        return scaled_size(views.size or full, full=full, new_full=self.image_size(stage))

    def views_by_size(self, stage: Stage) -> dict[int, int]:
        """Return the number of a sample's views of each size that the tower embeds in a step."""
        counts: dict[int, int] = {}
        for views in self.views:
            size = self.view_size(views, stage)
            counts[size] = counts.get(size, 0) + views.count
        if (self.key == "momentum_encoder" and not self.has_prediction_head) or self.has_two_towers:
            counts[self.image_size(stage)] -= 1  # the key
        return counts

    def local_batch_size(self, stage: Stage) -> int:
        """Return the number of rows of a batch on each worker."""
        return stage.batch_size // self.workers_of(stage)

    def local_views(self, stage: Stage) -> int:
        """Return the number of views that each worker's tower embeds together: views of one size."""
        return self.local_batch_size(stage) * max(self.views_by_size(stage).values())

    def rows_per_group(self, stage: Stage) -> int:
        """Return the number of rows in a group of shuffled BatchNorm."""
        return stage.batch_size // max(self.batchnorm_groups, self.workers_of(stage))

    def without_hinge(self, stage: Stage) -> Stage:
        """Return the stage with cross-entropy instead of the hinge; a stage without a hinge stays as it is."""
        if not stage.has_hinge:
            return stage
        loss = stage.loss
        if not LOSSES[loss].mixes:
            loss = cross_entropy_for(
                key=self.key,
                pairs=self.has_two_towers,
                store=self.negatives.store,
                in_batch=self.negatives.in_batch,
                mined=self.negatives.mined.num > 0,
            )
        return stage.model_copy(update={"loss": loss, "hinge_weight": 0.0, "final_hinge_weight": None})

    def uses_guide(self, stage: Stage) -> bool:
        """Return whether a guide, if the run has one, is the teacher of a stage or masks its negatives."""
        # Both views of an image or a sentence have one embedding, and no other is nearer without a margin.
        return LOSSES[stage.loss].taught or self.has_two_towers or self.negatives.guide.margin > 0

    @property
    def first_bias(self) -> float | None:
        """The initial value of a learned bias, from the first stage whose loss learns one; None without."""
        return next((stage.bias for stage in self.stages if "bias" in LOSSES[stage.loss].learns), None)

    @model_validator(mode="after")
    def _is_possible(self, info: ValidationInfo) -> Self:
        accepted = info.context or {}
        inactive = () if "inactive" in accepted else self._inactive_settings()
        for problem in (*inactive, *(() if "problems" in accepted else problems(self))):
            raise ValueError(problem)
        return self

    def _inactive_settings(self) -> Iterator[str]:
        """Yield why settings that differ from their defaults have no effect."""
        defaults = _default_settings()
        for path, value in leaves(self).items():
            default = defaults.get(re.sub(r"^stages\.\d+", "stages.0", path), _NO_DEFAULT)
            if value != default and (problem := why_inactive(self, path)):
                yield problem


@functools.cache
def _default_settings() -> dict[str, Any]:
    """Return the defaults of all settings, of stages under the index 0."""
    least = {"recipe": "", "stages": ({"steps": 1},)}
    return leaves(RunConfig.model_validate(least, context=LENIENT))
