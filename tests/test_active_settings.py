"""A run shows its active settings and refuses the inactive ones."""

import ast
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from raycl.augment.images import ImageAugmentation
from raycl.cli.plan import run_flags
from raycl.config import RunConfig, Stage, active_settings, flat, leaves
from raycl.config.conditions import CONDITIONS, why_inactive
from raycl.config.overrides import config_from_yaml, config_to_yaml, override
from raycl.config.schema import AugmentConfig, MomentumEncoderConfig, Section, TextConfig
from raycl.data.columns import ColumnNames
from raycl.errors import ConfigError
from raycl.loss_specs import LOSSES, MIXED
from raycl.models.blocks import residual_blocks
from raycl.models.build import build_towers
from raycl.negatives.bank import Bank
from raycl.negatives.client import MemoryBankClient
from raycl.recipes import RECIPES, recipe
from raycl.tokenization import Vocabulary
from raycl.training.stages import momentum_schedule, stage_plans
from raycl.training.stores import bank_spec, build_store
from raycl.training.train_state import EmbedConfig, TrainState
from raycl.training.transforms import build_formats, build_transform

PACKAGE = Path(__file__).parent.parent / "raycl"
TEXT_ROLES = {"text", "caption", "query", "document", "negatives"}


def settings() -> dict[str, Any]:
    """Return the defaults of all settings; settings of a stage have the index 0."""
    free = {"encoder.kwargs": {}, "text_encoder.kwargs": {}}
    return leaves(RunConfig(recipe="defaults", stages=(Stage(steps=1),))) | free


# Valid non-default values of settings for which halving or incrementing is invalid.
OTHERS: dict[str, Any] = {
    "recipe": "mine",
    "min_workers": 1,
    "cpus_per_worker": 0.5,
    "accelerator": "H100",
    "precision": "bfloat16",
    "data.kind": "text",
    "data.decode_size": 40,
    "data.channels": 1,
    "data.weights": [3.0, 1.0],
    "data.cache": "stream",
    "data.samples_per_class": 2,
    "text.tokenizer": "tokenizer.json",
    "text.corpus": "documents.parquet",
    "text.max_document_length": 500,
    "augment.views": [{"count": 3}, {"count": 1, "size": 8}],
    "augment.crop_scale": [0.5, 0.75],
    "augment.crop_ratio": [0.5, 0.75],
    "augment.blur_sigma": [0.5, 0.75],
    "augment.mean": [0.25, 0.5, 0.75],
    "augment.std": [0.125, 0.5, 0.75],
    "encoder.name": "resnet34",
    "encoder.stem": "half",
    "encoder.kwargs": {"dim": 72},
    "encoder.whitening": 0.5,
    "text_encoder.name": "transformer",
    "text_encoder.stem": "half",
    "text_encoder.kwargs": {"dim": 72},
    "text_encoder.whitening": 0.5,
    "projection_head.num_layers": 1,
    "projection_head.hidden_dim": 24,
    "prediction_head.num_layers": 2,
    "prediction_head.hidden_dim": 20,
    "key": "momentum_encoder",
    "momentum_encoder.final_momentum": 0.25,
    "momentum_encoder.location": "actors",
    "momentum_encoder.ahead": 3,
    "momentum_encoder.min_actors": 0,
    "momentum_encoder.node_label": "zone=a",
    "negatives.store": "queue",
    "negatives.bank_init": "encoder",
    "negatives.normalizer_momentum": 0.25,
    "negatives.guide.margin_strategy": "relative",
    "negatives.mined.min_actors": 1,
    "negatives.mined.node_label": "zone=a",
    "bank.location": "worker",
    "bank.name": "mine",
    "bank.max_staleness": 0,
    "ema_decay": 0.5,
    "batchnorm": "group",
    "batchnorm_groups": 4,
    "optimizer.name": "lars",
    "optimizer.betas": [0.5, 0.75],
    "optimizer.max_grad_norm": 0.5,
    "optimizer.layer_decay": 0.75,
    "stages.0.steps": 77,
    "stages.0.image_size": 12,
    "stages.0.chunk_size": 64,
    "stages.0.activation_checkpoint_every": 2,
    "stages.0.workers": 2,
    "stages.0.loss": "hinge",
    "stages.0.logq_correction": "refined",
    "stages.0.view_mean": "arithmetic",
    "stages.0.teacher_temperature": 0.25,
    "stages.0.teacher_keys": True,
    "stages.0.final_hinge_weight": 0.25,
    "stages.0.matryoshka_dims": [8, 4],
    "stages.0.matryoshka_weights": [0.5, 0.25],
    "stages.0.learning_rate_scaling": "none",
    "stages.0.learning_rate_schedule": "constant",
    "stages.0.learning_rate_scope": "run",
    "evaluation.every_epochs": 3,
    "monitor.on_collapse": "stop",
    "checkpoints.every_steps": 7,
    "tracking.mlflow": "http://host:5000",
    "tracking.wandb": "mine",
}


