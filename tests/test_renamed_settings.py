"""Files of older versions are still read; old names typed by users are errors that give the new name."""

import json
from pathlib import Path

import pytest
import yaml

from raycl.cli.plan import command_settings
from raycl.config import leaves
from raycl.config.overrides import RENAMED, config_from_yaml, config_to_yaml, override
from raycl.errors import ConfigError, StorageError
from raycl.inference.encoder import load_encoder
from raycl.recipes import recipe
from raycl.records import CHECKPOINT_LIST, read_metrics, read_result
from raycl.records import RENAMED as RENAMED_KEYS
from raycl.report.history import read_history
from raycl.report.run import read_run
from raycl.serve.target import saved_explorer
from raycl.step_replay.record import read_record
from raycl.storage import Place
from tests.outputs import write_run

OLD = Path(__file__).parent / "old_configs"  # written by 0.1.0 before the renames, for images of 32 pixels
GUIDE = Path(__file__).parent.parent / "docs" / "migration-names.md"
RENAMED_RECIPES = {"image_text": "clip"}
LEARNING_RATES = {
    "two_tower": ["stages.0.learning_rate=0.003"],
    "clip": ["stages.0.learning_rate=0.0005"],
}


@pytest.mark.parametrize("path", sorted(OLD.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_of_an_older_version_equals_todays_recipe(path: Path) -> None:
    name = RENAMED_RECIPES.get(path.stem, path.stem)
    # A file holds every setting of its time, also those whose default is another one today.
    defaults = ["checkpoints.interval_s=300", *LEARNING_RATES.get(name, ())]
    today = override(recipe(name, image_size=32), defaults)
    assert config_from_yaml(path.read_text()) == today


def test_every_old_value_is_replaced_in_every_stage() -> None:
    values = yaml.safe_load((OLD / "instance_discrimination.yaml").read_text())
    values["bank"]["held_by"] = "workers"
    values["encoder"] = {"name": "mine:network", "arguments": {"zero_init_residual": True}}
    values["stages"] *= 2
    values["stages"][1] = values["stages"][1] | {
        "chunk_size": 64,
        "learning_rate_over": "run",
        "kept_chunks": 3,
    }
    config = config_from_yaml(yaml.safe_dump(values))
    assert config.bank.location == "worker"
    assert config.encoder.kwargs == {"zero_init_residual": True}
    assert [stage.cached_chunks for stage in config.stages] == [1, 3]
    assert [stage.learning_rate_scope for stage in config.stages] == ["stage", "run"]


def test_old_values_of_the_logq_correction_are_read_as_their_new_names() -> None:
    values = yaml.safe_load((OLD / "two_tower.yaml").read_text())
    for old, new in ((False, "none"), (True, "simple")):
        values["stages"][0]["discount_frequent"] = old
        assert config_from_yaml(yaml.safe_dump(values)).stages[0].logq_correction == new
        typed = f"stages.0.logq_correction={str(old).lower()}"
        assert override(recipe("two_tower"), [typed]).stages[0].logq_correction == new
    with pytest.raises(
        ConfigError, match="logq_correction: input should be 'none', 'simple' or 'refined', got"
    ):
        override(recipe("two_tower"), ["stages.0.logq_correction=exact"])


def test_a_file_with_both_names_of_a_setting_is_refused() -> None:
    text = "recipe: mine\ndata: {stored_size: 32, decode_size: 64}\nstages: [{steps: 1}]"
    with pytest.raises(ConfigError, match="unknown key data.stored_size; it is now data.decode_size"):
        config_from_yaml(text)


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_on_the_command_line_is_an_error_with_the_new_name(old: str) -> None:
    new = RENAMED[old].replace(".N.", ".0.")
    typed = old.replace(".N.", ".0.")
    if old.startswith("recipe="):
        with pytest.raises(ConfigError, match="unknown recipe 'image_text'; it is now clip"):
            recipe("image_text")
    elif old == "floor":
        with pytest.raises(ConfigError, match="unknown key floor; it is now baseline"):
            command_settings("knn", ["floor=false"])
    elif "=" in typed:
        with pytest.raises(ConfigError, match=f"{typed} is now {new}"):
            override(recipe("simclr"), [typed])
    else:
        with pytest.raises(ConfigError, match=f"unknown key {typed}; it is now {new}"):
            override(recipe("simclr"), [f"{typed}=1"])


def test_every_new_name_is_a_setting() -> None:
    settings = leaves(recipe("two_tower")) | {"text_encoder.kwargs": {}, "baseline": True}
    for new in RENAMED.values():
        assert new.partition("=")[0].replace(".N.", ".0.") in settings | {"encoder.kwargs": {}}


def test_the_migration_guide_lists_every_renamed_setting_and_key() -> None:
    text = GUIDE.read_text()
    for old, new in (RENAMED | RENAMED_KEYS).items():
        assert f"| `{old}` | `{new}` |" in text


def test_metrics_and_results_of_older_versions_are_read_under_the_new_keys(tmp_path: Path) -> None:
    write_run(tmp_path)
    line = {"step": 1, "samples": 8, "loss": 1.0, "spread": 0.5, "leakage": 0.25}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "result.json").write_text(
        json.dumps({"status": "finished", "broken_rows": {"a": 1}, "left_out": {"b": 2}})
    )
    place = Place(str(tmp_path))
    assert read_metrics(place) == [
        {"step": 1, "samples": 8, "loss": 1.0, "embedding_std": 0.5, "batchnorm_leakage": 0.25}
    ]
    assert read_result(place) == {"status": "finished", "invalid_rows": {"a": 1}, "skipped": {"b": 2}}
    history = read_history((tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (history["embedding_std"].last, history["batchnorm_leakage"].last) == (0.5, 0.25)


def test_a_run_with_settings_that_training_refuses_today_is_still_read(tmp_path: Path) -> None:
    settings = {"stages.0.loss": "gcl", "negatives.store": "partition", "text.length_buckets": 1}
    run = str(write_run(tmp_path, method="simcse", settings=settings))
    text = (tmp_path / "config.yaml").read_text().replace("length_buckets: 1", "length_buckets: 8")
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="text.length_buckets 8 gives them similar lengths"):
        config_from_yaml(text)
    for config in (read_run(run).config, read_record(run).config):
        assert config.text.length_buckets == 8
        assert config_to_yaml(config) == text
    # The last one reads a checkpoint.
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / CHECKPOINT_LIST).write_text("{}")
    with pytest.raises(ConfigError, match="neither a snapshot of a bank nor one of embeddings"):
        saved_explorer(run, embeddings=None, data=None)
    with pytest.raises(StorageError, match="has no checkpoint yet"):
        load_encoder(run)
