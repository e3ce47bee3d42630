"""The conditions under which settings have an effect; a setting without effect is hidden, and refused if it is given."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, final

from pydantic import BaseModel

from raycl.config.schema import PoolConfig, ViewsConfig
from raycl.loss_specs import LOSSES, join_names, losses_that
from raycl.models.registry import VITS, has_blocks, is_transformer

if TYPE_CHECKING:
    from raycl.config.run import RunConfig


@final
@dataclass(frozen=True)
class Condition:
    """A condition on a run, and on the stage for settings of stages.

    Attributes:
        needs: the requirement in words, as in ``acts only with NEEDS``.
        holds: whether a run meets it, in the stage with an index for settings of stages.
        setting: the setting that the condition reads, to quote its value; a stage's as ``stages.N.NAME``.
    """

    needs: str
    holds: Callable[[Any, int], bool]
    setting: str | None = None

    def actual(self, run: "RunConfig", index: int) -> str:
        """Return the value in a run or in one of its stages, for an error message."""
        if self.setting is None:
            return ""
        in_stage = self.setting.startswith("stages.N.")
        owner, where = (run.stages[index], "stage") if in_stage else (run, "run")
        name = self.setting.removeprefix("stages.N.")
        return f", and this {where} has {name} {_text(attrgetter(name)(owner))}"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def when(setting: str, *values: object) -> Condition:
    """Return the condition that a setting of the run has one of these values."""
    read = attrgetter(setting)
    needs = f"{setting} {join_names(map(_text, values))}"
    return Condition(needs, lambda run, _: read(run) in values, setting)


def _when_loss_has(setting: str) -> Condition:
    return Condition(
        f"loss {losses_that(lambda spec: setting in spec.settings)}",
        lambda run, index: setting in LOSSES[run.stages[index].loss].settings,
        "stages.N.loss",
    )


_IMAGES = when("data.kind", "image", "image_text")
_TEXTS = when("data.kind", "text", "image_text", "pairs")
_PAIRS = when("data.kind", "pairs")
_COLORS = when("data.channels", 3)
_JITTER = Condition("augment.jitter above 0", lambda run, _: run.augment.jitter > 0)
_IMAGE_NETWORK = Condition("an image network, and text_encoder is a text network", lambda *_: False)
_KNOWN_NETWORK = Condition(
    "a network that raycl builds by its name", lambda run, _: ":" not in run.encoder.name
)
_ANY_SIZE = Condition(
    "a ResNet or a network of your own, since the position embeddings of a ViT fit one size",
    lambda run, _: run.encoder.name not in VITS,
    "encoder.name",
)
_TRANSFORMER = Condition(
    "a ViT or a transformer (encoder.name, or text_encoder.name of image_text)",
    lambda run, _: any(map(is_transformer, run.encoder_names)),
)
_BLOCKS = Condition(
    "a ResNet, a ViT or a transformer, or with a chunk_size and batchnorm synchronized, local or local_view",
    lambda run, index: (
        any(map(has_blocks, run.encoder_names))
        or (_CHUNKS.holds(run, index) and run.batchnorm in ("synchronized", "local", "local_view"))
    ),
)
_OWN_TOKENIZER = Condition(
    "a tokenizer that the run trains: without text.tokenizer and without a pretrained encoder",
    lambda run, _: run.text.tokenizer is None and not run.has_pretrained_tokenizer,
)
_COUNTED_TOKENS = Condition(
    "a tokenizer that the run trains, or a text encoder that starts from the frequencies of tokens (bag_of_subwords)",
    lambda run, index: _OWN_TOKENIZER.holds(run, index) or run.counts_tokens,
)
_MEMORY_BANK = when("negatives.store", "memory_bank")
_MINED = Condition("negatives.mined.num 1 or more", lambda run, _: run.negatives.mined.num > 0)
_STORE = when("negatives.store", "queue", "memory_bank", "partition")
_ACTOR = when("bank.location", "actor")
_SLOTS = when("negatives.store", "memory_bank", "partition")
_SHARDED = Condition(
    "negatives.store memory_bank or partition, or negatives.mined.num 1 or more",
    lambda run, index: _SLOTS.holds(run, index) or _MINED.holds(run, index),
    "negatives.store",
)
_KEY_ACTORS = when("momentum_encoder.location", "actors")
_POOL = tuple(PoolConfig.model_fields)
_GUIDED = Condition(
    "negatives.guide.query, and for pairs negatives.guide.document",
    lambda run, _: None not in run.negatives.guide.folders(run.data.kind).values(),
)
_MASKS = Condition(
    "a stage with another loss than distillation",
    lambda run, _: any(not LOSSES[stage.loss].taught for stage in run.stages),
)
_MARGIN = Condition("negatives.guide.margin other than 0", lambda run, _: run.negatives.guide.margin != 0)
_HIDDEN_LAYERS = Condition(
    "projection_head.num_layers 2 or 3", lambda run, _: run.projection_head.num_layers > 1
)
_EVALUATION = Condition(
    "evaluation.every_epochs other than 0", lambda run, _: run.evaluation.every_epochs != 0
)
_ROLLBACK = when("monitor.on_collapse", "rollback")
_CHUNKS = Condition("a chunk_size", lambda run, index: run.stages[index].chunk_size is not None)
_MIXES = Condition(
    f"loss {losses_that(lambda spec: spec.mixes)}",
    lambda run, index: LOSSES[run.stages[index].loss].mixes,
    "stages.N.loss",
)
_HINGE = Condition(
    "loss hinge or a hinge_weight above 0", lambda run, index: run.stages[index].has_hinge, "stages.N.loss"
)
_BELOW_1 = "a hinge_weight or final_hinge_weight below 1"
_CROSS_ENTROPY = Condition(
    f"{_BELOW_1}, or monitor.on_collapse rollback",
    lambda run, index: not run.stages[index].is_hinge or run.monitor.on_collapse == "rollback",
    "stages.N.hinge_weight",
)
_PREDICTED = Condition(
    f"loss {losses_that(lambda spec: spec.predicts)} in a stage",
    lambda run, _: any(LOSSES[stage.loss].predicts for stage in run.stages),
)
_SHARED_WORKERS = Condition(
    "a stage without workers of its own", lambda run, _: any(not stage.workers for stage in run.stages)
)
_LEARNS_TEMPERATURE = losses_that(lambda spec: spec.learns)

# By setting or section, a stage's as ``stages.N.NAME``; all conditions of a setting and its sections must hold.
CONDITIONS: dict[str, tuple[Condition, ...]] = {
    "workers": (_SHARED_WORKERS,),
    "min_workers": (_SHARED_WORKERS,),
    "accelerator": (when("gpu", True),),
    "data.columns.image": (_IMAGES,),
    "data.columns.text": (when("data.kind", "text"),),
    "data.columns.caption": (when("data.kind", "image_text"),),
    "data.columns.query": (_PAIRS,),
    "data.columns.document": (_PAIRS,),
    "data.columns.negatives": (_PAIRS,),
    "data.columns.query_id": (_PAIRS,),
    "data.columns.document_id": (_PAIRS,),
    "data.columns.negative_ids": (_PAIRS,),
    "data.image_size": (_IMAGES,),
    "data.decode_size": (_IMAGES,),
    "data.channels": (_IMAGES,),
    "data.max_pixels": (_IMAGES,),
    "data.shuffle_buffer_size": (when("data.cache", "auto", "stream"),),
    "data.samples_per_class": (when("data.kind", "image", "text"), when("key", "tower", "momentum_encoder")),
    "text": (_TEXTS,),
    "text.corpus": (_COUNTED_TOKENS,),
    "text.tokenizer_train_size": (_COUNTED_TOKENS,),
    "text.vocabulary_size": (_OWN_TOKENIZER,),
    "text.lowercase": (_OWN_TOKENIZER,),
    "text.max_document_length": (_PAIRS,),
    "text.length_buckets": (
        Condition("data.samples_per_class unset", lambda run, _: run.data.samples_per_class is None),
    ),
    "text.query_prompt": (when("data.kind", "text", "pairs"),),
    "text.document_prompt": (when("data.kind", "image_text", "pairs"),),
    "augment": (_IMAGES,),
    "augment.views": (when("data.kind", "image"), when("key", "tower", "momentum_encoder")),
    "augment.crop_scale": (
        Condition(
            "an entry of augment.views without a crop_scale",
            lambda run, _: any(
                each.crop_scale is None for each in run.augment.views or [ViewsConfig(count=2)]
            ),
        ),
    ),
    "augment.brightness": (_JITTER,),
    "augment.contrast": (_JITTER,),
    "augment.saturation": (_COLORS, _JITTER),
    "augment.hue": (_COLORS, _JITTER),
    "augment.grayscale": (_COLORS,),
    "augment.blur_sigma": (Condition("augment.blur above 0", lambda run, _: run.augment.blur > 0),),
    "text_augment": (when("data.kind", "text", "image_text"),),
    "encoder.stem": (_IMAGES, _KNOWN_NETWORK),
    "encoder.width": (_IMAGES, _KNOWN_NETWORK),
    "encoder.kwargs": (
        Condition(
            "a text encoder, or a network of your own (encoder.name package.module:function)",
            lambda run, _: run.data.kind in ("text", "pairs") or ":" in run.encoder.name,
        ),
    ),
    "encoder.freeze_patches": (
        _IMAGES,
        Condition("a ViT", lambda run, _: run.encoder.name in VITS, "encoder.name"),
    ),
    "encoder.whitening": (when("data.kind", "image"), _KNOWN_NETWORK),
    "text_encoder": (when("data.kind", "image_text"),),
    "text_encoder.stem": (_IMAGE_NETWORK,),
    "text_encoder.width": (_IMAGE_NETWORK,),
    "text_encoder.freeze_patches": (_IMAGE_NETWORK,),
    "text_encoder.whitening": (_IMAGE_NETWORK,),
    "separate_towers": (_PAIRS,),
    "projection_head.hidden_dim": (_HIDDEN_LAYERS,),
    "projection_head.batchnorm": (_HIDDEN_LAYERS,),
    "prediction_head": (
        when("data.kind", "image", "text"),
        when("key", "tower", "momentum_encoder"),
        _PREDICTED,
    ),
    "prediction_head.hidden_dim": (
        Condition("prediction_head.num_layers 2 or 3", lambda run, _: run.prediction_head.num_layers > 1),
    ),
    "learn_temperature": (
        Condition(
            f"loss {_LEARNS_TEMPERATURE} and {_BELOW_1} in a stage, or monitor.on_collapse rollback",
            lambda run, _: (
                any(LOSSES[stage.loss].learns and not stage.is_hinge for stage in run.stages)
                or run.monitor.on_collapse == "rollback"
            ),
        ),
    ),
    "momentum_encoder": (when("key", "momentum_encoder"),),
    **{f"momentum_encoder.{name}": (_KEY_ACTORS,) for name in (*_POOL, "ahead", "publish_every", "max_age")},
    "negatives.in_batch": (when("key", "tower", "momentum_encoder"),),
    "negatives.explicit": (_PAIRS,),
    "negatives.capacity": (when("negatives.store", "queue"),),
    "negatives.num_negatives": (_MEMORY_BANK,),
    "negatives.bank_momentum": (_SLOTS,),
    "negatives.bank_init": (_MEMORY_BANK,),
    "negatives.normalizer_momentum": (
        Condition(
            "loss nce in a stage",
            lambda run, _: any("normalizer_momentum" in LOSSES[stage.loss].settings for stage in run.stages),
        ),
    ),
    "negatives.guide": (when("data.kind", "image", "text", "pairs"),),
    "negatives.guide.document": (_PAIRS,),
    "negatives.guide.margin": (_GUIDED, _MASKS),
    "negatives.guide.margin_strategy": (_PAIRS, _GUIDED, _MASKS, _MARGIN),
    "negatives.mined": (_TEXTS, when("key", "tower")),
    **{
        f"negatives.mined.{name}": (_MINED,)
        for name in ("candidates", "random_fraction", "max_relative_score", "refresh", *_POOL)
    },
    "bank": (
        Condition(
            "negatives.store queue, memory_bank or partition, or negatives.mined.num 1 or more",
            lambda run, index: _STORE.holds(run, index) or _MINED.holds(run, index),
            "negatives.store",
        ),
    ),
    "bank.location": (_STORE,),
    "bank.name": (_ACTOR,),
    "bank.shards": (_SHARDED, _ACTOR),
    "bank.detached": (_ACTOR,),
    "bank.max_staleness": (_SLOTS, _ACTOR),
    "bank.dtype": (
        Condition(
            "negatives.store queue or memory_bank, or negatives.mined.num 1 or more",
            lambda run, index: run.negatives.store in ("queue", "memory_bank") or _MINED.holds(run, index),
            "negatives.store",
        ),
    ),
    "bank.timeout_s": (_ACTOR,),
    "batchnorm_groups": (when("batchnorm", "shuffled"),),
    "optimizer.momentum": (when("optimizer.name", "sgd", "lars", "muon"),),
    "optimizer.betas": (when("optimizer.name", "adamw", "muon"),),
    "optimizer.trust_coefficient": (when("optimizer.name", "lars"),),
    "optimizer.layer_decay": (_TRANSFORMER,),
    "stages.N.image_size": (_IMAGES, _ANY_SIZE),
    "stages.N.cached_chunks": (_CHUNKS,),
    "stages.N.activation_checkpoint_every": (_BLOCKS,),
    "stages.N.temperature": (
        Condition(
            f"a loss that has a temperature and {_BELOW_1}, or monitor.on_collapse rollback",
            lambda run, index: (
                run.learn_temperature
                or (
                    "temperature" in LOSSES[run.stages[index].loss].settings
                    and not run.stages[index].is_hinge
                )
                or run.monitor.on_collapse == "rollback"
            ),
        ),
        Condition(
            "learn_temperature false, or in the first stage",
            lambda run, index: not run.learn_temperature or index == 0,
        ),
    ),
    "stages.N.bias": (
        _when_loss_has("bias"),
        Condition(
            "learn_temperature false, or in the first stage with such a loss",
            lambda run, index: (
                not run.learn_temperature
                or not any("bias" in LOSSES[stage.loss].learns for stage in run.stages[:index])
            ),
        ),
    ),
    "stages.N.matryoshka_weights": (
        Condition("matryoshka_dims", lambda run, index: run.stages[index].matryoshka_dims is not None),
    ),
    "stages.N.logq_correction": (_PAIRS, _when_loss_has("logq_correction"), _CROSS_ENTROPY),
    "stages.N.view_mean": (
        _when_loss_has("view_mean"),
        Condition("three or more views of a sample (augment.views)", lambda run, _: run.num_views > 2),
    ),
    "stages.N.teacher_temperature": (_when_loss_has("teacher_temperature"),),
    "stages.N.teacher_keys": (_when_loss_has("teacher_keys"),),
    "stages.N.margin": (_HINGE,),
    "stages.N.hardest_negative": (_HINGE,),
    "stages.N.hinge_weight": (_MIXES,),
    "stages.N.final_hinge_weight": (_MIXES,),
    "stages.N.proximal_weight": (when("key", "memory_bank"), _when_loss_has("proximal_weight")),
    "stages.N.warmup_epochs": (
        Condition(
            "learning_rate_scope stage, or in the first stage",
            lambda run, index: run.stages[index].learning_rate_scope == "stage" or index == 0,
        ),
    ),
    "evaluation.data": (_EVALUATION,),
    "evaluation.num_train": (_EVALUATION,),
    "evaluation.num_test": (_EVALUATION,),
    "evaluation.k": (when("data.kind", "image", "text"), _EVALUATION),
    "evaluation.temperature": (when("data.kind", "image", "text"), _EVALUATION),
    "monitor.cross_entropy_steps": (_ROLLBACK,),
    "monitor.max_rollbacks": (_ROLLBACK,),
}


def leaves(config: BaseModel) -> dict[str, Any]:
    """Return each setting's value by the path that ``--set`` takes, such as ``stages.0.batch_size``."""
    return flat(config.model_dump(mode="json"))


