"""Trackers read back with their own tools, and metrics when a tracker is slow or unreachable."""

import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

import raycl
from raycl.config import RunConfig, active_settings, flat
from raycl.config.overrides import config_to_yaml
from raycl.config.schema import TrackingConfig
from raycl.errors import ConfigError
from raycl.storage import Place
from raycl.tracking import tensorboard, trackers
from raycl.tracking.base import MetricsRecord
from raycl.tracking.mlflow import MlflowRun
from raycl.tracking.tensorboard import EventFiles
from raycl.tracking.trackers import MAX_WAITING, BackgroundTracker, Trackers, check_trackers, open_trackers
from raycl.training.preflight import check_output
from tests.conftest import BUCKET


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for trackers, whose imports are slow on a busy machine."""
    monkeypatch.setattr(trackers, "CLOSE_TIMEOUT_S", 200.0)


def run_of(**tracking: Any) -> RunConfig:
    named = {f"tracking.{name}": value for name, value in tracking.items()}
    return raycl.override(raycl.recipe("simclr"), named)


def point(step: int, **metrics: float) -> MetricsRecord:
    return MetricsRecord(step=step, time=1.7e9 + step, metrics=metrics)


def opened_in_tensorboard(folder: Path) -> EventAccumulator:
    shown = EventAccumulator(str(folder))
    shown.Reload()
    return shown


def seen_in_tensorboard(folder: Path, name: str = "loss") -> list[tuple[int, float]]:
    """Return (step, value) pairs as displayed by TensorBoard."""
    shown = opened_in_tensorboard(folder)
    if name not in shown.Tags()["scalars"]:
        return []
    return [(event.step, round(event.value, 4)) for event in shown.Scalars(name)]


def download(place: Place, folder: Path) -> Path:
    for name, _ in place.files():
        (folder / name).write_bytes((place / name).read_bytes())
    return folder


def tracked(
    config: RunConfig, output: Path, steps: Sequence[int], *, finished: bool, resume_step: int = 0
) -> None:
    """Write the lines of a run with these steps."""
    opened = open_trackers(config, Place(str(output)), resume_step=resume_step)
    for step in steps:
        others = {"time": 1.7e9, "failed_at": 1_700_000_000, "num_steps": 9, "epoch": 0}
        others |= {"text": "a notice", "gap": float("nan")}
        opened.write(step, {"step": step, "loss": 1 / step, **others})
    opened.close(finished=finished)
    assert opened.messages() == []
    assert opened.num_failures == 0


# TensorBoard


def test_tensorboard_shows_every_number_at_its_step_and_time(tmp_path: Path) -> None:
    files = EventFiles(Place(str(tmp_path / "board")))
    files.write([point(10, loss=0.5, knn_top1=0.25), point(20, loss=0.125)])
    files.close(finished=True)
    assert seen_in_tensorboard(tmp_path / "board", "knn_top1") == [(10, 0.25)]
    events = opened_in_tensorboard(tmp_path / "board").Scalars("loss")
    assert [(event.step, event.value, event.wall_time) for event in events] == [
        (10, 0.5, 1.7e9 + 10),
        (20, 0.125, 1.7e9 + 20),
    ]


def test_trackers_receive_only_numbers(tmp_path: Path) -> None:
    tracked(run_of(tensorboard=True), tmp_path, [1, 2], finished=True)
    assert set(opened_in_tensorboard(tmp_path / "tensorboard").Tags()["scalars"]) == {"loss", "epoch"}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5), st.booleans()), min_size=1, max_size=5))
def test_tensorboard_shows_only_the_last_value_of_each_step(
    tmp_path_factory: pytest.TempPathFactory, lives: list[tuple[int, int, bool]]
) -> None:
    """A run may crash or roll back at any step and resume from any earlier checkpoint."""
    folder = tmp_path_factory.mktemp("board")
    expected: dict[int, float] = {}
    files = EventFiles(Place(str(folder)))
    for number, (checkpoint, num_steps, rolls_back) in enumerate(lives):
        start = min(checkpoint, max(expected, default=0))
        if number and rolls_back:
            files.write([MetricsRecord(step=start, time=0.0, metrics={}, is_rollback=True)])
        elif number:
            files.flush()  # the run is killed, so its file stays open
            files = EventFiles(Place(str(folder)), resume_step=start)
        expected = {step: value for step, value in expected.items() if step <= start}
        made = {step: float(number) for step in range(start + 1, start + num_steps + 1)}
        files.write([point(step, loss=value) for step, value in made.items()])
        expected |= made
    files.close(finished=True)
    assert seen_in_tensorboard(folder) == sorted(expected.items())


def test_a_file_truncated_within_a_record_loses_only_that_record(tmp_path: Path) -> None:
    files = EventFiles(Place(str(tmp_path)))
    files.write([point(step, loss=step) for step in (1, 2, 3)])
    files.flush()
    [first] = tmp_path.iterdir()
    first.write_bytes(first.read_bytes()[:-7])
    again = EventFiles(Place(str(tmp_path)), resume_step=3)
    again.write([point(4, loss=4)])
    again.close(finished=True)
    assert [step for step, _ in seen_in_tensorboard(tmp_path)] == [1, 2, 4]


def test_event_files_on_s3_are_split_and_continue_after_a_restart(
    s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "MAX_BYTES", 100)
    place = Place(f"s3://{BUCKET}/tracking/board")
    files = EventFiles(place)
    for step in range(1, 31):
        files.write([point(step, loss=step)])
        files.flush()
    num_pieces = len(place.files())
    assert num_pieces > 10  # ordered by number, not alphabetically
    again = EventFiles(place, resume_step=25)
    again.write([point(26, loss=-26)])
    again.close(finished=True)
    assert len(place.files()) == num_pieces + 1
    expected = [(step, float(step)) for step in range(1, 26)] + [(26, -26.0)]
    assert seen_in_tensorboard(download(place, tmp_path)) == expected


# Trackers that are slow or unreachable


class FakeTracker:
    """A tracker that stores steps; tests may replace its methods."""

    def __init__(self, **methods: Callable[..., None]) -> None:
        self.steps: list[int] = []
        for name, method in methods.items():
            setattr(self, name, method)

    def write(self, records: Sequence[MetricsRecord]) -> None:
        self.steps += [record.step for record in records]

    def flush(self) -> None: ...

    def close(self, *, finished: bool) -> None: ...


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def test_training_does_not_wait_for_a_hanging_tracker() -> None:
    may_answer, blocked = threading.Event(), FakeTracker()
    store = blocked.write
    blocked.write = lambda records: (may_answer.wait(), store(records))[1]
    outbox = BackgroundTracker("tracking.mlflow", lambda: blocked, interval_s=0.01)
    opened = Trackers([outbox])
    for step in range(1, 101):
        opened.write(step, {"loss": 1.0})
    started = time.monotonic()
    outbox.begin_closing(finished=True)
    outbox.wait(0.1)
    assert time.monotonic() - started < 5
    assert opened.messages() == [
        "tracking.mlflow did not store the metrics of 100 logged steps; metrics.jsonl has them"
    ]
    may_answer.set()
    wait_for(lambda: blocked.steps == list(range(1, 101)))


@pytest.mark.parametrize("fails", [False, True], ids=["hangs", "fails"])
def test_records_that_were_not_flushed_at_the_end_are_reported(fails: bool) -> None:
    may_answer = threading.Event()

    def flush() -> None:
        if fails:
            raise OSError("slow down")
        may_answer.wait()

    outbox = BackgroundTracker("tracking.tensorboard", lambda: FakeTracker(flush=flush), interval_s=60)
    opened = Trackers([outbox])
    opened.write(1, {"loss": 1.0})
    outbox.begin_closing(finished=True)
    outbox.wait(2.0 if fails else 0.2)
    may_answer.set()
    missing = "tracking.tensorboard did not store the metrics of 1 logged steps; metrics.jsonl has them"
    assert opened.messages() == [*["tracking.tensorboard failed: slow down"] * fails, missing]


def test_a_tracker_that_fails_to_open_gets_all_records_later_and_one_failure_report(tmp_path: Path) -> None:
    in_the_way = tmp_path / "board"
    in_the_way.write_text("a file where the folder should be")
    outbox = BackgroundTracker(
        "tracking.tensorboard", lambda: EventFiles(Place(str(in_the_way))), interval_s=0.01
    )
    opened = Trackers([outbox])
    opened.write(1, {"loss": 1.0})
    wait_for(lambda: outbox.num_failures >= 3)
    opened.write(2, {"loss": 0.5})
    [message] = opened.messages()
    assert message.startswith("tracking.tensorboard failed: ")
    assert str(in_the_way) in message
    in_the_way.unlink()
    opened.close(finished=True)
    assert opened.messages() == []
    assert seen_in_tensorboard(in_the_way) == [(1, 1.0), (2, 0.5)]


def test_refused_records_are_retried_before_later_ones() -> None:
    tracker = FakeTracker()
    store, later = tracker.write, iter([2, 3])

    def refuse_twice(records: Sequence[MetricsRecord]) -> None:
        if (step := next(later, None)) is not None:
            outbox.put(point(step))
            raise OSError("too many requests")
        store(records)

    tracker.write = refuse_twice
    outbox = BackgroundTracker("tracking.mlflow", lambda: tracker, interval_s=0.01)
    outbox.put(point(1))
    wait_for(lambda: len(tracker.steps) == 3)
    assert tracker.steps == [1, 2, 3]
    assert outbox.messages() == [
        "tracking.mlflow failed: too many requests; training continues, and raycl retries"
    ]


def test_records_are_not_written_twice_after_a_failed_flush(s3_server: str, tmp_path: Path) -> None:
    place = Place(f"s3://{BUCKET}/tracking/flush")
    files = EventFiles(place)
    tracker, failures = (
        FakeTracker(write=files.write, close=files.close),
        iter([OSError("the network is away")]),
    )

    def flush() -> None:
        if error := next(failures, None):
            raise error
        files.flush()

    tracker.flush = flush
    outbox = BackgroundTracker("tracking.tensorboard", lambda: tracker, interval_s=0.01)
    opened = Trackers([outbox])
    opened.write(1, {"loss": 1.0})
    wait_for(lambda: outbox.num_failures == 1)
    opened.write(2, {"loss": 0.5})
    opened.close(finished=True)
    assert seen_in_tensorboard(download(place, tmp_path)) == [(1, 1.0), (2, 0.5)]
    [message] = opened.messages()
    assert "the network is away" in message  # the only message, without a report of missing records


def test_pending_records_are_limited_and_the_oldest_are_dropped_first() -> None:
    tracker, is_reachable = FakeTracker(), threading.Event()

    def open_tracker() -> FakeTracker:
        if not is_reachable.is_set():
            raise OSError("away")
        return tracker

    outbox = BackgroundTracker("tracking.mlflow", open_tracker, interval_s=3600)
    for step in range(MAX_WAITING + 5):
        outbox.put(point(step))
    is_reachable.set()
    outbox.begin_closing(finished=True)
    outbox.wait(20)
    assert tracker.steps == list(range(5, MAX_WAITING + 5))
    assert "metrics of 5 logged steps" in outbox.messages()[0]


# MLflow


@pytest.fixture
def mlflow_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return f"file:{tmp_path}/mlflow"


def logged_in(address: str, output: Path) -> tuple[Any, list[tuple[int, float]]]:
    """Return the only run in raycl's experiment and its losses."""
    client = MlflowClient(tracking_uri=address)
    experiment = client.get_experiment_by_name("raycl")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert run.data.tags["output"] == str(output)
    losses = client.get_metric_history(run.info.run_id, "loss")
    return run, sorted((metric.step, metric.value) for metric in losses)


