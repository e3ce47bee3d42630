"""Draw the pictures of the concepts: python benchmarks/concept_pictures.py [NAME ...].

They stand on paper of their own, so that light and dark pages show them alike. Views, schedules and measures
are raycl's: such a picture shows the work of a run.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from measuring import FOLDER
from pictures import BLUE, FAINT, GREEN, INK, ORANGE, PAPER, RED, plt, save
from PIL import Image
from sklearn.datasets import load_sample_images

from raycl.augment import ImageAugmentation
from raycl.config.overrides import override
from raycl.evaluation.embedding_metrics import effective_rank, embedding_std, positive_negative_gap
from raycl.recipes import recipe
from raycl.training.stages import stage_plans

GRAY, LINE = FAINT, "#c9ced3"
PALE = {BLUE: "#dfe9f6", ORANGE: "#fbe8d3", GREEN: "#daf0e3", RED: "#f7dedd", GRAY: "#eceff1", INK: PAPER}
plt.rcParams["font.size"] = 12


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return axes in which a unit is a tenth of an inch."""
    figure = plt.figure(figsize=(width / 10, height / 10))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str = GRAY, **style: Any
) -> None:
    patch = FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.8", fc=PALE[color], ec=color, lw=1.4
    )
    axes.add_patch(patch)
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", **style)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = INK, bend: float = 0.0
) -> None:
    style = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, lw=1.5, color=color, connectionstyle=style)
    )  # fmt: skip


def note(
    axes: Axes, x: float, y: float, text: str, color: str = GRAY, size: float = 10.5, **style: Any
) -> None:
    style = {"ha": "center", "va": "center"} | style
    axes.text(x, y, text, color=color, fontsize=size, **style)


def cells(
    axes: Axes, x: float, y: float, colors: Sequence[Sequence[str]], side: float = 2.0, gap: float = 0.25
) -> None:
    """Draw rows of small squares from the top left corner down."""
    for row, line in enumerate(colors):
        for column, color in enumerate(line):
            at = (x + column * side, y - (row + 1) * side)
            axes.add_patch(
                Rectangle(at, side - gap, side - gap, fc=color, ec="none" if color != PAPER else LINE)
            )


def draw_step() -> Figure:
    figure, axes = canvas(106, 30)
    names = ("embed", "gather", "candidates", "loss", "update", "store")
    colors = (BLUE, BLUE, ORANGE, ORANGE, GREEN, GREEN)
    notes = (
        "query and key,\nunit length",
        "keys of all\nworkers",
        "own key and\nnegatives",
        "which one is\nmine?",
        "weights; then the\nslow encoder",
        "keys are kept\nfor later steps",
    )
    box(axes, 1.5, 14, 9.5, 7, "two views", GRAY)
    for index, (name, color, text) in enumerate(zip(names, colors, notes, strict=True)):
        x = 15 + index * 15
        box(axes, x, 14, 12, 7, name, color, weight="bold")
        arrow(axes, (x - 2.9, 17.5), (x - 0.3, 17.5))
        note(axes, x + 6, 10.6, text)
    axes.plot([96, 96, 51, 51], [21.3, 26.5, 26.5, 24], color=GREEN, lw=1.5)
    arrow(axes, (51, 24.6), (51, 21.2), GREEN)
    note(axes, 73.5, 28.2, "negatives of the next steps", GREEN)
    axes.plot([66, 66, 21, 21], [7.6, 4.6, 4.6, 6.0], color=RED, lw=1.5)
    arrow(axes, (21, 5.4), (21, 8.4), RED)
    note(axes, 43.5, 2.6, "the gradient goes back through the gather, to the views of every worker", RED)
    return figure


