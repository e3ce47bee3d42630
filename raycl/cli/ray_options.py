"""Shared options of the commands that query a running Ray cluster, and the connection to it."""

import atexit
import contextlib
import os
from typing import Annotated

import typer

Name = Annotated[str, typer.Argument(help="Name of the bank; see `raycl bank list`.")]
Address = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of a Ray cluster; default: RAY_ADDRESS, or the cluster on this machine."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and Ray's logs.")]


def connect(address: str | None, debug: bool, *, bank: str | None = None) -> None:
    """Join the Ray cluster at this address, or on this machine; disconnect when the process exits.

    Of several on this machine, join the one with the ``bank``.
    """
    # Read when Ray is imported: the seconds to retry a cluster that refuses connections.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "3")
    import ray

    from raycl import ray_runtime

    # Suppress the messages of Ray's core; errors are one line.
    with contextlib.nullcontext() if debug else ray_runtime.without_stderr():
        if bank is not None and ray_runtime.ambiguous_rays(address):
            from raycl.negatives.bank import ray_of_bank

            address = ray_of_bank(bank, address)
        joined = ray_runtime.connect(address, debug=debug)
    if joined:
        # Otherwise Ray waits half a second at exit for its workers' output.
        atexit.register(ray.shutdown)
