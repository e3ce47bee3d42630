"""The command line: exit statuses, one-line errors, and YAML input and output."""

import importlib.util
import json
import re
import runpy
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.main import get_command

from raycl.cli.main import app, main
from raycl.cli.plan import RunPlan, command_settings, plan_run, run_flags
from raycl.cli.runs import _show_example
from raycl.config import EncoderConfig, RunConfig, active_settings, flat
from raycl.config.conditions import why_inactive
from raycl.config.overrides import config_from_yaml, config_to_yaml, override
from raycl.data.columns import ColumnNames
from raycl.display import EvaluationResult
from raycl.errors import ConfigError
from raycl.gpus import cpu_has_bfloat16
from raycl.recipes import RECIPES, recipe
from raycl.training.launch import RunResult
from tests.images import encode, photograph, write_digits
from tests.table_files import write_tar


def run_raycl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    """Return exit status, stdout and stderr of ``raycl ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["raycl", *map(str, arguments)])
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(SystemExit) as exit_:
            main()
    finally:
        for each, handler in handlers.items():  # a command that is ending ignores signals
            signal.signal(each, handler)
    output = capsys.readouterr()
    code = exit_.value.code
    return (code if isinstance(code, int) else 0), output.out, output.err


@pytest.fixture
def raycl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(
        "raycl.ray_runtime.prestart_ray", lambda *_, **__: None
    )  # the session has its own Ray
    return lambda *arguments: run_raycl(monkeypatch, capsys, *arguments)


def test_each_command_accepts_the_flag_that_unexpected_errors_refer_to() -> None:
    prepare = runpy.run_path(str(Path(__file__).parent.parent / "jobs" / "prepare.py"))["app"]
    waiting: list[Any] = [get_command(app), get_command(prepare)]
    while waiting:
        command = waiting.pop()
        inner = getattr(command, "commands", {}).values()
        waiting += inner
        assert inner or "--debug" in [flag for each in command.params for flag in each.opts], command.name


def test_an_interrupted_command_reports_it_in_one_line(raycl, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("raycl.cli.plan.plan_run", interrupt)
    status, _, err = raycl("train", "simclr", "--data", "data", "--output", "output")
    assert status == 130
    assert err == "raycl: interrupted by SIGINT; resume a run of `raycl train` with --resume\n"


def test_sigterm_interrupts_a_command_and_a_second_one_keeps_its_status() -> None:
    code = """if True:
        import atexit, time
        from raycl.cli.main import run_job

        def wait(seconds: float) -> None:
            print("waiting", flush=True)
            time.sleep(seconds)

        atexit.register(wait, 0.5)
        run_job(wait)
    """
    command = [sys.executable, "-c", code, "60"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in ("the command", "the end of the process"):
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors == "raycl: interrupted by SIGTERM; resume a run of `raycl train` with --resume\n"


def test_a_job_refuses_a_second_data_set_as_its_command_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--run", "run", "--data", "a", "--data", "b", "--output", "new"]
    monkeypatch.setattr(sys, "argv", ["jobs/embed.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(Path(__file__).parents[1] / "jobs" / "embed.py"), run_name="__main__")
    assert caught.value.code == 2
    assert "--data is given 2 times, and embed.py takes one data set" in capsys.readouterr().err


def test_recipes_are_listed_and_their_printed_yaml_can_be_loaded(raycl) -> None:
    status, out, _ = raycl("recipes")
    assert status == 0
    assert out.startswith("simclr")
    _, out, _ = raycl("recipes", "simclr", "--image-size", 32)
    assert config_from_yaml(out) == recipe("simclr", image_size=32)


@pytest.mark.parametrize("size", [32, 224])
@pytest.mark.parametrize("name", RECIPES)
def test_a_printed_recipe_trains_the_same_run_and_explains_all_active_settings(
    raycl, tmp_path: Path, name: str, size: int
) -> None:
    _, out, _ = raycl("recipes", name, "--image-size", size)
    file, expected = tmp_path / "mine.yaml", recipe(name, image_size=size)
    file.write_text(out)
    assert config_from_yaml(out) == plan_run(str(file), data=[], flags={}, settings=[]).config == expected
    printed = yaml.safe_load(out)
    assert printed == active_settings(expected)
    assert not any(why_inactive(expected, path) for path in flat(printed))
    for line in out.splitlines():
        setting, comment = line.split("  # ")
        assert re.fullmatch(r" *(- )?[a-z_]+:.*", setting)
        assert 5 < len(comment) <= 90
    assert (
        "\nseed: 0                               # Seed of weights, order and views, 0 to 2**31 - 1\n" in out
    )


def test_stages_views_and_prompts_are_written_with_comments() -> None:
    views = [{"count": 2}, {"count": 4, "size": 16, "crop_scale": [0.05, 0.25]}]
    images = override(recipe("simclr", image_size=32), {"augment.views": views, "stages.1.batch_size": 512})
    texts = override(recipe("two_tower"), {"text.query_prompt": "query: # 1\n"})
    for config in (images, texts):
        assert config_from_yaml(config_to_yaml(config, comments=True)) == config


def test_workers_are_a_number_or_a_range(digits: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    elastic = override(
        recipe("simclr", image_size=32), {"workers": 4, "min_workers": 2, "stages.0.batch_size": 24}
    )
    file.write_text(json.dumps(elastic.model_dump(mode="json")))
    ranges = {}
    for flag in (None, "3", "1:4", "2:2"):
        config = plan_run(str(file), data=[str(digits)], flags=run_flags(workers=flag), settings=[]).config
        ranges[flag] = config.worker_range(config.stages[0])
    assert ranges == {None: (2, 4), "3": (3, 3), "1:4": (1, 4), "2:2": (2, 2)}


def test_the_last_of_two_equal_settings_is_applied_after_a_section_between_them() -> None:
    settings = ["stages.0.batch_size=32", "stages=[{steps: 3, batch_size: 64}]", "stages.0.batch_size=128"]
    config = plan_run("simclr", data=[], flags={}, settings=[*settings, "data.image_size=32"]).config
    assert (config.stages[0].steps, config.stages[0].batch_size) == (3, 128)


def test_two_mappings_of_one_section_are_both_applied() -> None:
    settings = ["data={image_size: 32}", "stages.0={epochs: 3}", "stages.0={batch_size: 64}"]
    config = plan_run("simclr", data=[], flags={}, settings=settings).config
    assert (config.stages[0].epochs, config.stages[0].batch_size) == (3, 64)


@pytest.mark.parametrize(
    ("section", "paths"),
    [
        ({"data": {"image_size": 32}}, {"data.image_size": 32}),
        (
            {"data.image_size": 32, "optimizer": {"weight_decay": 0.1}},
            {"data.image_size": 32, "optimizer.weight_decay": 0.1},
        ),
        (
            {"data.image_size": 32, "encoder": {"whitening": 1.0}},
            {"data.image_size": 32, "encoder.whitening": 1.0},
        ),
        (
            {"data.image_size": 32, "encoder": {"name": "resnet18"}},
            {"data.image_size": 32, "encoder.name": "resnet18"},
        ),
    ],
)
def test_a_section_is_planned_like_its_settings(section: dict[str, Any], paths: dict[str, Any]) -> None:
    planned, expected = (plan_run("simclr", data=[], flags={}, settings=each) for each in (section, paths))
    assert planned == expected


def test_a_flag_and_a_section_without_its_setting_are_both_applied() -> None:
    flags, settings = run_flags(batch_size=64), ["stages.0={chunk_size: 32}", "data.image_size=32"]
    (stage,) = plan_run("simclr", data=[], flags=flags, settings=settings).config.stages
    assert (stage.batch_size, stage.chunk_size) == (64, 32)


def test_a_setting_may_repeat_the_value_of_a_flag_or_set_what_the_flag_leaves_open() -> None:
    flags = run_flags(gpu=True, workers=2, epochs=3)
    settings = ["gpu=true", "min_workers=1", "stages=[{epochs: 3, batch_size: 64}]"]
    config = plan_run("simclr", data=[], flags=flags, settings=settings).config
    assert (config.gpu, config.workers, config.min_workers) == (True, 2, 1)
    assert (config.stages[0].epochs, config.stages[0].batch_size) == (3, 64)


@pytest.mark.parametrize("flags", [{"steps": 100}, {"epochs": 7}, {"steps": 100, "batch_size": 64}])
def test_flags_of_one_stage_are_refused_with_settings_that_work(flags: dict[str, Any]) -> None:
    config = override(recipe("simclr", image_size=32), ["stages.0.epochs=3", "stages.1.batch_size=512"])
    with pytest.raises(ConfigError, match="has 2 stages, but .*name the stage: --set stages.0.") as caught:
        plan_run(config, data=[], flags=run_flags(**flags), settings=[])
    stage = override(config, re.findall(r"--set (\S+)", str(caught.value))).stages[0]
    assert {name: getattr(stage, name) for name in flags} == flags


@pytest.mark.parametrize("flag", ["--steps", "--data", "--json"])
def test_the_check_of_a_certificate_takes_no_flag_of_its_writing(raycl, flag: str) -> None:
    status, _, err = raycl("certify", "--check", "certificate.json", flag, 2)
    assert (status, err.count("\n")) == (2, 1)
    assert "reads a certificate and the files of its run only; remove --steps, --data and --json" in err


def test_help_lists_every_command(raycl) -> None:
    status, out, _ = raycl("--help")
    assert status == 0
    for name in ("demo", "recipes", "train", "evaluate", "embed", "bank", "doctor"):
        assert name in out


def test_the_version_is_printed(raycl) -> None:
    assert raycl("--version") == (0, f"raycl {version('raycl')}\n", "")


@pytest.mark.parametrize(
    ("command", "options", "default"),
    [
        ("train", ["--workers", "--epochs", "--batch-size", "--seed"], "(the recipe's)"),
        ("doctor", ["--workers", "--batch-size"], "(the recipe's)"),
        ("demo", ["--epochs"], "12"),
        ("mine", ["--num-negatives"], "8"),
    ],
)
def test_help_shows_the_defaults(raycl, command: str, options: list[str], default: str) -> None:
    _, out, _ = raycl(command, "--help")
    described = re.split(r" (?=--)", " ".join(out.split()))
    for option in options:
        (text,) = (each for each in described if each.startswith(f"{option} "))
        assert text.endswith(f"[default: {default}]")


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    return write_digits(tmp_path / "digits.parquet", 100)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--epochs", 1, "--steps", 1], "exclude each other"),
        (["--workers", 0], "--workers takes a positive number"),
        (["--workers", 3], "does not divide over 3 workers"),
        (["--batch-size", 1], "stages.0.batch_size"),
        (["--epochs", 0], "stages.0.epochs"),
        (["--epochs", "many"], "--epochs"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--seed", -1], "seed"),
        (["--workers", "0:2"], "--workers takes a positive number of processes, or MIN:MAX, got '0:2'"),
        (["--workers", "1:2:3"], "got '1:2:3'"),
        (["--workers", "1:1000000000"], "from 1 to 1000000000; choose a narrower MIN:MAX)"),
        (["--workers", "3:2"], "min_workers 3 is more than workers 2"),
        (["--workers", "1:3"], "batch_size 256 does not divide over 3 workers"),
        (
            ["--seed", 1, "--set", "seed=2"],
            "--seed sets seed to 1, and --set seed replaces it; give one of them",
        ),
        (
            ["--batch-size", 64, "--set", "stages=[{steps: 3}]"],
            "--batch-size sets stages.0.batch_size to 64, and",
        ),
        (
            ["--steps", 3, "--set", "stages.0.steps=4"],
            "--steps sets stages.0.steps to 3, and --set stages.0.s",
        ),
        (
            ["--workers", "1:2", "--set", "min_workers=2"],
            "--workers sets min_workers to 1, and --set min_wor",
        ),
        (["--set", "nonsense.key=0"], "unknown key nonsense.key"),
        (["--batch-size", 32, "--set", "encoder.name=no.such:thing"], "cannot find encoder.name"),
        (["--set", "data.columns.image=img"], "no column 'img'; it has image, label"),
        (["--set", "data.columns.label=class"], "no column 'class'"),
    ],
)
def test_invalid_flags_are_refused_in_one_line_with_status_2(
    raycl, digits: Path, flags: list[object], message: str
) -> None:
    status, out, err = raycl("train", "simclr", "--data", digits, "--output", digits.parent / "run", *flags)
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("raycl: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder, "holds no images"),
        (lambda folder: _written(folder / "a.parquet", b"no parquet"), "cannot read"),
    ],
)
def test_unusable_data_is_refused_in_one_line_with_status_2(
    raycl, tmp_path: Path, make, message: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    status, _, err = raycl("train", "simclr", "--data", make(folder), "--output", tmp_path / "run")
    assert (status, err.count("\n")) == (2, 1)
    assert message in err


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_an_unknown_recipe_and_a_missing_file_exit_with_status_2(raycl, digits: Path) -> None:
    status, _, err = raycl("train", "simclear", "--data", digits, "--output", digits.parent / "run")
    assert (status, "simclr" in err) == (2, True)
    status, _, err = raycl("train", "missing.yaml", "--data", digits, "--output", digits.parent / "run")
    assert (status, "cannot read" in err) == (2, True)


def test_an_unwritable_output_is_refused_before_the_run_starts(raycl, digits: Path) -> None:
    status, _, err = raycl(
        "train", "simclr", "--data", digits, "--output", digits / "below", "--batch-size", 8
    )
    assert (status, err.count("\n")) == (2, 1)
    assert "cannot write" in err


def test_a_recipe_infers_the_image_size_unless_it_is_set(digits: Path, tmp_path: Path) -> None:
    assert plan_run("simclr", data=[str(digits)], flags={}, settings=[]).config.data.image_size == 16
    set_size = plan_run("simclr", data=[str(digits)], flags={}, settings=["data.image_size=24"]).config
    assert set_size.data.image_size == 24
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(encode(photograph(), "JPEG"))
    large = plan_run("simclr", data=[str(tmp_path / "photos")], flags={}, settings=[]).config
    assert large.data.image_size == 224
    assert large.encoder.name == "resnet50"


def test_settings_of_the_optimizer_of_small_images_are_judged_by_the_size_of_the_images(digits: Path) -> None:
    def planned(size: int) -> RunConfig:
        settings = ["optimizer.betas=[0.9,0.99]", f"data.image_size={size}"]
        return plan_run("simclr", data=[str(digits)], flags={}, settings=settings).config

    assert (planned(32).optimizer.name, planned(32).optimizer.betas) == ("muon", (0.9, 0.99))
    with pytest.raises(ConfigError, match="optimizer.betas acts only with optimizer.name adamw or muon"):
        planned(224)


_WITH_WIDE_HEAD = ("simclr", "dcl", "sogclr", "supcon")


@pytest.mark.parametrize("name", [*_WITH_WIDE_HEAD, "nnclr", "moco_v2", "moco_v1", "instance_discrimination"])
def test_small_images_get_a_small_encoder_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raycl.cli.plan.cpu_has_bfloat16", lambda: False)
    notes: list[str] = []

    def planned(*settings: str, size: int = 32, gpu: bool | None = None, own: bool = False) -> RunConfig:
        pairs, flags = [f"data.image_size={size}", *settings], run_flags(gpu=gpu)
        plan = plan_run(name, data=[], flags=flags, settings=pairs, own_encoder=own)
        notes.append("; ".join(plan.notes))
        return plan.config

    on_cpu, papers = planned(), recipe(name, image_size=32)
    with_muon = name not in ("moco_v1", "instance_discrimination")
    encoder = (on_cpu.encoder.name, on_cpu.encoder.stem, on_cpu.encoder.width, on_cpu.encoder.whitening)
    assert encoder == ("resnet10", "half", 0.5, 3.0 if with_muon else None)
    assert on_cpu.augment.crop_scale == (0.2, 1.0)
    assert ((on_cpu.optimizer.name, on_cpu.optimizer.weight_decay) == ("muon", 0.03)) == with_muon
    assert (on_cpu.stages == papers.stages) != with_muon
    head = papers.projection_head
    assert on_cpu.projection_head.hidden_dim == (1_024 if name in _WITH_WIDE_HEAD else head.hidden_dim)
    if with_muon:
        rates = {"learning_rate": 0.02 if name == "moco_v2" else 0.04, "learning_rate_scaling": "square_root"}
        assert on_cpu.stages[0] == papers.stages[0].model_copy(update=rates)
    kept = {"encoder": papers.encoder, "augment": papers.augment, "projection_head": head}
    papers_optimizer = {"optimizer": papers.optimizer, "stages": papers.stages}
    assert on_cpu.model_copy(update=kept | papers_optimizer) == papers
    for path, value in {"optimizer.name": "adamw", "stages.0.learning_rate": 0.01}.items():
        expected = override(on_cpu.model_copy(update=papers_optimizer), {path: value})
        assert planned(f"{path}={value}") == expected
        notes.pop()
    assert planned("optimizer.weight_decay=0.5").optimizer.name == on_cpu.optimizer.name
    notes.pop()
    assert planned(gpu=True) == papers.model_copy(update={"gpu": True})
    assert planned("encoder.name=resnet34").encoder == EncoderConfig(name="resnet34")
    assert planned("encoder={name: resnet50}").augment == papers.augment
    assert planned("encoder.name=resnet34").augment == papers.augment
    assert planned("augment.crop_scale=[0.5,1]").augment.crop_scale == (0.5, 1.0)
    assert planned(own=True) == papers
    assert notes[0] == (
        f"without a GPU, images of 32 pixels train a small resnet10 in float32 with {on_cpu.optimizer.name}; "
        "the paper's settings are --set encoder.name=resnet18"
    )
    assert [bool(note) for note in notes] == [True, False, False, False, False, True, False]
    monkeypatch.setattr("raycl.cli.plan.cpu_has_bfloat16", lambda: True)
    assert planned() == on_cpu.model_copy(update={"precision": "bfloat16"})
    assert "resnet10 in bfloat16" in notes[-1]
    assert planned("precision=float32").precision == "float32"
    assert "resnet10 in float32" in notes[-1]
    for size in (16, 65):
        assert planned(size=size) == recipe(name, image_size=size)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_small_images_with_captions_get_a_small_encoder_without_a_gpu(name: str) -> None:
    def planned(*settings: str, size: int = 96, gpu: bool = False) -> RunConfig:
        pairs, flags = [f"data.image_size={size}", *settings], run_flags(gpu=gpu or None)
        return plan_run(name, data=[], flags=flags, settings=pairs).config

    assert {size: planned(size=size).encoder.stem for size in (24, 64, 65, 96)} == {
        24: "half",
        64: "half",
        65: "standard",
        96: "standard",
    }
    on_cpu, papers = planned(), recipe(name, image_size=96)
    assert (on_cpu.encoder.name, on_cpu.encoder.width, on_cpu.encoder.whitening) == ("resnet10", 0.5, None)
    assert (on_cpu.optimizer.name, on_cpu.optimizer.weight_decay) == ("muon", 0.1)
    assert on_cpu.stages[0] == papers.stages[0].model_copy(update={"learning_rate": 0.02})
    assert (on_cpu.augment.crop_scale, on_cpu.augment.jitter, on_cpu.augment.hue) == ((0.4, 1.0), 0.8, 0.02)
    assert (on_cpu.augment.brightness, on_cpu.augment.contrast, on_cpu.augment.saturation) == (0.3, 0.3, 0.3)
    assert (on_cpu.text_augment.deletion, on_cpu.text_encoder.kwargs) == (0.15, {"dropout": 0.2})
    assert planned("text_encoder.kwargs.dropout=0.1").encoder == on_cpu.encoder
    transformer = override(papers, {"text_encoder.name": "transformer"})
    assert planned("text_encoder.name=transformer") == transformer  # no argument that it lacks
    assert planned(gpu=True) == papers.model_copy(update={"gpu": True})
    assert planned(size=97) == recipe(name, image_size=97)


def test_the_last_layer_of_the_small_encoder_can_be_set_alone() -> None:
    def planned(*settings: str) -> RunConfig:
        return plan_run("simclr", data=[], flags={}, settings=["data.image_size=32", *settings]).config

    default = planned()
    for value in (None, 1.0):
        found = planned(f"encoder.whitening={'null' if value is None else value}")
        assert found == override(default, {"encoder.whitening": value})
    assert planned("encoder.name=resnet18", "encoder.whitening=1").optimizer.name == "sgd"
    settings = ["data.image_size=224", "encoder.whitening=1"]
    assert plan_run("simclr", data=[], flags=run_flags(gpu=True), settings=settings).notes == ()


def test_a_network_in_place_of_a_vit_resumes_the_runs_of_earlier_versions() -> None:
    settings = {"data.image_size": 32, "encoder.freeze_patches": False}
    planned = plan_run("moco_v3", data=[], flags={}, settings=settings, own_encoder=True).config
    assert planned == override(recipe("moco_v3", image_size=32), settings)


def test_pairs_have_the_learning_rate_of_sentences_unless_the_encoder_is_a_bag_of_subwords() -> None:
    def planned(*settings: str, name: str = "two_tower", own: bool = False) -> tuple[float, tuple[str, ...]]:
        plan = plan_run(name, data=[], flags={}, settings=settings, own_encoder=own)
        return plan.config.stages[0].learning_rate, plan.notes

    note = (
        "the learning rate is 0.0003, since 0.02 is meant for a bag of subwords; "
        "set stages.0.learning_rate for another one, about 2e-5 for a pretrained model"
    )
    for kept in ("encoder.kwargs.dim=64", "encoder.name=bag_of_subwords", "text.max_length=16"):
        assert planned(kept) == (0.02, ())
    assert planned("encoder.name=transformer") == planned(own=True) == (3e-4, (note,))
    assert planned("encoder.name=transformer", "stages.0.learning_rate=2e-5") == (2e-5, ())
    peers = recipe("st:mnrl").stages[0].learning_rate
    assert planned("encoder.name=bag_of_subwords", name="st:mnrl") == (peers, ())


@pytest.mark.parametrize(
    "setting",
    [
        "encoder={stem: small}",
        "encoder.width=0.5",
        "encoder.kwargs={dim: 8}",
        "encoder.kwargs.dim=8",
    ],
)
def test_settings_of_the_network_that_a_module_replaces_are_refused(setting: str) -> None:
    for run in ("simclr", recipe("simclr")):
        with pytest.raises(
            ConfigError, match=r"^encoder\.\S+ acts only with .*, and encoder= is another; remove it$"
        ):
            plan_run(run, data=[], flags={}, settings=[setting], own_encoder=True)


@pytest.mark.parametrize("value", [{"name": "transformer"}, EncoderConfig(name="transformer")])
def test_the_name_of_an_encoder_beside_a_module_gives_its_tokenizer_and_layer_decay(value: Any) -> None:
    settings = {"encoder": value, "optimizer.layer_decay": 0.7}
    planned = plan_run("two_tower", data=[], flags={}, settings=settings, own_encoder=True).config
    assert (planned.encoder.name, planned.optimizer.layer_decay) == ("transformer", 0.7)


@pytest.mark.parametrize("name", ["simcse", "esimcse"])
def test_sentences_get_a_bag_of_subwords_without_a_gpu_unless_an_encoder_is_set(name: str) -> None:
    def planned(*settings: str, gpu: bool | None = None, own: bool = False) -> RunPlan:
        return plan_run(name, data=[], flags=run_flags(gpu=gpu), settings=settings, own_encoder=own)

    plan, papers = planned(), recipe(name)
    assert plan.config.encoder == recipe("two_tower").encoder
    assert plan.notes == (
        "without a GPU, sentences train a bag_of_subwords; the paper's settings are --set encoder.name=transformer",
    )
    kept = {"encoder": papers.encoder, "projection_head": papers.projection_head, "stages": papers.stages}
    assert plan.config.model_copy(update=kept) == papers
    words = {"epochs": 10, "learning_rate": 0.02, "temperature": 0.03}
    assert plan.config.stages == (papers.stages[0].model_copy(update=words),)
    assert planned("stages.0.learning_rate=0.01").config.stages[0].learning_rate == 0.01
    assert planned("encoder.name=transformer") == RunPlan(papers)
    setting = {"encoder.kwargs.sublinear_tf": True}
    assert planned("encoder.kwargs.sublinear_tf=true") == RunPlan(
        override(plan.config, setting), notes=plan.notes
    )
    assert planned("encoder={name: transformer, kwargs: {num_layers: 2}}") == RunPlan(
        override(papers, {"encoder.kwargs.num_layers": 2})
    )
    assert planned(own=True) == RunPlan(papers)
    assert planned(gpu=True) == RunPlan(papers.model_copy(update={"gpu": True}))
    with pytest.raises(ConfigError, match="activation_checkpoint_every acts only"):
        planned("stages.0.activation_checkpoint_every=1")


@pytest.mark.parametrize("setting", ["text.corpus=more.parquet", "text.tokenizer_train_size=1000"])
def test_settings_of_the_bag_of_subwords_are_judged_by_the_encoder_of_the_run(setting: str) -> None:
    def planned(*settings: str, gpu: bool | None = None) -> RunPlan:
        given = ["text.tokenizer=mine.json", setting, *settings]
        return plan_run("simcse", data=[], flags=run_flags(gpu=gpu), settings=given)

    plan = planned()
    assert (plan.config.encoder.name, len(plan.notes)) == ("bag_of_subwords", 1)
    path, _, value = setting.partition("=")
    assert str(flat(plan.config.model_dump())[path]) == value
    refusal = f"{path} acts only with a tokenizer that the run trains, or a text encoder that starts"
    with pytest.raises(ConfigError, match=refusal):
        planned(gpu=True)
    with pytest.raises(ConfigError, match=refusal):
        planned("encoder.name=transformer")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx512f avx512_bf16 amx_tile", True),
        ("fpu amx_bf16", True),
        ("fpu avx512f", False),
        (None, False),
    ],
)
def test_the_flags_of_the_cpu_say_if_it_has_bfloat16(
    flags: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    if flags is not None:
        info.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr("raycl.gpus.Path", lambda _: info)
    assert cpu_has_bfloat16() == expected


@pytest.mark.parametrize("name", ["simclr", "moco_v2", "instance_discrimination", "moco_v3"])
def test_small_gray_images_get_views_without_flips(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    colored = rng.integers(0, 256, (28, 28, 3), dtype=np.uint8)
    gray = colored[..., 0]
    folders: dict[str, list[np.ndarray]] = {
        "gray": [gray, gray],
        "gray-as-rgb": [np.stack([gray] * 3, axis=2)] * 2,
        "colored": [colored, colored],
        "mixed": [gray, colored],
        "large": [np.kron(gray, np.ones((10, 10), np.uint8))] * 2,
    }
    for folder, images in folders.items():
        (tmp_path / folder).mkdir()
        for number, pixels in enumerate(images):
            (tmp_path / folder / f"{number}.png").write_bytes(encode(pixels))

    def planned(folder: str, *settings: str) -> RunPlan:
        data = [str(tmp_path / folder)]
        return plan_run(name, data=data, flags=run_flags(gpu=True), settings=settings)

    papers = recipe(name, image_size=28).model_copy(update={"gpu": True})
    views = {"flip": 0.0, "rotation": 15.0, "crop_scale": (0.4, 1.0)}
    expected = papers.model_copy(update={"augment": papers.augment.model_copy(update=views)})
    for folder in ("gray", "gray-as-rgb"):
        assert planned(folder).config == expected
    assert planned("gray").notes == (
        "gray images of 28 pixels train on views that are rotated and not flipped; "
        "the paper's are --set augment.rotation=0.0 --set augment.flip=0.5",
    )
    assert planned("gray", "data.image_size=28").config == expected
    flipped = planned("gray", "augment.flip=0.5")
    assert (flipped.config.augment.flip, flipped.notes) == (0.5, ())
    one_channel = planned("colored", "data.channels=1").config.augment
    assert {each: getattr(one_channel, each) for each in views} == views
    for folder in ("colored", "mixed"):
        assert (planned(folder).config, planned(folder).notes) == (papers, ())
    large = recipe(name, image_size=224)
    assert planned("large").config.augment == large.augment
    assert planned("large", "data.image_size=28").config == expected


@pytest.mark.parametrize("ending", ["png", "parquet", "tar"])
def test_images_from_all_over_the_data_decide_on_size_and_colors(ending: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    gray = [encode(rng.integers(0, 256, (32, 32), dtype=np.uint8)) for _ in range(20)]
    colored = [encode(rng.integers(0, 256, (48, 48, 3), dtype=np.uint8)) for _ in range(60)]
    for name, images in {"a": gray, "b": colored[:20], "c": colored[20:40], "d": colored[40:]}.items():
        if ending == "parquet":
            pq.write_table(pa.table({"image": images}), tmp_path / f"{name}.parquet")
        elif ending == "tar":
            write_tar(tmp_path / f"{name}.tar", [{"png": each} for each in images])
        else:
            (tmp_path / name).mkdir()
            for number, each in enumerate(images):
                (tmp_path / name / f"{number}.png").write_bytes(each)
    plan = plan_run("simclr", data=[str(tmp_path)], flags=run_flags(gpu=True), settings=[])
    assert plan.config == recipe("simclr", image_size=48).model_copy(update={"gpu": True})
    assert plan.notes == ()


def test_gray_captioned_images_keep_their_views() -> None:
    config = plan_run("clip", data=[], flags={}, settings=["data.image_size=28", "data.channels=1"]).config
    colored = recipe("clip", image_size=28, on_cpu=True).augment
    assert (config.augment.flip, config.augment.crop_scale) == (colored.flip, colored.crop_scale)


def test_flags_and_settings_override_a_file(digits: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps(recipe("simclr", image_size=32).model_dump(mode="json")))
    flags = {"stages.0.epochs": None, "stages.0.steps": 5, "seed": 3}
    config = plan_run(str(file), data=[str(digits)], flags=flags, settings=["precision=bfloat16"]).config
    assert (config.stages[0].steps, config.stages[0].epochs, config.seed) == (5, None, 3)
    assert config.precision == "bfloat16"


def test_help_lists_every_bank_command(raycl) -> None:
    for arguments in (["bank"], ["bank", "--help"]):
        status, out, err = raycl(*arguments)
        assert (status, err) == (0, "")
        for name in ("list", "stats", "nearest", "get", "export"):
            assert f"\n  {name} " in out


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (["stats"], "name"),
        (["nearest", "keys"], "one of --id, --image, --text and --vector"),
        (["nearest", "keys", "--id", "many"], "--id"),
        (["get", "keys"], "--id"),
        (["get", "keys", "--id", 2**63], "--id"),
        (["export", "keys"], "--output"),
        (["stats", "keys", "--gpu"], "--gpu"),
        (["stats", "keys", "--address", "nonsense"], "HOST:PORT"),
        (["get", "keys", "--id", 1, "--address", "nonsense"], "HOST:PORT"),
        (["nearest", "keys", "--id", 1, "--address", "nonsense"], "HOST:PORT"),
        (["export", "keys", "--output", "new", "--address", "nonsense"], "HOST:PORT"),
        (["guess", "keys"], "guess"),
    ],
)
def test_an_invalid_bank_query_is_refused_in_one_line_with_status_2(
    raycl, question: list[object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests of the session are connected to Ray; a command line is not.
    monkeypatch.setattr("raycl.ray_runtime.ray.is_initialized", lambda: False)
    status, out, err = raycl("bank", *question)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_examples_are_printed_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[b]how[/] to close [/INST] :smile: \\"
    _show_example({"query": text, "nearest": [{"similarity": 0.5, "matches": True, "document": text}]})
    assert capsys.readouterr().err.count(text) == 2


def test_the_result_is_written_before_the_examples_are_printed(
    raycl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A real run takes minutes; here only the order of result and table matters.
    found = {"measure": "retrieval", "map": 0.5, "examples": [{"no": "query"}]}
    monkeypatch.setattr("raycl.api.evaluate", lambda *_, **__: found)
    file = tmp_path / "found.json"
    _, out, _ = raycl("evaluate", "retrieval", "--run", "run", "--test", "test", "--json", file)
    assert json.loads(out) == json.loads(file.read_text()) == {"measure": "retrieval", "map": 0.5}


def test_a_run_is_given_by_its_place_or_by_its_name(raycl, tmp_path: Path) -> None:
    for command in (
        ["evaluate", "knn", "--test", "x"],
        ["embed", "--data", "x", "--output", tmp_path / "out"],
        ["mine", "--data", "x", "--output", tmp_path / "out.parquet"],
        ["export", "--output", tmp_path / "out", "--to", "onnx"],
    ):
        (status, out, err), named = (raycl(*command, *each, tmp_path) for each in ([], ["--run"]))
        assert (status, out, err) == named
        assert (status, err.count("\n"), "twice" in err) == (2, 1, False)
        assert raycl(*command)[2] == "raycl: a run is missing; give the --output of one: --run RUN\n"
        twice = raycl(*command, "a", "--run", "b")
        assert twice == (2, "", "raycl: the run is given twice, a and --run b; give one of them\n")


def test_an_evaluation_is_a_table_on_a_terminal_and_json_elsewhere(
    raycl, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = EvaluationResult({"measure": "knn", "top1": 0.5, "baseline": {"pixels": 0.25}})
    monkeypatch.setattr("raycl.api.evaluate", lambda *_, **__: found)
    command = ("evaluate", "knn", "--run", "run", "--test", "test")
    assert json.loads(raycl(*command)[1]) == found
    monkeypatch.setattr(sys.stdout.__class__, "isatty", lambda _: True)
    assert raycl(*command)[1] == f"{found}\n"


@pytest.mark.parametrize(
    ("measure", "key"),
    [
        ("retrieval", "data.max_invalid_fraction=0.1"),
        ("sts", "data.max_invalid_fraction=0.1"),
        ("sts", "data.columns.text=body"),
        ("knn", "queries=set"),
        ("retrieval", "k=5"),
        ("knn", "data.columns.nonsense=body"),
    ],
)
def test_settings_without_effect_on_a_measure_are_refused(raycl, measure: str, key: str) -> None:
    status, out, err = raycl("evaluate", measure, "--run", "run", "--train", "a", "--test", "b", "--set", key)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"unknown key {key.partition('=')[0]}" in err
    assert "(allowed: " in err


@pytest.mark.parametrize("command", ["evaluate knn --run run --train a --test b", "doctor", "explore run"])
def test_a_misspelled_column_is_refused_with_the_right_name(raycl, command: str) -> None:
    status, _, err = raycl(*command.split(), "--set", "data.columns.lable=class")
    assert (status, "unknown key data.columns.lable; did you mean data.columns.label?" in err) == (2, True)


def test_settings_of_measures_are_read() -> None:
    named = ["data.columns.query=q", "data.columns.document=d"]
    columns = ColumnNames(image=None, query="q", document="d")
    bad = "data.max_invalid_fraction=0.1"
    assert command_settings("retrieval", [*named, "queries=set", "examples=3", "baseline=false"]) == {
        "queries": "set",
        "examples": 3,
        "baseline": False,
        "columns": columns,
    }
    assert command_settings("sts", ["text=body", "baseline=false"]) == {"text": "body", "baseline": False}
    assert command_settings("embed", [*named, bad]) == {"columns": columns, "max_invalid_fraction": 0.1}
    assert command_settings("knn", ["k=5", "data.columns.label=class", bad]) == {
        "k": 5,
        "max_invalid_fraction": 0.1,
        "columns": ColumnNames(label="class"),
    }


@pytest.mark.parametrize("command", [["mine", "--run", "a", "--data", "b", "--output", "c"], ["doctor"]])
def test_commands_without_row_validation_reject_the_invalid_fraction_flag(raycl, command: list[str]) -> None:
    status, out, err = raycl(*command, "--set", "data.max_invalid_fraction=0.1")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "unknown key data.max_invalid_fraction (allowed: data.columns." in err


def test_python_m_raycl_runs_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "raycl", "recipes"], check=True, capture_output=True, text=True
    )
    assert "moco_v2" in done.stdout
    wrong = subprocess.run([sys.executable, "-m", "raycl", "trian"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "raycl" in wrong.stderr
    assert "__main__" not in wrong.stderr


def test_a_command_that_imports_triton_ends_with_its_own_line() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    code = """
from raycl.cli.main import run_job
from raycl.errors import ConfigError

def job(*, number: int = 0) -> None:
    import triton._C.libtriton
    raise ConfigError("the line")

run_job(job)
"""
    done = subprocess.run([sys.executable, "-c", code, "--number", "1"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "raycl: the line\n")


def test_the_summary_of_a_run_shows_whole_numbers_as_such(
    raycl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = RunResult(
        output="run",
        steps=3,
        epochs=1,
        seconds=2.0,
        samples_per_second=9.0,
        views_per_second=18.0,
        final={"knn_top1": 0.5, "collapsed_at_step": 1200},
        invalid_rows={},
        skipped={},
    )
    monkeypatch.setattr("raycl.training.launch.train_validated", lambda *_, **__: result)
    data = str(write_digits(tmp_path / "digits.parquet", 40))
    flags = ["--data", data, "--output", str(tmp_path / "run"), "--batch-size", "8"]
    status, out, _ = raycl("train", "simclr", *flags)
    assert (status, out.splitlines()[0]) == (
        0,
        "3 steps in 2 s (9 samples/s), knn_top1 0.5000, collapsed_at_step 1,200; the encoder is in run",
    )
