"""Options that several commands share, and the connection to a running Ray cluster."""

import atexit
import contextlib
import os
from typing import Annotated

import typer

Setting = Annotated[list[str] | None, typer.Option("--set", help="Replace one setting: key.path=value.")]
Address = Annotated[str | None, typer.Option(help="Ray cluster to join; by default a local one is started.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and Ray's logs.")]
Gpu = Annotated[bool, typer.Option("--gpu", help="Give each worker a GPU.")]
OF_RECIPE = "the recipe's"  # a default in the help
Workers = Annotated[
    str | None,
    typer.Option(help="Training processes: N, or MIN:MAX to use as many as fit.", show_default=OF_RECIPE),
]
BatchSize = Annotated[
    int | None, typer.Option(help="Rows per step over all workers.", show_default=OF_RECIPE)
]
Run = Annotated[str, typer.Option(help="The --output of a run.")]
Side = Annotated[str, typer.Option(help="With two towers: query or key.")]
BankName = Annotated[str, typer.Argument(help="Name of the bank; see `raycl bank list`.")]
RunningRay = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of a Ray cluster; default: RAY_ADDRESS, or the cluster on this machine."),
]


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
