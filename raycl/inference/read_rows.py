"""A small set, decoded and at hand in this process."""

from raycl.data.coordinator import rows_in, start_coordinator
from raycl.data.decode import Decoder, Keep, decode_source
from raycl.data.images import ImageFormat
from raycl.data.in_memory import InMemoryDataset
from raycl.data.sources import Source, find_source
from raycl.progress import ProgressLine, rows_read
from raycl.ray_runtime import connect_cluster, fetch_tables, unwrap_ray_errors


def read_rows(
    source: Source | str,
    image_format: ImageFormat,
    *,
    keep: Keep | None = None,
    title: str = "reading",
    max_invalid_fraction: float = 0.01,
    quiet: bool = True,
) -> InMemoryDataset:
    """Decode the images of a source, or those whose ids ``keep`` accepts, by Ray Data.

    Raises ``DataError`` if there is nothing to read or too many images are broken.
    """
    source = find_source(source) if isinstance(source, str) else source
    connect_cluster()
    with start_coordinator() as logbook:
        decoder = Decoder(formats={"image": image_format}, logbook=logbook, keep=keep)
        with unwrap_ray_errors(), ProgressLine(title, rows_read(logbook, source.num_rows), quiet=quiet):
            tables = fetch_tables(decode_source(source, decoder))
        rows_in(logbook).check(max_invalid_fraction)
    return InMemoryDataset(tables, {"image": image_format})
