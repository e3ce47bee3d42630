"""Connection to Ray: start or join a cluster, read its resources, and unwrap its errors.

A question to a bank imports this module, so it imports no more of Ray than it needs.
"""

import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Ray reads these when it is imported. The interval delays the end of a run and its checkpoints.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
# When a worker is lost, the others cannot leave its process group: Ray waits in vain, 30 s by default.
os.environ.setdefault("TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S", "5")

import ray
from ray import exceptions
from ray._private import ray_constants, services, utils, worker
from ray._private.authentication import authentication_token_setup as tokens
from ray._private.node import Node
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycl.arguments import check_type
from raycl.errors import ConfigError, RayclError, RunError, first_line, last_line
from raycl.gpus import check_gpu, check_gpus, starts_here

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data import Dataset

_PREEMPTION_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"  # importing Ray Train's constant takes seconds
# Of a Ray that this process starts. Ray Train's controller would start an actor that watches the only node. Ray's
# processes often connect to its object store before that listens, and would try again after a second.
_OF_OWN_RAY = {
    _PREEMPTION_WATCHER: "0",
    "RAY_raylet_client_connect_timeout_milliseconds": "50",
    "RAY_raylet_client_num_connect_attempts": "200",
}
_CORE_LOG_LEVEL = "RAY_BACKEND_LOG_LEVEL"
_CONNECT_TIMEOUT_S = 5.0
_LOOPBACK = "127.0.0.1:"
_HOST_AND_PORT = re.compile(r"[^/]+:[0-9]+")
NEW_NODE_S = 900.0  # limit for a new node to start, including its installation
_ADD_CPUS = "add a node with CPUs"
_OR_GROW = "or set autoscaling=true if the cluster will grow"
_own_node: Node | None = None  # of the Ray that this module started last
_START_TIMEOUT = "timed out during startup"  # Ray raises a plain Exception with this text after 30 s


def connect_cluster(
    address: str | None = None, *, debug: bool = False, quiet_core: bool = False
) -> str | None:
    """Join the cluster at ``address``, the one this job runs in, or start one on this machine.

    ``quiet_core`` is passed to ``init_ray``. Returns host and port of the dashboard of a cluster just
    joined, if it has one. Raises ``RunError`` if no cluster answers at the address.
    """
    dashboard = None
    if not ray.is_initialized():
        where = address or os.environ.get("RAY_ADDRESS") or "local"
        dashboard = init_ray(where, debug=debug, quiet_core=quiet_core)
    from ray.data import DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = debug
    context.execution_options.preserve_order = True
    if not debug:
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        logging.getLogger("ray.train").setLevel(logging.ERROR)
    return dashboard


def connect(address: str | None = None, *, debug: bool = False) -> bool:
    """Join the Ray at ``address``, or in RAY_ADDRESS, or else the one on this machine; never start one.

    Returns False, and does nothing, if this process has joined a Ray already.

    Raises:
        ConfigError: No Ray runs on this machine, or several do, or the address is invalid.
        RunError: The Ray cannot be reached or joined.
    """
    check_type("address", address, str, optional=True)
    if ray.is_initialized():
        return False
    wanted = _numeric(address or os.environ.get("RAY_ADDRESS") or "auto")
    here = _running_here()
    if wanted in ("auto", "local"):
        where = require_single(here)
    else:
        where = wanted if wanted in here else _reachable(wanted)
    if where in here:
        _use_own_token(debug=debug)
    init_ray(where, debug=debug)
    return True


def ambiguous_rays(address: str | None = None) -> list[str]:
    """Return the Rays among which ``connect`` cannot choose; none if it can."""
    wanted = address or os.environ.get("RAY_ADDRESS") or "auto"
    here = [] if ray.is_initialized() or wanted not in ("auto", "local") else sorted(_running_here())
    return here if len(here) > 1 else []


