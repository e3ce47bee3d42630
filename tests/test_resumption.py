"""Resuming the run in an output: permitted and refused changes."""

import contextlib
import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import raycl
from raycl.cli.plan import own_data, own_settings, plan_run
from raycl.config import RunConfig
from raycl.config.overrides import config_from_yaml, config_to_yaml
from raycl.errors import ConfigError, DataError, RunError, StorageError
from raycl.records import read_result, write_result
from raycl.storage import Place
from raycl.training import launch
from raycl.training.preflight import check_output, check_same_data, validate_run
from tests.images import write_digits
from tests.test_cli import run_raycl

TWO_STAGES = {"stages.0.epochs": 3, "stages.1.batch_size": 512}


def run_of(**settings: Any) -> RunConfig:
    return raycl.override(raycl.recipe("simclr"), {**TWO_STAGES, **settings})


@pytest.fixture
def output(tmp_path: Path) -> str:
    (tmp_path / "config.yaml").write_text(config_to_yaml(run_of()))
    return str(tmp_path)


def described(**changes: Any) -> dict[str, Any]:
    return {"data": "images", "num_rows": 700, "streamed": True, **changes}


@pytest.mark.parametrize(
    "settings",
    [
        {"stages.1.epochs": 9},
        {"stages.1.workers": 2, "stages.0.chunk_size": 64, "stages.0.activation_checkpoint_every": 1},
        {"stages.2.batch_size": 1024, "stages.2.loss": "hinge"},
        {"monitor.on_collapse": "stop", "checkpoints.keep": 5, "log_every_steps": 1},
        {"data.max_invalid_fraction": 0.5},  # as the error of too many invalid rows advises
    ],
)
def test_settings_without_effect_on_views_and_weights_may_change(
    output: str, settings: dict[str, Any]
) -> None:
    check_output(run_of(**settings), Place(output), resume=True)


def test_a_bank_may_get_another_name(tmp_path: Path) -> None:
    # Another run may have taken the first name in the meantime.
    queue = raycl.recipe("moco_v2", image_size=32)
    (tmp_path / "config.yaml").write_text(config_to_yaml(queue))
    renamed = {"bank.name": "other"}
    check_output(raycl.override(queue, renamed), Place(str(tmp_path)), resume=True)
    detached = raycl.override(queue, {"bank.detached": True})
    (tmp_path / "config.yaml").write_text(config_to_yaml(detached))
    with pytest.raises(ConfigError, match="leave the detached bank of the run behind; repeat the name"):
        check_output(raycl.override(detached, renamed), Place(str(tmp_path)), resume=True)


def test_splits_are_refused_by_resume_unless_the_output_holds_a_run_that_trained_on_them(
    tmp_path: Path,
) -> None:
    for split in ("train", "test"):
        (tmp_path / "data" / split).mkdir(parents=True)
        write_digits(tmp_path / "data" / split / "rows.parquet", 8)
    config, output = raycl.override(raycl.recipe("simclr"), {"stages.0.batch_size": 8}), tmp_path / "run"
    data = [str(tmp_path / "data")]
    with (
        pytest.raises(DataError, match="holds a data set in 2 splits"),
        validate_run(config, output=str(output), resume=True, data=data),
    ):
        pass
    output.mkdir()
    (output / "config.yaml").write_text(config_to_yaml(config))
    with validate_run(config, output=str(output), resume=True, data=data) as run:
        assert run.resumed


def test_settings_that_a_permitted_change_ends_or_starts_do_not_count(tmp_path: Path) -> None:
    hinge = {"stages.0.loss": "hinge", "stages.1.loss": "hinge"}
    rollback = {"monitor.on_collapse": "rollback", "stages.0.temperature": 0.5}
    stream = {"data.cache": "stream", "data.shuffle_buffer_size": 128}
    first, second = run_of(**hinge, **rollback, **stream), run_of(**hinge, **{"data.cache": "materialize"})
    for saved, config in ((first, second), (second, first)):
        (tmp_path / "config.yaml").write_text(config_to_yaml(saved))
        check_output(config, Place(str(tmp_path)), resume=True)


def test_a_saved_setting_that_an_earlier_version_ignored_does_not_count(tmp_path: Path) -> None:
    config = raycl.override(raycl.recipe("simclr"), {"stages.0.workers": 2})
    (tmp_path / "config.yaml").write_text(f"workers: 4\n{config_to_yaml(config)}")
    check_output(config, Place(str(tmp_path)), resume=True)
    launch._check_length(config, Place(str(tmp_path)), [1_000])


