"""Reproduce a published figure: ``python jobs/reproduce.py negatives --data URI --test URI --output URI``.

``--list`` names them. Finished runs are kept, interrupted ones resume, and the figure shows the finished runs.
As a submitted job: ``ray job submit --working-dir . -- python jobs/reproduce.py ...``.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from raycl.cli.main import run_job
from raycl.cli.options import Address, Debug, Gpu, Setting
from raycl.config.overrides import parse_setting
from raycl.errors import ConfigError

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from claims import FIGURES, find_figure
from claims.figure import find_scale
from claims.run import ReproduceRequest, reproduce


def figure(
    name: Annotated[str | None, typer.Argument(metavar="FIGURE", help="One of --list.")] = None,
    data: Annotated[str | None, typer.Option(help="Labeled images to train on.")] = None,
    test: Annotated[str | None, typer.Option(help="Labeled images to evaluate on.")] = None,
    output: Annotated[str | None, typer.Option(help="Folder of runs and figures; local or s3://.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each setting.")] = 3,
    first_seed: Annotated[int, typer.Option(help="Seed of the first run; the others follow.")] = 0,
    scale: Annotated[str, typer.Option(help="cpu: cut for two cores; gpu: all images, ResNet-18.")] = "cpu",
    workers: Annotated[
        int | None, typer.Option(help="Training processes, unless the figure sets them.")
    ] = None,
    gpu: Gpu = False,
    settings: Setting = None,
    draw_only: Annotated[
        bool, typer.Option("--draw-only", help="Draw the finished runs, and train nothing.")
    ] = False,
    show_list: Annotated[bool, typer.Option("--list", help="Name the figures.")] = False,
    address: Address = None,
    debug: Debug = False,
) -> None:
    """Reproduce a figure from a paper, and say whether its claim holds here."""
    if show_list:
        for known, each in FIGURES.items():
            print(f"{known:14} {each.title} ({each.source})")
        return
    if name is None or output is None:
        raise ConfigError(f"give a FIGURE, one of {', '.join(FIGURES)}, and --output")
    request = ReproduceRequest(
        figure=find_figure(name).name,
        output=output,
        data=data,
        test=test,
        scale=find_scale(scale),
        num_seeds=seeds,
        first_seed=first_seed,
        workers=workers,
        settings=({"gpu": True} if gpu else {}) | dict(map(parse_setting, settings or [])),
    )
    reproduce(request, draw_only=draw_only, address=address, debug=debug)


if __name__ == "__main__":
    run_job(figure)
