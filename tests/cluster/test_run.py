"""Runs on a real local Ray cluster: their outputs, resuming, and failures."""

import itertools
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from ray._private import state as ray_state
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import raycl
from raycl.config import RunConfig
from raycl.data.split import make_split
from raycl.embedding_snapshot import FIRST, LATEST, read_probe_set, read_snapshot
from raycl.errors import ConfigError, DataError, NonFiniteLossError, RunError, StorageError
from raycl.records import CHECKPOINT_LIST, read_metrics, read_result, wall_seconds
from raycl.report.writer import write_report
from raycl.storage import Place
from tests.cluster.conftest import in_this_process
from tests.conftest import BUCKET
from tests.images import digit_files, write_digits
from tests.settings import override_active
from tests.test_docs import documented_metrics
from tests.towers import without_encoder

pytestmark = pytest.mark.usefixtures("ray_cluster")

NUM_IMAGES, NUM_INVALID, BATCH_SIZE = 700, 5, 64


SMALL: dict[str, Any] = {
    "workers": 2,
    "cpus_per_worker": 0.5,
    "data.channels": 1,
    "encoder.name": "tests.cluster.networks:small",
    "encoder.kwargs": {"channels": 1},
    "stages.0.epochs": 2,
    "stages.0.batch_size": BATCH_SIZE,
    "evaluation.num_test": 64,
    "evaluation.k": 20,
    "checkpoints.every_steps": 5,
    "log_every_steps": 1,
}
TRACKED = {"tracking.tensorboard": True}


def small_run(method: str = "simclr", **settings: Any) -> RunConfig:
    """Two workers, two epochs of nine steps, a checkpoint every five steps, dropout in the encoder."""
    return override_active(raycl.recipe(method, image_size=16, gray=True), SMALL, settings)


def weights_of(output: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(output / "encoder.safetensors")


@dataclass
class Seen:
    """The actors of one run, by class, and the libraries of its controller."""

    started: set[str] = field(default_factory=set)
    readers: list[set[str]] = field(default_factory=list)  # the living readers of streams at each look
    controller_loaded: set[str] = field(default_factory=set)


@contextmanager
def watch() -> Iterator[Seen]:
    """Look at the new actors every 0.1 s from another thread."""
    before, seen, is_over = set(ray_state.actors()), Seen(), threading.Event()

    def look() -> None:
        while not is_over.wait(0.1):
            new = {id_: facts for id_, facts in ray_state.actors().items() if id_ not in before}
            seen.started.update(facts["ActorClassName"] for facts in new.values())
            alive = [(id_, facts) for id_, facts in new.items() if facts["State"] == "ALIVE"]
            seen.readers.append({id_ for id_, facts in alive if facts["ActorClassName"] == "_Windows"})
            for _, facts in alive:
                if facts["ActorClassName"] == "TrainController":
                    seen.controller_loaded |= libraries_of(facts["Pid"])

    with ThreadPoolExecutor(1) as threads:
        looking = threads.submit(look)
        try:
            yield seen
        finally:
            is_over.set()
            looking.result()


def libraries_of(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # not started yet, or already finished
        return set()
    return {line.split()[-1] for line in lines if ".so" in line}


@dataclass(frozen=True)
class Finished:
    data: Path
    output: Path
    result: raycl.RunResult
    seen: Seen


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data") / "digits.parquet", NUM_IMAGES, broken=NUM_INVALID)


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One uninterrupted run for many tests, started with a recipe name and flags."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    settings = {**SMALL, **TRACKED}
    flags = {name: settings.pop(f"stages.0.{name}") for name in ("epochs", "batch_size")}
    flags["workers"] = settings.pop("workers")
    with watch() as seen:
        result = raycl.train("simclr", data=data, output=output, settings=settings, quiet=True, **flags)
    return Finished(data, output, result, seen)


def test_a_run_writes_all_documented_files(finished: Finished) -> None:
    assert raycl.config_from_yaml((finished.output / "config.yaml").read_text()) == small_run(**TRACKED)
    result = read_result(Place(str(finished.output)))
    assert result["status"] == "finished"
    assert result["steps"] == finished.result.steps
    assert result["samples_per_second"] > 0
    assert 0 < result["final"]["knn_top1"] <= 1
    assert 0 < result["goodput"] < 1 and not result["failures"]
    assert finished.result.invalid_rows == {"not an image": NUM_INVALID}


def test_a_run_starts_no_unneeded_ray_actors(finished: Finished) -> None:
    assert {"TrainController", "RayTrainWorker", "RunCoordinator"} <= finished.seen.started
    assert finished.seen.started <= {
        *("TrainController", "RayTrainWorker", "SynchronizationActor", "RunCoordinator"),
        *("_StatsActor", "_AutoscalingCoordinatorActor"),  # started by Ray Data, if this is the first run
    }


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="libraries are looked up in /proc")
def test_the_controller_imports_no_image_libraries(finished: Finished) -> None:
    assert any("ray/_raylet" in each for each in finished.seen.controller_loaded)
    # Workers start to import after the controller: a second here delays the start by a second.
    for needless in ("torchvision", "matplotlib", "PIL"):
        assert not [each for each in finished.seen.controller_loaded if f"/{needless}/" in each], needless


def test_metrics_have_one_line_per_step_and_evaluations_between(finished: Finished) -> None:
    lines = read_metrics(Place(str(finished.output)))
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, finished.result.steps + 1))
    assert {"step", "epoch", "stage", "loss", "learning_rate", "samples_per_second"} <= steps[0].keys()
    assert {line["num_steps"] for line in lines} == {finished.result.steps}
    evaluated = [line["step"] for line in lines if "knn_top1" in line]
    assert evaluated[0] == 0
    assert evaluated[-1] == finished.result.steps


