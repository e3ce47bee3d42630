"""The explorers, until Ctrl-C: ``raycl bank serve`` of a live bank, and ``raycl explore`` of the saved rows of a run."""

import contextlib
import importlib.util
import ipaddress
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Annotated
from urllib.parse import quote

import typer

from raycl.cli.options import BankName, Debug, RunningRay, connect
from raycl.errors import ConfigError, RunError

_POLL_S, _NUM_MISSED = 2.0, 3
_NEEDED = ("fastapi", "uvicorn", "starlette", "aiohttp")


Host = Annotated[
    str,
    typer.Option(
        help="Address to listen on; addresses other than the loopback are reachable from other machines."
    ),
]
Port = Annotated[int, typer.Option(min=1, max=65_535, help="Port to listen on.")]
Columns = Annotated[
    list[str] | None,
    typer.Option("--set", help="Name a column of the data: data.columns.image=NAME; default: the run's."),
]
Token = Annotated[
    str | None,
    typer.Option(envvar="RAYCL_EXPLORER_TOKEN", help="Password of the page; default: a new random one."),
]


def serve(
    name: BankName,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    data: Annotated[
        str | None, typer.Option(help="Training data of the run, to display samples; local or s3://.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="Run whose encoder embeds images and texts; default: the bank's run.")
    ] = None,
    settings: Columns = None,
    address: RunningRay = None,
    token: Token = None,
    debug: Debug = False,
) -> None:
    """Explore the bank of a live run in a browser: neighbors, ages, norms."""
    secret = _secret(token)
    names = _columns(settings)
    connect(address, debug, bank=name)
    from raycl.serve.deployment import head_address, served
    from raycl.serve.target import find_target

    target = find_target(name, run=run, data=data, settings=names, token=secret)

    if not _is_loopback(host):
        _warn_of(host, port)
    with _until_signal(), served(target, host, port) as route:
        head, is_here = head_address()
        print(f"bank {name}: {_url(host, head, port, route, secret)}", flush=True)
        if _is_loopback(host) and not is_here:
            print(
                f"the URL is valid on the head node, {head}; from here: ssh -L {port}:127.0.0.1:{port} {head}",
                flush=True,
            )
        print("press Ctrl-C to close; the run continues", flush=True)
        _wait()


def explore(
    run: Annotated[str, typer.Argument(help="Folder of the run; local or s3://.")],
    embeddings: Annotated[
        str | None, typer.Option(help="A folder that `raycl embed` wrote, in place of the run's own rows.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Data set of the rows, to display samples; default: the training data of the run."),
    ] = None,
    settings: Columns = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token: Token = None,
    debug: Debug = False,
) -> None:
    """Explore the saved rows of a run in a browser, without Ray: its bank, or embeddings of a data set."""
    secret = _secret(token)
    names = _columns(settings)
    import uvicorn

    from raycl.serve.app import create_app
    from raycl.serve.target import saved_explorer

    app = create_app(saved_explorer(run, embeddings=embeddings, data=data, settings=names), secret)
    try:
        listening = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}; give another --port or --host"
        ) from error
    with listening, _until_signal():
        if not _is_loopback(host):
            _warn_of(host, port)
        print(f"run {run}: {_url(host, socket.gethostname(), port, '/', secret)}", flush=True)
        print("press Ctrl-C to close", flush=True)
        # A logged URL may contain the token.
        uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False)).run(sockets=[listening])


def _columns(settings: list[str] | None) -> list[str]:
    """Return the settings; raises ``ConfigError`` for one that names no column."""
    from raycl.cli.plan import command_settings

    command_settings("explore", settings or [])
    return settings or []


def _is_loopback(host: str) -> bool:
    """Whether an address is reachable from its own machine only."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def _secret(token: str | None) -> str:
    """Return the token of the page; raises ``ConfigError`` if it is weak or a package is missing."""
    _check_installed()
    from raycl.serve.auth import checked_token, new_token

    return new_token() if token is None else checked_token(token)


def _warn_of(host: str, port: int) -> None:
    print(
        f"warning: the explorer listens on {host}, without encryption; anyone with the token "
        f"who can reach port {port} sees the rows and their samples"
    )


def _check_installed() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f'the explorer needs Ray Serve, and {missing[0]} is not installed; pip install "raycl[serve]"'
        )


def _url(host: str, head: str, port: int, route: str, token: str) -> str:
    """Return the URL to open; for all interfaces, the URL of the head node."""
    shown = host
    with contextlib.suppress(ValueError):  # a host name
        shown = head if ipaddress.ip_address(host).is_unspecified else host
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}{route}#token={quote(token, safe='')}"


@contextlib.contextmanager
def _until_signal() -> Iterator[None]:
    """End the block at SIGINT, SIGTERM or SIGHUP; ignore further signals while closing."""

    def stop(*_: object) -> None:
        for each in handlers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    handlers: dict[signal.Signals, Callable[..., None]] = {signal.SIGINT: stop, signal.SIGTERM: stop}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under `nohup`
        # uvicorn handles SIGTERM itself while it runs.
        handlers[signal.SIGHUP] = lambda *_: signal.raise_signal(signal.SIGTERM)
    before = {each: signal.signal(each, handler) for each, handler in handlers.items()}
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    print("closed", flush=True)


def _wait() -> None:
    """Wait until the cluster stops, which also stops the explorer; then raise ``RunError``."""
    from raycl.serve.deployment import ray_answers

    missed = 0
    while missed < _NUM_MISSED:
        time.sleep(_POLL_S)
        missed = 0 if ray_answers() else missed + 1
    raise RunError("the Ray cluster of this bank has stopped, and the explorer with it; restart both")
