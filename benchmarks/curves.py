"""Draw runs beside one another over the samples they saw: loss, spread, effective rank and kNN.

    python benchmarks/curves.py RUN RUN ... [--names NAME NAME ...] --output docs/images/hinge.png

A dashed line is where a stage ends; a cross, where a run was found to have collapsed.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from raycl.records import read_metrics
from raycl.storage import Place

PANELS = {
    "loss": "loss",
    "embedding_std": "spread (1: even, 0: a point)",
    "effective_rank": "effective rank",
    "knn_top1": "kNN top-1, held-out rows",
}


def draw(axes: Axes, lines: list[dict[str, Any]], figure: str, *, name: str, color: str) -> None:
    """Draw one figure of one run; after a rollback its line begins anew."""
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
    """Cut the lines where the run went back."""
    attempts: list[list[dict[str, Any]]] = [[]]
    for line in lines:
        if line.get("event") == "rollback":
            attempts.append([])
        else:
            attempts[-1].append(line)
    return attempts


def _mark_collapse(axes: Axes, attempt: list[dict[str, Any]], figure: str, color: str) -> None:
    """Put a cross on the last value before a collapse was told."""
    last = None
    for line in attempt:
        last = line if figure in line else last
        if line.get("event") == "collapse" and last is not None:
            axes.plot([last["samples"] / 1e3], [last[figure]], "x", color=color, ms=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", nargs="+", help="outputs of runs")
    parser.add_argument("--names", nargs="+", help="what to call them; the last part of the output else")
    parser.add_argument("--output", default="curves.png")
    options = parser.parse_args()
    names = options.names or [Place(run).name for run in options.runs]
    figure, panels = plt.subplots(2, 2, figsize=(9.0, 6.0), dpi=110, sharex=True)
    colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for run, name, color in zip(options.runs, names, colors, strict=False):
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
    figure.tight_layout()
    Path(options.output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output)


if __name__ == "__main__":
    main()