def init_ray(address: str, *, debug: bool = False, quiet_core: bool = False) -> str | None:
    """Join the cluster at ``address``, or start one on this machine if it is ``local``.

    A cluster started here listens on the loopback only, and asks for this user's token, which is used to join
    it. ``quiet_core`` keeps the log of Ray's core off stderr, for short commands: it would say why Ray ended a process.
    Returns host and port of the cluster's dashboard, if it has one. Raises ``RunError``.
    """
    global _own_node
    if sys.platform == "win32":
        raise ConfigError("raycl runs on Linux and macOS, came Windows; use WSL")
    address = _numeric(address)
    if address == "local":
        _keep_token_private()
    elif _HOST_AND_PORT.fullmatch(address):
        _check_that_it_answers(address)
    defaults = _OF_OWN_RAY if address == "local" else {}
    is_on_loopback = address.startswith(_LOOPBACK) and address in _running_here()
    if is_on_loopback:  # another process started it
        _use_own_token(debug=debug)
    try:
        with contextlib.ExitStack() as stack:
            if address == "local" or is_on_loopback:
                # Ray replaces the loopback by the network's address, even if asked for the loopback, unless
                # this constant says that this machine does not belong to a cluster.
                stack.enter_context(_replaced(ray_constants, "ENABLE_RAY_CLUSTER", False))
            stack.enter_context(_environment(defaults))
            if address == "local":
                # Without a dashboard and an autoscaler these processes serve nothing, and Ray waits for the first.
                stack.enter_context(_replaced(Node, "start_api_server", _name_no_server))
                stack.enter_context(_replaced(Node, "start_monitor", lambda _: None))
                if not debug:  # it brings the logs of all processes to this one
                    stack.enter_context(_replaced(Node, "start_log_monitor", lambda _: None))
            if quiet_core and not debug:
                stack.enter_context(_replaced(worker, "connect", _quietly(worker.connect)))
            stack.enter_context(_keeping_sigterm())
            joined = _start_or_join(address, debug=debug)
            _own_node = worker._global_node if address == "local" else None
    except (ConnectionError, RuntimeError, ValueError, exceptions.AuthenticationError) as error:
        needs_token = "AuthenticationError" in f"{error!r} {error.__cause__}"
        advice = (
            "it asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN where ~/.ray/auth_token is not its own"
            if needs_token
            else "check --address"
        )
        raise RunError(f"cannot join a Ray cluster at {address!r}: {first_line(error)}; {advice}") from error
    return joined.dashboard_url or None


def prestart_ray(address: str | None, *, debug: bool = False) -> None:
    """Start a Ray on this machine, if one will be, while a thread imports torch and torchvision: each takes seconds.

    Ray starts in this thread, because its processes end with the thread that started them. Raises ``RunError``.
    """
    if not starts_here(address):
        return
    with ThreadPoolExecutor(1) as executor:
        importing = executor.submit(import_module, "raycl.models.vision")
        init_ray("local", debug=debug)
        importing.result()


def is_own_ray() -> bool:
    """Whether raycl has started the Ray that this process is connected to."""
    return ray.is_initialized() and _own_node is not None and worker._global_node is _own_node


def require_single(addresses: Collection[str]) -> str:
    """Return the only Ray of a machine; raises ``ConfigError`` if there are none or several."""
    if not addresses:
        raise ConfigError(
            "no Ray runs on this machine; start `raycl train` first, or give --address HOST:PORT "
            "on a machine of the cluster"
        )
    if len(addresses) > 1:
        raise ConfigError(
            f"{len(addresses)} Rays run on this machine: {', '.join(sorted(addresses))}; say which by --address HOST:PORT"
        )
    return next(iter(addresses))


def check_resources(
    *, workers: int, cpus_per_worker: float, gpu: bool, spare_cpus: float, remedies: Sequence[str] = ()
) -> None:
    """Refuse a run that the cluster could never place, or whose workers would starve Ray Data.

    ``spare_cpus`` must be left for data tasks and pools of encoders during training; ``remedies`` lower them. Raises
    ``ConfigError``.
    """
    have = ray.cluster_resources()
    if gpu:
        check_gpus(workers, have.get("GPU", 0))
    need, num_cpus = workers * cpus_per_worker + spare_cpus, have.get("CPU", 0.0)
    if need > num_cpus:
        for_workers = ["lower --workers", "set cpus_per_worker"] if spare_cpus < num_cpus else []
        ways = [*for_workers, *remedies] if num_cpus else [_ADD_CPUS]
        raise ConfigError(
            f"{workers} workers with {cpus_per_worker:g} CPUs each and {spare_cpus:g} for other tasks need {need:g} CPUs, "
            f"the cluster has {num_cpus:g}; {', '.join(ways)}, {_OR_GROW}"
        )


def wait_for_gpu(timeout_s: float = NEW_NODE_S) -> None:
    """Wait until the cluster has a GPU; the request makes an autoscaler start a node.

    Prints a line if there is none yet. Raises ``ConfigError`` if none comes in time.
    """
    check_gpu(float(_comes("GPU", timeout_s)))


