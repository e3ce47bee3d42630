"""Validation of the inputs of losses; errors name the problem, the value and the remedy."""

import math

import torch
from torch import Tensor

from raycl.errors import ConfigError
from raycl.losses.tiled import check_temperature


def checked_temperature(temperature: float | Tensor, rows: Tensor) -> Tensor:
    """Return the temperature as a 0-d tensor with the dtype and device of the rows.

    The value of a tensor is checked later, together with the other reads from its device; NaN passes there, since a
    run reports the loss of NaN.
    """
    if not isinstance(temperature, Tensor):
        if math.isnan(temperature):
            raise ConfigError("the temperature must be above 0, got nan")
        check_temperature(temperature)
        return rows.new_full((), temperature)  # copying a number to the device would block the host
    if temperature.ndim != 0:
        raise ConfigError(
            f"the temperature must be a scalar, got shape {list(temperature.shape)}; "
            "pass a float or a 0-d tensor"
        )
    return temperature.to(rows)


def check_pair(name: str, left: Tensor, right: Tensor) -> None:
    """Raise unless both tensors are [local_batch, dim] with the same shape and at least one row."""
    if left.ndim != 2 or left.shape != right.shape or len(left) == 0:
        raise ConfigError(
            f"{name} must be [local_batch, dim] of the same shape, got "
            f"{list(left.shape)} and {list(right.shape)}; pass one row per sample in each"
        )


def check_columns(name: str, columns: Tensor, rows: Tensor) -> None:
    """Raise unless the columns are [num_columns, dim] with the dim of the rows."""
    if columns.ndim != 2 or columns.shape[1] != rows.shape[1]:
        raise ConfigError(
            f"{name} must be [rows, dim] with the dim of the queries, got "
            f"{list(columns.shape)} for queries of {list(rows.shape)}; encode both to the same dimension"
        )


def check_offset(offset: int, num_rows: int, num_gathered: int) -> None:
    """Raise if the offset places this worker's rows outside the gathered rows."""
    if not 0 <= offset <= num_gathered - num_rows:
        raise ConfigError(
            f"this worker's rows lie outside the gathered rows: got offset {offset} with "
            f"{num_rows} rows for {num_gathered} gathered rows; "
            "pass the total number of rows of all lower ranks"
        )


def check_sample_id(sample_id: Tensor | None, rows: Tensor, name: str = "sample_id") -> None:
    """Raise unless there is one id per row."""
    if sample_id is not None and sample_id.shape != rows.shape[:1]:
        raise ConfigError(
            f"{name} does not match its rows: got {list(sample_id.shape)} ids for "
            f"{len(rows)} rows; pass one id per row"
        )


def checked_weight(weight: Tensor | None, rows: Tensor) -> Tensor | None:
    """Return the weights without gradient, in the precision of the rows; raise unless there is one per row."""
    if weight is not None and weight.shape != rows.shape[:1]:
        raise ConfigError(
            f"weight does not match its rows: got {list(weight.shape)} weights for {len(rows)} rows; pass one per row"
        )
    return None if weight is None else weight.detach().to(torch.promote_types(rows.dtype, torch.float32))


def check_not_given(name: str, value: Tensor | None, needed: str) -> None:
    """Raise if a tensor is given where the tensor that it requires is not."""
    if value is not None:
        raise ConfigError(f"{name} requires {needed}, got only {list(value.shape)} values; pass both")


def checked_ids(
    rows: tuple[str, Tensor | None], columns: tuple[str, Tensor | None], num_columns: int
) -> tuple[Tensor, Tensor] | None:
    """Return the ids of rows and columns, or None if neither is given; each argument includes its name."""
    row_ids, column_ids = rows[1], columns[1]
    if row_ids is None and column_ids is None:
        return None
    if row_ids is None or column_ids is None:
        absent = rows[0] if row_ids is None else columns[0]
        raise ConfigError(f"ids are missing: {absent} is None; pass both or neither")
    if column_ids.shape != (num_columns,):
        raise ConfigError(
            f"{columns[0]} does not match its rows: got {list(column_ids.shape)} ids for "
            f"{num_columns} rows; gather the ids in the same way as the rows"
        )
    return row_ids, column_ids


