"""Configuration: frozen and validated, with clear error messages."""

import re
import shlex
from typing import Any

import pytest
from pydantic import ValidationError
from torch import nn

from raycl.config import Columns, OptimizerConfig, RunConfig, Stage
from raycl.config.conditions import leaves
from raycl.config.overrides import config_from_dict, config_from_yaml, config_to_yaml, override, parse_setting
from raycl.errors import ConfigError
from raycl.models.build import build_towers
from raycl.recipes import RECIPES, recipe
from raycl.training.train_state import TrainState


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("image_size", [8, 32, 64, 96, 224])
def test_a_recipe_survives_a_round_trip_through_yaml(name: str, image_size: int) -> None:
    config = recipe(name, image_size=image_size)
    assert config_from_yaml(config_to_yaml(config)) == config


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError):
        recipe("simclr").seed = 1  # type: ignore[misc]


def test_equal_configurations_have_equal_hashes() -> None:
    config = override(
        recipe("simclr"), {"encoder.name": "tests.pairs:small_network", "encoder.kwargs": {"width": 4}}
    )
    again = config_from_yaml(config_to_yaml(config))
    other = override(config, {"seed": 1})
    assert config == again
    assert hash(config) == hash(again) != hash(other)


def test_override_replaces_one_setting_and_keeps_the_original_unchanged() -> None:
    config = recipe("simclr")
    changed = override(config, ["stages.0.temperature=0.25", "data.columns.image=img"])
    assert changed.stages[0].temperature == 0.25
    assert changed.data.columns.image == "img"
    assert config.stages[0].temperature != 0.25


def test_override_leaves_the_values_of_its_caller_unchanged() -> None:
    kwargs = {"dim": 64}
    settings = {"encoder.kwargs": kwargs, "encoder.kwargs.hidden_dim": 8}
    changed = override(recipe("two_tower"), settings)
    assert (kwargs, changed.encoder.kwargs) == ({"dim": 64}, {"dim": 64, "hidden_dim": 8})


def test_settings_are_replaced_in_order_and_the_last_duplicate_wins() -> None:
    settings = ["encoder.width=1", "encoder={name: resnet34, width: 3}", "encoder.width=2"]
    changed = override(recipe("simclr"), settings).encoder
    assert (changed.name, changed.width) == ("resnet34", 2.0)


def test_a_number_with_an_exponent_is_a_number() -> None:
    assert override(recipe("simclr"), ["optimizer.weight_decay=1e-4"]).optimizer.weight_decay == 1e-4


def test_steps_replace_epochs() -> None:
    changed = override(recipe("simclr"), ["stages.0.epochs=null", "stages.0.steps=7"])
    assert (changed.stages[0].epochs, changed.stages[0].steps) == (None, 7)


def test_changing_the_encoder_drops_its_arguments() -> None:
    towers = recipe("two_tower")
    assert towers.encoder.kwargs == {"dim": 1_024, "hidden_dim": 0}
    assert override(towers, {"encoder.name": "transformers:minilm"}).encoder.kwargs == {}
    smaller = override(towers, ["encoder.kwargs.dim=64", "encoder.name=transformer"])
    assert smaller.encoder.kwargs == {"dim": 64}
    for kept in ({"encoder.name": "bag_of_subwords"}, {"stages.0.epochs": 3}):
        assert override(towers, kept).encoder.kwargs == towers.encoder.kwargs
    both = override(recipe("clip"), {"text_encoder.kwargs.num_layers": 2})
    assert override(both, {"encoder.name": "resnet34"}).text_encoder.kwargs["num_layers"] == 2
    assert override(both, {"text_encoder.name": "transformer"}).text_encoder.kwargs == {}


def test_a_custom_encoder_accepts_any_arguments() -> None:
    changed = override(recipe("simclr"), ["encoder.name=mine:network", "encoder.kwargs.depth=4"])
    assert changed.encoder.kwargs == {"depth": 4}
    deeper = override(changed, ["encoder.kwargs.block.width=8"])
    assert deeper.encoder.kwargs == {"depth": 4, "block": {"width": 8}}


