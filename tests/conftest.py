"""One local Ray for the whole session; its environment is set before Ray is imported anywhere."""

import os
import tempfile

os.environ["RAY_AUTH_MODE"] = "disabled"  # otherwise Ray writes a token into the home folder
os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
os.environ["RAY_TRAIN_METRICS_ENABLED"] = "0"
os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
    os.environ.pop(name, None)

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Start a Ray of the tests' own, with room for two workers and the tasks that read."""
    import ray

    # A socket's path may have 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="rcl", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            _temp_dir=folder,
            object_store_memory=300 * 2**20,
            log_to_driver=False,
            logging_level="ERROR",
        )
        yield
        ray.shutdown()
