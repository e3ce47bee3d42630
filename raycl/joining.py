"""Joining Ray with as little of it imported as a short question can afford."""

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
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

# Ray reads this when it is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray import exceptions
from ray._private import ray_constants, services, utils, worker
from ray._private.authentication import authentication_token_setup as tokens
from ray._private.node import Node

from raycl.errors import ConfigError, RunError, first_line

_WATCHES = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"  # Ray Train's constant would cost its import
_CORE_LEVEL = "RAY_BACKEND_LOG_LEVEL"
_PATIENCE_S = 5.0
_LOOPBACK = "127.0.0.1:"
_HOST_AND_PORT = re.compile(r"[^/]+:[0-9]+")
_TOO_SLOW = "timed out during startup"  # Ray raises a plain Exception with this text after 30 s


def enter(address: str, *, debug: bool = False, quiet_core: bool = False) -> str | None:
    """Join the cluster at ``address``, or start one on this machine if it is ``local``.

    One that is started listens on the loopback alone, and asks for this user's token. ``quiet_core`` keeps the
    log of Ray's core off stderr, which would say why Ray ended a process: for short commands. Returns host and
    port of the cluster's dashboard, if it has one. Raises ``RunError``.
    """
    address = _numeric(address)
    if address == "local":
        _keep_token_private()
    elif _HOST_AND_PORT.fullmatch(address):
        _check_that_it_answers(address)
    # Ray Train's controller inherits it, and would start an actor that watches the only node.
    defaults = {_WATCHES: "0"} if address == "local" else {}
    try:
        with (
            _on_the_loopback() if _is_on_loopback(address) else contextlib.nullcontext(),
            _environment(defaults),
            _quiet_core() if quiet_core and not debug else contextlib.nullcontext(),
            _keeping_sigterm(),
        ):
            joined = _start_or_join(address, debug=debug)
    except (ConnectionError, RuntimeError, ValueError, exceptions.AuthenticationError) as error:
        raise RunError(
            f"cannot join a Ray cluster at {address!r}: {first_line(error)}; {_advice(error)}"
        ) from error
    return joined.dashboard_url or None


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
        if _TOO_SLOW not in str(error):
            raise
        _end_half_started(error)
        if retries == 0:
            raise RunError(
                "Ray did not start in time, twice: this machine is too busy; end other processes on it, "
                "or join a running Ray by --address HOST:PORT"
            ) from error
    print("raycl: Ray did not start in time on this busy machine; retrying once", file=sys.stderr, flush=True)
    return _start_or_join(address, debug=debug, retries=retries - 1)