INVALID = {  # a recipe and its settings, and what the error says
    "simclr stages.0.temperature=0": ["stages.0.temperature", "greater than 0", "got 0"],
    "simclr stages.0.temperature=-1": ["stages.0.temperature", "got -1"],
    "simclr stages.0.temperature=.nan": ["stages.0.temperature"],
    "simclr stages.0.temperatur=1": ["unknown key", "did you mean temperature?"],
    "simclr temperature=0.1": [
        "unknown key temperature; did you mean stages.0.temperature or evaluation.temperature?"
    ],
    "simclr stage.0.temprature=1": ["unknown key stage.0.temprature; did you mean stages.0.temperature?"],
    "simclr stage.0.batch_size=64": ["unknown key stage.0.batch_size; did you mean stages.0.batch_size?"],
    "simclr data.colums.image=x": ["unknown key data.colums.image", "columns"],
    "simclr workers=3": ["batch_size 256", "3 workers"],
    "simclr workers=0": ["workers", "got 0"],
    "simclr workers=2.5": ["workers", "got 2.5"],
    "simclr stages.0.epochs=abc": ["stages.0.epochs", "integer", "'abc'"],
    "simclr stages.0.steps=5": ["stages.0", "exactly one of epochs and steps"],
    "simclr stages.0.image_size=4": ["stages.0.image_size", "8", "got 4"],
    "simclr stages.2.steps=5": ["unknown key stages.2.steps: '2' is not an index from 0 to 1"],
    "simclr stages.\u00b2.steps=5": ["unknown key", "is not an index from 0 to 1"],
    "simclr augment.flip=1.5": ["augment.flip", "1.5"],
    "simclr augment.crop_scale=[0.9,0.1]": ["augment.crop_scale", "ascend"],
    "simclr augment.mean=[.nan,0,0]": ["augment.mean", "finite", "got nan"],
    "simclr stages.1.loss=siglip stages.1.bias=-.inf": ["stages.1.bias", "finite", "got -inf"],
    "simclr augment.mean=[0.5]": ["augment.mean", "3 channels"],
    "simclr optimizer.name=adam": ["optimizer.name", "'adamw'", "'adam'"],
    "simclr data.channels=2": ["data.channels", "got 2"],
    "simclr data.image_size=4": ["data.image_size", "8", "got 4"],
    "simclr seed.x=1": ["unknown key seed.x"],
    "simclr recipe=moco_v2": ["recipe is the name of the run's recipe", "raycl train NAME"],
    "simclr no_equals_sign": ["key.path=value", "no_equals_sign"],
    "simclr encoder.name=[1": ["encoder.name", "YAML"],
    "simclr stages.0.loss=hinge stages.0.margin=0": ["stages.0.margin", "greater than 0, got 0"],
    "simclr stages.0.loss=hinge stages.0.margin=-0.5": ["stages.0.margin", "got -0.5"],
    "simclr stages.0.hinge_weight=1.5": ["stages.0.hinge_weight", "got 1.5"],
    "simclr stages.1.epochs=0": ["stages.1.epochs", "got 0"],
    "moco_v2 momentum_encoder.momentum=1.5": ["momentum_encoder.momentum", "got 1.5"],
    "moco_v2 bank.name=a/b": ["bank.name"],
    "moco_v2 bank.max_staleness=2": ["bank.max_staleness"],
}


@pytest.mark.parametrize("given", INVALID)
def test_an_invalid_setting_is_refused_in_one_line_with_key_and_value(given: str) -> None:
    name, *settings = given.split()
    with pytest.raises(ConfigError) as caught:
        override(recipe(name, image_size=32), settings)
    text = str(caught.value)
    assert "\n" not in text
    assert "more)" not in text
    assert all(part in text for part in INVALID[given]), text


