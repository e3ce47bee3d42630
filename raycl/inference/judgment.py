"""Judging a run on a training and a test set: kNN and linear probe, raw pixels beside."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import ray
import torch
from torch import Tensor

from raycl.augment.images import center_view
from raycl.cluster import join_cluster
from raycl.data.rows import Rows
from raycl.data.sources import NO_LABEL, ColumnNames, find_source
from raycl.errors import DataError
from raycl.inference.embedding import absolute, decode_set, embed_dataset, image_format
from raycl.judging.knn import knn_accuracy
from raycl.judging.linear import linear_accuracy
from raycl.models.saved import ImageEncoder, load_encoder

Measure = Literal["knn", "linear"]
MAX_FLOOR_ROWS = 50_000  # raw pixels of more rows would not fit; the floor is then that of a part
FLOOR_SIZE = 32  # pixels a side


@final
@dataclass(frozen=True, kw_only=True)
class LabeledSet:
    """Rows with labels [num_rows], and either their representations or their raw pixels."""

    values: Tensor
    label: Tensor


def evaluate(
    measure: Measure,
    *,
    run: str,
    train: str,
    test: str,
    columns: ColumnNames | None = None,
    k: int = 200,
    temperature: float = 0.07,
    labels_per_class: int | None = None,
    floor: bool = True,
    gpu: bool = False,
    max_bad_fraction: float = 0.01,
    seed: int = 0,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> dict[str, Any]:
    """Judge the encoder of ``run`` by labels: representations of ``train`` decide about ``test``.

    Returns ``measure``, ``top1``, ``num_train``, ``num_test`` and ``floor`` (the same measure on
    raw pixels, at most 32 a side with the mean image subtracted). Raises ``DataError`` if a set has
    no labels, ``StorageError`` if there is no encoder.
    """
    encoder = load_encoder(run)
    sources = {name: find_source(absolute(uri), columns) for name, uri in (("train", train), ("test", test))}
    for name, source in sources.items():
        if not source.has_labels:
            raise DataError(
                f"the {name} set {source.uri} has no labels; put images in a folder a class, "
                "or name the column with --set data.columns.label=NAME"
            )
    join_cluster(address, debug=debug)

    def score(train_set: LabeledSet, test_set: LabeledSet) -> float:
        if measure == "knn":
            return knn_accuracy(
                test_set.values,
                test_set.label,
                train_set.values,
                train_set.label,
                k=k,
                temperature=temperature,
            )
        return linear_accuracy(
            train_set.values, train_set.label, test_set.values, test_set.label,
            labels_per_class=labels_per_class, seed=seed,
        )  # fmt: skip

    decoded = {
        name: decode_set(source, encoder.spec, name=name, max_bad_fraction=max_bad_fraction, quiet=quiet)
        for name, source in sources.items()
    }
    embedded = {name: _representations(rows, run, encoder.spec.representation_dim, gpu=gpu) for name, rows in decoded.items()}
    result: dict[str, Any] = {"measure": measure, "top1": score(embedded["train"], embedded["test"])}
    if measure == "linear" and labels_per_class is not None:
        result["labels_per_class"] = labels_per_class
    result |= {"num_train": len(embedded["train"].label), "num_test": len(embedded["test"].label)}
    if floor:
        result["floor"] = {"pixels": _pixel_floor(decoded, encoder, score)}
    return result


def _representations(decoded: ray.data.Dataset, run: str, width: int, *, gpu: bool) -> LabeledSet:
    tables = ray.get(embed_dataset(decoded, run, gpu=gpu).materialize().to_arrow_refs())
    values = [
        chunk.flatten().to_numpy().reshape(-1, width)
        for table in tables
        for chunk in table["representation"].chunks
    ]
    label = np.concatenate([table["label"].to_numpy() for table in tables])
    return _labeled(torch.from_numpy(np.concatenate(values)), torch.from_numpy(label))


def _pixel_floor(
    decoded: dict[str, Any], encoder: ImageEncoder, score: Callable[[LabeledSet, LabeledSet], float]
) -> float:
    train, test = (_pixels(decoded[name], encoder) for name in ("train", "test"))
    mean = train.values.mean(0)
    return score(
        LabeledSet(values=train.values - mean, label=train.label),
        LabeledSet(values=test.values - mean, label=test.label),
    )


def _pixels(decoded: Any, encoder: ImageEncoder) -> LabeledSet:
    rows = Rows(ray.get(decoded.to_arrow_refs()), image_format(encoder.spec))
    step = max(1, -(-len(rows) // MAX_FLOOR_ROWS))
    chosen = np.arange(0, len(rows), step)
    values = raw_pixels(
        rows, chosen, channels=encoder.spec.channels, size=min(FLOOR_SIZE, encoder.spec.image_size)
    )
    return _labeled(values, torch.from_numpy(rows.label[chosen]))


def raw_pixels(rows: Rows, chosen: np.ndarray, *, channels: int, size: int) -> Tensor:
    """Return the pixels of the chosen rows as float32 vectors [num_rows, channels * size**2]."""
    plain = {"mean": (0.0,) * channels, "std": (1.0,) * channels}
    parts = [
        center_view(rows.take(chosen[start : start + 1_024]).images, size=size, **plain).flatten(1)
        for start in range(0, len(chosen), 1_024)
    ]
    return torch.cat(parts)


def _labeled(values: Tensor, label: Tensor) -> LabeledSet:
    known = label != NO_LABEL
    if not known.any():
        raise DataError("no row of the set has a label; check the label column")
    return LabeledSet(values=values[known], label=label[known])
