"""Options that several commands share."""

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
