"""The images of a figure: a training subset, written once, and what its runs ask of the test images."""

import hashlib
import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycl.config import RunConfig
from raycl.data.discovery import find_source
from raycl.data.images import ImageFormat
from raycl.data.in_memory import InMemoryDataset, pixels_of
from raycl.data.sources import Source
from raycl.errors import DataError
from raycl.inference.reading import read_images
from raycl.storage import Place, absolute

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


def num_classes(data: str) -> int:
    """Return how many different labels a data set has."""
    source = _labeled(data)
    rows = (rows for fragment in source.fragments for rows in source.read(fragment))
    return len(np.unique(np.concatenate([part.label for part in rows])))


def probe_images(data: str, config: RunConfig) -> tuple[Tensor, NDArray]:
    """Return the images uint8 of the leakage probe, and their ids: some of all, at random.

    The first images of class folders would be all of one class.
    """
    rows = _read(data, config)
    batch = rows.take(np.random.default_rng(0).permutation(len(rows))[:NUM_PROBE_IMAGES])
    return torch.from_numpy(pixels_of(batch).images), batch.sample_id


def _read(uri: str, config: RunConfig) -> InMemoryDataset:
    data = config.data
    size, channels = data.resolved_decode_size, data.channels
    image_format = ImageFormat(size=size, channels=channels, max_pixels=data.max_pixels)
    allowed = data.max_invalid_fraction
    return read_images(_labeled(uri), image_format, title=f"reading {uri}", max_invalid_fraction=allowed)


def _labeled(data: str) -> Source:
    source = find_source(data)
    if not source.has_labels:
        raise DataError(f"{data} has no labels, and kNN needs them; give a data set with a column label")
    return source


def _to_parquet(source: Source, chosen: NDArray) -> bytes:
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
