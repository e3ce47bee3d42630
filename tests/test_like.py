"""Configurations of other libraries: equal losses from equal weights, and the settings that they need."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import raycl
from raycl.cli.main import app
from raycl.config import leaves
from raycl.models.image import build_image_encoder
from raycl.recipes import recipe
from raycl.recipes.like import LIKE
from raycl.training.stages import stage_plans
from tests.peer_steps import NUM_TRAIN, PEERS, STEPS, configuration, losses_here

# Written by ``python -m tests.peer_steps > tests/peer_losses.json``.
RECORDED = json.loads((Path(__file__).parent / "peer_losses.json").read_text())
NEEDED = {
    "lightly:simclr": ("lightly",),
    "open_clip:vit-b-32": ("open_clip",),
    "st:mnrl": ("sentence_transformers", "accelerate", "datasets"),
}


@pytest.mark.parametrize("name", LIKE)
def test_a_hundred_steps_have_the_losses_of_the_other_library(name: str) -> None:
    recorded = RECORDED[name]["losses"]
    assert len(recorded) == STEPS
    # open_clip's epsilon of AdamW is 1e-6; with 1e-8, as here, its losses are equal too.
    tolerance = 1e-4 if name == "open_clip:vit-b-32" else 1e-6
    assert losses_here(configuration(name)) == pytest.approx(recorded, rel=tolerance)


@pytest.mark.parametrize("name", LIKE)
def test_the_installed_library_has_the_recorded_losses(name: str) -> None:
    for module in NEEDED[name]:
        pytest.importorskip(module)
    assert PEERS[name](configuration(name)) == pytest.approx(RECORDED[name]["losses"], rel=1e-6)


def test_learning_rates_follow_the_schedule_of_the_other_library() -> None:
    def rates(name: str) -> list[float]:
        (plan,) = stage_plans(configuration(name), num_train=[NUM_TRAIN])
        return [plan.learning_rate(step) for step in range(plan.num_steps)]

    assert set(rates("lightly:simclr")) == {0.06}
    assert rates("st:mnrl") == pytest.approx([5e-5 * (1 - step / STEPS) for step in range(STEPS)])
    steps, warmup = 10 * STEPS, STEPS + 1
    cosine = [0.5 + 0.5 * math.cos(math.pi * (step - warmup) / (steps - warmup)) for step in range(steps)]
    shape = [min((step + 1) / warmup, 1.0) if step < warmup else cosine[step] for step in range(steps)]
    found = rates("open_clip:vit-b-32")
    assert found[:warmup] == pytest.approx([5e-4 * each for each in shape[:warmup]])
    # Its cosine begins a step later.
    assert found == pytest.approx([5e-4 * each for each in shape], abs=5e-4 * 2 / steps)


@pytest.mark.parametrize("name", LIKE)
def test_a_configuration_states_exactly_what_its_recipe_does_otherwise(name: str) -> None:
    base, settings = LIKE[name]
    small, large = (leaves(recipe(name, image_size=size)) for size in (32, 224))
    assert {path for path in small if small[path] != large[path]} <= {"data.image_size"}
    recipes = [leaves(recipe(base, image_size=size)) for size in (32, 224)]
    changed = {path for each in recipes for path in large if large[path] != each.get(path)}
    stated = {"recipe", "data.image_size", *settings}
    assert {
        path for path in changed if not any(f"{path}.".startswith(f"{each}.") for each in stated)
    } == set()
    for each in settings:
        assert any(f"{path}.".startswith(f"{each}.") for path in changed), f"{each} is the recipe's"


def test_the_vit_of_open_clip_has_patches_of_32_pixels() -> None:
    encoder = recipe("open_clip:vit-b-32").encoder
    network: Any = build_image_encoder(encoder.name, image_size=224, stem=encoder.stem, width=0.125)
    assert network.conv_proj.kernel_size == (32, 32)
    assert network.encoder.pos_embedding.shape[1] == 7 * 7 + 1
    assert len(network.encoder.layers) == 12


@pytest.mark.parametrize("channels", [1, 3])
def test_the_first_patches_of_a_vit_have_the_variance_of_the_pixels(channels: int) -> None:
    torch.manual_seed(0)
    network: Any = build_image_encoder("vit_tiny", image_size=32, channels=channels)
    images = torch.randn(64, channels, 32, 32, generator=torch.Generator().manual_seed(0))
    assert network.conv_proj(images).std().item() == pytest.approx(1.0, abs=0.03)
    assert not network.conv_proj.bias.any()


def test_settings_apply_on_top_of_a_configuration() -> None:
    from raycl.cli.plan import plan_run, run_flags

    plan = plan_run(
        "st:mnrl",
        data=[],
        flags=run_flags(epochs=1, batch_size=64),
        settings={"optimizer.name": "sgd", "encoder.name": "bag_of_subwords"},
    )
    stage = plan.config.stages[0]
    assert (stage.epochs, stage.batch_size, stage.learning_rate_schedule) == (1, 64, "linear")
    assert (plan.config.optimizer.name, plan.config.encoder.kwargs) == ("sgd", {})


@pytest.mark.parametrize(
    ("given", "like", "message"),
    [
        (None, None, "give a recipe, or --like with one of lightly:simclr, "),
        (None, "lightly:simclrr", "unknown configuration 'lightly:simclrr' of another library; there are "),
        ("moco_v2", "lightly:simclr", "trains recipe simclr, got recipe moco_v2; remove one of them"),
        (recipe("simclr"), "lightly:simclr", "got recipe of a configuration"),
        ("simclr", "lightly:simclr", "there is nothing at"),
        (None, "lightly:simclr", "there is nothing at"),
        ("lightly:simclr", None, "there is nothing at"),
    ],
)
def test_a_recipe_and_a_configuration_agree(
    given: Any, like: str | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(raycl.errors.RayclError, match=message):
        raycl.train(given, like=like, data=tmp_path / "missing", output=tmp_path / "run")


def test_the_command_lists_the_configurations() -> None:
    listed, described = (CliRunner().invoke(app, line).output for line in (["recipes"], ["train", "--help"]))
    for name in LIKE:
        assert f"\n{name} " in listed
        assert name in " ".join(described.split())