def test_mlflow_has_settings_and_metrics_and_a_resumed_run_continues_its_run(
    mlflow_folder: str, tmp_path: Path
) -> None:
    output = tmp_path / "runs" / "first"
    config = raycl.override(
        run_of(mlflow=mlflow_folder), {"stages.1.batch_size": 512, "stages.2.batch_size": 1_024}
    )
    tracked(config, output, [1, 2, 3], finished=False)
    run, _ = logged_in(mlflow_folder, output)
    assert run.info.status == "FAILED"
    again = MlflowRun(config, Place(str(output)))
    assert logged_in(mlflow_folder, output)[0].info.status == "RUNNING"
    again.close(finished=False)
    tracked(config, output, [3, 4], finished=True, resume_step=2)
    run, losses = logged_in(mlflow_folder, output)
    assert set(losses) == {(step, 1 / step) for step in (1, 2, 3, 4)}
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params["recipe"] == "simclr"
    assert run.data.params["stages.1.batch_size"] == "512"
    assert run.data.params["max_failures"] == str(config.max_failures)
    assert len(run.data.params) > 100  # more than fits into one request
    tracked(config, output, [5], finished=False, resume_step=4)
    assert logged_in(mlflow_folder, output)[0].info.status == "FAILED"


def test_a_server_that_refuses_the_settings_gets_one_run_and_its_settings_later(
    mlflow_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, num_refused = MlflowClient.log_batch, 0

    def refuse_settings(self: MlflowClient, run: str, params: Any = (), **others: Any) -> None:
        nonlocal num_refused
        if params and num_refused < 3:
            num_refused += 1
            raise OSError("try later")
        write(self, run, params=params, **others)

    monkeypatch.setattr(MlflowClient, "log_batch", refuse_settings)
    config, output = run_of(mlflow=mlflow_folder), Place(str(tmp_path / "run"))
    outbox = BackgroundTracker("tracking.mlflow", lambda: MlflowRun(config, output), interval_s=0.01)
    outbox.put(point(1, loss=0.5))
    wait_for(lambda: outbox.num_failures == 3)
    outbox.begin_closing(finished=True)
    outbox.wait(200)
    run, losses = logged_in(mlflow_folder, tmp_path / "run")  # the only one
    assert losses == [(1, 0.5)]
    assert run.data.params["recipe"] == "simclr"


def test_settings_that_mlflow_lacks_are_added(
    mlflow_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, output = run_of(mlflow=mlflow_folder), Place(str(tmp_path / "run"))
    write = MlflowClient.log_batch

    def refuse_second(self: MlflowClient, run: str, params: Any = (), **others: Any) -> None:
        if "recipe" not in {each.key for each in params}:
            raise OSError("try later")
        write(self, run, params=params, **others)

    monkeypatch.setattr("raycl.tracking.mlflow._MAX_PARAMS", 50)
    with monkeypatch.context() as refusing:
        refusing.setattr(MlflowClient, "log_batch", refuse_second)
        with pytest.raises(OSError, match="try later"):
            MlflowRun(config, output)
    longer = raycl.override(config, {"stages.1.batch_size": 512, "workers": 4})
    MlflowRun(longer, output).close(finished=True)
    params = logged_in(mlflow_folder, tmp_path / "run")[0].data.params
    assert params.keys() == flat(active_settings(longer)).keys()
    assert params["stages.1.batch_size"] == "512"
    assert params["workers"] == str(config.workers)  # MLflow never changes one


def test_an_unreachable_server_is_reported_soon(tmp_path: Path) -> None:
    with socket.socket() as closed_again:
        closed_again.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed_again.getsockname()[1]}"
    output = Place(str(tmp_path))
    outbox = BackgroundTracker(
        "tracking.mlflow", lambda: MlflowRun(run_of(mlflow=address), output), interval_s=0.01
    )
    wait_for(lambda: outbox.num_failures > 0)
    assert outbox.messages()[0].startswith("tracking.mlflow failed: ")
    outbox.begin_closing(finished=True)


def test_a_different_server_gets_a_new_run(mlflow_folder: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    tracked(run_of(mlflow=mlflow_folder), output, [1], finished=False)
    other = f"{mlflow_folder}-other"
    tracked(run_of(mlflow=other), output, [2], finished=True)
    assert logged_in(mlflow_folder, output)[1] == [(1, 1.0)]
    assert logged_in(other, output)[1] == [(2, 0.5)]


# Weights & Biases


def records_in(path: Path) -> Iterator[Any]:
    """Yield the records of an offline W&B run: blocks of 32 KiB, as in LevelDB's log."""
    content, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        if at + 7 + size > len(content):
            return  # W&B is still writing
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a full record, or its last part
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def test_wandb_has_metrics_over_steps_and_a_resumed_run_continues_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "200")  # W&B's process starts slowly on a busy machine
    output = tmp_path / "first"
    output.mkdir()
    config = run_of(wandb="team/digits")
    tracked(config, output, [1, 2, 3], finished=False)
    time.sleep(1.1)  # W&B names its folder by the time in seconds
    tracked(config, output, [3, 4], finished=True, resume_step=2)

    def read_parts() -> list[list[Any]]:
        return [list(records_in(path)) for path in sorted(output.glob("wandb/offline-run-*/*.wandb"))]

    def kinds() -> list[str]:
        return [record.WhichOneof("record_type") for part in read_parts() for record in part]

    wait_for(lambda: kinds().count("history") == 5)  # W&B's process still writes after `finish`
    parts = read_parts()
    runs = [record.run for part in parts for record in part if record.WhichOneof("record_type") == "run"]
    assert {(run.entity, run.project, run.display_name) for run in runs} == {("team", "digits", "first")}
    assert len(parts) == 2
    assert len({run.run_id for run in runs}) == 1
    settings_sent = {update.key: json.loads(update.value_json) for update in runs[0].config.update}
    assert settings_sent["seed"] == config.seed
    lines = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for part in parts
        for record in part
        if record.WhichOneof("record_type") == "history"
    ]
    assert [(line["step"], line["loss"]) for line in lines] == [
        (step, pytest.approx(1 / step)) for step in (1, 2, 3, 3, 4)
    ]
    axes = [
        record.metric for part in parts for record in part if record.WhichOneof("record_type") == "metric"
    ]
    assert any(axis.glob_name == "*" and axis.step_metric == "step" for axis in axes)


