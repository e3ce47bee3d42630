"""Options that several commands share, and the connection to a running Ray cluster."""

import atexit
import contextlib
import os
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from raycl.errors import ConfigError

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
Like = Annotated[
    str | None,
    typer.Option(
        help="Instead of a recipe, train as another library does: lightly:simclr, open_clip:vit-b-32 or st:mnrl."
    ),
]
Epochs = Annotated[int | None, typer.Option(help="Passes over the data.", show_default=OF_RECIPE)]
Steps = Annotated[int | None, typer.Option(help="Optimization steps, instead of epochs.")]
Seed = Annotated[int | None, typer.Option(help="Seed of weights, order and views.", show_default=OF_RECIPE)]
Run = Annotated[str | None, typer.Argument(help="The --output of a run.")]
NamedRun = Annotated[str | None, typer.Option("--run", help="The run, if RUN is not given.")]
Side = Annotated[str, typer.Option(help="With two towers: query or key.")]
BankName = Annotated[str, typer.Argument(help="Name of the bank; see `raycl bank list`.")]
RunningRay = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of a Ray cluster; default: RAY_ADDRESS, or the cluster on this machine."),
]


class OneDataSet(TyperCommand):
    """A command that refuses a second data set or list of columns: of a repeated option only the last value would count."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the arguments that are left; raises ``ConfigError`` for a repeated option that has one value."""
        one_set = f"{ctx.info_name} takes one data set; run it once for each"
        remedies = {"data": one_set, "test": one_set, "train": one_set}
        remedies["columns"] = "only one would count; separate the columns by commas"
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for option in given:
            is_one = option.name in remedies and not getattr(option, "multiple", False)
            if is_one and given.count(option) > 1:
                raise ConfigError(
                    f"--{option.name} is given {given.count(option)} times, and {remedies[option.name]}"
                )
        return super().parse_args(ctx, args)


def one_run(run: str | None, named: str | None) -> str:
    """Return the run that is given as RUN or as ``--run``; raises ``ConfigError`` for both or neither."""
    if run is not None and named is not None:
        raise ConfigError(f"the run is given twice, {run} and --run {named}; give one of them")
    if run is None and named is None:
        raise ConfigError("a run is missing; give the --output of one: --run RUN")
    return str(named if run is None else run)


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