def test_an_added_stage_cannot_begin_to_learn_the_temperature(tmp_path: Path) -> None:
    hinge = {"stages.0.loss": "hinge", "stages.1.loss": "hinge"}
    (tmp_path / "config.yaml").write_text(config_to_yaml(run_of(**hinge)))
    learning = run_of(**hinge, **{"stages.2.loss": "nt_xent", "learn_temperature": True})
    with pytest.raises(ConfigError, match="--resume would change learn_temperature from False to True"):
        check_output(learning, Place(str(tmp_path)), resume=True)


@pytest.mark.parametrize("learns", [True, False])
def test_an_added_stage_cannot_begin_to_learn_a_bias(learns: bool, tmp_path: Path) -> None:
    clip = raycl.override(raycl.recipe("clip", image_size=32), {"learn_temperature": learns})
    (tmp_path / "config.yaml").write_text(config_to_yaml(clip))
    added = raycl.override(clip, {"stages.1.loss": "siglip", "stages.1.epochs": 1})
    says = pytest.raises(ConfigError, match="--resume would add or remove a learned bias")
    with says if learns else contextlib.nullcontext():
        check_output(added, Place(str(tmp_path)), resume=True)


def test_an_added_stage_cannot_remove_the_prediction_head(tmp_path: Path) -> None:
    config = raycl.recipe("moco_v3", image_size=32)
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    added = {"stages.1.loss": "hinge"}
    with pytest.raises(ConfigError, match="hinge is incompatible with the prediction head"):
        raycl.override(config, added)
    with pytest.raises(ConfigError, match="--resume would change prediction_head.num_layers from 2 to 0"):
        without = raycl.override(config, added | {"prediction_head.num_layers": 0})
        check_output(without, Place(str(tmp_path)), resume=True)


def test_a_guide_and_a_corpus_may_move_but_not_come_or_go(tmp_path: Path) -> None:
    def guided(folder: str | None) -> RunConfig:
        settings = {f"negatives.guide.{side}": folder for side in ("query", "document")}
        return raycl.override(raycl.recipe("two_tower"), settings)

    def counted(corpus: str | None) -> RunConfig:
        return raycl.override(raycl.recipe("two_tower"), {"text.corpus": corpus})

    for before, now, is_refused in (("near", "far", False), (None, "far", True), ("near", None, True)):
        (tmp_path / "config.yaml").write_text(config_to_yaml(guided(before)))
        says = pytest.raises(
            ConfigError, match=rf"would change negatives\.guide\.query from {before!r} to {now!r}"
        )
        with says if is_refused else contextlib.nullcontext():
            check_output(guided(now), Place(str(tmp_path)), resume=True)
        (tmp_path / "config.yaml").write_text(config_to_yaml(counted(before)))
        says = pytest.raises(ConfigError, match=rf"would change text\.corpus from {before!r} to {now!r}")
        with says if is_refused else contextlib.nullcontext():
            check_output(counted(now), Place(str(tmp_path)), resume=True)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"seed": 1}, "would change seed from 0 to 1"),
        ({"stages.0.epochs": 4}, r"would change stages\.0\.epochs from 3 to 4"),
        ({"stages.1.batch_size": 256}, r"would change stages\.1\.batch_size from 512 to 256"),
        ({"data.channels": 1}, r"would change data\.channels from 3 to 1"),
        ({"encoder.width": 0.5}, r"would change encoder\.width"),
        ({"data.columns.weight": "w"}, r"would change data\.columns\.weight from None to 'w'"),
    ],
)
def test_settings_that_affect_the_weights_may_not_change(
    output: str, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check_output(run_of(**settings), Place(output), resume=True)


def test_the_old_name_of_a_precision_is_accepted(output: str) -> None:
    check_output(run_of(precision="float32"), Place(output), resume=True)  # written by older versions
    with pytest.raises(ConfigError, match="would change precision from 'auto' to 'bfloat16'"):
        check_output(run_of(precision="bfloat16"), Place(output), resume=True)


def test_a_small_encoder_keeps_its_precision_on_another_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = str(write_digits(tmp_path / "digits.parquet", 100))
    asked: list[RunConfig] = []

    def start(run: Any, **_: Any) -> None:
        asked.append(run.config)
        (run.output / "config.yaml").write_text(config_to_yaml(run.config))
        raise RunError("the run has been planned")

    monkeypatch.setattr("raycl.training.launch.train_validated", start)
    monkeypatch.setattr("raycl.ray_runtime.prestart_ray", lambda *_, **__: None)

    def precision(output: Path, *, has_bfloat16: bool, resume: bool, **settings: Any) -> str:
        monkeypatch.setattr("raycl.cli.plan.cpu_has_bfloat16", lambda: has_bfloat16)
        settings = {"data.image_size": 32, "stages.0.batch_size": 32, **settings}
        with pytest.raises(RunError, match="planned"):
            raycl.train("simclr", data=data, output=output, settings=settings, resume=resume)
        options = ["--resume", "--data", data, *(f"--set={key}={value}" for key, value in settings.items())]
        status, _, err = run_raycl(monkeypatch, capsys, "train", "simclr", "--output", output, *options)
        assert "planned" in err and status != 0
        assert asked[-1] == asked[-2]
        return asked[-1].precision

    for began in (False, True):
        output = tmp_path / str(began)
        first = precision(output, has_bfloat16=began, resume=False)
        assert first == ("bfloat16" if began else "auto")
        assert precision(output, has_bfloat16=not began, resume=True) == first
    with pytest.raises(ConfigError, match="would change precision from 'bfloat16' to 'float32'"):
        precision(tmp_path / "True", has_bfloat16=True, resume=True, precision="float32")


def test_stages_may_be_added_but_not_removed(output: str) -> None:
    shorter = raycl.override(raycl.recipe("simclr"), {"stages.0.epochs": 3})
    with pytest.raises(ConfigError, match="the run has 2 stages, and --resume got only 1"):
        check_output(shorter, Place(output), resume=True)


def test_a_finished_run_that_a_full_disk_does_not_start_again_has_failed_and_keeps_its_encoder(
    output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(output)
    write_result(place, {"status": "finished", "steps": 5})
    (place / "encoder.json").write_text("{}")
    write = Place.write_text

    def write_unless_full(file: Place, text: str) -> None:
        if file.name == "data.json":
            raise StorageError("cannot write data.json: no space left")
        write(file, text)

    monkeypatch.setattr(Place, "write_text", write_unless_full)
    for name in ("_check_towers", "connect_cluster", "require_cpu", "prestart_controller", "_report_skipped"):
        monkeypatch.setattr(launch, name, MagicMock())
    for name in ("_check_data", "check_cluster", "_read_data", "_report_unused"):
        monkeypatch.setattr(launch, name, MagicMock())
    for name in ("GracefulShutdown", "start_coordinator", "open_bank"):
        monkeypatch.setattr(launch, name, MagicMock())
    monkeypatch.setattr(
        launch, "DataModule", lambda *_: SimpleNamespace(data_sets=[], classes=None, streamed=False)
    )
    monkeypatch.setattr(launch, "replace", lambda job, **_: job)
    monkeypatch.setattr(launch, "open_miner", lambda *_: nullcontext(SimpleNamespace()))
    with (
        pytest.raises(StorageError, match="no space left"),
        validate_run(run_of(), output=output, resume=True) as run,
    ):
        launch.train_validated(run, quiet=True)
    assert read_result(place) == {"status": "failed", "error": "cannot write data.json: no space left"}
    assert (place / "encoder.json").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_rows": 600}, r"the run began with 700 rows .*--resume got 600 \(images\)"),
        ({"streamed": False}, "were streamed and would be held in memory on this cluster"),
    ],
)
def test_rows_in_another_order_are_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    (tmp_path / "data.json").write_text(json.dumps(described()))
    with pytest.raises(ConfigError, match=says):
        check_same_data(Place(str(tmp_path)), described(**changes))


