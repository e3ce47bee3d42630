"""Draw the curves of runs from their ``metrics.jsonl``.

    python benchmarks/curves.py RUN --output docs/images/cifar10.png
    python benchmarks/curves.py RUN RUN ... [--names NAME NAME ...] --output docs/images/hinge.png

One run is drawn over its training time, with loss and periodic kNN. Several are drawn over their samples,
with loss, spread, effective rank and kNN; a dashed line ends a stage, a cross marks a detected collapse.
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raycl.records import read_metrics
from raycl.storage import Place

PANELS = {
    "loss": "loss",
    "embedding_std": "spread (1: even, 0: a point)",
    "effective_rank": "effective rank",
    "knn_top1": "kNN top-1, held-out rows",
}


def draw(axes: Axes, lines: list[dict[str, Any]], figure: str, *, name: str, color: str) -> None:
    """Draw one metric of one run; a rollback starts another line."""
    marker = "o-" if figure == "knn_top1" else "-"
    for number, attempt in enumerate(_attempts(lines)):
        known = [line for line in attempt if figure in line]
        samples = [line["samples"] / 1e3 for line in known]
        values = [line[figure] for line in known]
        label = name if number == 0 else None
        axes.plot(samples, values, marker, color=color, lw=1.2, ms=3.5, label=label)
        _mark_collapse(axes, attempt, figure, color)
    stages = [line for line in lines if "loss" in line]
    for before, after in itertools.pairwise(stages):
        if after["stage"] > before["stage"]:
            axes.axvline(before["samples"] / 1e3, color=color, lw=0.7, ls="--", alpha=0.6)


def _attempts(lines: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Split the lines at rollbacks."""
    attempts: list[list[dict[str, Any]]] = [[]]
    for line in lines:
        if line.get("event") == "rollback":
            attempts.append([])
        else:
            attempts[-1].append(line)
    return attempts


def _mark_collapse(axes: Axes, attempt: list[dict[str, Any]], figure: str, color: str) -> None:
    """Draw a cross on the last value before a collapse was detected."""
    last = None
    for line in attempt:
        last = line if figure in line else last
        if line.get("event") == "collapse" and last is not None:
            axes.plot([last["samples"] / 1e3], [last[figure]], "x", color=color, ms=9)


def draw_run(run: str) -> Figure:
    """Draw the loss and the periodic kNN of one run over its training time."""
    lines = read_metrics(Place(run))
    figure, loss_axes = plt.subplots(figsize=(7.0, 3.6), dpi=120)
    knn_axes = loss_axes.twinx()
    for axes, key, style in (
        (loss_axes, "loss", {"color": "#9ecae1", "lw": 0.8}),
        (knn_axes, "knn_top1", {"color": "#d94801", "lw": 1.5, "marker": "o", "ms": 4}),
    ):
        known = [line for line in lines if key in line]
        axes.plot([line["seconds"] / 60 for line in known], [line[key] for line in known], **style)
    loss_axes.set_xlabel("minutes of training")
    loss_axes.set_ylabel("NT-Xent", color="#4292c6")
    knn_axes.set_ylabel("kNN top-1 on held-out rows", color="#d94801")
    knn_axes.set_ylim(bottom=0.0)
    return figure


def draw_runs(runs: Sequence[str], names: Sequence[str]) -> Figure:
    """Draw four metrics of several runs over their samples."""
    figure, panels = plt.subplots(2, 2, figsize=(9.0, 6.0), dpi=110, sharex=True)
    colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for run, name, color in zip(runs, names, colors, strict=False):
        lines = read_metrics(Place(run))
        for axes, (key, title) in zip(panels.flat, PANELS.items(), strict=True):
            draw(axes, lines, key, name=name, color=color)
            axes.set_title(title, fontsize=9)
            axes.grid(alpha=0.25)
    for axes in panels[1]:
        axes.set_xlabel("thousand samples seen")
    for axes in panels.flat[1:]:
        axes.set_ylim(bottom=0.0)
    panels[0, 0].legend(fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", nargs="+", help="outputs of runs")
    parser.add_argument(
        "--names", nargs="+", help="titles of the runs; by default the names of their folders"
    )
    parser.add_argument("--output", default="curves.png")
    options = parser.parse_args()
    names = options.names or [Place(run).name for run in options.runs]
    figure = draw_run(options.runs[0]) if len(options.runs) == 1 else draw_runs(options.runs, names)
    figure.tight_layout()
    Path(options.output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output)


if __name__ == "__main__":
    main()