INCOMPATIBLE = {  # a recipe and its settings, and a pattern of the error
    "moco_v2 negatives.capacity=100": "capacity 100 is less than a batch of 256",
    "simclr batchnorm=local_view workers=2 stages.0.batch_size=2": (
        "^batchnorm local_view normalizes a single row of a worker in the projection head, and needs two; choose a "
        "batch_size of at least 4, or set batchnorm to synchronized, layer or group$"
    ),
    "moco_v2 batchnorm_groups=1": "256 does not split into 1 groups .* 2 groups or more",
    "moco_v2 batchnorm_groups=200": "256 does not split into 200 groups",
    "moco_v2 batchnorm_groups=256": "256 groups of at least 2 rows",
    "moco_v2 batchnorm_groups=6 workers=4": "groups 6 do not divide over 4 workers",
    "moco_v2 workers=4 min_workers=2 stages.0.batch_size=192": "groups 8 do not divide over 3 workers",
    "instance_discrimination batchnorm=local_view": "local_view needs two views of one tower, and keys of this tower",
    "moco_v2 batchnorm=local_view": "local_view needs two views of one tower, and keys of this tower without a",
    "clip batchnorm=local_view": "local_view needs two views of one tower, and keys of this tower without a",
    "instance_discrimination batchnorm=shuffled": "needs two views per sample, and key memory_bank has one",
    "simclr stages.1.image_size=33": "stage 1: image_size 33 is larger than data.image_size 32, the size of",
    "simclr encoder.name=vit_tiny stages.0.image_size=16": (
        r"^stages.0.image_size acts only with a ResNet .* and this run has encoder.name vit_tiny; remove it$"
    ),
    "sogclr stages.1.temperature=0.05": (
        "stages with loss gcl have temperatures 0.2 and 0.05, and share partition functions of one temperature; give"
    ),
    "instance_discrimination stages.0.loss=nce negatives.normalizer_momentum=null stages.1.temperature=0.5": (
        "temperatures 0.1 and 0.5, and share normalizing constant of .* or set negatives.normalizer_momentum=0.9"
    ),
    "clip stages.0.temperature=0.005": (
        "^stages.0.temperature 0.005 is less than 0.01, the least learned temperature; raise it, or set learn_temperature=false$"
    ),
    "simclr stages.0.chunk_size=513": "chunk_size 513 is larger than a worker's 512 views",
    "simclr workers=2 stages.0.chunk_size=257": "chunk_size 257 is larger than a worker's 256 views",
    "simclr workers=2 min_workers=1 stages.0.chunk_size=1000": "1000 is larger than .*choose a smaller one$",
    "moco_v2 stages.0.chunk_size=288": "chunk_size 288 is larger than a worker's 256 views",
    "moco_v2 stages.0.chunk_size=48": "chunk_size 48 is not a multiple of 32, the rows in a group",
    "simclr monitor.on_collapse=rollback": "no stage has a hinge; set it to warn or stop",
    "simclr workers=4 min_workers=1": "does not divide over 3 workers.*from 1 to 4; choose a multiple of 12",
    "simclr workers=16 min_workers=1": "over 3 workers.*from 1 to 16; choose a narrower MIN:MAX",
    "simclr min_workers=2": "min_workers 2 is more than workers 1",
    "simclr stages.1.workers=3": "stage 1: batch_size 256 does not divide over 3 workers",
    "moco_v2 stages.1.batch_size=8192": "stage 1: negatives.capacity 4096 is less than a batch",
    "simclr negatives.in_batch=false": "nt_xent has no negatives",
    "simclr stages.0.loss=info_nce negatives.in_batch=false": "info_nce has no negatives",
    "moco_v2 negatives.store=none": "info_nce has no negatives",
    "moco_v2 momentum_encoder.location=actors momentum_encoder.min_actors=2": (
        "momentum_encoder.min_actors 2 is more than momentum_encoder.actors 1"
    ),
    "moco_v2 momentum_encoder.location=actors momentum_encoder.max_age=1": "max_age 1 is less than .*ahead 2",
    "esimcse momentum_encoder.location=actors batchnorm=local": "data.kind text; set batchnorm to layer or group",
    "moco_v2 momentum_encoder.actors=2": "acts only with momentum_encoder.location actors",
    "moco_v2 key=memory_bank": "key memory_bank is incompatible with negatives.store queue",
    "moco_v2 negatives.store=memory_bank": "key momentum_encoder is incompatible with .* memory_bank",
    "moco_v2 stages.0.loss=nce": "loss nce is incompatible with key momentum_encoder .* key memory_bank",
    "moco_v2 stages.0.loss=nt_xent": "incompatible with .* takes key tower, and negatives.store none",
    "sogclr negatives.store=none": "loss gcl is incompatible with .* takes key tower, and negatives.store partition",
    "simclr stages.0.loss=gcl": "loss gcl is incompatible with .* takes key tower, and negatives.store partition",
    "simclr negatives.store=partition": "loss nt_xent is incompatible with .* negatives.store none",
    "clip stages.0.loss=gcl": "loss gcl is incompatible with .* takes key tower, and negatives.store partition",
    "clip stages.0.loss=gcl negatives.store=partition stages.0.matryoshka_dims=[8]": (
        "remove matryoshka_dims, or set loss to clip and negatives.store to none$"
    ),
    "simcse stages.0.loss=gcl negatives.store=partition text.length_buckets=8": (
        "gcl takes the other rows of a batch for a random sample of the data, and text.length_buckets 8 gives them "
        "similar lengths; set it to 1, or set loss to dcl and negatives.store to none$"
    ),
    "two_tower stages.0.loss=gcl negatives.store=partition negatives.explicit=false text.length_buckets=2": (
        "text.length_buckets 2 .*; set it to 1, or set loss to clip and negatives.store to none$"
    ),
    "two_tower stages.0.logq_correction=simple negatives.explicit=4": (
        "assumes documents drawn by their frequency, .* each pair draws 4; set it to none, or negatives.explicit=true$"
    ),
    "two_tower negatives.explicit=0": "negatives.explicit: must be true, false or a number of at least 1, got 0$",
    "sogclr negatives.in_batch=false": "loss gcl needs in-batch negatives; set negatives.in_batch=true$",
    "sogclr stages.0.matryoshka_dims=[8]": "gcl stores one partition function of a sample, which differs between",
    "nnclr negatives.store=none": "nnclr is incompatible .* takes key tower, and negatives.store queue",
    "nnclr key=momentum_encoder": "nnclr is incompatible .* takes key tower, and negatives.store queue",
    "nnclr prediction_head.num_layers=0": "neighbors with predictions; set prediction_head.num_layers to",
    "nnclr stages.1.loss=hinge": (
        "hinge is incompatible with the prediction head of the other stages; set loss to info_nce with hinge_weight 1$"
    ),
    "moco_v3 key=tower stages.1.loss=dcl": "dcl is .* prediction head of the other stages; set loss to info_nce, or",
    "nnclr negatives.in_batch=false": "nnclr needs in-batch negatives; set negatives.in_batch=true",
    "nnclr negatives.capacity=255": "negatives.capacity 255 is less than a batch of 256",
    "two_tower stages.0.loss=nnclr negatives.store=queue": "nnclr compares views of one sample, but",
    "instance_discrimination negatives.store=none key=tower": "loss nce is incompatible with key",
}


