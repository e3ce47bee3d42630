"""Labels: integers stay unchanged, class names are numbered in sorted order."""

import json
from collections.abc import Iterable
from decimal import Decimal
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raycl.data.ids import EXACT, is_missing
from raycl.errors import DataError

NO_LABEL = -1


def are_numbers(kind: pa.DataType) -> bool:
    """Whether a column holds numeric labels, which need no class names; they may be categories of pandas."""
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_integer(values) or pa.types.is_boolean(values)


def may_be_fractions(kind: pa.DataType) -> bool:
    """Whether a column holds floats or decimals, whose integers are labels; warehouses write all integers as decimals."""
    # Arrow has no functions for smaller decimals, which parquet files do not give either.
    return pa.types.is_floating(kind) or pa.types.is_decimal128(kind) or pa.types.is_decimal256(kind)


def inexact_label(column: pa.ChunkedArray | pa.Array) -> str | None:
    """Return a number that stands for no integer (a fraction, or 2^53 or more), or the type of text; None without them."""
    if not may_be_fractions(column.type):
        is_integer = are_numbers(column.type) or pa.types.is_null(column.type)
        return None if is_integer else str(column.type)
    values = column.cast(pa.float64(), safe=False).drop_null().to_numpy(zero_copy_only=False)
    inexact = values[~np.isnan(values) & ((values != np.trunc(values)) | (abs(values) >= EXACT))]
    return str(inexact[0]) if len(inexact) else None


def names_of_integers(schema: pa.Schema, column: str) -> tuple[str, ...] | None:
    """Return the names of a ``ClassLabel`` of Hugging Face's ``datasets``, whose labels are integers; None without names."""
    return _names_in((schema.metadata or {}).get(b"huggingface", b""), column)


@lru_cache(maxsize=8)  # thousands of files may have the same names of thousands of classes
def _names_in(metadata: bytes, column: str) -> tuple[str, ...] | None:
    try:
        feature = json.loads(metadata)["info"]["features"][column]
        return tuple(map(str, feature["names"])) if feature["_type"] == "ClassLabel" else None
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def check_label_names(names: Iterable[tuple[str, ...] | None], *, where: str) -> None:
    """Raise ``DataError`` if two parts of ``where`` give a number other names: its label would stand for two classes."""
    known: dict[int, str] = {}
    for number, name in (named for each in dict.fromkeys(names) for named in enumerate(each or ())):
        if known.setdefault(number, name) != name:
            raise DataError(
                f"label {number} is {known[number]} in one part of {where} and {name} in another; give all the same numbers, "
                "as align_labels_with_mapping of datasets does, or names in place of numbers"
            )


def class_names(columns: Iterable[pa.ChunkedArray | pa.Array]) -> tuple[str, ...]:
    """Return the sorted class names of all columns; a label's number is its index among them.

    A null, a NaN and an empty text are missing labels.

    Raises ``DataError`` for a name that is not UTF-8.
    """
    try:
        names = {
            name_of(name)
            for column in columns
            for name in distinct_labels(column).to_pylist()
            if not is_missing(name)
        }
    except UnicodeDecodeError as error:
        raise DataError(
            f"a label is not UTF-8 ({error.object!r}); write the names of classes in UTF-8, or number them"
        ) from None
    return tuple(sorted(names))


def name_of(label: Any) -> str:
    """Return the name of a label; a decimal has that of the float, such as 1.0 for 1.00."""
    return str(float(label) if isinstance(label, Decimal) else label)


def distinct_labels(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return the distinct values of a column, with a missing one if there is any."""
    if pa.types.is_string_view(column.type):  # Arrow would return a missing text as an empty one
        column = column.cast(pa.large_string())
    return column.unique()


def label_numbers(
    column: pa.ChunkedArray, classes: tuple[str, ...] | None, *, may_be_negative: bool = False
) -> NDArray[np.int64]:
    """Return labels as numbers, ``NO_LABEL`` where one is missing; ``classes`` is None for integers.

    A negative integer is a missing label, such as -1 or -100 in many data sets, unless it ``may_be_negative``. Raises
    ``DataError`` if ``classes`` is None and a label is not a 64-bit integer, or a float or decimal of one.
    """
    if classes is None:
        try:
            if pa.types.is_floating(column.type):
                numbers = pa.array(column.to_numpy(), from_pandas=True).cast(pa.int64())  # NaN is missing
            elif (
                are_numbers(column.type) or pa.types.is_null(column.type) or pa.types.is_decimal(column.type)
            ):
                numbers = column.cast(pa.int64())
            else:
                raise pa.ArrowInvalid
        except pa.ArrowInvalid:
            if are_numbers(column.type):
                largest = max(each for each in distinct_labels(column).to_pylist() if each is not None)
                raise DataError(
                    f"integer labels must be below 2^63, came {largest}; number the classes from 0, or give the labels as text"
                ) from None
            raise DataError(
                f"labels are integers in one part of the dataset, and {column.type} or beyond 64 bits in another; "
                "give integers or text in all parts"
            ) from None
        found = numbers.fill_null(NO_LABEL).to_numpy()
        return found if may_be_negative else np.maximum(found, NO_LABEL)
    index: dict[str | None, int] = {name: place for place, name in enumerate(classes)}
    names = (None if name is None else name_of(name) for name in column.to_pylist())
    return np.array([index.get(name, NO_LABEL) for name in names], np.int64)
