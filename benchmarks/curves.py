"""Draw loss, spread, effective rank and kNN of runs over their samples, from their ``metrics.jsonl``.

    python benchmarks/curves.py RUN RUN ... [--names NAME NAME ...] --output docs/images/hinge.png

A dashed line ends a stage, a cross marks a detected collapse.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from claims.results import attempts
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from measuring import make_parser
from pictures import panels, save

from raycl.records import read_metrics
from raycl.storage import Place

PANELS = {
    "loss": "loss",
    "embedding_std": "spread (1: even, 0: a point)",
    "effective_rank": "effective rank",
    "knn_top1": "kNN top-1, held-out rows",
}


def draw(axes: Axes, lines: Sequence[dict[str, Any]], key: str, **style: Any) -> None:
    """Draw one metric of one run; a rollback starts another line, and a collapse marks its last value."""
    marked: dict[str, Any] = {"lw": 1.2, "ms": 3.5, "marker": "o" if key == "knn_top1" else ""}
    for number, attempt in enumerate(attempts(lines)):
        x: list[float] = []
        y: list[float] = []
        for line in attempt:
            if line.get("event") == "collapse" and x:
                axes.plot(x[-1:], y[-1:], "x", color=style["color"], ms=9)
            elif key in line:
                x.append(line["samples"] / 1e3)
                y.append(line[key])
        how: dict[str, Any] = marked | style | ({"label": None} if number else {})
        axes.plot(x, y, **how)
    for before, after in itertools.pairwise(line for line in lines if "loss" in line):
        if after["stage"] > before["stage"]:
            axes.axvline(before["samples"] / 1e3, color=style["color"], lw=0.7, ls="--", alpha=0.6)


def draw_runs(runs: Sequence[str], names: Sequence[str]) -> Figure:
    """Draw four metrics of several runs over their samples."""
    figure, grid = panels(2, 2, 9.0, 6.0, sharex=True)
    for number, (run, name) in enumerate(zip(runs, names, strict=False)):
        lines = read_metrics(Place(run))
        for axes, key in zip(grid, PANELS, strict=True):
            draw(axes, lines, key, label=name, color=f"C{number}")
    for axes, title in zip(grid, PANELS.values(), strict=True):
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.25)
        axes.set_ylim(bottom=None if title == "loss" else 0.0)
    for axes in grid[2:]:
        axes.set_xlabel("thousand samples seen")
    grid[0].legend(fontsize=8)
    return figure


def main() -> None:
    parser = make_parser(__doc__, reports=False, output="curves.png")
    parser.add_argument("runs", nargs="+", help="outputs of runs")
    parser.add_argument("--names", nargs="+", help="by default the names of their folders")
    options = parser.parse_args()
    names = options.names or [Place(run).name for run in options.runs]
    save(draw_runs(options.runs, names), Path(options.output))


if __name__ == "__main__":
    main()