def flat(values: Any, path: str = "") -> dict[str, Any]:
    """Return the values of a nested configuration by path."""
    if not isinstance(values, dict | list):
        return {path: values}
    found: dict[str, Any] = {}
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        found |= flat(value, f"{path}.{key}" if path else str(key))
    return found


def why_inactive(run: "RunConfig", path: str) -> str | None:
    """Return why a setting has no effect in this run, in one line; None if it has one."""
    index, parts = 0, path.split(".")
    if parts[0] == "stages" and len(parts) > 1:
        index, parts[1] = int(parts[1]), "N"
    failed = [
        condition
        for length in range(1, len(parts) + 1)
        for condition in CONDITIONS.get(".".join(parts[:length]), ())
        if not condition.holds(run, index)
    ]
    if not failed:
        return None
    # A section and a setting in it may both need a value of one setting: the setting's own condition is narrower.
    narrower = [each for each in failed[1:] if each.setting and each.setting == failed[0].setting]
    condition = [failed[0], *narrower][-1]
    # The whole setting, not one number of a range or one entry of a list.
    whole = re.sub(r"(?<!^stages)\.\d+\b.*", "", path)
    return f"{whole} acts only with {condition.needs}{condition.actual(run, index)}; remove it"


def active_settings(run: "RunConfig") -> dict[str, Any]:
    """Return the settings that have an effect in this run, as a tree for YAML."""
    return _active(run, run.model_dump(mode="json"), "")


def _active(run: "RunConfig", values: Any, path: str) -> Any:
    if isinstance(values, list):
        return [_active(run, value, f"{path}{index}.") for index, value in enumerate(values)]
    if not isinstance(values, dict) or path.endswith(".kwargs."):
        return values
    return {
        name: _active(run, value, f"{path}{name}.")
        for name, value in values.items()
        if why_inactive(run, f"{path}{name}") is None
    }
