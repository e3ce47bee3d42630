"""Embedding by Ray Data: decoding tasks feed a pool of actors that hold the encoder."""

from pathlib import Path
from typing import Any, final

import pyarrow as pa
import ray
import torch

from raycl.cluster import join_cluster
from raycl.data.decode import Decoder, decode_source
from raycl.data.images import ImageFormat
from raycl.data.logbook import ReadRows, start_logbook
from raycl.data.rows import Rows
from raycl.data.sources import ColumnNames, Source, find_source
from raycl.errors import StorageError
from raycl.judging.embed import embed
from raycl.models.saved import EncoderSpec, load_encoder
from raycl.progress import ProgressLine, rows_read
from raycl.storage import Place

BATCH_SIZE = 256


@final
class Embedder:
    """One actor of the pool: holds the encoder, turns decoded rows into representations."""

    def __init__(self, run: str, use_gpu: bool) -> None:
        self._device = torch.device("cuda" if use_gpu else "cpu")
        self._encoder = load_encoder(run).to(self._device)
        self._format = image_format(self._encoder.spec)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return ``sample_id``, ``label`` and ``representation`` of decoded rows."""
        rows = Rows([table], self._format)
        width = self._encoder.spec.representation_dim
        images = (batch.images for batch in rows.batches(BATCH_SIZE))
        representation = (
            embed(self._encoder, images, self._encoder.prepare, device=self._device)
            if len(rows)
            else torch.empty(0, width)
        )
        flat = pa.array(representation.numpy().reshape(-1), pa.float32())
        return pa.table(
            {
                "sample_id": table["sample_id"],
                "label": table["label"],
                "representation": pa.FixedSizeListArray.from_arrays(flat, width),
            }
        )


def image_format(spec: EncoderSpec) -> ImageFormat:
    """Return how images are decoded for an encoder."""
    return ImageFormat(size=spec.stored_size, channels=spec.channels, max_pixels=spec.max_pixels)


def embed_dataset(decoded: ray.data.Dataset, run: str, *, gpu: bool = False) -> ray.data.Dataset:
    """Return decoded rows with their representations by the encoder of ``run``, lazily."""
    cpus = int(ray.cluster_resources().get("CPU", 1))
    gpus = int(ray.cluster_resources().get("GPU", 0))
    return decoded.map_batches(
        Embedder,
        fn_constructor_args=(absolute(run), gpu),
        batch_size=None,
        batch_format="pyarrow",
        num_cpus=1,
        num_gpus=1 if gpu else 0,
        # One core stays free for decoding.
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=max(1, gpus if gpu else cpus - 1)),
    )


def embed_to_parquet(
    run: str,
    data: str,
    output: str,
    *,
    columns: ColumnNames | None = None,
    gpu: bool = False,
    max_bad_fraction: float = 0.01,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> ReadRows:
    """Embed all images at ``data`` with the encoder of ``run``, into a folder of parquet files.

    Columns: ``sample_id``, ``label`` (-1 where there is none), ``representation`` (float32 list).
    Returns what was read, broken rows counted by cause. Raises ``DataError``, ``StorageError``, or
    ``ConfigError`` for an output that exists.
    """
    place = Place(output)
    if place.exists():
        raise StorageError(f"{output} exists already; give another --output or remove it")
    encoder = load_encoder(run)
    source = find_source(absolute(data), columns)
    place.check_writable()
    join_cluster(address, debug=debug)
    logbook = start_logbook()
    decoded = decode_source(source, Decoder(image_format=image_format(encoder.spec), logbook=logbook))
    filesystem, path = place.resolve()
    with ProgressLine("embedding", rows_read(logbook, source.num_rows), quiet=quiet):
        embed_dataset(decoded, run, gpu=gpu).write_parquet(path, filesystem=filesystem)
    rows: ReadRows = ray.get(logbook.rows.remote())
    rows.check(max_bad_fraction)
    return rows


def decode_set(
    source: Source, spec: EncoderSpec, *, name: str, max_bad_fraction: float = 0.01, quiet: bool = False
) -> Any:
    """Return the decoded rows of a whole set, materialized; raises ``DataError`` if too many break."""
    logbook = start_logbook()
    decoded = decode_source(source, Decoder(image_format=image_format(spec), logbook=logbook))
    with ProgressLine(f"reading the {name} set", rows_read(logbook, source.num_rows), quiet=quiet):
        materialized = decoded.materialize()
    ray.get(logbook.rows.remote()).check(max_bad_fraction)
    return materialized


def absolute(uri: str) -> str:
    """Make a local path absolute: tasks run in folders of their own."""
    return uri if "://" in uri else str(Path(uri).expanduser().absolute())
