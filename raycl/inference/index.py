"""The search index beside embedded rows, in FAISS's format."""

import numpy as np

from raycl.data.parquet_tables import open_parquet
from raycl.storage import Place

INDEX = "_index.faiss"  # readers of a folder of parquet files skip names with an underscore
_BATCH_ROWS = 4_096


def write_index(folder: Place, dim: int) -> None:
    """Write an index of the embedded rows in ``folder``: exact, by cosine, with sample ids as its ids.

    Holds all rows in memory once, as any process that loads the index does.
    """
    import faiss  # an optional package

    files = [folder / name for name, _ in folder.files() if name.endswith(".parquet")]
    flat = faiss.IndexFlatIP(dim)
    index = faiss.IndexIDMap(flat)
    # An index that grows by blocks copies its rows, and then holds them twice.
    flat.codes.resize(sum(map(_num_rows, files)) * flat.code_size)
    for place in files:
        with open_parquet(place) as file:
            for batch in file.iter_batches(_BATCH_ROWS, columns=["sample_id", "representation"]):
                rows = np.array(batch.column("representation").flatten()).reshape(-1, dim)
                faiss.normalize_L2(rows)  # in place
                index.add_with_ids(rows, batch.column("sample_id").to_numpy())
    with (folder / INDEX).create() as stream:
        writer = faiss.PyCallbackIOWriter(stream.write)  # pyright: ignore[reportAttributeAccessIssue]
        faiss.write_index(index, writer)


def _num_rows(place: Place) -> int:
    with open_parquet(place) as file:
        return file.metadata.num_rows
