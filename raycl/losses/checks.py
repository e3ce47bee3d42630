"""What the losses ask of their input: each refusal says what is wrong, what came and what to do."""

import torch
from torch import Tensor

from raycl.errors import ConfigError


def checked_temperature(temperature: float | Tensor, rows: Tensor) -> Tensor:
    """Return the temperature as a 0-d tensor above 0, of the type and on the device of the rows."""
    if not isinstance(temperature, Tensor):
        _check_positive(temperature)
        return rows.new_full((), temperature)  # a copy of the number would make the host wait
    degrees = temperature
    if degrees.ndim != 0:
        raise ConfigError(
            f"the temperature is not one number: its shape is {list(degrees.shape)}; "
            "pass a float or a 0-d tensor"
        )
    _check_positive(degrees.item())
    return degrees.to(rows)


def _check_positive(temperature: float) -> None:
    if temperature <= 0:
        raise ConfigError(
            f"the temperature is not above 0: it is {temperature:g}; "
            "usual values lie between 0.01 and 1 (learn its logarithm, which cannot cross 0)"
        )


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
