"""Reproduce one of the field's figures: ``python jobs/reproduce.py negatives --data URI --test URI --output URI``.

``--list`` names them. A run that is over is not done again, one that was interrupted goes on, and the
figure is drawn from what is there. As a submitted job: ``ray job submit --working-dir . -- python jobs/reproduce.py ...``.
"""

from typing import Annotated

import typer

from raycl.cli.main import Address, Debug, Gpu, Setting, run_job
from raycl.config.overrides import parse_setting
from raycl.errors import ConfigError
from raycl.reproduction.catalog import FIGURES, find_figure
from raycl.reproduction.request import Request, reproduce
from raycl.reproduction.scales import find_scale


def figure(
    name: Annotated[str | None, typer.Argument(metavar="FIGURE", help="One of --list.")] = None,
    data: Annotated[str | None, typer.Option(help="Labeled images to train on.")] = None,
    test: Annotated[str | None, typer.Option(help="Labeled images to judge on.")] = None,
    output: Annotated[str | None, typer.Option(help="Where runs and figures go; local or s3://.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each setting.")] = 3,
    scale: Annotated[str, typer.Option(help="cpu: cut for two cores; gpu: all images, ResNet-18.")] = "cpu",
    workers: Annotated[
        int | None, typer.Option(help="Training processes, where the figure does not state them.")
    ] = None,
    gpu: Gpu = False,
    settings: Setting = None,
    draw_only: Annotated[
        bool, typer.Option("--draw-only", help="Draw what is there, and run nothing.")
    ] = False,
    show_list: Annotated[bool, typer.Option("--list", help="Name the figures.")] = False,
    address: Address = None,
    debug: Debug = False,
) -> None:
    """Reproduce a figure of the field, and say whether its claim holds here."""
    if show_list:
        for known, each in FIGURES.items():
            print(f"{known:14} {each.title} ({each.source})")
        return
    if name is None or output is None:
        raise ConfigError(f"give a FIGURE, one of {', '.join(FIGURES)}, and --output")
    request = Request(
        figure=find_figure(name).name,
        output=output,
        data=data,
        test=test,
        scale=find_scale(scale),
        num_seeds=seeds,
        workers=workers,
        settings=({"gpu": True} if gpu else {}) | dict(map(parse_setting, settings or [])),
    )
    reproduce(request, draw_only=draw_only, address=address, debug=debug)


if __name__ == "__main__":
    run_job(figure)
