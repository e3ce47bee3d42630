"""Where the time of a step goes, recipe by recipe: a table in milliseconds, and a stacked picture.

    python benchmarks/step_profile.py --images cifar10/train.parquet --pairs medquad/train.parquet
        [--recipes simclr moco_v2 ...] [--encoder resnet18] [--precision float32] [--batch-size 256] [--workers 2]
        [--steps 30] [--output step.png] [--json FILE]

Each recipe trains as ``raycl train`` does, two workers, a Ray of its own; the numbers are means of the
first worker's steps after the first ones, by the phases that ``metrics.jsonl`` has. A phase excludes
the phases inside it: messages between workers on one machine, with the wait for the slower one, are a phase of
their own. ``wall`` is the clock's time of a step.
"""

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from measuring import Line, make_parser, markdown_table, report
from training_steps import ENCODERS, logged_steps, steps_alone

from raycl.distributed.step_timer import REST

IMAGES = ("simclr", "moco_v2", "instance_discrimination")
PHASES = {
    "data": "wait for rows",
    "views": "draw views",
    "keys": "encode keys",
    "forward": "forward",
    "loss": "loss",
    "messages": "messages",
    "backward": "backward",
    "update": "update",
    "store": "queue or bank",
    REST: "all else",
}
WALL = "wall"


def profile(recipe: str, options: argparse.Namespace) -> Line:
    """Train some steps; return the mean milliseconds of each phase, and of the whole step."""
    settings = steps_alone(options, workers=options.workers, precision=options.precision)
    # Logged steps measure more than others: as rare as in a user's run, if there are steps enough.
    settings["log_every_steps"] = min(10, options.steps // 3)
    if recipe in IMAGES:
        settings |= {f"encoder.{key}": value for key, value in ENCODERS[options.encoder].items()}
    lines = logged_steps(recipe, settings, options.images if recipe in IMAGES else options.pairs)
    # The steps before the first line warm up.
    num_steps = lines[-1]["step"] - lines[0]["step"]
    laps = [(line, line["seconds"] - before["seconds"]) for before, line in pairwise(lines)]
    spent = {name: 1e3 * sum(share(line, name) * lap for line, lap in laps) / num_steps for name in PHASES}
    wall = 1e3 * sum(lap for _, lap in laps) / num_steps
    return {"side": recipe} | {name: ms for name, ms in spent.items() if ms > 0} | {WALL: wall}


def share(line: dict[str, Any], name: str) -> float:
    """Return the share of a step that a phase took."""
    return line.get("data_wait_fraction" if name == "data" else f"{name}_fraction", 0.0)


def table(lines: Sequence[Line]) -> str:
    """Return milliseconds a step by phase, a column a recipe, each with its share of the step."""

    def cell(line: Line, name: str) -> str:
        of_step = "" if name == WALL else f" ({line.get(name, 0.0) / line[WALL]:.1%})"
        return f"{line[name]:,.1f}{of_step}" if name in line else "-"

    phases = PHASES | {WALL: "the step"}
    rows = [(title, *(cell(line, name) for line in lines)) for name, title in phases.items()]
    return markdown_table(["ms a step", *(line["side"] for line in lines)], rows)


def draw(lines: Sequence[Line], path: Path) -> None:
    """Draw a bar a recipe, each the whole of its step."""
    from pictures import panels, save

    figure, (axes,) = panels(1, 1, 9, 0.7 * len(lines) + 1.8)
    left, places = [0.0] * len(lines), range(len(lines))
    for number, name in enumerate(PHASES):
        shares = [100 * line.get(name, 0.0) / line[WALL] for line in lines]
        if any(shares):
            axes.barh(places, shares, left=left, label=PHASES[name], color=f"C{number}")
        left = [before + part for before, part in zip(left, shares, strict=True)]
    axes.set_yticks(places, [f"{line['side']}\n{line[WALL]:,.0f} ms" for line in lines])
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="percent of the step")
    axes.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    save(figure, path)


def main() -> None:
    flags: dict[str, Any] = {"recipes": [*IMAGES, "two_tower"], "encoder": tuple(ENCODERS)}
    flags |= {"precision": ("float32", "bfloat16"), "batch_size": 256, "workers": 2, "steps": 30}
    parser = make_parser(__doc__, images=None, pairs=None, output=None, **flags)
    options = parser.parse_args()
    for name, needing in (("images", IMAGES), ("pairs", ("two_tower",))):
        if set(options.recipes) & set(needing) and not getattr(options, name):
            parser.error(f"--{name} is missing, and {', '.join(needing)} need it; give a Parquet file")
    if options.steps < 3:
        parser.error("--steps is below 3; the first third of them warms up")
    lines = [profile(recipe, options) for recipe in options.recipes]
    report(options, lines, table(lines))
    if options.output:
        draw(lines, Path(options.output))


if __name__ == "__main__":
    main()