def _end_half_started(error: BaseException) -> None:
    """End the processes of a Ray that failed to start: Ray forgets them, and they would keep the machine busy."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(started := frame.f_locals.get("self"), Node):
            started.kill_all_processes(check_alive=False, allow_graceful=False)
    ray.shutdown()


def prestart_ray(address: str | None, *, debug: bool = False) -> None:
    """Start a Ray on this machine, if it is to be one, while a thread imports torch: each takes seconds.

    Not the other way round: Ray's processes would end with the thread that started them. Raises ``RunError``.
    """
    if ray.is_initialized() or (address or os.environ.get("RAY_ADDRESS") or "local") != "local":
        return
    with ThreadPoolExecutor(1) as beside:
        importing = beside.submit(import_module, "torchvision")
        enter("local", debug=debug)
        importing.result()


def join_running(address: str | None = None, *, debug: bool = False) -> bool:
    """Join the Ray at ``address``, or in RAY_ADDRESS, or else the one on this machine; never start one.

    Returns False, and does nothing, if this process has joined a Ray already.

    Raises:
        ConfigError: No Ray runs on this machine, or several do, or the address is none.
        RunError: The Ray cannot be reached or joined.
    """
    if ray.is_initialized():
        return False
    wanted = _numeric(address or os.environ.get("RAY_ADDRESS") or "auto")
    here = _running_here()
    if wanted in ("auto", "local"):
        where = require_single(here)
    else:
        where = wanted if wanted in here else _reachable(wanted)
    if where in here:
        _bring_token(debug=debug)
    enter(where, debug=debug)
    return True


def require_single(addresses: Collection[str]) -> str:
    """Return the one Ray of a machine; raises ``ConfigError`` if there are none or several."""
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


def _running_here() -> frozenset[str]:
    """Return the addresses of all clusters that have a node on this machine."""
    # A Ray that was started by ray.init is written down nowhere: only its processes tell.
    find: Any = services.find_gcs_addresses
    find.cache_clear()
    return find()


def _numeric(address: str) -> str:
    """Return an address with the loopback's number in place of its name, as Ray's processes have it."""
    return _LOOPBACK + address.removeprefix("localhost:") if address.startswith("localhost:") else address


def _is_on_loopback(address: str) -> bool:
    """Whether this is a Ray to be started here, or one that was."""
    return address == "local" or (address.startswith(_LOOPBACK) and address in _running_here())


@contextlib.contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set those of these variables that are not set; processes of Ray that start within inherit them."""
    added = defaults.keys() - os.environ.keys()
    os.environ.update({name: defaults[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextlib.contextmanager
def _quiet_core() -> Iterator[None]:
    """Keep what Ray's core logs of this process off stderr, such as a note on each pool of actors."""
    connect: Any = worker.connect

    def quietly(*arguments: Any, **options: Any) -> Any:
        # Only here: the level would hold for the logs of the cluster's own processes as well.
        with _environment({_CORE_LEVEL: "fatal"}), _without_stderr():
            return connect(*arguments, **options)

    worker.connect = quietly
    try:
        yield
    finally:
        worker.connect = connect


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Discard what is written to stderr: the core says there which level it was given."""
    try:
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


@contextlib.contextmanager
def _on_the_loopback() -> Iterator[None]:
    """Let Ray take 127.0.0.1 for the address of this machine while it is started or joined."""
    # Ray puts the network's address in the place of the loopback's, even where it was asked for, unless
    # this constant says that this machine is no part of a cluster.
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Keep the handler that this process has for SIGTERM: Ray puts one in its place that exits silently."""
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    before, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda _: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = before
        signal.signal(signal.SIGTERM, handler)  # Ray's core has put its own beneath Python's


def _keep_token_private() -> None:
    """See to it that nobody else on this machine may read the token: Ray itself leaves that to the umask."""
    is_elsewhere = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if is_elsewhere or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    place = Path.home() / ".ray" / "auth_token"
    with contextlib.suppress(OSError):  # Ray says what is wrong with the home folder
        if place.exists():
            place.chmod(0o600)
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))


def _reachable(address: str) -> str:
    """Return the address as Ray knows it, if anything listens there."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise ConfigError(f"{address!r} is no address of a Ray that can be asked; give HOST:PORT of its head")
    _check_that_it_answers(address)
    return services.canonicalize_bootstrap_address(address) or address


def _check_that_it_answers(address: str) -> None:
    """Raise ``RunError`` if nothing listens there: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE_S).close()
    except (OSError, OverflowError) as error:
        raise RunError(
            f"nothing answers at {address}: {first_line(error)}; check --address and whether that Ray still runs"
        ) from error


def _bring_token(*, debug: bool) -> None:
    """Let Ray use the token of this user, if there is one, for a cluster of this machine."""
    # A Ray that was started by ray.init asks for it. Ray does the same for the cluster that it finds
    # itself, but it cannot be told which of several it is.
    if not debug:
        logging.getLogger(tokens.__name__).setLevel(logging.ERROR)
    tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _advice(error: BaseException) -> str:
    if "AuthenticationError" in f"{error!r} {error.__cause__}":
        return "it asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN where ~/.ray/auth_token is not its own"
    return "check --address"