def test_the_metrics_of_a_run_match_the_documentation(finished: Finished) -> None:
    written = {name for line in read_metrics(Place(str(finished.output))) for name in line}
    assert written <= documented_metrics()
    of_others = {
        "keys_fraction",
        "grad_norm",
        "views_per_second",
        "grouped_fraction",
        "guide_masked_fraction",
        "data_set",
        "batchnorm_leakage",
        "recall_at_10",
        "recall_at_1",
        "baseline_recall_at_10",
        "baseline_recall_at_1",
        "bank_restarts",
        "negatives_wait_fraction",
        "key_age_mean",
        "key_age_max",
        "own_keys_fraction",
        "key_encoders",
        "miner_restarts",
        "mined_random_fraction",
        "lost_seconds",
        "repeated_steps",
        "failed_at",
    }
    assert documented_metrics() - written == of_others | {"negatives_age_mean", "negatives_age_max"}


def test_a_tracker_has_all_numbers_after_the_run(finished: Finished) -> None:
    shown = EventAccumulator(str(finished.output / "tensorboard"))
    shown.Reload()
    for name in ("loss", "knn_top1"):
        lines = [line for line in read_metrics(Place(str(finished.output))) if name in line]
        written = [(line["step"], pytest.approx(line[name], rel=1e-5)) for line in lines]
        assert [(event.step, event.value) for event in shown.Scalars(name)] == written


def test_a_run_writes_snapshots_of_held_out_samples_and_reports_them(finished: Finished) -> None:
    output = Place(str(finished.output))
    gallery, first, latest = (
        read_probe_set(output),
        read_snapshot(output, FIRST),
        read_snapshot(output, LATEST),
    )
    assert gallery and first and latest
    assert (first.step, latest.step) == (0, finished.result.steps)
    holdout = make_split(NUM_IMAGES, num_test=64, num_train=10_000, seed=0)
    assert gallery.held_out
    assert holdout.is_test(gallery.sample_id).all()
    assert len(first.embedding) == len(latest.embedding) == len(gallery.sample_id) > 20
    assert not np.array_equal(first.embedding, latest.embedding)
    text = write_report(str(finished.output)).read_text()
    assert f"Map at step {finished.result.steps}" in text
    assert f"{NUM_INVALID}</td>" in text


def test_an_epoch_has_one_step_per_full_batch(finished: Finished) -> None:
    lines = [line for line in read_metrics(Place(str(finished.output))) if "loss" in line]
    ids = np.arange(NUM_IMAGES - NUM_INVALID)  # invalid rows come last
    is_train = make_split(NUM_IMAGES, num_test=64, num_train=10_000, seed=0).is_train(ids)
    num_steps = int(is_train.sum()) // BATCH_SIZE
    assert (
        num_steps < len(ids) // BATCH_SIZE
    )  # otherwise a run on all rows would have the same number of steps
    assert [sum(line["epoch"] == epoch for line in lines) for epoch in (0, 1)] == [num_steps, num_steps]