@pytest.mark.parametrize("given", INCOMPATIBLE)
def test_incompatible_parts_of_methods_are_refused(given: str) -> None:
    name, *settings = given.split()
    with pytest.raises(ConfigError, match=INCOMPATIBLE[given]):
        override(recipe(name, image_size=32), settings)


def test_a_stage_with_the_hinge_alone_keeps_the_prediction_head() -> None:
    later = {"stages.1.hinge_weight": 1.0, "stages.1.epochs": 5}
    config = override(recipe("moco_v3", image_size=32), later)
    assert config.has_prediction_head
    assert [stage.is_hinge for stage in config.stages] == [False, True]


QUEUE = "negatives.store=queue negatives.capacity=4096"
TWO_TOWERS = {  # a recipe and its settings, the error, and a setting that removes it
    f"two_tower stages.0.loss=hinge key=momentum_encoder {QUEUE}": (
        "data.kind pairs encodes its keys by a tower, got key momentum_encoder; set key=tower",
        "key=tower",
    ),
    "clip batchnorm=shuffled": (
        "shuffled needs two views of one tower, and this run has two towers; set it to synchronized, group or layer",
        "batchnorm=group",
    ),
    "two_tower stages.0.loss=nt_xent": (
        "compares views of one sample, but data.kind pairs has pairs; set loss to info_nce, clip, hinge or siglip",
        "stages.0.loss=info_nce",
    ),
    "clip stages.1.loss=nt_xent": (
        "loss nt_xent compares views of one sample, but data.kind image_text has pairs",
        "stages.1.loss=clip",
    ),
    f"two_tower negatives.in_batch=false {QUEUE}": (
        "loss clip needs in-batch negatives; set negatives.in_batch=true, or loss to info_nce or hinge",
        "stages.0.loss=hinge",
    ),
    "two_tower stages.0.loss=siglip": (
        "siglip cannot use explicit negatives; set negatives.explicit=false, or loss to info_nce, clip or hinge",
        "negatives.explicit=false",
    ),
    "two_tower stages.0.loss=gcl negatives.store=partition": (
        "gcl cannot use explicit negatives; set negatives.explicit=false, or loss to info_nce, clip or hinge",
        "negatives.explicit=false",
    ),
    "two_tower stages.0.loss=siglip negatives.explicit=false negatives.store=queue": (
        "incompatible with key tower and negatives.store queue: it takes key tower, and negatives.store none",
        "negatives.store=none",
    ),
    "two_tower stages.0.loss=info_nce negatives.in_batch=false negatives.explicit=false": (
        "info_nce has no negatives; set negatives.in_batch=true, or a negatives.store",
        "negatives.mined.num=1",
    ),
    "two_tower negatives.mined.num=2 negatives.store=queue": (
        "negatives.mined.num 2 is incompatible with negatives.store queue; set it to none",
        "negatives.store=none",
    ),
    "two_tower negatives.mined.num=30": (
        "negatives.mined.candidates 20 is less than negatives.mined.num 30, which are drawn from them; raise it",
        "negatives.mined.candidates=30",
    ),
    "two_tower negatives.mined.num=2 negatives.mined.min_actors=2": (
        "negatives.mined.min_actors 2 is more than negatives.mined.actors 1; lower it",
        "negatives.mined.actors=2",
    ),
    "two_tower negatives.mined.num=2 negatives.explicit=false stages.0.loss=siglip": (
        "siglip cannot use mined negatives; set negatives.mined.num=0, or loss to info_nce, clip or hinge",
        "negatives.mined.num=0",
    ),
    "clip negatives.mined.num=2 stages.0.loss=siglip": (
        "siglip cannot use mined negatives; set negatives.mined.num=0, or loss to info_nce, clip or hinge",
        "stages.0.loss=info_nce",
    ),
    "simcse negatives.mined.num=2 stages.0.loss=nt_xent": (
        "nt_xent cannot use mined negatives; set negatives.mined.num=0, or loss to info_nce or hinge",
        "stages.0.loss=hinge",
    ),
    "simcse negatives.mined.num=2 prediction_head.num_layers=2": (
        "negatives.mined.num 2 is incompatible with a prediction head, which queries pass and documents do not;",
        "prediction_head.num_layers=0",
    ),
    "simcse batchnorm=shuffled": (
        "batchnorm shuffled needs views of one shape, and texts differ in length; set it to synchronized,",
        "batchnorm=synchronized",
    ),
    "two_tower negatives.mined.num=2 stages.0.logq_correction=simple": (
        "logq_correction simple assumes documents drawn by their frequency, and mined negatives are not; set it to none",
        "stages.0.logq_correction=none",
    ),
}


