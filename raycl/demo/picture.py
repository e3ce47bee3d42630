"""A neighbor grid: each query and its nearest images, before and after training."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from raycl.data.in_memory import InMemoryDataset, pixels_of

RIGHT, WRONG = "#1a9850", "#d73027"


@final
@dataclass(frozen=True, kw_only=True)
class Neighborhood:
    """The nearest images of every query, [num_queries, num_neighbors], best first."""

    title: str
    neighbors: NDArray[np.int64]


def draw_neighbors(
    query_rows: InMemoryDataset,
    queries: NDArray[np.int64],
    bank_rows: InMemoryDataset,
    neighborhoods: Sequence[Neighborhood],
) -> bytes:
    """Return a PNG: queries at the left, a block of neighbors for each way to look.

    A neighbor of the query's class is framed green, another red with a cross.
    """
    width = neighborhoods[0].neighbors.shape[1]
    num_columns = 1 + len(neighborhoods) * (width + 1)
    figure = Figure(figsize=(0.55 * num_columns, 0.6 * len(queries) + 0.9), dpi=150)
    FigureCanvasAgg(figure)
    # A narrow empty column parts the blocks.
    widths = [1.0] + [0.35, *[1.0] * width] * len(neighborhoods)
    grid = figure.add_gridspec(
        len(queries),
        num_columns,
        width_ratios=widths,
        wspace=0.08,
        hspace=0.12,
        left=0.01,
        right=0.99,
        top=0.9,
        bottom=0.08,
    )
    asked = query_rows.take(queries)
    for row in range(len(queries)):
        _show(figure.add_subplot(grid[row, 0]), pixels_of(asked).images[row], "black")
        for block, neighborhood in enumerate(neighborhoods):
            found = bank_rows.take(neighborhood.neighbors[row])
            for place in range(width):
                axes = figure.add_subplot(grid[row, 2 + block * (width + 1) + place])
                if found.label[place] == asked.label[row]:
                    _show(axes, pixels_of(found).images[place], RIGHT)
                else:
                    _show(axes, pixels_of(found).images[place], WRONG)
                    _cross_out(axes)  # not everybody tells green from red
    _write_titles(figure, grid, neighborhoods, width)
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def _show(axes, image: NDArray[np.uint8], color: str) -> None:
    axes.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=255)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(color=color, linewidth=2.0)


def _cross_out(axes) -> None:
    axes.text(
        0.95, 0.95, "\u00d7", transform=axes.transAxes, color=WRONG, ha="right", va="top", weight="bold"
    )


def _write_titles(figure: Figure, grid, neighborhoods: Sequence[Neighborhood], width: int) -> None:
    def middle(first: int, last: int) -> float:
        left = grid[0, first].get_position(figure).x0
        return (left + grid[0, last].get_position(figure).x1) / 2

    figure.text(middle(0, 0), 0.925, "query", ha="center", fontsize=9)
    for block, neighborhood in enumerate(neighborhoods):
        first = 2 + block * (width + 1)
        figure.text(
            middle(first, first + width - 1),
            0.925,
            f"nearest by {neighborhood.title}",
            ha="center",
            fontsize=9,
        )
    figure.text(
        0.5, 0.02, "green frame: same digit; red frame and cross: another digit", ha="center", fontsize=8
    )
