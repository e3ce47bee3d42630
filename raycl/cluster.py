"""Ray itself: joining or starting a cluster, and what it has to offer."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

# Ray reads this when it is imported. It paces the end of a run and its checkpoints.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
# After a lost worker the others cannot leave its process group: Ray waits for them in vain, 30 s by default.
os.environ.setdefault("TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S", "5")

import pyarrow as pa
import ray
from ray.data import DataContext

from raycl.errors import ConfigError, RayclError, RunError
from raycl.gpus import check_gpus
from raycl.joining import enter


def connect_cluster(
    address: str | None = None, *, debug: bool = False, quiet_core: bool = False
) -> str | None:
    """Join the cluster at ``address``, the one this job runs in, or start one on this machine.

    ``quiet_core`` is that of ``enter``. Returns host and port of the dashboard of a cluster just joined, if it has one.

    Raises ``RunError`` if there is no cluster at the address.
    """
    dashboard = None
    if not ray.is_initialized():
        dashboard = enter(
            address or os.environ.get("RAY_ADDRESS") or "local", debug=debug, quiet_core=quiet_core
        )
    context = DataContext.get_current()
    context.enable_progress_bars = debug
    context.execution_options.preserve_order = True
    if not debug:
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        logging.getLogger("ray.train").setLevel(logging.ERROR)
    return dashboard


def check_resources(*, workers: int, cpus_per_worker: float, gpu: bool, spare_cpus: float) -> None:
    """Refuse a run that the cluster could never place, or whose workers would starve Ray Data.

    ``spare_cpus`` must be left for tasks that read while training goes on. Raises ``ConfigError``.
    """
    have = ray.cluster_resources()
    if gpu:
        check_gpus(workers, have.get("GPU", 0))
    need = workers * cpus_per_worker + spare_cpus
    if need > have.get("CPU", 0):
        raise ConfigError(
            f"{workers} workers with {cpus_per_worker:g} CPUs each and {spare_cpus:g} for reading data need {need:g} CPUs, "
            f"the cluster has {have.get('CPU', 0):g}; lower --workers, set cpus_per_worker, or set autoscaling=true if the cluster will grow"
        )


def cpus_for_a_worker(*, workers: int, spare_cpus: float) -> float:
    """Return one CPU, or less where the cluster must hold all workers and ``spare_cpus`` besides."""
    have = ray.cluster_resources().get("CPU", 1.0)
    # Ray counts in parts of a ten-thousandth; a tenth is enough to keep the sum below what is there.
    return 1.0 if have >= workers + spare_cpus else max(0.1, int(10 * (have - spare_cpus) / workers) / 10)


def crowding(workers: int) -> str | None:
    """Return one line where there are more workers than CPUs, None otherwise."""
    cpus = ray.cluster_resources().get("CPU", 0.0)
    if workers <= cpus:
        return None
    return (
        f"{workers} workers share {cpus:g} CPU{'' if cpus == 1 else 's'}, which makes each of them slower; "
        f"lower --workers to {max(1, int(cpus))}, or join a larger cluster by --address"
    )


def object_store_bytes() -> float:
    """Return the object store of the smallest node, in bytes."""
    return min(node["Resources"].get("object_store_memory", 0.0) for node in ray.nodes() if node["Alive"])


def fetch_tables(dataset: ray.data.Dataset) -> list[pa.Table]:
    """Execute a dataset and return its blocks, zero-copy where this node holds them."""
    refs: list[Any] = dataset.materialize().to_arrow_refs()
    return ray.get(refs)


def find_raycl_error(error: BaseException) -> RayclError | None:
    """Find raycl's own error inside those that Ray wraps around it."""
    seen: list[BaseException] = []
    todo: list[Any] = [error]
    while todo:
        each = todo.pop()
        if not isinstance(each, BaseException) or each in seen:
            continue
        seen.append(each)
        if isinstance(each, RayclError) and type(each).__module__ == RayclError.__module__:
            return each
        todo += [each.__cause__, getattr(each, "cause", None), getattr(each, "controller_failure", None)]
        todo += list(getattr(each, "worker_failures", {}).values())
    return None


@contextlib.contextmanager
def unwrap_ray_errors() -> Iterator[None]:
    """Let only raycl's errors out: those inside Ray's, or a ``RunError`` with the last line."""
    try:
        yield
    except RayclError as error:
        raise find_raycl_error(error) or error from error
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise find_raycl_error(error) or RunError(
            f"the run failed: {lines[-1]}; use --debug for the whole story"
        ) from error


if sys.platform == "win32":
    raise ConfigError("raycl runs on Linux and macOS, came Windows; use WSL")