@pytest.mark.parametrize("given", TWO_TOWERS)
def test_unsupported_settings_of_two_towers_are_refused_with_a_working_remedy(given: str) -> None:
    name, *settings = given.split()
    message, remedy = TWO_TOWERS[given]
    with pytest.raises(ConfigError) as caught:
        override(recipe(name, image_size=32), settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    override(recipe(name, image_size=32), [*settings, remedy])


@pytest.mark.parametrize("remedy", [{"learn_temperature": False}, {"stages.0.loss": "info_nce"}])
def test_a_stage_of_nce_beside_a_learned_temperature_is_refused_with_a_working_remedy(
    remedy: dict[str, Any],
) -> None:
    settings = {"stages.0.loss": "nce", "stages.1.loss": "info_nce", "learn_temperature": True}
    bank = recipe("instance_discrimination")
    with pytest.raises(
        ConfigError, match=r"nce estimates its .*; set learn_temperature=false, or loss to info_nce"
    ):
        override(bank, settings)
    override(bank, settings | remedy)


CROPS = 'augment.views=[{"count":2},{"count":4,"size":16,"crop_scale":[0.05,0.14]}]'
VIEWS = {  # a recipe and its settings, the error, and settings that remove it
    "simclr augment.views=[]": ("has no views; it must give two or more", 'augment.views=[{"count":2}]'),
    'simclr augment.views=[{"count":1}]': (
        "the first entry of augment.views has count 1 and size 32; it must give two or more views of data.image_size "
        "32, since every view is compared with these",
        "augment.views.0.count=2",
    ),
    'simclr augment.views=[{"count":1},{"count":3}]': (
        "entry of augment.views has count 1",
        "augment.views.0.count=2",
    ),
    'simclr augment.views=[{"count":2,"size":16}]': ("has count 2 and size 16", "augment.views.0.size=32"),
    'simclr augment.views=[{"count":2},{"count":2,"size":40}]': (
        "augment.views has size 40, more than data.image_size 32; choose a smaller size",
        "augment.views.1.size=24",
    ),
    'simclr augment.views=[{"count":2},{"count":1,"size":16},{"count":1,"size":64}]': (
        "augment.views has size 64, more than data.image_size 32; choose a smaller size",
        "augment.views.2.size=24",
    ),
    f"simclr {CROPS} encoder.name=vit_tiny": (
        "augment.views has size 16, and the position embeddings of vit_tiny fit only data.image_size 32; remove size",
        "augment.views.1.size=null",
    ),
    f"simclr {CROPS} batchnorm=shuffled": (
        "batchnorm shuffled of a single tower supports two views, got 6; set batchnorm to synchronized",
        "batchnorm=synchronized",
    ),
    f"simclr {CROPS} stages.0.image_size=12": (
        "image_size 12 scales a size of augment.views to 6 pixels; choose larger sizes, so that each is at least 8",
        "augment.views.1.size=22",
    ),
    f"simclr {CROPS} stages.0.chunk_size=1025": (
        "chunk_size 1025 is larger than a worker's 1024 views",
        "stages.0.chunk_size=1024",
    ),
    f"moco_v2 {CROPS} augment.views.1.count=1 stages.0.chunk_size=288": (
        "larger than a worker's 256 views",
        "augment.views.1.count=2",
    ),
    'simclr augment.views=[{"count":2,"crop_scale":[0.2,1.0]}] augment.crop_scale=[0.3,1.0]': (
        "augment.crop_scale acts only with an entry of augment.views without a crop_scale; remove it",
        "augment.views.0.crop_scale=null",
    ),
    'simclr augment.views=[{"count":0}]': (
        "augment.views.0.count: input should be greater than or equal to 1",
        "augment.views.0.count=2",
    ),
    'simclr augment.views=[{"cout":2}]': (
        "unknown key augment.views.0.cout; did you mean count?",
        'augment.views=[{"count":2}]',
    ),
    'simclr augment.views=[{"count":2,"sise":16}]': (
        "unknown key augment.views.0.sise; did you mean size?",
        'augment.views=[{"count":2,"size":32}]',
    ),
    'simclr augment.views=[{"size":32}]': ("augment.views.0.count is missing", 'augment.views=[{"count":3}]'),
}


@pytest.mark.parametrize("given", VIEWS)
def test_views_that_a_run_cannot_use_are_refused_with_a_working_remedy(given: str) -> None:
    name, *settings = given.split()
    message, remedy = VIEWS[given]
    with pytest.raises(ConfigError) as caught:
        override(recipe(name, image_size=32), settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    override(recipe(name, image_size=32), [*settings, remedy])


@pytest.mark.parametrize(
    ("given", "owner"), [("augment.views.0.count=3", "augment.views"), ("data.weights.1=2", "data.weights")]
)
def test_an_entry_of_a_list_that_is_null_is_refused_with_the_name_of_the_list(given: str, owner: str) -> None:
    path = given.partition("=")[0]
    with pytest.raises(ConfigError) as caught:
        override(recipe("simclr", image_size=32), [given])
    assert (
        str(caught.value)
        == f"{path} sets an entry of {owner}, which is not given; give the whole list, {owner}=[...]"
    )
    whole = override(
        recipe("simclr", image_size=32), ['augment.views=[{"count":2}]', "augment.views.0.count=3"]
    )
    assert whole.num_views == 3


@pytest.mark.parametrize(
    ("section", "setting"),
    [
        ("encoder={name: resnet18}", "encoder.width=0.5"),
        ("data={image_size: 32}", "data.columns.label=class"),
        ("stages=[{epochs: 5}]", "stages.0.temperature=0.3"),
        ("stages=[{epochs: 5}, {epochs: 5}]", "stages.1.chunk_size=8"),
        ("augment.views=[{count: 2}, {count: 4}]", "augment.views.1.size=16"),
    ],
)
def test_a_setting_may_follow_its_section_given_in_part(section: str, setting: str) -> None:
    path, _, value = setting.partition("=")
    config = override(recipe("simclr", image_size=32), [section, setting])
    assert str(leaves(config)[path]) == value


@pytest.mark.parametrize(
    ("section", "setting", "refusal"),
    [
        ("encoder={name: resnet18}", "encoder.widht=2", "did you mean width?"),
        ("data={image_size: 32}", "data.cache.x=1", "cache is a single value"),
        ("augment.views=[{count: 2}]", "augment.views.0.crop_scale.0=0.5", "give the whole list"),
    ],
)
def test_no_other_name_may_follow_a_section_given_in_part(section: str, setting: str, refusal: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(refusal)):
        override(recipe("simclr", image_size=32), [section, setting])


@pytest.mark.parametrize(
    ("name", "section", "paths"),
    [
        ("clip", {"data": {"image_size": 64}}, {"data.image_size": 64}),
        ("simclr", {"data": {"columns": {"label": "class"}}}, {"data.columns.label": "class"}),
        ("simclr", {"optimizer": {"weight_decay": 0.1}}, {"optimizer.weight_decay": 0.1}),
        ("simclr", {"stages.0": {"batch_size": 32}}, {"stages.0.batch_size": 32}),
        ("two_tower", {"encoder": {"name": "transformer"}}, {"encoder.name": "transformer"}),
        ("two_tower", {"encoder": {"kwargs": {"dim": 64}}}, {"encoder.kwargs": {"dim": 64}}),
    ],
)
def test_a_mapping_sets_the_settings_that_it_names(
    name: str, section: dict[str, Any], paths: dict[str, Any]
) -> None:
    config = recipe(name, image_size=32)
    assert override(config, section) == override(config, paths) != config


def test_the_length_of_a_stage_in_a_mapping_replaces_the_other_one() -> None:
    config = override(recipe("simclr"), ["stages.0={steps: 30}", "stages.1={epochs: 2, batch_size: 64}"])
    assert [(stage.epochs, stage.steps) for stage in config.stages] == [(None, 30), (2, None)]
    assert override(config, ["stages.0={steps: null, epochs: 3}"]).stages[0].epochs == 3
    assert override(config, ["stages.0={epochs: null, batch_size: 64}"]).stages[0].steps == 30
    with pytest.raises(ConfigError, match="exactly one of epochs and steps"):
        override(config, ["stages.0={epochs: 3, steps: 30}"])


def test_a_section_in_python_is_replaced_as_a_whole() -> None:
    config = recipe("simclr", image_size=32)
    assert override(config, {"optimizer": OptimizerConfig(name="sgd")}).optimizer == OptimizerConfig(
        name="sgd"
    )
    with pytest.raises(ConfigError, match="optimizer.betas acts only with optimizer.name adamw or muon"):
        override(config, {"optimizer": OptimizerConfig(name="sgd", betas=(0.5, 0.5))})


@pytest.mark.parametrize("several", [list, tuple])
def test_sections_in_a_list_or_a_mapping_are_checked_and_may_be_changed(several: Any) -> None:
    config = recipe("simclr", image_size=32)
    changed = override(config, {"stages": several([Stage(epochs=3)]), "stages.0.batch_size": 64})
    assert changed.stages == (Stage(epochs=3, batch_size=64),)
    with pytest.raises(ConfigError, match="stages.0.margin acts only with loss hinge"):
        override(config, {"stages": several([Stage(epochs=3, margin=0.5)])})
    assert override(config, {"data": {"columns": Columns(label="x")}}).data.columns == Columns(label="x")
    with pytest.raises(ConfigError, match="data.columns.text acts only with data.kind text"):
        override(config, {"data": {"columns": Columns(text="x")}})


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ("data={}", "data is an empty mapping, which sets nothing; remove it"),
        ("nonsense={key: 1}", "unknown key nonsense (allowed"),
        ("seed={key: 1}", "seed: input should be a valid integer"),
    ],
)
def test_a_mapping_without_settings_is_refused(given: str, refusal: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(refusal)}"):
        override(recipe("simclr", image_size=32), [given])


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ("data.image_size: 96", "data.image_size; in a file, write image_size as a key of data"),
        (
            "data: {columns.label: class}",
            "data.columns.label; in a file, write label as a key of data.columns",
        ),
        ("stages.1.epochs: 3", "stages.1.epochs; in a file, write epochs as a key of stages.1"),
        ("data.stored_size: 96", "data.stored_size; it is now data.decode_size"),
    ],
)
def test_a_path_as_a_key_of_a_file_is_refused_with_its_section(given: str, refusal: str) -> None:
    with pytest.raises(ConfigError, match=f"^unknown key {re.escape(refusal)}( \\(and|$)"):
        config_from_yaml(f"recipe: mine\nstages: [{{epochs: 3}}]\n{given}\n")


