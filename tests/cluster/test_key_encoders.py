"""A run whose keys are encoded by a pool of actors."""

import threading
from pathlib import Path

import pytest

import raycl
from raycl.config.overrides import override
from raycl.records import read_metrics
from raycl.storage import Place
from tests.cluster.faults import kill_process, processes, wait_until
from tests.images import write_digits

pytestmark = pytest.mark.usefixtures("ray_cluster")

ENCODING, MAX_AGE = "ray::EncoderActor.encode", 9
NUM_STEPS = 400


@pytest.mark.drill
def test_a_run_loses_a_key_encoder_and_its_workers_and_trains_to_the_end_with_young_keys(
    tmp_path: Path,
) -> None:
    data, hurry = write_digits(tmp_path / "data.parquet", 360), tmp_path / "hurry"
    settings = {
        "cpus_per_worker": 0.5,
        "data.channels": 1,
        "encoder.name": "tests.cluster.networks:slow",
        "encoder.kwargs": {"channels": 1, "marker": str(hurry), "seconds": 0.3},
        "momentum_encoder.location": "actors",
        "momentum_encoder.actors": 2,
        "momentum_encoder.cpus_per_actor": 0.5,
        "momentum_encoder.max_age": MAX_AGE,
        "negatives.capacity": 128,
        "stages.0.epochs": None,
        "stages.0.steps": NUM_STEPS,
        "stages.0.batch_size": 32,
        "batchnorm_groups": 4,
        "checkpoints.every_steps": 5,
        "evaluation.every_epochs": 0,
        "log_every_steps": 1,
    }
    config = override(raycl.recipe("moco_v2", image_size=16), settings)
    output = Place(str(tmp_path / "run"))
    used: list[int] = []

    def pooled() -> list[dict[str, float]]:
        lines = read_metrics(output) if (output / "metrics.jsonl").exists() else []
        return [line for line in lines if line.get("own_keys_fraction") == 0.0]

    def lose() -> None:
        wait_until(pooled)
        killed = kill_process(ENCODING)
        wait_until(lambda: len(set(processes("ray::EncoderActor")) - {killed}) == 2)
        used.append(len(pooled()))
        kill_process("ray::RayTrainWorker")
        wait_until(lambda: len(pooled()) > used[0] + 10)
        hurry.touch()

    thread = threading.Thread(target=lose, daemon=True)
    thread.start()
    result = raycl.train(config, data=str(data), output=output.uri, quiet=True)
    hurry.touch()
    thread.join(60)

    lines = [line for line in read_metrics(output) if "loss" in line]
    assert used
    assert result.steps == NUM_STEPS
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert all(0 <= line["key_age_mean"] <= line["key_age_max"] <= MAX_AGE for line in lines)
    assert {line["own_keys_fraction"] for line in lines} == {0.0, 1.0}
    assert {line["key_age_max"] for line in lines if line["own_keys_fraction"] == 1.0} == {0.0}
    assert max(line["key_age_max"] for line in lines) >= 2
    assert max(line["key_encoders"] for line in lines) == 2.0
    wait_until(lambda: not processes(("ray::EncoderActor", "ray::PoolActor")))
