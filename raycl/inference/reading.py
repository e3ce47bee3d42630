"""A small set, decoded and at hand in this process."""

from raycl.cluster import fetch_tables, join_cluster, own_errors
from raycl.data.decode import Decoder, Keep, decode_source
from raycl.data.images import ImageFormat
from raycl.data.logbook import open_logbook, rows_in
from raycl.data.rows import Rows
from raycl.data.sources import Source, find_source
from raycl.progress import ProgressLine, rows_read


def read_rows(
    source: Source | str,
    image_format: ImageFormat,
    *,
    keep: Keep | None = None,
    title: str = "reading",
    max_bad_fraction: float = 0.01,
    quiet: bool = True,
) -> Rows:
    """Decode the images of a source, or those whose ids ``keep`` accepts, by Ray Data.

    Raises ``DataError`` if there is nothing to read or too many images are broken.
    """
    source = find_source(source) if isinstance(source, str) else source
    join_cluster()
    with open_logbook() as logbook:
        decoder = Decoder(formats={"image": image_format}, logbook=logbook, keep=keep)
        with own_errors(), ProgressLine(title, rows_read(logbook, source.num_rows), quiet=quiet):
            tables = fetch_tables(decode_source(source, decoder))
        rows_in(logbook).check(max_bad_fraction)
    return Rows(tables, {"image": image_format})
