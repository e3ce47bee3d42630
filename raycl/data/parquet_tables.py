"""Parquet files."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import final

import pyarrow as pa
import pyarrow.parquet as pq

from raycl.data.columns import ColumnNames
from raycl.data.tables import BATCH_ROWS, TableFile, TableFormat, reading
from raycl.storage import Place, check_plain


@final
class ParquetTables(TableFormat):
    """Parquet: the files know their types and the number of their rows, and are read by row groups."""

    name = "parquet"
    endings = (".parquet",)

    def inspect(self, place: Place, columns: ColumnNames) -> TableFile:
        """Return the sizes of the row groups and the schema."""
        with open_parquet(place) as file:
            metadata = file.metadata
            sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
            return TableFile(place=place, group_sizes=sizes, schema=file.schema_arrow)

    def read(
        self, place: Place, names: Sequence[str], types: pa.Schema | None, *, start: int, stop: int
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield (position, rows) of a range; reads only their row groups."""
        with open_parquet(place) as file:
            first = 0
            for group in range(file.metadata.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                position = first
                first += size
                if first <= start or position >= stop:
                    continue
                for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=list(names)):
                    low = max(start - position, 0)
                    high = min(stop - position, batch.num_rows)
                    if low < high:
                        yield position + low, pa.Table.from_batches([batch.slice(low, high - low)])
                    position += batch.num_rows
                    if position >= stop:
                        return


@contextlib.contextmanager
def open_parquet(place: Place) -> Iterator[pq.ParquetFile]:
    """Open a parquet file; a file that cannot be read raises an error."""
    # From remote storage, fetch all columns of a row group by one request.
    with (
        reading(place, "parquet", "give a parquet file or a folder"),
        place.open() as source,
        pq.ParquetFile(source, pre_buffer=not place.is_local) as file,
    ):
        check_plain(file.schema_arrow, str(place))
        yield file
