"""Where the time of a step goes, recipe by recipe: a table in milliseconds, and a stacked picture.

    python benchmarks/step_profile.py --images cifar10/train.parquet --pairs medquad/train.parquet
        [--recipes simclr moco_v2 ...] [--encoder resnet18] [--json FILE] [--output step.png]

Each recipe trains as ``raycl train`` does, two workers, a Ray of its own; the numbers are means of the
first worker's steps after the first ones, by the phases that ``metrics.jsonl`` has. A phase excludes
the phases inside it: messages between workers on one machine, with the wait for the slower one, are a phase of
their own. ``wall`` is the clock's time of a step.
"""

import argparse
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from measuring import describe_machine, make_parser, write_json
from result_tables import PHASES, WALL, step_table
from train_step import ENCODERS, encoder_of, steps_alone

import raycl
from raycl.records import read_metrics
from raycl.storage import Place

IMAGES = ("simclr", "moco_v2", "instance_discrimination")
RECIPES = (*IMAGES, "two_tower")


def main() -> None:
    options = read_options()
    found = {recipe: profile(recipe, options) for recipe in options.recipes}
    report = {"steps": found, "settings": vars(options), "machine": describe_machine()}
    print(step_table(report))
    write_json(options.json, report)
    if options.output:
        draw(found, options.output)


def profile(recipe: str, options: argparse.Namespace) -> dict[str, float]:
    """Train some steps; return the mean milliseconds of each phase, and of the whole step."""
    settings = steps_alone(options, workers=options.workers)
    # Logged steps measure more than others: as rare as in a user's run, if there are steps enough.
    settings |= {"log_every_steps": min(10, options.steps // 3)}
    if recipe in IMAGES:
        settings |= encoder_of(options)
    size = {"image_size": 32} if recipe in IMAGES else {}
    config = raycl.override(raycl.recipe(recipe, **size), settings)
    data = options.images if recipe in IMAGES else options.pairs
    with tempfile.TemporaryDirectory() as folder:
        raycl.train(config, data=data, output=folder, quiet=True)
        lines = [line for line in read_metrics(Place(folder)) if "loss" in line]
    # The steps before the first line warm up.
    num_steps = lines[-1]["step"] - lines[0]["step"]
    laps = [(line, line["seconds"] - before["seconds"]) for before, line in pairwise(lines)]
    spent = {name: 1e3 * sum(part(line, name) * lap for line, lap in laps) / num_steps for name in PHASES}
    wall = 1e3 * sum(lap for _, lap in laps) / num_steps
    return {name: value for name, value in spent.items() if value > 0} | {WALL: wall}


def part(line: dict[str, Any], name: str) -> float:
    """Return the share of a step that a phase took."""
    return line.get("data_wait_fraction" if name == "data" else f"{name}_fraction", 0.0)


def draw(found: dict[str, dict[str, float]], path: Path) -> None:
    """Draw a bar a recipe, each the whole of its step."""
    figure, axes = plt.subplots(figsize=(9, 0.7 * len(found) + 1.8), layout="constrained")
    left = dict.fromkeys(found, 0.0)
    for number, name in enumerate(PHASES):
        shares = [100 * parts.get(name, 0.0) / parts[WALL] for parts in found.values()]
        if any(shares):
            color = plt.get_cmap("tab10")(number)
            axes.barh(list(found), shares, left=list(left.values()), label=PHASES[name], color=color)
        left = {recipe: left[recipe] + share for recipe, share in zip(found, shares, strict=True)}
    axes.set_yticks(
        range(len(found)), [f"{recipe}\n{parts[WALL]:,.0f} ms" for recipe, parts in found.items()]
    )
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="percent of the step")
    axes.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(path, dpi=110)


def read_options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--images", help="Parquet file with an image column")
    parser.add_argument("--pairs", help="Parquet file with query and document")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--encoder", choices=ENCODERS, default="resnet18", help="of images")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, help="draw the picture here")
    options = parser.parse_args()
    if set(options.recipes) & set(IMAGES) and not options.images:
        parser.error("--images is missing; give a Parquet file with an image column")
    if options.steps < 3:
        parser.error("--steps is below 3; the first third of them warms up")
    if "two_tower" in options.recipes and not options.pairs:
        parser.error(
            "--pairs is missing; give a Parquet file with query and document, or leave two_tower out"
        )
    return options


if __name__ == "__main__":
    main()