def test_classes_of_an_earlier_version_that_are_none_now_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(json.dumps(described(classes=["1.0", "2.0"])))
    with pytest.raises(ConfigError, match="began with a class '1.0', and images has none of that name now"):
        check_same_data(Place(str(tmp_path)), described(classes=None))
    for named in (["1.0", "2.0"], ["1.0", "2.0", "3.0"]):
        check_same_data(Place(str(tmp_path)), described(classes=named))
    (tmp_path / "data.json").write_text(json.dumps(described(classes=["", "cat"])))
    with pytest.raises(
        ConfigError, match="class ''.*earlier version read an empty label.*; give the same data"
    ):
        check_same_data(Place(str(tmp_path)), described(classes=["cat"]))


@pytest.mark.parametrize("changes", [{}, {"data": "a nearer bucket"}])
def test_rows_in_the_same_order_are_accepted(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "data.json").write_text(json.dumps(described()))
    check_same_data(Place(str(tmp_path)), described(**changes))


def test_damaged_data_of_an_earlier_run_are_named(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text('{"num_rows": 7')
    with pytest.raises(DataError, match=r"data\.json is damaged: "):
        check_same_data(Place(str(tmp_path)), described())


@pytest.mark.parametrize("name", ["data", "num_rows", "streamed"])
def test_data_of_an_earlier_run_without_a_value_are_named(name: str, tmp_path: Path) -> None:
    earlier = {key: value for key, value in described().items() if key != name}
    (tmp_path / "data.json").write_text(json.dumps(earlier))
    with pytest.raises(
        DataError, match=rf"data\.json is damaged: it has no {name}; restore it, or give another"
    ):
        check_same_data(Place(str(tmp_path)), described())


def test_a_stream_of_an_earlier_version_is_refused_since_its_order_was_another(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(json.dumps(described(workers=[2, 4])))
    with pytest.raises(
        ConfigError, match="began with an earlier version of raycl, which streamed .* another order"
    ):
        check_same_data(Place(str(tmp_path)), described())
    (tmp_path / "data.json").write_text(json.dumps(described(streamed=False, workers=[2, 4])))
    check_same_data(Place(str(tmp_path)), described(streamed=False))


@pytest.mark.parametrize("addresses", ["images", ["photos", "s3://bucket/drawings"]])
def test_a_run_resumes_by_default_with_its_own_settings_and_data(output: str, addresses: Any) -> None:
    (Path(output) / "data.json").write_text(json.dumps(described(data=addresses)))
    expected = [addresses] if isinstance(addresses, str) else addresses
    assert (own_settings(output), own_data(output)) == (f"{output}/config.yaml", expected)


@pytest.mark.parametrize(
    ("data", "error", "line"),
    [
        (None, ConfigError, "read a Ray Dataset; resume it in Python with dataset="),
        ([], ConfigError, "read a Ray Dataset; resume it in Python with dataset="),
        (5, DataError, "data.json is damaged: 5 is no address of data; give --data"),
        (
            "s3://bucket/x?endpoint_override=other",
            ConfigError,
            "an address with options, s3://.*; give it as --data",
        ),
    ],
)
def test_data_that_a_run_must_not_choose_are_named_by_the_user(
    output: str, data: Any, error: type[Exception], line: str
) -> None:
    (Path(output) / "data.json").write_text(json.dumps(described(data=data)))
    with pytest.raises(error, match=line):
        own_data(output)


def test_a_run_that_names_code_is_resumed_with_its_settings_if_it_is_trusted(
    output: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, made = Path(output) / "config.yaml", tmp_path / "made"
    file.write_text(
        config_to_yaml(run_of(**{"encoder.name": "os:mkdir", "encoder.kwargs": {"path": str(made)}}))
    )
    (Path(output) / "data.json").write_text(json.dumps(described()))
    monkeypatch.delenv("RAYCL_TRUSTED", raising=False)
    with pytest.raises(
        ConfigError, match="asks to import 'os' and call 'os:mkdir'; if you trust its author, set RAYCL"
    ):
        raycl.train(output=output, resume=True)
    assert not made.exists()
    monkeypatch.setenv("RAYCL_TRUSTED", "os")
    assert own_settings(output) == str(file)


def test_a_run_does_not_choose_the_endpoint_of_its_texts(output: str) -> None:
    corpus = raycl.override(
        raycl.recipe("simcse"), {"text.corpus": "s3://bucket/texts?endpoint_override=other"}
    )
    (Path(output) / "config.yaml").write_text(config_to_yaml(corpus))
    with pytest.raises(
        ConfigError, match=r"text\.corpus of .* is an address with options; give that file as the recipe"
    ):
        own_settings(output)


def test_a_dataset_resumes_with_the_settings_of_its_run(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raycl.api._check_objects", lambda *_: None)
    launched = MagicMock()
    monkeypatch.setattr(launch, "train", launched)
    raycl.train(output=output, resume=True, dataset=MagicMock())
    assert launched.call_args.args[0] == run_of()


def test_a_run_of_an_earlier_version_resumes_without_its_settings_that_do_nothing(output: str) -> None:
    own = f"{output}/config.yaml"
    saved = Path(own).read_text()
    Path(own).write_text(f"{saved}separate_towers: true\n")
    config = plan_run(own, data=[], flags={}, settings=[], resumed=output).config
    assert config == config_from_yaml(saved)
    with pytest.raises(ConfigError, match=r"separate_towers acts only with data.kind pairs"):
        plan_run(own, data=[], flags={}, settings=[])


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["simclr"], "a new run needs --data, an address of samples"),
        (["simclr", "--resume"], "there is no run in .* to resume; give --data for a new one"),
        (
            ["--resume", "--like", "lightly:simclr"],
            "there is no run in .* to resume; give --data for a new one",
        ),
        (["--resume"], "there is no run in .* to resume; give a recipe and --data for a new one"),
        (
            ["--resume", "--data", "images"],
            "there is no run in .* to resume; give a recipe and --data for a new one",
        ),
    ],
)
def test_a_new_run_needs_a_recipe_and_data(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    flags: list[str],
    line: str,
) -> None:
    status, _, errors = run_raycl(monkeypatch, capsys, "train", *flags, "--output", tmp_path / "run")
    assert (status, errors.count("\n")) == (2, 1), errors
    assert re.match(f"raycl: {line}", errors), errors
    assert not (tmp_path / "run").exists()