OTHER_THAN = {  # where the value above is the run's own
    ("bank.dtype", "float16"): "float32",
    ("bank.dtype", "float32"): "float16",
    ("bank.location", "worker"): "actor",
    ("data.channels", "1"): 3,
    ("optimizer.name", "lars"): "sgd",
    ("prediction_head.num_layers", "2"): 3,
    ("stages.0.loss", "hinge"): "info_nce",
}


def other(path: str, value: Any) -> Any:
    """Return a valid value that differs from ``value``."""
    if (path, str(value)) in OTHER_THAN:
        return OTHER_THAN[path, str(value)]
    if path in OTHERS and OTHERS[path] != value:
        return OTHERS[path]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 if value else 0.25
    return "local" if path == "batchnorm" else "other"


PATHS = sorted({re.sub(r"\.\d+$", "", path) for path in settings()})


def value_at(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = values[int(part)] if isinstance(values, list) else values.get(part)
        if values is None:
            return None
    return values


def shown_settings(config: RunConfig) -> set[str]:
    """Return the settings and sections in the YAML of a run, for its first stage only."""
    found: set[str] = set()

    def collect(values: Any, path: str) -> None:
        for name, value in values.items():
            found.add(f"{path}{name}")
            if isinstance(value, dict) and name != "kwargs":
                collect(value, f"{path}{name}.")

    values = yaml.safe_load(config_to_yaml(config))
    collect(values, "")
    collect(values["stages"][0], "stages.0.")
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_shows_each_active_setting_and_refuses_the_others(name: str) -> None:
    config = recipe(name, image_size=32)
    shown = shown_settings(config)
    values = config.model_dump(mode="json")
    for path in PATHS:
        problem = ""
        try:
            override(config, {path: other(path, value_at(values, path))})
        except ConfigError as error:
            problem = str(error)
        is_refused = path in problem and " acts only with " in problem
        assert is_refused != (path in shown), f"{path}: {problem}"
    assert 50 < len(shown) < len(PATHS) - 15


@pytest.mark.parametrize(
    ("name", "absent", "present"),
    [
        ("simclr", ["text", "text_augment", "text_encoder", "momentum_encoder", "bank"], ["augment"]),
        ("moco_v2", ["text", "optimizer.betas", "negatives.num_negatives"], ["bank", "momentum_encoder"]),
        ("instance_discrimination", ["negatives.capacity"], ["negatives.normalizer_momentum", "bank.shards"]),
        ("simcse", ["augment", "data.image_size", "encoder.stem"], ["text_augment", "encoder.kwargs"]),
        ("two_tower", ["augment", "text_augment", "evaluation.k"], ["separate_towers", "data.columns.query"]),
        ("clip", ["encoder.kwargs", "text_encoder.width"], ["augment", "text_encoder.kwargs"]),
    ],
)
def test_a_recipe_prints_the_settings_of_its_kind(name: str, absent: list[str], present: list[str]) -> None:
    shown = shown_settings(recipe(name))
    assert not set(absent) & shown
    assert set(present) <= shown


# Parts of a run


SHAPE = {"encoder.name": "resnet10", "encoder.width": 0.125, "stages.0.batch_size": 128}


def text_run(name: str) -> RunConfig:
    side = "text_encoder" if name == "clip" else "encoder"
    small = {"projection_head.dim": 64, f"{side}.kwargs": {"dim": 64}, "stages.0.batch_size": 128}
    return override(recipe(name, image_size=16), small)


def image_run(name: str, **changes: Any) -> RunConfig:
    store = {
        "moco_v2": {"negatives.capacity": 300},
        "instance_discrimination": {"negatives.num_negatives": 4},
    }
    return override(
        recipe(name, image_size=16), SHAPE | {"data.decode_size": 20} | store.get(name, {}) | changes
    )


RUNS = {
    "simclr": lambda: image_run("simclr"),
    "gray simclr without jitter": lambda: image_run("simclr", **{"data.channels": 1, "augment.jitter": 0.0}),
    "blurred simclr in chunks": lambda: image_run(
        "simclr", **{"augment.blur": 1.0, "stages.0.chunk_size": 64}
    ),
    "simclr with a hinge": lambda: image_run("simclr", **{"stages.0.loss": "hinge"}),
    "simclr with a share of the hinge": lambda: image_run(
        "simclr", **{"stages.0.hinge_weight": 0.5, "stages.0.matryoshka_dims": [4, 16]}
    ),
    "simclr of many views": lambda: image_run(
        "simclr", **{"stages.0.loss": "poly_view", "augment.views": [{"count": 4}]}
    ),
    "large simclr": lambda: override(recipe("simclr", image_size=65), SHAPE),  # of standard stem and blur
    "moco_v2": lambda: image_run("moco_v2"),
    "moco_v2 in workers": lambda: image_run(
        "moco_v2", **{"bank.location": "worker", "optimizer.name": "adamw"}
    ),
    "moco_v3": lambda: override(
        recipe("moco_v3", image_size=16),
        {"encoder.width": 0.25, "projection_head.hidden_dim": 16, "prediction_head.hidden_dim": 16}
        | {"stages.0.batch_size": 128},
    ),
    "instance_discrimination": lambda: image_run("instance_discrimination"),
    "instance_discrimination in workers": lambda: image_run(
        "instance_discrimination", **{"bank.location": "worker", "stages.0.loss": "info_nce"}
    ),
    "sogclr": lambda: image_run("sogclr"),
    "nnclr": lambda: image_run(
        "nnclr",
        **{"projection_head.hidden_dim": 16, "prediction_head.hidden_dim": 16, "negatives.capacity": 512},
    ),
    "simcse": lambda: text_run("simcse"),
    "student": lambda: override(
        text_run("simcse"), {"stages.0.loss": "distillation", "negatives.guide.query": "teacher"}
    ),
    "two_tower": lambda: text_run("two_tower"),
    "two_tower with siglip": lambda: override(
        text_run("two_tower"), {"stages.0.loss": "siglip", "negatives.explicit": False}
    ),
    "clip": lambda: override(text_run("clip"), SHAPE),
}
# Settings used by the parts below; the driver, the data module and the trainer read the others.
BUILT = re.compile(
    r"data\.(image_size|decode_size|channels|max_pixels)|text\.(max.*|.*_prompt)|augment\..*|text_augment\..*|encoder\..*|text_encoder\..*|"
    r"separate_towers|projection_head\..*|prediction_head\..*|learn_temperature|momentum_encoder\.(momentum|final_momentum)|"
    r"negatives\.(?!bank_init|guide|mined).*|bank\..*|"
    r"ema_decay|batchnorm.*|optimizer\..*|stages\.0\.(?!workers|logq).*"
)


# If inactive: an unused parameter, unused positions, a loss that does not exist, a network without blocks.
REFUSED = {
    "prediction_head.num_layers",
    "optimizer.layer_decay",
    "learn_temperature",
    "text.max_document_length",
    "stages.0.hinge_weight",
    "stages.0.final_hinge_weight",
}


def describe(value: Any, seen: frozenset[int] = frozenset()) -> Any:
    """Return the full state of an object, without configurations, as a comparable value."""
    if id(value) in seen or isinstance(value, Section):
        return None
    seen |= {id(value)}
    if isinstance(value, ImageAugmentation):
        generator = np.random.default_rng(0)
        images = generator.integers(0, 256, (12, 9, 9, value.channels), np.uint8)
        views = [value(images, np.arange(12), seed=0, epoch=0, view=view) for view in (0, 1)]
        return describe([views, value.size])
    if isinstance(value, nn.Module):
        return [str(value), describe(value.state_dict(), seen)]
    if isinstance(value, torch.Tensor | np.ndarray):
        array = value.detach().numpy() if isinstance(value, torch.Tensor) else value
        return [array.shape, str(array.dtype), array.tobytes()]
    if isinstance(value, Mapping):
        return {key: describe(each, seen) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [describe(each, seen) for each in value]
    if dataclasses.is_dataclass(value) or (hasattr(value, "__dict__") and not callable(value)):
        return [type(value).__name__, describe(vars(value), seen)]
    return value if isinstance(value, int | float | str | bytes | None) else type(value).__name__


def built(config: RunConfig) -> Any:
    """Return the parts of a run that are built from its configuration, as a comparable value."""
    vocabulary = Vocabulary.stand_in() if config.has_texts else None
    tokenizer = None if vocabulary is None else vocabulary.tokenizer
    roles = {"query": "q", "document": "d", "negatives": "n"}
    columns = ColumnNames(image=None, **roles) if config.data.kind == "pairs" else ColumnNames()
    towers = build_towers(config, vocabulary)
    num_samples = 50 if config.negatives.store in ("memory_bank", "partition") else None
    state = TrainState.build(config, towers, num_samples=num_samples)
    stage, plans = config.stages[0], stage_plans(config, num_train=[2_560])
    weights = [plans[0].hinge_weight(step) for step in (0, plans[0].num_steps - 1)]
    some_steps = range(0, plans[0].num_steps, max(1, plans[0].num_steps // 60))
    parts = {
        "formats": build_formats(config, tokenizer, columns),
        "views": build_transform(config, tokenizer).with_image_size(config.image_size(config.stages[0])),
        "towers": [towers, state.prediction_head],
        "frozen": [not each.requires_grad for each in towers.parameters()],
        "optimizer": [type(state.optimizer), state.optimizer.defaults, state.max_grad_norm],
        "average": state.ema,
        "groups": [{**group, "params": len(group["params"])} for group in state.optimizer.param_groups],
        "lengths": [(plan.num_steps, plan.steps_per_epoch) for plan in plans],
        "learning rates": [plans[0].learning_rate(step) for step in some_steps],
        "embedding": EmbedConfig.of(config, stage),
        "losses": [
            state.objective(config, stage, hinge_weight=weight, num_samples=num_samples) for weight in weights
        ],
        "store": build_store(config, None, np.arange(50), torch.device("cpu")),
    }
    if config.key == "momentum_encoder":
        parts["momentum"] = [momentum_schedule(config, plans)(step) for step in (0, 500)]
    if config.negatives.store != "none" and config.bank.location == "actor":
        spec = bank_spec(config, output="run", name="bank", num_samples=num_samples)
        parts["bank"] = dataclasses.replace(spec, momentum=0.0) if spec.kind == "queue" else spec
        if num_samples is not None:
            with patch.object(MemoryBankClient, "__init__", keep_settings):
                parts["client"] = build_store(config, Bank(spec, []), np.arange(50), torch.device("cpu"))
    # Passed on, but not read without chunks, blocks and own slots.
    if stage.chunk_size is None:
        parts["embedding"] = dataclasses.replace(parts["embedding"], cached_chunks=1)
        if not any(residual_blocks(each.encoder) for each in towers.towers):
            parts["embedding"] = dataclasses.replace(parts["embedding"], activation_checkpoint_every=None)
    described = describe(parts)
    return described if config.key == "memory_bank" else without(described, "proximal_weight")


def keep_settings(client: Any, *_: Any, **settings: Any) -> None:
    """Initialize a client that knows its settings only."""
    client.settings = settings


def without(described: Any, name: str) -> Any:
    """Return a description without one attribute."""
    if isinstance(described, dict):
        return {key: without(each, name) for key, each in described.items() if key != name}
    return [without(each, name) for each in described] if isinstance(described, list) else described


def replaced(section: Any, path: str, value: Any) -> Any:
    """Return a configuration with another value, without validation."""
    name, _, rest = path.partition(".")
    if isinstance(section, tuple):
        return tuple(replaced(each, rest, value) for each in section)
    if rest:
        value = replaced(getattr(section, name), rest, value)
    return section.model_copy(update={name: tuple(value) if isinstance(value, list) else value})


# Other values that a further rule refuses; the tests of that rule cover them.
REFUSED_EVERYWHERE = "encoder.kwargs stages.0.steps"  # of a named network, beside epochs
NOT_IN_BATCH = "negatives.in_batch"
REFUSED_VALUES = {
    "simclr": f"{NOT_IN_BATCH} negatives.store",
    "gray simclr without jitter": f"{NOT_IN_BATCH} negatives.store",
    "blurred simclr in chunks": f"{NOT_IN_BATCH} negatives.store",
    "simclr with a hinge": NOT_IN_BATCH,
    "simclr with a share of the hinge": f"{NOT_IN_BATCH} negatives.store",
    "simclr of many views": f"{NOT_IN_BATCH} negatives.store",
    "large simclr": f"{NOT_IN_BATCH} negatives.store",
    "moco_v2": "negatives.store stages.0.batch_size",
    "moco_v2 in workers": "negatives.store stages.0.batch_size",
    "moco_v3": f"{NOT_IN_BATCH} augment.views data.image_size stages.0.image_size",  # of whole patches
    "instance_discrimination": "negatives.store stages.0.matryoshka_dims",
    "instance_discrimination in workers": "negatives.store",
    "sogclr": f"{NOT_IN_BATCH} negatives.store stages.0.loss stages.0.matryoshka_dims",
    "nnclr": f"{NOT_IN_BATCH} negatives.store",
    "simcse": f"{NOT_IN_BATCH} encoder.name projection_head.dim",
    "student": f"{NOT_IN_BATCH} encoder.name projection_head.dim negatives.store stages.0.loss",
    "two_tower": f"{NOT_IN_BATCH} encoder.name projection_head.dim",
    "two_tower with siglip": (
        f"{NOT_IN_BATCH} encoder.name projection_head.dim negatives.explicit negatives.store"
    ),
    "clip": NOT_IN_BATCH,
}


@pytest.mark.parametrize("name", RUNS)
def test_a_setting_is_active_exactly_if_it_changes_the_built_run(name: str) -> None:
    config = RUNS[name]()
    before, refused = built(config), set()
    assert built(config) == before
    for path in filter(BUILT.fullmatch, PATHS):
        value = other(path, value_at(config.model_dump(mode="json"), path))
        if path in ("augment.mean", "augment.std"):
            value = value[: config.data.channels]
        if path == "batchnorm" and config.data.kind in ("text", "pairs"):
            continue  # only custom networks have BatchNorm
        is_active = why_inactive(config, path) is None
        if path in REFUSED and not is_active:
            continue
        if path == "stages.0.learning_rate_scope" and config.stages[0].warmup_epochs == 0:
            continue  # equivalent in a single stage without warmup
        try:
            changed = override(config, {path: value}) if is_active else replaced(config, path, value)
            has_changed = built(changed) != before
        except ConfigError:
            refused.add(path)
            continue
        assert has_changed == is_active, f"{path}={value}"
    assert refused == set(f"{REFUSED_EVERYWHERE} {REFUSED_VALUES[name]}".split())


def names_read() -> set[str]:
    """Return all attributes and keywords in raycl's code outside the configuration."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name in ("config", "recipes"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute | ast.keyword | ast.arg):
                found.add(node.attr if isinstance(node, ast.Attribute) else node.arg)
    return found


def test_every_setting_is_read_by_some_code() -> None:
    inner = {
        "decode_size": "resolved_decode_size",
        "min_workers": "worker_range",
        "min_actors": "actor_range",
    }
    inner |= {"batchnorm_groups": "rows_per_group", "learning_rate": "peak_learning_rate"}
    inner |= {"learning_rate_scaling": "peak_learning_rate"}
    inner |= dict.fromkeys(("tensorboard", "mlflow", "wandb"), "tracking")  # accessed by name
    columns = {path for path in PATHS if path.startswith("data.columns.")}
    read = names_read()
    for path in set(PATHS) - columns:
        name = path.rpartition(".")[2]
        assert inner.get(name, name) in read, f"nothing reads {path}"


# Files and Python


def test_every_condition_names_a_setting_or_a_section() -> None:
    paths = {path.replace(".0.", ".N.") for path in PATHS}
    sections = {path.rpartition(".")[0] for path in paths}
    assert set(CONDITIONS) <= paths | sections


def test_an_inactive_setting_in_a_file_must_have_its_default() -> None:
    config = recipe("simclr", image_size=32)
    values = active_settings(config) | {"text": {"max_length": 64}, "bank": {"shards": 1}}
    assert config_from_yaml(yaml.safe_dump(values)) == config
    values["text"] = {"max_length": 32}
    message = "text.max_length acts only with data.kind text, image_text or pairs, and this run has data.kind image; remove it"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        config_from_yaml(yaml.safe_dump(values))


@pytest.mark.parametrize("name", RECIPES)
def test_inactive_settings_of_an_older_version_are_dropped(name: str) -> None:
    config = recipe(name, image_size=32)
    everything = config.model_dump(mode="json")
    for path in set(PATHS) - {"data.channels"}:  # must match the number of channels
        *parents, last = path.split(".")
        section = value_at(everything, ".".join(parents)) if parents else everything
        if why_inactive(config, path) is not None:
            section[last] = other(path, section[last])
    assert config_from_yaml(yaml.safe_dump(everything)) == config


def test_a_run_in_python_refuses_inactive_settings() -> None:
    stage = Stage(steps=1)
    with pytest.raises(ValueError, match=r"text.max_length acts only with data.kind text"):
        RunConfig(recipe="mine", stages=(stage,), text=TextConfig(max_length=3))
    with pytest.raises(ValueError, match="momentum_encoder.momentum acts only with key momentum_encoder"):
        RunConfig(recipe="mine", stages=(stage,), momentum_encoder=MomentumEncoderConfig(momentum=0.5))
    RunConfig(recipe="mine", stages=(stage,), text=TextConfig(max_length=64), augment=AugmentConfig(flip=0.0))


def test_newly_inactive_settings_return_to_their_defaults() -> None:
    gray = override(
        recipe("moco_v1", image_size=32),
        {"data.channels": 1, "negatives.store": "none", "negatives.in_batch": True},
    )
    assert gray.augment.brightness == 0.4
    assert gray.augment.hue == AugmentConfig().hue
    assert gray.negatives.capacity == 65_536
    assert "bank" not in active_settings(gray)


def test_dropping_a_setting_also_drops_settings_that_depend_on_it() -> None:
    mixed = {
        "negatives.store": "queue",
        "stages.0.loss": "info_nce",
        "stages.0.hinge_weight": 0.5,
        "stages.0.margin": 0.5,
    }
    config = override(recipe("two_tower"), mixed)
    assert config.stages[0].margin == 0.5
    without = {"stages.0.loss": "siglip", "negatives.store": "none", "negatives.explicit": False}
    assert override(config, without).stages[0] == override(recipe("two_tower"), without).stages[0]


INACTIVE = {  # a recipe and a setting, and a part of the error
    "simclr text={max_length: 32}": "text.max_length acts only with data.kind text, image_text or pairs",
    "instance_discrimination augment.views=[{count: 2}]": (
        "augment.views acts only with key tower or momentum_encoder, and this run has key memory_bank; remove it"
    ),
    "simcse augment.views=[{count: 2}]": "augment.views acts only with data.kind image, and this run has data.kind text",
    "clip augment.views=[{count: 2}]": "augment.views acts only with data.kind image, and this run has data.kind",
    "simclr text.max_document_length=9": "text.max_document_length acts only with data.kind pairs, and this run",
    "simclr text.max_length=64": "text.max_length acts only with",
    "simclr optimizer.betas=[0.5, 0.5]": "betas acts only with optimizer.name adamw or muon, and this run",
    "simclr data.columns.query=q": "data.columns.query acts only with data.kind pairs",
    "simclr encoder.kwargs.dim=3": "encoder.kwargs.dim acts only with a text encoder, or a network of your",
    "simcse text.document_prompt=a": "text.document_prompt acts only with data.kind image_text or pairs",
    "clip text.query_prompt=a": "text.query_prompt acts only with data.kind text or pairs, and this run",
    "clip text_encoder.width=2": "text_encoder.width acts only with an image network",
    "clip stages.1.temperature=0.5": "temperature acts only with learn_temperature false, or in the",
    "clip augment.hue=0.3": "augment.hue acts only with augment.jitter above 0",
    "two_tower evaluation.k=5": "evaluation.k acts only with data.kind image or text",
    "two_tower projection_head.batchnorm=true": "acts only with projection_head.num_layers 2 or 3",
    "simclr accelerator=H100": "accelerator acts only with gpu true, and this run has gpu false",
    "simclr stages.0.bias=-3": "stages.0.bias acts only with loss siglip",
    "moco_v2 bank.shards=3": "or negatives.mined.num 1 or more, and this run has negatives.store queue",
    "two_tower bank.location=worker": "negatives.store queue, memory_bank or partition, and this run has",
    "two_tower negatives.mined.refresh=50": "negatives.mined.refresh acts only with negatives.mined.num 1 or more; remove",
    "simclr negatives.mined.num=2": "negatives.mined.num acts only with data.kind text, image_text or pairs, and this",
    "esimcse negatives.mined.num=2": "negatives.mined.num acts only with key tower, and this run has key momentum_encoder",
    "sogclr bank.dtype=float16": "acts only with negatives.store queue or memory_bank",
    "simcse stages.0.image_size=16": "acts only with data.kind image or image_text, and this run has data.kind",
    "instance_discrimination data.samples_per_class=4": (
        "samples_per_class acts only with key tower or momentum_encoder, and this run has key memory_bank"
    ),
    "simclr stages.0.matryoshka_weights=[1.0]": "acts only with matryoshka_dims",
    "simclr stages.0.cached_chunks=2": "acts only with a chunk_size",
    "two_tower stages.0.activation_checkpoint_every=1": "acts only with a ResNet, a ViT or a transformer, or",
    "instance_discrimination stages.0.hinge_weight=0.5": "acts only with loss nt_xent, info_nce or clip",
    "moco_v2 stages.0.proximal_weight=1.0": "with key memory_bank, and this run has key momentum",
    "clip stages.0.logq_correction=simple": "data.kind pairs, and this run has data.kind image_text",
    "instance_discrimination learn_temperature=true": "acts only with loss nt_xent, info_nce, clip",
    "simclr prediction_head.num_layers=2": "prediction_head.num_layers acts only with loss info_nce or nnclr in",
    "clip prediction_head.num_layers=2": "acts only with data.kind image or text, and this run has data.kind image",
    "moco_v2 encoder.freeze_patches=true": "acts only with a ViT, and this run has encoder.name resnet18",
    "clip separate_towers=true": "acts only with data.kind pairs, and this run has data.kind image_text",
    "simclr monitor.max_rollbacks=2": "acts only with monitor.on_collapse rollback",
    "simcse augment.flip=0.1": "augment.flip acts only with data.kind image or image_text",
}


@pytest.mark.parametrize("given", INACTIVE)
def test_an_inactive_setting_is_refused_in_one_line(given: str) -> None:
    name, setting = given.split(maxsplit=1)
    with pytest.raises(ConfigError) as caught:
        override(recipe(name, image_size=32), [setting])
    assert INACTIVE[given] in str(caught.value)
    assert str(caught.value).endswith("; remove it")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("setting", ["learn_temperature=true", "temperature=0.5", "logq_correction=simple"])
def test_a_cross_entropy_that_a_hinge_replaces_has_no_settings(setting: str) -> None:
    def planned(*others: str) -> RunConfig:
        of_stage = "" if setting.startswith("learn") else "stages.0."
        fixed = override(recipe("two_tower"), {"learn_temperature": False})
        return override(fixed, [f"{of_stage}{setting}", *others])

    alone = ["stages.0.hinge_weight=1", "stages.0.final_hinge_weight=1.0"]
    with pytest.raises(ConfigError, match="a hinge_weight or final_hinge_weight below 1"):
        planned(*alone)
    for others in ([alone[0], "stages.0.final_hinge_weight=0"], [*alone, "monitor.on_collapse=rollback"]):
        planned(*others)


def test_a_temperature_has_no_effect_on_the_hinge_alone() -> None:
    config = override(text_run("two_tower"), {"stages.0.hinge_weight": 1.0})
    assert not config.learn_temperature
    assert "temperature" not in active_settings(config)["stages"][0]
    assert built(replaced(config, "stages.0.temperature", 0.5)) == built(config)


def test_a_condition_uses_the_settings_given_together() -> None:
    config = override(
        recipe("simclr", image_size=32),
        {
            "stages.0.loss": "hinge",
            "stages.0.margin": 0.5,
            "optimizer.name": "adamw",
            "optimizer.betas": [0.5, 0.5],
        },
    )
    assert (config.stages[0].margin, config.optimizer.betas) == (0.5, (0.5, 0.5))
    assert flat(active_settings(config))["stages.0.margin"] == 0.5


def test_the_temperature_of_a_hinge_is_active_after_a_rollback() -> None:
    hinge = override(recipe("simclr", image_size=32), {"stages.0.loss": "hinge"})
    assert why_inactive(hinge, "stages.0.temperature") is not None
    hinge = override(hinge, {"monitor.on_collapse": "rollback", "stages.0.temperature": 0.5})
    assert hinge.without_hinge(hinge.stages[0]).temperature == 0.5


@pytest.mark.parametrize("loss", sorted(LOSSES.keys() - {MIXED}))
def test_cross_entropy_replaces_the_hinge_and_no_other_loss(loss: str) -> None:
    config = recipe("two_tower")  # its loss is clip
    stage = config.stages[0].model_copy(update={"loss": loss})
    assert config.without_hinge(stage) == stage
    assert config.without_hinge(stage.model_copy(update={"loss": MIXED})).loss == "clip"
    if LOSSES[loss].mixes:
        mixed = stage.model_copy(update={"hinge_weight": 0.2, "final_hinge_weight": 0.5})
        assert config.without_hinge(mixed) == stage


@pytest.mark.parametrize(("num", "loss"), [(0, "nt_xent"), (1, "info_nce")])
def test_the_cross_entropy_after_a_rollback_uses_mined_negatives(num: int, loss: str) -> None:
    changes = {"stages.0.loss": MIXED, "monitor.on_collapse": "rollback", "negatives.mined.num": num}
    config = override(recipe("simcse"), changes)
    assert config.without_hinge(config.stages[0]).loss == loss


def test_settings_of_tokenizer_training_require_a_trained_tokenizer() -> None:
    for changes in ({"text.tokenizer": "t.json"}, {"encoder.name": "transformers:minilm"}):
        with pytest.raises(
            ConfigError, match="text.lowercase acts only with a tokenizer that the run trains"
        ):
            override(recipe("simcse"), changes | {"text.lowercase": False})
    override(
        recipe("simcse"),
        {"encoder.name": "transformers:m", "encoder.kwargs.pretrained": False, "text.lowercase": False},
    )


def test_the_configuration_page_lists_all_conditions() -> None:
    text = (PACKAGE.parent / "docs" / "api" / "config.md").read_text()
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", text, re.MULTILINE))
    assert rows == {
        path: "; and ".join(condition.needs for condition in conditions)
        for path, conditions in CONDITIONS.items()
    }


def test_one_schedule_over_the_run_has_the_warmup_of_its_first_stage() -> None:
    def planned(scope: str, *, stage: int) -> RunConfig:
        scopes = {"stages.0.learning_rate_scope": scope, "stages.1.epochs": 5}
        return override(recipe("simclr"), scopes | {f"stages.{stage}.warmup_epochs": 2.0})

    with pytest.raises(
        ConfigError,
        match=r"stages\.1\.warmup_epochs acts only with learning_rate_scope stage, or in the first",
    ):
        planned("run", stage=1)
    assert [stage.warmup_epochs for stage in planned("run", stage=0).stages] == [2.0, 10.0]
    assert planned("stage", stage=1).stages[1].warmup_epochs == 2.0


def test_a_learned_temperature_begins_in_the_first_stage_also_if_two_are_one_object() -> None:
    stage = Stage(steps=3, temperature=0.07)
    with pytest.raises(ValueError, match=r"stages\.1\.temperature acts only with learn_temperature false"):
        RunConfig(recipe="mine", learn_temperature=True, stages=(stage, stage))


def test_a_setting_of_a_stage_that_a_later_setting_removes_is_ignored() -> None:
    changed = override(recipe("simclr"), ["stages.1.epochs=2", "stages=[{steps: 3}]"])
    assert [stage.steps for stage in changed.stages] == [3]


def test_a_rollback_can_learn_its_temperature() -> None:
    hinge = {"stages.0.loss": "hinge", "monitor.on_collapse": "rollback"}
    assert override(recipe("simclr"), {**hinge, "learn_temperature": True}).learn_temperature


@pytest.mark.parametrize("given", [{"workers": 4}, {"workers": 4, "min_workers": 1}, run_flags(workers=4)])
def test_workers_are_refused_if_every_stage_sets_its_workers(given: dict[str, Any]) -> None:
    config = override(recipe("simclr"), {"stages.0.workers": 2})
    with pytest.raises(
        ConfigError, match="^workers acts only with a stage without workers of its own; remove it"
    ):
        override(config, given)
    one_of_two = {"stages.0.batch_size": 24, "stages.0.workers": 2, "stages.1.workers": None}
    assert override(recipe("simclr"), {**one_of_two, **given}).workers == 4
