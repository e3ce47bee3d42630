"""The images of a figure: a training subset, written once, and the evaluation of its encoders."""

import hashlib
import io
from functools import cache
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from raycl.config import RunConfig
from raycl.data.images import ImageFormat
from raycl.data.in_memory import InMemoryDataset, pixels_of
from raycl.data.labels import NO_LABEL
from raycl.data.sources import Source, find_source
from raycl.errors import DataError
from raycl.evaluation.classification import raw_pixels
from raycl.evaluation.knn import knn_accuracy
from raycl.inference.reading import read_images
from raycl.models.encoder_io import ImageEncoder
from raycl.storage import Place, absolute

_ENCODE_BATCH = 512
NUM_PROBE_IMAGES = 1_024


def training_subset(data: str, num_rows: int | None, output: Place) -> str:
    """Return the address of ``num_rows`` random images of ``data``, written below ``output`` once.

    A data set that is not larger is used itself. Raises ``DataError`` or ``StorageError``.
    """
    source = _labeled(data)
    if num_rows is None or source.num_rows <= num_rows:
        return absolute(data)
    # The name follows from the address, the files and their rows, so that another set gets its own subset.
    fragments = "\n".join(fragment.to_json() for fragment in source.fragments)
    digest = hashlib.sha256(fragments.encode()).hexdigest()[:8]
    place = output / f"train-{num_rows}-of-{source.num_rows}-{digest}.parquet"
    if not place.exists():
        # Random, not every n-th: data sets are often sorted or interleaved by class.
        chosen = np.sort(np.random.default_rng(0).choice(source.num_rows, num_rows, replace=False))
        place.write_bytes(_to_parquet(source, chosen))
    return place.uri


def _labeled(data: str) -> Source:
    source = find_source(data)
    if not source.has_labels:
        raise DataError(f"{data} has no labels, and kNN needs them; give a data set with a column label")
    return source


def _to_parquet(source: Source, chosen: np.ndarray[Any, Any]) -> bytes:
    images, labels, first = [], [], 0
    for fragment in source.fragments:
        for rows in source.read(fragment):
            own = chosen[(chosen >= first) & (chosen < first + len(rows.label))] - first
            images += [rows.values["image"][position] for position in own]
            labels += rows.label[own].tolist()
            first += len(rows.label)
    stream = io.BytesIO()
    table = pa.table({"image": pa.array(images, pa.binary()), "label": pa.array(labels, pa.int64())})
    pq.write_table(table, stream, row_group_size=1_024)
    return stream.getvalue()


@final
class Evaluator:
    """Training and test images, decoded once for all runs of a figure."""

    def __init__(self, *, data: str, train: str, test: str) -> None:
        """``train`` is the subset of ``data`` that the runs train on; all are addresses."""
        self.data, self.train, self.test = data, train, test
        self._read = cache(_read)
        self._baselines: dict[tuple[int, int], float] = {}

    def knn(self, encoder: ImageEncoder, config: RunConfig) -> float:
        """Return the kNN top-1 of all test images among all training images."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        encoder.to(device)
        test, train = self._test_and_train(config)
        encoded = [
            torch.cat([encoder.encode(pixels_of(batch).images) for batch in rows.batches(_ENCODE_BATCH)])
            for rows in (test, train)
        ]
        return _knn(config, encoded, [test.label, train.label])

    def pixels(self, config: RunConfig) -> float:
        """Return the kNN top-1 of raw pixels minus the mean image: the baseline of a run."""
        size, channels = key = (config.data.image_size, config.data.channels)
        if key not in self._baselines:
            sets = self._test_and_train(config)
            test, train = (raw_pixels(rows, channels=channels, size=size) for rows in sets)
            mean = train.mean(0)
            self._baselines[key] = _knn(config, [test - mean, train - mean], [rows.label for rows in sets])
        return self._baselines[key]

    def probe_images(self, config: RunConfig) -> tuple[Tensor, np.ndarray[Any, Any]]:
        """Return the images uint8 of the leakage probe, and their ids."""
        rows = self._rows(self.test, config)
        # Random: the first images of class folders are all of one class.
        batch = rows.take(np.random.default_rng(0).permutation(len(rows))[:NUM_PROBE_IMAGES])
        return torch.from_numpy(pixels_of(batch).images), batch.sample_id

    def num_classes(self, config: RunConfig) -> int:
        return len(np.unique(self._rows(self.test, config).label))

    def _test_and_train(self, config: RunConfig) -> tuple[InMemoryDataset, InMemoryDataset]:
        return self._rows(self.test, config), self._rows(self.train, config)

    def _rows(self, uri: str, config: RunConfig) -> InMemoryDataset:
        data = config.data
        return self._read(
            uri, data.resolved_decode_size, data.channels, data.max_pixels, data.max_invalid_fraction
        )


def _knn(config: RunConfig, vectors: list[Tensor], labels: list[np.ndarray[Any, Any]]) -> float:
    """Return the kNN top-1 of the first set among the second."""
    test, train = vectors
    test_label, train_label = (torch.from_numpy(label).to(test.device) for label in labels)
    settings = config.evaluation
    return knn_accuracy(test, test_label, train, train_label, k=settings.k, temperature=settings.temperature)


def _read(
    uri: str, size: int, channels: int, max_pixels: int, max_invalid_fraction: float
) -> InMemoryDataset:
    image_format = ImageFormat(size=size, channels=channels, max_pixels=max_pixels)
    rows = read_images(
        _labeled(uri), image_format, title=f"reading {uri}", max_invalid_fraction=max_invalid_fraction
    )
    if (rows.label == NO_LABEL).any():
        raise DataError(f"some rows of {uri} have no label; remove them")
    return rows
