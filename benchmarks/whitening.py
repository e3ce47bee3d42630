"""An encoder with and without the layer that whitens its representations: neighbors, and classifiers of few labels.

    python benchmarks/whitening.py --run RUN --train TRAIN.parquet --test TEST.parquet [--rows 50000] [--shrinkage 3]
        [--json FILE]

RUN was trained with ``encoder.whitening``. Its representations of both sets, whose columns are ``image`` and ``label``, are
computed once; without the layer, they are the layer's input. At most ``--rows`` rows of each are used, drawn at random.
``raycl evaluate`` has the same kNN and linear classifiers. ``precision`` is the part of the ten nearest training images
with the label of the test image. Raw pixels are whitened with ``--shrinkage``.
"""

from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from measuring import Line, make_parser, report, table
from torch import Tensor

from raycl import load_encoder
from raycl.evaluation.knn import knn_accuracy, nearest
from raycl.evaluation.linear import linear_accuracy
from raycl.models.image import last_layer
from raycl.models.whitening import Whitening

BATCH = 500
Rows = tuple[Tensor, Tensor]  # representations or pixels, and labels


def read(path: str, most: int) -> tuple[list[bytes], Tensor]:
    """Return images and labels of at most so many rows."""
    rows = pq.read_table(path, columns=["image", "label"])
    rows = rows.take(np.sort(np.random.default_rng(0).permutation(len(rows))[:most]))
    images = [each["bytes"] if isinstance(each, dict) else each for each in rows["image"].to_pylist()]
    return images, torch.from_numpy(rows["label"].to_numpy().astype(np.int64))


def pixels(encoder: Any, images: list[bytes]) -> Tensor:
    """Return the pixels of images as the encoder sees them."""
    parts = [images[at : at + BATCH] for at in range(0, len(images), BATCH)]
    return torch.cat([encoder.prepare(part).flatten(1) for part in parts])


def neighbors(side: str, train: Rows, test: Rows) -> Line:
    """Return the figures of neighbors by cosine."""
    _, found = nearest(test[0], train[0], k=10)
    precision = float((train[1][found] == test[1][:, None]).float().mean())
    return {"side": side, "knn": knn_accuracy(*test, *train), "precision": precision}


def classifiers(train: Rows, test: Rows) -> Line:
    """Return the accuracies of linear classifiers."""
    return {
        f"linear_{number}": linear_accuracy(*train, *test, labels_per_class=number) for number in (10, 100)
    }


def main() -> None:
    flags: dict[str, Any] = {"run": str, "train": str, "test": str, "rows": 50_000, "shrinkage": 3.0}
    options = make_parser(__doc__, **flags).parse_args()
    encoder: Any = load_encoder(options.run)
    layer = getattr(encoder.network, last_layer(encoder.spec.name))
    inverse = torch.linalg.inv(layer.weight.double())
    raw, sets, before = list[Rows](), list[Rows](), list[Rows]()
    for path in (options.train, options.test):
        images, label = read(path, options.rows)
        raw.append((pixels(encoder, images), label))
        sets.append((encoder.encode(images), label))
        before.append((((sets[-1][0] - layer.bias).double() @ inverse.T).float(), label))
    mean = raw[0][0].mean(0)
    moments = Whitening(len(mean), shrinkage=options.shrinkage)
    moments.update(raw[0][0])
    whiten = moments.layer()
    lines = [
        neighbors("raw pixels", *((rows - mean, label) for rows, label in raw)),
        neighbors("raw pixels, whitened", *((whiten(rows), label) for rows, label in raw)),
        neighbors("the encoder without the layer", *before) | classifiers(*before),
        neighbors("the encoder", *sets) | classifiers(*sets),
    ]
    titles = {"side": "", "knn": "kNN", "precision": "precision at 10"}
    titles |= {"linear_10": "linear, 10 labels per class", "linear_100": "100 labels per class"}
    report(options, lines, table(lines, **titles))


if __name__ == "__main__":
    main()
