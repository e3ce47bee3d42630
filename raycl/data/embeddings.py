"""Files of embeddings by id, which ``raycl embed`` or another program wrote."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raycl.data.codecs import list_lengths
from raycl.data.columns import is_list, is_number
from raycl.data.discovery import existing
from raycl.data.ids import entity_id, stable_id, why_invalid
from raycl.data.parquet_tables import open_parquet
from raycl.errors import DataError
from raycl.storage import Place

REPRESENTATION = "representation"
_BATCH_ROWS = 4_096


def check_embeddings(uri: str, role: str) -> None:
    """Raise ``DataError`` unless there are parquet files, and the first has ids of this role and vectors."""
    place = _files(uri)[0]
    with open_parquet(place) as file:
        _check_schema(file.schema_arrow, role, place)


def count_embeddings(uri: str, role: str) -> tuple[int, int]:
    """Return the number of embeddings in all files, and the length of the first; reads few of them."""
    _, first = next(read_embeddings(uri, role), (None, np.empty((0, 0))))
    count = 0
    for place in _files(uri):
        with open_parquet(place) as file:
            count += file.metadata.num_rows
    return count, first.shape[1]


def read_embeddings(
    uri: str, role: str, *, may_be_zero: bool = False
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Yield ids [n] and embeddings of unit length [n, dim] of a parquet file or a folder of them.

    Embeddings that are zero have no direction; they stay zero if they ``may_be_zero``.
    Raises ``DataError`` for files without ids of this role, for a missing id, and for other vectors without a direction.
    """
    for place in _files(uri):
        with open_parquet(place) as file:
            _check_schema(file.schema_arrow, role, place)
            for batch in file.iter_batches(_BATCH_ROWS, columns=[role, REPRESENTATION]):
                values = batch.column(role).to_pylist()
                if cause := next(filter(None, map(why_invalid, values)), None):
                    raise DataError(
                        f"{place} has an invalid {role} ({cause}); give each embedding the id of its row"
                    )
                to_number = stable_id if role == "sample_id" else entity_id
                ids = np.array(list(map(to_number, values)), np.int64)
                yield ids, _unit_rows(batch.column(REPRESENTATION), place, may_be_zero=may_be_zero)


def _files(uri: str) -> list[Place]:
    root = existing(uri)
    if not root.is_folder():
        return [root]
    files = root.files()
    found = [root / path for path, _ in files if path.endswith(".parquet")]
    if not found:
        raise DataError(
            f"{root} has no parquet file ({len(files)} others); give the --output of `raycl embed`, or a folder like it"
        )
    return found


def _check_schema(schema: pa.Schema, role: str, place: Place) -> None:
    for name in (role, REPRESENTATION):
        if name not in schema.names:
            raise DataError(
                f"{place} has no column {name!r}; it has {', '.join(schema.names)}: write it by `raycl embed "
                f"--set data.columns.{role}=NAME`"
            )
    kind: Any = schema.field(REPRESENTATION).type
    if not (is_list(kind) and is_number(kind.value_type)):
        raise _no_vectors(kind, place)


def _no_vectors(found: object, place: Place) -> DataError:
    return DataError(
        f"{REPRESENTATION} must be lists of numbers, {place} holds {found}; write it by `raycl embed`"
    )


def _unit_rows(column: Any, place: Place, *, may_be_zero: bool) -> NDArray[np.float32]:
    """Return the vectors of a column of lists, of unit length; raises ``DataError`` if one has no direction."""
    kind = column.type
    values = column.flatten()
    if column.null_count or values.null_count:
        raise _no_vectors(f"{kind} with nulls", place)
    widths = {kind.list_size} if pa.types.is_fixed_size_list(kind) else {*list_lengths(column).tolist()}
    if len(widths) > 1:
        raise DataError(
            f"the embeddings in {place} have {min(widths)} to {max(widths)} numbers; embed all with one model"
        )
    with np.errstate(over="ignore"):  # too large for float32 is not finite
        rows = values.to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(column), *widths)
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
    if not (np.isfinite(norms) & (may_be_zero | (norms > 0))).all():
        raise DataError(f"{place} has an embedding that is zero or not finite; embed its text again")
    return rows / np.where(norms > 0, norms, np.inf)
