"""The pictures of all benchmarks: panels without frames, logarithmic axes in plain numbers, small files."""

import io
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from PIL import Image

PAPER, INK, FAINT = "#fbfaf6", "#1f2933", "#6b7680"
BLUE, ORANGE, GREEN, RED = "#3b6fb6", "#d9822b", "#2f8f5b", "#c0433f"
BLUES = ("#9ecae1", "#4292c6", "#08519c")
_STYLE: dict[str, Any] = {"text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}
_STYLE |= {"axes.edgecolor": FAINT, "axes.facecolor": PAPER, "figure.facecolor": PAPER}
_STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
plt.rcParams |= _STYLE


def panels(
    num_rows: int, num_columns: int, width: float, height: float, **how: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure of this size in inches, with its panels row by row."""
    how = {"layout": "constrained"} | how
    figure, grid = plt.subplots(num_rows, num_columns, figsize=(width, height), **how)
    return figure, list(np.atleast_1d(grid).flat)


def as_logs(axes: Axes, horizontal: str, vertical: str) -> None:
    """Set both axes to logarithms, labeled in plain numbers."""
    axes.set(xscale="log", yscale="log", xlabel=horizontal, ylabel=vertical)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        axis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
        )
        axis.set_minor_formatter(NullFormatter())


def save(figure: Figure, path: Path, *, dpi: int = 110, num_colors: int = 64) -> None:
    """Save with few colors, chosen by coverage: the file is a third as large, and keeps what is rare."""
    stream = io.BytesIO()
    figure.savefig(stream, dpi=dpi)
    plt.close(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    few = Image.open(stream).convert("RGB").quantize(num_colors, Image.Quantize.MAXCOVERAGE)
    few.save(path, optimize=True)
