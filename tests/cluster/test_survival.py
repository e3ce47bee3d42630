"""Runs that lose a process or are stopped: saved state and resuming."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import state as ray_state
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

import raycl
from raycl.data.read_stats import ReadStats
from raycl.data.windows import reader_environment
from raycl.errors import RunError
from raycl.ray_runtime import helper_actor
from raycl.records import failures, read_metrics, read_result, wall_seconds
from raycl.storage import Place
from raycl.training import coordinator
from raycl.training.checkpoint import saved_steps
from raycl.training.controller import (
    RayTrainer,
    controller_environment,
    prestart_controller,
    remove_leaked_placement_groups,
)
from raycl.training.coordinator import send_heartbeats
from raycl.training.driver import GracefulShutdown, workers_that_fit
from raycl.training.standby import HOOK, importing
from tests.cluster.actors import Other, Probe, TrainController
from tests.cluster.faults import extra_node, kill_process, processes, wait_until
from tests.cluster.test_negatives import assert_equal_runs
from tests.cluster.test_run import libraries_of, small_run
from tests.images import write_digits

pytestmark = pytest.mark.usefixtures("ray_cluster")

ROOT = Path(__file__).parent.parent.parent


def write_config(folder: Path, config: raycl.RunConfig) -> Path:
    path = folder / "run.yaml"
    path.write_text(json.dumps(config.model_dump(mode="json")))
    return path


def start(*arguments: object, program: Sequence[str] = ("jobs/train.py",), **options: Any) -> Any:
    """Start a process that trains on the test cluster."""
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        **{
            "cwd": ROOT,
            "env": os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address},
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.PIPE,
            "text": True,
            **options,
        },
    )


def stop(process: Any, ready: Callable[[], bool], wait_s: float = 0.0) -> tuple[int, str]:
    """Send SIGTERM when the process is ready; return its exit status and stderr."""
    wait_until(lambda: ready() or process.poll() is not None)
    time.sleep(wait_s)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=150)
    assert "Traceback" not in errors
    return process.returncode, errors


def signal_at(path: Path) -> None:
    """Send SIGTERM to this process once the file exists."""
    wait_until(path.exists)
    os.kill(os.getpid(), signal.SIGTERM)


def losses_of(output: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(Place(str(output))) if "loss" in line]


def test_a_stopped_run_saves_and_reports_a_checkpoint_and_resumes_exactly(
    tmp_path: Path,
) -> None:
    data = write_digits(tmp_path / "digits.parquet", 300)
    marker = tmp_path / "hurry"
    config = small_run(
        **{
            "workers": 1,
            "encoder.name": "tests.cluster.networks:slow",
            "encoder.kwargs": {"channels": 1, "marker": str(marker)},
            "stages.0.epochs": 20,
            "checkpoints.every_steps": 20,
            "checkpoints.interval_s": 10_000.0,
            "log_every_steps": 40,
            "evaluation.every_epochs": 0,
        }
    )
    file, output = write_config(tmp_path, config), tmp_path / "run"

    process = start(file, "--data", data, "--output", output)
    status, errors = stop(process, (output / "metrics.jsonl").exists)
    assert status == 128 + signal.SIGTERM
    stopped = read_result(Place(str(output)))
    assert stopped["status"] == "stopped"
    assert stopped["error"] in errors
    [reached] = map(
        int,
        re.findall(r"stopped after step (\d+), which is saved; continue it with --resume", stopped["error"]),
    )
    assert 20 <= reached < 40  # not the next logged step
    assert (output / "checkpoints" / f"step-{reached:08d}").exists()

    marker.touch()
    # After the last step there is no training to stop.
    signal.signal(signal.SIGTERM, lambda *_: None)  # for a signal after the run
    with ThreadPoolExecutor(1) as threads:
        signaled = threads.submit(signal_at, output / "encoder.safetensors")
        raycl.train(output=str(output), resume=True, quiet=True)  # with its own settings and data
        signaled.result()
    assert read_result(Place(str(output)))["status"] == "finished"
    whole = tmp_path / "whole"
    raycl.train(config, data=str(data), output=str(whole), quiet=True)
    assert_equal_runs(output, whole)
    certificate = raycl.certify(output)
    assert certificate.is_valid, str(certificate)
    assert "starts of workers: 2" in certificate.checks[0].text


@pytest.mark.drill
def test_ctrl_c_on_a_laptop_saves_first_and_a_second_ctrl_c_quits_at_once(tmp_path: Path) -> None:
    data = write_digits(tmp_path / "digits.parquet", 300)
    # Steps are slow, so that the second Ctrl-C comes before the run has stopped after the first.
    arguments = {"channels": 1, "marker": str(tmp_path / "nowhere"), "seconds": 2}
    settings = {"encoder.name": "tests.cluster.networks:slow", "encoder.kwargs": arguments}
    config = small_run(**settings, workers=1, **{"stages.0.epochs": 100, "evaluation.every_epochs": 0})
    file = write_config(tmp_path, config)

    def interrupted(output: Path, times: int) -> tuple[int, str]:
        """Press Ctrl-C in a terminal, which also signals the processes of its Ray."""
        process = start(
            *(file, "--data", data, "--output", output),
            env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            start_new_session=True,
            # If the tests were started in the background, SIGINT would be ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        wait_until(lambda: (output / "metrics.jsonl").exists() or process.poll() is not None)
        for _ in range(times):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(2)
        _, errors = process.communicate(timeout=120)
        assert "Traceback" not in errors
        return process.returncode, errors

    status, errors = interrupted(tmp_path / "once", 1)
    assert (status, "which is saved; continue it with --resume" in errors) == (130, True), errors
    assert read_result(Place(str(tmp_path / "once")))["status"] == "stopped"
    assert list((tmp_path / "once" / "checkpoints").glob("step-*"))
    status, errors = interrupted(tmp_path / "twice", 2)
    assert (status, "interrupted by SIGINT; resume a run" in errors) == (130, True), errors


@pytest.mark.drill
def test_a_run_that_waits_for_nodes_stops_on_request(tmp_path: Path) -> None:
    data, output = write_digits(tmp_path / "digits.parquet", 300), tmp_path / "run"
    settings = ["workers=9", "autoscaling=true", "data.image_size=16", "stages.0.batch_size=63"]
    flags = [flag for setting in settings for flag in ("--set", setting)]
    process = start("simclr", "--data", data, "--output", output, *flags)
    status, _ = stop(process, lambda: (output / "result.json").exists(), wait_s=10)  # until the run waits
    assert status == 128 + signal.SIGTERM
    assert read_result(Place(str(output)))["status"] == "stopped"


@pytest.mark.drill
def test_a_run_with_steps_longer_than_the_drivers_timeout_still_saves(tmp_path: Path) -> None:
    data, output = write_digits(tmp_path / "digits.parquet", 300), tmp_path / "run"
    config = small_run(
        **{
            "workers": 1,
            "encoder.name": "tests.cluster.networks:slow",
            "encoder.kwargs": {"channels": 1, "marker": str(tmp_path / "nowhere"), "seconds": 8},
            "evaluation.every_epochs": 0,
        }
    )
    # Two views per step make 16 seconds of silence; heartbeats come every second.
    impatient = "import raycl.training.driver as groups, raycl.cli.main; groups._NO_HEARTBEAT_S = 11.0; raycl.cli.main.main()"
    arguments = ("train", write_config(tmp_path, config), "--data", data, "--output", output)
    process = start(*arguments, program=("-c", impatient))
    status, errors = stop(process, lambda: (output / "metrics.jsonl").exists())
    assert status == 128 + signal.SIGTERM
    assert "which is saved" in read_result(Place(str(output)))["error"], errors
    assert list((output / "checkpoints").glob("step-*"))


def test_the_state_of_a_coordinator_survives_its_restart(tmp_path: Path) -> None:
    with coordinator.start_coordinator() as book, GracefulShutdown(book, Place(str(tmp_path))) as signals:
        stats = ReadStats(num_rows=9, num_train=7, examples=["one.png (not an image)"])
        stats.invalid["not an image"] = 2
        ray.get(book.add_rows.remote("fragment", stats))
        ray.get(book.add_notice.remote("something happened"))
        signals.request_stop()
        before = coordinator.rows_in(book)
        for deaths in (1, 2):
            ray.kill(book, no_restart=False)
            wait_until(lambda deaths=deaths: restarts_of(book) == deaths)
            assert coordinator.rows_in(book) == before
            assert ray.get(book.notices.remote()) == ["something happened"]
            assert ray.get(book.heartbeat.remote())
        assert before.num_invalid == 2
        ray.kill(book, no_restart=False)
        assert signals.request_stop() < 60  # whether it exists or not


def restarts_of(actor: Any) -> int:
    """Return how often an actor was restarted; -1 while it is down, since a dying actor may still answer."""
    facts = ray_state.actors(actor._actor_id.hex()) or {}
    return facts["NumRestarts"] if facts.get("State") == "ALIVE" else -1


def test_only_a_dead_controllers_resources_are_freed() -> None:
    controller, other = (ray.remote(num_cpus=0)(each) for each in (TrainController, Other))
    dead, alive, users = controller.remote(), controller.remote(), other.remote()
    lost, kept, given = ray.get([each.take_room.remote() for each in (dead, alive, users)])
    own = placement_group([{"CPU": 0.5}])
    ray.get(own.ready())
    assert remove_leaked_placement_groups(patience_s=0) == 0
    for each in (dead, users):
        ray.kill(each)
    assert remove_leaked_placement_groups(patience_s=3) == 1
    wait_until(lambda: placement_group_table(lost)["state"] == "REMOVED")
    assert remove_leaked_placement_groups(patience_s=0) == 0
    others = (kept, given, own)
    assert [placement_group_table(each)["state"] for each in others] == ["CREATED"] * 3
    for each in others:
        remove_placement_group(each)


def test_ray_still_has_the_helpers_that_raycl_disables() -> None:
    def names(trainer: TorchTrainer) -> set[str]:
        return {type(each).__name__ for each in trainer._create_default_callbacks()}

    settings = {"train_loop_per_worker": print, "scaling_config": ScalingConfig(num_workers=1)}
    left_out = names(TorchTrainer(**settings)) - names(RayTrainer(**settings, began=0.0))
    assert left_out == {"PlacementGroupCleanerCallback", "DatasetsCallback"}


@pytest.mark.drill
def test_dead_controllers_leave_no_reserved_resources_and_no_actors(tmp_path: Path) -> None:
    data = write_digits(tmp_path / "digits.parquet", 300)
    config = small_run(
        **{
            "workers": 1,
            "encoder.name": "tests.cluster.networks:slow",
            "encoder.kwargs": {"channels": 1, "marker": str(tmp_path / "hurry")},
            "stages.0.epochs": 60,
            "checkpoints.every_steps": 2,
            "evaluation.every_epochs": 0,
        }
    )
    output = tmp_path / "run"

    def kill_three() -> None:
        for _ in range(3):
            wait_until(lambda: list(output.glob("checkpoints/step-*")))
            kill_process("ray::TrainController")
            time.sleep(12)
        (tmp_path / "hurry").touch()

    killer = threading.Thread(target=kill_three)
    killer.start()
    before = [each for each in placement_group_table().values() if each["state"] != "REMOVED"]
    raycl.train(config, data=str(data), output=str(output), quiet=True)
    killer.join()
    assert read_result(Place(str(output)))["status"] == "finished"
    after = [each for each in placement_group_table().values() if each["state"] != "REMOVED"]
    assert len(after) == len(before)
    alive = {each["ActorClassName"] for each in ray_state.actors().values() if each["State"] != "DEAD"}
    assert not alive & {"PlacementGroupCleaner", "TrainController", "RayTrainWorker"}


@pytest.mark.drill
def test_an_elastic_run_does_not_wait_for_the_request_of_a_dead_controller(tmp_path: Path) -> None:
    data, output = write_digits(tmp_path / "digits.parquet", 300), tmp_path / "run"
    config = small_run(
        **{
            "min_workers": 1,
            "workers": 4,
            "cpus_per_worker": 1.0,
            "encoder.name": "tests.cluster.networks:slow",
            "encoder.kwargs": {"channels": 1, "marker": str(tmp_path / "hurry")},
            "stages.0.batch_size": 48,
            "stages.0.epochs": 20,
            "checkpoints.every_steps": 2,
            "evaluation.every_epochs": 0,
        }
    )

    def kill() -> float:
        wait_until(lambda: list(output.glob("checkpoints/step-*")))
        kill_process("ray::TrainController")
        (tmp_path / "hurry").touch()
        return time.monotonic()

    with ThreadPoolExecutor(1) as executor:
        killed = executor.submit(kill)
        raycl.train(config, data=str(data), output=str(output), quiet=True)
    assert time.monotonic() - killed.result() < 120.0  # Ray keeps a request for 180 s
    coordinator: Any = ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator")
    requests: Any = coordinator.__ray_call__.remote(lambda actor: list(actor._ongoing_reqs))
    assert not [each for each in ray.get(requests) if each.startswith("train-")]


def test_elastic_workers_leave_a_cpu_for_data_tasks() -> None:
    def asked(*, streamed: bool, workers: tuple[int, int] = (1, 8), **settings: object) -> tuple[int, int]:
        return workers_that_fit(small_run(**settings), workers, streamed=streamed)

    # On 4 CPUs.
    assert asked(streamed=True, cpus_per_worker=1.0) == (1, 3)
    assert asked(streamed=True, cpus_per_worker=1.6) == (1, 1)
    assert asked(streamed=True, cpus_per_worker=0.1) == (1, 8)
    assert asked(streamed=True, cpus_per_worker=2.0, workers=(2, 8)) == (2, 2)
    assert asked(streamed=False, cpus_per_worker=1.0) == (1, 8)
    assert asked(streamed=True, cpus_per_worker=1.0, autoscaling=True) == (1, 8)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="libraries are looked up in /proc")
def test_a_process_with_imported_modules_stands_ready_for_a_lost_one() -> None:
    env_vars = importing("import_worker")
    assert env_vars
    actor: Any = ray.remote(num_cpus=0, runtime_env={"env_vars": env_vars})(Probe)
    first, before = actor.remote(), set(idle_processes())
    assert ray.get(first.ask.remote())
    wait_until(lambda: set(idle_processes()) - before)
    [ready] = set(idle_processes()) - before
    wait_until(lambda: any("libtorch" in library for library in libraries_of(ready)))
    ray.kill(first)
    assert ray.get(actor.remote().pid.remote()) == ready


def test_the_controller_and_its_actor_get_processes_that_the_driver_asked_for_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = set(idle_processes())
    prestart_controller()  # not on a Ray that raycl has not started
    monkeypatch.setattr("raycl.training.controller.is_own_ray", lambda: True)
    prestart_controller()
    prestart_controller()
    wait_until(lambda: len(set(idle_processes()) - before) == 2)
    ready = set(idle_processes()) - before
    controller: Any = helper_actor(Probe, runtime_env={"env_vars": controller_environment()}).remote()
    assert set(ray.get([controller.pid.remote(), controller.pid_of_child.remote()])) == ready


def test_a_process_that_a_worker_asked_for_becomes_the_reader_of_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_worker = importing("import_worker")
    monkeypatch.setenv(HOOK, of_worker[HOOK])
    of_reader = reader_environment()
    assert of_reader == importing("import_reader")
    controller: Any = ray.remote(num_cpus=0, runtime_env={"env_vars": {"OTHER": "1"}})(Probe).remote()
    ray.get(controller.pid_of_child.remote(of_worker))
    before = set(idle_processes())
    assert ray.get(controller.of_child.remote("ask", of_reader))
    wait_until(lambda: set(idle_processes()) - before)
    [ready] = set(idle_processes()) - before
    assert ray.get(controller.of_child.remote("pid_of_child", of_reader)) == ready
    assert not any("libtorch" in library for library in libraries_of(ready))


@pytest.mark.drill
def test_a_process_stands_ready_on_each_node_with_room() -> None:
    options: dict[str, Any] = {"num_cpus": 2, "runtime_env": {"env_vars": importing("import_worker")}}
    actor: Any = ray.remote(**options)(Probe)
    with coordinator.start_coordinator() as book, extra_node(1), extra_node(2) as large:
        first = actor.options(label_selector={"ray.io/node-id": f"!{large.id}"}).remote()
        ray.get(first.ask_elsewhere.remote(book))
        before = set(idle_processes())
        wait_until(
            lambda: len(set(idle_processes()) - before) == 2
        )  # the driver's node has room for another one
        time.sleep(45)  # the next look
        ready = set(idle_processes()) - before
        assert len(ready) == 2
        [there] = filter(large.has, ready)
        wait_until(lambda: any("libtorch" in library for library in libraries_of(there)))
        second = actor.options(label_selector={"ray.io/node-id": large.id}).remote()
        assert ray.get(second.pid.remote()) == there
        ray.kill(first)
        ray.kill(second)


@pytest.mark.drill
def test_a_group_resumes_in_processes_that_stood_ready(tmp_path: Path) -> None:
    data, output = write_digits(tmp_path / "digits.parquet", 300), tmp_path / "run"
    marker = tmp_path / "hurry"
    settings: dict[str, Any] = {
        "encoder.name": "tests.cluster.networks:slow",
        "encoder.kwargs": {"channels": 1, "marker": str(marker)},
        "stages.0.epochs": 400,
        "evaluation.every_epochs": 0,
    }
    config = small_run(**settings)

    def lose_a_worker() -> set[int]:
        wait_until(lambda: wall_seconds(Place(str(output))) > 65)
        time.sleep(20)  # they import their modules
        ready = set(idle_processes())
        kill_process("ray::RayTrainWorker")
        wait_until(lambda: set(processes("ray::RayTrainWorker")) <= ready)
        marker.touch()
        return ready

    with ThreadPoolExecutor(1) as threads:
        losing = threads.submit(lose_a_worker)
        result = raycl.train(config, data=str(data), output=str(output), quiet=True)
        assert len(losing.result()) >= 3
    [failure] = result.failures
    pause = re.search(r"after ([0-9.]+) s", failure["text"])
    assert pause is not None and float(pause[1]) < 5, failure["text"]


@pytest.mark.drill
@pytest.mark.timeout(1_800)
def test_a_run_with_20_kills_and_10_changes_of_workers_is_certified(tmp_path: Path) -> None:
    data, output, marker = (
        write_digits(tmp_path / "digits.parquet", 300),
        tmp_path / "run",
        tmp_path / "hurry",
    )
    place = Place(str(output))
    settings: dict[str, Any] = {
        "cpus_per_worker": 0.25,
        "encoder.name": "tests.cluster.networks:slow",
        "encoder.kwargs": {"channels": 1, "marker": str(marker)},
        "stages.0.epochs": 500,
        "checkpoints.every_steps": 5,
        "checkpoints.keep": 40,
        "log_every_steps": 1,
        "evaluation.every_epochs": 0,
        "max_failures": 5,
    }

    def num_failures() -> int:
        return len(failures(place)) if (output / "metrics.jsonl").exists() else 0

    victims = itertools.cycle(["ray::RayTrainWorker", "ray::TrainController"])
    for number in range(11):
        file = write_config(tmp_path, small_run(**settings, workers=(1, 2, 4, 2)[number % 4]))
        process = start(file, "--data", data, "--output", output, *["--resume"] * bool(number))
        for _ in range(2 * (number < 10)):
            reached, lost = max(saved_steps(place), default=0), num_failures()
            wait_until(lambda reached=reached: max(saved_steps(place), default=0) > reached + 5)
            kill_process(next(victims))
            wait_until(lambda lost=lost: num_failures() > lost)
        if number < 10:
            status, errors = stop(process, lambda: True, wait_s=1.0)
            assert status == 128 + signal.SIGTERM, errors
    marker.touch()
    assert process.wait(200) == 0
    assert num_failures() == 20
    began = time.monotonic()
    certificate = raycl.certify(output, steps=20)
    seconds = time.monotonic() - began
    print(certificate, f"{seconds:.1f} s in all")
    assert certificate.is_valid, str(certificate)
    assert "starts of workers: 31" in certificate.checks[0].text
    steps = certificate.recomputed
    assert len(steps) >= 20
    assert all(each.relative_difference < 1e-6 for each in steps if not each.updates)
    assert len({each.workers for each in steps}) > 1
    assert seconds < 10 * len(steps)


def idle_processes() -> list[int]:
    return processes("ray::IDLE")


def test_a_coordinator_receives_heartbeats_and_answers_with_the_stop_request() -> None:
    with coordinator.start_coordinator() as book:
        with send_heartbeats(book, interval_s=0.2) as asked_to_stop:
            time.sleep(2.0)
            assert ray.get(book.seconds_since_heartbeat.remote()) < 1.5
            assert not asked_to_stop.is_set()
            ray.get(book.request_stop.remote())
            assert asked_to_stop.wait(10)
        time.sleep(2.0)
        assert ray.get(book.seconds_since_heartbeat.remote()) > 1.5


@pytest.mark.drill
def test_a_run_that_repeatedly_loses_its_workers_at_one_step_fails(tmp_path: Path) -> None:
    data = write_digits(tmp_path / "digits.parquet", 300)
    config = small_run(**{"workers": 1, "max_failures": 1, "encoder.name": "tests.cluster.networks:mortal"})
    with pytest.raises(RunError):
        raycl.train(config, data=str(data), output=str(tmp_path / "run"), quiet=True)
    assert read_result(Place(str(tmp_path / "run")))["status"] == "failed"


@pytest.mark.drill
def test_an_elastic_run_starts_with_as_many_workers_as_fit(tmp_path: Path) -> None:
    data = write_digits(tmp_path / "digits.parquet", 300)
    settings = {"stages.0.epochs": 2, "encoder.kwargs": {"channels": 1, "dropout": 0.0}}
    # 3 workers of 1.3 CPUs fit on 4 CPUs; a fourth does not.
    elastic = small_run(
        **settings, min_workers=1, workers=4, cpus_per_worker=1.3, **{"stages.0.batch_size": 48}
    )
    raycl.train(elastic, data=str(data), output=str(tmp_path / "elastic"), quiet=True)
    alone = small_run(**settings, workers=1, **{"stages.0.batch_size": 48})
    raycl.train(alone, data=str(data), output=str(tmp_path / "alone"), quiet=True)
    counted = {line["workers"] for line in read_metrics(Place(str(tmp_path / "elastic"))) if "loss" in line}
    assert counted == {3}
    few, one = (losses_of(tmp_path / name) for name in ("elastic", "alone"))
    assert [step for step, _ in few] == [step for step, _ in one]
    assert [loss for _, loss in few] == pytest.approx([loss for _, loss in one], rel=1e-4)
