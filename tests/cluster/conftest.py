"""One local Ray for all tests of this folder in a process."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@pytest.fixture(scope="package")
def ray_cluster(s3_server: str) -> Iterator[None]:
    """Start a separate Ray with enough CPUs for two workers and the data tasks; it ends before the other tests.

    Its processes inherit this environment, so the S3 server must be started first.
    """
    import ray

    # The path of a socket is limited to 107 characters.
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


@contextmanager
def in_this_process() -> Iterator[None]:
    """Embed or evaluate a small set as if no Ray ran: each actor would import torch first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray.is_initialized", lambda: False)
        yield