def wait_for_cpu() -> None:
    """Wait until the cluster has a CPU, as :func:`wait_for_gpu` does for a GPU."""
    if not _comes("CPU", NEW_NODE_S):
        raise ConfigError(
            f"the cluster has no CPU, and none came in {NEW_NODE_S / 60:g} minutes; check its autoscaler, or join another "
            "cluster"
        )


def require_cpu(*, autoscaling: bool) -> None:
    """Wait for the first CPU of a cluster that grows; raise ``ConfigError`` if another one has none to read data."""
    if autoscaling:
        wait_for_cpu()
    elif not ray.cluster_resources().get("CPU"):
        raise ConfigError(f"the cluster has no CPU; {_ADD_CPUS}, {_OR_GROW}")


def _comes(kind: str, timeout_s: float) -> bool:
    """Whether the cluster has a CPU or a GPU, at the latest after the timeout."""
    if ray.cluster_resources().get(kind, 0) >= 1:
        return True
    if timeout_s:
        print(
            f"the cluster has no {kind} yet; waiting up to {timeout_s / 60:g} minutes for one",
            file=sys.stderr,
        )
    request = placement_group([{kind: 1}])
    try:
        return bool(request.wait(timeout_s))
    finally:
        remove_placement_group(request)


def cpus_for_a_worker(*, workers: int, spare_cpus: float) -> float:
    """Return one CPU, or less if the cluster could not hold all workers and ``spare_cpus`` otherwise."""
    have = ray.cluster_resources().get("CPU", 1.0)
    if have >= workers + spare_cpus:
        return 1.0
    # Sixteenths are exact in binary: from a sum of three times 0.3, Ray Train takes two workers' CPUs.
    return max(1 / 16, int(16 * (have - spare_cpus) / workers) / 16)


def crowding(workers: int) -> str | None:
    """Return a warning if there are more workers than CPUs, None otherwise."""
    cpus = ray.cluster_resources().get("CPU", 0.0)
    if workers <= cpus:
        return None
    return (
        f"{workers} workers share {cpus:g} CPU{'' if cpus == 1 else 's'}, which makes each of them slower; "
        f"lower --workers to {max(1, int(cpus))}, or join a larger cluster by --address"
    )


def helper_actor(kind: type, **options: Any) -> Any:
    """Return the class of an actor that takes no CPU and stays on this node; ``options`` are Ray's.

    The driver uses it: no autoscaler removes its node during a run.
    """
    here: Any = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=here, **options)(kind)


def kill_actors(*actors: Any) -> None:
    """Kill actors at the end of their use; if Ray is gone, so are they, and the error that ended the use is not replaced."""
    for actor in actors:
        with contextlib.suppress(exceptions.RayError):
            ray.kill(actor)


def object_store_bytes() -> float:
    """Return the object store of the smallest node, in bytes."""
    return min(node["Resources"].get("object_store_memory", 0.0) for node in ray.nodes() if node["Alive"])


def fetch_tables(dataset: "Dataset") -> "list[pa.Table]":
    """Execute a dataset and return its blocks, zero-copy where this node holds them."""
    references: Any = dataset.materialize().to_arrow_refs()  # Ray names the type of a reference twice
    return ray.get(references)


def find_raycl_error(error: BaseException) -> RayclError | None:
    """Return raycl's own error among those that Ray wraps around it."""
    seen: list[Any] = []
    todo: list[Any] = [error]
    while todo:
        each = todo.pop()
        if each is None or each in seen:
            continue
        seen.append(each)
        if isinstance(each, RayclError) and type(each).__module__ == RayclError.__module__:
            return each
        todo += [getattr(each, name, None) for name in ("__cause__", "cause", "controller_failure")]
        todo += getattr(each, "worker_failures", {}).values()
    return None


def cause_of(error: Exception) -> str:
    """Return the line of an error of Ray's that names its cause: the last one if code of an actor raised it."""
    is_raised = isinstance(error, exceptions.RayTaskError) or (
        isinstance(error, exceptions.RayActorError) and error.actor_init_failed
    )
    return last_line(error) if is_raised else first_line(error)


@contextlib.contextmanager
def unwrap_ray_errors() -> Iterator[None]:
    """Raise raycl's own errors instead of Ray's around them; others as a ``RunError`` with their last line."""
    try:
        yield
    except RayclError as error:
        raise find_raycl_error(error) or error from error
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise find_raycl_error(error) or RunError(
            f"the run failed: {lines[-1]}; use --debug for the traceback"
        ) from error


