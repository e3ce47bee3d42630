"""The images of a figure: a part of the training set, written once, and what the encoders are judged on."""

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
from raycl.evaluation.knn import knn_accuracy
from raycl.inference.classification import raw_pixels
from raycl.inference.read_rows import read_rows
from raycl.models.encoder_io import ImageEncoder
from raycl.storage import Place, absolute

_ENCODED_TOGETHER = 512
PROBED = 1_024


def training_part(data: str, num_rows: int | None, output: Place) -> str:
    """Return the address of so many images drawn from those at ``data``; a copy below ``output``, made once.

    Of a set that is not larger it is the set itself. Raises ``DataError`` or ``StorageError``.
    """
    source = _labeled(data)
    if num_rows is None or source.num_rows <= num_rows:
        return absolute(data)
    place = output / f"train-{num_rows}-of-{source.num_rows}-{_mark(source)}.parquet"
    if not place.exists():
        # Drawn, not every so-manieth: sets are often sorted or interleaved by class.
        chosen = np.sort(np.random.default_rng(0).choice(source.num_rows, num_rows, replace=False))
        place.write_bytes(_to_parquet(source, chosen))
    return place.uri


def _mark(source: Source) -> str:
    """Return eight letters by which sets are told apart: they follow from the address, the files and their rows."""
    pieces = "\n".join(piece.to_json() for piece in source.pieces)
    return hashlib.sha256(pieces.encode()).hexdigest()[:8]


def _labeled(data: str) -> Source:
    source = find_source(data)
    if not source.has_labels:
        raise DataError(
            f"{data} has no labels, and the figures are judged by labels; give a set with a column label"
        )
    return source


def _to_parquet(source: Source, chosen: np.ndarray[Any, Any]) -> bytes:
    images, labels, first = [], [], 0
    for piece in source.pieces:
        for rows in source.read(piece):
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
        """``data`` is the set that ``train`` is a part of; all are addresses."""
        self.data, self.train, self.test = data, train, test
        self._read = cache(_read)
        self._floors: dict[tuple[int, int], float] = {}

    def knn(self, encoder: ImageEncoder, config: RunConfig) -> float:
        """Return the kNN top-1 on all test images, over which all training images vote."""
        settings, sides = config.evaluation, []
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        encoder.to(device)
        for rows in (self._rows(self.test, config), self._rows(self.train, config)):
            parts = [encoder.encode(pixels_of(batch).images) for batch in rows.batches(_ENCODED_TOGETHER)]
            sides += [torch.cat(parts), torch.from_numpy(rows.label).to(device)]
        return knn_accuracy(*sides, k=settings.k, temperature=settings.temperature)

    def pixels(self, config: RunConfig) -> float:
        """Return the kNN top-1 of raw pixels, the mean image subtracted: what a run must beat."""
        key = (config.data.image_size, config.data.channels)
        if key not in self._floors:
            self._floors[key] = self._judge_pixels(config)
        return self._floors[key]

    def probed(self, config: RunConfig) -> tuple[Tensor, np.ndarray[Any, Any]]:
        """Return the images that the probe of BatchNorm's leak sees, uint8, and their ids."""
        rows = self._rows(self.test, config)
        # Drawn: in a set of class folders the first are of one class.
        batch = rows.take(np.random.default_rng(0).permutation(len(rows))[:PROBED])
        return torch.from_numpy(pixels_of(batch).images), batch.sample_id

    def num_classes(self, config: RunConfig) -> int:
        """Return how many classes the test images are of."""
        return len(np.unique(self._rows(self.test, config).label))

    def _judge_pixels(self, config: RunConfig) -> float:
        size, channels, settings = config.data.image_size, config.data.channels, config.evaluation
        test, train = (self._rows(uri, config) for uri in (self.test, self.train))
        mean = (values := raw_pixels(train, channels=channels, size=size)).mean(0)
        sides = [raw_pixels(test, channels=channels, size=size) - mean, torch.from_numpy(test.label)]
        sides += [values - mean, torch.from_numpy(train.label)]
        return knn_accuracy(*sides, k=settings.k, temperature=settings.temperature)

    def _rows(self, uri: str, config: RunConfig) -> InMemoryDataset:
        data = config.data
        return self._read(uri, data.decoded_size, data.channels, data.max_pixels, data.max_bad_fraction)


def _read(uri: str, size: int, channels: int, max_pixels: int, max_bad_fraction: float) -> InMemoryDataset:
    image_format = ImageFormat(size=size, channels=channels, max_pixels=max_pixels)
    rows = read_rows(_labeled(uri), image_format, title=f"reading {uri}", max_bad_fraction=max_bad_fraction)
    if (rows.label == NO_LABEL).any():
        raise DataError(f"some rows of {uri} have no label; leave them out")
    return rows
