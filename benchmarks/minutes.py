"""Accuracy over minutes: a finished run of raycl beside lightly's SimCLR and MoCo, on the same cores and images.

    raycl train simclr --data train.parquet --output RUN --epochs 40 --workers 2
    python benchmarks/minutes.py --run RUN --data train.parquet [--minutes 30] --output minutes.png [--json FILE]

lightly trains as in its examples: torchvision's ResNet-18 in float32, SGD with a rate of 0.06, batches of 256, a
temperature of 0.5, and for MoCo a memory bank of 4,096 rows; one process that decodes for each core. The accuracy of
both is the weighted kNN of the run's held-out rows among its reference rows. lightly also trains on the held-out rows,
without their labels. Minutes include the evaluations, and for raycl the start of its workers; the start of Ray and the
imports of the first process are left out on both sides.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_lightly import plain_batches
from measuring import Line, make_parser, report, table
from pictures import BLUE, GREEN, ORANGE, panels, save
from training_steps import LightlyTraining

from raycl.config.overrides import config_from_yaml
from raycl.evaluation.embed import embed
from raycl.evaluation.knn import knn_predict
from raycl.records import CONFIG, read_metrics
from raycl.storage import Place
from raycl.training.data_module import hold_out

EVERY_MINUTES = 2.0
QUEUES = {"SimCLR": 0, "MoCo": 4_096}
COLORS = {"raycl": BLUE, "lightly SimCLR": ORANGE, "lightly MoCo": GREEN}
Curve = list[Line]


def curve_of_run(run: Place, minutes: float) -> Curve:
    """Return the periodic kNN of a run, and the samples until then."""
    lines = [line for line in read_metrics(run) if "knn_top1" in line]
    curve = [
        {"minutes": line["wall_seconds"] / 60, "knn_top1": line["knn_top1"], "samples": line["samples"]}
        for line in lines
    ]
    return [line for line in curve if line["minutes"] <= minutes]


def evaluation_of_run(run: Place, data: str) -> Callable[[torch.nn.Module], float]:
    """Return a function that measures an encoder as the run measures its own, on the same images."""
    batches = [*plain_batches(data)]
    images, labels = (torch.cat(each) for each in zip(*batches, strict=True))
    config = config_from_yaml((run / CONFIG).read_text(), name=str(run / CONFIG))
    ids = np.arange(len(images))
    holdout = hold_out(config, len(images), can_be_evaluated=True)
    sides = [torch.from_numpy(mask(ids)) for mask in (holdout.is_test, holdout.is_reference)]
    (test, test_label), (bank, bank_label) = ((images[side], labels[side]) for side in sides)

    def measure(encoder: torch.nn.Module) -> float:
        rows, others = (embed(encoder, iter(side.split(500))) for side in (test, bank))
        settings: dict[str, Any] = {"k": config.evaluation.k, "temperature": config.evaluation.temperature}
        return (knn_predict(rows, others, bank_label, **settings) == test_label).double().mean().item()

    return measure


def train_lightly(
    data: str, queue: int, minutes: float, measure: Callable[[torch.nn.Module], float]
) -> Iterator[Line]:
    """Train for some minutes; yield the accuracy before the first step and every other minute."""
    torch.manual_seed(0)
    training = LightlyTraining(
        data,
        queue=queue,
        encoder="torchvision",
        batch_size=256,
        temperature=0.5,
        learning_rate=0.06,
        precision="float32",
        loaders=0,  # one a core
    )
    began, due, samples = time.monotonic(), 0.0, 0
    while True:
        for views in training.loader:
            elapsed = (time.monotonic() - began) / 60
            if elapsed >= due or elapsed >= minutes:
                yield {"minutes": elapsed, "knn_top1": measure(training.tower[0]), "samples": samples}
                due += EVERY_MINUTES
            if elapsed >= minutes:
                return
            training.step(views)
            samples += len(views[0])


def draw(curves: dict[str, Curve], path: Path) -> None:
    """Draw accuracy over minutes, a line a side."""
    figure, (axes,) = panels(1, 1, 7.0, 3.6)
    for side, curve in curves.items():
        points = [line["minutes"] for line in curve], [line["knn_top1"] for line in curve]
        axes.plot(*points, color=COLORS[side], marker="o", ms=3.5, lw=1.5, label=side)
    axes.set(xlabel="minutes on the same cores", ylabel="kNN top-1, held-out images", ylim=(0, None))
    axes.legend(frameon=False, loc="lower right")
    save(figure, path)


def main() -> None:
    options = make_parser(
        __doc__, run=Path, data=str, minutes=30.0, sides=list(QUEUES), output=Path
    ).parse_args()
    run, curves = Place(str(options.run)), dict[str, Curve]()
    curves["raycl"] = curve_of_run(run, options.minutes)
    measure = evaluation_of_run(run, options.data)
    for side in options.sides:
        curve = curves[f"lightly {side}"] = []
        for line in train_lightly(options.data, QUEUES[side], options.minutes, measure):
            curve.append(line)
            print(f"lightly {side}: {line['minutes']:.1f} min, kNN {line['knn_top1']:.3f}", flush=True)
    lines = [{"side": side} | line for side, curve in curves.items() for line in curve]
    columns = {"minutes": "minutes", "samples": "samples", "knn_top1": "kNN top-1"}
    report(options, lines, table(lines, side="", **columns))
    draw(curves, options.output)


if __name__ == "__main__":
    main()
