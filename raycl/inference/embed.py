"""Embedding by Ray Data: decoding tasks feed a pool of actors that hold the encoder."""

from dataclasses import replace
from typing import final

import pyarrow as pa
import ray
import torch
from torch import nn

from raycl.data.codecs import Formats
from raycl.data.columns import ColumnNames
from raycl.data.coordinator import ReadStats, rows_in, start_coordinator
from raycl.data.decode import Decoder, decode_source
from raycl.data.in_memory import Batch, InMemoryDataset, pixels_of, tokens_of
from raycl.data.sources import find_source
from raycl.data.texts import TextFormat
from raycl.device_copy import upload
from raycl.evaluation.embed import embed
from raycl.gpus import check_gpu
from raycl.inference.encoder import read_encoders
from raycl.inference.preflight import admit
from raycl.lease import writing_new
from raycl.models.encoder_io import ImageEncoder, SavedEncoder, TextEncoder
from raycl.models.registry import SideName
from raycl.models.trust import trusted_packages
from raycl.progress import ProgressLine, rows_read
from raycl.ray_runtime import connect_cluster, unwrap_ray_errors

BATCH_SIZE = 256


@final
class Embedder:
    """One actor of the pool: holds the encoder, turns decoded rows into representations."""

    def __init__(
        self,
        held: list[ray.ObjectRef],
        role: str,
        use_gpu: bool,
        network: nn.Module | None,
        trusted: tuple[str, ...],
    ) -> None:
        saved: SavedEncoder = ray.get(held[0])
        encoder = saved.build(network, trusted=trusted)
        self._encoder = encoder.to("cuda" if use_gpu else "cpu")
        # Twice as fast, and exact to three digits, as training in it is.
        is_fast = use_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        self._precision = "bfloat16" if is_fast else "float32"
        self._role = role
        self._formats = formats_of(self._encoder, role)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return ``sample_id``, ``label`` and ``representation`` of decoded rows."""
        rows = InMemoryDataset([table], self._formats)
        width = self._encoder.spec.representation_dim
        inputs = (prepared(self._encoder, batch, self._role) for batch in rows.batches(BATCH_SIZE))
        representation = torch.empty(0, width)
        if len(rows):
            representation = embed(self._encoder, inputs, precision=self._precision)
        flat = pa.array(representation.numpy().reshape(-1), pa.float32())
        return pa.table(
            {
                "sample_id": table["sample_id"],
                "label": table["label"],
                "representation": pa.FixedSizeListArray.from_arrays(flat, width),
            }
        )


def formats_of(encoder: ImageEncoder | TextEncoder, role: str) -> Formats:
    """Return how the values of a role are decoded for an encoder."""
    if isinstance(encoder, ImageEncoder):
        return {role: encoder.spec.image_format()}
    length = encoder.spec.cut_at or encoder.spec.max_length
    return {role: TextFormat(tokenizer=encoder.tokenizer, max_length=length)}


def columns_for(encoder: ImageEncoder | TextEncoder, columns: ColumnNames | None) -> tuple[str, ColumnNames]:
    """Return the role and the column of what an encoder takes: the first that was named."""
    named = columns or ColumnNames()
    role = "image" if isinstance(encoder, ImageEncoder) else "text"
    others = {each: None for each in named.contents if each != role}
    return role, replace(named, **{role: getattr(named, role) or role}, **others)


def prepared(encoder: ImageEncoder | TextEncoder, batch: Batch, role: str) -> torch.Tensor:
    """Return what the encoder takes of a batch."""
    is_image = isinstance(encoder, ImageEncoder)
    values = pixels_of(batch).images if is_image else tokens_of(batch, role).padded()
    (moved,) = upload([torch.from_numpy(values)], next(encoder.parameters()).device)
    return encoder.prepare(moved) if is_image else moved


def embed_dataset(
    decoded: ray.data.Dataset,
    saved: SavedEncoder,
    *,
    role: str = "image",
    gpu: bool = False,
    network: nn.Module | None = None,
) -> ray.data.Dataset:
    """Return decoded rows with their representations by an encoder, lazily.

    Raises ``ConfigError`` if a GPU is asked for and the cluster has none.
    """
    resources = ray.cluster_resources()
    if gpu:
        check_gpu(resources.get("GPU", 0))
    largest = resources["GPU"] if gpu else resources.get("CPU", 1) - 1
    return decoded.map_batches(
        Embedder,
        # Other nodes do not have the environment of this one.
        fn_constructor_args=([ray.put(saved)], role, gpu, network, trusted_packages()),
        batch_size=None,
        batch_format="pyarrow",
        # Half a core: on one core there is room for the task that decodes, and Ray does not put
        # decoding into this actor, as it would if both asked for the same.
        num_cpus=0.5,
        num_gpus=1 if gpu else 0,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=max(1, int(largest))),
    )


def embed_to_parquet(
    run: str,
    data: str,
    output: str,
    *,
    columns: ColumnNames | None = None,
    side: SideName = "query",
    network: nn.Module | None = None,
    gpu: bool = False,
    max_invalid_fraction: float = 0.01,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> ReadStats:
    """Embed all images or texts at ``data`` with the encoder of ``run``, into a folder of parquet files.

    Columns: ``sample_id``, ``label`` (-1 where there is none), ``representation`` (float32 list).
    With two towers ``side`` says whose. ``network`` is needed for a run that trained a module of your own. Returns what was read, broken
    rows counted by cause. Raises ``StorageError`` for an output that exists, and ``DataError`` if
    too many rows are broken; nothing is left at the output then.
    """
    admit(run, side=side, data=[data], output=output, gpu=gpu, address=address)
    with writing_new(output) as place:
        (saved,) = read_encoders(run, [side], network=network)
        encoder = saved.build(network)
        role, columns = columns_for(encoder, columns)
        source = find_source(data, columns)
        connect_cluster(address, debug=debug, quiet_core=True)
        filesystem, path = place.resolve()
        with start_coordinator() as logbook:
            decoded = decode_source(source, Decoder(formats=formats_of(encoder, role), logbook=logbook))
            with (
                unwrap_ray_errors(),
                ProgressLine("embedding", rows_read(logbook, source.num_rows), quiet=quiet),
            ):
                embedded = embed_dataset(decoded, saved, role=role, gpu=gpu, network=network)
                embedded.write_parquet(path, filesystem=filesystem)
            rows = rows_in(logbook)
            rows.check(max_invalid_fraction)
        return rows
