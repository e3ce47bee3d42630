"""A run that makes its cluster grow and lets it go again: nodes and workers over time, as a picture.

    python benchmarks/autoscale.py [--workers 1:3] [--epochs 30] [--batch-size 384] [--boot-s 45]
        [--output docs/images/autoscale.png]

Starts a Ray of its own whose head has no CPU and whose autoscaler starts raylets of one CPU each on
this machine, one after the other, each ``--boot-s`` seconds after it was asked for. ``raycl train``
then runs as a process of its own on the demo's digits, with ``--workers 1:3 --set autoscaling=true``.
Drawn is what Ray counts as alive, once a second, and the ``workers`` that each line of
``metrics.jsonl`` names at its ``time``. All that was started is ended again. Beside the picture lies a
JSON file of the same name with every number in it.
"""

import os
import signal
import sys
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"  # or Ray writes a token into the home folder

from measuring import describe_machine, make_parser, write_json
from pictures import BLUE, INK, PAPER, panels, save

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


def watch(
    cluster: GrowingCluster, recipe: str, flags: dict[str, Any], settings: dict[str, Any], *fields: str
) -> dict[str, Any]:
    """Train on the cluster until its nodes have gone; return what was seen, with seconds since the start.

    ``lines`` has the time of each logged line, and these fields of it.
    """
    data, _ = write_digits(Place(str(cluster.folder / "digits")))
    output = str(cluster.folder / "run")
    flags = {"--data": data, "--output": output, **flags}
    arguments = [part for name, value in flags.items() for part in (name, str(value))]
    arguments += [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    began, over = cluster.train(recipe, *arguments)
    cluster.wait_until_empty()
    lines = [line for line in read_metrics(Place(output)) if "loss" in line]
    return {
        "nodes": [[round(seen.time - began, 1), seen.nodes, seen.cpus] for seen in cluster.seen],
        "lines": [[line["time"] - round(began), *(line[field] for field in fields)] for line in lines],
        "over": round(over - began, 1),
    }


def events(seen: dict[str, Any]) -> dict[str, float]:
    """Return events and their times."""
    steps, nodes = seen["lines"], seen["nodes"]
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
    figure, (axes,) = panels(1, 1, 8.6, 3.4)
    times, nodes, _ = zip(*seen["nodes"], strict=True)
    axes.fill_between(
        times, nodes, step="post", color="#b8b8b8", alpha=0.55, lw=0, label="nodes besides the head"
    )
    label: str | None = "workers that make steps"
    for workers, group in groupby(seen["lines"], key=itemgetter(1)):
        steps = list(group)
        axes.plot([steps[0][0], steps[-1][0]], [workers, workers], color=BLUE, lw=4, label=label)
        label = None
    top = max(nodes)
    for number, (name, at) in enumerate(events(seen).items()):
        height = top + 0.35 + 0.45 * (number % 2)
        axes.plot([at, at], [0, height - 0.08], color=INK, lw=0.7, ls=":")
        paper = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.6}
        axes.text(at, height, f"{name}\n{at:.0f} s", fontsize=8, ha="center", bbox=paper)
    axes.set(xlabel="seconds since the run was submitted", yticks=range(top + 1), ylim=(0, top + 1.35))
    axes.set_xlim(-0.02 * times[-1], 1.05 * times[-1])
    axes.spines["left"].set_bounds(0, top)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 1.16), ncols=2, fontsize=9)
    save(figure, path)


def main() -> None:
    flags: dict[str, Any] = {
        "workers": "1:3",
        "epochs": 30,
        "batch_size": 384,
        "boot_s": 45.0,
        "output": "autoscale.png",
    }
    options = make_parser(__doc__, reports=False, **flags).parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is ended first
    most = int(options.workers.split(":")[-1])
    with growing_cluster(max_nodes=most, boot_s=options.boot_s) as cluster:
        numbers = {"--epochs": options.epochs, "--batch-size": options.batch_size}
        seen = watch(
            cluster, "simclr", {"--workers": options.workers, **numbers}, SETTINGS, "workers", "step"
        )
    picture = Path(options.output)
    draw(seen, picture)
    seen = {"events": events(seen), **seen, "command": " ".join(sys.argv), "machine": describe_machine()}
    write_json(picture.with_suffix(".json"), seen)
    for name, at in seen["events"].items():
        print(f"{at:6.0f} s  {name}")
    print(f"{seen['lines'][-1][2]} steps, {max(nodes for _, nodes, _ in seen['nodes'])} nodes at most")


if __name__ == "__main__":
    main()
