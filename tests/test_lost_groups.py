"""The driver counts lost groups of workers, and says where the next one resumes."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from ray.exceptions import RaySystemError

import raycl
from raycl.errors import RunError, ShardAwayError
from raycl.records import CHECKPOINT_LIST, CHECKPOINTS, STATE
from raycl.storage import Place
from raycl.training import driver
from raycl.training.controller import Finished
from raycl.training.driver import train_in_groups
from raycl.training.encoder_pool import EncoderPool
from raycl.training.job import Job


@dataclass(frozen=True, kw_only=True)
class FakeJob:
    """The parts of a job that the driver uses between groups."""

    output: Place
    config: Any
    coordinator: Any = None
    workers: tuple[int, int] = (1, 1)
    began: float = 0.0
    failure: Any = None
    encoder_pool: Any = None

    def workers_at(self, stage: int) -> tuple[int, int]:
        return self.workers


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that trains with groups that fail in turn, at most twice in a row; it returns the reports."""

    @contextlib.contextmanager
    def nothing(*_: Any, **__: Any) -> Iterator[None]:
        yield None

    for name in ("_open_pool", "ProgressLine"):
        monkeypatch.setattr(driver, name, nothing)
    for name in ("notices_of", "steps_made", "remove_leaked_placement_groups"):
        monkeypatch.setattr(driver, name, lambda *_, **__: None)
    monkeypatch.setattr(driver, "_failure", lambda job, text, started: None)

    def start(*groups: Callable[[], Any]) -> list[str]:
        left, reports = list(groups), list[str]()

        def train_group(job: Any, report: Any) -> Finished:
            if not left:
                return Finished({})
            left.pop(0)()
            raise RuntimeError("the node was lost")

        monkeypatch.setattr(driver, "_train_group", train_group)
        job: Any = FakeJob(output=Place(str(tmp_path)), config=SimpleNamespace(max_failures=2))
        train_in_groups(job, SimpleNamespace(), reports.append, quiet=True)  # pyright: ignore[reportArgumentType]
        assert reports.pop(0) == "starting the workers"
        return reports

    return start


def save(output: Path, name: str, *, complete: bool = True) -> None:
    """Write a checkpoint, or the folder that Ray Train leaves if a worker dies during the upload."""
    folder = output / CHECKPOINTS / name
    folder.mkdir(parents=True)
    (folder / STATE).touch()
    if complete:
        place = output / CHECKPOINTS / CHECKPOINT_LIST
        results = json.loads(place.read_text())["checkpoint_results"] if place.exists() else []
        place.write_text(json.dumps({"checkpoint_results": [*results, {"checkpoint_dir_name": name}]}))


def test_groups_that_die_in_each_upload_count_as_failures_without_progress(
    train: Callable[..., list[str]], tmp_path: Path
) -> None:
    names = iter(range(10, 100))
    with pytest.raises(RuntimeError, match="the node was lost"):
        train(*[lambda: save(tmp_path, f"step-{next(names):08d}", complete=False)] * 9)
    assert next(names) == 13  # the third failure in a row is the last one


def test_an_absent_shard_is_a_failure_and_other_errors_of_raycl_end_the_run(
    train: Callable[..., list[str]],
) -> None:
    def lose(error: RunError) -> Callable[[], None]:
        def group() -> None:
            raise RuntimeError("a worker failed") from error

        return group

    away = lose(ShardAwayError("the bank's shard 'bank/0' did not answer 'push'"))
    assert len(train(away, away)) == 2
    with pytest.raises(RuntimeError, match="a worker failed"):
        train(away, away, away)
    left = [lose(RunError("the bank's shard 'bank/0' failed in 'push'")), pytest.fail]
    with pytest.raises(RuntimeError, match="a worker failed"):
        train(*left)


def test_each_complete_checkpoint_starts_the_count_again(
    train: Callable[..., list[str]], tmp_path: Path
) -> None:
    names = iter(range(10, 100))
    reports = train(*[lambda: save(tmp_path, f"step-{next(names):08d}")] * 9)
    assert len(reports) == 9
    assert all(f"resuming from step {step} (failure 1 of 2)" in reports[step - 10] for step in range(10, 19))


def test_the_report_names_the_checkpoint_from_which_the_run_resumes(
    train: Callable[..., list[str]], tmp_path: Path
) -> None:
    save(tmp_path, "step-00000030")
    save(tmp_path, "step-00000020-again1")  # after a rollback
    (report,) = train(lambda: save(tmp_path, "step-00000040", complete=False))
    assert "resuming from step 20 " in report


