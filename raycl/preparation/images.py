"""Images packed into parquet files: many small files read slowly, above all from S3."""

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import ray

from raycl.data.labels import NO_LABEL
from raycl.data.sources import Fragment, Source, find_source
from raycl.lease import writing_new
from raycl.ray_runtime import connect_cluster, unwrap_ray_errors


def pack_images(
    data: str, output: str, *, rows_per_file: int = 10_000, address: str | None = None, debug: bool = False
) -> Source:
    """Write the images of a folder, unchanged, to parquet files; return what was found.

    Columns: ``image``, ``label`` (int, where there are class folders), ``sample_id``, ``path``. Broken
    images are packed too; training counts them. Raises ``StorageError`` for an output that exists.
    """
    with writing_new(output) as place:
        source = find_source(data)
        connect_cluster(address, debug=debug)
        filesystem, path = place.resolve()
        with unwrap_ray_errors():
            # Small row groups, so that a task reads only its own rows.
            _pack(source).write_parquet(
                path, filesystem=filesystem, min_rows_per_file=rows_per_file, row_group_size=1_024
            )
        return source


def _pack(source: Source) -> ray.data.Dataset:
    described = replace(source, pieces=())

    def read(batch: pa.Table) -> Iterator[pa.Table]:
        for text in batch["piece"].to_pylist():
            for rows in described.read(Fragment.from_json(text)):
                columns = {
                    "image": pa.array(rows.values["image"], pa.binary()),
                    "sample_id": rows.sample_id,
                    "path": rows.where,
                }
                if source.has_labels:
                    columns["label"] = pa.array(rows.label, pa.int64(), mask=rows.label == NO_LABEL)
                yield pa.table(columns)

    pieces = ray.data.from_items(
        [{"piece": piece.to_json()} for piece in source.pieces], override_num_blocks=len(source.pieces)
    )
    return pieces.map_batches(read, batch_size=1, batch_format="pyarrow")