def test_the_throughput_counts_all_workers(finished: Finished) -> None:
    lines = [line for line in read_metrics(Place(str(finished.output))) if "loss" in line]
    samples = sum(
        line["samples_per_second"] * (line["seconds"] - before["seconds"])
        for before, line in itertools.pairwise(lines)
    )
    assert samples == pytest.approx((len(lines) - 1) * BATCH_SIZE, rel=0.1)
    result = read_result(Place(str(finished.output)))
    assert result["samples_per_second"] == pytest.approx(
        len(lines) * BATCH_SIZE / result["seconds"], rel=0.01
    )


def test_the_encoder_loads_and_encodes(finished: Finished) -> None:
    encoder = raycl.load_encoder(str(finished.output))
    representation = encoder.encode(np.zeros((3, 16, 16, 1), np.uint8))
    assert representation.shape == (3, 16)
    assert not encoder.training


def test_an_unfinished_run_has_the_encoder_of_its_last_checkpoint(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = without_encoder(finished.output, tmp_path / "run")
    images = np.random.default_rng(0).integers(256, size=(3, 16, 16, 1), dtype=np.uint8)
    saved, restored = (raycl.load_encoder(str(each)).encode(images) for each in (finished.output, run))
    assert torch.equal(saved, restored)
    says = f"{run} has not finished: using its checkpoint after step {finished.result.steps}\n"
    assert capsys.readouterr().err == says


def test_latest_and_best_checkpoint_are_kept_and_the_best_was_evaluated(finished: Finished) -> None:
    lines = read_metrics(Place(str(finished.output)))
    evaluated = {line["step"]: line["knn_top1"] for line in lines if line.get("knn_top1") and line["step"]}
    best = max(evaluated, key=lambda step: evaluated[step])
    kept = {path.name for path in (finished.output / "checkpoints").glob("step-*")}
    assert kept >= {f"step-{step:08d}-evaluated" for step in (best, finished.result.steps)}
    assert len(kept) <= 3
    assert len([name for name in kept if not name.endswith("-evaluated")]) <= 1  # only the latest


def assert_equal_to(finished: Finished, output: Place) -> None:
    expected = Place(str(finished.output))
    whole, resumed = (
        safetensors.torch.load((place / "encoder.safetensors").read_bytes()) for place in (expected, output)
    )
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
    losses = [
        [(line["step"], line["loss"]) for line in read_metrics(place) if "loss" in line]
        for place in (expected, output)
    ]
    assert losses[0] == losses[1]
    for name in (FIRST, LATEST):
        portraits = [read_snapshot(place, name) for place in (expected, output)]
        assert portraits[0] and portraits[1]
        assert portraits[0].step == portraits[1].step
        assert np.array_equal(portraits[0].embedding, portraits[1].embedding)


def test_one_process_repeats_steps_of_the_run_without_ray(finished: Finished) -> None:
    lines = {line["step"]: line for line in read_metrics(Place(str(finished.output))) if "loss" in line}
    for step, starts_over in ((3, True), (finished.result.steps, False)):
        found = raycl.replay(finished.output, step=step)
        assert (found.checkpoint is None) == starts_over
        assert found.workers == lines[step]["workers"] == 2
        assert found.logged_loss == lines[step]["loss"]
        # Metrics have six digits, and one process adds in another order, which training amplifies.
        assert found.relative_difference is not None and found.relative_difference < 5e-4
        assert not found.notes


def test_a_run_is_certified_by_one_process_without_ray(finished: Finished, tmp_path: Path) -> None:
    certificate = raycl.certify(finished.output, steps=99)
    assert certificate.is_valid, str(certificate)
    assert all(check.passed for check in certificate.checks)
    assert certificate.steps == finished.result.steps
    assert [each.step for each in certificate.recomputed][:2] == [1, 2]
    assert {each.workers for each in certificate.recomputed} == {2}
    assert sum(epoch["drawn"] for epoch in certificate.epochs) == 64 * finished.result.steps
    assert certificate.chain == finished.result.chain
    changed = Path(shutil.copytree(finished.output, tmp_path / "run"))
    (changed / "encoder.safetensors").write_bytes((changed / "encoder.safetensors").read_bytes()[:-1] + b"x")
    failed = [check.name for check in raycl.certify(changed, steps=0).checks if not check.passed]
    assert failed == ["files"]


@pytest.fixture(scope="module")
def on_s3(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The finished run again, from S3 to S3; it loses a worker within an epoch and continues."""
    data, output = Place(f"s3://{BUCKET}/data/digits.parquet"), Place(f"s3://{BUCKET}/runs/first")
    data.write_bytes(finished.data.read_bytes())
    marker = tmp_path_factory.mktemp("local") / "died"
    # It crashes at step 8, after the checkpoint at step 5; neither is the end of an epoch.
    config = small_run(**{"encoder.kwargs": {"channels": 1, "die_at": 8, "marker": str(marker)}})
    raycl.train(config, data=data.uri, output=output.uri, quiet=True)
    # It resumed from the checkpoint at step 5, not from the start.
    assert int(marker.read_text()) == finished.result.steps - 5
    return output


def test_a_run_on_s3_that_loses_a_worker_equals_an_uninterrupted_local_run(
    on_s3: Place, finished: Finished
) -> None:
    assert read_result(on_s3)["status"] == "finished"
    assert_equal_to(finished, on_s3)
    certificate = raycl.certify(on_s3.uri, steps=99)
    assert certificate.is_valid, str(certificate)
    assert "starts of workers: 2" in certificate.checks[0].text
    assert raycl.load_encoder(on_s3.uri).spec.representation_dim == 16


def test_a_folder_of_images_on_s3_is_embedded_to_s3(on_s3: Place) -> None:
    files, labels = digit_files(40)
    for index, (content, label) in enumerate(zip(files, labels, strict=True)):
        (Place(f"s3://{BUCKET}/folder") / f"{label}" / f"{index:03}.png").write_bytes(content)
    for index in range(2):
        (Place(f"s3://{BUCKET}/folder") / "0" / f"broken{index}.png").write_bytes(b"not an image")
    folder, embedded = f"s3://{BUCKET}/folder", Place(f"s3://{BUCKET}/embedded.parquet")
    rows = raycl.embed(on_s3.uri, folder, embedded.uri, index="faiss", max_invalid_fraction=0.1, quiet=True)
    assert (rows.num_rows, rows.num_invalid) == (42, 2)
    filesystem, path = embedded.resolve()
    table = pq.read_table(path, filesystem=filesystem)
    assert sorted(table["label"].to_pylist()) == sorted(labels)
    assert [path.split("/")[-2] for path in table["path"].to_pylist()] == list(
        map(str, table["label"].to_pylist())
    )
    assert table["class"].to_pylist() == [str(label) for label in table["label"].to_pylist()]
    stored = np.frombuffer((embedded / "_index.faiss").read_bytes(), np.uint8)
    index = faiss.deserialize_index(stored)
    vectors = np.array(table["representation"].to_pylist(), np.float32)
    cosines, ids = index.search(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), 1)
    np.testing.assert_allclose(cosines, 1, atol=1e-5)
    assert ids[:, 0].tolist() == table["sample_id"].to_pylist()


@pytest.mark.drill
def test_a_failed_run_resumed_within_an_epoch_equals_an_uninterrupted_run(
    finished: Finished, tmp_path: Path
) -> None:
    output, marker = tmp_path / "killed", tmp_path / "died"
    arguments = {"channels": 1, "die_at": 8, "marker": str(marker)}
    config = small_run(**{"encoder.kwargs": arguments, "max_failures": 0})
    with pytest.raises(RunError):
        raycl.train(config, data=str(finished.data), output=str(output), quiet=True)
    assert marker.exists()
    assert read_result(Place(str(output)))["status"] == "failed"
    raycl.train(config, data=str(finished.data), output=str(output), resume=True, quiet=True)
    assert int(marker.read_text()) == finished.result.steps - 5
    assert_equal_to(finished, Place(str(output)))


@pytest.mark.drill
def test_a_truncated_list_of_checkpoints_loses_only_one_checkpoint(
    finished: Finished, tmp_path: Path
) -> None:
    output, marker = tmp_path / "cut", tmp_path / "died"
    arguments = {"channels": 1, "die_at": finished.result.steps, "marker": str(marker)}
    config = small_run(**{"encoder.kwargs": arguments, "max_failures": 0})
    with pytest.raises(RunError):
        raycl.train(config, data=str(finished.data), output=str(output), quiet=True)
    listed = output / "checkpoints" / CHECKPOINT_LIST
    last = json.loads(listed.read_text())["latest_checkpoint_result"]["metrics"]["step"]
    assert last > 5
    listed.write_text("")  # as if the controller was killed while writing
    raycl.train(config, data=str(finished.data), output=str(output), resume=True, quiet=True)
    made_again = int(marker.read_text())
    assert finished.result.steps - last < made_again < finished.result.steps
    for name, value in weights_of(finished.output).items():
        assert torch.equal(value, weights_of(output)[name]), name


@pytest.mark.drill
def test_a_run_that_stopped_within_an_epoch_resumes_from_there(finished: Finished, tmp_path: Path) -> None:
    def run(steps: int, output: Path, *, resume: bool = False) -> list[float]:
        config = raycl.override(
            small_run(),
            {
                "workers": 1,
                "stages.0.epochs": None,
                "stages.0.steps": steps,
                "stages.0.learning_rate_schedule": "constant",
                "stages.0.warmup_epochs": 0.0,
            },
        )
        raycl.train(config, data=str(finished.data), output=str(output), resume=resume, quiet=True)
        return [line["loss"] for line in read_metrics(Place(str(output))) if "loss" in line]

    run(7, tmp_path / "parts")
    took = wall_seconds(Place(str(tmp_path / "parts")))
    parts = run(12, tmp_path / "parts", resume=True)
    walls = [line["wall_seconds"] for line in read_metrics(Place(str(tmp_path / "parts"))) if "loss" in line]
    assert 0 < walls[6] <= took < walls[7]  # the time of the first seven steps counts, the time between not
    assert parts == run(12, tmp_path / "whole")
    whole, resumed = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.drill  # test_loop.py checks the weights of a worker without Ray
def test_weights_that_are_not_finite_are_never_saved(finished: Finished, tmp_path: Path) -> None:
    config = small_run(**{"workers": 1, "encoder.kwargs": {"channels": 1, "nan_gradient_at": 10}})
    with pytest.raises(NonFiniteLossError, match=r"not finite after step 10; .*\(step 9\) is kept: lower"):
        raycl.train(config, data=str(finished.data), output=str(tmp_path / "run"), quiet=True)
    kept = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert "step-00000009-evaluated" in kept
    assert not any("00010" in name for name in kept)


@dataclass(frozen=True)
class Failed:
    config: RunConfig
    output: Path
    error: NonFiniteLossError


# Six views of two sizes; the encoder passes each size once in a step.
CROPS: dict[str, Any] = {
    "augment.views": [{"count": 2}, {"count": 4, "size": 8, "crop_scale": [0.05, 0.4]}],
    "stages.0.chunk_size": 20,
}


@pytest.fixture(scope="module")
def failed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Failed:
    """Two workers whose loss becomes NaN at step 7, without dropout and with a small learning rate."""
    output = tmp_path_factory.mktemp("runs") / "failed"
    arguments = {"channels": 1, "dropout": 0.0, "nan_at": 2 * 6 + 1}
    rate = {"stages.0.learning_rate": 0.01, "stages.0.learning_rate_schedule": "constant"}
    config = small_run(**CROPS, **{"encoder.kwargs": arguments, **rate, "stages.0.warmup_epochs": 0.0})
    with pytest.raises(NonFiniteLossError) as caught:
        raycl.train(config, data=str(data), output=str(output), quiet=True)
    return Failed(config, output, caught.value)


def test_a_nan_loss_stops_the_run_and_reports_step_and_ids(failed: Failed) -> None:
    text = str(failed.error)
    assert "\n" not in text
    assert "nan at step 7" in text
    assert "sample ids" in text
    assert "last checkpoint (step 5) is kept" in text
    assert (failed.output / "checkpoints" / "step-00000005").exists()
    assert read_result(Place(str(failed.output)))["error"] == text


def test_one_worker_takes_the_same_steps_as_two_and_counts_all_views(
    failed: Failed, data: Path, tmp_path: Path
) -> None:
    # A stage with fewer workers than the run keeps its global batch.
    steps = {"stages.0.epochs": None, "stages.0.steps": 6, "stages.0.workers": 1, "stages.0.chunk_size": None}
    config = raycl.override(failed.config, steps)
    result = raycl.train(config, data=str(data), output=str(tmp_path / "run"), quiet=True)
    alone, together = (
        [line for line in read_metrics(Place(str(output))) if "loss" in line]
        for output in (tmp_path / "run", failed.output)
    )
    for line in (*alone, *together):
        assert line["views_per_second"] == pytest.approx(6 * line["samples_per_second"], rel=1e-4)
    assert result.views_per_second == pytest.approx(6 * result.samples_per_second)
    written = read_result(Place(str(tmp_path / "run")))["views_per_second"]
    assert written == pytest.approx(result.views_per_second, rel=1e-4)
    losses = [[line["loss"] for line in lines] for lines in (alone, together)]
    assert len(set(losses[0])) == 6
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# A stream expects to train on the invalid rows as well, which would fill a ninth batch in each epoch.
STREAMED = {
    "data.cache": "stream",
    "data.shuffle_buffer_size": 128,
    "stages.0.batch_size": 70,
    "checkpoints.interval_s": 10_000.0,
}


@pytest.fixture(scope="module")
def streamed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One uninterrupted run over a stream."""
    output = tmp_path_factory.mktemp("runs") / "streamed"
    with watch() as seen:
        result = raycl.train(small_run(**STREAMED), data=str(data), output=str(output), quiet=True)
    return Finished(data, output, result, seen)


def test_a_streamed_run_takes_as_many_steps_as_its_valid_rows_fill(streamed: Finished) -> None:
    holdout = make_split(NUM_IMAGES, num_test=64, num_train=10_000, seed=0)
    expected, sound = (
        int(holdout.is_train(np.arange(num)).sum()) // 70 for num in (NUM_IMAGES, NUM_IMAGES - NUM_INVALID)
    )
    assert sound == expected - 1
    assert (streamed.result.steps, streamed.result.epochs) == (2 * sound, 2)
    lines = [line for line in read_metrics(Place(str(streamed.output))) if "loss" in line]
    assert [line["epoch"] for line in lines] == [0] * sound + [1] * sound
    assert streamed.result.invalid_rows == {"not an image": NUM_INVALID}
    assert "knn_top1" in streamed.result.final


def test_a_streamed_run_is_not_resumed_in_memory(streamed: Finished) -> None:
    config = small_run(**{"data.cache": "materialize", "stages.0.batch_size": 70})
    with pytest.raises(ConfigError, match="were streamed and would be held in memory"):
        raycl.train(config, data=str(streamed.data), output=str(streamed.output), resume=True, quiet=True)


def test_one_process_reads_all_epochs_of_a_stream(streamed: Finished) -> None:
    assert len(set().union(*streamed.seen.readers)) == 1


def test_a_streamed_run_is_certified(streamed: Finished) -> None:
    certificate = raycl.certify(streamed.output, steps=99)
    assert certificate.is_valid, str(certificate)
    assert all(check.passed for check in certificate.checks)
    assert [each.step for each in certificate.recomputed][:2] == [1, 2]
    assert max(each.relative_difference for each in certificate.recomputed if not each.updates) < 1e-6
    assert sum(epoch["drawn"] for epoch in certificate.epochs) == 70 * streamed.result.steps
    assert {epoch["drawn_twice"] for epoch in certificate.epochs} == {0}


@pytest.mark.drill
def test_a_streamed_run_changes_its_workers_within_an_epoch(data: Path, tmp_path: Path) -> None:
    kwargs = {"channels": 1, "dropout": 0.0}  # each worker drops others
    dies = {"encoder.kwargs": {**kwargs, "die_at": 11, "marker": str(tmp_path / "died")}}

    def losses(output: str, **settings: Any) -> dict[int, float]:
        config = small_run(**STREAMED, **{"checkpoints.keep": 9, "encoder.kwargs": kwargs, **settings})
        is_resumed = (tmp_path / output).exists()
        raycl.train(config, data=str(data), output=str(tmp_path / output), resume=is_resumed, quiet=True)
        lines = read_metrics(Place(str(tmp_path / output)))
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    undisturbed = losses("undisturbed")
    with pytest.raises(RunError):
        losses("resized", max_failures=0, **dies)
    assert losses("resized", workers=1, **dies) == pytest.approx(undisturbed, rel=1e-4)
    lines = read_metrics(Place(str(tmp_path / "resized")))
    num_steps = {num: sum(line["workers"] == num for line in lines if "loss" in line) for num in (1, 2)}
    assert num_steps[2] > 8 > num_steps[1] > 0  # an epoch has eight steps
    certificate = raycl.certify(tmp_path / "resized", steps=99)
    assert certificate.is_valid, str(certificate)
    assert {each.workers for each in certificate.recomputed} == {1, 2}


@pytest.mark.drill
def test_a_streamed_run_that_loses_a_worker_equals_an_uninterrupted_run(
    streamed: Finished, tmp_path: Path
) -> None:
    marker, output = tmp_path / "died", tmp_path / "killed"
    arguments = {"encoder.kwargs": {"channels": 1, "die_at": 8, "marker": str(marker)}}
    config = small_run(**STREAMED, **arguments)
    raycl.train(config, data=str(streamed.data), output=str(output), quiet=True)
    assert int(marker.read_text()) == streamed.result.steps - 5
    resumed = weights_of(output)
    for name, value in weights_of(streamed.output).items():
        assert torch.equal(value, resumed[name]), name


def test_a_run_trains_with_a_users_own_dataset_and_network(tmp_path: Path) -> None:
    import ray

    from tests.cluster.networks import Small

    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (128, 12, 12, 3), np.uint8)
    pixels[7] = 0
    dataset = ray.data.from_items(
        [{"image": image, "label": ("even", "odd")[index % 2]} for index, image in enumerate(pixels)]
    )
    changed = {"data.channels": 3, "encoder.name": "resnet10", "encoder.kwargs": {}}
    settings = {**SMALL, **changed, "stages.0.epochs": 1, "workers": 1}
    output = str(tmp_path / "run")
    result = raycl.train(
        "simclr", dataset=dataset, encoder=Small(), output=output, settings=settings, quiet=True
    )
    assert result.steps == 1
    assert result.flat_images == 1
    assert raycl.config_from_yaml((tmp_path / "run" / "config.yaml").read_text()).data.image_size == 12
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*-evaluated")
    for run in (output, checkpoint):
        with pytest.raises(StorageError, match="network of your own; pass it as network="):
            raycl.load_encoder(run)
    assert json.loads((tmp_path / "run" / "data.json").read_text())["own_network"]
    loaded = raycl.load_encoder(output, network=Small())
    assert loaded.encode(pixels[:2]).shape == (2, 16)


def test_too_many_invalid_rows_stop_the_run_before_training(tmp_path: Path) -> None:
    path = write_digits(tmp_path / "digits.parquet", 200, broken=20)
    with pytest.raises(
        DataError, match=r"20 of 200 rows are invalid \(20 not an image; for example digits.parquet row 180"
    ):
        raycl.train(small_run(), data=str(path), output=str(tmp_path / "run"), quiet=True)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_an_encoder_of_the_wrong_shape_is_refused(data: Path, tmp_path: Path) -> None:
    config = small_run(
        **{"encoder.name": "tests.cluster.networks:flat", "encoder.kwargs": {}, "data.channels": 3}
    )
    with pytest.raises(ConfigError, match=r"must return \[batch, dim\]"):
        raycl.train(config, data=str(data), output=str(tmp_path / "run"), quiet=True)


def test_too_many_workers_for_the_cluster_are_refused(data: Path, tmp_path: Path) -> None:
    config = small_run(workers=64, cpus_per_worker=1.0)
    with pytest.raises(ConfigError, match="64 workers with 1 CPUs each .* the cluster has 4"):
        raycl.train(config, data=str(data), output=str(tmp_path / "run"), quiet=True)


def test_a_run_is_embedded_and_evaluated(finished: Finished, tmp_path: Path) -> None:
    embedded = tmp_path / "embedded.parquet"
    with in_this_process():  # on S3 by actors, above
        rows = raycl.embed(str(finished.output), str(finished.data), str(embedded), quiet=True)
    assert rows.num_invalid == NUM_INVALID
    table = pq.read_table(embedded)
    assert sorted(table["sample_id"].to_pylist()) == list(range(NUM_IMAGES - NUM_INVALID))
    assert len(table["representation"][0].as_py()) == 16
    evaluated = raycl.evaluate(
        "knn", run=str(finished.output), train=str(finished.data), test=str(finished.data), k=1, quiet=True
    )
    # Every test image is in the training set, so its nearest neighbor is itself.
    assert evaluated["top1"] == 1.0
    assert evaluated["baseline"] == {"pixels": 1.0}
    assert evaluated["num_train"] == evaluated["num_test"] == NUM_IMAGES - NUM_INVALID
    json.dumps(evaluated)