def draw_negatives() -> Figure:
    figure, axes = canvas(92, 39)
    rng = np.random.default_rng(4)
    titles = ("the batch", "a queue", "a memory bank")
    recipes = (
        "simclr, simcse,\nclip, two_tower",
        "moco_v1, moco_v2,\nesimcse",
        "instance_discrimination",
    )
    for index, (title, names) in enumerate(zip(titles, recipes, strict=True)):
        middle = 15.5 + index * 30.5
        note(axes, middle, 36.5, title, INK, 13, weight="bold")
        note(axes, middle, 3, names, INK, 10.5)
    size = 8
    matrix = [[GREEN if row == column else PALE[ORANGE] for column in range(size)] for row in range(size)]
    cells(axes, 7.5, 32.5, matrix)
    note(axes, 5.4, 24.5, "queries", GRAY, rotation=90)
    note(axes, 15.5, 33.8, "keys", GRAY)
    note(axes, 15.5, 11.7, "always fresh;\nas many as the batch has rows", GRAY)
    shades = [to_hex(1 - part * (1 - np.array(to_rgb(ORANGE)))) for part in np.linspace(0.95, 0.15, 11)]
    cells(axes, 34.5, 26.5, [shades], side=2.3)
    cells(axes, 34.5, 31.5, [[GREEN, GREEN, GREEN]], side=2.3)
    note(axes, 42.6, 30.4, "new keys", GREEN, ha="left")
    arrow(axes, (37.7, 29.0), (37.7, 26.9), GREEN)
    arrow(axes, (60.0, 25.3), (61.8, 22.0), GRAY)
    note(axes, 58.0, 20.3, "the oldest leave", GRAY, ha="center")
    note(axes, 46, 14.0, "as many as you like, of the\nlast steps; a slow encoder\nkeeps them alike", GRAY)
    slots = [[PALE[GRAY] for _ in range(11)] for _ in range(7)]
    for row, column in zip(rng.integers(0, 7, 16), rng.integers(0, 11, 16), strict=True):
        slots[row][column] = ORANGE
    slots[3][4] = GREEN
    cells(axes, 65.5, 32.5, slots)
    note(axes, 76.5, 15.6, "own slot", GREEN, ha="right")
    note(axes, 77.5, 15.6, "and slots drawn", ORANGE, ha="left")
    note(axes, 76.5, 11.0, "one slot a sample; as old as\nthe sample's last visit", GRAY)
    return figure


def draw_batchnorm() -> Figure:
    figure, axes = canvas(92, 45)
    _draw_groups(axes, 3, "as it is", (0, 1, 2, 3, 4, 5, 6, 7), RED, "query and key of a sample are normalized\nin the same company: it marks them")  # fmt: skip
    _draw_groups(axes, 50, "shuffled", (5, 2, 7, 0, 3, 6, 1, 4), GREEN, "keys are normalized in random company\nand put back: no mark is left")  # fmt: skip
    axes.plot([46, 46], [3, 42], color=LINE, lw=1)
    return figure


def _draw_groups(axes: Axes, x: float, title: str, order: Sequence[int], color: str, text: str) -> None:
    hues = [plt.get_cmap("tab10")(index) for index in range(8)]
    note(axes, x + 20, 42, title, INK, 13, weight="bold")
    for side, (name, samples, top) in enumerate((("queries", range(8), 37), ("keys", order, 22))):
        note(axes, x + 1, top - 4.4, name, INK, 11, ha="left")
        for group in range(2):
            left = x + 9 + group * 16
            box(axes, left, top - 8.2, 14.4, 7.6, "", color if side else GRAY)
            for place, sample in enumerate(list(samples)[group * 4 : group * 4 + 4]):
                at = (left + 1.0 + place * 3.2, top - 5.9)
                axes.add_patch(Rectangle(at, 2.8, 3.0, fc=hues[sample], ec="none"))
                axes.text(at[0] + 1.4, at[1] + 1.5, str(sample + 1), color="white", ha="center", va="center")
            if side == 0:
                note(axes, left + 7.2, top - 10.8, f"mean and variance {'AB'[group]}", GRAY, 9.5)
            else:
                text = f"mean and variance {'CD'[group]}" if color == GREEN else "of the same samples"
                note(axes, left + 7.2, top - 10.8, text, GRAY, 9.5)
    note(axes, x + 20, 5.0, text, color, 11)


