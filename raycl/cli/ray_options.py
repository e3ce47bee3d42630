"""Options of the commands that ask a running Ray, and the connection to it."""

import atexit
import contextlib
import os
from typing import Annotated

import typer

Name = Annotated[str, typer.Argument(help="A bank's name: see `raycl bank list`.")]
Address = Annotated[
    str | None, typer.Option(help="HOST:PORT of a Ray; without it RAY_ADDRESS, or the one on this machine.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and Ray's logs.")]


def connect(address: str | None, debug: bool) -> None:
    """Join the Ray at this address, or the one on this machine; leave it when the process ends."""
    # Ray reads this when it is imported: for how many seconds it retries a cluster that refuses.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "3")
    import ray

    from raycl import ray_runtime

    # An error is one line, without the messages of Ray's core.
    with contextlib.nullcontext() if debug else ray_runtime.without_stderr():
        joined = ray_runtime.connect(address, debug=debug)
    if joined:
        # Otherwise Ray waits at the exit for half a second, for the output of its workers.
        atexit.register(ray.shutdown)
