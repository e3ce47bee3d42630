"""One S3 server for each process; the environment is set before Ray is imported."""

import gc
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # waiting threads yield their core to other processes
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its waiting threads never yield: a small fit takes 12 s, not 0.2 s
os.environ["RAY_AUTH_MODE"] = "disabled"  # otherwise Ray writes a token to the home folder
os.environ["RAY_DATA_DEFAULT_MIN_PARALLELISM"] = "8"  # otherwise 200 blocks, each with a task
# Otherwise idle workers end after a second, and each data set starts new ones.
os.environ["RAY_idle_worker_killing_time_threshold_ms"] = "60000"  # noqa: SIM112
os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
os.environ["TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S"] = "1"
os.environ["RAY_TRAIN_METRICS_ENABLED"] = "0"
os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # otherwise a call after the end of a cluster starts another one
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # otherwise `uv run pytest` starts every worker through uv
os.environ["RAYCL_TRUSTED"] = "tests"  # contains the networks that test runs import
for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
    os.environ.pop(name, None)

gc.disable()  # until the tests are collected: it would take half of that time

import hypothesis
import pytest

from tests.ports import free_ports

# An example may take long on a busy machine.
hypothesis.settings.register_profile("raycl", deadline=None)
hypothesis.settings.load_profile("raycl")

BUCKET = "raycl-test"
TESTS = Path(__file__).parent
CORE = (  # the mathematics of a step, the longest first; `pytest -n 2 -m core` takes about a minute
    "test_plain_steps.py",
    "workers/test_step.py",
    "workers/test_objectives.py",
    "workers/test_batchnorm.py",
    "test_bidirectional.py",
    "test_accumulation.py",
    "test_cures.py",
    "test_epochs.py",
    "test_every_loss.py",
    "test_hinge.py",
    "test_info_nce.py",
    "test_momentum.py",
    "test_nce.py",
    "test_nt_xent.py",
    "test_optim.py",
    "test_order.py",
    "test_stage_plan.py",
    "test_siglip.py",
    "test_stores.py",
    "test_supcon.py",
    "test_training_stores.py",
    "test_views.py",
    "workers/test_shuffle.py",
)
CORE_PATHS = [TESTS / name for name in CORE]


def pytest_configure(config: pytest.Config) -> None:
    """With ``pytest -n``, give each process its own share of the cores."""
    if hasattr(config, "workerinput"):
        import torch

        torch.set_num_threads(1)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no other tests than the core tests with ``-m core``."""
    is_other = collection_path.name.startswith("test_") and collection_path not in CORE_PATHS
    return True if config.option.markexpr == "core" and is_other else None


def pytest_collection_finish() -> None:
    """Leave out what the modules of the tests hold, which stays, whenever garbage is collected."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Mark the core tests, and with ``-m core`` begin with the longest files."""
    assert all(path.exists() for path in CORE_PATHS), "CORE names a file that does not exist"
    for item in items:
        # Steps in chunks are compared with whole ones by workers/test_step.py too, in half the time.
        in_chunks = item.path.name == "test_plain_steps.py" and "chunks" in item.name
        if item.path in CORE_PATHS and not in_chunks:
            item.add_marker("core")
    if config.option.markexpr == "core":
        places = {path: place for place, path in enumerate(CORE_PATHS)}
        items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``pytest -n``, run each file in one process, in the order of their names: those that need Ray are first."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Serve S3 on loopback with one empty bucket; clients find it through the usual AWS variables."""
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    os.environ |= {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(url)
        with urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT")):
            yield url
    finally:
        server.terminate()
        server.wait(10)


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Restore the signal handlers after a command that runs in this process."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    yield
    for each, handler in handlers.items():
        signal.signal(each, handler)


@pytest.fixture(autouse=True)
def no_ray_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Report the test that leaves a Ray running, which later tests in its process would join."""
    yield
    ray = sys.modules.get("ray")
    is_left = ray is not None and ray.is_initialized() and request.path.parent.name != "cluster"
    assert not is_left, "this test has left a Ray running"


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread: synchronizing threads costs more than computing on such small tensors."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def process_settings() -> Iterator[None]:
    """Restore the threads and the matrix products of torch, which ``prepare_process`` sets."""
    import torch

    products = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before, num_threads = products.fp32_precision, torch.get_num_threads()
    yield
    products.fp32_precision = before
    torch.set_num_threads(num_threads)


def _wait_for(url: str) -> None:
    for _ in range(300):
        try:
            with urllib.request.urlopen(url):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    raise TimeoutError(f"no S3 server at {url}")
