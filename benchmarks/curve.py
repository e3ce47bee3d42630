"""Draw a run's loss and periodic kNN over training time, from its ``metrics.jsonl``.

python benchmarks/curve.py RUN --output docs/images/cifar10.png
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from raycl.records import read_metrics
from raycl.storage import Place


def main() -> None:
    parser = argparse.ArgumentParser(description="draw a run's loss and periodic kNN")
    parser.add_argument("run", help="the --output of a run")
    parser.add_argument("--output", default="curve.png")
    options = parser.parse_args()
    lines = read_metrics(Place(options.run))
    figure, loss_axes = plt.subplots(figsize=(7.0, 3.6), dpi=120)
    steps = [line for line in lines if "loss" in line]
    loss_axes.plot(
        [line["seconds"] / 60 for line in steps], [line["loss"] for line in steps], color="#9ecae1", lw=0.8
    )
    loss_axes.set_xlabel("minutes of training")
    loss_axes.set_ylabel("NT-Xent", color="#4292c6")
    knn_axes = loss_axes.twinx()
    judged = [line for line in lines if "knn_top1" in line]
    minutes = [line["seconds"] / 60 for line in judged]
    knn_axes.plot(minutes, [line["knn_top1"] for line in judged], "o-", color="#d94801", lw=1.5, ms=4)
    knn_axes.set_ylabel("kNN top-1 on held-out rows", color="#d94801")
    knn_axes.set_ylim(bottom=0.0)
    figure.tight_layout()
    Path(options.output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output)


if __name__ == "__main__":
    main()
