"""Run the demo: pretrain, judge against raw pixels and an untrained encoder, draw neighbors."""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from raycl.data.images import ImageFormat
from raycl.data.in_memory import InMemoryDataset, pixels_of
from raycl.demo.digits import CANVAS, write_digits
from raycl.demo.picture import Neighborhood, draw_neighbors
from raycl.demo.plan import RUN, DemoPlan
from raycl.evaluation.embed import embed
from raycl.evaluation.knn import knn_accuracy, nearest
from raycl.evaluation.linear import linear_accuracy
from raycl.inference.classification import raw_pixels
from raycl.inference.read_rows import read_rows
from raycl.models.encoder_io import ImageEncoder, load_encoder
from raycl.models.specs import ImageEncoderSpec
from raycl.report.ending import reported
from raycl.training.launch import train

LABELS_PER_CLASS = 10
NUM_QUERIES, NUM_NEIGHBORS = 8, 6


@final
@dataclass(frozen=True, kw_only=True)
class Look:
    """One way to see the digits: a vector for every training and test image."""

    name: str
    train: Tensor
    test: Tensor


def run_demo(plan: DemoPlan, *, debug: bool = False) -> dict[str, dict[str, float]]:
    """Do as planned; return kNN and linear accuracy of each way to look.

    Raises the errors of ``raycl.train``.
    """
    console, place = Console(), plan.place
    train_uri, test_uri = write_digits(place)
    console.print(
        f"digits of scikit-learn, placed at random on {CANVAS}x{CANVAS} pixels: {place}", soft_wrap=True
    )
    console.print("kNN on the way: held-out placements of training digits; at the end: digits never seen")
    run = (place / RUN).uri
    with reported(run):
        result = train(plan.config, data=train_uri, output=run, debug=debug)
    console.print(
        f"trained {result.steps} steps in {result.seconds:.0f} s, {result.samples_per_second:,.0f} samples/s"
    )
    encoder = load_encoder(result.output)
    assert isinstance(encoder, ImageEncoder), "the demo trains on digits"
    image_format = ImageFormat(size=CANVAS, channels=1)
    train_rows, test_rows = (read_rows(uri, image_format) for uri in (train_uri, test_uri))
    looks = _looks(encoder, train_rows, test_rows)
    scores = {look.name: _score(look, train_rows, test_rows) for look in looks}
    console.print(_table(scores))
    picture = place / "neighbors.png"
    picture.write_bytes(_picture(looks, train_rows, test_rows))
    console.print(f"neighbors before and after: {picture}", soft_wrap=True)
    return scores


def _looks(encoder: ImageEncoder, train_rows: InMemoryDataset, test_rows: InMemoryDataset) -> list[Look]:
    pixels = [raw_pixels(rows, channels=1, size=CANVAS) for rows in (train_rows, test_rows)]
    mean = pixels[0].mean(0)
    return [
        Look(name="raw pixels", train=pixels[0] - mean, test=pixels[1] - mean),
        _encoded("untrained encoder", _untrained(encoder.spec), train_rows, test_rows),
        _encoded("trained encoder", encoder, train_rows, test_rows),
    ]


def _untrained(spec: ImageEncoderSpec) -> ImageEncoder:
    torch.manual_seed(0)
    return ImageEncoder(spec.build(), spec).eval()


def _encoded(
    name: str, encoder: ImageEncoder, train_rows: InMemoryDataset, test_rows: InMemoryDataset
) -> Look:
    train, test = (
        embed(encoder, (encoder.prepare(pixels_of(batch).images) for batch in rows.batches(256)))
        for rows in (train_rows, test_rows)
    )
    return Look(name=name, train=train, test=test)


def _score(look: Look, train_rows: InMemoryDataset, test_rows: InMemoryDataset) -> dict[str, float]:
    train_label, test_label = torch.from_numpy(train_rows.label), torch.from_numpy(test_rows.label)
    return {
        "knn": knn_accuracy(look.test, test_label, look.train, train_label),
        "linear": linear_accuracy(
            look.train, train_label, look.test, test_label, labels_per_class=LABELS_PER_CLASS
        ),
    }


def _table(scores: dict[str, dict[str, float]]) -> Table:
    table = Table(title="accuracy on digits never seen in training")
    table.add_column("")
    table.add_column("kNN", justify="right")
    table.add_column(f"linear, {LABELS_PER_CLASS} labels a class", justify="right")
    for name, score in scores.items():
        table.add_row(name, f"{score['knn']:.3f}", f"{score['linear']:.3f}")
    return table


def _picture(looks: list[Look], train_rows: InMemoryDataset, test_rows: InMemoryDataset) -> bytes:
    # One query of each of the first classes, always the same ones.
    queries = np.array([np.flatnonzero(test_rows.label == label)[0] for label in range(NUM_QUERIES)])
    neighborhoods = [
        Neighborhood(
            title=look.name,
            neighbors=nearest(look.test[torch.from_numpy(queries)], look.train, k=NUM_NEIGHBORS)[1].numpy(),
        )
        for look in looks
    ]
    return draw_neighbors(test_rows, queries, train_rows, neighborhoods)