def draw_stages() -> Figure:
    stages = {"stages.0.learning_rate_scope": "run", "stages.0.epochs": 3, "stages.0.batch_size": 64}
    grown = override(
        recipe("simclr", image_size=32),
        stages
        | {"stages.1.batch_size": 256, "stages.2.batch_size": 1_024, "stages.2.final_hinge_weight": 0.5},
    )
    plans = stage_plans(grown, num_train=[45_000])
    figure, (batch_axes, rate_axes, hinge_axes) = plt.subplots(3, 1, figsize=(8.6, 5.0), sharex=True)
    seen = 0
    for plan, color in zip(plans, (BLUE, GREEN, ORANGE), strict=True):
        samples = (seen + np.arange(plan.num_steps + 1) * plan.stage.batch_size) / 1_000
        steps = range(plan.num_steps)
        batch_axes.fill_between(samples, 0, plan.stage.batch_size, color=PALE[color], ec=color)
        batch_axes.text(samples.mean(), plan.stage.batch_size + 60, f"{plan.stage.batch_size:,} rows, {plan.num_steps:,} steps", ha="center", color=color)  # fmt: skip
        rate_axes.plot(samples[:-1], [plan.learning_rate(step) for step in steps], color=color, lw=2)
        hinge_axes.plot(samples[:-1], [plan.hinge_weight(step) for step in steps], color=color, lw=2)
        seen += plan.num_steps * plan.stage.batch_size
    batch_axes.set(ylabel="batch size", ylim=(0, 1_280))
    rate_axes.set(ylabel="learning rate", ylim=(0, None))
    hinge_axes.set(ylabel="hinge weight", xlabel="thousand samples seen", ylim=(-0.04, 0.6))
    figure.align_ylabels()
    figure.tight_layout()
    return figure


def draw_accumulation() -> Figure:
    figure, axes = canvas(92, 42)
    note(axes, 9, 37.5, "first pass,\nno graphs", INK, 11)
    note(axes, 9, 8.5, "second pass, one\ngraph at a time", INK, 11)
    for index in range(4):
        x = 21 + index * 12.5
        box(axes, x, 34.5, 10, 5.5, f"chunk {index + 1}", GRAY)
        arrow(axes, (x + 5, 34.2), (x + 5, 30.4))
        axes.add_patch(Rectangle((x + 1, 27), 8, 3, fc=PALE[BLUE], ec=BLUE))
        axes.add_patch(Rectangle((x + 1, 16), 8, 3, fc=PALE[RED], ec=RED))
        arrow(axes, (x + 5, 15.7), (x + 5, 12.0), RED)
        box(axes, x, 6, 10, 5.5, f"chunk {index + 1}", RED)
    note(axes, 9, 28.5, "embeddings", BLUE, 11)
    note(axes, 9, 17.5, "their gradient", RED, 11)
    box(axes, 74, 19.5, 15, 8, "loss of the\nwhole batch", ORANGE, weight="bold")
    arrow(axes, (69.5, 28.5), (73.6, 26), ORANGE)
    arrow(axes, (73.6, 21), (69.5, 17.5), ORANGE)
    axes.plot([21, 68.5], [4, 4], color=GREEN, lw=1.5)
    arrow(axes, (68.5, 4), (73.6, 4), GREEN)
    note(axes, 82, 4, "one sum over\nthe workers", GREEN, 11)
    return figure


def draw_bank() -> Figure:
    figure, axes = canvas(92, 44)
    for index in range(3):
        box(axes, 3, 33 - index * 11.5, 16, 8, f"worker {index + 1}", BLUE)
    box(axes, 37, 9.5, 23, 32, "", ORANGE)
    note(axes, 48.5, 38.8, "bank: actors", ORANGE, 12.5, weight="bold")
    for index in range(2):
        y = 25 - index * 12.5
        axes.add_patch(Rectangle((39, y), 19, 10.8, fc=PAPER, ec=ORANGE, lw=1.2))
        note(axes, 48.5, y + 8.6, f"shard {index + 1}", INK, 11)
        rows = [[ORANGE] * 8, [ORANGE] * 8]
        cells(axes, 40.6, y + 7.0, rows)
        note(axes, 48.5, y + 1.4, "row, sample id, step", GRAY, 9.5)
    for index in range(3):
        y = 37 - index * 11.5
        target = 28 - index * 2.5
        arrow(axes, (19.4, y + 0.8), (36.6, target + 1.4), BLUE)
        arrow(axes, (36.6, target), (19.4, y - 0.8), GREEN)
    note(axes, 27.5, 39.8, "new rows", BLUE, 11)
    note(axes, 30, 11.0, "negatives", GREEN, 11)
    box(axes, 72, 33, 18, 8, "raycl bank\nnearest --id 7", GRAY, family="monospace", size=9.5)
    box(axes, 72, 21.5, 18, 8, "another job", GRAY)
    box(axes, 72, 10, 18, 8, "storage", GRAY)
    arrow(axes, (71.6, 37), (60.5, 33), INK)
    arrow(axes, (71.6, 25.5), (60.5, 25.5), INK)
    arrow(axes, (60.5, 17), (71.6, 14), INK)
    note(axes, 66, 38.2, "ask", INK, 11)
    note(axes, 66, 18.4, "snapshots", INK, 11)
    note(axes, 46, 4.2, "one call a step, made before the compute and collected after it", GRAY, 11)
    return figure


