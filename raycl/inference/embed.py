"""Embedding with Ray Data: tasks decode, a pool of actors runs the encoder. Small sets are embedded in this process."""

from collections.abc import Sequence
from typing import Literal, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from raycl.arguments import Address, as_address, check_type
from raycl.data.codecs import Formats
from raycl.data.columns import ColumnNames
from raycl.data.decode import Decoder, decode_dataset, decode_here, decode_source, decode_table
from raycl.data.discovery import check_no_splits, find_source
from raycl.data.ids import IdFormat
from raycl.data.in_memory import Batch, InMemoryDataset, pixels_of, texts_of
from raycl.data.read_stats import ReadStats
from raycl.data.sources import Source
from raycl.data.texts import TextsFormat, Tokens
from raycl.distributed.device_copy import device_of, upload, use_channels_last
from raycl.evaluation.embed import embed
from raycl.inference.encoder import read_encoders
from raycl.inference.index import write_index
from raycl.inference.preflight import allowed_invalid_fraction, check_index, check_inputs, check_values
from raycl.inference.reading import connect_unless_small, counted_rows, counting_decoder, report_unread
from raycl.lease import writing_new
from raycl.models.encoder_io import ImageEncoder, SavedEncoder, TextEncoder
from raycl.models.registry import SideName, trusted_packages
from raycl.ray_runtime import fetch_tables, wait_for_cpu

BATCH_SIZE = 256
FILE = "part-0.parquet"  # of rows embedded in this process
IDS = ("query_id", "document_id")  # written beside the representation if their columns are named
BLOCK_ROWS = 4_096
FILE_BYTES = 64 * 2**20  # at least: a block of large images has a few hundred rows