# Settings


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_missing_package_is_reported_in_one_line_before_the_run_starts(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = run_of(mlflow="http://host:5000", wandb="digits")
    check_trackers(config)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as caught:
        check_trackers(config)
    assert str(caught.value) == (
        f"tracking.{name} needs the package {name}, which is not installed: "
        f"pip install 'raycl[{name}]', or unset it"
    )
    with pytest.raises(ConfigError, match=f"needs the package {name}"):
        raycl.train(config, data=str(tmp_path / "none"), output=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    check_trackers(run_of(tensorboard=True))


def test_a_folder_left_by_a_tracker_is_not_mistaken_for_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match="package wandb, which is not installed"):
        check_trackers(run_of(wandb="digits"))


@pytest.mark.parametrize(
    ("tracking", "says"),
    [
        ({"mlflow": "runs/mlflow"}, "'runs/mlflow' is a relative path, which differs between nodes"),
        ({"mlflow": "https://me:secret@host/mlflow"}, "MLFLOW_TRACKING_PASSWORD"),
        ({"mlflow": "https://me:sec/secret@host/mlflow"}, "MLFLOW_TRACKING_PASSWORD"),
        ({"mlflow": "https://token@host"}, "MLFLOW_TRACKING_PASSWORD"),
        ({"wandb": "a/b/c"}, "tracking.wandb"),
        ({"tensorboard": "yes"}, "tracking.tensorboard"),
    ],
)
def test_impossible_tracker_settings_are_refused(tracking: Mapping[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        run_of(**tracking)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    ["http://host:5000", "http://host:5000/a@b", "databricks", "/shared/mlflow", "file:/shared/mlflow"],
)
def test_addresses_valid_on_all_nodes_are_accepted(address: str) -> None:
    assert run_of(mlflow=address).tracking == TrackingConfig(mlflow=address)


def test_a_resumed_run_may_use_different_trackers(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(config_to_yaml(run_of(tensorboard=True, wandb="digits")))
    check_output(run_of(mlflow="http://host:5000"), Place(str(tmp_path)), resume=True)
