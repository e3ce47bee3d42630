"""Click logs grouped once: a row a positive, with the documents that its query was not clicked for."""

from raycl.data.click_logs import check_labels, group_source, grouped_columns
from raycl.data.columns import ColumnNames
from raycl.data.coordinator import ReadStats, rows_in, start_coordinator
from raycl.data.sources import find_source
from raycl.errors import DataError
from raycl.lease import writing_new
from raycl.ray_runtime import connect_cluster, unwrap_ray_errors


def group_pairs(
    data: str,
    output: str,
    *,
    columns: ColumnNames,
    max_invalid_fraction: float = 0.01,
    address: str | None = None,
    debug: bool = False,
) -> tuple[int, ReadStats]:
    """Write the pairs of a labeled click log to parquet files; return their number and what was left out.

    A run of ``two_tower`` groups a log that it holds in memory by itself; one that is streamed needs this.
    Raises ``DataError`` if there are no labels, or lists of negatives beside them, if too many rows are
    broken, or if no query has a positive.
    """
    with writing_new(output) as place:
        source = find_source(data, columns)
        if source.columns.label is None:
            raise DataError(f"{data} has no column of labels; name it with --set data.columns.label=NAME")
        check_labels(source.columns)
        connect_cluster(address, debug=debug)
        filesystem, path = place.resolve()
        with start_coordinator() as logbook:
            with unwrap_ray_errors():
                grouped = group_source(source, logbook).drop_columns(_absent(source.columns)).materialize()
            rows = rows_in(logbook)
            rows.check(max_invalid_fraction)
            num_pairs = grouped.count()
            if not num_pairs:
                raise DataError(
                    "no query has a document of label 1; a run learns from pairs that belong together"
                )
            with unwrap_ray_errors():
                grouped.write_parquet(path, filesystem=filesystem, row_group_size=1_024)
        return num_pairs, rows


def _absent(columns: ColumnNames) -> list[str]:
    """Return the columns of ids that a log without ids has nothing for: a run would miss each of them."""
    grouped = grouped_columns(columns)
    return [role for role in ("query_id", "document_id", "negative_ids") if getattr(grouped, role) is None]