def draw_collapse() -> Figure:
    figure, panels = plt.subplots(1, 3, figsize=(9.0, 3.9), subplot_kw={"projection": "3d"})
    rng = torch.Generator().manual_seed(1)
    directions = torch.nn.functional.normalize(torch.randn(160, 3, generator=rng), dim=1)
    flat = torch.nn.functional.normalize(directions * torch.tensor([1.0, 1.0, 0.02]), dim=1)
    point = torch.nn.functional.normalize(directions * 0.06 + torch.tensor([0.5, -0.6, 0.6]), dim=1)
    for axes, rows, title in zip(panels, (directions, flat, point), ("healthy", "few dims", "a point"), strict=True):  # fmt: skip
        noise = 0.15 * torch.randn(rows.shape, generator=rng) * (0.1 if title == "a point" else 1.0)
        other = torch.nn.functional.normalize(rows + noise, dim=1)
        axes.scatter(*rows.T.numpy(), s=9, color=BLUE if title == "healthy" else RED, depthshade=False)
        axes.set(xlim=(-1, 1), ylim=(-1, 1), zlim=(-1, 1), xticks=[], yticks=[], zticks=[])
        axes.set_box_aspect((1, 1, 1), zoom=1.15)
        axes.set_facecolor(PAPER)
        for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
            axis.set_pane_color((0.93, 0.94, 0.95, 0.6))
        axes.set_title(title, weight="bold", size=13)
        figures = f"std {embedding_std(rows):.2f}\neffective rank {effective_rank(rows):.2f}\ngap {positive_negative_gap(rows, other):.2f}"
        axes.text2D(0.5, -0.22, figures, transform=axes.transAxes, ha="center", size=11)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.9, bottom=0.22, wspace=0.05)
    return figure


def draw_views() -> Figure:
    """Two photographs that come with scikit-learn, as ``simclr`` sees them."""
    size = 160
    photos = [Image.fromarray(photo).resize((240, 160)) for photo in load_sample_images().images]
    stored = np.stack([np.asarray(photo.resize((200, 200))) for photo in photos])
    augment = recipe("simclr").augment
    plain: dict[str, Any] = {
        name: getattr(augment, name) for name in augment.model_fields_set | type(augment).model_fields.keys()
    }
    plain |= {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    views = ImageAugmentation(size=size, **plain)
    figure, panels = plt.subplots(2, 6, figsize=(9.4, 2.9), width_ratios=[1.5, *[1] * 5])
    ids = np.arange(2)
    for column in range(6):
        drawn = (
            None
            if column == 0
            else views(stored, ids, seed=0, epoch=0, view=column - 1, aspect=np.full(2, 1.5))
        )
        for row, axes in enumerate(panels[:, column]):
            axes.imshow(photos[row] if drawn is None else drawn[row].permute(1, 2, 0).clamp(0, 1).numpy())
            axes.axis("off")
        panels[0, column].set_title("photo" if column == 0 else f"view {column - 1}", size=11)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.91, bottom=0.02, wspace=0.05, hspace=0.05)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "step": draw_step,
    "negatives": draw_negatives,
    "batchnorm": draw_batchnorm,
    "stages": draw_stages,
    "accumulation": draw_accumulation,
    "bank": draw_bank,
    "collapse": draw_collapse,
    "views": draw_views,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="draw the pictures of the concepts")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PICTURES)}; without one, all")
    for name in parser.parse_args().names or PICTURES:
        path = FOLDER.parent / "docs" / "images" / "concepts" / f"{name}.png"
        photographs = name == "views"  # keep 200 colors, which is enough at this size
        save(PICTURES[name](), path, dpi=110 if photographs else 130, num_colors=200 if photographs else 64)


if __name__ == "__main__":
    main()
