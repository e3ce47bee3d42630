"""The explorer on Ray Serve: one small replica on the driver's node, one proxy on the head."""

import contextlib
import logging
import os
import re
import socket
from collections.abc import Iterator
from typing import Any, final

import ray
from fastapi import FastAPI
from ray import exceptions, serve
from ray._private import state as ray_state
from ray.serve import context as serve_context
from ray.serve.exceptions import RayServeException

from raycl.errors import ConfigError, RunError, last_line
from raycl.serve.app import create_app
from raycl.serve.target import ServeTarget

_OURS = "raycl-bank-"
_CONNECT_S = 2.0
_MAX_REQUESTS = 64
_QUIET = {"log_level": "ERROR", "enable_access_log": False}  # a logged URL may contain the token
_MAX_NAME = 40


@final
class Ingress:
    """The replica, from which Ray Serve gets the app."""

    def __init__(self, target: ServeTarget) -> None:
        _bind_replicas_to_the_loopback()
        # The raylet has another environment than the driver. Training has priority.
        os.environ |= {"RAYCL_TRUSTED": target.trusted, "OMP_NUM_THREADS": "1"}
        with contextlib.suppress(OSError):
            os.nice(5)
        self._target = target

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._target.explorer(), self._target.token)


def _bind_replicas_to_the_loopback() -> None:
    """Make Ray Serve open this replica's gRPC port on the loopback only, instead of on all interfaces.

    Only calls between deployments use this port, and the explorer has none.
    """
    from ray.serve._private import replica

    add_port: Any = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, where: add_port(
        server, where.replace("[::]", "127.0.0.1")
    )


@contextlib.contextmanager
def served(target: ServeTarget, host: str, port: int) -> Iterator[str]:
    """Serve the explorer while the block runs; yields its route, which ends with ``/``.

    A running Ray Serve is used if it listens on this host and port, and is left running. A Ray Serve that
    raycl started ends with the last explorer, unless it has other applications.

    Raises:
        ConfigError: Ray Serve listens elsewhere in this cluster, or the port is taken.
        RunError: The explorer does not start.
    """
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    is_ours = _start(host, port)
    name = f"{_OURS}{target.bank}-{ray.get_runtime_context().get_job_id()}"
    try:
        _remove_orphans()
        route = _free_route(target.bank)
        _deploy(target, name, route)
        yield f"{route.rstrip('/')}/"
    finally:
        _end(name, is_ours)


def head_address() -> tuple[str, bool]:
    """Return the address of the head, where Ray Serve listens, and whether this machine is the head."""
    (head,) = [
        node for node in ray.nodes() if node["Alive"] and "node:__internal_head__" in node["Resources"]
    ]
    return head["NodeManagerAddress"], head["NodeID"] == ray.get_runtime_context().get_node_id()


def ray_answers() -> bool:
    """Whether the connected Ray cluster is still alive."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def _start(host: str, port: int) -> bool:
    """Start or find Ray Serve; return whether raycl has started it, now or before."""
    client: Any = serve_context._get_global_client(raise_if_no_controller_running=False)
    if client is not None:
        at = client.http_config
        if (at.host, at.port) != (host, port):
            raise ConfigError(
                f"Ray Serve runs in this cluster already and listens on {at.host}:{at.port}, not on {host}:{port}; "
                f"give --host {at.host} --port {at.port}, or shut down that Ray Serve first"
            )
        names = list(serve.status().applications)
        return bool(names) and all(name.startswith(_OURS) for name in names)
    if head_address()[1]:
        _check_free(host, port)
    try:
        serve.start(
            proxy_location="HeadOnly", http_options={"host": host, "port": port}, logging_config=_QUIET
        )
    except (exceptions.RayError, RuntimeError, TimeoutError) as error:
        serve.shutdown()
        raise RunError(f"Ray Serve does not start: {last_line(error)}; try another --port") from error
    return True


def _check_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}; give another --port or --host"
        ) from error


def _deploy(target: ServeTarget, name: str, route: str) -> None:
    here = ray.get_runtime_context().get_node_id()
    options: dict[str, Any] = {
        "num_cpus": 0,  # starts even if training uses all cores
        "label_selector": {"ray.io/node-id": here},  # local paths are valid on this node
    }
    deployment = serve.deployment(
        name="explorer", num_replicas=1, max_ongoing_requests=_MAX_REQUESTS, ray_actor_options=options
    )(serve.ingress()(Ingress))
    try:
        serve.run(deployment.bind(target), name=name, route_prefix=route, logging_config=_QUIET)
    except (exceptions.RayError, RayServeException, RuntimeError) as error:
        raise RunError(f"the explorer did not start: {last_line(error)}; try again with --debug") from error


def _free_route(bank: str) -> str:
    """Return the first free route: ``/``, the bank's name, or the name with a number."""
    client: Any = serve_context._get_global_client()
    taken = {each["route_prefix"] for each in client.get_serve_details()["applications"].values()}
    own = re.sub(r"[^A-Za-z0-9._~-]+", "-", bank)[:_MAX_NAME]
    numbered = (f"/{own}-{number}" for number in range(2, len(taken) + 3))
    return next(route for route in ("/", f"/{own}", *numbered) if route not in taken)


def _remove_orphans() -> None:
    """Remove explorers whose commands were killed: Ray Serve never does."""
    alive = {job["JobID"] for job in ray_state.jobs() if not job["IsDead"]}
    for name in serve.status().applications:
        if name.startswith(_OURS) and name.rpartition("-")[2] not in alive:
            serve.delete(name)


def _end(name: str, is_ours: bool) -> None:
    if not ray_answers():
        return  # its Serve has ended too; a request would wait a minute
    with contextlib.suppress(exceptions.RayError, RayServeException, RuntimeError, TimeoutError):
        _remove_orphans()
        names = set(serve.status().applications)
        if is_ours and not names - {name}:
            serve.shutdown()
        elif name in names:
            serve.delete(name)