@contextlib.contextmanager
def without_stderr() -> Iterator[None]:
    """Discard everything that this process writes to stderr, Ray's core included."""
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except OSError:  # a process without stderr
        yield
        return
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _start_or_join(address: str, *, debug: bool, retries: int = 1) -> Any:
    """Call ``ray.init``; a start that took Ray too long is retried."""
    try:
        return ray.init(
            address=address,
            log_to_driver=debug,
            logging_level=logging.INFO if debug else logging.ERROR,
            include_dashboard=False if address == "local" else None,
        )
    except Exception as error:
        if _START_TIMEOUT not in str(error):
            raise
        _kill_half_started(error)
        if retries == 0:
            raise RunError(
                "Ray did not start in time, twice: this machine is too busy; end other processes on it, "
                "or join a running Ray by --address HOST:PORT"
            ) from error
    print("raycl: Ray did not start in time on this busy machine; retrying once", file=sys.stderr, flush=True)
    return _start_or_join(address, debug=debug, retries=retries - 1)


def _name_no_server(node: Node, **_: object) -> None:
    """Give Ray's agent an address, which it would otherwise look for every second, with a line in its log."""
    key, namespace = ray_constants.DASHBOARD_ADDRESS.encode(), ray_constants.KV_NAMESPACE_DASHBOARD
    client: Any = node.get_gcs_client()
    client.internal_kv_put(key, b"127.0.0.1:0", True, namespace)


def _kill_half_started(error: BaseException) -> None:
    """Kill the processes of a Ray that failed to start: Ray forgets them, and they would keep the machine busy."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(started := frame.f_locals.get("self"), Node):
            started.kill_all_processes(check_alive=False, allow_graceful=False)
    ray.shutdown()


def _running_here() -> frozenset[str]:
    """Return the addresses of all clusters that have a node on this machine."""
    # ray.init writes its address nowhere: only the list of processes has it.
    find: Any = services.find_gcs_addresses
    find.cache_clear()
    return find()


def _numeric(address: str) -> str:
    """Return an address with the loopback's number instead of its name, as Ray's processes have it."""
    return _LOOPBACK + address.removeprefix("localhost:") if address.startswith("localhost:") else address


def _reachable(address: str) -> str:
    """Return the address as Ray knows it, if anything listens there."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise ConfigError(f"{address!r} is not the address of a Ray; give HOST:PORT of its head")
    _check_that_it_answers(address)
    return services.canonicalize_bootstrap_address(address) or address


def _check_that_it_answers(address: str) -> None:
    """Raise ``RunError`` if nothing listens there: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise RunError(
            f"nothing answers at {address}: {first_line(error)}; check --address and whether that Ray still runs"
        ) from error


@contextlib.contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set these variables unless they are set; processes of Ray that start within inherit them."""
    added = defaults.keys() - os.environ.keys()
    os.environ.update({name: defaults[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of one of Ray's modules."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _quietly(connect_worker: Any) -> Any:
    """Keep the log of Ray's core in this process off stderr, such as a note on each pool of actors."""

    def connect(*arguments: Any, **options: Any) -> Any:
        # Set for this call only: the cluster's own processes would inherit the level. The core
        # writes to stderr that it was given one.
        with _environment({_CORE_LOG_LEVEL: "fatal"}), without_stderr():
            return connect_worker(*arguments, **options)

    return connect


@contextlib.contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Keep the handler that this process has for SIGTERM: Ray replaces it by one that exits silently."""
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        with _replaced(utils, "set_sigterm_handler", lambda _: None):
            yield
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray's core has put its own beneath Python's


def _use_own_token(*, debug: bool) -> None:
    """Join a Ray of this machine with this user's token, unless RAY_AUTH_MODE is set.

    A Ray started by ``ray.init`` asks for it. Ray uses it for the cluster that it finds itself, but not for a
    given address.
    """
    if not debug:
        logging.getLogger(tokens.__name__).setLevel(logging.ERROR)
    tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _keep_token_private() -> None:
    """Make the token readable by this user only: Ray itself leaves that to the umask."""
    is_elsewhere = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if is_elsewhere or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    place = Path.home() / ".ray" / "auth_token"
    with contextlib.suppress(OSError):  # Ray reports problems with the home folder
        if place.exists():
            place.chmod(0o600)
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