def test_views_survive_a_round_trip_through_yaml_and_are_counted_by_size() -> None:
    for name, queries in (("simclr", {32: 2, 16: 4}), ("moco_v2", {32: 1, 16: 4})):
        config = override(recipe(name, image_size=32), [CROPS])
        assert config_from_yaml(config_to_yaml(config)) == config
        assert config.num_views == 6
        assert config.views_by_size(config.stages[0]) == queries


@pytest.mark.parametrize(("workers", "rows"), [(1, 32), (2, 32), (8, 32), (16, 16)])
def test_shuffled_batchnorm_keeps_its_groups_down_to_one_per_worker(workers: int, rows: int) -> None:
    config = override(recipe("moco_v2"), {"workers": workers})
    assert config.rows_per_group(config.stages[0]) == rows


def test_a_further_stage_inherits_all_other_settings_from_the_last_one() -> None:
    config = override(
        recipe("simclr"), ["stages.0.epochs=3", "stages.1.batch_size=512", "stages.1.workers=2"]
    )
    first, second = config.stages
    assert (first.batch_size, second.batch_size) == (256, 512)
    assert (second.epochs, second.temperature) == (3, first.temperature)
    assert [config.workers_of(stage) for stage in config.stages] == [1, 2]
    assert config.local_batch_size(second) == 256