def checked_gathered(**sides: tuple[Tensor, Tensor | None]) -> list[Tensor]:
    """Return the rows of all workers for each side; this worker's rows if no side is gathered.

    ``sides`` are this worker's rows and the gathered ones, by the name of their argument. Raises unless the
    gathered rows have one shape and pass the gradient on to this worker's rows.
    """
    given = {name: gathered for name, (_, gathered) in sides.items() if gathered is not None}
    if not given:
        return [own for own, _ in sides.values()]
    if len(given) < len(sides):
        missing = next(name for name in sides if name not in given)
        raise ConfigError(f"only one side is gathered: {missing} is None; gather both or neither")
    dim, shapes = next(iter(sides.values()))[0].shape[1:], [each.shape for each in given.values()]
    if any(shape != shapes[0] or shape[1:] != dim for shape in shapes):
        found = " and ".join(str(list(shape)) for shape in shapes)
        raise ConfigError(
            f"{' and '.join(given)} must be [batch, {dim[0]}] of one batch, got {found}; "
            "gather the rows of every worker"
        )
    for name, (own, _) in sides.items():
        if torch.is_grad_enabled() and own.requires_grad and not given[name].requires_grad:
            raise ConfigError(
                f"{name} passes no gradient on to this worker's rows, which require one; "
                "gather with raycl.distributed.gather"
            )
    return list(given.values())


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
    """Return the ids of the queries and keys of all pairs, or None if no ids are given.

    Args:
        sample_id: local and gathered ids that apply to both sides; None if the loss does not accept them.
        query_id: local and gathered ids of the queries.
        key_id: local and gathered ids of the keys.
        negative_id: ids of the negatives.
        own: positions of this worker's pairs among the gathered pairs.
        batch: number of gathered pairs; None without gathered rows.
        in_batch: whether keys are gathered; ids can be gathered in either case.
        num_negatives: None without negatives.
    """
    given = {"query_id": query_id, "key_id": key_id}
    names = [name for name, ids in given.items() if ids != (None, None)]
    if names and sample_id is not None and sample_id != (None, None):
        raise ConfigError(
            f"the pairs have two kinds of ids: got sample_id with {' and '.join(names)}; "
            "pass sample_id if a pair is one sample, query_id and key_id otherwise"
        )
    sides = list(given.items()) if names or sample_id is None else [("sample_id", sample_id)] * 2
    local_batch = own.stop - own.start
    if not in_batch:
        batch = next((ids[1].numel() for _, ids in sides if ids[1] is not None), None)
        check_offset(own.start, local_batch, local_batch if batch is None else batch)
    queries, keys = (_checked_side(name, *ids, local_batch, batch) for name, ids in sides)
    if num_negatives is None:
        check_not_given("negative_id", negative_id, "negatives")
    else:
        name, ids = sides[1]
        checked_ids((name, ids[0]), ("negative_id", negative_id), num_negatives)
    if queries is None and keys is None:
        return None
    # If only one side has ids, they identify the pairs: each row of the other side is distinct.
    queries, keys = keys if queries is None else queries, queries if keys is None else keys
    assert queries is not None, "one side has ids"
    assert keys is not None, "one side has ids"
    return queries, keys


def _checked_side(
    name: str, own: Tensor | None, gathered: Tensor | None, local_batch: int, batch: int | None
) -> Tensor | None:
    """Return the ids of all pairs of the batch on one side, if given."""
    if own is not None and own.shape != (local_batch,):
        raise ConfigError(
            f"{name} does not match its rows: got {list(own.shape)} ids for {local_batch} rows; "
            "pass one id per row"
        )
    if batch is None:
        check_not_given(f"gathered_{name}", gathered, "gathered_key")
        return own
    ids = checked_ids((name, own), (f"gathered_{name}", gathered), batch)
    return None if ids is None else ids[1]
