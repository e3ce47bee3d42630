"""Joining a running Ray for a command that asks it something: quietly, and with little imported."""

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

Name = Annotated[str, typer.Argument(help="A bank's name: see `raycl bank list`.")]
Address = Annotated[
    str | None, typer.Option(help="HOST:PORT of a Ray; without it RAY_ADDRESS, or the one on this machine.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and what Ray logs.")]


def join(address: str | None, debug: bool) -> None:
    """Join the Ray at this address, or the one on this machine; leave it when the process ends."""
    # Ray reads this when it is imported: for how many seconds it insists on a cluster that refuses.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "3")
    import ray

    from raycl.joining import join_running

    with contextlib.nullcontext() if debug else _hushed():
        joined = join_running(address, debug=debug)
    if joined:
        # Left to itself, Ray waits at the exit for half a second, for what its workers might print.
        atexit.register(ray.shutdown)


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Keep what Ray's core writes to stderr by itself from the one line that tells of an error."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