def test_fewer_workers_are_allowed_unless_a_stage_sets_their_number() -> None:
    settings = ["workers=4", "min_workers=1", "stages.0.batch_size=24", "stages.1.workers=2"]
    config = override(recipe("simclr"), settings)
    assert [config.worker_range(stage) for stage in config.stages] == [(1, 4), (2, 2)]
    settled = config.settled(3)
    assert [settled.local_batch_size(stage) for stage in settled.stages] == [8, 12]
    assert [settled.worker_range(stage) for stage in settled.stages] == [(3, 3), (2, 2)]
    fixed = override(recipe("simclr"), ["workers=2"])
    assert fixed.settled(4) is fixed


def test_workers_of_one_stage_leave_the_range_of_the_others() -> None:
    settings = ["workers=4", "min_workers=1", "batchnorm_groups=12", "stages.0.batch_size=24"]
    config = override(recipe("moco_v2"), [*settings, "stages.1.batch_size=96", "stages.1.workers=24"])
    settled = config.settled(24)
    assert [settled.worker_range(stage) for stage in settled.stages] == [(4, 4), (24, 24)]
    # Shuffled BatchNorm refuses groups of one row, and the networks are built with those of the first stage.
    assert [settled.rows_per_group(stage) for stage in settled.stages] == [2, 4]


def test_an_unknown_key_in_a_file_is_refused_with_a_list_of_valid_keys() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown key stages.0.tau \(allowed: epochs, steps, .*temperature"
    ):
        config_from_dict({"recipe": "x", "stages": [{"steps": 3, "tau": 1.0}]})


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="recipe is missing"):
        config_from_dict({"stages": [{"steps": 3}]})


@pytest.mark.parametrize("text", ["- 1", "just words", "a: [1", ""])
def test_a_file_without_a_run_configuration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        config_from_yaml(text, name="mine.yaml")


def test_a_key_that_a_file_gives_twice_is_refused() -> None:
    text = config_to_yaml(recipe("simclr", image_size=32))
    with pytest.raises(ConfigError, match="run.yaml is not valid YAML: it gives 'optimizer' twice"):
        config_from_yaml(f"{text}optimizer: {{name: sgd}}\n", name="run.yaml")


def test_a_value_that_yaml_cannot_read_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^run\.yaml is not valid YAML: [^\n]+$"):
        config_from_yaml(f"seed: {'9' * 5_000}", name="run.yaml")


def test_a_number_in_place_of_text_is_quoted_as_its_error_says() -> None:
    config = recipe("simclr")
    for value, read in {"1": "1", "2.5": "2.5", "on": "True"}.items():
        remedy = 'quote it: --set \'data.columns.label="TEXT"\', or "TEXT" in a file'
        with pytest.raises(ConfigError) as caught:
            override(config, [f"data.columns.label={value}"])
        assert str(caught.value) == f"data.columns.label must be text, got {read}; {remedy}"
        (_, setting) = shlex.split(remedy.split(", or")[0].partition(": ")[2].replace("TEXT", value))
        assert override(config, [setting]).data.columns.label == value
        with pytest.raises(ConfigError, match="must be text, got .*; quote it"):
            config_from_yaml(f"recipe: simclr\ndata: {{columns: {{label: {value}}}}}\nstages: [{{steps: 1}}]")


