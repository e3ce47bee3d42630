"""Run the demo: pretrain, compare with raw pixels and an untrained encoder, draw neighbors."""

import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from raycl.config import RunConfig
from raycl.data.images import ImageFormat
from raycl.data.in_memory import InMemoryDataset, pixels_of
from raycl.demo.digits import CANVAS, RUN, write_digits
from raycl.errors import StoppedError
from raycl.evaluation.embed import embed, raw_pixels
from raycl.evaluation.knn import knn_accuracy, nearest
from raycl.evaluation.linear import linear_accuracy
from raycl.inference.encoder import load_encoder
from raycl.inference.reading import read_images
from raycl.models.encoder_io import ImageEncoder
from raycl.records import CONFIG
from raycl.report.writer import reported
from raycl.storage import Place
from raycl.training.launch import train

LABELS_PER_CLASS = 10
NUM_DIGITS, NUM_NEIGHBORS = 10, 6
RIGHT, WRONG = "#1a9850", "#d73027"


@final
@dataclass(frozen=True, kw_only=True)
class Representation:
    """One vector per training and test image, [num_images, dim]."""

    name: str
    train: Tensor
    test: Tensor


def run_demo(output: str, config: RunConfig, *, debug: bool = False) -> dict[str, dict[str, float]]:
    """Run the demo as planned; return kNN and linear accuracy of each representation.

    Raises the errors of ``raycl.train``.
    """
    console, place = Console(), Place(output)
    train_uri, test_uri = write_digits(place)
    console.print(
        f"digits of scikit-learn, placed at random on {CANVAS}x{CANVAS} pixels: {place}", soft_wrap=True
    )
    console.print("kNN during training: held-out placements of training digits; at the end: unseen digits")
    run = (place / RUN).uri
    try:
        with reported(run):
            result = train(config, data=[train_uri], output=run, debug=debug)
    except StoppedError as error:
        saved = (place / RUN / CONFIG).uri
        command = ["raycl", "train", saved, "--data", train_uri, "--output", run, "--resume"]
        stopped = str(error).partition(";")[0]
        raise StoppedError(f"{stopped}; finish the run with `{shlex.join(command)}`", error.signum) from None
    console.print(
        f"trained {result.steps} steps in {result.seconds:.0f} s, {result.samples_per_second:,.0f} samples/s"
    )
    encoder = load_encoder(result.output)
    assert isinstance(encoder, ImageEncoder), "the demo trains on digits"
    image_format = ImageFormat(size=CANVAS, channels=1)
    train_rows, test_rows = (read_images(uri, image_format) for uri in (train_uri, test_uri))
    scores, figure = compare(encoder, train_rows, test_rows)
    console.print(_table(scores))
    picture, stream = place / "neighbors.png", io.BytesIO()
    figure.savefig(stream, format="png")
    picture.write_bytes(stream.getvalue())
    console.print(f"neighbors before and after: {picture}", soft_wrap=True)
    return scores


def compare(
    encoder: ImageEncoder, train: InMemoryDataset, test: InMemoryDataset
) -> tuple[dict[str, dict[str, float]], Figure]:
    """Return kNN and linear accuracy of each representation, and a figure of neighbors before and after training."""
    found = _represent(encoder, train, test)
    scores = {each.name: _score(each, train, test) for each in found}
    return scores, draw_neighbors(found, scores, train, test)


def _represent(encoder: ImageEncoder, train: InMemoryDataset, test: InMemoryDataset) -> list[Representation]:
    pixels = [raw_pixels(rows, channels=1, size=CANVAS) for rows in (train, test)]
    mean = pixels[0].mean(0)
    found = [Representation(name="raw pixels", train=pixels[0] - mean, test=pixels[1] - mean)]
    torch.manual_seed(0)
    untrained = ImageEncoder(encoder.spec.build(), encoder.spec).eval()
    for name, each in (("untrained encoder", untrained), ("trained encoder", encoder)):
        vectors = [
            embed(each, (each.prepare(pixels_of(batch).images) for batch in rows.batches(256)))
            for rows in (train, test)
        ]
        found.append(Representation(name=name, train=vectors[0], test=vectors[1]))
    return found


def _score(found: Representation, train: InMemoryDataset, test: InMemoryDataset) -> dict[str, float]:
    train_label, test_label = torch.from_numpy(train.label), torch.from_numpy(test.label)
    return {
        "knn": knn_accuracy(found.test, test_label, found.train, train_label),
        "linear": linear_accuracy(
            found.train, train_label, found.test, test_label, labels_per_class=LABELS_PER_CLASS
        ),
    }


def _table(scores: dict[str, dict[str, float]]) -> Table:
    table = Table(title="accuracy on unseen digits")
    table.add_column("")
    table.add_column("kNN", justify="right")
    table.add_column(f"linear, {LABELS_PER_CLASS} labels per class", justify="right")
    for name, score in scores.items():
        table.add_row(name, f"{score['knn']:.3f}", f"{score['linear']:.3f}")
    return table


def draw_neighbors(
    found: Sequence[Representation],
    scores: Mapping[str, Mapping[str, float]],
    train: InMemoryDataset,
    test: InMemoryDataset,
) -> Figure:
    """Draw a query of each digit at the left, then one block of neighbors per representation, with its kNN accuracy."""
    queries = np.array([np.flatnonzero(test.label == label)[0] for label in range(NUM_DIGITS)])
    num_columns = 1 + len(found) * (NUM_NEIGHBORS + 1)
    figure = Figure(figsize=(0.55 * num_columns, 0.6 * len(queries) + 1.1), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    # A narrow empty column separates the blocks.
    widths = [1.0] + [0.35, *[1.0] * NUM_NEIGHBORS] * len(found)
    margins = {"left": 0.01, "right": 0.99, "top": 0.89, "bottom": 0.07}
    grid = figure.add_gridspec(
        len(queries), num_columns, width_ratios=widths, wspace=0.08, hspace=0.12, **margins
    )

    def write_title(text: str, first: int, last: int) -> None:
        left, right = (grid[0, column].get_position(figure) for column in (first, last))
        figure.text((left.x0 + right.x1) / 2, 0.91, text, ha="center", fontsize=14)

    write_title("query", 0, 0)
    query_rows = test.take(queries)
    for row, image in enumerate(pixels_of(query_rows).images):
        _show(figure.add_subplot(grid[row, 0]), image, "black")
    for block, each in enumerate(found):
        first = 2 + block * (NUM_NEIGHBORS + 1)
        title = f"nearest by {each.name}\nkNN accuracy {scores[each.name]['knn']:.3f}"
        write_title(title, first, first + NUM_NEIGHBORS - 1)
        _, neighbors = nearest(each.test[torch.from_numpy(queries)], each.train, k=NUM_NEIGHBORS)
        for row, positions in enumerate(neighbors.numpy()):
            rows = train.take(positions)
            for column, image in enumerate(pixels_of(rows).images):
                is_right = rows.label[column] == query_rows.label[row]
                axes = figure.add_subplot(grid[row, first + column])
                _show(axes, image, RIGHT if is_right else WRONG)
                if not is_right:  # a cross beside the color, for color-blind readers
                    where: Any = {"transform": axes.transAxes, "ha": "right", "va": "top"}
                    axes.text(0.95, 0.95, "\u00d7", color=WRONG, weight="bold", **where)
    legend = "green frame: same digit; red frame and cross: another digit"
    figure.text(0.5, 0.02, legend, ha="center", fontsize=14)
    return figure


def _show(axes: Any, image: np.ndarray, color: str) -> None:
    axes.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=255)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(color=color, linewidth=2.0, visible=True)
