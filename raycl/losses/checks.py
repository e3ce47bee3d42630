"""Checks of the input of losses: each error names the problem, the value and the remedy."""

import torch
from torch import Tensor

from raycl.errors import ConfigError
from raycl.losses.tiled import check_temperature


def checked_temperature(temperature: float | Tensor, rows: Tensor) -> Tensor:
    """Return the temperature as a 0-d tensor of the type and on the device of the rows.

    A tensor is checked later, with all else that is read from its device.
    """
    if not isinstance(temperature, Tensor):
        check_temperature(temperature)
        return rows.new_full((), temperature)  # a copy of the number would make the host wait
    if temperature.ndim != 0:
        raise ConfigError(
            f"the temperature is not one number: its shape is {list(temperature.shape)}; "
            "pass a float or a 0-d tensor"
        )
    return temperature.to(rows)


def check_pair(name: str, left: Tensor, right: Tensor) -> None:
    """Refuse anything but two tensors [local_batch, dim] of one shape, with a row at least."""
    if left.ndim != 2 or left.shape != right.shape or len(left) == 0:
        raise ConfigError(
            f"{name} are not [local_batch, dim] of one shape: they came as "
            f"{list(left.shape)} and {list(right.shape)}; pass one row per sample in each"
        )


def check_columns(name: str, columns: Tensor, rows: Tensor) -> None:
    """Refuse columns that are not [num_columns, dim], with the dim of the rows."""
    if columns.ndim != 2 or columns.shape[1] != rows.shape[1]:
        raise ConfigError(
            f"{name} are not [rows, dim] with the dim of the queries: they came as "
            f"{list(columns.shape)} for queries of {list(rows.shape)}; take both from one tower"
        )


def check_offset(offset: int, num_rows: int, num_gathered: int) -> None:
    """Refuse an offset with which this worker's rows are not among the gathered ones."""
    if not 0 <= offset <= num_gathered - num_rows:
        raise ConfigError(
            f"this worker's rows lie outside the gathered ones: offset {offset} with "
            f"{num_rows} rows came for {num_gathered} gathered rows; "
            "pass the number of rows of all lower ranks"
        )


def check_sample_id(sample_id: Tensor | None, rows: Tensor) -> None:
    """Refuse ids that are not one per row."""
    if sample_id is not None and sample_id.shape != rows.shape[:1]:
        raise ConfigError(
            f"the sample ids do not match the rows: {list(sample_id.shape)} ids came for "
            f"{len(rows)} rows; pass one id per row"
        )


def check_companion(name: str, value: Tensor | None, needed: str, companion: Tensor | None) -> None:
    """Refuse a tensor that says nothing without another."""
    if value is not None and companion is None:
        raise ConfigError(f"{name} came without {needed}: {list(value.shape)} ids of no rows; pass both")


def checked_ids(
    rows: tuple[str, Tensor | None], columns: tuple[str, Tensor | None], num_columns: int
) -> tuple[Tensor, Tensor] | None:
    """Return the ids of rows and columns, each named, or None where neither is given."""
    row_ids, column_ids = rows[1], columns[1]
    if row_ids is None and column_ids is None:
        return None
    if row_ids is None or column_ids is None:
        absent = rows[0] if row_ids is None else columns[0]
        raise ConfigError(f"half of the ids is missing: {absent} is None; pass both or neither")
    if column_ids.shape != (num_columns,):
        raise ConfigError(
            f"{columns[0]} does not match its rows: {list(column_ids.shape)} ids came for "
            f"{num_columns} rows; gather the ids as the rows"
        )
    return row_ids, column_ids


def check_passes_gradient(name: str, own: Tensor, gathered: Tensor) -> None:
    """Refuse gathered rows that would keep the gradient from this worker's own, which are read from them."""
    if torch.is_grad_enabled() and own.requires_grad and not gathered.requires_grad:
        raise ConfigError(
            f"{name} would get no gradient: it requires one, but gathered_{name}, from which it is "
            "read, came without; gather it by raycl.distributed.gather"
        )


def check_gathered(name: str, own: Tensor, gathered: Tensor) -> Tensor:
    """Return the gathered rows, which must have the dim of this worker's and pass on their gradient."""
    check_columns(f"the rows of gathered_{name}", gathered, own)
    check_passes_gradient(name, own, gathered)
    return gathered


def checked_pair_ids(
    *,
    sample_id: tuple[Tensor | None, Tensor | None] | None,
    query_id: tuple[Tensor | None, Tensor | None],
    key_id: tuple[Tensor | None, Tensor | None],
    negative_id: Tensor | None,
    own: slice,
    batch: int | None,
    in_batch: bool,
    num_negatives: int | None,
) -> tuple[Tensor, Tensor] | None:
    """Return the ids of the queries and of the keys of all pairs, or None where none came.

    Args:
        sample_id: this worker's and the gathered ids, for both sides at once; None if the loss takes none.
        query_id: this worker's and the gathered ids of queries.
        key_id: the same of keys.
        negative_id: the ids of the negatives.
        own: the place of this worker's pairs among the gathered ones.
        batch: the number of gathered pairs, None without.
        in_batch: whether keys are gathered; without, ids may be.
        num_negatives: None without negatives.
    """
    given = {"query_id": query_id, "key_id": key_id}
    names = [name for name, ids in given.items() if ids != (None, None)]
    if names and sample_id is not None and sample_id != (None, None):
        raise ConfigError(
            f"the pairs have two kinds of ids: sample_id came beside {' and '.join(names)}; "
            "pass sample_id where a pair is one sample, query_id and key_id otherwise"
        )
    sides = list(given.items()) if names or sample_id is None else [("sample_id", sample_id)] * 2
    local_batch = own.stop - own.start
    if not in_batch:
        batch = next((ids[1].numel() for _, ids in sides if ids[1] is not None), None)
        check_offset(own.start, local_batch, local_batch if batch is None else batch)
    queries, keys = (_checked_side(name, *ids, local_batch, batch) for name, ids in sides)
    if num_negatives is None:
        check_companion("negative_id", negative_id, "negatives", None)
    else:
        name, ids = sides[1]
        checked_ids((name, ids[0]), ("negative_id", negative_id), num_negatives)
    if queries is None and keys is None:
        return None
    # Ids of one side identify the pairs: without ids every query, or every key, counts as another.
    queries, keys = keys if queries is None else queries, queries if keys is None else keys
    assert queries is not None, "one side has ids"
    assert keys is not None, "one side has ids"
    return queries, keys


def _checked_side(
    name: str, own: Tensor | None, gathered: Tensor | None, local_batch: int, batch: int | None
) -> Tensor | None:
    """Return the ids of all pairs of the batch on one side, if they came."""
    if own is not None and own.shape != (local_batch,):
        raise ConfigError(
            f"{name} does not match its rows: {list(own.shape)} ids came for {local_batch} rows; "
            "pass one id per row"
        )
    if batch is None:
        check_companion(f"gathered_{name}", gathered, "gathered_key", None)
        return own
    ids = checked_ids((name, own), (f"gathered_{name}", gathered), batch)
    return None if ids is None else ids[1]