@pytest.mark.parametrize("text", ["2:8", "010", "1:30.5", "0b1", "2026-01-31", "2020-13-01"])
def test_numbers_and_dates_of_yaml_1_1_alone_are_text(text: str) -> None:
    assert parse_setting(f"a={text}") == ("a", text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-3", -3),
        ("1_000", 1000),
        ("1e-4", 1e-4),
        ("-.5", -0.5),
        ("2.", 2.0),
        (".5E+3", 500.0),
        ("0x10", 16),
        ("~", None),
        ("null # none", None),
    ],
)
def test_numbers_and_null_are_values(text: str, value: float | None) -> None:
    assert parse_setting(f"a={text}") == ("a", value)
    assert type(parse_setting(f"a={text}")[1]) is type(value)


@pytest.mark.parametrize("text", ["", " ", "#class", " # class"])
def test_a_setting_without_a_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no value; give null for none|is a comment of YAML; quote it"):
        parse_setting(f"data.columns.label={text}")


def test_an_unknown_recipe_is_refused_with_a_list_of_recipes() -> None:
    with pytest.raises(ConfigError, match="simclr"):
        recipe("simclear")


@pytest.mark.parametrize(("scaling", "peak"), [("linear", 1.2), ("square_root", 0.6), ("none", 0.3)])
def test_the_learning_rate_scales_with_the_batch_size(scaling: str, peak: float) -> None:
    stage = Stage(steps=1, batch_size=1024, learning_rate=0.3, learning_rate_scaling=scaling)  # type: ignore[arg-type]
    assert stage.peak_learning_rate == pytest.approx(peak)


def test_a_run_needs_a_stage() -> None:
    with pytest.raises(ConfigError, match="stages is empty; give at least one stage"):
        config_from_dict({"recipe": "x", "stages": []})


def test_a_configuration_can_be_written_in_python() -> None:
    config = RunConfig(recipe="mine", workers=2, stages=(Stage(steps=10, batch_size=64),))
    assert config.stages[0].batch_size == 64


@pytest.mark.parametrize(
    ("network", "match"),
    [
        (
            nn.Flatten(),
            "gives 192 numbers for images of 8 pixels .stages.1.image_size., and 768 for 16 .*; pool its output",
        ),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(768, 4)),
            r"does not take images \[batch, 3, 8, 8\] \(data.channels, stages.1.image_size\)",
        ),
    ],
)
def test_a_network_must_take_the_images_of_every_stage(network: nn.Module, match: str) -> None:
    config = override(recipe("simclr", image_size=16), {"stages.1.image_size": 8, "batchnorm": "local"})
    with pytest.raises(ConfigError, match=match):
        build_towers(config, network=network)
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
    build_towers(config, network=pooled)


def test_statistics_of_each_view_need_a_batchnorm() -> None:
    head = {"projection_head.batchnorm": False}
    config = override(recipe("simclr", image_size=16), {"batchnorm": "local_view"})
    message = "^batchnorm local_view acts only in a network with BatchNorm, and neither .*; set it to local$"
    for network, settings in (
        (None, {"encoder.name": "vit_tiny", **head}),
        (nn.Flatten(), head),
        (nn.Flatten(), {"projection_head.num_layers": 1}),
    ):
        with pytest.raises(ConfigError, match=message):
            build_towers(override(config, settings), network=network)
    build_towers(override(config, head), network=nn.Sequential(nn.BatchNorm2d(3), nn.Flatten()))
    build_towers(config, network=nn.Flatten())


def test_an_nce_stage_may_be_added_to_a_run_without_one() -> None:
    shape = {"encoder.name": "resnet10", "encoder.width": 0.25}
    first = override(recipe("instance_discrimination", image_size=16), {**shape, "stages.0.loss": "info_nce"})
    longer = override(first, {"stages.1.loss": "nce"})
    states = [
        TrainState.build(config, build_towers(config), num_samples=9).state_dict()
        for config in (first, longer)
    ]
    assert states[0].keys() == states[1].keys()


@pytest.mark.parametrize(
    ("settings", "precision"),
    [
        ({}, "float32"),
        ({"gpu": True}, "bfloat16"),
        ({"gpu": True, "precision": "float32"}, "float32"),
        ({"precision": "bfloat16"}, "bfloat16"),
    ],
)
def test_a_gpu_computes_in_bfloat16_by_default(settings: dict[str, object], precision: str) -> None:
    assert override(recipe("simclr"), settings).tower_precision == precision


def test_a_learned_bias_starts_at_the_value_of_the_first_stage_with_a_bias() -> None:
    settings = {"stages.1.loss": "siglip", "stages.1.bias": -3.0}
    assert override(recipe("clip"), settings).first_bias == -3.0
    assert recipe("clip").first_bias is None
