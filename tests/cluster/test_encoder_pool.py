"""A pool of encoders in actors of Ray."""

import time
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig

from raycl.config.schema import PoolConfig
from raycl.training.controller import RayTrainer
from raycl.training.encoder_pool import start_pool
from tests.cluster.actors import Scaling
from tests.cluster.faults import kill_process, processes, wait_until

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_a_pool_loads_new_weights_replaces_a_killed_encoder_and_ends_with_its_context() -> None:
    rows = np.arange(20_000.0)[:, None]
    with start_pool(Scaling, PoolConfig(cpus_per_actor=0.1), print, actors=(2, 2)) as pool:
        attempt = pool.begin()
        ray.get(pool.publish({"weight": np.array([3.0])}, step=4, attempt=attempt))
        wait_until(lambda: ray.get(pool.actor.num_encoders.remote()) == 2)
        first = pool.encode(rows).encoded
        assert first is not None and first.step == 4
        np.testing.assert_array_equal(first.embeddings[:, :1], 3 * rows)
        ray.get(pool.publish({"weight": np.array([5.0])}, step=6, attempt=attempt))
        requests = [pool.encode(rows, seconds=0.3) for _ in range(4)]
        killed = kill_process("ray::EncoderActor.encode")
        for request in requests:
            assert request.encoded is not None
            assert request.encoded.step == 6
            np.testing.assert_array_equal(request.encoded.embeddings[:, :1], 5 * rows)
            assert request.encoded.embeddings[0, 1] != killed
        wait_until(lambda: ray.get(pool.actor.num_encoders.remote()) == 2)
        ray.get(pool.actor.release.remote())
        assert pool.encode(rows).encoded is None
    wait_until(lambda: not processes(("ray::EncoderActor", "ray::PoolActor")))


def test_a_pool_is_released_while_thousands_of_requests_wait_for_its_encoder() -> None:
    with start_pool(Scaling, PoolConfig(cpus_per_actor=0.1), print, actors=(1, 1)) as pool:
        attempt = pool.begin()
        ray.get(pool.publish({"weight": np.array([3.0])}, step=4, attempt=attempt))
        wait_until(lambda: ray.get(pool.actor.num_encoders.remote()) == 1)
        requests = [pool.encode(np.ones((1, 1)), seconds=100.0) for _ in range(1_500)]
        ray.get(pool.actor.release.remote(), timeout=30.0)
        assert all(each.encoded is None for each in requests)


def test_a_group_of_workers_starts_on_the_cpus_of_a_pool_that_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "20")
    with start_pool(Scaling, PoolConfig(cpus_per_actor=1.5), print, actors=(2, 2)) as pool:
        attempt = pool.begin()
        ray.get(pool.publish({"weight": np.array([3.0])}, step=4, attempt=attempt))
        wait_until(lambda: ray.get(pool.actor.num_encoders.remote()) == 2)
        trainer = RayTrainer(
            lambda: 1 + 1,
            began=time.time(),
            pools=[pool.actor],
            scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 2}),
            run_config=RunConfig(
                name="run",
                storage_path=str(tmp_path),
                failure_config=FailureConfig(controller_failure_limit=0),
            ),
        )
        assert trainer.fit().return_value == 2
        assert ray.get(pool.actor.num_encoders.remote()) == 0
        attempt = pool.begin()
        ray.get(pool.publish({"weight": np.array([3.0])}, step=8, attempt=attempt))
        wait_until(lambda: ray.get(pool.actor.num_encoders.remote()) == 2)