def test_a_truncated_list_of_checkpoints_is_no_progress_and_no_error(
    train: Callable[..., list[str]], tmp_path: Path
) -> None:
    def truncate() -> None:
        save(tmp_path, "step-00000010")
        (tmp_path / CHECKPOINTS / CHECKPOINT_LIST).write_text('{"checkpoint')

    (report,) = train(truncate)
    assert "resuming from step 0 " in report


def test_a_list_that_could_not_be_read_once_makes_no_old_checkpoint_new(
    train: Callable[..., list[str]], tmp_path: Path
) -> None:
    place = tmp_path / CHECKPOINTS / CHECKPOINT_LIST
    kept: list[str] = []

    def truncate() -> None:
        kept.append(place.read_text())
        place.write_text('{"checkpoint')

    with pytest.raises(RuntimeError, match="the node was lost"):
        train(lambda: save(tmp_path, "step-00000010"), truncate, lambda: place.write_text(kept[0]))


def test_a_group_of_workers_gets_the_pools_to_release_and_the_request_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only Ray Train's controller knows when a group starts: it also replaces groups within one call of ``fit``."""
    pool = {"location": "actors", "actors": 4, "min_actors": 1}
    settings = {f"momentum_encoder.{name}": value for name, value in pool.items()}
    config = raycl.override(raycl.recipe("moco_v2"), {"workers": 2} | settings)
    trainer, arguments, of_keys, of_documents = MagicMock(), dict[str, Any](), MagicMock(), MagicMock()

    def start(*_: Any, **named: Any) -> Any:
        arguments.update(named)
        return trainer

    monkeypatch.setattr(driver, "RayTrainer", start)
    monkeypatch.setattr(driver, "ray", MagicMock())
    monkeypatch.setattr(driver, "importing", lambda _: {})
    monkeypatch.setattr(driver, "cpus_of_a_worker", lambda *_, **__: 1.0)
    known: Any = dict.fromkeys(("blocks", "stream", "holdout", "coordinator", "columns"))
    job = Job(
        **known,
        config=config,
        output=Place(str(tmp_path)),
        num_train=(1,),
        is_evaluated=False,
        workers=(2, 2),
        encoder_pool=EncoderPool(actor=of_keys, build=MagicMock()),
        mining_pool=EncoderPool(actor=of_documents, build=MagicMock()),
    )
    run_ids = []
    others = (job, 5.0), (replace(job, output=Place(str(tmp_path / "other"))), 16.0)
    for each, num_cpus in ((job, 16.0), *others):
        monkeypatch.setattr(driver.ray, "cluster_resources", lambda cpus=num_cpus: {"CPU": cpus})
        driver._train_group(each, print)
        run_ids.append(arguments["run_id"])
    assert arguments["pools"] == [of_keys, of_documents]
    # An encoder beyond those that fit would take the CPU of a task that reads the rows of the workers.
    assert [call.args for call in of_keys.limit.remote.call_args_list] == [(4,), (3,), (4,)]
    assert of_documents.limit.remote.call_count == 3
    assert run_ids[0] == run_ids[1] != run_ids[2]
    # Only on a Ray that raycl started, and whose CPUs no data tasks need, workers request none.
    assert arguments["requests_resources"]
    monkeypatch.setattr(driver, "is_own_ray", lambda: True)
    for changed, requests in (({}, False), ({"stream": MagicMock()}, True), ({"workers": (1, 2)}, True)):
        driver._train_group(replace(job, **changed), print)
        assert arguments["requests_resources"] is requests

    def fit() -> Any:
        """Lose a node, as if Ray Train replaced its workers, until the pool keeps within the nodes that are left."""
        left = chain([RaySystemError("the GCS restarts")], repeat({"CPU": 5.0}))
        monkeypatch.setattr(driver.ray, "cluster_resources", MagicMock(side_effect=left))
        until = time.monotonic() + 10.0
        while of_keys.limit.remote.call_args.args != (3,):
            assert time.monotonic() < until, "the pool may take the CPU of a data task"
            time.sleep(0.01)
        return MagicMock()

    trainer.fit = fit
    monkeypatch.setattr(driver, "_LIMIT_S", 0.01)
    driver._train_group(job, print)
