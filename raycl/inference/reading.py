"""A small set, decoded and at hand in this process."""

import ray

from raycl.cluster import join_cluster
from raycl.data.decode import Decoder, decode_source
from raycl.data.images import ImageFormat
from raycl.data.logbook import start_logbook
from raycl.data.rows import Rows
from raycl.data.sources import ColumnNames, find_source


def read_rows(
    uri: str, image_format: ImageFormat, *, columns: ColumnNames | None = None, max_bad_fraction: float = 0.01
) -> Rows:
    """Decode all images at ``uri`` by Ray Data; raises ``DataError`` if too many are broken."""
    source = find_source(uri, columns)
    join_cluster()
    logbook = start_logbook()
    decoded = decode_source(source, Decoder(image_format=image_format, logbook=logbook))
    tables = ray.get(decoded.materialize().to_arrow_refs())
    ray.get(logbook.rows.remote()).check(max_bad_fraction)
    return Rows(tables, image_format)
