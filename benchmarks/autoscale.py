"""A run that makes its cluster grow and lets it go again: nodes and workers over time, as a picture.

    python benchmarks/autoscale.py [--workers 1:3] [--epochs 30] [--output docs/images/autoscale.png]

Starts a Ray of its own whose head has no CPU and whose autoscaler starts raylets of one CPU each on
this machine, one after the other, each ``--boot-s`` seconds after it was asked for. ``raycl train``
then runs as a process of its own on the demo's digits, with ``--workers 1:3 --set autoscaling=true``.
Drawn is what Ray counts as alive, once a second, and the ``workers`` that each line of
``metrics.jsonl`` names at its ``time``. All that was started is ended again. Beside the picture lies a
JSON file of the same name with every number in it.
"""

import argparse
import json
import os
import signal
import sys
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"  # or Ray writes a token into the home folder

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from measuring import describe_machine

from raycl.demo.digits import write_digits
from raycl.records import read_metrics
from raycl.storage import Place

# In any environment in which raycl is installed for development.
from tests.growing_cluster import GrowingCluster, growing_cluster

SETTINGS = {
    "autoscaling": "true",
    "checkpoints.interval_s": 10,
    "encoder.name": "resnet10",
    "encoder.width": 0.25,
    "evaluation.every_epochs": 0,
    "log_every_steps": 1,
}
INK, NODES, WORKERS = "#222222", "#b8b8b8", "#1f6fb4"


def watch(cluster: GrowingCluster, *, workers: str, epochs: int, batch_size: int) -> dict[str, Any]:
    """Train on the cluster until its nodes have gone; return events with seconds since the start."""
    data, _ = write_digits(Place(str(cluster.folder / "digits")))
    output = str(cluster.folder / "run")
    numbers = {"--workers": workers, "--epochs": epochs, "--batch-size": batch_size}
    flags = {"--data": data, "--output": output, **numbers}
    arguments = [part for name, value in flags.items() for part in (name, str(value))]
    arguments += [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    began, over = cluster.train("simclr", *arguments)
    cluster.wait_until_empty()
    lines = [line for line in read_metrics(Place(output)) if "loss" in line]
    return {
        "nodes": [[round(seen.time - began, 1), seen.nodes, seen.cpus] for seen in cluster.seen],
        "workers": [[line["time"] - round(began), line["workers"], line["step"]] for line in lines],
        "over": round(over - began, 1),
    }


def events(seen: dict[str, Any]) -> dict[str, float]:
    """Return events and their times."""
    steps, nodes = seen["workers"], seen["nodes"]
    found = {"submitted": 0.0, "first step": steps[0][0]}
    for before, after in pairwise(steps):
        if after[1] != before[1]:
            found[f"{after[1]} workers"] = after[0]
    found["last step"] = steps[-1][0]
    last_there = max(index for index, (_, count, _) in enumerate(nodes) if count)
    if last_there + 1 < len(nodes):
        found["last node gone"] = nodes[last_there + 1][0]
    return found


def draw(seen: dict[str, Any], path: Path) -> None:
    """Draw nodes as a ground and on it a line for each group of workers, from its first step to its last."""
    figure, axes = plt.subplots(figsize=(8.6, 3.4), dpi=110, layout="constrained")
    times, nodes, _ = zip(*seen["nodes"], strict=True)
    axes.fill_between(
        times, nodes, step="post", color=NODES, alpha=0.55, lw=0, label="nodes besides the head"
    )
    for number, (since, until, workers) in enumerate(spells(seen["workers"])):
        label = "workers that make steps" if number == 0 else None
        axes.plot([since, until], [workers, workers], color=WORKERS, lw=4, solid_capstyle="butt", label=label)
    top = max(nodes)
    _mark_events(axes, events(seen), top)
    axes.set(xlabel="seconds since the run was submitted", yticks=range(top + 1), ylim=(0, top + 1.35))
    axes.set_xlim(-0.02 * times[-1], 1.05 * times[-1])
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines["left"].set_bounds(0, top)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 1.16), ncols=2, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def spells(steps: list[list[int]]) -> list[tuple[int, int, int]]:
    """Return (since, until, workers) of each group's first and last step."""
    groups = [list(lines) for _, lines in groupby(steps, key=itemgetter(1))]
    return [(lines[0][0], lines[-1][0], lines[0][1]) for lines in groups]


def _mark_events(axes: Axes, happened: dict[str, float], top: int) -> None:
    for number, (name, at) in enumerate(happened.items()):
        height = top + 0.35 + 0.45 * (number % 2)
        axes.plot([at, at], [0, height - 0.08], color=INK, lw=0.7, ls=":")
        paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        axes.text(at, height, f"{name}\n{at:.0f} s", fontsize=8, color=INK, ha="center", bbox=paper)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", default="1:3")
    parser.add_argument("--epochs", type=int, default=30, help="enough for three minutes")
    parser.add_argument("--batch-size", type=int, default=384)
    parser.add_argument("--boot-s", type=float, default=45.0, help="from one node to the next")
    parser.add_argument("--output", type=Path, default=Path("autoscale.png"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is ended first
    most = int(options.workers.split(":")[-1])
    with growing_cluster(max_nodes=most, boot_s=options.boot_s) as cluster:
        seen = watch(cluster, workers=options.workers, epochs=options.epochs, batch_size=options.batch_size)
    draw(seen, options.output)
    seen = {"events": events(seen), **seen, "command": " ".join(sys.argv), "machine": describe_machine()}
    options.output.with_suffix(".json").write_text(json.dumps(seen) + "\n")
    for name, at in seen["events"].items():
        print(f"{at:6.0f} s  {name}")
    print(f"{seen['workers'][-1][2]} steps, {max(nodes for _, nodes, _ in seen['nodes'])} nodes at most")


if __name__ == "__main__":
    main()
