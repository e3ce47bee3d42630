"""Pack a folder of images into parquet files: many small files read slowly, above all from S3.

``python jobs/prepare.py --data FOLDER --output FOLDER``; local paths or s3://. Columns: ``image``
(the files' bytes, unchanged), ``label`` (int, where the folder has class folders), ``sample_id``,
``path``. Broken images are packed too; training counts them.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

import pyarrow as pa
import ray
import typer

from raycl.cli import run_job
from raycl.cluster import join_cluster, own_errors
from raycl.data.sources import NO_LABEL, Piece, Source, find_source
from raycl.errors import StorageError
from raycl.storage import Place, absolute


def prepare(
    data: Annotated[str, typer.Option(help="Folder of images.")],
    output: Annotated[str, typer.Option(help="Folder of parquet files to write.")],
    rows_per_file: Annotated[int, typer.Option(help="Images a file, about.")] = 10_000,
    address: Annotated[str | None, typer.Option(help="Ray cluster to join.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Pack a folder of images into parquet files."""
    place = Place(absolute(output))
    if place.exists():
        raise StorageError(f"{output} exists already; give another --output or remove it")
    source = find_source(data)
    place.check_writable()
    join_cluster(address, debug=debug)
    filesystem, path = place.resolve()
    with own_errors():
        # Small row groups, so that a task reads only its own rows.
        pack(source).write_parquet(
            path, filesystem=filesystem, min_rows_per_file=rows_per_file, row_group_size=1_024
        )
    print(f"{source.num_rows:,} images packed into {output}")
    if source.ignored:
        print("ignored: " + ", ".join(f"{count} {extension}" for extension, count in source.ignored))


def pack(source: Source) -> ray.data.Dataset:
    """Return the files of a folder as rows, lazily and in order."""
    described = replace(source, pieces=())

    def read(batch: pa.Table) -> Iterator[pa.Table]:
        for text in batch["piece"].to_pylist():
            for rows in described.read(Piece.from_json(text)):
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


if __name__ == "__main__":
    run_job(prepare)
