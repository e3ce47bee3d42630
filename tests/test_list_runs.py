"""The runs below a folder, with their status, progress and best figure."""

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch
from typer.testing import CliRunner

import raycl
from raycl.cli.main import app
from raycl.errors import DataError, StorageError
from raycl.lease import DEAD_S, Writer, writing
from raycl.storage import Place
from tests.conftest import BUCKET
from tests.outputs import evaluation, line_of, write_run

STEPS = {"stages.0.epochs": None, "stages.0.steps": 300}


def only(folder: Path) -> Any:
    (run,) = raycl.list_runs(folder)
    return run


def test_runs_are_found_up_to_three_levels_below_and_not_in_hidden_folders_or_runs(tmp_path: Path) -> None:
    for name in ("a", "b/c", "b/d/e", "b/d/f/too_deep", ".hidden", "a/checkpoints/copy"):
        write_run(tmp_path / name)
    for name, text in (("other", "stages: [build, test]\n"), ("dated", "date: 2020-13-01\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
    assert [run.name for run in raycl.list_runs(tmp_path)] == ["a", "b/c", "b/d/e"]
    assert [run.name for run in raycl.list_runs(str(tmp_path / "b" / "d"))] == ["e", "f/too_deep"]
    run = only(tmp_path / "a")
    assert (run.name, run.run) == (".", str(tmp_path / "a"))
    with pytest.raises(DataError, match="missing is not a folder"):
        raycl.list_runs(tmp_path / "missing")


def test_a_configuration_above_the_runs_does_not_hide_them(tmp_path: Path) -> None:
    run = write_run(tmp_path / "sweep" / "run")
    for folder in (tmp_path, tmp_path / "sweep"):
        (folder / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    assert [each.name for each in raycl.list_runs(tmp_path)] == ["sweep/run"]
    (tmp_path / ".writer-1").touch()  # a run that has just started
    assert [each.name for each in raycl.list_runs(tmp_path)] == ["."]


def test_what_cannot_be_read_is_skipped_and_named_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "sweep" / "good")
    foreign, damaged = write_run(tmp_path / "foreign"), write_run(tmp_path / "sweep" / "damaged")
    (damaged / "metrics.jsonl").unlink()
    (damaged / "metrics.jsonl").mkdir()
    Path(os.fsdecode(os.fsencode(foreign) + b"/\xff")).touch()
    assert [run.name for run in raycl.list_runs(tmp_path)] == ["sweep/good"]
    line = capsys.readouterr().err
    assert (
        line.startswith("folders that cannot be read were skipped: foreign, sweep/damaged (")
        and line.count("\n") == 1
    )
    for run in (foreign, damaged):
        with pytest.raises(StorageError):
            raycl.list_runs(run)


def test_an_outage_of_the_storage_is_no_unreadable_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "sweep" / "good")
    read = Place.entries

    def fail(place: Place) -> object:
        if place.name == "sweep":
            raise StorageError("no answer") from OSError("AWS Error NETWORK_CONNECTION")
        return read(place)

    monkeypatch.setattr(Place, "entries", fail)
    with pytest.raises(StorageError, match="no answer"):
        raycl.list_runs(tmp_path)


def test_a_finished_run_has_its_progress_and_best_figure(tmp_path: Path) -> None:
    lines = [line_of(step, time=1_700_000_000 + step) for step in (10, 200)]
    evaluations = [evaluation(step, knn_top1=value) for step, value in ((0, 0.1), (100, 0.8), (200, 0.7))]
    run = only(write_run(tmp_path / "run", [*evaluations, *lines], settings={"stages.0.epochs": 4}))
    assert dataclasses.asdict(run) == {
        "name": ".",
        "run": str(tmp_path / "run"),
        "recipe": "simclr",
        "status": "finished",
        "step": 200,
        "num_steps": 200,
        "epoch": 4,
        "num_epochs": 4,
        "metric": "knn_top1",
        "best": 0.8,
        "time": 1_700_000_200,
        "num_damaged": 0,
    }


def test_a_failed_run_has_the_planned_steps_and_no_figure_that_a_rollback_undid(tmp_path: Path) -> None:
    lines = [
        evaluation(100, recall_at_10=0.5, recall_at_1=0.1),
        evaluation(150, recall_at_10=0.9, recall_at_1=0.9),
        evaluation(120, event="rollback", text="collapsed"),
        evaluation(160, recall_at_10=0.6),
        line_of(170),
    ]
    failed = {"status": "failed", "error": "collapsed"}
    run = only(write_run(tmp_path, lines, method="two_tower", settings=STEPS, result=failed))
    assert (run.recipe, run.status, run.step, run.num_steps) == ("two_tower", "failed", 170, 300)
    assert (run.num_epochs, run.metric, run.best) == (None, "recall_at_10", 0.6)


def test_a_run_of_epochs_that_has_not_finished_has_the_steps_of_its_log(tmp_path: Path) -> None:
    lines = [line_of(step, num_steps=400) for step in (110, 120)]
    run = only(write_run(tmp_path, lines, settings={"stages.0.epochs": 8}, result={"status": "running"}))
    assert (run.step, run.num_steps, run.epoch, run.num_epochs) == (120, 400, 2, 8)
    # The settings of a new start are newer than the lines.
    run = only(write_run(tmp_path, lines, settings=STEPS, result={"status": "running"}))
    assert (run.step, run.num_steps) == (120, 300)


def test_a_result_whose_metrics_are_damaged_hides_no_other_run(tmp_path: Path) -> None:
    for name, final in {"damaged": "knn_top1", "other": {"knn_top1": 0.5}}.items():
        folder = write_run(tmp_path / name, [])
        (folder / "result.json").write_text(json.dumps({"status": "finished", "final": final}))
    assert {run.name.rpartition("/")[2]: run.best for run in raycl.list_runs(tmp_path)} == {
        "damaged": None,
        "other": 0.5,
    }


def test_a_run_without_log_and_a_damaged_one_are_listed(tmp_path: Path) -> None:
    new = write_run(tmp_path / "new", [])
    (new / "metrics.jsonl").unlink()
    (new / "result.json").write_text('{"status": "runn')
    run = only(tmp_path)
    assert (run.status, run.step, run.num_steps, run.metric, run.best) == (
        "unfinished",
        None,
        None,
        None,
        None,
    )
    assert abs(time.time() - run.time) < 60


@pytest.mark.parametrize("place", [0, 1, 3])
def test_damaged_lines_are_skipped_and_counted(tmp_path: Path, place: int) -> None:
    lines_written = [line_of(10), evaluation(20, knn_top1=0.5), line_of(30)]
    log = write_run(tmp_path / "run", lines_written, result={"status": "running"}) / "metrics.jsonl"
    lines = log.read_bytes().splitlines()
    lines[place:place] = [
        b'{"step": 40, "lo',
        b"\0\0\0",
        b"[]",
        b'{"event": "rollback", "step": null}',
        b'{"step": 40, "knn_top1": 1, "text": "\xff"}',
        b'{"step": "x", "knn_top1": 1}',
        b'{"step": 40, "knn_top1": ' + b"[" * 100_000,
    ]
    log.write_bytes(b"\n".join(lines))
    run = only(tmp_path)
    assert (run.step, run.best, run.num_damaged) == (30, 0.5, 7)
    done = CliRunner().invoke(app, ["runs", str(tmp_path)])
    assert done.output.splitlines()[-1] == "damaged lines of metrics.jsonl were skipped: run (7)"


def test_a_run_is_running_while_its_lease_is_alive(tmp_path: Path) -> None:
    output = write_run(tmp_path, result={"status": "running"})
    assert only(output).status == "unfinished"
    with writing(Place(str(output))):
        assert only(output).status == "running"
    here = dataclasses.asdict(Writer.here()) | {"is_writing": True}
    claim = output / ".writer-1"
    for other, age_s, status in (
        ({"started": "0"}, 0, "unfinished"),  # a process that has ended
        ({"host": "elsewhere"}, 0, "running"),
        ({"host": "elsewhere"}, DEAD_S + 1, "unfinished"),
        ({"host": "elsewhere", "is_writing": False}, 0, "unfinished"),
    ):
        claim.write_text(json.dumps(here | other))
        os.utime(claim, (time.time() - age_s,) * 2)
        assert only(output).status == status


@pytest.mark.parametrize("status", ["finished", "stopped", "failed"])
def test_a_run_that_is_being_resumed_is_running(status: str, tmp_path: Path) -> None:
    output = write_run(tmp_path, result={"status": status})
    assert only(output).status == status
    with writing(Place(str(output))):
        assert only(output).status == "running"
    assert only(output).status == status


def test_runs_on_s3_are_listed(tmp_path: Path, s3_server: str) -> None:
    folder = f"s3://{BUCKET}/{tmp_path.name}"
    for path in write_run(tmp_path / "run").iterdir():
        (Place(folder) / "sweep" / "run" / path.name).write_text(path.read_text())
    (run,) = raycl.list_runs(folder)
    assert (run.name, run.run, run.status) == ("sweep/run", f"{folder}/sweep/run", "finished")


def test_the_command_prints_a_line_per_run_and_writes_json(tmp_path: Path) -> None:
    write_run(tmp_path / "sweep" / "first", settings={"stages.0.epochs": 4})
    write_run(tmp_path / "second", [line_of(1_000, time=1_700_000_000)], settings=STEPS, result={})
    file = tmp_path / "runs.json"
    done = CliRunner().invoke(app, ["runs", str(tmp_path), "--json", str(file)])
    assert done.exit_code == 0
    head, second, first = map(str.split, done.output.splitlines())
    assert head == ["run", "recipe", "status", "step", "epoch", "best", "when"]
    assert second[:6] == ["second", "simclr", "unfinished", "1,000/300", "20", "-"]
    assert second[6:] == ["2023-11-14", "22:13", "UTC"]
    assert first[:7] == ["sweep/first", "simclr", "finished", "200/200", "4/4", "knn_top1", "0.7000"]
    assert json.loads(file.read_text()) == [vars(run) for run in raycl.list_runs(tmp_path)]
    empty = tmp_path / "sweep" / "first" / "empty"
    empty.mkdir()
    done = CliRunner().invoke(app, ["runs", str(empty)])
    assert (done.exit_code, done.output) == (0, f"no runs found in {empty} and three levels below\n")


def test_runs_are_listed_without_torch_ray_and_the_configuration(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    code = """if True:
        import sys
        from raycl.cli.main import app
        app(["runs", "."], standalone_mode=False)
        print({"torch", "ray", "raycl.config"} & set(sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_socket_is_no_folder(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(tmp_path):
        listener.bind("listener")  # the path of a socket is short
        assert raycl.list_runs(tmp_path) == []