def embed_to_parquet(
    run: Address,
    data: Address,
    output: Address,
    *,
    columns: ColumnNames | None = None,
    side: SideName = "query",
    index: Literal["faiss"] | None = None,
    network: nn.Module | None = None,
    gpu: bool = False,
    max_invalid_fraction: float | None = None,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> ReadStats:
    """Embed all images or texts at ``data`` with the encoder of ``run``, into a folder of parquet files.

    A row with a list of texts has the representation of the first one.
    Columns: ``sample_id``, ``label`` (-1 if missing), ``representation`` (float32 list), and ``query_id`` or
    ``document_id`` if ``columns`` names them, as the numbers that a run compares; ``class``, the name of the label, if
    labels have names; of a folder of images also ``path``, the address of the file. ``side`` selects one of two towers.
    ``index="faiss"`` also writes ``_index.faiss`` to the folder: an exact FAISS index of the rows by cosine, whose
    ids are the sample ids. This process then holds all representations in memory once. A run that trained your own
    module needs it as ``network``. ``max_invalid_fraction`` is the run's by default. Returns the read statistics,
    with invalid rows by cause. Raises ``StorageError`` if the output exists, ``ConfigError`` if FAISS is not installed
    or no GPU comes for ``gpu``, and ``DataError`` for a folder of splits or if too many rows are invalid, which leaves
    nothing at the output.
    """
    check_index(index)
    check_type("columns", columns, ColumnNames, optional=True)
    check_type("max_invalid_fraction", max_invalid_fraction, float, optional=True)
    check_values({"max_invalid_fraction": max_invalid_fraction})
    run, data, output = as_address("run", run), as_address("data", data), as_address("output", output)
    check_inputs(run, side=side, data=[data], output=output, gpu=gpu, address=address)
    with writing_new(output) as place:
        (saved,) = read_encoders(run, [side], network=network)
        encoder = saved.build(network)
        source = find_source(data, columns_for(encoder, columns))
        check_no_splits(source)
        report_unread([source], quiet=quiet)
        connect_unless_small(source.num_rows * row_bytes(encoder), gpu=gpu, address=address, debug=debug)
        with counting_decoder(
            {**formats_of(encoder), **{role: IdFormat() for role in IDS if role in source.columns.contents}},
            num_rows=source.num_rows,
            title="embedding",
            max_invalid_fraction=allowed_invalid_fraction(run, max_invalid_fraction),
            quiet=quiet,
        ) as decoder:
            names = _names_of(source)
            if ray.is_initialized():
                filesystem, path = place.resolve()
                embedded = embed_dataset(decode_source(source, decoder), saved, gpu=gpu, network=network)
                if names:
                    stored = ray.put(names)
                    embedded = embedded.map_batches(
                        lambda rows: _with_names(rows, ray.get(stored)),
                        batch_size=None,
                        batch_format="pyarrow",
                    )
                embedded.write_parquet(path, filesystem=filesystem, min_bytes_per_file=FILE_BYTES)
            else:
                table = pa.concat_tables(embedded_tables(source, decoder, saved, encoder, network=network))
                with (place / FILE).create() as stream:
                    pq.write_table(_with_names(table, names), stream)
            stats = counted_rows(decoder)
        if index is not None:  # not before the invalid rows are counted
            write_index(place, encoder.spec.representation_dim)
    return stats


def _names_of(source: Source) -> dict[str, tuple[str, pa.Array]]:
    """Return the columns to add to embedded rows: the column of their numbers, and the name of each number."""
    names, kind = dict[str, tuple[str, pa.Array]](), pa.large_string()
    if classes := source.classes or source.label_names:
        names["class"] = "label", pa.array(classes, kind)
    if source.kind == "folder":
        names["path"] = "sample_id", pa.array(source.image_files(), kind)
    return names


def _with_names(rows: pa.Table, names: dict[str, tuple[str, pa.Array]]) -> pa.Table:
    """Add the columns of ``_names_of`` to embedded rows; a number without a name has none."""
    for column, (key, each) in names.items():
        number = rows[key].to_numpy()
        index = pa.array(number, mask=(number < 0) | (number >= len(each)))
        rows = rows.append_column(column, each.take(index))
    return rows


def embed_values(
    values: Sequence[str] | Sequence[bytes],
    saved: SavedEncoder,
    *,
    title: str = "embedding",
    max_invalid_fraction: float | None = None,
    network: nn.Module | None = None,
    gpu: bool = False,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> tuple[Tensor, NDArray[np.int64]]:
    """Embed the valid ones of texts or encoded images held by this process: [num_valid, representation_dim].

    Also returns their positions [num_valid]. Raises ``DataError`` if too many values are invalid; by default, one is too many.
    """
    encoder = saved.build(network)
    role, kind = role_of(encoder), pa.binary() if saved.takes_images else pa.string()
    connect_unless_small(len(values) * row_bytes(encoder), gpu=gpu, address=address, debug=debug)
    table = pa.table({role: pa.array(values, kind), "sample_id": np.arange(len(values))})
    blocks = [table.slice(start, BLOCK_ROWS) for start in range(0, len(values), BLOCK_ROWS)]
    columns = ColumnNames(**{"image": None, role: role}, sample_id="sample_id")
    with counting_decoder(
        formats_of(encoder),
        num_rows=len(values),
        title=title,
        max_invalid_fraction=max_invalid_fraction,
        quiet=quiet,
    ) as decoder:
        if ray.is_initialized():
            decoded = decode_dataset(ray.data.from_arrow(blocks), columns, decoder)
            tables = fetch_tables(embed_dataset(decoded, saved, gpu=gpu, network=network))
        else:
            tables = list(map(Embedder(encoder), decode_table(table, columns, decoder)))
    ids = np.concatenate([each["sample_id"].to_numpy() for each in tables])
    found = representations(tables, encoder.spec.representation_dim)
    is_in_order = bool((np.diff(ids) > 0).all())
    return (found if is_in_order else found[np.argsort(ids)]), np.sort(ids)  # a copy


def embedded_tables(
    source: Source,
    decoder: Decoder,
    saved: SavedEncoder,
    encoder: ImageEncoder | TextEncoder,
    *,
    gpu: bool = False,
    network: nn.Module | None = None,
    kept: list[pa.Table] | None = None,
) -> list[pa.Table]:
    """Return the decoded rows of a source with their representations, in order; without Ray in this process.

    ``encoder`` is built from ``saved``, and from ``network`` if there is one. The decoded rows are added to ``kept``
    if this process has them.
    """
    if ray.is_initialized():
        return fetch_tables(embed_dataset(decode_source(source, decoder), saved, gpu=gpu, network=network))
    embedder = Embedder(encoder)
    embedded = []
    for table in decode_here(source.fragments, source.read, decoder):
        embedded.append(embedder(table))
        if kept is not None:
            kept.append(table)
    return embedded


def embed_dataset(
    decoded: ray.data.Dataset,
    saved: SavedEncoder,
    *,
    gpu: bool = False,
    network: nn.Module | None = None,
) -> ray.data.Dataset:
    """Add representations to decoded rows, lazily.

    Waits for the first CPU of a cluster that has none yet. More nodes come while decoding waits for CPUs.
    """
    has_cpus = ray.cluster_resources().get("CPU", 0.0) > 0
    wait_for_cpu()
    num_cpus = ray.cluster_resources().get("CPU", 0.0)
    is_single = num_cpus < 1.5
    return decoded.map_batches(
        Embedder,
        # The actors' nodes may lack this process's environment variables.
        fn_constructor_args=([ray.put(saved)], gpu, network, trusted_packages()),
        batch_size=BATCH_SIZE,  # required with GPUs
        batch_format="pyarrow",
        # Another request than a decoding task has, one CPU, keeps Ray from fusing decoding into this actor. With any
        # request, an actor on the only CPU would leave none for that task.
        num_cpus=0.0 if is_single else 0.5,
        num_gpus=1 if gpu else 0,
        compute=ray.data.ActorPoolStrategy(
            min_size=1, max_size=None if gpu or not (has_cpus or is_single) else max(1, int(num_cpus) - 1)
        ),
    )


@final
class Embedder:
    """Hold the encoder and embed decoded rows, as an actor of the pool or in this process.

    ``encoder`` is built, or for an actor a list with a reference to the saved one.
    """

    def __init__(
        self,
        encoder: ImageEncoder | TextEncoder | list[ray.ObjectRef],
        use_gpu: bool = False,
        network: nn.Module | None = None,
        trusted: tuple[str, ...] | None = None,
    ) -> None:
        if isinstance(encoder, list):
            saved: SavedEncoder = ray.get(encoder[0])
            encoder = saved.build(network, trusted=trusted_packages() if trusted is None else trusted)
        self._encoder: ImageEncoder | TextEncoder = encoder.to("cuda" if use_gpu else "cpu")
        # bfloat16 is twice as fast, and equal to three digits, as in training.
        is_fast = use_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        if isinstance(encoder, ImageEncoder):
            use_channels_last(self._encoder)
        self._precision = "bfloat16" if is_fast else "float32"
        self._formats = formats_of(self._encoder)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return ``sample_id``, ``label`` and ``representation`` of decoded rows, and the ids that they have."""
        rows = InMemoryDataset([table], self._formats)
        width = self._encoder.spec.representation_dim
        inputs = (encoder_input(self._encoder, batch) for batch in rows.batches(BATCH_SIZE))
        representation = torch.empty(0, width)
        if len(rows):
            representation = embed(self._encoder, inputs, precision=self._precision)
        flat = pa.array(representation.numpy().reshape(-1), pa.float32())
        ids = [role for role in IDS if f"{role}.id" in table.column_names]
        return pa.table(
            {
                "sample_id": table["sample_id"],
                "label": table["label"],
                "representation": pa.FixedSizeListArray.from_arrays(flat, width),
                **{role: table[f"{role}.id"].combine_chunks().flatten() for role in ids},
            }
        )


def role_of(encoder: ImageEncoder | TextEncoder) -> Literal["image", "text"]:
    """Return the role of the values that an encoder takes."""
    return "image" if isinstance(encoder, ImageEncoder) else "text"


def row_bytes(encoder: ImageEncoder | TextEncoder) -> int:
    """Return the size of a decoded value and its representation; of a text, at most."""
    is_image = isinstance(encoder, ImageEncoder)
    decoded = encoder.spec.image_format().num_bytes if is_image else 4 * encoder.spec.max_tokens
    return decoded + 4 * encoder.spec.representation_dim


def formats_of(encoder: ImageEncoder | TextEncoder) -> Formats:
    """Return the format in which values are decoded for an encoder, by role."""
    if isinstance(encoder, ImageEncoder):
        return {"image": encoder.spec.image_format()}
    spec = encoder.spec
    return {"text": TextsFormat(tokenizer=encoder.tokenizer, max_length=spec.max_tokens, prompt=spec.prompt)}


def columns_for(encoder: ImageEncoder | TextEncoder, columns: ColumnNames | None) -> ColumnNames:
    """Return the columns without any content but the one that an encoder takes, and ids.

    Raises ``ConfigError`` for the name of another content, which would be ignored.
    """
    return (columns or ColumnNames()).of_content(role_of(encoder), *IDS)


def encoder_input(encoder: ImageEncoder | TextEncoder, batch: Batch) -> Tensor:
    """Return the encoder's input for a batch, on the encoder's device: the images, or the first text of each row."""
    is_image = isinstance(encoder, ImageEncoder)
    values = pixels_of(batch).images if is_image else _first_texts(batch).padded()
    (moved,) = upload([torch.from_numpy(values)], device_of(encoder))
    return encoder.prepare(moved) if is_image else moved


def _first_texts(batch: Batch) -> Tokens:
    texts = texts_of(batch, "text")
    return texts.picked(np.zeros(len(texts), np.int64))


def representations(tables: Sequence[pa.Table], width: int) -> Tensor:
    """Return the column ``representation`` of embedded tables, [num_rows, width]."""
    chunks = [chunk for table in tables for chunk in table["representation"].chunks]
    return torch.from_numpy(
        np.concatenate([chunk.flatten().to_numpy().reshape(-1, width) for chunk in chunks])
    )
